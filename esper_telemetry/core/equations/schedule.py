"""Learning rates beside the schedule that was set: the data of the equation "schedules", and its comparison without torch.

A schedule is a straight line over the environment steps, or any curve that a trainer can tabulate. Trainers read it before or after they
count an update, so a difference of one update's share of the run is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper_telemetry.core.equations.equation import Equation, EquationResult, Hypothesis, equations
from esper_telemetry.core.facts import Facts

Array = NDArray[np.float64]

SCHEDULE_FACT: Final = "learning_rate_schedule"
"""Fact of a run: the schedule of the learning rate as the fields of `RateSchedule`, absent where it is not known."""

SCHEDULES: Final = "schedules"
"""Name of the equation."""

UPDATE_SHARES: Final = 1.5
"""Updates by which a schedule may run before or behind the environment steps."""

MIN_TOLERANCE: Final = 1e-4

MAX_EXPLAINED_SHARE: Final = 0.2
"""Largest error of an explanation next to that of the schedule, and `MAX_ERROR_RATIO` next to that of the best explanation."""

MAX_ERROR_RATIO: Final = 10.0

MAX_POINTS: Final = 2048
"""Updates that are compared; of longer runs every second, fourth, ... one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSchedule:
    """A learning rate that goes from one number to another, in a straight line unless `curve` says otherwise.

    Attributes:
        initial, final: at the beginning and at the end; equal where the rate is constant.
        total_steps: environment steps of the run.
        begin: environment steps before its first update, where a run was resumed.
        final_is_set: False where the settings say that the rate is annealed, and not to which number.
        counts: numbers that a program may count in place of updates, by name: `num_epochs`, `num_minibatches`, `num_envs`.
        curve: rates at equal distances from the beginning to the end of the run, the first `initial` and the last `final`; empty for a
            straight line.
        defect: name of the hypothesis that the curve itself is: `negative`, `ending_early` or `restarting`; empty for a sound one. The
            reference is then its sound part, from the beginning to `sound_share`, over the whole run.
        sound_share: share of the run after which the curve falls below 0, ends, or restarts.
    """

    initial: float
    final: float
    total_steps: int
    begin: int = 0
    final_is_set: bool = True
    counts: Mapping[str, int] = field(default_factory=dict)
    curve: Sequence[float] = ()
    defect: str = ""
    sound_share: float = 1.0

    @classmethod
    def tabulated(cls, rate: Callable[[float], float], *, points: int = 257, **settings: Any) -> RateSchedule:
        """Return the schedule of a function of the share of the run that is over, 0 to 1; `settings` are other attributes."""
        curve = [float(rate(place / (points - 1))) for place in range(points)]
        defect, sound = _defect_of(np.array(curve))
        if defect:
            settings |= {"defect": defect, "sound_share": sound, "curve": tuple(curve)}
            return cls(initial=max(curve[: 2 + int(sound * points)]), final=0.0, **settings)
        straight = np.allclose(
            curve, np.linspace(curve[0], curve[-1], points), rtol=0, atol=1e-6 * max(map(abs, curve))
        )
        if straight and curve[0] < MAX_RISING_START * curve[-1]:
            curve.reverse()  # the share that is over was taken for the one that is left: the run rises where it should fall
        return cls(initial=curve[0], final=curve[-1], curve=() if straight else tuple(curve), **settings)

    def fact(self) -> dict[str, Any]:
        """Return the value of the fact."""
        return {name: getattr(self, name) for name in self.__slots__}


