"""Measures one update: pure functions from `Update` to metric functions with their arguments. Any process can call them.

Costly metrics are sampled by update, not by minibatch. A sampled update has whole gradients, optimizer states and more columns, and
the columns of an update decide its metrics.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.core.containment import Measurement
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import declared, label_field, segment
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Max, Mean, Sum
from esper_telemetry.events import RolloutEnd
from esper_telemetry.metrics.actions import (
    GaussianStats,
    action_counts,
    action_shift,
    gaussian_action_shift,
    gaussian_stats,
    log_prob_stats,
    spread_over_range,
)
from esper_telemetry.metrics.advantages import advantage_stats, flips_in_order, minibatch_rows, normalized_advantage_stats
from esper_telemetry.metrics.entropy import PolicyEntropy, entropy_rows, head_entropy, head_mix, policy_entropy
from esper_telemetry.metrics.episodes import episode_ends, episode_stats
from esper_telemetry.metrics.gradients.actor_critic import (
    bonus_gradient,
    group_interference,
    head_interference,
    interference,
    layer_interference,
    parameter_interference,
)
from esper_telemetry.metrics.gradients.directions import (
    LayerZeros,
    concentration,
    gradient_decades,
    gradient_signs,
    gradient_zeros,
    layer_concentration,
    minibatch_alignment,
    shard_noise,
    successive_alignment,
)
from esper_telemetry.metrics.gradients.norms import LayerGradients, coefficients, gradient_norms, head_gradients, value_gradient
from esper_telemetry.metrics.integrity import Numerics, buffer_age, gae_identity, mask_violation, nonfinite_count, rows_repeated
from esper_telemetry.metrics.kl import exact_kl, head_exact_kl, kl_rows
from esper_telemetry.metrics.losses import LossComponents, entropy_gradients, loss_terms, loss_weights
from esper_telemetry.metrics.lstm.gates import GateGroups, gate_stats, gates_of, side_by_side
from esper_telemetry.metrics.lstm.states import bucket_width, cell_growth, reset_stats, state_stats
from esper_telemetry.metrics.optimizer import (
    AdamMemory,
    LayerSteps,
    LearningRate,
    adam_steps,
    group_learning_rates,
    state_reset,
    weight_growth,
)
from esper_telemetry.metrics.performance import SamplingPeriod, update_performance
from esper_telemetry.metrics.ratio import head_ratio_diagnostics, ratio_diagnostics
from esper_telemetry.metrics.representation import excess_ratio, feature_rank, unit_activity
from esper_telemetry.metrics.rollout_stats import (
    NormalizerClipping,
    constant_observations,
    constant_rows,
    normalizer_drift,
    observation_measurements,
    return_stats,
    reward_stats,
)
from esper_telemetry.metrics.values import ending_bias, monte_carlo_fit, td_errors, terminal_error, value_fit, value_movement
from esper_telemetry.updates.equation_checks import equation_checks
from esper_telemetry.updates.joining import rows_that_count
from esper_telemetry.updates.replays import replay_measurements
from esper_telemetry.updates.steps import step_checks
from esper_telemetry.updates.target_equations import Held
from esper_telemetry.updates.update import (
    BackwardGradients,
    CollectedRows,
    GradientSample,
    JoinedMinibatches,
    Normalizer,
    RecurrentState,
    TrainingProgress,
    Update,
    columns_in_grid,
    in_grid,
)

HEAD_GROUP = "head:"
"""Beginning of the names of parameter groups that are the policy's heads."""

MAX_RANKED_FEATURES = 256
"""Largest width of features whose rank NORMAL reports; the cost grows with the width's third power. Only DEBUG reports the rank of
wider features, or the rank on an accelerator, because a decomposition synchronises.
"""

MAX_LAYERS = 64
"""Parameter tensors of which NORMAL still reports each; DEBUG reports all."""


class Measurements(NamedTuple):
    """Metric functions whose groups are observed together, and the epoch of each row of them."""

    functions: Iterable[Measurement]
    epochs: int | Sequence[int] = 0


