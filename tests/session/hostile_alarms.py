"""Users' alarms that misbehave; importable, so that a worker applies them too."""

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from esper_telemetry.alarms import AlarmRule, Finding, View

KEY = "my/number"
FROM_UPDATE = 4


def yields(**changes: Any) -> Callable[[View], Iterator[Any]]:
    return lambda view: iter([Finding(1.0, KEY, view.get(KEY))._replace(**changes)])


def clears_the_view(view: View) -> Iterator[Finding]:
    for name in ("values", "previous", "facts"):
        try:
            getattr(view, name).clear()
        except AttributeError:
            setattr(view, name, {})
    view.baselines.z.clear()
    yield from ()


class UnspeakableError(Exception):
    """An exception whose text cannot be computed."""

    def __str__(self) -> str:
        """End the process."""
        raise SystemExit(5)


def overwrites(name: str) -> Callable[[View], Any]:
    """Return a judge that sets every attribute of a part of its view."""

    def judge(view: View) -> Iterator[Finding]:
        part = getattr(view, name)
        for attribute in vars(part):
            setattr(part, attribute, None)
        yield from ()

    return judge


def raises(error: BaseException) -> Callable[[View], Iterator[Finding]]:
    def judge(view: View) -> Iterator[Finding]:
        yield Finding(1.0, KEY, 1.0)
        raise error

    return judge


RESULTS: dict[str, Callable[[View], Any]] = {
    "infinite severity": yields(severity=float("inf")),
    "NaN severity": yields(severity=float("nan")),
    "NumPy severity": yields(severity=np.float32(0.9)),
    "tensor severity": yields(severity=torch.tensor(0.9)),
    "text severity": yields(severity="high"),
    "infinite value": yields(value=float("inf"), threshold=float("-inf"), z=float("nan")),
    "NumPy value": yields(value=np.float32(2.5), threshold=np.int64(1), adaptive=np.bool_(True)),
    "tensor value": yields(value=torch.tensor(2.5), z=torch.tensor([1.0]), adaptive=torch.tensor(False)),
    "two numbers": yields(value=torch.ones(2)),
    "no text": yields(text=lambda: 1 / 0),
    "advice that exits": yields(advice=lambda: exit(3)),
    "a text of five megabytes": yields(text=lambda: "a" * 5_000_000),
    "a lone surrogate": yields(text=lambda: "\ud800"),
    "no finding": lambda view: [None, 3, "text"],
    "nothing": lambda view: None,
    "a cleared view": clears_the_view,
    "ValueError": raises(ValueError("x")),
    "RecursionError": raises(RecursionError()),
    "SystemExit": raises(SystemExit(3)),
    "GeneratorExit": raises(GeneratorExit()),
    "StopIteration": raises(StopIteration()),
    "text of an exception": raises(ValueError("\ud800" + "a" * 5_000_000)),
    "an exception that exits": raises(UnspeakableError()),
    "limits of other alarms": overwrites("limits"),
    "baselines of other alarms": overwrites("baselines"),
}
"""What judges return, what they raise, and how they change their arguments."""

ENDS: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(7),
    "crash": lambda: ctypes.string_at(0),
    "SIGKILL": lambda: os.kill(os.getpid(), 9),
    "hang": lambda: time.sleep(1e6),
}
"""Ways to end or block a process."""


@dataclass
class Ending:
    """Ends its process in update 4."""

    how: str
    count: int = 0

    def __call__(self, view: View) -> Iterator[Finding]:
        self.count += 1
        if self.count == FROM_UPDATE:
            ENDS[self.how]()
        yield Finding(0.0, KEY, view.get(KEY))


@dataclass
class Returning:
    """Judges like one of `RESULTS`."""

    what: str

    def __call__(self, view: View) -> Any:
        return RESULTS[self.what](view)


RULE = AlarmRule(
    type="my/alarm", inputs=(KEY,), meaning="My number is wrong.", action="Change it.", source="my own", judge=Returning("nothing")
)


def rule(judge: Any, **changes: Any) -> AlarmRule:
    return replace(RULE, judge=judge, **changes)
