"""Which metric functions see what of an update.

What is measured of minibatches only where their details are kept.

Whether anything in a whole update is NaN or infinite.

Large networks: the numbers of single layers are left out of records where there are too many of them.

What whole gradients and the optimizer's state tell of an update that was looked at closely.

What it says of an update that the policy was shown its rollout once more, before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import declared, label_field, segment
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Mean, Sum
from esper_telemetry.events import Activations, Copy, Outputs, PolicyReplay
from esper_telemetry.lab.morphogenesis.metrics.each import each_stats
from esper_telemetry.lab.morphogenesis.metrics.environments import environment_stats
from esper_telemetry.lab.morphogenesis.metrics.hosts import host_stats
from esper_telemetry.lab.morphogenesis.metrics.seeds import gate_stats as growth_gates
from esper_telemetry.lab.morphogenesis.metrics.seeds import seed_stats
from esper_telemetry.metrics.actions import (
    action_counts,
    action_shift,
    gaussian_action_shift,
    gaussian_stats,
    greedy_agreement,
    log_prob_stats,
)
from esper_telemetry.metrics.advantages import advantage_stats, flips_in_order, normalized_advantage_stats
from esper_telemetry.metrics.entropy import PolicyEntropy, entropy_rows, head_entropy, policy_entropy
from esper_telemetry.metrics.episodes import episode_ends, episode_stats
from esper_telemetry.metrics.gradients.concentration import concentration, gradient_decades, layer_concentration
from esper_telemetry.metrics.gradients.directions import (
    LayerZeros,
    gradient_signs,
    gradient_zeros,
    minibatch_alignment,
    shard_noise,
    successive_alignment,
)
from esper_telemetry.metrics.gradients.interference import (
    bonus_gradient,
    group_interference,
    interference,
    parameter_interference,
)
from esper_telemetry.metrics.gradients.norms import (
    LayerGradients,
    coefficients,
    gradient_norms,
    head_gradients,
    value_gradient,
)
from esper_telemetry.metrics.integrity import (
    Numerics,
    buffer_age,
    gae_identity,
    mask_violation,
    nonfinite_count,
    rows_repeated,
)
from esper_telemetry.metrics.kl import categorical_kl, exact_kl, gaussian_kl, head_exact_kl, kl_after_update
from esper_telemetry.metrics.losses import LossTerms, entropy_gradients, loss_terms, loss_weights
from esper_telemetry.metrics.lstm.gates import GateGroups, Gates, gate_stats, gates_between
from esper_telemetry.metrics.lstm.sequences import bptt_stats, bucket_width, cell_growth, memory_use
from esper_telemetry.metrics.lstm.states import first_staleness, reset_stats, state_staleness, state_stats
from esper_telemetry.metrics.optimizer import (
    AdamMemory,
    LayerSteps,
    LearningRate,
    adam_steps,
    state_reset,
    weight_growth,
)
from esper_telemetry.metrics.performance import SamplingPeriod, update_performance
from esper_telemetry.metrics.ratio import head_ratio_diagnostics, ratio_diagnostics
from esper_telemetry.metrics.representation import (
    capacity_loss,
    excess_ratio,
    feature_drift,
    feature_norm,
    feature_rank,
    layer_responses,
    unit_activity,
)
from esper_telemetry.metrics.rollout import (
    NormalizerClipping,
    constant_observations,
    constant_rows,
    normalizer_drift,
    return_stats,
    reward_stats,
)
from esper_telemetry.metrics.values import (
    ending_bias,
    monte_carlo_fit,
    td_errors,
    terminal_error,
    value_fit,
    value_movement,
)
from esper_telemetry.updates.containment import Measurement
from esper_telemetry.updates.data import (
    ActionChoices,
    Actions,
    BackwardGradients,
    Details,
    Episodes,
    GradientSample,
    Growth,
    Minibatches,
    Normalizer,
    RecurrentState,
    RolloutData,
    SampledActions,
    Snapshot,
    TrainingProgress,
    in_grid,
)


def detailed(
    minibatches: Minibatches, facts: Mapping[str, Any], coefficients: Mapping[str, float]
) -> Iterator[Measurement]:
    """How far the critic moved, how far the policy moved over all actions, and whether the entropy bonus steers it."""
    details, valid, relevant = minibatches.details, minibatches.valid, minibatches.relevance
    if details is None:
        return
    critic = (details.values, details.old_values, details.returns)
    yield partial(value_movement, *critic, clip=facts.get("clip_value"), valid=valid, dim=-1)
    rows = _kl_rows(minibatches, details)
    if rows:
        yield partial(exact_kl, rows, relevant=relevant, valid=valid, dim=-1)
        yield partial(head_exact_kl, rows, relevant=relevant, valid=valid, dim=-1)
    if details.actions:
        yield from _entropy_gradient(minibatches, details.actions, facts, coefficients)


def _kl_rows(minibatches: Minibatches, details: Details) -> dict[str, Tensor]:
    """KL(old‖new) of every head whose old distribution is known, [M, N] each."""
    rows = {head: categorical_kl(old, minibatches.logits[head]) for head, old in details.old_logits.items()}
    for head, old_std in details.old_log_std.items():
        rows[head] = gaussian_kl(details.old_means[head], old_std, details.means[head], minibatches.log_std[head])
    return rows


def _entropy_gradient(
    minibatches: Minibatches, actions: Mapping[str, Tensor], facts: Mapping[str, Any], coefficients: Mapping[str, float]
) -> Iterator[Measurement]:
    clip, coefficient = facts.get("clip"), coefficients.get("entropy", facts.get("entropy_coef"))
    if clip is not None and coefficient is not None:
        yield partial(
            entropy_gradients,
            minibatches.logits,
            actions,
            minibatches.log_ratio,
            minibatches.advantages,
            clip=clip,
            entropy_coef=coefficient,
            relevant=minibatches.relevance,
            valid=minibatches.valid,
        )


def nonfinite_in(snapshot: Snapshot) -> Numerics:
    """Entries that are not finite in the rollout, the forward passes, the losses, the gradients and, where kept, the weights.

    Of gradients whose norms alone are known, each tensor counts once per step.
    """
    total: Tensor | float = 0.0
    for tensors, valid in _parts(snapshot):
        total = total + nonfinite_count(tensors, valid=valid).nonfinite.value
    return Numerics(Sum(total))


def _parts(snapshot: Snapshot) -> Iterator[tuple[list[Tensor], Tensor | None]]:
    """Tensors, with the rows of them that count."""
    rollout, minibatches, sample = snapshot.rollout, snapshot.minibatches, snapshot.sample
    if rollout is not None:
        yield [rollout.rewards, rollout.log_probs, rollout.values, rollout.advantages], rollout.valid
    if minibatches is not None:
        yield [minibatches.log_ratio, minibatches.advantages], minibatches.valid
        yield list(minibatches.losses.values()), None
    yield [part.norms for part in snapshot.gradients], None
    if sample is not None and sample.states:
        yield [sample.states[-1].weights], None


MOST_LAYERS = 64
"""Parameter tensors of which NORMAL still reports each; DEBUG reports all."""


def _layers_ends(groups: Iterable[type]) -> Iterator[tuple[str, str]]:
    """How the keys of single layers begin and end."""
    for group in groups:
        for _, metric in declared(group):
            before, _, after = metric.key.partition(f"{{{label_field(group)}}}")
            yield before, after


ENDS = tuple(_layers_ends((LayerGradients, LayerZeros, LayerSteps)))


def without_many_layers(values: Mapping[str, float]) -> dict[str, float]:
    """The values, without those of single layers where a network has more than `MOST_LAYERS`."""
    for before, after in ENDS:
        keys = [key for key in values if key.startswith(before) and key.endswith(after)]
        if len(keys) > MOST_LAYERS:
            values = {key: value for key, value in values.items() if key not in set(keys)}
    return dict(values)


def gradient_sample(sample: GradientSample, level: Level) -> Iterator[Measurement]:
    """Everything that is measured of a sample."""
    if sample.minibatches:
        yield from _first_minibatch(sample, level)
    if len(sample.minibatches) > 1:
        yield partial(minibatch_alignment, torch.stack(sample.minibatches))
    if len(sample.shards) > 1:
        yield partial(shard_noise, torch.stack(sample.shards), sample.samples)
    if sample.actor is not None and sample.critic is not None:
        yield partial(parameter_interference, [sample.actor], [sample.critic])
    if sample.states:
        yield from _optimizer(sample)


def _first_minibatch(sample: GradientSample, level: Level) -> Iterator[Measurement]:
    """How the entries of the gradient are spread over the network."""
    gradients = sample.minibatches[0].split(list(sample.numels))
    yield partial(gradient_zeros, gradients, sample.names)
    yield partial(gradient_signs, gradients)
    yield partial(concentration, gradients)
    if level >= Level.DEBUG:
        yield partial(gradient_decades, gradients, sample.names)


def _optimizer(sample: GradientSample) -> Iterator[Measurement]:
    """What the optimizer made of the gradients; its first step also tells whether the update goes on where the last one went."""
    first = sample.states[0]
    for state in sample.states:
        yield partial(adam_steps, state, sample.state_names)
    yield partial(state_reset, first.step, sample.previous_steps)
    if sample.initial_norm is not None:
        yield partial(weight_growth, [sample.states[-1].weights], sample.initial_norm)
    if sample.previous_steps is not None and first.gradient is not None:
        yield partial(successive_alignment, first.gradient, first.moment_before())


HEAD = "head:"
"""How the names of groups that are the policy's heads begin."""