def measure(update: Update, facts: Facts, level: Level, held: Held | None = None) -> Iterator[Measurements]:
    """Yield all measurements of an update, in the order of its phases; `facts` are the run's, `held` is as in `target_checks`."""
    rollout, minibatches, progress = update.rollout, update.minibatches, update.progress
    if rollout is not None:
        yield Measurements(_rollout(rollout, update.context.constant, has_critic=facts.has_critic))
        window = update.context.window
        yield Measurements(observation_measurements(rollout.observations, window, ended=rollout.ended, valid=rollout.valid))
        yield Measurements(_normalizers(update.context.normalizers))
        yield Measurements(_actions(update, rollout))
        yield Measurements(_memory(update.context.memory, rollout.valid, facts))
    if update.episodes is not None:
        yield Measurements(_episodes(update))
    for extension in update.extensions:
        yield Measurements(extension.measure(facts, level))
    if minibatches is not None:
        coefficients = progress.end.coefficients if progress else {}
        grid = in_grid(minibatches)
        yield Measurements(_minibatches(grid, facts, coefficients), grid.epochs)
        yield Measurements([partial(_used_advantages, grid, update, facts)], grid.epochs)
        yield Measurements(_details(grid, update.collected, facts, coefficients), grid.epochs)
        yield Measurements(_whole_update(grid, None if rollout is None else rollout.rewards.numel()))
        yield Measurements(_features(update.features, grid.valid, facts, level))
    if update.sample is not None and not update.sample.measured:
        yield Measurements(gradient_sample(update.sample, level))
    for gradients in update.gradients:
        counts = minibatches.counts if minibatches and facts.ranks > 1 else None
        yield Measurements(_gradients(gradients, facts, counts), gradients.epochs)
    if update.sampled:
        yield Measurements(equation_checks(update, facts, held))
    if update.replay is not None:
        yield Measurements(replay_measurements(update.replay, facts.precision, level))
    if update.step is not None:
        yield Measurements(step_checks(update.step, facts.precision))
    if rollout is not None or minibatches is not None:
        yield Measurements([partial(nonfinite_in, update)])
    if progress is not None:
        yield Measurements(_progress(progress))


def _rollout(rollout: RolloutEnd, constant: Tensor | None, *, has_critic: bool) -> list[Measurement]:
    valid, values, rewards = rollout.valid, rollout.values, rollout.rewards
    terminated, gamma, observations = rollout.terminated, rollout.gamma, rollout.observations
    measurements: list[Measurement] = [
        partial(advantage_stats, rollout.advantages, valid=valid),
        partial(return_stats, rollout.returns, valid=valid),
        partial(reward_stats, rewards, valid=valid)
        if rollout.raw_rewards is None
        else partial(reward_stats, rollout.raw_rewards, trained=rewards, valid=valid),
        partial(log_prob_stats, rollout.log_probs, valid=valid),
    ]
    of_critic: list[Measurement] = [
        partial(value_fit, values, rollout.returns, valid=valid),
        partial(td_errors, rewards, values, rollout.next_values, gamma=gamma, valid=valid),
        partial(terminal_error, values, rewards, terminated, valid=valid),
        partial(ending_bias, values, rollout.returns, rollout.ended, terminated, valid=valid),
        partial(monte_carlo_fit, values, rewards, rollout.ended, terminated, gamma=gamma, valid=valid),
        partial(gae_identity, rollout.advantages, values, rollout.returns, valid=valid),
    ]
    measurements += of_critic if has_critic else []
    if constant is not None:
        measurements.append(partial(constant_observations, constant))
    elif observations is not None:
        measurements.append(lambda: constant_observations(constant_rows(observations, valid=valid)))
    return measurements


def _normalizers(normalizers: Mapping[str, Normalizer]) -> Iterator[Measurement]:
    for name, now in normalizers.items():
        yield partial(NormalizerClipping, segment(name), Mean(now.cut, now.entries))
        if now.previous is not None:
            yield partial(normalizer_drift, name, now.mean, now.std, *now.previous)