class ScheduleInputs(NamedTuple):
    """Inputs of the equation: the share of the run that is over at each update, 0 to 1, increasing, and the schedule.

    Attributes:
        floor: rate at which a schedule that is too fast stops, before its end; None where it does not.
    """

    progress: Array
    schedule: RateSchedule
    floor: float | None = None

    def line(self, speed: float = 1.0, *, stops: bool = True) -> Array:
        """Return the rates of a schedule that runs so many times as fast, and stops at its end or goes on beyond."""
        share = speed * self.progress
        rates = self.at(np.minimum(share, 1.0) if stops else share)
        if self.floor is None or not stops or speed <= 1:
            return rates
        falls = self.schedule.final < self.schedule.initial
        return np.maximum(rates, self.floor) if falls else np.minimum(rates, self.floor)

    def at(self, share: Array) -> Array:
        """Return the scheduled rates at shares of the run; those beyond its end lie on a straight line."""
        first, last, curve = self.schedule.initial, self.schedule.final, self.schedule.curve
        line: Array = first + (last - first) * share
        if not curve:
            return line
        rates = np.interp(share * self.schedule.sound_share, np.linspace(0, 1, len(curve)), curve)
        return np.maximum(rates, 0.0) if self.schedule.defect else np.where(share > 1, line, rates)

    def nearest(self, rates: Array, rate_at: Callable[[Array], Array]) -> Array:
        """Return the rate of `rate_at` next to each of `rates`, within a point of the table: a curve may jump between two of them."""
        curve = self.schedule.curve
        if not curve:
            return rate_at(np.maximum(self.progress, 0.0))
        shifts = (-1 / (len(curve) - 1), 0.0, 1 / (len(curve) - 1))
        near = np.stack([rate_at(np.maximum(self.progress + shift, 0.0)) for shift in shifts])
        nearest: Array = np.take_along_axis(near, np.abs(near - rates).argmin(0)[None], 0)[0]
        return nearest

    def defective(self, name: str, rates: Array) -> tuple[float, Array] | None:
        """Return the share of the run in which the configured curve is sound, and its rates; None unless it has the defect of that name."""
        if self.schedule.defect != name:
            return None
        points = np.linspace(0, 1, len(self.schedule.curve))
        return self.schedule.sound_share, self.nearest(
            rates, lambda share: np.interp(share, points, self.schedule.curve)
        )


def _defect_of(curve: Array) -> tuple[str, float]:
    """Return the name of what is wrong with a configured curve, and the share of the run before; "" and 1 if nothing is.

    Steps down, rises from 0, curved restarts (1608.03983) and ends above 0 are published schedules.
    """
    scale, last = float(np.abs(curve).max()), len(curve) - 1
    below = np.flatnonzero(curve < -MIN_TOLERANCE * scale)
    if len(below):
        return "negative", max(0, int(below[0]) - 1) / last
    moving = np.flatnonzero(curve > MIN_TOLERANCE * scale)
    if len(moving) and moving[-1] + 1 <= (1 - MIN_IDLE_SHARE) * last:
        return "ending_early", (int(moving[-1]) + 1) / last
    inner = curve[1:-1]  # x % 1 is 0 at both ends
    jumps = np.flatnonzero(np.diff(inner) > MIN_RESTART * scale)
    period = int(jumps[0]) + 1 if len(jumps) else 0
    if period < MIN_RESTART_POINTS:
        return "", 1.0
    line = np.linspace(inner[0], inner[period - 1], period)
    again = line[np.arange(len(inner)) % period]
    straight = np.abs(inner[:period] - line).max() <= MIN_TOLERANCE * scale
    repeats = np.mean(np.abs(inner - again) > MAX_RESTART_ERROR * scale) <= MAX_RESTART_ERROR
    if straight and repeats and line[0] - line[-1] > MIN_RESTART * scale:
        return "restarting", period / last
    return "", 1.0


MAX_RISING_START: Final = 0.05
"""First rate, as a share of the last one, up to which a straight rise over the whole run is a fall that was turned round."""

MIN_IDLE_SHARE: Final = 0.1
"""Share of a run with a rate of 0 at its end, from which on a curve ends too soon."""

MIN_RESTART: Final = 0.1
"""Fall and jump of a straight curve, as a share of its largest rate, from which on it restarts."""

MIN_RESTART_POINTS: Final = 8
"""Points of a table between two jumps from which on the form of a curve between them is known."""

