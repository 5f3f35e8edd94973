"""The declaration of an alarm, and the view of an update that its judge gets.

One `AlarmRule` holds everything about one alarm: keys, bounds, judge, sentences, rank among causes. Bounds have names, so that a user can
change each of them, or scale all by a multiplier. A judge is a callable from a `View` to findings: a function, or a callable with state
(`judges.StateJudge`, or a dataclass). Every run gets a copy of the judge.
"""

from __future__ import annotations

import copy
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, isfinite
from string import Formatter
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Self, get_args

from esper_telemetry.alarms.alarm_bounds import Bound, Limits, Ramp
from esper_telemetry.alarms.baselines import Baselines, History
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.messages import number, percent, span, times
from esper_telemetry.core.metric import segment
from esper_telemetry.core.record import check_key
from esper_telemetry.core.requirements import require_choice, require_count, require_each, require_flag, require_number, require_text
from esper_telemetry.history.recent_return import ReturnCourse

CAUSE_LAST_RANK: Final = 900
"""Rank from which an alarm is never the cause of another one: alarms about the task, the end of the run, and telemetry."""

EvidencePiece = Literal["transitions", "layers", "stability", "pairs"]
"""Part of the update that raised an alarm: transitions and optimizer steps, gradients by layer, non-finite tensors, modules with their
hosts."""

TEMPLATE: Final = re.compile(r"[a-z0-9_{}*]+(/[a-z0-9_{}*]+)*/?")  # metric keys, templates and prefixes of keys
WARNING: Final = 0.5  # severity of an unusual state that may be harmless: it raises an alarm but not the telemetry level


class Finding(NamedTuple):
    """The judgement of one update.

    Attributes:
        severity: 0 to 1; 0.5 and more is evidence for an alarm.
        key: the deciding metric.
        value: value of this metric.
        threshold: value of this metric at which the alarm is raised, if it is a single number.
        adaptive: whether the threshold follows the run's history.
        z: robust standard score relative to that history.
        instance: the head, group or layer, if the judge looks at each.
        claim: whether this finding is certainly a mistake and not a consequence of another one, even if its type need not be.
        held: number of updates that the judgement covers, including this one; the alarm holds since the first.
        advice: returns advice that replaces the rule's action, if it depends on the values.
        text: returns the clause that continues "Since update 7, ".
    """

    severity: float
    key: str
    value: float | None = None
    threshold: float | None = None
    adaptive: bool = False
    z: float | None = None
    instance: str = ""
    claim: bool = False
    held: int = 1
    advice: Callable[[], str] | None = None
    text: Callable[[], str] | None = None

    def with_advice(self, advice: Callable[[], str] | None) -> Finding:
        """Return the finding with its own advice; None keeps the rule's."""
        return self._replace(advice=advice)

    def says(self, words: str, *values: float | str | Callable[[], str]) -> Finding:
        """Return the finding with a clause: `{}` formats a number or a text, `{:%}` a share, `{:x}` a ratio."""
        return Finding(*self[:-1], lambda: WORDING.vformat(words, values, {}))

    def with_text(self, text: Callable[[], str]) -> Finding:
        """Return the finding with the clause that `text` returns."""
        return Finding(*self[:-1], text)  # three times as fast as `_replace`, about ninety times per update


class Wording(Formatter):
    """Formats the values of a clause."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return a value as text; functions are called when the clause is read."""
        if isinstance(value, str):
            return value
        return str(value()) if callable(value) else {"": number, "%": percent, "x": times}[format_spec](value)


WORDING: Final = Wording()


def checked(finding: Finding) -> Finding:
    """Return the finding with plain numbers and a severity from 0 to 1; NumPy numbers and one-element tensors are converted.

    A non-finite `value`, `threshold` or `z` becomes None. Raises TypeError or ValueError for anything else.
    """
    if not isinstance(finding, Finding):
        raise TypeError(f"a judge yields instances of Finding, got {reprlib.repr(finding)}")
    if not isinstance(finding.key, str) or not isinstance(finding.instance, str):
        raise TypeError(f"key and instance of a Finding are texts, got {reprlib.repr((finding.key, finding.instance))}")
    severity = float(finding.severity)
    return finding._replace(
        severity=severity if severity != severity else min(1.0, max(0.0, severity)),
        value=_finite(finding.value),
        threshold=_finite(finding.threshold),
        z=_finite(finding.z),
        adaptive=bool(finding.adaptive),
        claim=bool(finding.claim),
        held=int(finding.held),
    )


def _finite(value: Any) -> float | None:
    number = None if value is None else float(value)
    return number if number is not None and isfinite(number) else None