def _actions(update: Update, rollout: RolloutEnd) -> Iterator[Measurement]:
    """Measure masked choices, the change of each head's mix of actions since the last rollout, and Gaussian actions at their bounds."""
    context, actions = update.context, rollout.actions
    counted = {head: rows_that_count(rollout.valid, rollout.relevance.get(head)) for head in actions}
    if rollout.action_masks:
        relevant = {head: rows for head, rows in counted.items() if rows is not None}
        restricted = {head: actions[head] for head in rollout.action_masks}
        yield partial(mask_violation, restricted, rollout.action_masks, relevant=relevant)
    for head, logits in (update.minibatches.logits if update.minibatches else {}).items():
        if head in context.previous_choices:
            choices = (actions[head], counted[head]), context.previous_choices[head]
            yield partial(_shift, head, logits.shape[-1], *choices)
    for head, (low, high) in rollout.bounds.items():
        if head in actions:
            yield partial(gaussian_stats, head, actions=actions[head], low=low, high=high, valid=counted[head])
    if rollout.range_use is not None:
        used, reached = map(torch.tensor, rollout.range_use)
        yield partial(GaussianStats, "action", used=Mean(used, 1.0), reached=Max(reached))
    for head, previous in context.mean_actions.items():
        bounds, log_std, valid = rollout.bounds.get(head), rollout.log_std.get(head), counted[head]
        if bounds is not None and log_std is not None:
            yield partial(spread_over_range, head, log_std, low=bounds[0], high=bounds[1], valid=valid)
        if previous is not None and log_std is not None:
            std, count = log_std.exp(), previous.number
            moved = partial(gaussian_action_shift, head, actions[head], previous.mean, std)
            yield partial(moved, previous_count=count, valid=valid)


def _shift(head: str, size: int, *choices: tuple[Tensor, Tensor | None]) -> MetricGroup:
    return action_shift(head, *(action_counts(actions, size, valid=counted) for actions, counted in choices))


def _memory(memory: RecurrentState | None, valid: Tensor | None, facts: Facts) -> Iterator[Measurement]:
    if memory is None:
        return
    size, ages = memory.size, memory.ages
    yield partial(state_stats, size, valid=valid)
    yield partial(reset_stats, size.empty, ages, valid=valid)
    if len(size.absolute) > 1:
        carried = ages > 0 if valid is None else (ages > 0) & valid
        yield partial(cell_growth, size.absolute[1] / size.width, ages, width=bucket_width(len(ages)), valid=carried)
    if memory.layers:
        yield partial(_gates, memory, valid, facts.num_steps)


def _gates(memory: RecurrentState, valid: Tensor | None, bptt_length: int | None) -> GateGroups:
    """Measure the gates of all layers as if they were one."""
    gates = side_by_side([gates_of(layer.weights, layer.inputs, layer.hidden, layer.memory) for layer in memory.layers])
    envs = gates.keep_gate.shape[1]
    part = None if valid is None else valid[:, :envs]
    return gate_stats(gates, memory.size.empty[:, :envs], bptt_length=bptt_length, valid=part)


def _episodes(update: Update) -> Iterator[Measurement]:
    episodes, rollout = update.episodes, update.rollout
    if episodes is not None:
        recent = partial(episode_stats, recent_returns=episodes.recent_returns, recent_ends=episodes.recent_ends)
        yield partial(recent, episodes.returns, episodes.lengths)
        if rollout is not None:
            limits = rollout.time_limits  # of a program that treats them as terminations
            terminated = rollout.terminated if limits is None else rollout.terminated & ~limits
            yield partial(episode_ends, rollout.ended, terminated, episodes.lengths, valid=rollout.valid)