MAX_RESTART_ERROR: Final = 0.05
"""Share of the largest rate by which lines that restart may differ, and share of the points that may differ by more."""


class RateExplanation(NamedTuple):
    """A hypothesis that gives the rates, its error, and its fitted parameter."""

    hypothesis: Hypothesis
    error: float
    fitted: float | None


class RateComparison(NamedTuple):
    """Result of a comparison; see `metrics.integrity.equations.EquationCheck`."""

    error: float
    tolerance: float
    explanations: tuple[RateExplanation, ...]


def compare_rates(
    equation: Equation, inputs: ScheduleInputs, rates: Array, tolerance: float | None = None
) -> RateComparison:
    """Compare rates, one for each update, with their schedule, which may be read before or after an update is counted."""
    schedule = inputs.schedule
    scale = max(abs(schedule.initial), abs(schedule.final), float(np.abs(rates).max()))
    widths = np.diff(inputs.progress, prepend=schedule.begin / schedule.total_steps)
    if tolerance is None:
        tolerance = max(MIN_TOLERANCE, UPDATE_SHARES * float(widths.max()))
    conventions = inputs, inputs._replace(progress=inputs.progress - widths)

    def error_under(convention: ScheduleInputs) -> float:
        return error_of(convention.nearest(rates, lambda share: equation.compute(convention._replace(progress=share))))

    def error_of(values: Array) -> float:
        return float(np.abs(rates - values).max()) / scale if scale else 0.0

    error = min(map(error_under, conventions))
    if error <= tolerance:
        return RateComparison(error, tolerance, ())

    def explained(one: Hypothesis, results: Sequence[tuple[float | None, Array]]) -> list[RateExplanation]:
        """The nearest result, where it is within an update and a half of the rates as it moves itself."""
        fits = [(RateExplanation(one, error_of(values), fitted), values) for fitted, values in results]
        best, values = min(fits, key=lambda fit: fit[0].error, default=(None, rates))
        moves = UPDATE_SHARES * float(np.abs(np.diff(values)).max(initial=0.0)) / scale if scale else 0.0
        limit = min(tolerance, MAX_EXPLAINED_SHARE * error, max(MIN_TOLERANCE, moves))
        return [best] if best is not None and best.error <= limit else []

    floor = _held(schedule, rates)
    conventions = conventions[0]._replace(floor=floor), conventions[1]._replace(floor=floor)
    explanations: list[RateExplanation] = []
    candidates = [one for one in equation.hypotheses if schedule.defect in ("", one.name)]
    for one in candidates:
        computed = [one.compute(each) for each in conventions] if one.compute is not None else []
        explanations += explained(one, [(None, values) for values in computed if values is not None])
    for one in () if explanations else candidates:
        fits = [one.fit(each, rates) for each in conventions] if one.fit is not None else []
        explanations += explained(one, [fit for fit in fits if fit is not None])
    nearest = MAX_ERROR_RATIO * max(MIN_TOLERANCE, min([one.error for one in explanations], default=0.0))
    return RateComparison(error, tolerance, tuple([one for one in explanations if one.error <= nearest]))


WRONG_UPDATES = {"negative": 2, "ending_early": 3}
"""Updates in a row, by the name of the hypothesis, after which a rate that is not positive is no rounding at the end of a schedule."""

MIN_RESTARTS, MIN_RESTART_SHARE = 2, 0.2
"""Restarts of a schedule from which on they are a mistake, and the share of its way that the rate goes back in each."""