MOST_FEATURES = 256
"""Width of the features up to which NORMAL reports their rank, whose cost grows with its third power; on an accelerator, which a
decomposition waits for, and for wider features only DEBUG does."""


class Observation(NamedTuple):
    """What to measure and observe together, and the epoch of each row of it."""

    measurements: Iterable[Measurement]
    epochs: int | Sequence[int] = 0


def summarize(snapshot: Snapshot, facts: Mapping[str, Any], level: Level) -> Iterator[Observation]:
    """Everything that is measured of an update, in the order in which it happened; `facts` are those of the run."""
    if snapshot.rollout is not None:
        yield Observation(_rollout(snapshot.rollout))
        yield Observation(_normalizers(snapshot.rollout.normalizers))
        yield Observation(_actions(snapshot.rollout.actions))
        yield Observation(_memory(snapshot.rollout.memory, snapshot.rollout.valid, facts))
    if snapshot.episodes is not None:
        yield Observation([partial(_episodes, snapshot.episodes), *_ends(snapshot.episodes, snapshot.rollout)])
    if snapshot.growth is not None:
        yield Observation(_growth(snapshot.growth, level))
    if snapshot.minibatches is not None:
        coefficients = snapshot.progress.coefficients if snapshot.progress else {}
        minibatches = in_grid(snapshot.minibatches)
        yield Observation(_minibatches(minibatches, facts, coefficients), minibatches.epochs)
        yield Observation([partial(_used_advantages, minibatches, snapshot.rollout, facts)], minibatches.epochs)
        yield Observation(detailed(minibatches, facts, coefficients), minibatches.epochs)
        yield Observation(_spreads(minibatches))
        yield Observation(_rows(minibatches))
        yield Observation(_features(minibatches, facts, level))
    if snapshot.sample is not None and not snapshot.sample.measured:
        yield Observation(gradient_sample(snapshot.sample, level))
    for gradients in snapshot.gradients:
        counts = snapshot.minibatches.counts if snapshot.minibatches and facts.get("ranks", 1) > 1 else None
        yield Observation(_gradients(gradients, facts, counts), gradients.epochs)
    if snapshot.rollout is not None or snapshot.minibatches is not None:
        yield Observation([partial(nonfinite_in, snapshot)])
    if snapshot.progress is not None:
        yield Observation(_progress(snapshot.progress))


