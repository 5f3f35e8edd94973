"""Checks of the equations whose columns a sampled update has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.core.containment import Measurement
from esper_telemetry.core.event_parts import RolloutActions
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.equations.calibration import ActionInputs
from esper_telemetry.equations.comparison import EquationCheck, explained, unchecked
from esper_telemetry.equations.drawn_actions import (
    MAX_SQUASHED,
    action_effect,
    action_inputs,
    action_totals,
    judge_actions,
    judge_effects,
    surprising_changes,
)
from esper_telemetry.equations.entropy_loss import ENTROPY_LOSS, check_entropy, check_total_loss
from esper_telemetry.equations.environment_steps import check_environments
from esper_telemetry.equations.log_probs import LogProbInputs, check_log_probs, log_prob, shifted
from esper_telemetry.equations.minibatch_rows import LOG_RATIOS, MINIBATCHES, check_log_ratios, check_minibatches
from esper_telemetry.equations.policy_loss import POLICY_LOSS, check_policy_loss
from esper_telemetry.equations.replayed_outputs import FIRST_DIFFERENCE, REPLAYED_LOG_PROBS, VALUES, check_replayed_log_probs, check_values
from esper_telemetry.equations.transitions import (
    check_executed,
    check_rewards,
    check_transitions,
    checksums,
    compare_transitions,
    informative,
)
from esper_telemetry.equations.value_loss import check_value_loss
from esper_telemetry.events import RolloutEnd
from esper_telemetry.metrics.statistics import are_among
from esper_telemetry.updates.target_equations import Held, certain, first_values, target_checks
from esper_telemetry.updates.update import JoinedMinibatches, Update

ROUNDING = "a small difference in the first minibatch may come from the device's arithmetic"


def equation_checks(update: Update, facts: Facts, held: Held | None = None) -> Iterator[Measurement]:
    """Yield the check of every equation whose columns the update has; `facts` are the run's, `held` is as in `target_checks`."""
    yield from target_checks(update, facts, held)
    if update.rollout is not None:
        yield from collection_checks(update.rollout, facts)
    if update.rollout is not None and update.minibatches is not None and facts.columns_by_name:
        yield partial(_first_minibatch, update.rollout, update.minibatches, facts)
    yield from loss_checks(update, facts)


def collection_checks(rollout: RolloutEnd | RolloutActions, facts: Facts) -> Iterator[Measurement]:
    """Yield the checks of the data stored when the rollout was collected."""
    transitions, valid = rollout.transitions, rollout.valid
    distributions = rollout.logits or rollout.means
    if distributions and all(head in rollout.actions for head in (*rollout.logits, *rollout.means)):
        yield partial(_drawn, rollout, facts)
        if transitions is not None and transitions.informative:
            yield partial(_effects, rollout, transitions.outcomes - transitions.inputs, facts, late=True)
        elif transitions is None and rollout.observations is not None and informative(rollout.observations):
            yield partial(_effects, rollout, checksums(rollout.observations).diff(dim=0), facts, late=False)
    if transitions is not None or rollout.observations is not None:
        yield partial(_environments, rollout, facts)
    if transitions is not None:
        yield partial(
            _explained,
            compare_transitions,
            transitions.inputs,
            transitions.outcomes,
            ended=rollout.ended,
            finals=transitions.finals,
            valid=valid,
            informative=transitions.informative,
            resets=transitions.resets,
            whole=transitions.whole,
        )
        if rollout.rewards is not None:
            raw = rollout.raw_rewards if isinstance(rollout, RolloutEnd) else None
            ends = {name: getattr(rollout, name, None) for name in ("values", "ended", "time_limits")}
            yield partial(_explained, check_rewards, rollout.rewards, transitions.rewards, raw_rewards=raw, **ends, valid=valid)
        if transitions.sent is not None and transitions.received is not None:
            yield partial(_explained, check_executed, transitions.sent, transitions.received)
    elif rollout.observations is not None:
        yield partial(check_transitions, rollout.observations, ended=rollout.ended, valid=valid)