class RateHistory:
    """Learning rates of a run so far, compared with its schedule.

    Args:
        facts: of the run.
    """

    def __init__(self, facts: Facts) -> None:
        given = facts.learning_rate_schedule or {}  # a later version may say more than this one can read
        self._schedule = RateSchedule(**given) if given and given.keys() <= set(RateSchedule.__slots__) else None
        self._progress: list[float] = []
        self._rates: list[float] = []
        self._over = False
        self._every, self._count = 1, 0
        self._result: EquationResult | None = None
        self._first_rate, self._wrong_since = 0.0, 0
        self._last_rate, self._restarts = 0.0, 0  # after the planned end
        self._wrong: list[float] = []  # the latest updates in which the rate was 0, or was negative

    def add(self, env_step: int, rate: float | None) -> None:
        """Add an update. Those after the planned end, and those before a resumed run goes on, are left out."""
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
            return  # a last rollout that is longer than what is left: a line may fall below 0 in it
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
        """Look for rates that no schedule should have: 0 or below, for some updates that still train."""
        self._first_rate = self._first_rate or rate
        if rate > 0 or self._first_rate <= 0:
            self._wrong.clear()
        elif len(self._wrong) < MAX_POINTS:
            self._wrong.append(rate)
        if rate > 0:
            self._wrong_since = env_step
        share = self._wrong_since / max(1, env_step)
        name = "negative" if min(self._wrong, default=0.0) < 0 else "ending_early"
        enough, equation = len(self._wrong) >= WRONG_UPDATES[name], equations().get(SCHEDULES)
        if equation is None or not enough:
            self._result = None
            return
        hypothesis = next(one for one in equation.hypotheses if one.name == name)
        error = 1.0 - min(self._wrong) / self._first_rate
        self._result = EquationResult(equation, error, MIN_TOLERANCE, (hypothesis,), {name: share})

    def _add_after_end(self, schedule: RateSchedule, env_step: int, rate: float) -> None:
        """Count how often the rate begins again: a model may learn again, but one that learns in parts restarts its schedule each time."""
        way, result = schedule.final - schedule.initial, self.result()
        before, self._last_rate = self._last_rate, rate
        if not way or result is None or not (result.matches or self._restarts >= MIN_RESTARTS):
            return
        back = (before - rate) / way
        if back > MIN_RESTART_SHARE:
            self._restarts += 1
        if self._restarts >= MIN_RESTARTS:
            hypothesis = next(one for one in result.equation.hypotheses if one.name == "restarting")
            share = (schedule.total_steps - schedule.begin) / max(1, env_step - schedule.begin)
            error = max(result.error, back)
            self._result = EquationResult(
                result.equation, error, result.tolerance, (hypothesis,), {"restarting": share}
            )

    def result(self) -> EquationResult | None:
        """Return the comparison; without a schedule only that of rates which none should have, and None without updates."""
        equation = equations().get(SCHEDULES)
        if self._schedule is None:
            return self._result
        if equation is None or not self._rates:
            return None
        if self._result is not None:
            return self._result
        compared = compare_rates(
            equation, ScheduleInputs(np.array(self._progress), self._schedule), np.array(self._rates)
        )
        self._result = EquationResult(
            equation,
            compared.error,
            compared.tolerance,
            tuple([one.hypothesis for one in compared.explanations]),
            {one.hypothesis.name: one.fitted for one in compared.explanations if one.fitted is not None},
        )
        return self._result


def _at(schedule: RateSchedule, rates: Array, end: float) -> NDArray[np.bool_]:
    """Return whether each rate is one at which a schedule may end."""
    at: NDArray[np.bool_] = np.abs(rates - end) <= MIN_TOLERANCE * abs(schedule.final - schedule.initial)
    return at


def _held(schedule: RateSchedule, rates: Array) -> float | None:
    """Return the last rate, where it has been so for some updates, after some on the way, and is neither the first nor the final one."""
    held = _at(schedule, rates, float(rates[-1]))
    on_the_way = len(rates) - int(held.sum())
    ends = [bool(_at(schedule, rates[-1:], end)[0]) for end in (schedule.initial, schedule.final)]
    whole = bool(held[on_the_way:].all())
    return float(rates[-1]) if whole and on_the_way > 0 and int(held.sum()) > 1 and not any(ends) else None


def fitted_speed(inputs: ScheduleInputs, rates: Sequence[float] | Array) -> float | None:
    """Return how many times as fast as set a schedule runs, by least squares over every second update on its way down; None without any."""
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
