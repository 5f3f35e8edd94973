"""A progress bar for terminals: how far, how fast, and the numbers of the latest update."""

from __future__ import annotations

from typing import Any

from esper_telemetry.record import Record


class ProgressBar:
    """One live line at the bottom of the terminal; rich redraws it from a thread of its own a few times a second.

    Args:
        console: rich's console.
        total_steps: environment steps of the whole run.
    """

    def __init__(self, console: Any, total_steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            BarColumn(bar_width=24),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} steps"),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
        )
        self._progress = Progress(*columns, console=console, refresh_per_second=4)
        self._task = self._progress.add_task("", total=total_steps)
        self._progress.start()

    def show(self, record: Record, numbers: str) -> None:
        """Moves the bar to the record's step and writes its numbers beside it."""
        self._progress.update(self._task, completed=record.axes.env_step, description=numbers)

    def end(self) -> None:
        """Leaves the bar as it stands."""
        self._progress.stop()