LARGE_STEP_UPDATES: Final = 10
"""Updates within which a step of the policy that is too large may be the cause of what follows."""


class View:
    """One update, as judges see it.

    Attributes:
        values: values of the record.
        previous: values of the previous record.
        facts: facts of the run.
        limits: values of all bounds.
        baselines: histories of the keys that rules declare.
        update: number of records so far, including this one.
        progress: completed share of the run, 0 to 1; None if its length is not known.
        steps: optimizer steps of this update; None in the first.
        transitions: environment steps of this update; None in the first.
        env_step: environment steps of the run so far.
        course: course of the return since the start.
        large_step: update and KL divergence of the latest update that moved the policy too far; None without one.
        patience: factor by which rules wait longer in a run with small updates; see `patience_factor`.
    """

    def __init__(self, facts: Mapping[str, Any], limits: Limits, baselines: Baselines) -> None:
        self.facts = Facts.of(facts)
        self.limits = limits
        self.baselines = baselines
        self.values: Mapping[str, float] = {}
        self.previous: Mapping[str, float] = {}
        self.update = 0
        self.progress: float | None = None
        self.steps: int | None = None
        self.transitions: int | None = None
        self.env_step = 0
        self.course = ReturnCourse()
        self.large_step: tuple[int, float] | None = None
        self.patience = patience_factor(self.facts)
        self._keys: set[str] = set()
        self._cache: dict[tuple[str, str], list[str]] = {}
        self._labelled: dict[tuple[str, str], list[tuple[str, str, float]]] = {}

    @property
    def recent_large_step(self) -> bool:
        """True if the policy moved too far in one of the latest updates, which may be the cause of what follows."""
        return self.large_step is not None and self.update - self.large_step[0] <= LARGE_STEP_UPDATES

    def protected(self) -> View:
        """Return a copy for user code: its mappings are read-only, and attributes set on it do not affect the original."""
        view, baselines = copy.copy(self), copy.copy(self.baselines)
        view.limits, view.course = copy.deepcopy((self.limits, self.course))
        view._keys, view._cache, view._labelled = set(self._keys), {}, {}
        for name in ("z", "shift", "beyond", "below"):
            setattr(baselines, name, MappingProxyType(getattr(baselines, name)))
        view.baselines = baselines
        view.values, view.previous = MappingProxyType(self.values), MappingProxyType(self.previous)
        return view

    def get(self, key: str) -> float | None:
        """Return a value of the record, or None."""
        return self.values.get(key)

    def z(self, key: str) -> float | None:
        """Return the robust standard score of a value relative to its history, or None."""
        return self.baselines.z.get(key)

    def look(self, values: Mapping[str, float]) -> None:
        """Move to the next record."""
        self.previous, self.values = self.values, values
        self.course.add(values)
        self._labelled.clear()
        new = values.keys() - self._keys
        if new:
            self._keys |= new
            self._cache.clear()

    def matching(self, start: str, end: str) -> list[str]:
        """Return the keys of all records so far with this beginning and end."""
        keys = self._cache.get((start, end))
        if keys is None:
            keys = sorted(key for key in self._keys if key.startswith(start) and key.endswith(end))
            self._cache[start, end] = keys
        return keys

    @property
    def rollout_steps(self) -> int:
        """Environment steps of this update, in the first one by the run's settings; 0 if neither is known."""
        if self.transitions is not None:
            return self.transitions
        return (self.facts.num_steps or 0) * (self.facts.num_envs or 0)

    def labelled(self, start: str, end: str) -> list[tuple[str, str, float]]:
        """Return (label, key, value) of all keys with this beginning and end and one segment, the label, between."""
        rows = self._labelled.get((start, end))
        if rows is None:  # several rules read the layers of an update
            cut, stop, values = len(start), -len(end) or None, self.values
            pairs = [(key[cut:stop], key) for key in self.matching(start, end) if key in values]
            rows = [(label, key, values[key]) for label, key in pairs if label and "/" not in label]
            self._labelled[start, end] = rows
        return rows

    def usual(self, key: str, text: Callable[[float], str] = number) -> str:
        """Return ` (usually a-b)` for a key with a history; empty if the value is in this range, as in a run wrong from its start."""
        ends, value = self.baselines.usual(key), self.values.get(key)
        if ends is None or (value is not None and ends[0] <= value <= ends[1]):
            return ""
        return f" (usually {span(*ends, text)})"


MIN_UPDATE_STEPS: Final = 64
"""Environment steps of an update above which its statistics are meaningful; in smaller updates they are mostly chance."""


