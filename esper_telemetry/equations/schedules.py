"""The equation of schedules: learning rates over the updates of a run follow the settings.

A schedule is a straight line over the environment steps, or any curve that a trainer can tabulate. Trainers read it before or after
counting an update, so a shift by one update is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper_telemetry.core.facts import Facts
from esper_telemetry.core.rate_schedule import MIN_TOLERANCE, Array, RateSchedule
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations.comparison import MAX_EXPLAINED_SHARE, EquationCheck, unchecked
from esper_telemetry.equations.equation import Equation, Explanation, Hypothesis, mistake, variant

UPDATE_SHARES: Final = 1.5
"""Number of updates by which a schedule may lead or lag the environment steps."""

MAX_ERROR_RATIO: Final = 10.0
"""Largest error of an explanation, relative to the best one."""

MAX_POINTS: Final = 2048
"""Largest number of updates that are compared; longer runs use every second, fourth, ... update."""


class ScheduleInputs(NamedTuple):
    """Inputs of the equation: the completed share of the run at each update, 0 to 1, increasing, and the schedule.

    Attributes:
        floor: rate at which a schedule that is too fast stops before its end; None if it does not stop.
    """

    progress: Array
    schedule: RateSchedule
    floor: float | None = None

    def line(self, speed: float = 1.0, *, stops: bool = True) -> Array:
        """Return the rates of a schedule that runs this many times as fast, and stops at its end or continues beyond it."""
        share = speed * self.progress
        rates = self.at(np.minimum(share, 1.0) if stops else share)
        if self.floor is None or not stops or speed <= 1:
            return rates
        falls = self.schedule.final < self.schedule.initial
        return np.maximum(rates, self.floor) if falls else np.minimum(rates, self.floor)

    def at(self, share: Array) -> Array:
        """Return the scheduled rates at shares of the run, extrapolated linearly beyond its end."""
        first, last, curve = self.schedule.initial, self.schedule.final, self.schedule.curve
        line: Array = first + (last - first) * share
        if not curve:
            return line
        rates = np.interp(share * self.schedule.sound_share, np.linspace(0, 1, len(curve)), curve)
        return np.maximum(rates, 0.0) if self.schedule.defect else np.where(share > 1, line, rates)

    def nearest(self, rates: Array, rate_at: Callable[[Array], Array]) -> Array:
        """Return the rate of `rate_at` closest to each of `rates`, within one point of the table: a curve may jump between points."""
        curve = self.schedule.curve
        if not curve:
            return rate_at(np.maximum(self.progress, 0.0))
        shifts = (-1 / (len(curve) - 1), 0.0, 1 / (len(curve) - 1))
        near = np.stack([rate_at(np.maximum(self.progress + shift, 0.0)) for shift in shifts])
        nearest: Array = np.take_along_axis(near, np.abs(near - rates).argmin(0)[None], 0)[0]
        return nearest

    def defective(self, name: str, rates: Array) -> tuple[float, Array] | None:
        """Return the share of the run before the configured curve's defect, and its rates; None unless it has the named defect."""
        if self.schedule.defect != name:
            return None
        points = np.linspace(0, 1, len(self.schedule.curve))
        return self.schedule.sound_share, self.nearest(rates, lambda share: np.interp(share, points, self.schedule.curve))