def _minibatches(minibatches: JoinedMinibatches, facts: Facts, coefficients: Mapping[str, float]) -> Iterator[Measurement]:
    valid, clip, relevant = minibatches.valid, coefficients.get("clip", facts.clip), minibatches.relevance
    yield partial(ratio_diagnostics, minibatches.log_ratio, minibatches.advantages, clip=clip, valid=valid, dim=-1)
    if clip is not None:
        yield partial(excess_ratio, minibatches.log_ratio, clip=clip, valid=valid, dim=-1)
    if minibatches.head_log_ratios:
        ratios = minibatches.head_log_ratios
        yield partial(head_ratio_diagnostics, ratios, relevant=relevant, clip=clip, valid=valid, dim=-1)
    entropy = None
    if minibatches.logits or minibatches.log_std:
        masks, log_std = minibatches.action_masks, minibatches.log_std
        heads = entropy_rows(minibatches.logits, masks, log_std=log_std, relevant=relevant)
        entropy = cache(partial(policy_entropy, heads, valid=valid, dim=-1))
        yield entropy
        yield partial(head_entropy, heads, valid=valid, dim=-1)
    weights = {"value": facts.value_coef, "entropy": facts.entropy_coef, **coefficients}
    if {"policy", "value"} <= set(minibatches.losses):
        yield partial(_losses, minibatches, entropy, weights)
    spreads = {} if facts.squashed else minibatches.log_std  # the entropy of squashed actions has another gradient
    bonus = partial(bonus_gradient, minibatches.logits, log_std=spreads, entropy_coef=weights["entropy"] or 0.0)
    yield partial(bonus, action_masks=minibatches.action_masks, relevant=relevant, valid=valid)


def _used_advantages(minibatches: JoinedMinibatches, update: Update, facts: Facts) -> MetricGroup:
    """Measure normalised advantages against the raw ones, which are paired by rank if the source does not give their rows.

    Normalisation over a rollout keeps the order, so the share of flipped signs follows without columns of the rollout.
    """
    rollout, collected = update.rollout, update.collected
    raw = None if collected is None else columns_in_grid(collected, minibatches.counts).advantages
    group = normalized_advantage_stats(minibatches.advantages, raw, valid=minibatches.valid, dim=-1)
    if raw is not None or rollout is None or facts.normalize_minibatches is not False:
        return group
    first = [index for index, epoch in enumerate(minibatches.epochs) if epoch == minibatches.epochs[0]]
    counted = None if minibatches.valid is None else minibatches.valid[first]
    flips = flips_in_order(minibatches.advantages[first], rollout.advantages, counted=counted, valid=rollout.valid)
    return replace(group, sign_flip=flips)


def _details(
    minibatches: JoinedMinibatches, collected: CollectedRows | None, facts: Facts, coefficients: Mapping[str, float]
) -> Iterator[Measurement]:
    """Measure the changes of the critic and of the policy over all actions, and the weight of the entropy bonus in the policy's
    gradient.
    """
    valid, relevant = minibatches.valid, minibatches.relevance
    if minibatches.values is None or minibatches.old_values is None or minibatches.returns is None:
        return
    critic = (minibatches.values, minibatches.old_values, minibatches.returns)
    yield partial(value_movement, *critic, clip=facts.clip_value, valid=valid, dim=-1)
    if collected is None:
        return
    collected = columns_in_grid(collected, minibatches.counts)
    rows = kl_rows(collected, minibatches)
    if rows:
        yield partial(exact_kl, rows, relevant=relevant, valid=valid, dim=-1)
        yield partial(head_exact_kl, rows, relevant=relevant, valid=valid, dim=-1)
    clip, coefficient = coefficients.get("clip", facts.clip), coefficients.get("entropy", facts.entropy_coef)
    if minibatches.logits and minibatches.logits.keys() <= collected.actions.keys() and None not in (clip, coefficient):
        steered = partial(entropy_gradients, minibatches.logits, collected.actions, minibatches.log_ratio)
        ends: dict[str, Any] = {"clip": clip, "entropy_coef": coefficient, "relevant": relevant, "valid": valid}
        yield partial(steered, minibatches.advantages, **ends)


