"""The forms of the fields in a journal's lines, so that a malformed line is one damaged line and not an exception in its readers.

Fields, facts and events that are not named here may hold anything: a later version or a plugin may have added them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, fields
from math import hypot, isfinite
from sys import float_info
from typing import Any, Final, NamedTuple

from esper_telemetry.core.facts import DECLARED
from esper_telemetry.core.record import MAX_COUNT, Axes, MetricInfo

MAX_TIME: Final = 253_402_300_799
"""Seconds since the epoch at the end of the year 9999, the last year of most calendars."""
MAX_TEXT_CHARACTERS: Final = 65_536
"""Length of a name, a sentence or a description."""
MAX_SETTING: Final = 1e15
"""Maximum size of a fact; products of several are still finite."""
NOT_FINITE: Final[Mapping[Any, float]] = {word: float(word) for word in ("inf", "-inf", "nan")}
"""Non-finite facts as the journal spells them, because it is strict JSON."""


class Form(NamedTuple):
    """The form of a field, in words and as a test."""

    expected: str
    accepts: Callable[[Any], bool]


def _lies_within(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def optional(form: Form) -> Form:
    """Return the form of a field that may be null."""
    return Form(f"{form.expected} or null", lambda value: value is None or form.accepts(value))


def list_of(form: Form, expected: str) -> Form:
    """Return the form of a list."""
    return Form(expected, lambda value: isinstance(value, list | tuple) and all(map(form.accepts, value)))


def object_of(form: Form, expected: str) -> Form:
    """Return the form of an object whose values have one form."""
    return Form(expected, lambda value: isinstance(value, Mapping) and all(map(form.accepts, value.values())))


def object_with(forms: Mapping[str, Form], expected: str, *, required: Iterable[str] = ()) -> Form:
    """Return the form of an object with named fields, among others."""

    def accepts(value: Any) -> bool:
        return (
            isinstance(value, Mapping)
            and value.keys() >= set(required)
            and all(form.accepts(value[name]) for name, form in forms.items() if name in value)
        )

    return Form(expected, accepts)


NUMBER: Final = Form("a finite number", _lies_within(-float_info.max, float_info.max))
COUNT: Final = Form(
    "a whole number from 0 on", lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT
)
SHARE: Final = Form("a number from 0 to 1", _lies_within(0, 1))
TIME: Final = Form("a time in seconds since the epoch", _lies_within(0, MAX_TIME))
TEXT: Final = Form(
    f"text of at most {MAX_TEXT_CHARACTERS:,} characters", lambda value: isinstance(value, str) and len(value) <= MAX_TEXT_CHARACTERS
)
FLAG: Final = Form("true or false", lambda value: isinstance(value, bool))
OBJECT: Final = Form("an object", lambda value: isinstance(value, Mapping))
TEXTS: Final = list_of(TEXT, "a list of texts")
NAMED_TEXTS: Final = object_of(TEXT, "an object of texts")
STEPS: Final = Form("a number of a usual size", _lies_within(-MAX_SETTING, MAX_SETTING))
SETTING: Final = Form(STEPS.expected, lambda value: STEPS.accepts(value) or value in [*NOT_FINITE.values(), *NOT_FINITE])

RUN: Final[Mapping[str, Form]] = {
    "run_id": TEXT,
    "name": TEXT,
    "started": TIME,
    "config": OBJECT,
    "tags": TEXTS,
    "notes": TEXT,
    "versions": NAMED_TEXTS,
    "facts": OBJECT,
    "resumed_from": optional(object_of(COUNT, "an object of whole numbers")),
}
RECORD: Final[Mapping[str, Form]] = {"seq": COUNT, "values": OBJECT, "partial": FLAG, "histograms": OBJECT}
AXES: Final[Mapping[str, Form]] = {"update": COUNT, "env_step": COUNT, "gradient_step": COUNT, "wall_time": TIME}
ALARM: Final[Mapping[str, Form]] = {
    **dict.fromkeys(("seq", "since", "streak", "incident"), COUNT),
    **dict.fromkeys(("type", "key", "cause", "text"), TEXT),
    **dict.fromkeys(("value", "threshold", "z"), optional(NUMBER)),
    "severity": SHARE,
    "adaptive": FLAG,
    "evidence": object_with({"values": OBJECT, "usual": object_of(list_of(NUMBER, ""), ""), "where": OBJECT}, "an object of evidence"),
}
EVENT: Final[Mapping[str, Form]] = {"type": TEXT, "seq": COUNT, "data": OBJECT}
END: Final[Mapping[str, Form]] = {"seq": COUNT}

NEWS: Final[Mapping[str, Form]] = {"update": COUNT, "text": TEXT}
EVENT_DATA: Final[Mapping[str, Mapping[str, Form]]] = {
    "lost": {"lines": COUNT},
    "remark": NEWS,
    "outcome": {
        **dict.fromkeys(("outcome", "text", "key"), TEXT),
        **dict.fromkeys(("updates", "episodes"), COUNT),
        **dict.fromkeys(("first", "last", "best", "threshold"), optional(NUMBER)),
        "since": optional(COUNT),
    },
    "detectors/unanswered": {"questions": NAMED_TEXTS},
    "failure": {
        "nonfinite": optional(
            object_with(
                {"tensor": TEXT, "count": COUNT, "size": COUNT, "environments": list_of(COUNT, "")},
                "an object with tensor, count and size",
                required=("tensor", "count", "size"),
            )
        )
    },
}
"""Fields of events that readers use, by type; a table checks its own events."""
REQUIRED_DATA: Final[Mapping[str, tuple[str, ...]]] = {"remark": ("update", "text"), "outcome": ("outcome", "text")}
TASK_EVENTS: Final = "task/"

OTHER_FACT: Final = Form("a finite number", lambda value: not isinstance(value, int) or NUMBER.accepts(int(value)))
FACT_FORMS: Final[Mapping[str, Form]] = {
    "int": STEPS,
    "float": SETTING,
    "str": TEXT,
    "bool": Form("true or false", lambda value: isinstance(value, int | float) and value in (0, 1)),
    "Sequence[str]": TEXTS,
    "Mapping[str, str]": NAMED_TEXTS,
    "Mapping[str, Sequence[str]]": object_of(TEXTS, "an object of lists of texts"),
    "Mapping[str, Any]": OBJECT,
}
"""Forms by the type of the fact in `Facts`."""
FACTS: Final[Mapping[str, Form]] = {
    **{name: optional(FACT_FORMS[kind]) for name, kind in DECLARED.items()},
    "learning_rate_schedule": optional(
        object_with(
            {
                **dict.fromkeys(("initial", "final", "total_steps", "begin", "sound_share"), STEPS),
                "counts": object_of(STEPS, ""),
                "curve": list_of(STEPS, ""),
                "defect": TEXT,
            },
            "a schedule",
            required=("initial", "final", "total_steps"),
        )
    ),
}
DESCRIPTION: Final[Mapping[str, Form]] = {
    field.name: TEXT
    if field.default is MISSING or isinstance(field.default, str)
    else COUNT
    if isinstance(field.default, int)
    else optional(NUMBER)
    for field in fields(MetricInfo)
}

KINDS: Final = {
    type(None): "null",
    bool: "true or false",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "an object",
}


def check(values: Any, forms: Mapping[str, Form], name: str, *, required: Iterable[str] = ()) -> None:
    """Raise ValueError, with the reason, for an object that lacks a field or has a field in another form."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{name} is {kind_of(values)}, not an object")
    for field in required:
        if field not in values:
            raise ValueError(f"{name} lacks {field}")
    for field, form in forms.items():
        if field in values and not form.accepts(values[field]):
            raise ValueError(f"{field} of {name} is {kind_of(values[field])}, not {form.expected}")


