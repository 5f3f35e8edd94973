"""A progress bar for terminals: steps, remaining time, and as many numbers of the latest update as fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from esper_telemetry.core.record import Record

GAP: Final = 2
"""Columns between two numbers."""
WIDEST_BAR, NARROWEST_BAR, WIDE_TERMINAL = 24, 8, 100
"""Columns of the bar on a terminal of at least the last, and on a narrower one."""
LONGEST_TIME: Final = len("0:00:00")


class ProgressBar:
    """One live line at the bottom of the terminal, redrawn by `show`: rich's own redrawing takes a thread.

    Args:
        console: rich's console.
        total_steps: environment steps of the whole run.
    """

    def __init__(self, console: Any, total_steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = console
        self._bar_width = WIDEST_BAR if console.width >= WIDE_TERMINAL else NARROWEST_BAR
        self._steps_width = len(f"{total_steps:,}/{total_steps:,} steps")
        columns = (
            BarColumn(bar_width=self._bar_width),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} steps"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, console=console, auto_refresh=False)
        self._task = self._progress.add_task("", total=total_steps)
        self._progress.start()

    def show(self, record: Record, numbers: Sequence[str]) -> None:
        """Moves the bar to the record's step and writes the numbers beside it that fit."""
        space = self._console.width - self._bar_width - self._steps_width - LONGEST_TIME - 3
        shown = (" " * GAP).join(fitting(numbers, space + GAP))
        self._progress.update(self._task, completed=record.axes.env_step, description=shown, refresh=True)

    def end(self) -> None:
        """Leaves the bar as it stands."""
        self._progress.stop()


def fitting(numbers: Sequence[str], space: int | None) -> Iterator[str]:
    """Yield the first numbers, in rich's markup, that fit into that many columns, a gap before each; all where it is None."""
    for number in numbers:
        if space is not None:
            space -= GAP + plain_length(number)
            if space < 0:
                return
        yield number


def plain_length(markup: str) -> int:
    """Return the columns that a text in rich's markup takes."""
    from rich.text import Text

    return Text.from_markup(markup).cell_len
