"""Values of a record that are derived from its measured values and from earlier records.

Values that need other values, such as explained variance, are computed from the record and not from tensors, so that reading an old
journal computes them again in the same way.

Some keys have a history: levels, drifts, outliers, trends, periods and changes, as keys with a suffix (T1 to T7).
Modules are compared with their hosts by the ratio of their gradient intensities (G13).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from esper_telemetry.core.facts import Facts
from esper_telemetry.core.metric import Array, Derived, Metric, label, reports, segment
from esper_telemetry.core.record import Level, judgeable
from esper_telemetry.history.critic import (
    ENTROPY_WINDOW,
    CriticMoments,
    VarianceAverage,
    advantage_scale,
    critic_fit,
    entropy_rate,
    largest_shift,
)
from esper_telemetry.history.deviations import (
    N_MIN,
    SCALE_MIN,
    Changes,
    ChangeState,
    Ema,
    LogDrift,
    RobustHistory,
    Smoothed,
    TwoSided,
    decades,
    robust_z,
)
from esper_telemetry.history.gradient_history import GradientHistory
from esper_telemetry.history.recent_return import RecentMean, recent_return
from esper_telemetry.history.trend import CORRELATION_WINDOW as PAIRS
from esper_telemetry.history.trend import KnownPeriod, goertzel, lr_response, memory, periods, prewhiten, trends

Cause = Literal["disconnected", "undefined", "ok", "dormant", "saturated", "host_fast", "indeterminate"]

LOW = 0.01
UNUSUAL = 2.0  # robust standard deviations
SATURATED_ZEROS = 0.9


@dataclass(frozen=True, slots=True)
class PairIntensity(Derived):
    """Gradient intensity of a module relative to its host."""

    sources: ClassVar[tuple[str, ...]] = ("grad/pair/{pair}/connected", "grad/pair/{pair}/intensity", "grad/pair/{pair}/host_intensity")
    pair: str = label()
    intensity_ratio: float | None = reports(
        Metric.ratio("grad/pair/{pair}/intensity_ratio", 570, "intensity of a module next to its host")
        .asks("How strongly does this module learn, per parameter, compared with the network that hosts it?")
        .bounds(healthy="0.05 to 0.2", warn="< 0.01", source="heuristic of the morphogenesis environment")
        .absent("the parameters or the gradient of either are missing, or the host's gradient is zero")
        .advises("The journal names the cause (`evidence/pairs`): disconnected, dormant, saturated, or a fast host.")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEvidence:
    """Evidence for the reason why a module learns little.

    Attributes:
        ratio: intensity ratio of the pair.
        grads_exist: whether the module's parameters have gradients.
        upstream_exists: whether a gradient arrives at the module's output.
        z_seed, z_host: robust z of the two intensities in their own histories.
        z_up: robust z of the gradient that arrives at the module's output.
        z_gain: robust z of the module's gradient relative to the arriving one.
        zero_frac: share of exact zeros in the module's gradient.
    """

    ratio: float | None
    grads_exist: bool
    upstream_exists: bool
    z_seed: float | None
    z_host: float | None
    z_up: float | None
    z_gain: float | None
    zero_frac: float


@dataclass(frozen=True, slots=True)
class PairDiagnosis:
    """The reason why a module learns as it does.

    Attributes:
        cause: the first cause that fits.
        confidence: 0 to 1, how far the deciding z is beyond its threshold; None if no z decides.
    """

    cause: Cause
    confidence: float | None = None


def pair_intensity(pair: str, *, seed_norm: float | None, seed_params: int, host_norm: float | None, host_params: int) -> PairIntensity:
    """Return the ratio of the two modules' gradient norms per square root of a parameter, which does not depend on their sizes.

    Args:
        pair: name of the pair.
        seed_norm: gradient norm of the module; None without gradients.
        seed_params: number of entries of the module's gradient.
        host_norm: gradient norm of the network that hosts it; None without gradients.
        host_params: number of entries of the host's gradient.
    """
    if seed_norm is None or not host_norm or not seed_params or not host_params:
        return PairIntensity(pair)
    return PairIntensity(pair, (seed_norm / math.sqrt(seed_params)) / (host_norm / math.sqrt(host_params)))


def diagnose_pair(evidence: PairEvidence) -> PairDiagnosis:
    """Return the reason for a module's intensity ratio; a ratio of at least `LOW` is fine."""
    if not (evidence.grads_exist and evidence.upstream_exists):
        return PairDiagnosis("disconnected")
    if evidence.ratio is None:
        return PairDiagnosis("undefined")
    if evidence.ratio >= LOW:
        return PairDiagnosis("ok")
    if evidence.z_seed is None:
        return PairDiagnosis("saturated" if evidence.zero_frac >= SATURATED_ZEROS else "indeterminate")
    # by what is unusual for this module
    z_up, z_gain, z_host = (0.0 if z is None else z for z in (evidence.z_up, evidence.z_gain, evidence.z_host))
    if z_up <= -UNUSUAL:
        return PairDiagnosis("dormant", _confidence(z_up))
    if z_gain <= -UNUSUAL:
        return PairDiagnosis("saturated", _confidence(z_gain))
    if evidence.z_seed > -UNUSUAL and z_host >= UNUSUAL:
        return PairDiagnosis("host_fast", _confidence(z_host))
    return PairDiagnosis("indeterminate")