def _whole_update(minibatches: JoinedMinibatches, size: int | None) -> Iterator[Measurement]:
    """Measure over all minibatches: their size, standard deviations of Gaussian heads, and rows that occur twice in the first pass.

    A source that does not count its passes gives them all as one: then the first `size` rows, as many as the rollout has, are a pass.
    """
    valid, rows = minibatches.valid, minibatches.rows
    first = minibatches.epochs.count(minibatches.epochs[0])
    if size is not None and first == len(minibatches.counts):
        first = max(1, bisect_right(list(accumulate(minibatches.counts)), size))
    yield partial(minibatch_rows, minibatches.counts)
    if len(minibatches.logits) > 1:  # one pass is enough for the mix of each head
        logits, masks, relevant = (
            {head: column[:first] for head, column in columns.items()}
            for columns in (minibatches.logits, minibatches.action_masks, minibatches.relevance)
        )
        heads = entropy_rows(logits, masks, relevant={head: relevant[head] for head in logits if head in relevant})
        counted = None if valid is None else valid[:first]
        yield from (partial(head_mix, head, heads, valid=counted) for head in heads)
    for head, log_std in minibatches.log_std.items():
        counted = rows_that_count(valid, minibatches.relevance.get(head))
        yield partial(gaussian_stats, head, log_std, valid=counted)
    if rows is not None:
        yield partial(rows_repeated, rows[:first], valid=None if valid is None else valid[:first])


def _features(features: Tensor | None, valid: Tensor | None, facts: Facts, level: Level) -> Iterator[Measurement]:
    """Units and ranks of the features [n, F] before the first step."""
    if features is None:
        return
    rows = None if valid is None else valid[0, : len(features)]
    activation: Any = facts.activation  # trainers report only exceptions that it knows
    yield lambda: unit_activity({"features": features}, activation=activation, valid=rows).all
    if level >= Level.DEBUG or (features.is_cpu and features.shape[-1] <= MAX_RANKED_FEATURES):
        yield partial(feature_rank, features, valid=rows)


def _losses(
    minibatches: JoinedMinibatches, entropy: Callable[[], PolicyEntropy] | None, coefficients: Mapping[str, float | None]
) -> LossComponents:
    """Measure the losses. Losses that the trainer did not compute are derived from the others."""
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


def _gradients(gradients: BackwardGradients, facts: Facts, counts: Sequence[int] | None) -> Iterator[Measurement]:
    """Norms and interference; `counts` are a rank's rows of each minibatch, if several ranks report together."""
    per_tensor = partial(gradient_norms, gradients.norms, gradients.names, facts.groups, gradients.numels)
    norms = cache(partial(per_tensor, max_norm=gradients.max_norm, applied=gradients.applied))
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


def _heads(gradients: BackwardGradients, facts: Facts) -> Iterator[Measurement]:
    """Gradients of the policy's heads and of the value head, one by one."""
    norms, names = gradients.norms, gradients.names
    heads = {name.removeprefix(HEAD_GROUP): own for name, own in facts.groups.items() if name.startswith(HEAD_GROUP)}
    if heads:
        yield partial(head_gradients, norms, names, heads)
    if gradients.heads is not None:
        sharing = tuple(facts.heads or ())
        yield partial(head_gradients, gradients.heads, sharing, {head: (head,) for head in sharing})
    if facts.value_head:
        yield partial(value_gradient, norms, names, facts.value_head)


def _progress(progress: TrainingProgress) -> Iterator[Measurement]:
    end = progress.end
    yield partial(LearningRate, lr=end.learning_rate)
    if end.learning_rates:
        yield partial(group_learning_rates, end.learning_rates)
    yield partial(AdamMemory, end.beta2)
    yield partial(loss_weights, end.coefficients)
    seconds: dict[str, Any] = {"elapsed": progress.elapsed, "seconds": end.seconds, "cpu_seconds": end.cpu_seconds}
    yield partial(update_performance, end.update, env_steps=progress.env_steps, **seconds)
    yield partial(SamplingPeriod, progress.sample_every)
    if progress.collected is not None:
        yield partial(buffer_age, end.update, progress.collected)