def compare_rates(inputs: ScheduleInputs, rates: Array, tolerance: float | None = None) -> EquationCheck:
    """Compare the rate of each update with the schedule, which may be read before or after an update is counted."""
    schedule = inputs.schedule
    scale = max(abs(schedule.initial), abs(schedule.final), float(np.abs(rates).max()))
    widths = np.diff(inputs.progress, prepend=schedule.begin / schedule.total_steps)
    if tolerance is None:
        tolerance = max(MIN_TOLERANCE, UPDATE_SHARES * float(widths.max()))
    conventions = inputs, inputs._replace(progress=inputs.progress - widths)

    def error_under(convention: ScheduleInputs) -> float:
        return error_of(convention.nearest(rates, lambda share: SCHEDULES.compute(convention._replace(progress=share))))

    def error_of(values: Array) -> float:
        return float(np.abs(rates - values).max()) / scale if scale else 0.0

    error = min(map(error_under, conventions))
    if error <= tolerance:
        return EquationCheck(SCHEDULES, error, tolerance)

    def nearest_of(one: Hypothesis, results: Sequence[tuple[float | None, Array]]) -> list[Explanation]:
        """The closest result, if it is within one and a half updates of the rates."""
        fits = [(Explanation(one, error_of(values), fitted), values) for fitted, values in results]
        best, values = min(fits, key=lambda fit: fit[0].error, default=(None, rates))
        moves = UPDATE_SHARES * float(np.abs(np.diff(values)).max(initial=0.0)) / scale if scale else 0.0
        limit = min(tolerance, MAX_EXPLAINED_SHARE * error, max(MIN_TOLERANCE, moves))
        return [best] if best is not None and best.error <= limit else []

    floor = _held(schedule, rates)
    conventions = conventions[0]._replace(floor=floor), conventions[1]._replace(floor=floor)
    explanations: list[Explanation] = []
    candidates = [one for one in SCHEDULES.hypotheses if schedule.defect in ("", one.name)]
    for one in candidates:
        computed = [one.compute(each) for each in conventions] if one.compute is not None else []
        explanations += nearest_of(one, [(None, values) for values in computed if values is not None])
    for one in () if explanations else candidates:
        fits = [one.fit(each, rates) for each in conventions] if one.fit is not None else []
        explanations += nearest_of(one, [fit for fit in fits if fit is not None])
    nearest = MAX_ERROR_RATIO * max(MIN_TOLERANCE, min([one.error for one in explanations], default=0.0))
    return EquationCheck(SCHEDULES, error, tolerance, tuple([one for one in explanations if one.error <= nearest]))


WRONG_UPDATES = {"negative": 2, "ending_early": 3}
"""Consecutive updates, by hypothesis, after which a rate of 0 or below is not rounding at the end of a schedule."""

MIN_RESTARTS, MIN_RESTART_SHARE = 2, 0.2
"""Number of restarts that counts as a mistake, and the share of the schedule's range by which the rate jumps back in each."""