def _rollout(rollout: RolloutData) -> list[Measurement]:
    valid, values, rewards = rollout.valid, rollout.values, rollout.rewards
    terminated, gamma = rollout.terminated, rollout.gamma
    return [
        partial(advantage_stats, rollout.advantages, valid=valid),
        partial(return_stats, rollout.returns, valid=valid),
        partial(reward_stats, rewards if rollout.raw_rewards is None else rollout.raw_rewards, valid=valid),
        partial(log_prob_stats, rollout.log_probs, valid=valid),
        partial(value_fit, values, rollout.returns, valid=valid),
        partial(td_errors, rewards, values, rollout.next_values, gamma=gamma, valid=valid),
        partial(terminal_error, values, rewards, terminated, valid=valid),
        partial(ending_bias, values, rollout.returns, rollout.ended, terminated, valid=valid),
        partial(monte_carlo_fit, values, rewards, rollout.ended, terminated, gamma=gamma, valid=valid),
        partial(gae_identity, rollout.advantages, values, rollout.returns, valid=valid),
        *_observations(rollout),
    ]


def _observations(rollout: RolloutData) -> list[Measurement]:
    """Whether they change."""
    constant, observations = rollout.constant, rollout.observations
    if constant is not None:
        return [partial(constant_observations, constant)]
    if observations is None:
        return []
    return [lambda: constant_observations(constant_rows(observations, valid=rollout.valid))]