def _environments(rollout: RolloutEnd | RolloutActions, facts: Facts) -> EquationCheck:
    """Check what the environments do by the stored observations, and by what each step returned if it is known."""
    transitions, observations = rollout.transitions, rollout.observations
    if transitions is not None:
        inputs, vectors = transitions.inputs, transitions.informative
    else:
        assert observations is not None
        inputs, vectors = checksums(observations), informative(observations)
    (head,) = rollout.actions.values() if len(rollout.actions) == 1 else (None,)
    limits = rollout.time_limits if isinstance(rollout, RolloutEnd) else None
    terminated = rollout.terminated if isinstance(rollout, RolloutEnd) else None  # as the trainer sees it
    return check_environments(
        inputs,
        ended=rollout.ended,
        actions=head,
        rewards=rollout.rewards if transitions is None else transitions.rewards,
        raw_rewards=rollout.raw_rewards if isinstance(rollout, RolloutEnd) else None,
        trained=rollout.rewards,
        terminated=terminated if limits is None else rollout.ended & ~limits,
        informative=vectors,
        outcomes=None if transitions is None else transitions.outcomes,
        observations=observations,
        valid=rollout.valid,
        cast=0.0 if transitions is None else transitions.cast,
        drifting=bool(facts.normalize_observations),
    )


def _first_minibatch(rollout: RolloutEnd, minibatches: JoinedMinibatches, facts: Facts) -> Iterator[MetricGroup]:
    """Compare the outputs in the first minibatch, before any step, with the stored ones: a script's policy cannot be called.

    An unexplained difference of log-probabilities counts if it exceeds rounding. One of values does not, as their units may differ.
    """
    if minibatches.rows is None or not minibatches.counts:
        return
    first = slice(minibatches.counts[0])
    rows, size = minibatches.rows[first], rollout.log_probs.numel()
    if not len(rows) or int(rows.max()) >= size:
        return
    precision = facts.precision
    valid = torch.zeros(size, dtype=torch.bool, device=rows.device).index_fill(0, rows, True).view_as(rollout.log_probs)

    def replayed(stored: Tensor, numbers: Tensor) -> Tensor:
        return stored.double().flatten().index_copy(0, rows, numbers.detach().double()).view_as(stored)

    now = replayed(rollout.log_probs, rollout.log_probs.flatten()[rows] + minibatches.log_ratio[first])
    seen = rollout.seen_difference if rollout.seen_difference in REPLAYED_LOG_PROBS else None
    of_memory = _of_memory(rollout, now, valid, facts)
    if seen is not None and (not of_memory or seen in of_memory or REPLAYED_LOG_PROBS[seen].of != "memory"):
        of_memory = (seen,)
    known: dict[str, Callable[[], Tensor | None]] = dict.fromkeys(of_memory, rollout.log_probs.double)
    if (dimensions := _dimensions(minibatches)) > 1:
        known |= {"mean_in_loss": lambda: now * dimensions, "mean_at_collection": lambda: now / dimensions}

    def if_squash(name: str) -> Tensor | None:  # called only if the numbers differ
        return rollout.log_probs.double() if _squash_mistake(rollout, now, valid) == name else None

    known |= {name: partial(if_squash, name) for name in ("squashed_in_loss", "squashed_once")}
    known["other_spread"] = lambda: rollout.log_probs.double() if _has_other_spread(rollout, minibatches, rows) else None
    log_probs = check_replayed_log_probs(rollout.log_probs, now, alternatives=known, valid=valid, precision=precision)
    moved = not log_probs.matches and (log_probs.error or 0.0) > FIRST_DIFFERENCE
    if REPLAYED_LOG_PROBS.name not in facts.unchecked_equations:
        yield from log_probs if log_probs.matches or moved else unchecked(REPLAYED_LOG_PROBS, ROUNDING)
    old, new = minibatches.old_values, minibatches.values
    if old is None or new is None or not torch.equal(old[first], rollout.values.flatten()[rows]):
        return
    replay = replayed(rollout.values, new[first])

    def of_step(steps: int) -> Tensor | None:
        """The pass over the observation `steps` later, for rows whose observation is in the minibatch."""
        known = shifted(valid, steps, torch.zeros_like(valid))
        other = shifted(replay, steps, rollout.values.double())
        return None if known is None or other is None else torch.where(known, other, rollout.values.double())

    alternatives: dict[str, Callable[[], Tensor | None]] = {
        "observation_before": partial(of_step, -1),
        "observation_after": partial(of_step, 1),
    }
    alternatives |= dict.fromkeys([name for name in of_memory if name not in alternatives], rollout.values.double)
    values = check_values(rollout.values, replay, alternatives=alternatives, valid=valid, precision=precision)
    if not values.matches:
        certain = valid & _is_single(rollout)
        if not bool(certain.any()):
            yield from unchecked(VALUES, "the rows of the minibatch cannot be told apart")
            return
        values = check_values(rollout.values, replay, alternatives=alternatives, valid=certain, precision=precision)
    differs = (values.error or 0.0) > FIRST_DIFFERENCE
    if differs and not values.explained and _of_other_rows(rollout, new[first]):
        values = replace(values, explanations=explained(VALUES, "other_rows").explanations)
    elif differs and not (moved or values.explained) and _of_other_output(rollout, minibatches):
        values = replace(values, explanations=explained(VALUES, "other_output").explanations)
    sure = values.explained or (moved and differs)
    yield from values if sure else unchecked(VALUES, "values may be stored in units that differ from the loss")