def _confidence(z: float) -> float:
    return 1.0 if math.isinf(z) else (abs(z) - UNUSUAL) / (1.0 + abs(z))


START, END = "grad/pair/", "/connected"
SIGNALS = ("intensity", "host_intensity", "upstream", "gain")


class PairHistories:
    """The history of every watched pair; it needs every record in order.

    Attributes:
        diagnoses: why each pair learns as it does, by name, in the last record.
    """

    def __init__(self) -> None:
        self.diagnoses: dict[str, PairDiagnosis] = {}
        self._histories: dict[str, RobustHistory] = {}

    def derive(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        """Return the intensity ratios of a record with these measured values."""
        pairs = [key[len(START) : -len(END)] for key in values if key.startswith(START) and key.endswith(END)]
        self.diagnoses = {}
        derived: dict[str, float] = {}
        for pair in pairs:
            signals = {name: values.get(f"{START}{pair}/{name}") for name in SIGNALS[:3]}
            signals["gain"] = _ratio(signals["intensity"], signals["upstream"])
            ratio = _ratio(signals["intensity"], signals["host_intensity"])
            connected = values[f"{START}{pair}{END}"] > 0
            evidence = PairEvidence(
                ratio=ratio,
                grads_exist=connected,
                upstream_exists=connected,
                zero_frac=values.get(f"{START}{pair}/zero_frac", 0.0),
                **dict(zip(("z_seed", "z_host", "z_up", "z_gain"), self._unusual(pair, signals), strict=True)),
            )
            self.diagnoses[pair] = diagnose_pair(evidence)
            derived.update(PairIntensity(pair, ratio).values(level))
        return derived

    def _unusual(self, pair: str, signals: Mapping[str, float | None]) -> list[float | None]:
        """Return the robust z of every signal in its own history; minus infinity for an exact zero, None without a history."""
        history = self._histories.setdefault(pair, RobustHistory(len(SIGNALS)))
        raw = np.array([math.nan if signals[name] is None else signals[name] for name in SIGNALS], dtype=np.float64)
        scores = np.asarray(robust_z(decades(raw), history.values, keys=SIGNALS).robust_z)
        scores = np.where((raw == 0) & (history.count >= N_MIN), -np.inf, scores)
        history.push(decades(raw))
        return [None if math.isnan(z) else z for z in scores.tolist()]


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


TEST_EVERY_UPDATES = 10
"""Updates between two tests for trends and periods, which are expensive."""

MIN_STEP_SIZES = 8
"""Updates that the response to the learning rate needs; sizes of steps are sampled, so long runs have a dozen."""

TEST_VALUES = 100
"""Number of latest values for these tests; their rates of false alarms were measured for this number."""

MAX_VALUE = 1e100
"""Larger values are ignored, because a single one would permanently overflow the squares of a history."""

LEVEL_SUFFIXES = ("ema", "ew_std")
STEP_SUFFIXES = (*LEVEL_SUFFIXES, "drift", "macd", "robust_z")
TEST_SUFFIXES = ("trend/slope", "trend/mk_z", "period/g", "period/p", "period/length", "period/goertzel", "acf1")
ALL_SUFFIXES = (*STEP_SUFFIXES, *TEST_SUFFIXES, "cusum", "page_hinkley")


@dataclass(frozen=True, slots=True)
class HistorySpec:
    """One key with a history.

    Attributes:
        key: its name.
        suffixes: endings of the derived keys.
        positive: whether its values are positive, and compared in decades.
        scale_min: smallest spread of its robust z.
    """

    key: str
    suffixes: tuple[str, ...]
    positive: bool = True
    scale_min: float = SCALE_MIN


# Histories are listed here and not in each metric, because the keys of groups of parameters are known only from a run's facts.
HEADLINES = (
    HistorySpec("policy/kl", ALL_SUFFIXES),
    HistorySpec("policy/entropy_norm", ALL_SUFFIXES),
    HistorySpec("loss/value", ALL_SUFFIXES),
    HistorySpec("grad/global/norm_preclip", ALL_SUFFIXES),
    HistorySpec("episode/return_mean_100", tuple(name for name in ALL_SUFFIXES if name not in STEP_SUFFIXES[2:]), positive=False),
)
"""Keys with all histories."""

DETECTOR_KEYS = (
    HistorySpec("grad/global/norm_preclip_max", ("robust_z",)),
    HistorySpec("ret/std", ("robust_z",)),
    HistorySpec("lstm/c/rms", ("robust_z",), scale_min=0.05),
    HistorySpec("grad/interference/log_ratio", ("robust_z",), positive=False),
    HistorySpec("grad/interference/actor_effective", ("robust_z",)),
    HistorySpec("grad/interference/cos", LEVEL_SUFFIXES, positive=False),
    HistorySpec("grad/align/successive_cos", LEVEL_SUFFIXES, positive=False),
    HistorySpec("grad/clip/freq", ("ema",), positive=False),
)
"""Further keys that detectors read, and keys that are meaningful only as averages."""

STEP_SIZE, RATE = "opt/update_to_weight", "opt/lr"
"""Keys of the size of the optimizer's steps and of the learning rate, which they should follow."""


GROUP_NORM = "grad/{group}/norm_preclip"
"""Key of every declared group of parameters."""


def key_histories(groups: Iterable[str]) -> tuple[HistorySpec, ...]:
    """Return the keys with a history in a run with these groups of parameters."""
    norms = [GROUP_NORM.format(group=segment(group)) for group in groups]
    return (*HEADLINES, *DETECTOR_KEYS, *(HistorySpec(key, STEP_SUFFIXES) for key in norms))


def histories(key: str) -> tuple[str, ...]:
    """Return the endings under which a key, or a template, has a history."""
    rows = (*HEADLINES, *DETECTOR_KEYS, HistorySpec(GROUP_NORM, STEP_SUFFIXES))
    return tuple([suffix for row in rows if row.key == key.replace("{part}", "c") for suffix in row.suffixes])


class KeyHistories:
    """The histories of a run's keys; it needs every record in order.

    Args:
        facts: facts of the run: `groups`, and, if the environment has a time limit, `horizon` and `num_steps`.
    """

    def __init__(self, facts: Facts) -> None:
        self._rows = key_histories(facts.groups)
        self._keys = tuple([row.key for row in self._rows])
        self._history_keys = {f"{row.key}/{suffix}" for row in self._rows for suffix in row.suffixes}
        self._positive = np.array([row.positive for row in self._rows])
        self._scale_min = np.array([row.scale_min for row in self._rows])
        self._cycle = _cycle(facts.horizon, facts.num_steps)
        self._level, self._drift = Ema(len(self._rows)), LogDrift(len(self._rows))
        self._history = RobustHistory(len(self._rows))
        self._changes, self._slow = ChangeState(len(self._rows)), TwoSided(len(self._rows))
        self._pairs = RobustHistory(2, PAIRS)
        self._updates = 0
        self._untested = np.zeros(len(self._rows), dtype=bool)
        self._begun = False

    def derive(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        """Return the derived values of a record with these values, only for keys that it has."""
        if level < Level.NORMAL:
            return {}
        self._updates += 1
        self._begun = self._begun or any(key in values for key in self._keys)
        # for a loop that logs only its own keys, empty histories would take a third of its record's time
        if not self._begun:
            return self._response(values, level)
        x = np.array([values.get(key, np.nan) for key in self._keys])
        x = np.where(np.abs(x) < MAX_VALUE, x, np.nan)
        scaled = np.where(self._positive, decades(x), x)
        groups = [*self._steps(x, scaled, np.isfinite(x))]
        if self._updates % TEST_EVERY_UPDATES == 0:
            self._untested[:] = True
        due = self._untested & np.isfinite(x)
        if due.any():
            self._untested &= ~due
            groups += self._tests(due)
        result = {key: number for group in groups for key, number in group.values(level).items() if key in self._history_keys}
        return result | self._response(values, level)

    def _steps(self, x: Array, scaled: Array, new: Array) -> Iterable[Derived]:
        """Add one value of each key, [K]; returns the derived groups."""
        keys = self._keys
        self._level.step(x)
        yield Smoothed(keys, *(np.where(new, part, np.nan) for part in (self._level.mean, self._level.std)))
        yield self._drift.step(np.where(self._positive, x, np.nan), keys)
        yield robust_z(scaled, self._history.values, scale_min=self._scale_min, keys=keys)
        yield Changes(keys, self._changes.step(scaled))
        yield self._slow.step(x, self._level.std, keys)
        self._history.push(scaled)

    def _tests(self, new: Array) -> Iterable[Derived]:
        """Yield trends and periods of the latest values, for keys that have them and have a value in this update."""
        rows = [k for k, row in enumerate(self._rows) if new[k] and "trend/slope" in row.suffixes]
        series = {self._keys[k]: self._history.ordered(k)[-TEST_VALUES:] for k in rows if self._history.count[k] >= N_MIN}
        keys = tuple(series)
        if not keys:
            return
        yield trends([*series.values()], keys)
        yield periods([prewhiten(x).y for x in series.values()], keys)
        yield memory([*series.values()], keys)
        if self._cycle is not None:
            cycles, length = self._cycle  # its power is undefined before there are `length` values
            powers = [goertzel(x[-length:], cycles) if len(x) >= length else np.nan for x in series.values()]
            yield KnownPeriod(keys, np.array(powers))

    def _response(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        """Return the correlation of step sizes with the learning rate, every tenth update."""
        pair = np.array([values.get(RATE, np.nan), values.get(STEP_SIZE, np.nan)])
        if np.isfinite(pair).all():
            self._pairs.push(pair)
        if self._updates % TEST_EVERY_UPDATES or self._pairs.count[0] < MIN_STEP_SIZES:
            return {}
        return lr_response(self._pairs.ordered(0), self._pairs.ordered(1)).values(level)


def _cycle(horizon: int | None, num_steps: int | None) -> tuple[int, int] | None:
    """Return cycles and values of a window with a whole number of time limits, at least two; None without a time limit."""
    if not horizon or not num_steps or not 2 <= horizon / num_steps <= TEST_VALUES / 2:
        return None
    updates = horizon / num_steps
    cycles = max(2, math.ceil(N_MIN / updates))
    return cycles, round(cycles * updates)


HEADS, SHIFT = "policy/head/", "/action_shift_js"
"""Beginning and end of the keys of single heads' shifts."""


class RunHistory:
    """The history of one run; it needs every record in order.

    It reads only the run's facts and the values by key, so that a journal yields the same derived values
    again.

    Attributes:
        gradients: histories of the gradients.
        pairs: histories of modules and their hosts, if there are any.
    """

    def __init__(self, facts: Mapping[str, Any] | None = None) -> None:
        facts = Facts.of(facts)
        self._variance = VarianceAverage()
        self._records = 0
        self._entropies: deque[tuple[int, float]] = deque(maxlen=ENTROPY_WINDOW)  # with the numbers of their records
        self.pairs = PairHistories()
        self.gradients = GradientHistory([segment(name) for name in facts.groups], facts.max_grad_norm)
        self._temporal = KeyHistories(facts)
        self._return = RecentMean()

    def derive(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        """Return the derived values of a record with these measured ones that belong to `level`."""
        values = judgeable(values)
        returns = recent_return(values, self._return)
        entropy: dict[str, float] = {}
        self._records += 1
        if "policy/entropy" in values:
            self._entropies.append((self._records, values["policy/entropy"]))
            numbers, entropies = np.array(self._entropies).T
            entropy = entropy_rate(entropies, numbers).values(level)
        moments = CriticMoments(*map(values.get, ("value/bias", "value/err/std", "value/std", "value/target/std")))
        fit, self._variance = critic_fit(moments, self._variance)
        advantages = [values.get(f"adv/raw/{name}") for name in ("mean", "std", "min", "max")]
        shifts = [value for key, value in values.items() if key.startswith(HEADS) and key.endswith(SHIFT)]
        return {
            **returns,
            **fit.values(level),
            **advantage_scale(*advantages).values(level),
            **entropy,
            **largest_shift(shifts).values(level),
            **self.gradients.derive(values, level),
            **self.pairs.derive(values, level),
            **self._temporal.derive({**values, **returns} if returns else values, level),
        }
