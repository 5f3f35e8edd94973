"""The declaration of an alarm, and what its judge sees of an update.

One `AlarmRule` holds everything that belongs to one alarm: keys, bounds, judge, sentences, place among causes. Bounds are data with a name
and a source, so that a user can change each, and a multiplier all of them. A judge is a callable from a `View` to findings, a function or
one with a state of its own (`judges.StateJudge`, or a dataclass whose fields are that state): every run judges with a copy.
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
from esper_telemetry.alarms.verdict.return_course import ReturnCourse
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.messages import number, percent, span, times
from esper_telemetry.core.metric import segment
from esper_telemetry.core.record import check_key
from esper_telemetry.core.requirements import (
    require_choice,
    require_count,
    require_each,
    require_flag,
    require_number,
    require_text,
)

CAUSE_LAST_RANK: Final = 900
"""Rank from which on an alarm is never the cause of another one: the task, the end of the run, telemetry itself."""

EvidencePiece = Literal["transitions", "layers", "stability", "pairs"]
"""Part of the update that raised an alarm: transitions and optimizer steps, gradients by layer, non-finite tensors, modules beside their
hosts."""

TEMPLATE: Final = re.compile(r"[a-z0-9_{}*]+(/[a-z0-9_{}*]+)*/?")  # of metric keys, their templates and beginnings
WARNING: Final = 0.5  # severity of what is unusual and may be harmless or right: it raises the alarm and no level


class Finding(NamedTuple):
    """The judgement of one update.

    Attributes:
        severity: 0 to 1; 0.5 and more speaks for an alarm.
        key: the metric that decided.
        value: of that metric.
        threshold: value from which on it speaks for an alarm, where a single number says so.
        adaptive: the threshold follows the run's own history.
        z: robust standard scores from that history.
        instance: the head, group or layer, where a judge looks at each.
        claim: a mistake in itself and no consequence, whatever else the type is raised for.
        held: updates that a judgement over several of them is about, this one included: the alarm holds since the first.
        advice: returns what to try in place of the rule's action, where that depends on the values.
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
        """Return the same with advice of its own; None leaves that of the rule."""
        return self._replace(advice=advice)

    def says(self, words: str, *values: float | str | Callable[[], str]) -> Finding:
        """Return the same with a clause: `{}` stands for a number or a text, `{:%}` for a share, `{:x}` for a ratio."""
        return Finding(*self[:-1], lambda: WORDING.vformat(words, values, {}))

    def with_text(self, text: Callable[[], str]) -> Finding:
        """Return the same with the clause that `text` returns."""
        return Finding(*self[:-1], text)  # a third of the time of `_replace`, some ninety times per update


class Wording(Formatter):
    """Fills values into the words of a clause."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return a value as text; functions are called when the clause is read."""
        if isinstance(value, str):
            return value
        return str(value()) if callable(value) else {"": number, "%": percent, "x": times}[format_spec](value)


WORDING: Final = Wording()