class RateHistory:
    """Learning rates of a run so far, compared with its schedule.

    Args:
        facts: of the run.
    """

    def __init__(self, facts: Facts) -> None:
        given = facts.learning_rate_schedule or {}  # a later version may write fields that this version cannot read
        self._schedule = RateSchedule(**given) if given and given.keys() <= set(RateSchedule.__slots__) else None
        self._progress: list[float] = []
        self._rates: list[float] = []
        self._over = False
        self._every, self._count = 1, 0
        self._result: EquationCheck | None = None
        self._first_rate, self._wrong_since = 0.0, 0
        self._last_rate, self._restarts = 0.0, 0  # after the planned end
        self._wrong: list[float] = []  # the latest updates in which the rate was 0, or was negative

    def add(self, env_step: int, rate: float | None) -> None:
        """Add an update. Updates after the planned end, and updates before the start of a resumed run, are left out."""
        schedule = self._schedule
        if schedule is None and rate is not None:
            self._add_without_schedule(env_step, rate)
        if schedule is None or rate is None:
            return
        if self._over:
            self._add_after_end(schedule, env_step, rate)
            return
        if env_step <= schedule.begin:
            return
        if env_step > schedule.total_steps and self._rates:
            return  # the last rollout is longer than the rest of the run, so a line may fall below 0
        self._over, self._last_rate = env_step >= schedule.total_steps, rate
        self._count += 1
        if self._count % self._every and not self._over:
            return
        self._progress.append(min(1.0, env_step / schedule.total_steps))
        self._rates.append(rate)
        self._result = None
        if len(self._rates) >= MAX_POINTS:
            self._every *= 2
            del self._progress[::2], self._rates[::2]

    def _add_without_schedule(self, env_step: int, rate: float) -> None:
        """Look for rates of 0 or below in several updates that still train, which are always a mistake."""
        self._first_rate = self._first_rate or rate
        if rate > 0 or self._first_rate <= 0:
            self._wrong.clear()
        elif len(self._wrong) < MAX_POINTS:
            self._wrong.append(rate)
        if rate > 0:
            self._wrong_since = env_step
        share = self._wrong_since / max(1, env_step)
        name = "negative" if min(self._wrong, default=0.0) < 0 else "ending_early"
        if len(self._wrong) < WRONG_UPDATES[name]:
            self._result = None
            return
        error = 1.0 - min(self._wrong) / self._first_rate
        self._result = EquationCheck(SCHEDULES, error, MIN_TOLERANCE, (Explanation(SCHEDULES[name], 0.0, share),))

    def _add_after_end(self, schedule: RateSchedule, env_step: int, rate: float) -> None:
        """Count restarts of the rate: one restart may be a second training run, but training in parts restarts the schedule each time."""
        way, result = schedule.final - schedule.initial, self.result()
        before, self._last_rate = self._last_rate, rate
        if not way or result is None or not (result.matches or self._restarts >= MIN_RESTARTS):
            return
        back = (before - rate) / way
        if back > MIN_RESTART_SHARE:
            self._restarts += 1
        if self._restarts >= MIN_RESTARTS:
            share = (schedule.total_steps - schedule.begin) / max(1, env_step - schedule.begin)
            explanation = Explanation(SCHEDULES["restarting"], 0.0, share)
            self._result = replace(result, error=max(result.error or 0.0, back), explanations=(explanation,))

    def result(self) -> EquationCheck | None:
        """Return the comparison. Without a schedule only rates of 0 or below are tested; None without updates."""
        if self._schedule is not None and self._rates and self._result is None:
            inputs = ScheduleInputs(np.array(self._progress), self._schedule)
            self._result = compare_rates(inputs, np.array(self._rates))
        return self._result


def _at(schedule: RateSchedule, rates: Array, end: float) -> NDArray[np.bool_]:
    """Return whether each rate is a possible end of a schedule."""
    at: NDArray[np.bool_] = np.abs(rates - end) <= MIN_TOLERANCE * abs(schedule.final - schedule.initial)
    return at


def _held(schedule: RateSchedule, rates: Array) -> float | None:
    """Return the last rate if it stayed the same for some updates after changing, and is neither the first nor the final rate."""
    held = _at(schedule, rates, float(rates[-1]))
    on_the_way = len(rates) - int(held.sum())
    ends = [bool(_at(schedule, rates[-1:], end)[0]) for end in (schedule.initial, schedule.final)]
    whole = bool(held[on_the_way:].all())
    return float(rates[-1]) if whole and on_the_way > 0 and int(held.sum()) > 1 and not any(ends) else None


def fitted_speed(inputs: ScheduleInputs, rates: Sequence[float] | Array) -> float | None:
    """Return the speed of a schedule relative to the setting, by least squares over every second decreasing update; None without any."""
    schedule, values = inputs.schedule, np.asarray(rates, dtype=np.float64)
    way = schedule.final - schedule.initial
    ends = np.flatnonzero(_at(schedule, values, schedule.final))
    stop = int(ends[0]) if len(ends) else len(values)
    if inputs.floor is not None:
        stop = int(np.flatnonzero(_at(schedule, values, inputs.floor))[0])
    progress, moved = inputs.progress[:stop:2], values[:stop:2] - schedule.initial
    if way == 0 or not len(progress) or not progress.any():
        return None
    return float(progress @ moved / (progress @ progress) / way)


def _anneals(inputs: ScheduleInputs) -> bool:
    return inputs.schedule.initial != inputs.schedule.final