def _actions(actions: Actions | None) -> Iterator[Measurement]:
    if actions is None:
        return
    if actions.action_masks:
        chosen = {head: choices.actions for head, choices in actions.chosen.items()}
        counted = {head: choices.counted for head, choices in actions.chosen.items() if choices.counted is not None}
        yield partial(mask_violation, chosen, actions.action_masks, relevant=counted)
    for head, size in actions.sizes.items():
        if head in actions.previous:
            yield partial(_shift, head, size, actions.chosen[head], actions.previous[head])
    for head, drawn in actions.continuous.items():
        yield from _drawn(head, drawn)


def _shift(head: str, size: int, now: ActionChoices, before: ActionChoices) -> MetricGroup:
    """How far the mix of a head's actions has moved since the last rollout."""
    return action_shift(head, *(action_counts(taken.actions, size, valid=taken.counted) for taken in (now, before)))


def _drawn(head: str, drawn: SampledActions) -> Iterator[Measurement]:
    """Of a Gaussian head: how often it met its bounds, and how far its mean action moved."""
    if drawn.bounds is not None:
        low, high = drawn.bounds
        yield partial(gaussian_stats, head, actions=drawn.actions, low=low, high=high, valid=drawn.counted)
    if drawn.previous is not None and drawn.std is not None:
        mean, count = drawn.previous
        yield partial(
            gaussian_action_shift, head, drawn.actions, mean, drawn.std, previous_count=count, valid=drawn.counted
        )


def _memory(memory: RecurrentState | None, valid: Tensor | None, facts: Mapping[str, Any]) -> Iterator[Measurement]:
    if memory is None:
        return
    size, ages = memory.size, memory.ages
    yield partial(state_stats, size, valid=valid)
    yield partial(reset_stats, size.empty, ages, valid=valid)
    if len(size.absolute) > 1:
        grown = ages > 0 if valid is None else (ages > 0) & valid
        yield partial(cell_growth, size.absolute[1] / size.width, ages, width=bucket_width(len(ages)), valid=grown)
    if memory.layers:
        yield partial(_gates, memory, valid, facts.get("num_steps"))


def _gates(memory: RecurrentState, valid: Tensor | None, bptt_length: int | None) -> GateGroups:
    """Of all layers as if they were one."""
    layers = [gates_between(layer.weights, layer.inputs, layer.hidden, layer.memory) for layer in memory.layers]
    gates = Gates(*(torch.cat(parts, -1) for parts in zip(*layers, strict=True)))
    envs = gates.f.shape[1]
    part = None if valid is None else valid[:, :envs]
    return gate_stats(gates, memory.size.empty[:, :envs], bptt_length=bptt_length, valid=part)