def checked(finding: Finding) -> Finding:
    """Return the finding with plain numbers, severity from 0 to 1; NumPy numbers and tensors of one element are numbers too.

    A `value`, `threshold` or `z` that is not finite becomes None. Raises TypeError or ValueError for anything else.
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


class View:
    """One update as judges see it.

    Attributes:
        values: of the record.
        previous: of the record before it.
        facts: of the run.
        limits: values of all bounds.
        baselines: histories of the keys that rules declare.
        update: records so far, this one included.
        progress: share of the run that is over, 0 to 1; None where its length is not known.
        steps: optimizer steps of this update; None in the first.
        transitions: environment steps of this update; None in the first.
        env_step: environment steps of the run so far.
        course: of the return since the start.
        patience: times that rules wait longer in this run, because its updates are small; see `patience_factor`.
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
        self.patience = patience_factor(self.facts)
        self._keys: set[str] = set()
        self._cache: dict[tuple[str, str], list[str]] = {}
        self._labelled: dict[tuple[str, str], list[tuple[str, str, float]]] = {}

    def protected(self) -> View:
        """Return a copy for code that is not ours: its mappings cannot be changed, and what else is set in it stays in it."""
        view, baselines = copy.copy(self), copy.copy(self.baselines)
        view.limits, view.course = copy.deepcopy((self.limits, self.course))
        view._keys, view._cache, view._labelled = set(self._keys), {}, {}
        for name in ("z", "shift", "beyond", "below"):
            setattr(baselines, name, MappingProxyType(getattr(baselines, name)))
        view.baselines = baselines
        view.values, view.previous = MappingProxyType(self.values), MappingProxyType(self.previous)
        return view

    def get(self, key: str) -> float | None:
        """A value of the record."""
        return self.values.get(key)

    def z(self, key: str) -> float | None:
        """Robust standard scores between a value and its history."""
        return self.baselines.z.get(key)

    def look(self, values: Mapping[str, float]) -> None:
        """Turn to the next record."""
        self.previous, self.values = self.values, values
        self.course.add(values)
        self._labelled.clear()
        new = values.keys() - self._keys
        if new:
            self._keys |= new
            self._cache.clear()

    def matching(self, start: str, end: str) -> list[str]:
        """Keys of all records so far that begin and end so."""
        keys = self._cache.get((start, end))
        if keys is None:
            keys = sorted(key for key in self._keys if key.startswith(start) and key.endswith(end))
            self._cache[start, end] = keys
        return keys

    @property
    def rollout_steps(self) -> int:
        """Environment steps of this update, in the first one by the run's settings; 0 where neither says."""
        if self.transitions is not None:
            return self.transitions
        return (self.facts.num_steps or 0) * (self.facts.num_envs or 0)

    def labelled(self, start: str, end: str) -> list[tuple[str, str, float]]:
        """(label, key, value) of all keys that begin and end so, with one segment between."""
        rows = self._labelled.get((start, end))
        if rows is None:  # several rules ask for the layers of an update
            cut, stop, values = len(start), -len(end) or None, self.values
            pairs = [(key[cut:stop], key) for key in self.matching(start, end) if key in values]
            rows = [(label, key, values[key]) for label, key in pairs if label and "/" not in label]
            self._labelled[start, end] = rows
        return rows

    def usual(self, key: str) -> str:
        """`(usually a-b)` of a key with a history, or nothing, as where the value is usual in a run that is wrong from its start."""
        ends, value = self.baselines.usual(key), self.values.get(key)
        if ends is None or (value is not None and ends[0] <= value <= ends[1]):
            return ""
        return f" (usually {span(*ends)})"


MIN_UPDATE_STEPS: Final = 64
"""Environment steps of an update from which on its statistics are worth judging; in smaller ones they are mostly chance."""


def patience_factor(facts: Facts) -> int:
    """Times that a run's updates must be repeated to have as many steps as rules are made for; 1 where their number is not known."""
    steps = (facts.num_steps or 0) * (facts.num_envs or 0)
    return max(1, ceil(MIN_UPDATE_STEPS / steps)) if steps > 0 else 1


segment_of = lru_cache(maxsize=4096)(segment)  # of names of parameters: every update has the same ones

Judge = Callable[[View], Iterable[Finding]]
"""Yields the findings of an update; none where the values do not say, which leaves the alarm as it was."""