def _has_other_spread(rollout: RolloutEnd, minibatches: JoinedMinibatches, rows: Tensor) -> bool:
    """Return whether the distributions of the first minibatch have the same modes as those acted with, and another width.

    Scores are a multiple of the acting policy's, or means are the same and standard deviations are not.
    """
    acted, trained, count = rollout.logits or rollout.means, minibatches.logits or minibatches.means, len(rows)
    if not acted or acted.keys() != trained.keys() or (rollout.means and minibatches.log_std.keys() != acted.keys()):
        return False
    factors = []
    for head, column in acted.items():
        one, other = column.double().flatten(0, 1)[rows], trained[head][:count].double()
        if one.shape != other.shape:
            return False
        if rollout.logits:
            one, other = one - one.mean(-1, keepdim=True), other - other.mean(-1, keepdim=True)
            factor = (one * other).sum() / other.square().sum().clamp(min=torch.finfo(other.dtype).tiny)
        else:
            widths = rollout.log_std[head].double(), minibatches.log_std[head].double()
            factor = torch.stack([width.reshape(-1, other.shape[-1]).mean() for width in widths]).diff().exp()
        same = factor * other if rollout.logits else other
        if not bool(torch.isfinite(one).all()) or float((one - same).abs().amax()) > SAME_MODES * float(one.abs().amax()):
            return False
        factors.append(float(factor))
    return any(abs(factor - 1) > MIN_OTHER_WIDTH for factor in factors)


def _squash_mistake(rollout: RolloutEnd, now: Tensor, valid: Tensor) -> str | None:
    """Return the hypothesis on a tanh that acting and the loss, with log-probabilities `now` [T, B], treat differently, or None."""
    if not rollout.means or len(rollout.actions) != len(rollout.means):
        return None

    def forms(log_probs: Tensor, rows: Tensor | None) -> set[str]:
        columns: dict[str, Any] = {"means": rollout.means, "log_std": rollout.log_std, "bounds": rollout.bounds}
        check = check_log_probs(rollout.actions, log_probs, valid=rows, **columns)
        return {"gaussian"} if check.matches else {one.name for one in check.hypotheses}

    acting = forms(rollout.log_probs, rollout.valid)
    known = {"gaussian", "squashed_gaussian"}
    training = forms(now, valid) & known
    if training and acting & {"squashed_actions", "squashed_before_storing"}:
        return "squashed_in_loss"
    return "squashed_once" if training and acting & known and training != acting & known else None


def _is_single(rollout: RolloutEnd) -> Tensor:
    """Return [T, B]: no other row has the same log-probability and return, so that a minibatch's row cannot be taken for another one."""
    pairs = torch.stack([rollout.log_probs.flatten(), rollout.returns.flatten()], -1)
    _, place, count = pairs.unique(dim=0, return_inverse=True, return_counts=True)
    single: Tensor = count[place] == 1
    return single.view_as(rollout.log_probs)


