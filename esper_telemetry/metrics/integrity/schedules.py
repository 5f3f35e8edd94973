"""The equation of schedules: learning rates over the updates of a run, as they were set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esper_telemetry.core.borders import checked_arguments
from esper_telemetry.core.equations.equation import Equation, Hypothesis
from esper_telemetry.core.equations.schedule import (
    MIN_TOLERANCE,
    Array,
    RateSchedule,
    ScheduleInputs,
    compare_rates,
    fitted_speed,
)
from esper_telemetry.metrics.integrity.equations import EquationCheck, Explanation, unchecked


def _anneals(inputs: ScheduleInputs) -> bool:
    return inputs.schedule.initial != inputs.schedule.final


def _constant(inputs: ScheduleInputs) -> Array | None:
    return np.full_like(inputs.progress, inputs.schedule.initial) if _anneals(inputs) else None


def _annealed(inputs: ScheduleInputs) -> Array | None:
    return None if _anneals(inputs) else inputs.schedule.initial * (1 - inputs.progress)


def _per_count(inputs: ScheduleInputs, *names: str, stops: bool = True) -> Array | None:
    """Return the rates where each update counts as so many; None where one of the numbers is 1, or not known."""
    counts = [inputs.schedule.counts.get(name, 1) for name in names]
    return inputs.line(float(np.prod(counts)), stops=stops) if 1 not in counts and _anneals(inputs) else None


def _rising(inputs: ScheduleInputs) -> Array | None:
    return inputs.at(1 - inputs.progress) if _anneals(inputs) else None


def _fit_early_end(inputs: ScheduleInputs, rates: Array) -> tuple[float, Array] | None:
    if inputs.schedule.defect:
        return inputs.defective("ending_early", rates)
    speed = fitted_speed(inputs, rates)
    return (1 / speed, inputs.line(speed)) if speed is not None and speed > 1 else None


def _fit_negative(inputs: ScheduleInputs, rates: Array) -> tuple[float, Array] | None:
    if inputs.schedule.defect:
        return inputs.defective("negative", rates)
    speed = fitted_speed(inputs, rates)
    return (1 / speed, inputs.line(speed, stops=False)) if speed is not None and speed > 1 else None


def _fit_other_end(inputs: ScheduleInputs, rates: Array) -> tuple[float, Array] | None:
    """Return the rate at the end of a slower line, and its rates."""
    speed = fitted_speed(inputs, rates)
    if speed is None or not 0 < speed < 1:
        return None
    return inputs.schedule.initial + speed * (inputs.schedule.final - inputs.schedule.initial), inputs.line(speed)


def _fit_unset_end(inputs: ScheduleInputs, rates: Array) -> tuple[float, Array] | None:
    return None if inputs.schedule.final_is_set else _fit_other_end(inputs, rates)


def _fit_set_end(inputs: ScheduleInputs, rates: Array) -> tuple[float, Array] | None:
    return _fit_other_end(inputs, rates) if inputs.schedule.final_is_set else None


def _fit_restarts(inputs: ScheduleInputs, rates: Array) -> tuple[float, Array] | None:
    """Return the share of the run after which a line restarts, and its rates; the first line gives both, and the others decide.

    A line that is too fast and has not come to its end may be the first of several.
    """
    if inputs.schedule.defect:
        return inputs.defective("restarting", rates)
    way = inputs.schedule.final - inputs.schedule.initial or -inputs.schedule.initial
    back = np.flatnonzero(np.diff(rates) * np.sign(way) < -MIN_JUMP * np.abs(way))
    if way == 0:
        return None
    if not len(back):
        faster = fitted_speed(inputs, rates)
        if faster is None or faster <= 1 or faster * inputs.progress[-1] >= 1:
            return None
        return 1 / faster, inputs.line(faster, stops=False)
    end, progress = back[0] + 1, inputs.progress
    square = progress[:end] @ progress[:end]
    speed = progress[:end] @ (rates[:end] - inputs.schedule.initial) / square / way if square else 0.0
    if speed <= 0:
        return None
    period = progress[end] - (rates[end] - inputs.schedule.initial) / way / speed
    if period <= 0:
        return None
    since = progress - period * np.floor(progress / period + 1e-6)
    return float(period), inputs.schedule.initial + way * speed * since


def _fit_late_start(inputs: ScheduleInputs, rates: Array) -> tuple[float, Array] | None:
    """Return the share of the run that is over when a schedule begins to move, and rates that then follow it, or go through all of it."""
    moved = np.flatnonzero(np.abs(rates - rates[0]) > MIN_TOLERANCE * abs(inputs.schedule.initial))
    if not _anneals(inputs) or not len(moved) or moved[0] < 2 or len(rates) - moved[0] < 2:
        return None
    start = inputs.progress[moved[0] - 1]
    rest = inputs.line(), inputs.at(np.maximum(0, (inputs.progress - start) / (1 - start)))
    ways = [np.where(inputs.progress <= start, inputs.schedule.initial, after) for after in rest]
    return float(start), min(ways, key=lambda values: float(np.abs(values - rates).max()))


def _fit_exponential(inputs: ScheduleInputs, rates: Array) -> tuple[float, Array] | None:
    """Return the share of the first rate that is left at the end of the run, of a rate that falls by the same factor in each update."""
    if len(rates) < MIN_FITTED or not (rates > 0).all() or inputs.schedule.initial <= 0:
        return None
    falls, square = np.log(rates / inputs.schedule.initial)[::2], inputs.progress[::2] @ inputs.progress[::2]
    exponent = inputs.progress[::2] @ falls / square if square else 0.0
    return (
        (float(np.exp(exponent)), inputs.schedule.initial * np.exp(exponent * inputs.progress))
        if exponent < 0
        else None
    )


def _fit_steps(inputs: ScheduleInputs, rates: Array) -> tuple[float, Array] | None:
    """Return the factor by which the rate falls at some updates, and stays between them; the first fall gives it, and the others decide."""
    if not (rates > 0).all():
        return None
    ratios = rates[1:] / rates[:-1]
    falls = np.flatnonzero(ratios < 1 - 1e-3)
    if len(falls) < 2 or 2 * len(falls) > len(ratios) or (ratios > 1 + 1e-6).any():
        return None
    factor = float(ratios[falls[0]])
    count = np.concatenate([[0], np.cumsum(ratios < 1 - 1e-3)])
    return factor, rates[0] * factor**count


def _adaptive(inputs: ScheduleInputs, rates: Array) -> tuple[float, Array] | None:
    """Return the factor by which a rate is multiplied or divided as the divergence asks for, and the rates with whole powers of it."""
    if len(rates) < MIN_FITTED or not (rates > 0).all():
        return None
    powers = np.log(rates / rates[0]) / np.log(ADAPTIVE_FACTOR)
    whole = np.round(powers)
    turns = np.diff(np.sign(np.diff(whole))[np.diff(whole) != 0])
    return (ADAPTIVE_FACTOR, rates[0] * ADAPTIVE_FACTOR**whole) if turns.any() else None


def _fit_warm_up(inputs: ScheduleInputs, rates: Array) -> tuple[float, Array] | None:
    """Return the share of the run in which the rate rises from 0, and rates that then go on, or begin, along the schedule."""
    top = int(rates.argmax())
    if not 0 < top < len(rates) - 1 or not (np.diff(rates[: top + 1]) > 0).all():
        return None
    share = float(inputs.progress[top] * inputs.schedule.initial / rates[top]) if rates[top] > 0 else 1.0
    if not 0 < share < 1:
        return None
    rise = inputs.progress / share
    rest = inputs.at(np.clip((inputs.progress - share) / (1 - share), 0, 1)), inputs.line()
    ways = [np.where(rise < 1, inputs.schedule.initial * rise, after) for after in rest]
    return share, min(ways, key=lambda values: float(np.abs(values - rates).max()))


MIN_JUMP = 1e-3
"""Step back, as a share of the way of a schedule, from which on it restarts."""

MIN_FITTED = 6
"""Updates from which on the form of a curve is recognised."""

ADAPTIVE_FACTOR = 1.5
"""Factor of a rate that follows the divergence, in rsl_rl and Isaac Gym."""

PAPER = "1707.06347; Huang et al. 2022, detail 4"

SCHEDULES = Equation(
    name="schedules",
    quantity="the learning rates",
    equation="lr = lr_0 + (lr_1 - lr_0) n / N, environment steps n of N, or another function of n / N that is set",
    source=PAPER,
    inputs="a learning rate that is constant or follows a schedule, by its settings",
    compute=lambda inputs: inputs.line(),
    rank=65,
    advice="Compare the learning rate that each update uses with the schedule that is set.",
    hypotheses=(
        Hypothesis(
            name="constant",
            says="the first one throughout, although a schedule is set",
            equation="lr = lr_0",
            compute=_constant,
            advice="Set the rate of the optimizer's parameter groups in every update; a schedule that nobody steps changes nothing.",
        ),
        Hypothesis(
            name="annealed",
            says="a line down to 0, although a constant rate is set",
            equation="lr = lr_0 (1 - n / N)",
            compute=_annealed,
            advice="Look for a scheduler that is on by default.",
        ),
        Hypothesis(
            name="per_epoch",
            says="a schedule that counts epochs as updates",
            equation="lr = lr_0 + (lr_1 - lr_0) min(1, E n / N), E epochs",
            compute=lambda inputs: _per_count(inputs, "num_epochs"),
            advice="Step the scheduler once per update.",
        ),
        Hypothesis(
            name="per_minibatch",
            says="a schedule that counts optimizer steps as updates",
            equation="lr = lr_0 + (lr_1 - lr_0) min(1, E M n / N), E epochs of M minibatches",
            compute=lambda inputs: _per_count(inputs, "num_epochs", "num_minibatches"),
            advice="Step the scheduler once per update, or give it the number of optimizer steps.",
        ),
        Hypothesis(
            name="per_epoch_negative",
            says="a schedule that counts epochs as updates and goes on below its end",
            equation="lr = lr_0 + (lr_1 - lr_0) E n / N, E epochs",
            compute=lambda inputs: _per_count(inputs, "num_epochs", stops=False),
            advice="Step the scheduler once per update: a negative rate climbs the loss.",
        ),
        Hypothesis(
            name="per_env",
            says="a schedule that counts steps of the vector of environments in place of environment steps",
            equation="lr = lr_0 + (lr_1 - lr_0) n / (B N), B environments",
            compute=lambda inputs: (
                inputs.line(1 / inputs.schedule.counts["num_envs"])
                if _anneals(inputs) and inputs.schedule.counts.get("num_envs", 1) > 1
                else None
            ),
            advice="Multiply the steps by the number of environments.",
        ),
        Hypothesis(
            name="per_env_step",
            says="a schedule that multiplies environment steps by the number of environments once more",
            equation="lr = lr_0 + (lr_1 - lr_0) min(1, B n / N), B environments",
            compute=lambda inputs: _per_count(inputs, "num_envs"),
            advice="Count every environment's step once.",
        ),
        Hypothesis(
            name="rising",
            says="a schedule that runs backwards, from its end to its beginning",
            equation="lr = lr_1 + (lr_0 - lr_1) n / N",
            compute=_rising,
            advice="Use the share of the run that is left, not the one that is over.",
        ),
        Hypothesis(
            name="cosine",
            says="a cosine schedule",
            equation="lr = lr_1 + (lr_0 - lr_1) (1 + cos(π n / N)) / 2",
            compute=lambda inputs: (
                inputs.schedule.final
                + (inputs.schedule.initial - inputs.schedule.final) * (1 + np.cos(np.pi * inputs.progress)) / 2
                if _anneals(inputs)
                else None
            ),
            variant=True,
            source="1608.03983",
        ),
        Hypothesis(
            name="restarting",
            says="a schedule that restarts again and again, each time after a share of the run of",
            equation="lr = lr_0 + c (n mod p N) / N",
            fit=_fit_restarts,
            parameter="p",
            advice="Make the schedule once, with the number of updates of the whole run.",
        ),
        Hypothesis(
            name="ending_early",
            says="a schedule that ends too soon, after a share of the run of",
            equation="lr = lr_0 + (lr_1 - lr_0) min(1, n / (p N))",
            fit=_fit_early_end,
            parameter="p",
            advice="Give the schedule the number of updates of the whole run.",
        ),
        Hypothesis(
            name="starting_late",
            says="a schedule that starts too late, after a share of the run of",
            equation="lr = lr_0 where n < p N",
            fit=_fit_late_start,
            parameter="p",
            advice="Set the rate in every update, from the first one on.",
        ),
        Hypothesis(
            name="negative",
            says="a schedule that goes on below its end, which it reaches after a share of the run of",
            equation="lr = lr_0 + (lr_1 - lr_0) n / (p N)",
            fit=_fit_negative,
            parameter="p",
            advice="Give the schedule the number of updates of the whole run: a negative rate climbs the loss.",
        ),
        Hypothesis(
            name="warm_up",
            says="a schedule after a straight rise from 0, which takes a share of the run of",
            equation="lr = lr_0 n / (p N) where n < p N",
            fit=_fit_warm_up,
            parameter="p",
            variant=True,
            source="1706.02677, section 2.2",
        ),
        Hypothesis(
            name="exponential",
            says="an exponential schedule, which leaves of the first rate a share of",
            equation="lr = lr_0 s^(n / N)",
            fit=_fit_exponential,
            parameter="s",
            variant=True,
            source="torch.optim.lr_scheduler.ExponentialLR",
        ),
        Hypothesis(
            name="stepped",
            says="a schedule in steps, each smaller than the one before by a",
            equation="lr = lr_0 c^k, k the number of steps so far",
            fit=_fit_steps,
            parameter="factor",
            variant=True,
            source="torch.optim.lr_scheduler.MultiStepLR",
        ),
        Hypothesis(
            name="adaptive",
            says="a rate that follows the divergence of the policies, up and down by a",
            equation="lr = lr_0 c^k, k ± 1 as KL is below or above its target",
            fit=_adaptive,
            parameter="factor",
            variant=True,
            source="leggedrobotics/rsl_rl, PPO.update, schedule 'adaptive'",
        ),
        Hypothesis(
            name="other_end",
            says="a straight schedule that ends at",
            equation="lr = lr_0 + (l - lr_0) n / N",
            fit=_fit_unset_end,
            parameter="l",
            variant=True,
        ),
        Hypothesis(
            name="unfinished",
            says="a schedule that does not reach its end, and stops at",
            equation="lr = lr_0 + (l - lr_0) n / N",
            fit=_fit_set_end,
            parameter="l",
            advice="Give the schedule the number of updates of this run; it was made for a longer one.",
        ),
    ),
)


@checked_arguments(num_epochs=1, num_minibatches=1, num_envs=1, tolerance=0)
def check_schedule(
    rates: Sequence[float],
    progress: Sequence[float],
    *,
    initial: float,
    final: float = 0.0,
    num_epochs: int = 1,
    num_minibatches: int = 1,
    num_envs: int = 1,
    curve: Sequence[float] = (),
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of the learning rates of a run's updates with their schedule: a straight line, or `curve`.

    Args:
        rates: of each update so far.
        progress: share of the run that is over at each of them, 0 to 1, increasing.
        initial, final: rates at the beginning and at the end of the run; equal for a constant rate.
        num_epochs, num_minibatches, num_envs: of the trainer, which a schedule may count by mistake.
        curve: rates at equal distances from the beginning to the end of the run; empty for a straight line.
        tolerance: largest error, as a share of the largest rate; one and a half updates' share of the run where it is None.

    Raises ValueError where there is not one share for each rate, or none at all.
    """
    if len(rates) != len(progress) or not len(rates):
        raise ValueError(f"rates and progress need one number for each update, got {len(rates)} and {len(progress)}")
    counts = {"num_epochs": num_epochs, "num_minibatches": num_minibatches, "num_envs": num_envs}
    numbers, shares = np.asarray(rates, dtype=np.float64), np.asarray(progress, dtype=np.float64)
    if not np.isfinite([numbers, shares]).all():
        return unchecked(SCHEDULES, "some of the numbers are NaN or infinite")
    schedule = RateSchedule(initial=initial, final=final, total_steps=1, counts=counts, curve=curve)
    compared = compare_rates(SCHEDULES, ScheduleInputs(shares, schedule), numbers, tolerance)
    explanations = tuple([Explanation(*one) for one in compared.explanations])
    return EquationCheck(SCHEDULES, compared.error, compared.tolerance, explanations)