def _episodes(episodes: Episodes) -> MetricGroup:
    recent, ends = episodes.recent_returns, episodes.recent_ends
    return episode_stats(episodes.returns, episodes.lengths, recent_returns=recent, recent_ends=ends)


def _ends(episodes: Episodes, rollout: RolloutData | None) -> list[Measurement]:
    """How the episodes of a rollout ended."""
    if rollout is None:
        return []
    return [partial(episode_ends, rollout.ended, rollout.terminated, episodes.lengths, valid=rollout.valid)]


def _growth(growth: Growth, level: Level) -> Iterator[Measurement]:
    """Hosts, their seeds, and what was paid for them; at DEBUG one by one too."""
    labels, last = growth.labels, torch.tensor(growth.last, device=growth.hosts["score"].device)
    yield partial(host_stats, growth.hosts)
    yield partial(seed_stats, growth.seeds, labels, horizon=growth.horizon)
    yield partial(growth_gates, growth.gates)
    yield partial(environment_stats, growth.hosts, growth.rewards, growth.seeds["stage"], last, ops=labels["op"])
    if level >= Level.DEBUG:
        yield partial(each_stats, growth.hosts, growth.seeds, growth.rewards)


def _minibatches(
    minibatches: Minibatches, facts: Mapping[str, Any], coefficients: Mapping[str, float]
) -> Iterator[Measurement]:
    valid, clip, relevant = minibatches.valid, facts.get("clip"), minibatches.relevance
    yield partial(ratio_diagnostics, minibatches.log_ratio, minibatches.advantages, clip=clip, valid=valid, dim=-1)
    if clip is not None:
        yield partial(excess_ratio, minibatches.log_ratio, clip=clip, valid=valid, dim=-1)
    if minibatches.head_log_ratios:
        yield partial(
            head_ratio_diagnostics, minibatches.head_log_ratios, relevant=relevant, clip=clip, valid=valid, dim=-1
        )
    entropy = None
    if minibatches.logits or minibatches.log_std:
        masks, log_std = minibatches.action_masks, minibatches.log_std
        heads = entropy_rows(minibatches.logits, masks, log_std=log_std, relevant=relevant)
        entropy = cache(partial(policy_entropy, heads, valid=valid, dim=-1))
        yield entropy
        yield partial(head_entropy, heads, valid=valid, dim=-1)
    weights = {"value": facts.get("value_coef"), "entropy": facts.get("entropy_coef"), **coefficients}
    if {"policy", "value"} <= set(minibatches.losses):
        yield partial(_losses, minibatches, entropy, weights)
    yield partial(
        bonus_gradient,
        minibatches.logits,
        entropy_coef=weights["entropy"] or 0.0,
        action_masks=minibatches.action_masks,
        relevant=relevant,
        valid=valid,
    )


def _used_advantages(minibatches: Minibatches, rollout: RolloutData | None, facts: Mapping[str, Any]) -> MetricGroup:
    """What normalisation made of the advantages, with the raw ones found by their order where nothing tells which they are."""
    raw = None if minibatches.details is None else minibatches.details.raw_advantages
    found = normalized_advantage_stats(minibatches.advantages, raw, valid=minibatches.valid, dim=-1)
    if raw is not None or rollout is None or facts.get("normalize_minibatches", True):
        return found
    first = [index for index, epoch in enumerate(minibatches.epochs) if epoch == minibatches.epochs[0]]
    counted = None if minibatches.valid is None else minibatches.valid[first]
    flips = flips_in_order(minibatches.advantages[first], rollout.advantages, counted=counted, valid=rollout.valid)
    return replace(found, sign_flip=flips)