def always(facts: Facts) -> bool:
    """Return True: the rule applies to every run."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRule:
    """The declaration of one alarm; apart from metrics, because one alarm reads several keys and its advice belongs to the fault.

    Attributes:
        type: its name, `family/what`.
        inputs: keys or key templates that show it, the deciding one first.
        meaning: what has happened, in one sentence.
        action: what to try, the likeliest first.
        judge: yields findings; a copy of it judges each run. None where another part of telemetry raises the alarm.
        bounds: that the judge compares values with; users change them by name.
        source: who says so, and the reasons behind bounds and patience.
        rank: place among causes, small first: an alarm explains those of a larger rank that come with it. The built-in alarms lie in
            steps of ten; a new one takes a free number between its causes and its effects.
        hard: the run is wrong for certain, however well it seems to learn.
        claim: a mistake in itself and no consequence: the cause even where it shows an update or two later.
        effect: says how a run goes wrong and not why: alone it does not explain a bad outcome.
        required: keys without which the alarm cannot be raised, the first of `inputs` by default; of a tuple of keys one is enough.
        facts: of the run, likewise.
        histories: keys whose history it compares with; `*` stands for a part of a segment.
        applies: says by a run's facts whether the question makes sense.
        warmup: updates at the beginning that raise nothing.
        n_on, n_off: updates in a row that raise the alarm and end it; of updates of a few steps `patience_factor` times as many raise
            one that is not `hard` or `certain`. A judge counts updates itself only where a miss must not start the count again.
        debug_updates: updates at DEBUG that follow where it is critical.
        evidence: keys whose values are attached; `*` stands for a part of a segment.
        pieces: parts of the update that are attached.
        histograms: beginnings of the keys whose histograms are attached; the family of the type by default.
        relative: judges by history: after an intervention it restarts, with the judge's own state, and the alarm ends.
        certain: is also raised right after an intervention, whose waves it cannot be.
        sampled: its inputs are measured in some updates only.
        optional: its inputs are there only where the run has what they measure, so that their absence says nothing.
        partial: also judges the record of an update that did not end.
        default_off: is raised only where a user switches it on.
        settings: names of settings that the advice would change: those outside of all published values are named with it.
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

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError, one sentence, for the first field that no run could use."""
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
        items: dict[str, Callable[[str, Any], object]] = {"facts": require_text, "settings": require_text}
        items |= {"evidence": require_template, "histories": _require_history, "bounds": _require_bound}
        items |= {"pieces": _require_piece} | ({} if self.required is None else {"required": _require_templates})
        items |= {} if self.histograms is None else {"histograms": require_template}
        for name, require in items.items():
            require_each(name, getattr(self, name), require)

    @property
    def required_keys(self) -> tuple[tuple[str, ...], ...]:
        """Keys without which the alarm cannot be raised, as alternatives of which one is enough."""
        required = self.inputs[:1] if self.required is None else self.required
        return tuple([(keys,) if isinstance(keys, str) else keys for keys in required])

    @property
    def histogram_keys(self) -> tuple[str, ...]:
        """Beginnings of the keys whose histograms are attached."""
        return (f"{self.type.partition('/')[0]}/",) if self.histograms is None else self.histograms

    @property
    def single_bounds(self) -> tuple[Bound, ...]:
        """All bounds, ramps as their two ends."""
        return tuple([bound for item in self.bounds for bound in (item.bounds if isinstance(item, Ramp) else (item,))])


class AlarmDraft:
    """A built-in alarm under declaration, a group of fields at a time; `judged` completes it. Fields are those of `AlarmRule`."""

    def __init__(self, type: str, *inputs: str, **fields: Any) -> None:
        self._fields: dict[str, Any] = {"type": type, "inputs": inputs, **fields}

    def _with(self, **fields: Any) -> Self:
        self._fields |= fields
        return self

    def reads(self, *inputs: str) -> Self:
        """Add keys that show it, where they are many; the deciding one comes first."""
        return self._with(inputs=(*self._fields["inputs"], *inputs))

    def needs(self, *required: str | tuple[str, ...], **fields: Any) -> Self:
        """Add keys without which it cannot be raised, and `facts` or `applies`."""
        return self._with(**({"required": required} if required else {}), **fields)

    def follows(self, *histories: str | History) -> Self:
        """Add the keys whose history it compares with."""
        return self._with(histories=histories)

    def changes(self, *settings: str) -> Self:
        """Add the settings that the advice would change."""
        return self._with(settings=settings)

    def says(self, meaning: str, action: str, source: str = "") -> Self:
        """Add the sentences."""
        return self._with(meaning=meaning, action=action, source=source)

    def shows(self, *evidence: str, **fields: Any) -> Self:
        """Add the evidence, with `pieces` and `histograms`."""
        return self._with(evidence=(*self._fields.get("evidence", ()), *evidence), **fields)

    def judged(self, judge: Judge | None, *bounds: Bound | Ramp) -> AlarmRule:
        """Return the rule with its judge, and the bounds that the judge compares with."""
        return AlarmRule(judge=judge, bounds=bounds, **self._fields)


alarm = AlarmDraft


def require_template(name: str, value: Any) -> str:
    """Return a key, a template or the beginning of one, with `*` for a part of a segment."""
    if not TEMPLATE.fullmatch(require_text(name, value)):
        raise ValueError(f"{name} must be a metric key such as 'policy/kl', got {value!r}")
    return str(value)


def _require_templates(name: str, value: Any) -> str | tuple[str, ...]:
    return require_each(name, value, require_template) if isinstance(value, tuple) else require_template(name, value)


def _require_history(name: str, value: Any) -> str | History:
    return value if isinstance(value, History) else require_template(name, value)


def _require_piece(name: str, value: Any) -> str:
    return str(require_choice(name, value, get_args(EvidencePiece)))


def _require_bound(name: str, value: Any) -> Bound | Ramp:
    if not isinstance(value, Bound | Ramp):
        raise TypeError(f"{name} must be a Bound or a Ramp, got {value!r}")
    return value