def _of_other_rows(rollout: RolloutEnd, outputs: Tensor) -> bool:
    """Return True for outputs [N] of the critic that are all among the stored values: they are in another order."""
    table, outputs = rollout.values.detach().flatten().double().sort().values, outputs.detach().flatten().double().to(rollout.values.device)
    return len(outputs.unique()) >= MIN_VALUE_ROWS and bool(are_among(outputs, table[None], SAME_RETURNS).all())


def _of_other_output(rollout: RolloutEnd, minibatches: JoinedMinibatches) -> bool:
    """Return True for stored values that the targets of the first loss are made of, but that the critic in it does not follow.

    So they have the units of the loss. The values of a critic that lags, such as a target network, follow.
    """
    stored, outputs, _ = first_values(rollout, minibatches)
    rows, returns = minibatches.rows, minibatches.returns
    if "total" not in minibatches.losses or rows is None or returns is None or len(stored) < MIN_VALUE_ROWS:
        return False  # a critic with a loss of its own may have been trained before
    rows, returns = rows[: len(stored)], returns[: len(stored)].double()
    sums = rollout.advantages.flatten()[rows].double() + stored
    if float((sums - returns).abs().amax()) > SAME_RETURNS * float(returns.abs().amax()):
        return False
    together = torch.corrcoef(torch.stack([stored, outputs]))[0, 1]
    return not bool(together > FOLLOWING)


def _of_memory(rollout: RolloutEnd, now: Tensor, valid: Tensor, facts: Facts) -> tuple[str, ...]:
    """Return the hypotheses about a memory that say in which rows log-probabilities differ: before or after the first end of an episode.

    If memory is reset with each episode, its state at the rollout's start affects only the rows before the first end. If it is not
    reset, only later rows differ. If it is reset one step early, these and the last step of the first episode differ.
    """
    if facts.policy not in RECURRENT or rollout.ended.shape != now.shape:
        return ()
    begun = torch.zeros_like(rollout.ended)
    begun[1:] = rollout.ended[:-1].long().cumsum(0) > 0
    differs = (now - rollout.log_probs).abs() > MAX_LOG_PROB_ERROR
    before, after = differs[valid & ~begun], differs[valid & begun]
    if min(len(before), len(after)) < MIN_MEMORY_ROWS:
        return ()
    if bool(before.any()) and bool(after.any()):
        inside = valid & ~begun & ~rollout.ended
        return () if bool(differs[inside].any()) or int(inside.sum()) < MIN_MEMORY_ROWS else ("memory_reset_early",)
    if not bool(before.any()) and not bool(after.any()):
        return ()
    return ("memory_zero", "other_memory") if bool(before.any()) else ("memory_not_reset",)


def _drawn(rollout: RolloutEnd | RolloutActions, facts: Facts) -> Iterator[MetricGroup]:
    """Check log-probabilities and actions. A trainer that names its heads shows what it acts on.

    For other programs, the recorded distributions may belong to other actions, or to some of the actions. They are accepted only if
    they, or a known mistake, reproduce the stored log-probabilities.
    """
    check = check_log_probs(
        rollout.actions,
        rollout.log_probs,
        logits=rollout.logits,
        means=rollout.means,
        log_std=rollout.log_std,
        relevant=rollout.relevance,
        squashed=bool(facts.squashed),
        bounds=rollout.bounds,
        valid=rollout.valid,
        precision=facts.precision,
    )
    if check.equation.name in facts.unchecked_equations:
        return
    in_sequences = isinstance(rollout, RolloutActions) and rollout.drawn
    if in_sequences and rollout.valid is not None:
        counts = rollout.valid.any(1).tolist()
        first = counts.index(False) if False in counts else len(counts)
        if any(counts[first:]):  # else the sequences have ended
            yield from explained(MINIBATCHES, "step_left_out", fitted=first + 1)
    shown = facts.heads is not None or in_sequences
    # each head has a dimension of the actions that arrive in the environments
    executed = len(rollout.actions) > 1 and rollout.transitions is not None and rollout.transitions.sent is not None
    named = any(not one.doubtful_without or (executed and one.doubtful_without == "heads") for one in check.hypotheses)
    if shown or check.matches or named:
        yield from check
    inputs = _inputs_of(rollout, facts) if shown or check.matches else None
    if inputs is None:
        return
    check = judge_actions(inputs)
    yield from check
    if check.error is not None:
        yield from action_totals(inputs)