def patience_factor(facts: Facts) -> int:
    """Return the number of updates that together have as many steps as rules expect; 1 if the number of steps is not known."""
    steps = (facts.num_steps or 0) * (facts.num_envs or 0)
    return max(1, ceil(MIN_UPDATE_STEPS / steps)) if steps > 0 else 1


segment_of = lru_cache(maxsize=4096)(segment)  # cached because every update has the same names of parameters

Judge = Callable[[View], Iterable[Finding]]
"""Yields the findings of an update; without a finding the alarm keeps its state."""


def always(facts: Facts) -> bool:
    """Return True: the rule applies to every run."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRule:
    """The declaration of one alarm; separate from metrics, because an alarm reads several keys and its advice belongs to the fault.

    Attributes:
        type: name, `family/what`.
        inputs: keys or key templates that it reads, the deciding one first.
        meaning: what has happened, in one sentence.
        action: what to try, the most likely remedy first.
        judge: yields findings; each run uses a copy. None if another part of telemetry raises the alarm.
        bounds: bounds that the judge compares values with; users change them by name.
        source: references, and the reasons for bounds and patience.
        rank: place among causes: an alarm explains alarms of a larger rank that come with it. The built-in alarms have multiples of ten
            and numbers between them; choose a free number between the causes and the effects of a new alarm.
        hard: the run is certainly wrong, even if it seems to learn.
        claim: always a mistake, never a consequence: the cause of an incident even if it appears an update or two later.
        effect: shows how a run goes wrong but not why, so that it does not explain a bad outcome.
        required: keys that the alarm cannot do without, by default the first of `inputs`; one key of a tuple suffices.
        facts: facts of the run that the alarm cannot do without.
        histories: keys whose history the judge uses; `*` matches part of a segment.
        applies: whether the alarm makes sense for a run, by its facts.
        warmup: updates at the start in which the alarm is not raised.
        n_on, n_off: consecutive updates that raise and end the alarm. If updates have few steps, `n_on` is multiplied by `patience_factor`
            unless the alarm is `hard` or `certain`. A judge counts updates itself only if a miss must not restart the count.
        debug_updates: updates at DEBUG after the alarm became critical.
        evidence: keys whose values are attached; `*` matches part of a segment.
        pieces: parts of the update that are attached.
        histograms: prefixes of the keys whose histograms are attached, by default the family of the type.
        relative: uses history: an intervention resets the judge and ends the alarm.
        certain: can also be raised right after an intervention, because an intervention cannot cause it.
        sampled: its inputs are measured in sampled updates only.
        optional: its inputs exist only in some runs, so their absence is not reported.
        partial: also judges the record of an unfinished update.
        default_off: off unless a user switches it on.
        settings: settings that the advice would change; settings outside all published values are named in the alarm.
        changes: what the advice changes first, as pairs: a setting with the factor to multiply it by, or `env` with a wrapper that the
            advice names.
    """

    type: str
    inputs: tuple[str, ...]
    meaning: str
    action: str
    judge: Judge | None = None
    bounds: tuple[Bound | Ramp, ...] = ()
    source: str = ""
    rank: int = 500
    hard: bool = False
    claim: bool = False
    effect: bool = False
    required: tuple[str | tuple[str, ...], ...] | None = None
    facts: tuple[str, ...] = ()
    histories: tuple[str | History, ...] = ()
    applies: Callable[[Facts], bool] = always
    warmup: int = 0
    n_on: int = 1
    n_off: int = 3
    debug_updates: int = 0
    evidence: tuple[str, ...] = ()
    pieces: tuple[EvidencePiece, ...] = ()
    histograms: tuple[str, ...] | None = None
    relative: bool = False
    certain: bool = False
    sampled: bool = False
    optional: bool = False
    partial: bool = False
    default_off: bool = False
    settings: tuple[str, ...] = ()
    changes: tuple[tuple[str, float | str], ...] = ()

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for the first invalid field."""
        check_key(self.type)
        try:
            self._check_fields()
        except (TypeError, ValueError) as error:
            raise type(error)(f"alarm {self.type!r}: {error}") from None

    def _check_fields(self) -> None:
        for name in ("meaning", "action"):
            require_text(name, getattr(self, name))
        require_text("source", self.source, may_be_empty=True)
        if not (self.judge is None or callable(self.judge)):
            raise TypeError(f"judge must be a function or None, got {self.judge!r}")
        if not callable(self.applies):
            raise TypeError(f"applies must be a function, got {self.applies!r}")
        require_number("rank", self.rank)
        for name, low in (("warmup", 0), ("n_on", 1), ("n_off", 1), ("debug_updates", 0)):
            require_count(name, getattr(self, name), low=low)
        for name in ("hard", "claim", "effect", "relative", "certain", "sampled", "optional", "partial", "default_off"):
            require_flag(name, getattr(self, name))
        require_each("inputs", self.inputs, require_template, may_be_empty=False)
        for name, require in ITEM_CHECKS.items():
            if getattr(self, name) is not None or name not in ("required", "histograms"):
                require_each(name, getattr(self, name), require)

    @property
    def required_keys(self) -> tuple[tuple[str, ...], ...]:
        """Keys that the alarm cannot do without, as tuples of alternatives."""
        required = self.inputs[:1] if self.required is None else self.required
        return tuple([(keys,) if isinstance(keys, str) else keys for keys in required])

    @property
    def histogram_keys(self) -> tuple[str, ...]:
        """Prefixes of the keys whose histograms are attached."""
        return (f"{self.type.partition('/')[0]}/",) if self.histograms is None else self.histograms

    @property
    def single_bounds(self) -> tuple[Bound, ...]:
        """All bounds; a ramp counts as its two ends."""
        return tuple([bound for item in self.bounds for bound in (item.bounds if isinstance(item, Ramp) else (item,))])


