"""Compute the policy's metrics from the inputs of a reference case."""

import torch

from esper_telemetry.alarms.rules.integrity_alarms import ratio_init_bounds
from esper_telemetry.history.critic import ENTROPY_WINDOW, entropy_rate, largest_shift
from esper_telemetry.metrics.actions import action_shift, greedy_agreement, log_prob_stats
from esper_telemetry.metrics.entropy import entropy_rows, head_entropy, policy_entropy
from esper_telemetry.metrics.kl import categorical_kl, exact_kl
from esper_telemetry.metrics.losses import entropy_gradient
from esper_telemetry.metrics.ratio import head_ratio_diagnostics, joint_log_ratio, ratio_diagnostics
from vector_adapters.inputs import Inputs, Values, at_any_step, by_head, finished, floats, mask, masks, numbers, of_keys, padded


@of_keys(
    "policy/",
    "kl kl_k1 kl_k2 kl_rev kl_nonfinite kl_max kl_first kl_last kl_epoch_slope logratio/mean logratio/std logratio/absmax",
    "ratio/mean ratio/std ratio/min ratio/max ratio/p01 ratio/p99 clip_frac clip_frac_pos clip_frac_neg clip_frac_active",
    "ess_frac ess_frac_min surrogate_gain",
)
def ratio(inputs: Inputs) -> Values:
    """P1, P3, P4, P6, P13, I1: one minibatch, the minibatches of an update, shards, or heads."""
    if "epoch_logratio" in inputs:
        return _update(inputs)
    if "shard_logratio" in inputs:
        rows, real = padded(inputs["shard_logratio"])
        shards = len(rows)
        return finished(ratio_diagnostics(rows, valid=real, dim=-1), range(shards), [0] * shards)
    clip = inputs.get("clip_eps")
    if "head_logratio" in inputs:
        joint = joint_log_ratio(by_head(inputs, "head_logratio"), masks(inputs, "head_mask"))
        return at_any_step(ratio_diagnostics(joint, clip=clip))
    advantages = inputs.get("advantages", inputs.get("advantages_norm"))
    group = ratio_diagnostics(
        floats(inputs["logratio"], inputs.get("dtype", "float64")),
        None if advantages is None else floats(advantages),
        clip=clip,
        valid=mask(inputs),
    )
    return at_any_step(group)


def _update(inputs: Inputs) -> Values:
    log_ratio, real = padded([row for epoch in inputs["epoch_logratio"] for row in epoch])
    advantages, _ = padded([row for epoch in inputs["epoch_advantages"] for row in epoch])
    epochs = [index for index, epoch in enumerate(inputs["epoch_logratio"]) for _ in epoch]
    group = ratio_diagnostics(log_ratio, advantages, clip=inputs["clip_eps"], valid=real, dim=-1)
    return finished(group, range(len(epochs)), epochs)


@of_keys("integrity/ratio_init")
def ratio_init(inputs: Inputs) -> Values:
    """I1 with its grade."""
    values = ratio(inputs)
    severity = ratio_init_bounds(inputs["precision"]).severity(values["integrity/ratio_init"])
    return {**values, "aux:grade": {0.0: "ok", 0.5: "warn", 1.0: "crit"}[severity]}


@of_keys("policy/head/{h}/", "kl logratio/std ratio/min ratio/max clip_frac blame")
def heads(inputs: Inputs) -> Values:
    group = head_ratio_diagnostics(by_head(inputs, "head_logratio"), relevant=masks(inputs, "head_mask"), clip=inputs["clip_eps"])
    return at_any_step(group)


@of_keys(
    "policy/",
    "entropy entropy_norm perplexity entropy_marginal entropy_marginal_norm action_mi head/{h}/entropy head/{h}/entropy_norm",
    "head/{h}/decision_frac",
)
def entropy(inputs: Inputs) -> Values:
    """P7 and P8: of one head's logits or probabilities, or of several heads."""
    if "head_logits" in inputs:
        logits, allowed = by_head(inputs, "head_logits"), masks(inputs, "head_action_mask")
    else:
        head = inputs.get("head", "action")
        scores = floats(inputs["logits"]) if "logits" in inputs else floats(inputs["probs"]).log()
        logits, allowed = {head: scores}, {head: torch.tensor(inputs["action_mask"]).bool()}
    rows = entropy_rows(logits, allowed, relevant=masks(inputs, "head_mask"))
    values = {**policy_entropy(rows).values(), **head_entropy(rows).values()}
    return {**values, "aux:rows": next(iter(rows.values())).entropy.tolist()}


@of_keys("policy/entropy_rate")
def rate(inputs: Inputs) -> Values:
    """P7, over updates."""
    assert inputs["window"] == ENTROPY_WINDOW
    return entropy_rate(numbers(inputs["x"])).values()


@of_keys("policy/", "head/{h}/action_shift_js action_shift_js")
def shift(inputs: Inputs) -> Values:
    now = inputs.get("head_counts") or {inputs["head"]: inputs["counts"]}
    before = inputs.get("head_counts_prev") or {inputs["head"]: inputs["counts_prev"]}
    values: Values = {}
    for head, counts in now.items():
        values |= action_shift(head, floats(counts), floats(before[head])).values()
    return {**values, **largest_shift(values.values()).values()}


@of_keys("policy/kl_exact")
def whole_distributions(inputs: Inputs) -> Values:
    rows = categorical_kl(floats(inputs["p_old"]).log(), floats(inputs["p_new"]).log())
    return exact_kl({"action": rows}, valid=mask(inputs)).values()


@of_keys("policy/logp/min")
def chosen(inputs: Inputs) -> Values:
    return log_prob_stats(floats(inputs["logp_old"]), valid=mask(inputs)).values()


@of_keys("policy/greedy_agreement")
def favourites(inputs: Inputs) -> Values:
    old, new = {"action": floats(inputs["logits_old"])}, {"action": floats(inputs["logits"])}
    return greedy_agreement(old, new, {"action": torch.tensor(inputs["action_mask"]).bool()}).values()


@of_keys("policy/entropy_grad_ratio")
def bonus(inputs: Inputs) -> Values:
    pull = floats(inputs["grad_policy_logits"])
    return entropy_gradient(floats(inputs["logits"]), pull, entropy_coef=inputs["ent_coef"]).values()
