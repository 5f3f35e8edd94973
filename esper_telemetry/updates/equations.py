"""The equations that the columns of a sampled update allow to check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.events import MinibatchesEnd, RolloutActions, RolloutEnd
from esper_telemetry.metrics.integrity.equations import EquationCheck, unchecked
from esper_telemetry.metrics.integrity.rollouts.actions import (
    MAX_SQUASHED,
    action_inputs,
    action_totals,
    judge_actions,
)
from esper_telemetry.metrics.integrity.rollouts.collection import (
    REPLAYED_LOG_PROBS,
    VALUES,
    check_replayed_log_probs,
    check_values,
)
from esper_telemetry.metrics.integrity.rollouts.log_probs import check_log_probs, shifted
from esper_telemetry.metrics.integrity.rollouts.transitions import (
    check_executed,
    check_rewards,
    check_transitions,
    compare_transitions,
)
from esper_telemetry.updates.containment import Measurement
from esper_telemetry.updates.data import UpdateData
from esper_telemetry.updates.loss_equations import loss_checks
from esper_telemetry.updates.target_equations import BY_NAME, target_checks

FIRST_DIFFERENCE = 1e-2
"""Error of a first minibatch, next to the largest number, that no arithmetic of a device explains."""

ROUNDING = "a small difference in the first minibatch may be that of the device's arithmetic"


def equation_checks(update: UpdateData, facts: Mapping[str, Any]) -> Iterator[Measurement]:
    """Yield the check of every equation whose columns the update has; `facts` are those of the run."""
    yield from target_checks(update, facts)
    if update.rollout is not None:
        yield from collection_checks(update.rollout, facts)
    if update.rollout is not None and update.minibatches is not None and facts.get(BY_NAME):
        yield partial(_first_minibatch, update.rollout, update.minibatches, facts)
    yield from loss_checks(update, facts)


def collection_checks(rollout: RolloutEnd | RolloutActions, facts: Mapping[str, Any]) -> Iterator[Measurement]:
    """Yield the checks of what was stored when the rollout was collected."""
    distributions = rollout.logits or rollout.means
    if distributions and all(head in rollout.actions for head in (*rollout.logits, *rollout.means)):
        yield partial(_drawn, rollout, facts)
    transitions, valid = rollout.transitions, rollout.valid
    if transitions is not None:
        columns = (transitions.inputs, transitions.outcomes)
        flag = transitions.informative
        yield _explained(
            compare_transitions, *columns, ended=rollout.ended, finals=transitions.finals, valid=valid, informative=flag
        )
        if rollout.rewards is not None:
            yield _explained(check_rewards, rollout.rewards, transitions.rewards, valid=valid)
        if transitions.sent is not None and transitions.received is not None:
            yield _explained(check_executed, transitions.sent, transitions.received)
    elif rollout.observations is not None:
        yield partial(check_transitions, rollout.observations, ended=rollout.ended, valid=valid)


def _first_minibatch(
    rollout: RolloutEnd, minibatches: MinibatchesEnd, facts: Mapping[str, Any]
) -> Iterator[MetricGroup]:
    """Compare what training computes in its first minibatch, before any step, with what was stored: a script's policy cannot be asked.

    A difference without an explanation counts where log-probabilities have it, by more than rounding: values may be stored in other units.
    """
    if minibatches.rows is None or not minibatches.counts:
        return
    first = slice(minibatches.counts[0])
    rows, size = minibatches.rows[first], rollout.log_probs.numel()
    if not len(rows) or int(rows.max()) >= size:
        return
    precision = facts.get("precision")
    valid = torch.zeros(size, dtype=torch.bool, device=rows.device).index_fill(0, rows, True).view_as(rollout.log_probs)

    def replayed(stored: Tensor, numbers: Tensor) -> Tensor:
        return stored.double().flatten().index_copy(0, rows, numbers.detach().double()).view_as(stored)

    now = replayed(rollout.log_probs, rollout.log_probs.flatten()[rows] + minibatches.log_ratio[first])
    log_probs = check_replayed_log_probs(rollout.log_probs, now, valid=valid, precision=precision)
    moved = not log_probs.matches and (log_probs.error or 0.0) > FIRST_DIFFERENCE
    yield from log_probs if log_probs.matches or moved else unchecked(REPLAYED_LOG_PROBS, ROUNDING)
    old, new = minibatches.old_values, minibatches.values
    if old is None or new is None or not torch.equal(old[first], rollout.values.flatten()[rows]):
        return
    replay = replayed(rollout.values, new[first])

    def of_step(steps: int) -> Tensor | None:
        """The pass over the observation `steps` later, where the minibatch has it."""
        known = shifted(valid, steps, torch.zeros_like(valid))
        other = shifted(replay, steps, rollout.values.double())
        return None if known is None or other is None else torch.where(known, other, rollout.values.double())

    alternatives = {"observation_before": partial(of_step, -1), "observation_after": partial(of_step, 1)}
    values = check_values(rollout.values, replay, alternatives=alternatives, valid=valid, precision=precision)
    sure = values.matches or values.explanations or (moved and (values.error or 0.0) > FIRST_DIFFERENCE)
    yield from values if sure else unchecked(VALUES, "values may be stored in other units than those of the loss")


def _drawn(rollout: RolloutEnd | RolloutActions, facts: Mapping[str, Any]) -> Iterator[MetricGroup]:
    """Check log-probabilities and actions. A trainer that names its heads shows what it acts on.

    Of any other program the distributions are those that it asked for a log-probability, which may be of other actions, or of a part of
    them: these are those acted on only where they give the stored log-probabilities, or a known mistake does.
    """
    check = check_log_probs(
        rollout.actions,
        rollout.log_probs,
        logits=rollout.logits,
        means=rollout.means,
        log_std=rollout.log_std,
        relevant=rollout.relevance,
        squashed=bool(facts.get("squashed")),
        bounds=rollout.bounds,
        valid=rollout.valid,
        precision=facts.get("precision"),
    )
    shown = "heads" in facts
    named = any(one.hypothesis.name != "heads_left_out" for one in check.explanations)
    if shown or check.matches or named:
        yield from check
    if shown or check.matches:
        yield from _actions(rollout, facts)


def _actions(rollout: RolloutEnd | RolloutActions, facts: Mapping[str, Any]) -> Iterator[MetricGroup]:
    """Test that the actions were drawn from their distributions; noise that is correlated on purpose is not tested."""
    squashed = bool(facts.get("squashed"))
    lost = squashed and any(bool((rollout.actions[head].abs() > MAX_SQUASHED).any()) for head in rollout.means)
    if facts.get("correlated_noise") or lost:
        return
    inputs = action_inputs(
        rollout.actions,
        {"logits": rollout.logits, "means": rollout.means, "log_std": rollout.log_std},
        action_masks=None,
        relevant=rollout.relevance,
        bounds={} if squashed else rollout.bounds,
        valid=rollout.valid,
    )
    check = judge_actions(inputs)
    yield from check
    if check.error is not None:
        yield from action_totals(inputs)


def _explained(check: Callable[..., EquationCheck], *columns: Any, **settings: Any) -> Measurement:
    """Return the check, without differences that no known mistake explains: programs change observations, rewards and actions on their way
    on purpose.
    """

    def run() -> Iterable[MetricGroup]:
        result = check(*columns, **settings)
        return result if result.matches or result.explanations else ()

    return run