def kind_of(value: Any) -> str:
    """Return a description of a JSON value; a short number itself."""
    if isinstance(value, str) and len(value) > MAX_TEXT_CHARACTERS:
        return f"text of {len(value):,} characters"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.6g}" if abs(value) <= float_info.max or isinstance(value, float) else "a huge number"
    return KINDS.get(type(value), type(value).__name__)


def are_usual(axes: Axes) -> bool:
    """Return whether axes are valid. `check` finds the reason, but takes three times as long."""
    update, env_step, gradient_step = axes.update, axes.env_step, axes.gradient_step
    return (
        type(update) is type(env_step) is type(gradient_step) is int
        and min(update, env_step, gradient_step) >= 0
        and max(update, env_step, gradient_step) <= MAX_COUNT
        and type(axes.wall_time) is float
        and 0 <= axes.wall_time <= MAX_TIME
    )


def are_finite(numbers: Collection[Any]) -> bool:
    """Return whether all of them are finite numbers."""
    try:
        if isfinite(hypot(*numbers)):  # takes 2 microseconds for 240 numbers; may overflow even if each of them is finite
            return True
    except (TypeError, OverflowError):  # a text, a list or null; an integer of hundreds of digits
        pass
    return all(map(NUMBER.accepts, numbers))


def check_event(kind: str, data: Mapping[str, Any]) -> None:
    """Raise ValueError, with the reason, if the data of an event lacks a field that its readers need or has one in another form."""
    forms = NEWS if kind.startswith(TASK_EVENTS) else EVENT_DATA.get(kind, {})
    required = NEWS if kind.startswith(TASK_EVENTS) else REQUIRED_DATA.get(kind, ())
    check(data, forms, f"{kind} event", required=required)


def wrong_facts(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the reason why each malformed fact is left out, by its name."""
    return {
        name: f"{name} of facts is {kind_of(value)}, not {form.expected}"
        for name, value in given.items()
        if not (form := FACTS.get(name, OTHER_FACT)).accepts(value)
    }


def fact(name: str, value: Any) -> Any:
    """Return a fact as detectors read it: a setting that the journal spells `inf` becomes a number."""
    return NOT_FINITE[value] if DECLARED.get(name) == "float" and isinstance(value, str) else value