class AlarmDraft:
    """Builder of an `AlarmRule`, a group of fields at a time; `judged` completes it."""

    def __init__(self, type: str, *inputs: str, **fields: Any) -> None:
        self._fields: dict[str, Any] = {"type": type, "inputs": inputs, **fields}

    def _with(self, **fields: Any) -> Self:
        self._fields |= fields
        return self

    def reads(self, *inputs: str) -> Self:
        """Add keys that the alarm reads; the deciding one comes first."""
        return self._with(inputs=(*self._fields["inputs"], *inputs))

    def needs(self, *required: str | tuple[str, ...], **fields: Any) -> Self:
        """Set the keys that the alarm cannot do without, and `facts` or `applies`."""
        return self._with(**({"required": required} if required else {}), **fields)

    def follows(self, *histories: str | History) -> Self:
        """Set the keys whose history the judge uses."""
        return self._with(histories=histories)

    def changes(self, *settings: str, **changes: float | str) -> Self:
        """Set the settings that the advice would change; a keyword gives the factor, or the wrapper of `env`."""
        return self._with(settings=(*settings, *changes), changes=tuple(changes.items()))

    def says(self, meaning: str, action: str, source: str = "") -> Self:
        """Set the sentences."""
        return self._with(meaning=meaning, action=action, source=source)

    def shows(self, *evidence: str, **fields: Any) -> Self:
        """Add the evidence, with `pieces` and `histograms`."""
        return self._with(evidence=(*self._fields.get("evidence", ()), *evidence), **fields)

    def judged(self, judge: Judge | None, *bounds: Bound | Ramp) -> AlarmRule:
        """Return the rule with its judge and the judge's bounds."""
        return AlarmRule(judge=judge, bounds=bounds, **self._fields)


alarm = AlarmDraft


def require_template(name: str, value: Any) -> str:
    """Return a key, a template or a prefix, in which `*` matches part of a segment."""
    if not TEMPLATE.fullmatch(require_text(name, value)):
        raise ValueError(f"{name} must be a metric key such as 'policy/kl', got {value!r}")
    return str(value)


def _require_change(name: str, value: Any) -> tuple[str, float | str]:
    is_pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)
    if not is_pair or not (isinstance(value[1], str) or (isinstance(value[1], int | float) and value[1] > 0)):
        raise ValueError(f"{name} must be pairs such as ('learning_rate', 0.5), got {value!r}")
    setting, change = value
    return str(setting), change


def _require_bound(name: str, value: Any) -> Bound | Ramp:
    if not isinstance(value, Bound | Ramp):
        raise TypeError(f"{name} must be a Bound or a Ramp, got {value!r}")
    return value


ITEM_CHECKS: Final[Mapping[str, Callable[[str, Any], object]]] = {
    "facts": require_text,
    "settings": require_text,
    "evidence": require_template,
    "histories": lambda name, value: value if isinstance(value, History) else require_template(name, value),
    "bounds": _require_bound,
    "pieces": lambda name, value: require_choice(name, value, get_args(EvidencePiece)),
    "required": lambda name, value: (
        require_each(name, value, require_template) if isinstance(value, tuple) else require_template(name, value)
    ),
    "histograms": require_template,
    "changes": _require_change,
}
"""The check of each item of a field of `AlarmRule`."""