def _per_count(inputs: ScheduleInputs, *names: str, stops: bool = True) -> Array | None:
    """Return the rates if each update counts as several; None if the number is 1 or unknown."""
    counts = [inputs.schedule.counts.get(name, 1) for name in names]
    return inputs.line(float(np.prod(counts)), stops=stops) if 1 not in counts and _anneals(inputs) else None


def _fit_fast(inputs: ScheduleInputs, rates: Array, *, name: str, stops: bool) -> tuple[float, Array] | None:
    """Return the share of the run in which a line that is too fast, or a curve with the named defect, reaches its end, and its rates."""
    if inputs.schedule.defect:
        return inputs.defective(name, rates)
    speed = fitted_speed(inputs, rates)
    return (1 / speed, inputs.line(speed, stops=stops)) if speed is not None and speed > 1 else None


def _fit_other_end(inputs: ScheduleInputs, rates: Array, *, is_set: bool) -> tuple[float, Array] | None:
    """Return the final rate of a slower line, and the line's rates; None unless the settings set, or do not set, the final rate."""
    speed = fitted_speed(inputs, rates) if inputs.schedule.final_is_set == is_set else None
    if speed is None or not 0 < speed < 1:
        return None
    return inputs.schedule.initial + speed * (inputs.schedule.final - inputs.schedule.initial), inputs.line(speed)


def _fit_restarts(inputs: ScheduleInputs, rates: Array) -> tuple[float, Array] | None:
    """Return the share of the run after which a line restarts, and its rates; the first line determines both, and the others decide.

    A line that is too fast and has not reached its end may be the first of several.
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
    """Return the share of the run at which a schedule starts, and rates that then follow its remainder, or all of it."""
    moved = np.flatnonzero(np.abs(rates - rates[0]) > MIN_TOLERANCE * abs(inputs.schedule.initial))
    if not _anneals(inputs) or not len(moved) or moved[0] < 2 or len(rates) - moved[0] < 2:
        return None
    start = inputs.progress[moved[0] - 1]
    rest = inputs.line(), inputs.at(np.maximum(0, (inputs.progress - start) / (1 - start)))
    ways = [np.where(inputs.progress <= start, inputs.schedule.initial, after) for after in rest]
    return float(start), min(ways, key=lambda values: float(np.abs(values - rates).max()))


def _fit_exponential(inputs: ScheduleInputs, rates: Array) -> tuple[float, Array] | None:
    """Return the final rate as a share of the first, for a rate that falls by the same factor in each update."""
    if len(rates) < MIN_FITTED or not (rates > 0).all() or inputs.schedule.initial <= 0:
        return None
    falls, square = np.log(rates / inputs.schedule.initial)[::2], inputs.progress[::2] @ inputs.progress[::2]
    exponent = inputs.progress[::2] @ falls / square if square else 0.0
    return (float(np.exp(exponent)), inputs.schedule.initial * np.exp(exponent * inputs.progress)) if exponent < 0 else None


def _fit_steps(inputs: ScheduleInputs, rates: Array) -> tuple[float, Array] | None:
    """Return the factor by which the rate drops at some updates; the first drop determines it, and the other drops decide."""
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
    """Return the factor by which an adaptive rate is multiplied or divided, and the rates with whole powers of the factor."""
    if len(rates) < MIN_FITTED or not (rates > 0).all():
        return None
    powers = np.log(rates / rates[0]) / np.log(ADAPTIVE_FACTOR)
    whole = np.round(powers)
    turns = np.diff(np.sign(np.diff(whole))[np.diff(whole) != 0])
    return (ADAPTIVE_FACTOR, rates[0] * ADAPTIVE_FACTOR**whole) if turns.any() else None


def _fit_warm_up(inputs: ScheduleInputs, rates: Array) -> tuple[float, Array] | None:
    """Return the share of the run in which the rate rises from 0, and rates that then continue, or start, the schedule."""
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
"""Jump back, as a share of the schedule's range, that counts as a restart."""

