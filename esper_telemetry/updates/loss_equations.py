"""Checks of the losses and of the minibatches of a sampled update: the trainer's claims against its own rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.core.equations.equation import UNCHECKED_FACT
from esper_telemetry.events import MinibatchesEnd, RolloutEnd
from esper_telemetry.metrics.integrity.equations import EquationCheck, unchecked
from esper_telemetry.metrics.integrity.losses.entropy_loss import ENTROPY_LOSS, GAUSSIAN_ENTROPY, check_entropy
from esper_telemetry.metrics.integrity.losses.losses import check_total_loss
from esper_telemetry.metrics.integrity.losses.minibatches import (
    LOG_RATIOS,
    MINIBATCHES,
    check_log_ratios,
    check_minibatches,
)
from esper_telemetry.metrics.integrity.losses.policy_loss import check_policy_loss
from esper_telemetry.metrics.integrity.losses.value_loss import check_value_loss
from esper_telemetry.updates.containment import Measurement
from esper_telemetry.updates.data import UpdateData
from esper_telemetry.updates.target_equations import certain

MAX_LOG_PROB_ERROR = 1e-3
"""Difference up to which two log-probabilities are the same, in nats, in single precision."""

RECURRENT = ("lstm", "gru")
"""Policies whose minibatches hold whole sequences, by the fact `policy`."""


class LossClaims(NamedTuple):
    """Losses that a trainer computed, and what they were computed from.

    Attributes:
        batches: minibatches with R rows.
        rollout: None where the source does not give it.
        raw_advantages: before normalisation, [R]; None where they are not known.
        weights: of the losses `value` and `entropy`, as far as they are known.
        facts: of the run.
    """

    batches: MinibatchesEnd
    rollout: RolloutEnd | None
    raw_advantages: Tensor | None
    weights: Mapping[str, float]
    facts: Mapping[str, Any]

    def claim(self, name: str) -> Tensor | None:
        """Return the losses [M] of that name; None unless there is one for each minibatch."""
        losses = self.batches.losses.get(name)
        return losses if losses is not None and len(losses) == len(self.batches.counts) else None

    def of_rows(self, column: Tensor) -> Tensor | None:
        """Return a column of the rollout [T, B, ...] in the rows of the minibatches [R, ...]; None where these are not known."""
        rows, rollout = self.batches.rows, self.rollout
        fits = rows is not None and rollout is not None and int(rows.max()) < rollout.rewards.numel()
        return column.flatten(0, 1)[rows] if fits else None

    @property
    def bonus(self) -> Tensor | None:
        """Entropy losses times their weight, [M]."""
        entropy, weight = self.claim("entropy"), self.weights.get("entropy")
        return None if entropy is None or not weight else weight * entropy

    def log_probs(self) -> Tensor | None:
        """Return the log-probabilities of the actions now [R], by those at collection and the ratio."""
        stored = None if self.rollout is None else self.of_rows(self.rollout.log_probs)
        return None if stored is None else stored + self.batches.log_ratio

    def chosen_log_probs(self) -> Tensor | None:
        """Return the same [R] by the distributions of the minibatches; None where these or an action are not known."""
        batches, rollout = self.batches, self.rollout
        if rollout is None or not set(batches.log_std) <= set(batches.means):
            return None
        parts = []
        for head in (*batches.logits, *batches.log_std):
            actions = self.of_rows(rollout.actions[head]) if head in rollout.actions else None
            if actions is None:
                return None
            if head in batches.logits:
                chosen = actions.long().reshape(-1, 1)
                part = batches.logits[head].double().log_softmax(-1).gather(-1, chosen).squeeze(-1)
            else:
                log_std = batches.log_std[head].double()
                distance = (actions.reshape(log_std.shape) - batches.means[head]) / log_std.exp()
                part = (0.5 - 0.5 * distance.square() - log_std - GAUSSIAN_ENTROPY).sum(-1)
            parts.append(torch.where(batches.relevance[head], part, 0.0) if head in batches.relevance else part)
        return torch.stack(parts).sum(0) if parts else None


def loss_checks(update: UpdateData, facts: Mapping[str, Any]) -> Iterator[Measurement]:
    """Yield the checks of the losses that the trainer computed, and of its minibatches; `facts` are those of the run."""
    batches = update.minibatches
    if batches is None:
        return
    known = {name: facts.get(f"{name}_coef") for name in ("value", "entropy")}
    now = {} if update.progress is None else update.progress.end.coefficients
    claims = LossClaims(
        batches=batches,
        rollout=update.rollout,
        raw_advantages=None if update.collected is None else update.collected.advantages,
        weights={**{name: weight for name, weight in known.items() if weight is not None}, **now},
        facts=facts,
    )
    unshown = facts.get(UNCHECKED_FACT) or {}
    checks = {"policy": _policy_loss, "value": _value_loss, "entropy": _entropy_loss, "total": _total_loss}
    for name, check in checks.items():
        if claims.claim(name) is not None and f"{name}_loss" not in unshown and _has_inputs(name, claims):
            yield partial(certain, facts, partial(check, claims))
    if update.rollout is not None and batches.rows is not None and LOG_RATIOS.name not in unshown:
        yield partial(_log_ratios, claims)
    if update.rollout is not None and batches.rows is not None and MINIBATCHES.name not in unshown:
        shuffled = update.context.memory is None and facts.get("policy") not in RECURRENT
        # an exception, a limit on the KL divergence, or a rule of the program's own may end an update
        ends_early = update.progress is None or facts.get("target_kl") is not None or facts.get("num_epochs") != 1
        yield partial(_minibatches, batches, update.rollout, shuffled=shuffled, ends_early=ends_early)


def _has_inputs(name: str, claims: LossClaims) -> bool:
    batches = claims.batches
    terms_are_there = claims.claim("policy") is not None and claims.claim("value") is not None
    weighted = claims.weights.get("value") is not None and claims.weights.get("entropy") is not None
    available = {
        "policy": claims.facts.get("clip") is not None,
        "value": batches.values is not None and batches.returns is not None,
        "entropy": bool(batches.logits or batches.log_std),
        "total": terms_are_there and weighted and (claims.bonus is not None or not claims.weights.get("entropy")),
    }
    return available[name]


def _log_ratios(claims: LossClaims) -> EquationCheck:
    """Compare with the recorded distributions, where these give the stored log-probabilities in the first minibatch, before any step."""
    batches, rollout = claims.batches, claims.rollout
    chosen = claims.chosen_log_probs()
    stored = None if rollout is None else claims.of_rows(rollout.log_probs)
    if rollout is None or chosen is None or stored is None or batches.rows is None:
        return unchecked(LOG_RATIOS, "the trainer does not show the distributions and the actions of the minibatches")
    first = slice(batches.counts[0])
    if float((chosen - stored)[first].abs().max()) > MAX_LOG_PROB_ERROR * max(1.0, float(stored.abs().max())):
        return unchecked(LOG_RATIOS, "the recorded distributions do not give the stored log-probabilities")
    size = rollout.log_probs.numel()
    places = torch.arange(len(chosen), device=chosen.device) % size
    return check_log_ratios(
        batches.log_ratio,
        chosen,
        stored,
        valid=batches.valid,
        in_order=rollout.log_probs.flatten()[places],
        swapped=rollout.log_probs.T.flatten()[batches.rows],
        precision=claims.facts.get("precision"),
    )


def _policy_loss(claims: LossClaims) -> EquationCheck:
    batches, facts = claims.batches, claims.facts
    return check_policy_loss(
        _required(claims.claim("policy")),
        batches.log_ratio,
        batches.advantages,
        clip=facts["clip"],
        valid=batches.valid,
        counts=batches.counts,
        raw_advantages=claims.raw_advantages if facts.get("normalize_advantages") else None,
        log_probs=claims.log_probs(),
        head_log_ratios=tuple(batches.head_log_ratios.values()) if len(batches.head_log_ratios) > 1 else (),
        bonus=claims.bonus,
        precision=facts.get("precision"),
    )


def _value_loss(claims: LossClaims) -> EquationCheck:
    batches, facts = claims.batches, claims.facts
    return check_value_loss(
        _required(claims.claim("value")),
        _required(batches.values),
        _required(batches.returns),
        old_values=batches.old_values,
        clip_value=None if batches.old_values is None else facts.get("clip_value"),
        valid=batches.valid,
        counts=batches.counts,
        advantages=batches.advantages,
        raw_advantages=claims.raw_advantages,
        weight=claims.weights.get("value"),
        clip=facts.get("clip"),
        precision=facts.get("precision"),
    )


def _entropy_loss(claims: LossClaims) -> EquationCheck:
    """Distributions that do not give the log-probabilities of the ratio need not be all of the policy, or are those before a squash: then
    a difference without an explanation tells nothing.
    """
    batches = claims.batches
    chosen, trained = claims.chosen_log_probs(), claims.log_probs()
    differs = chosen is None or trained is None or float((chosen - trained).abs().max()) > MAX_LOG_PROB_ERROR
    check = check_entropy(
        _required(claims.claim("entropy")),
        logits=batches.logits,
        log_std=batches.log_std,
        relevance=batches.relevance,
        valid=batches.valid,
        counts=batches.counts,
        chosen_log_probs=chosen,
        log_probs=trained if differs else None,
        weight=claims.weights.get("entropy"),
        precision=claims.facts.get("precision"),
    )
    if differs and not (check.matches or check.explanations):
        return unchecked(ENTROPY_LOSS, "the recorded distributions do not give the log-probabilities of the ratio")
    return check


def _total_loss(claims: LossClaims) -> EquationCheck:
    """Check the sum of the terms; where it is another, they may have their weights already, or the bonus with them."""
    policy, value, entropy = (claims.claim(name) for name in ("policy", "value", "entropy"))
    weights = {f"{name}_coef": float(claims.weights[name]) for name in ("value", "entropy")}

    def check(*terms: Tensor | None) -> EquationCheck:
        given = terms if weights["entropy_coef"] else terms[:2]
        total, first, second = _required(claims.claim("total")), _required(terms[0]), _required(terms[1])
        return check_total_loss(total, first, second, *given[2:], **weights, precision=claims.facts.get("precision"))

    result = check(policy, value, entropy)
    if result.matches and result.error is not None:
        return result
    if claims.facts.get("clip") is not None and _is_variant(_policy_loss(claims), "with_entropy"):
        policy = _required(policy) - _required(claims.bonus)
    if claims.batches.values is not None and _is_variant(_value_loss(claims), "weighted"):
        value = _required(value) / weights["value_coef"]
    if (claims.batches.logits or claims.batches.log_std) and _is_variant(_entropy_loss(claims), "weighted"):
        entropy = _required(entropy) / weights["entropy_coef"]
    return check(policy, value, entropy)


def _is_variant(check: EquationCheck, name: str) -> bool:
    return any(one.hypothesis.name == name for one in check.explanations)


def _required(tensor: Tensor | None) -> Tensor:
    """Return a tensor that is there: `_has_inputs` has seen it."""
    assert tensor is not None
    return tensor


def _minibatches(batches: MinibatchesEnd, rollout: RolloutEnd, *, shuffled: bool, ends_early: bool) -> EquationCheck:
    """Compare the rows of each pass with a permutation; a source that does not count passes gives them all as one.

    An only pass without all rows may be one that ended early, unless some come again.
    """
    rows, size = _required(batches.rows), rollout.rewards.numel()
    if int(rows.max()) >= size:
        return unchecked(MINIBATCHES, "its rows are not those of the rollout")
    count = size if rollout.valid is None else int(rollout.valid.sum())
    passes: dict[int, list[Tensor]] = {}
    uncounted = len(set(batches.epochs)) == 1 and len(rows) > count
    if uncounted and len(rows) % count:
        return unchecked(MINIBATCHES, "the trainer does not count its passes")
    row_count = 0
    for epoch, part in zip(batches.epochs, rows.split(list(batches.counts)), strict=True):
        passes.setdefault(row_count // count if uncounted else epoch, []).append(part)
        row_count += len(part)
    if len(passes) == 1 and len(rows) < count and ends_early and len(rows.unique()) == len(rows):
        return unchecked(MINIBATCHES, "training stopped in its only pass")
    return check_minibatches(
        list(passes.values()),
        size,
        environments=rollout.rewards.shape[1],
        valid=rollout.valid,
        shuffled=shuffled,
    )