def _normalizers(normalizers: Mapping[str, Normalizer]) -> Iterator[Measurement]:
    for name, now in normalizers.items():
        yield partial(NormalizerClipping, segment(name), Mean(now.cut, now.entries))
        if now.previous is not None:
            yield partial(normalizer_drift, name, now.mean, now.std, *now.previous)


def _rows(minibatches: Minibatches) -> list[Measurement]:
    """Which transitions the first pass has seen, where it says which they are."""
    if minibatches.rows is None:
        return []
    first = minibatches.epochs.count(minibatches.epochs[0])
    valid = None if minibatches.valid is None else minibatches.valid[:first]
    return [partial(rows_repeated, minibatches.rows[:first], valid=valid)]


def _spreads(minibatches: Minibatches) -> list[Measurement]:
    """Standard deviations of Gaussian heads, over all rows of the update."""
    return [
        partial(gaussian_stats, head, log_std, valid=both(minibatches.valid, minibatches.relevance.get(head)))
        for head, log_std in minibatches.log_std.items()
    ]


def both(valid: Tensor | None, relevant: Tensor | None) -> Tensor | None:
    """Rows that count and in which a head matters; None where that is every row."""
    if valid is None or relevant is None:
        return relevant if valid is None else valid
    return valid & relevant


def _features(minibatches: Minibatches, facts: Mapping[str, Any], level: Level) -> Iterator[Measurement]:
    """Units and ranks of the features before the first step."""
    features, valid = minibatches.features, minibatches.valid
    if features is None:
        return
    rows = None if valid is None else valid[0, : len(features)]
    yield partial(_units, features, facts, rows)
    if level >= Level.DEBUG or (features.is_cpu and features.shape[-1] <= MOST_FEATURES):
        yield partial(feature_rank, features, valid=rows)


def _units(features: Tensor, facts: Mapping[str, Any], valid: Tensor | None) -> MetricGroup:
    """Of all layers together."""
    return unit_activity({"features": features}, activation=facts.get("activation"), valid=valid).all


def _losses(
    minibatches: Minibatches, entropy: Callable[[], PolicyEntropy] | None, coefficients: Mapping[str, float | None]
) -> LossTerms:
    """The losses, with what the trainer did not compute made from what it did."""
    policy, value = minibatches.losses["policy"], minibatches.losses["value"]
    bonus, total = minibatches.losses.get("entropy"), minibatches.losses.get("total")
    if bonus is None and entropy is not None:
        mean = entropy().entropy
        bonus = -torch.as_tensor(mean.total) / torch.as_tensor(mean.count)
    weight, weight_of_bonus = coefficients["value"], coefficients["entropy"]
    if total is None and bonus is not None and weight is not None and weight_of_bonus is not None:
        total = policy + weight * value + weight_of_bonus * bonus
    counts = minibatches.counts if minibatches.valid is None else minibatches.valid.sum(-1)
    return loss_terms(policy, value, bonus, total, count=counts)


def _gradients(
    gradients: BackwardGradients, facts: Mapping[str, Any], counts: Sequence[int] | None
) -> Iterator[Measurement]:
    """Of an update; `counts` are a rank's rows of each minibatch, where several ranks report together."""
    groups, numels = facts.get("groups", {}), gradients.numels
    norms = cache(
        partial(
            gradient_norms,
            gradients.norms,
            gradients.names,
            groups,
            numels,
            max_norm=gradients.max_norm,
            applied=gradients.applied,
        )
    )
    yield norms
    yield partial(layer_concentration, gradients.norms)
    yield from _heads(gradients, facts)
    if gradients.leaves is None:
        yield lambda: group_interference(norms())
    else:
        actor, critic, dots = gradients.leaves.actor, gradients.leaves.critic, gradients.leaves.dots
        whole = counts if counts is not None and len(counts) == len(actor) else None
        coefs = coefficients(norms().clip)
        yield partial(interference, actor, critic, coefs=coefs, dots=dots, counts=whole)