def _effects(rollout: RolloutEnd | RolloutActions, change: Tensor, facts: Facts, *, late: bool) -> Iterator[MetricGroup | EquationCheck]:
    """Yield the effect of the actions, and test that it is not delayed by several steps, if the actions were drawn from these
    distributions.

    `change` is the change of the observation after each step. The last step's change may be unknown.
    """
    inputs = _inputs_of(rollout, facts)
    if inputs is None or not judge_actions(inputs).matches:
        return
    ended = rollout.ended[: len(change)]
    effect = action_effect(inputs, change, ended)
    if effect is not None:
        yield effect
    surprises = None if not late or rollout.observations is None else surprising_changes(rollout.observations, ended)
    if surprises is not None:
        change, ended = surprises, ended[:-1]
    check = judge_effects(inputs, change, ended) if late else None
    if check is not None and check.explanations:
        yield check  # joined with the check of the actions that arrive


def _inputs_of(rollout: RolloutEnd | RolloutActions, facts: Facts) -> ActionInputs | None:
    """Return actions and distributions; None if the noise is correlated on purpose, or cannot be recovered after a squash."""
    squashed = bool(facts.squashed)
    lost = squashed and any(bool((rollout.actions[head].abs() > MAX_SQUASHED).any()) for head in rollout.means)
    if facts.correlated_noise or lost:
        return None
    return action_inputs(
        rollout.actions,
        {"logits": rollout.logits, "means": rollout.means, "log_std": rollout.log_std},
        action_masks=None,
        relevant=rollout.relevance,
        bounds={} if squashed else rollout.bounds,
        valid=rollout.valid,
    )


def _explained(check: Callable[..., EquationCheck], *columns: Any, **settings: Any) -> Iterable[MetricGroup]:
    """Return the check, without differences that no known mistake explains: programs transform observations, rewards and actions on
    purpose.
    """
    result = check(*columns, **settings)
    return result if result.explained else ()


MIN_VALUE_ROWS = 32
"""Rows above which a correlation of values is not a coincidence."""

SAME_RETURNS = 1e-5
"""Largest difference of equal returns, relative to the largest one."""

FOLLOWING = 0.9
"""Correlation above which one critic follows another."""

MAX_LOG_PROB_ERROR = 1e-3
"""Largest difference between equal log-probabilities in single precision, in nats."""

SAME_MODES = 1e-4
"""Largest difference of equal scores or means, relative to the largest of them."""

MIN_OTHER_WIDTH = 0.01
"""Distance from 1 of a temperature, or a ratio of standard deviations, that is no rounding."""

MIN_MEMORY_ROWS = 8
"""Rows needed before and after the first end of an episode, so that a difference in one part is not a coincidence."""

RECURRENT = ("lstm", "gru")
"""Policies whose minibatches hold whole sequences, by the fact `policy`."""


