"""Which metric functions see what of an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.group import Mean, MetricGroup
from esper_telemetry.metric import segment
from esper_telemetry.metrics.actions import action_counts, action_shift, gaussian_action_shift, log_prob_stats
from esper_telemetry.metrics.advantages import advantage_stats, flips_in_order, normalized_advantage_stats
from esper_telemetry.metrics.endings import episode_ends
from esper_telemetry.metrics.entropy import PolicyEntropy, entropy_rows, head_entropy, policy_entropy
from esper_telemetry.metrics.episodes import episode_stats
from esper_telemetry.metrics.gaussian import gaussian_stats
from esper_telemetry.metrics.gradients import (
    bonus_gradient,
    coefficients,
    gradient_norms,
    group_interference,
    head_gradients,
    interference,
    layer_concentration,
    value_gradient,
)
from esper_telemetry.metrics.growth import each_stats, environment_stats, host_stats, seed_stats
from esper_telemetry.metrics.growth import gate_stats as growth_gates
from esper_telemetry.metrics.head_ratio import head_ratio_diagnostics
from esper_telemetry.metrics.integrity import buffer_age, gae_identity, mask_violation, rows_repeated
from esper_telemetry.metrics.losses import LossTerms, loss_terms, loss_weights
from esper_telemetry.metrics.lstm import (
    GateGroups,
    Gates,
    bucket_width,
    cell_growth,
    gate_stats,
    gates_between,
    reset_stats,
    state_stats,
)
from esper_telemetry.metrics.normalizer import NormalizerClipping, normalizer_drift
from esper_telemetry.metrics.observations import constant_observations, constant_rows
from esper_telemetry.metrics.optimizer import AdamMemory, LearningRate
from esper_telemetry.metrics.performance import SamplingPeriod, update_performance
from esper_telemetry.metrics.ratio import ratio_diagnostics
from esper_telemetry.metrics.representation import excess_ratio, feature_rank, unit_activity
from esper_telemetry.metrics.returns import return_stats
from esper_telemetry.metrics.rewards import reward_stats
from esper_telemetry.metrics.temporal_difference import ending_bias, monte_carlo_fit, td_errors, terminal_error
from esper_telemetry.metrics.values import value_fit
from esper_telemetry.record import Level
from esper_telemetry.summary.containment import Measurement
from esper_telemetry.summary.detailed import detailed
from esper_telemetry.summary.grid import in_grid
from esper_telemetry.summary.numerics import nonfinite_in
from esper_telemetry.summary.samples import gradient_sample
from esper_telemetry.summary.snapshot import (
    Actions,
    Choices,
    Drawn,
    Episodes,
    Gradients,
    Growth,
    Memory,
    Minibatches,
    Normalizer,
    Progress,
    Rollout,
    Snapshot,
)

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


def _rollout(rollout: Rollout) -> list[Measurement]:
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


def _observations(rollout: Rollout) -> list[Measurement]:
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


def _shift(head: str, size: int, now: Choices, before: Choices) -> MetricGroup:
    """How far the mix of a head's actions has moved since the last rollout."""
    return action_shift(head, *(action_counts(taken.actions, size, valid=taken.counted) for taken in (now, before)))


def _drawn(head: str, drawn: Drawn) -> Iterator[Measurement]:
    """Of a Gaussian head: how often it met its bounds, and how far its mean action moved."""
    if drawn.bounds is not None:
        low, high = drawn.bounds
        yield partial(gaussian_stats, head, actions=drawn.actions, low=low, high=high, valid=drawn.counted)
    if drawn.previous is not None and drawn.std is not None:
        mean, count = drawn.previous
        yield partial(
            gaussian_action_shift, head, drawn.actions, mean, drawn.std, previous_count=count, valid=drawn.counted
        )


def _memory(memory: Memory | None, valid: Tensor | None, facts: Mapping[str, Any]) -> Iterator[Measurement]:
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


def _gates(memory: Memory, valid: Tensor | None, bptt_length: int | None) -> GateGroups:
    """Of all layers as if they were one."""
    layers = [gates_between(layer.weights, layer.inputs, layer.hidden, layer.memory) for layer in memory.layers]
    gates = Gates(*(torch.cat(parts, -1) for parts in zip(*layers, strict=True)))
    envs = gates.f.shape[1]
    part = None if valid is None else valid[:, :envs]
    return gate_stats(gates, memory.size.empty[:, :envs], bptt_length=bptt_length, valid=part)


def _episodes(episodes: Episodes) -> MetricGroup:
    recent, ends = episodes.recent_returns, episodes.recent_ends
    return episode_stats(episodes.returns, episodes.lengths, recent_returns=recent, recent_ends=ends)


def _ends(episodes: Episodes, rollout: Rollout | None) -> list[Measurement]:
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


def _used_advantages(minibatches: Minibatches, rollout: Rollout | None, facts: Mapping[str, Any]) -> MetricGroup:
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


def _gradients(gradients: Gradients, facts: Mapping[str, Any], counts: Sequence[int] | None) -> Iterator[Measurement]:
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


def _heads(gradients: Gradients, facts: Mapping[str, Any]) -> Iterator[Measurement]:
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


def _progress(progress: Progress) -> list[Measurement]:
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