MIN_FITTED = 6
"""Fewest updates for recognising the form of a curve."""

ADAPTIVE_FACTOR = 1.5
"""Factor of an adaptive rate in rsl_rl and Isaac Gym."""

PAPER = "1707.06347; Huang et al. 2022, detail 4"

SCHEDULES = Equation(
    name="schedules",
    quantity="the learning rates",
    equation="lr = lr_0 + (lr_1 - lr_0) n / N, environment steps n of N, or another configured function of n / N",
    source=PAPER,
    inputs="settings with a constant learning rate or a schedule",
    check="check_schedule",
    shown_by="test_schedules",
    compute=lambda inputs: inputs.line(),
    rank=65,
    over_run=True,
    advice="Compare the learning rate that each update uses with the configured schedule.",
    hypotheses=(
        mistake("constant", "the first learning rate throughout, although a schedule is configured")
        .predicts("lr = lr_0", lambda inputs: np.full_like(inputs.progress, inputs.schedule.initial) if _anneals(inputs) else None)
        .advises("Set the rate of the optimizer's parameter groups in every update; a schedule that is never stepped changes nothing."),
        mistake("annealed", "a line down to 0, although a constant rate is configured")
        .predicts("lr = lr_0 (1 - n / N)", lambda inputs: None if _anneals(inputs) else inputs.schedule.initial * (1 - inputs.progress))
        .advises("Look for a scheduler that is on by default."),
        mistake("per_epoch", "a schedule that counts epochs as updates")
        .predicts("lr = lr_0 + (lr_1 - lr_0) min(1, E n / N), E epochs", lambda inputs: _per_count(inputs, "num_epochs"))
        .advises("Step the scheduler once per update."),
        mistake("per_minibatch", "a schedule that counts optimizer steps as updates")
        .predicts(
            "lr = lr_0 + (lr_1 - lr_0) min(1, E M n / N), E epochs of M minibatches",
            lambda inputs: _per_count(inputs, "num_epochs", "num_minibatches"),
        )
        .advises("Step the scheduler once per update, or give it the number of optimizer steps."),
        mistake("per_epoch_negative", "a schedule that counts epochs as updates and continues below its end")
        .predicts("lr = lr_0 + (lr_1 - lr_0) E n / N, E epochs", lambda inputs: _per_count(inputs, "num_epochs", stops=False))
        .advises("Step the scheduler once per update: a negative rate maximises the loss."),
        mistake("per_env", "a schedule that counts calls of the vectorised `env.step` instead of environment steps")
        .predicts(
            "lr = lr_0 + (lr_1 - lr_0) n / (B N), B environments",
            lambda inputs: (
                inputs.line(1 / inputs.schedule.counts["num_envs"])
                if _anneals(inputs) and inputs.schedule.counts.get("num_envs", 1) > 1
                else None
            ),
        )
        .advises("Multiply the steps by the number of environments."),
        mistake("per_env_step", "a schedule that multiplies environment steps by the number of environments twice")
        .predicts("lr = lr_0 + (lr_1 - lr_0) min(1, B n / N), B environments", lambda inputs: _per_count(inputs, "num_envs"))
        .advises("Count every environment's step once."),
        mistake("rising", "a schedule that runs backwards, from its end to its beginning")
        .predicts("lr = lr_1 + (lr_0 - lr_1) n / N", lambda inputs: inputs.at(1 - inputs.progress) if _anneals(inputs) else None)
        .advises("Use the remaining share of the run, not the completed share."),
        variant("cosine", "a cosine schedule")
        .predicts(
            "lr = lr_1 + (lr_0 - lr_1) (1 + cos(π n / N)) / 2",
            lambda inputs: (
                inputs.schedule.final + (inputs.schedule.initial - inputs.schedule.final) * (1 + np.cos(np.pi * inputs.progress)) / 2
                if _anneals(inputs)
                else None
            ),
        )
        .cites("1608.03983"),
        mistake("restarting", "a schedule that restarts each time the completed share of the run has grown by")
        .fits("lr = lr_0 + c (n mod p N) / N", "p", _fit_restarts)
        .advises("Create the schedule once, with the number of updates of the whole run.")
        .cites("program: loop-schedule_restarts"),
        mistake("ending_early", "a schedule that ends too early, when the completed share of the run is")
        .fits("lr = lr_0 + (lr_1 - lr_0) min(1, n / (p N))", "p", partial(_fit_fast, name="ending_early", stops=True))
        .advises("Give the schedule the number of updates of the whole run.")
        .cites("program: loop-schedule_ends_early"),
        mistake("starting_late", "a schedule that starts too late, when the completed share of the run is")
        .fits("lr = lr_0 if n < p N", "p", _fit_late_start)
        .advises("Set the rate in every update, starting with the first."),
        mistake("negative", "a schedule that continues below its end, which it reaches when the completed share of the run is")
        .fits("lr = lr_0 + (lr_1 - lr_0) n / (p N)", "p", partial(_fit_fast, name="negative", stops=False))
        .advises("Give the schedule the number of updates of the whole run: a negative rate maximises the loss.")
        .cites("program: loop-schedule_negative"),
        variant("warm_up", "a schedule after a linear warm-up from 0, which ends when the completed share of the run is")
        .fits("lr = lr_0 n / (p N) if n < p N", "p", _fit_warm_up)
        .cites("1706.02677, section 2.2"),
        variant("exponential", "an exponential schedule that ends at this share of the first rate:")
        .fits("lr = lr_0 s^(n / N)", "s", _fit_exponential)
        .cites("torch.optim.lr_scheduler.ExponentialLR"),
        variant("stepped", "a schedule in steps, each smaller than the previous step by a")
        .fits("lr = lr_0 c^k, k the number of steps so far", "factor", _fit_steps)
        .cites("torch.optim.lr_scheduler.MultiStepLR"),
        variant("adaptive", "a rate that adapts to the KL divergence, up and down by a")
        .fits("lr = lr_0 c^k, k ± 1 as KL is below or above its target", "factor", _adaptive)
        .cites("leggedrobotics/rsl_rl, PPO.update, schedule 'adaptive'"),
        variant("other_end", "a linear schedule that ends at").fits(
            "lr = lr_0 + (l - lr_0) n / N", "l", partial(_fit_other_end, is_set=False)
        ),
        mistake("unfinished", "a schedule that does not reach its end, and stops at")
        .fits("lr = lr_0 + (l - lr_0) n / N", "l", partial(_fit_other_end, is_set=True))
        .advises("Give the schedule the number of updates of this run; it was created for a longer run."),
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
        progress: completed share of the run at each update, 0 to 1, increasing.
        initial, final: rates at the beginning and at the end of the run; equal for a constant rate.
        num_epochs, num_minibatches, num_envs: of the trainer, which a schedule may count by mistake.
        curve: rates at equal distances from the beginning to the end of the run; empty for a straight line.
        tolerance: largest error, as a share of the largest rate; one and a half updates' share of the run if it is None.

    Raises ValueError if the numbers of rates and shares differ, or there are no rates.
    """
    if len(rates) != len(progress) or not len(rates):
        raise ValueError(f"rates and progress need one number for each update, got {len(rates)} and {len(progress)}")
    counts = {"num_epochs": num_epochs, "num_minibatches": num_minibatches, "num_envs": num_envs}
    numbers, shares = np.asarray(rates, dtype=np.float64), np.asarray(progress, dtype=np.float64)
    if not np.isfinite([numbers, shares]).all():
        return unchecked(SCHEDULES, "some of the numbers are NaN or infinite")
    schedule = RateSchedule(initial=initial, final=final, total_steps=1, counts=counts, curve=curve)
    return compare_rates(ScheduleInputs(shares, schedule), numbers, tolerance)
