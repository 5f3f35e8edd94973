"""Tables of courses: spoiled runs, and the alarm that each of them raises or does not raise."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pytest
from healthy_run import FACTS, Number, Spoil, alarms, judged, raised, run, set_to, with_steps

from esper_telemetry.core.record import AlarmLevel

SINCE = 30


class Course(NamedTuple):
    """A run, and whether it raises an alarm, or the update in which it raises it first.

    Attributes:
        alarm: None if the run raises none of any type.
        alone: whether the run raises no other alarm.
        spoil: changes the values of each update from `since` on; a mapping sets them.
        text: parts of the text of the first alarm; a part that begins with `!` is missing in it.
        env_steps: steps of the environments in each update, and `gradient_steps` those of the optimizer.
    """

    alarm: str | None
    told: int | bool | range
    spoil: Spoil | Mapping[str, Number]
    updates: int = 40
    since: int = SINCE
    facts: Mapping[str, Any] = FACTS
    alone: bool = False
    text: tuple[str, ...] = ()
    level: AlarmLevel | None = None
    env_steps: int | None = None
    gradient_steps: int | None = None


def whole(alarm: str | None, told: int | bool | range, spoil: Spoil | Mapping[str, Number], updates: int = 60, **more: Any) -> Course:
    """A course that is spoiled from the first update on."""
    return Course(alarm, told, spoil, updates, 1, **more)


def parameters(courses: Mapping[str, Iterable[Course]]) -> list[Any]:
    return [pytest.param(course, id=f"{name} [{place}]") for name, rows in courses.items() for place, course in enumerate(rows)]


def check(course: Course) -> None:
    spoil = course.spoil if callable(course.spoil) else set_to(course.spoil)
    records = with_steps(run(course.updates, spoil, since=course.since), env=course.env_steps, gradient=course.gradient_steps)
    verdicts = judged(records, course.facts)
    updates = raised(verdicts)

    if course.alarm is None or course.alone:
        assert updates == ({course.alarm: course.told} if course.alone else {})
    elif isinstance(course.told, bool):
        assert (course.alarm in updates) is course.told, updates
    elif isinstance(course.told, range):
        assert updates[course.alarm] in course.told
    else:
        assert updates[course.alarm] == course.told
    first = next((alarm for alarm in alarms(verdicts) if alarm.type == course.alarm), None)
    if first is not None:
        assert course.level in (None, first.level)
        assert [part for part in course.text if (part.removeprefix("!") in first.text) is part.startswith("!")] == [], first.text