class LossClaims(NamedTuple):
    """Losses that a trainer computed, and their inputs.

    Attributes:
        batches: minibatches with R rows.
        rollout: None if the source does not give it.
        raw_advantages: before normalisation, [R]; None if they are not known.
        weights: known weights of the losses `value` and `entropy`.
        facts: of the run.
    """

    batches: JoinedMinibatches
    rollout: RolloutEnd | None
    raw_advantages: Tensor | None
    weights: Mapping[str, float]
    facts: Facts

    def claim(self, name: str) -> Tensor | None:
        """Return the losses [M] of that name; None unless there is one for each minibatch."""
        losses = self.batches.losses.get(name)
        return losses if losses is not None and len(losses) == len(self.batches.counts) else None

    def of_rows(self, column: Tensor) -> Tensor | None:
        """Return a column of the rollout [T, B, ...] in the rows of the minibatches [R, ...]; None if these are not known."""
        rows, rollout = self.batches.rows, self.rollout
        fits = rows is not None and rollout is not None and int(rows.max()) < rollout.rewards.numel()
        return column.flatten(0, 1)[rows] if fits else None

    @property
    def bonus(self) -> Tensor | None:
        """Entropy losses times their weight, [M]."""
        entropy, weight = self.claim("entropy"), self.weights.get("entropy")
        return None if entropy is None or not weight else weight * entropy

    def log_probs(self) -> Tensor | None:
        """Return the current log-probabilities of the actions [R], from the old log-probabilities and the ratio."""
        stored = None if self.rollout is None else self.of_rows(self.rollout.log_probs)
        return None if stored is None else stored + self.batches.log_ratio

    def chosen_log_probs(self, rows: Tensor | None = None) -> Tensor | None:
        """Return the same [R] by the distributions of the minibatches; None if these or an action are not known.

        With `rows` [R], the actions are taken from these rows of the rollout.
        """
        batches, rollout = self.batches, self.rollout
        if rollout is None or not set(batches.log_std) <= set(batches.means):
            return None
        actions = {}
        for head, like in {**dict.fromkeys(batches.logits, batches.log_ratio), **batches.log_std}.items():
            stored = rollout.actions.get(head)
            taken = None if stored is None else self.of_rows(stored)
            if stored is None or taken is None:
                return None
            actions[head] = (taken if rows is None else stored.flatten(0, 1)[rows]).reshape(like.shape)
        inputs = LogProbInputs(
            stored=torch.zeros_like(batches.log_ratio, dtype=torch.float64),
            actions=actions,
            logits={head: logits.double() for head, logits in batches.logits.items()},
            means={head: batches.means[head] for head in batches.log_std},
            std={head: log_std.double().exp() for head, log_std in batches.log_std.items()},
            relevant=batches.relevance,
        )
        return log_prob(inputs) if actions else None


def loss_checks(update: Update, facts: Facts) -> Iterator[Measurement]:
    """Yield the checks of the trainer's losses and of its minibatches; `facts` are the run's."""
    batches = update.minibatches
    if batches is None:
        return
    known = {"value": facts.value_coef, "entropy": facts.entropy_coef}
    now = {} if update.progress is None else update.progress.end.coefficients
    claims = LossClaims(
        batches=batches,
        rollout=update.rollout,
        raw_advantages=None if update.collected is None else update.collected.advantages,
        weights={**{name: weight for name, weight in known.items() if weight is not None}, **now},
        facts=facts,
    )
    unshown = facts.unchecked_equations
    checks = {"policy": _policy_loss, "value": _value_loss, "entropy": _entropy_loss, "total": _total_loss}
    for name, check in checks.items():
        if f"{name}_loss" not in unshown:
            yield partial(certain, facts, partial(check, claims))
    if update.rollout is not None and batches.rows is not None and LOG_RATIOS.name not in unshown:
        yield partial(_log_ratios, claims)
    earlier = None if batches.earlier is None else int(batches.earlier.sum())
    if earlier and MINIBATCHES.name not in unshown:
        yield partial(explained, MINIBATCHES, "earlier_rows", fitted=earlier)
    elif update.rollout is not None and batches.rows is not None and MINIBATCHES.name not in unshown:
        shuffled = update.context.memory is None and facts.policy not in RECURRENT
        # an exception, a limit on the KL divergence, or a rule of the program's own may end an update
        ends_early = update.progress is None or facts.target_kl is not None or facts.num_epochs != 1
        yield partial(_minibatches, batches, update.rollout, shuffled=shuffled, ends_early=ends_early)


