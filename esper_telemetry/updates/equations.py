"""The equations that the columns of a sampled update allow to check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.events import RolloutEnd
from esper_telemetry.metrics.integrity.equations import EquationCheck
from esper_telemetry.metrics.integrity.rollouts.actions import (
    MAX_SQUASHED,
    action_inputs,
    action_totals,
    judge_actions,
)
from esper_telemetry.metrics.integrity.rollouts.log_probs import check_log_probs
from esper_telemetry.metrics.integrity.rollouts.transitions import (
    check_executed,
    check_rewards,
    check_transitions,
    compare_transitions,
)
from esper_telemetry.updates.containment import Measurement
from esper_telemetry.updates.data import UpdateData
from esper_telemetry.updates.loss_equations import loss_checks
from esper_telemetry.updates.target_equations import target_checks


def equation_checks(update: UpdateData, facts: Mapping[str, Any]) -> Iterator[Measurement]:
    """Yield the check of every equation whose columns the update has; `facts` are those of the run."""
    yield from target_checks(update, facts)
    if update.rollout is not None:
        yield from _collection(update.rollout, facts)
    yield from loss_checks(update, facts)


def _collection(rollout: RolloutEnd, facts: Mapping[str, Any]) -> Iterator[Measurement]:
    """Check what was stored when the rollout was collected."""
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
        yield _explained(check_rewards, rollout.rewards, transitions.rewards, valid=valid)
        if transitions.sent is not None and transitions.received is not None:
            yield _explained(check_executed, transitions.sent, transitions.received)
    elif rollout.observations is not None:
        yield partial(check_transitions, rollout.observations, ended=rollout.ended, valid=valid)


def _drawn(rollout: RolloutEnd, facts: Mapping[str, Any]) -> Iterator[MetricGroup]:
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


def _actions(rollout: RolloutEnd, facts: Mapping[str, Any]) -> Iterator[MetricGroup]:
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
