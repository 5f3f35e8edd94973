"""What a backend holds of a run, whoever trained it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Point(NamedTuple):
    """A value and where it stands on the x-axis that it was logged against."""

    x: float
    value: float


class Logged(NamedTuple):
    """A run as it was logged.

    Attributes:
        name: of the run.
        points: by tag, in the order in which they were written; values may be NaN.
        config: settings, as far as the backend knows them.
    """

    name: str
    points: Mapping[str, Sequence[Point]]
    config: Mapping[str, Any] = {}
