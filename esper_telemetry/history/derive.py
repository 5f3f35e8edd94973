"""From a record's measured values to the values that need other values or history.

The history of chosen keys: levels, drifts, outliers, trends, periods and changes, as keys with a suffix (T1 to T7).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from esper_telemetry.core.derived import Array, Derived
from esper_telemetry.core.metric import segment
from esper_telemetry.core.record import Level
from esper_telemetry.history.averages import Ema, LogDrift, Smoothed
from esper_telemetry.history.change import Changes, ChangeState, TwoSided
from esper_telemetry.history.correlation import CORRELATION_WINDOW as PAIRS
from esper_telemetry.history.correlation import lr_response
from esper_telemetry.history.critic import (
    ENTROPY_WINDOW,
    CriticMoments,
    VarianceAverage,
    advantage_scale,
    critic_fit,
    entropy_rate,
    largest_shift,
)
from esper_telemetry.history.gradients import GradientHistory
from esper_telemetry.history.outliers import N_MIN, SCALE_MIN, RobustHistory, decades, robust_z
from esper_telemetry.history.pairs import PairHistories
from esper_telemetry.history.trend import KnownPeriod, goertzel, memory, periods, prewhiten, trends

EVERY = 10
"""Updates between two tests for trends and periods, which take long."""

LONG = 100
"""Latest values that these tests look at: their rates of false alarms are those of so many."""

HUGE = 1e100
"""Values beyond it are passed over: one of them would overflow the squares of a history for good."""

LEVEL = ("ema", "ew_std")
STEP = (*LEVEL, "drift", "macd", "robust_z")
TESTS = ("trend/slope", "trend/mk_z", "period/g", "period/p", "period/length", "period/goertzel", "acf1")
ALL = (*STEP, *TESTS, "cusum", "page_hinkley")


@dataclass(frozen=True, slots=True)
class Followed:
    """One key with a history.

    Attributes:
        key: which.
        suffixes: what is made of its history.
        positive: whether it is followed in decades.
        scale_min: smallest spread that its robust z is measured in.
    """

    key: str
    suffixes: tuple[str, ...]
    positive: bool = True
    scale_min: float = SCALE_MIN


HEADLINES = (
    Followed("policy/kl", ALL),
    Followed("policy/entropy_norm", ALL),
    Followed("loss/value", ALL),
    Followed("grad/global/norm_preclip", ALL),
    Followed("episode/return_mean_100", tuple(name for name in ALL if name not in STEP[2:]), positive=False),
)
"""What a run is judged by."""

DETECTED = (
    Followed("grad/global/norm_preclip_max", ("robust_z",)),
    Followed("ret/std", ("robust_z",)),
    Followed("lstm/c/rms", ("robust_z",), scale_min=0.05),
    Followed("grad/interference/log_ratio", ("robust_z",), positive=False),
    Followed("grad/interference/actor_effective", ("robust_z",)),
    Followed("grad/interference/cos", LEVEL, positive=False),
    Followed("grad/align/successive_cos", LEVEL, positive=False),
    Followed("grad/clip/freq", ("ema",), positive=False),
)
"""What detectors read besides, and what means something only when it is averaged."""

RESPONSE, RATE = "opt/update_to_weight", "opt/lr"
"""What ought to follow the learning rate."""


GROUP_NORM = "grad/{group}/norm_preclip"
"""Of every declared group of parameters."""


def followed(groups: Iterable[str]) -> tuple[Followed, ...]:
    """The keys with a history in a run with these groups of parameters."""
    norms = [GROUP_NORM.format(group=segment(group)) for group in groups]
    return (*HEADLINES, *DETECTED, *(Followed(key, STEP) for key in norms))


def histories(key: str) -> tuple[str, ...]:
    """The endings under which a key, or a template, has a history; none where nobody follows it."""
    rows = (*HEADLINES, *DETECTED, Followed(GROUP_NORM, STEP), Followed(RESPONSE, ("lr_response",)))
    return tuple([suffix for row in rows if row.key == key.replace("{part}", "c") for suffix in row.suffixes])


class Temporal:
    """The histories of one run; give it every record in order.

    Args:
        facts: of the run: `groups`, and where the environment has a time limit `horizon` and `num_steps`.
    """

    def __init__(self, facts: Mapping[str, Any] | None = None) -> None:
        known = facts or {}
        self._rows = followed(known.get("groups", ()))
        self._keys = tuple([row.key for row in self._rows])
        self._wanted = {f"{row.key}/{suffix}" for row in self._rows for suffix in row.suffixes}
        self._positive = np.array([row.positive for row in self._rows])
        self._scale_min = np.array([row.scale_min for row in self._rows])
        self._cycle = _cycle(known.get("horizon"), known.get("num_steps"))
        self._level, self._drift = Ema(len(self._rows)), LogDrift(len(self._rows))
        self._history = RobustHistory(len(self._rows))
        self._changes, self._slow = ChangeState(len(self._rows)), TwoSided(len(self._rows))
        self._pairs = RobustHistory(2, PAIRS)
        self._updates = 0
        self._begun = False

    def derive(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        """What the histories say of a record with these values; of keys that it does not have, nothing."""
        if level < Level.NORMAL:
            return {}
        self._updates += 1
        self._begun = self._begun or any(key in values for key in self._keys)
        if (
            not self._begun
        ):  # a loop that only logs its own keys: empty histories would take a third of its record's time
            return self._response(values, level)
        x = np.array([values.get(key, np.nan) for key in self._keys])
        x = np.where(np.abs(x) < HUGE, x, np.nan)
        scaled = np.where(self._positive, decades(x), x)
        found = [*self._steps(x, scaled, np.isfinite(x))]
        if self._updates % EVERY == 0:
            found += self._tests(np.isfinite(x))
        result = {key: number for group in found for key, number in group.values(level).items() if key in self._wanted}
        return result | self._response(values, level)

    def state(self) -> dict[str, Any]:
        """All of the state, to go into a checkpoint."""
        return {"updates": self._updates} | {name: part.state() for name, part in self._parts().items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from the `state()` of a run with the same facts."""
        self._updates, self._begun = state["updates"], True
        for name, part in self._parts().items():
            part.restore(state[name])

    def _parts(self) -> dict[str, Any]:
        return {
            "level": self._level,
            "drift": self._drift,
            "history": self._history,
            "changes": self._changes,
            "slow": self._slow,
            "pairs": self._pairs,
        }

    def _steps(self, x: Array, scaled: Array, new: Array) -> Iterable[Derived]:
        """What one more value of each key, [K], says."""
        keys = self._keys
        self._level.step(x)
        yield Smoothed(keys, *(np.where(new, part, np.nan) for part in (self._level.mean, self._level.std)))
        yield self._drift.step(np.where(self._positive, x, np.nan), keys)
        yield robust_z(scaled, self._history.values, scale_min=self._scale_min, keys=keys)
        yield Changes(keys, self._changes.step(scaled))
        yield self._slow.step(x, self._level.std, keys)
        self._history.push(scaled)

    def _tests(self, new: Array) -> Iterable[Derived]:
        """Trends and periods of the latest values of the keys that have them and have a value in this update."""
        rows = [k for k, row in enumerate(self._rows) if new[k] and "trend/slope" in row.suffixes]
        series = {self._keys[k]: self._latest(k) for k in rows if self._history.count[k] >= N_MIN}
        keys = tuple(series)
        if not keys:
            return
        yield trends([*series.values()], keys)
        yield periods([prewhiten(x).y for x in series.values()], keys)
        yield memory([*series.values()], keys)
        if self._cycle is not None:
            yield KnownPeriod(keys, np.array([_power(x, *self._cycle) for x in series.values()]))

    def _latest(self, row: int) -> Array:
        """The latest values of one key, oldest first."""
        return self._history.ordered(row)[-LONG:]

    def _response(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        """Whether the updates follow the learning rate, every tenth update."""
        pair = np.array([values.get(RATE, np.nan), values.get(RESPONSE, np.nan)])
        if np.isfinite(pair).all():
            self._pairs.push(pair)
        if self._updates % EVERY or self._pairs.count[0] < N_MIN:
            return {}
        return lr_response(self._pairs.ordered(0), self._pairs.ordered(1), key=RESPONSE).values(level)


def _cycle(horizon: Any, num_steps: Any) -> tuple[int, int] | None:
    """Cycles and values of a window in which the environment's time limit fits so many times, twice or more; None without one."""
    numbers = isinstance(horizon, int | float) and isinstance(num_steps, int | float) and num_steps > 0
    if not numbers or not 2 <= horizon / num_steps <= LONG / 2:
        return None
    updates = horizon / num_steps
    cycles = max(2, math.ceil(N_MIN / updates))
    return cycles, round(cycles * updates)


def _power(x: Array, cycles: int, length: int) -> float:
    """Power of the last `length` values at so many cycles; NaN before there are as many."""
    return goertzel(x[-length:], cycles) if len(x) >= length else np.nan


HEADS, SHIFT = "policy/head/", "/action_shift_js"
"""How the keys of single heads' shifts begin and end."""


class Series:
    """The history of one run; give it every record in order.

    It reads the run's facts and the values by key and nothing else, so that a journal yields the same derived values
    again.

    Attributes:
        gradients: what is known of the gradients.
        pairs: what is known of modules and their hosts, where any are watched.
    """

    def __init__(self, facts: Mapping[str, Any] | None = None) -> None:
        known = facts or {}
        self._variance = VarianceAverage()
        self._entropies: deque[float] = deque(maxlen=ENTROPY_WINDOW)
        self.pairs = PairHistories()
        self.gradients = GradientHistory(
            [segment(name) for name in known.get("groups", ())], known.get("max_grad_norm")
        )
        self._temporal = Temporal(known)

    def derive(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        """The derived values of a record with these measured ones, as far as they belong to `level`."""
        return {
            **self._critic(values, level),
            **self._advantages(values, level),
            **self._entropy(values, level),
            **self._shifts(values, level),
            **self.gradients.derive(values, level),
            **self.pairs.derive(values, level),
            **self._temporal.derive(values, level),
        }

    def _critic(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        moments = CriticMoments(
            bias=values.get("value/bias"),
            error_std=values.get("value/err/std"),
            value_std=values.get("value/std"),
            return_std=values.get("value/target/std"),
        )
        fit, self._variance = critic_fit(moments, self._variance)
        return fit.values(level)

    def _advantages(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        names = ("mean", "std", "min", "max")
        return advantage_scale(*(values.get(f"adv/raw/{name}") for name in names)).values(level)

    def _entropy(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        if "policy/entropy" not in values:
            return {}
        self._entropies.append(values["policy/entropy"])
        return entropy_rate(np.array(self._entropies)).values(level)

    def _shifts(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        heads = [value for key, value in values.items() if key.startswith(HEADS) and key.endswith(SHIFT)]
        return largest_shift(heads).values(level)