def nonfinite_in(update: Update) -> Numerics:
    """Entries that are not finite in the rollout, the forward passes, the losses, the gradients and, if kept, the weights.

    If only the norms of gradients are known, each tensor counts once per step.
    """
    total: Tensor | float = 0.0
    for tensors, valid in _parts(update):
        total = total + nonfinite_count(tensors, valid=valid).nonfinite.value
    return Numerics(Sum(total))


def _parts(update: Update) -> Iterator[tuple[list[Tensor], Tensor | None]]:
    """Tensors, with the rows of them that count."""
    rollout, minibatches, sample = update.rollout, update.minibatches, update.sample
    if rollout is not None:
        yield [rollout.rewards, rollout.log_probs, rollout.values, rollout.advantages], rollout.valid
    if minibatches is not None:
        yield [minibatches.log_ratio, minibatches.advantages], minibatches.valid
        yield list(minibatches.losses.values()), None
    yield [part.norms for part in update.gradients], None
    if sample is not None and sample.states:
        yield [sample.states[-1].weights], None


def gradient_sample(sample: GradientSample, level: Level) -> Iterator[Measurement]:
    """Yield everything that is measured of a sample."""
    if sample.minibatches:
        yield from _first_minibatch(sample, level)
    if len(sample.minibatches) > 1:
        yield partial(minibatch_alignment, torch.stack(sample.minibatches))
    if len(sample.shards) > 1:
        yield partial(shard_noise, torch.stack(sample.shards), sample.samples)
    if sample.actor is not None and sample.critic is not None:
        yield partial(parameter_interference, [sample.actor], [sample.critic])
        if level >= Level.DEBUG and sample.shared:
            names, numels = zip(*sample.shared, strict=True)
            yield partial(layer_interference, sample.actor.split(numels), sample.critic.split(numels), names)
    if sample.heads:
        names, numels = zip(*sample.trunk, strict=True)
        heads = {head: gradient.split(numels) for head, gradient in sample.heads.items()}
        yield partial(head_interference, heads, names)
    if sample.states:
        yield from _optimizer(sample)


def _first_minibatch(sample: GradientSample, level: Level) -> Iterator[Measurement]:
    """Measure how the entries of the gradient are spread over the network."""
    gradients = sample.minibatches[0].split(list(sample.numels))
    yield partial(gradient_zeros, gradients, sample.names)
    yield partial(gradient_signs, gradients)
    yield partial(concentration, gradients)
    if level >= Level.DEBUG:
        yield partial(gradient_decades, gradients, sample.names)


def _optimizer(sample: GradientSample) -> Iterator[Measurement]:
    """Measure the optimizer's steps; the first one is also compared with its average of earlier gradients."""
    first = sample.states[0]
    for state in sample.states:
        yield partial(adam_steps, state, sample.state_names)
    yield partial(state_reset, first.step, sample.previous_steps)
    if sample.initial_norm is not None:
        yield partial(weight_growth, [sample.states[-1].weights], sample.initial_norm)
    if sample.previous_steps is not None and first.gradient is not None:
        yield partial(successive_alignment, first.gradient, first.moment_before())


KEY_ENDS = tuple(
    (before, after)
    for group in (LayerGradients, LayerZeros, LayerSteps)
    for _, metric in declared(group)
    for before, _, after in [metric.key.partition(f"{{{label_field(group)}}}")]
)
"""Beginnings and ends of the keys of single layers."""


def without_many_layers(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values, without single layers' values if a network has more than `MAX_LAYERS`."""
    for before, after in KEY_ENDS:
        keys = {key for key in values if key.startswith(before) and key.endswith(after)}
        if len(keys) > MAX_LAYERS:
            values = {key: value for key, value in values.items() if key not in keys}
    return dict(values)