def _log_ratios(claims: LossClaims) -> EquationCheck:
    """Compare with the recorded distributions, if they give the stored log-probabilities in the first minibatch, before any step."""
    batches, rollout = claims.batches, claims.rollout
    chosen = claims.chosen_log_probs()
    stored = None if rollout is None else claims.of_rows(rollout.log_probs)
    if rollout is None or chosen is None or stored is None or batches.rows is None:
        return unchecked(LOG_RATIOS, "the trainer does not show the distributions and the actions of the minibatches")
    first = slice(batches.counts[0])
    if float((chosen - stored)[first].abs().max()) > MAX_LOG_PROB_ERROR * max(1.0, float(stored.abs().max())):
        return unchecked(LOG_RATIOS, "the recorded distributions do not give the stored log-probabilities")
    compared = partial(
        check_log_ratios,
        batches.log_ratio,
        chosen,
        stored,
        valid=batches.valid,
        dimensions=_dimensions(batches),
        precision=claims.facts.precision,
    )
    check = compared()
    if check.matches:
        return check
    places = torch.arange(len(chosen), device=chosen.device) % rollout.log_probs.numel()
    rows, (steps, envs) = batches.rows, rollout.log_probs.shape
    # rows with steps and environments swapped, for both ways of flattening columns
    exchanged = [rows % steps * envs + rows // steps, rows % envs * steps + rows // envs]
    return compared(
        in_order=rollout.log_probs.flatten()[places],
        swapped=_nearest([rollout.log_probs.flatten()[other] for other in exchanged], chosen - batches.log_ratio),
        now_swapped=_nearest([claims.chosen_log_probs(other) for other in exchanged], batches.log_ratio + stored),
    )


def _dimensions(batches: JoinedMinibatches) -> int:
    """Return the number of action dimensions and heads over which log-probabilities are summed."""
    return max(1, len(batches.logits) + sum(means.shape[-1] for means in batches.means.values()))


def _nearest(columns: Sequence[Tensor | None], claimed: Tensor) -> Tensor | None:
    known = [column for column in columns if column is not None]
    return min(known, key=lambda column: float((column - claimed).abs().sum()), default=None)


def _policy_loss(claims: LossClaims) -> EquationCheck | None:
    """Check the clipped surrogate. A single step without a ratio may be A2C, which can have PPO's settings too."""
    batches, facts, loss = claims.batches, claims.facts, claims.claim("policy")
    if facts.clip is None and facts.loss_pairs:
        return explained(POLICY_LOSS, "broadcast")
    if loss is None or facts.clip is None:
        return None
    check = check_policy_loss(
        loss,
        batches.log_ratio,
        batches.advantages,
        clip=facts.clip,
        valid=batches.valid,
        counts=batches.counts,
        raw_advantages=claims.raw_advantages if facts.normalize_advantages else None,
        log_probs=claims.log_probs(),
        head_log_ratios=tuple(batches.head_log_ratios.values()) if len(batches.head_log_ratios) > 1 else (),
        bonus=claims.bonus,
        precision=facts.precision,
    )
    single = len(batches.counts) == 1 and facts.columns_by_name and not bool(batches.log_ratio.any())
    if single and any(one.doubtful_without == "ratio" for one in check.hypotheses):
        return unchecked(POLICY_LOSS, "it lacks a ratio, like A2C, although a clip range is set")
    return check


def _value_loss(claims: LossClaims) -> EquationCheck | None:
    batches, facts, loss = claims.batches, claims.facts, claims.claim("value")
    if loss is None or batches.values is None or batches.returns is None:
        return None
    return check_value_loss(
        loss,
        batches.values,
        batches.returns,
        old_values=batches.old_values,
        clip_value=None if batches.old_values is None else facts.clip_value,
        valid=batches.valid,
        counts=batches.counts,
        advantages=batches.advantages,
        raw_advantages=claims.raw_advantages,
        weight=claims.weights.get("value"),
        clip=facts.clip,
        precision=facts.precision,
    )


def _entropy_loss(claims: LossClaims) -> EquationCheck | None:
    """Check the entropy. Distributions that do not give the ratio's log-probabilities may be part of the policy, or from before a
    squash. An unexplained difference is then inconclusive.
    """
    batches, loss = claims.batches, claims.claim("entropy")
    if loss is None or not (batches.logits or batches.log_std):
        return None
    chosen, trained = claims.chosen_log_probs(), claims.log_probs()
    differs = chosen is None or trained is None or float((chosen - trained).abs().max()) > MAX_LOG_PROB_ERROR
    check = check_entropy(
        loss,
        logits=batches.logits,
        log_std=batches.log_std,
        relevance=batches.relevance,
        valid=batches.valid,
        counts=batches.counts,
        chosen_log_probs=trained if chosen is None else chosen,  # if the actions are not known, it may be either
        log_probs=trained if differs else None,
        weight=claims.weights.get("entropy"),
        precision=claims.facts.precision,
    )
    if differs and not check.explained:
        return unchecked(ENTROPY_LOSS, "the recorded distributions do not give the log-probabilities of the ratio")
    return check


def _total_loss(claims: LossClaims) -> EquationCheck | None:
    """Check the sum of the terms. If it differs, they may already include their weights, or the bonus."""
    total, policy, value, entropy = (claims.claim(name) for name in ("total", "policy", "value", "entropy"))
    value_coef, entropy_coef = (claims.weights.get(name) for name in ("value", "entropy"))
    bonus = claims.bonus
    if total is None or policy is None or value is None or value_coef is None or entropy_coef is None:
        return None
    if entropy_coef and (entropy is None or bonus is None):
        return None
    weights = {"value_coef": float(value_coef), "entropy_coef": float(entropy_coef)}

    def check(policy: Tensor, value: Tensor, entropy: Tensor | None) -> EquationCheck:
        given = [entropy] if entropy_coef else []
        return check_total_loss(total, policy, value, *given, **weights, precision=claims.facts.precision)

    result = check(policy, value, entropy)
    if result.matches and result.error is not None:
        return result
    if bonus is not None and _includes(_policy_loss(claims), "bonus"):
        policy = policy - bonus
    if _includes(_value_loss(claims), "weight"):
        value = value / value_coef
    if entropy is not None and _includes(_entropy_loss(claims), "weight"):
        entropy = entropy / entropy_coef
    return check(policy, value, entropy)


def _includes(check: EquationCheck | None, part: str) -> bool:
    return check is not None and any(one.of == part for one in check.hypotheses)


def short_passes(parts: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the passes of a source that does not count them, if all take the same few rows in several minibatches; otherwise empty."""
    taken, passes = set[int](), list[list[Tensor]]()
    for part in parts:
        rows = set(part.tolist())
        if not passes or taken & rows:
            passes, taken = [*passes, []], set()
        passes[-1].append(part)
        taken |= rows
    visited = [torch.cat(one).sort().values for one in passes]
    several = len(passes) > 1 and min(map(len, passes)) > 1
    return passes if several and all(torch.equal(one, visited[0]) for one in visited) else []


def _minibatches(batches: JoinedMinibatches, rollout: RolloutEnd, *, shuffled: bool, ends_early: bool) -> EquationCheck:
    """Compare the rows of each pass with a permutation; a source that does not count passes gives them all as one.

    A single pass without all rows may have ended early, unless some rows are repeated.
    """
    rows, size = batches.rows, rollout.rewards.numel()
    if rows is None or int(rows.max()) >= size:
        return unchecked(MINIBATCHES, "its rows are not from the rollout")
    count = size if rollout.valid is None else int(rollout.valid.sum())
    passes: dict[int, list[Tensor]] = {}
    uncounted = len(set(batches.epochs)) == 1 and len(rows) > count
    parts = rows.split(list(batches.counts))
    if uncounted and len(rows) % count and all(len(part.unique()) == len(part) for part in parts):
        return unchecked(MINIBATCHES, "the trainer does not count its passes")
    row_count = 0
    for epoch, part in zip(batches.epochs, parts, strict=True):
        passes.setdefault(row_count // count if uncounted else epoch, []).append(part)
        row_count += len(part)
    if len(passes) == 1:
        passes = dict(enumerate(short_passes(parts))) or passes
    if len(passes) == 1 and len(rows) < count and ends_early and len(rows.unique()) == len(rows):
        return unchecked(MINIBATCHES, "training stopped in its only pass")
    return check_minibatches(list(passes.values()), size, environments=rollout.rewards.shape[1], valid=rollout.valid, shuffled=shuffled)