def _heads(gradients: BackwardGradients, facts: Mapping[str, Any]) -> Iterator[Measurement]:
    """The policy's heads and the value head, one by one."""
    norms, names = gradients.norms, gradients.names
    groups: Mapping[str, Sequence[str]] = facts.get("groups", {})
    heads = {group.removeprefix(HEAD): members for group, members in groups.items() if group.startswith(HEAD)}
    if heads:
        yield partial(head_gradients, norms, names, heads)
    if gradients.heads is not None:
        sharing = tuple(facts.get("heads", ()))
        yield partial(head_gradients, gradients.heads, sharing, {head: (head,) for head in sharing})
    if facts.get("value_head"):
        yield partial(value_gradient, norms, names, facts["value_head"])


def _progress(progress: TrainingProgress) -> list[Measurement]:
    performance = partial(
        update_performance,
        progress.update,
        env_steps=progress.env_steps,
        elapsed=progress.elapsed,
        seconds=progress.seconds,
        cpu_seconds=progress.cpu_seconds,
    )
    age = [] if progress.collected is None else [partial(buffer_age, progress.update, progress.collected)]
    rate, period = partial(LearningRate, lr=progress.learning_rate), partial(SamplingPeriod, progress.sample_every)
    memory, weights = partial(AdamMemory, progress.beta2), partial(loss_weights, progress.coefficients)
    return [rate, memory, weights, performance, period, *age]


MOST_ROWS = 512
"""Transitions whose features are compared."""


def before_update(stored: Outputs, now: Outputs) -> Iterator[Measurement]:
    """Whether training begins where acting was: `stored` is what was acted on, `now` what the same weights say in training."""
    if stored.memory is not None and now.memory is not None:
        yield partial(first_staleness, stored.memory, now.memory)


def responses(activations: Activations, level: Level) -> Iterator[Measurement]:
    """Units of single layers, and the size of the features before the last nonlinearity; at DEBUG how layers respond."""
    if activations.layers:
        yield partial(_replayed_units, activations.layers)
        if level >= Level.DEBUG:
            yield partial(layer_responses, activations.layers)
    if activations.last is not None:
        yield partial(feature_norm, activations.last)


def _replayed_units(layers: Mapping[str, Tensor]) -> MetricGroup:
    """Of each layer."""
    return unit_activity(layers).layers


def after_update(stored: Outputs, before: Outputs, now: Outputs) -> Iterator[Measurement]:
    """How far an update went in the end: from what was acted on, and from what the policy said before it."""
    yield lambda: kl_after_update(kl_rows(stored, now), relevant=now.relevance)
    if now.logits:
        yield partial(greedy_agreement, stored.logits, now.logits, relevant=now.relevance)
    if before.features is not None and now.features is not None:
        some = slice(None, None, max(1, len(now.features) // MOST_ROWS))
        yield partial(feature_drift, before.features[some], now.features[some])
    if stored.memory is not None and now.memory is not None:
        yield partial(state_staleness, stored.memory, now.memory)


def through_time(policy: PolicyReplay) -> Iterator[Measurement]:
    """Gradients at the states of a recurrent policy, and what it would do without memory."""
    gradients = policy.state_gradients()
    if gradients is not None:
        yield partial(bptt_stats, gradients.first, gradients.last)
    without = policy.without_memory()
    if without is not None:
        yield partial(memory_use, kl_rows(policy.stored_part(), without), relevant=without.relevance)


def capacity(copy: Copy) -> Iterator[Measurement]:
    """Whether a copy of the network can still learn."""
    if copy.parameters:
        yield partial(capacity_loss, copy.network, copy.parameters, copy.observations)


def kl_rows(old: Outputs, new: Outputs) -> Mapping[str, Tensor]:
    """KL(old‖new) of every head in every transition, [N] each."""
    rows = {head: categorical_kl(old.logits[head], logits) for head, logits in new.logits.items()}
    for head, means in new.means.items():
        stds = (side.log_std[head].expand_as(means) for side in (old, new))
        old_std, new_std = stds
        rows[head] = gaussian_kl(old.means[head], old_std, means, new_std)
    return rows
