"""The minibatches of an update, joined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from esper_telemetry.events import MinibatchEnd
from esper_telemetry.summary import Details, Minibatches


class Joining:
    """Takes minibatches as they come and gives them back as one.

    Only what is measured is kept alive. To keep whole events would scatter the memory that the trainer uses again for every minibatch,
    which costs it more than all the rest here.

    Attributes:
        last: the last one of the update under way; None before the first.
    """

    def __init__(self) -> None:
        self.last: MinibatchEnd | None = None
        self._epochs: list[int] = []
        self._counts: list[int] = []
        self._valid: list[Tensor | None] = []
        self._losses: dict[str, list[Tensor]] = {}
        self._columns: dict[str, list[Tensor]] = {}
        self._numbered = True

    def add(self, event: MinibatchEnd) -> None:
        """The next minibatch."""
        self.last = event
        self._epochs.append(event.epoch)
        self._counts.append(len(event.log_ratio))
        self._valid.append(event.valid)
        self._numbered = self._numbered and event.rows is not None
        for name, loss in event.losses.items():
            self._losses.setdefault(name, []).append(loss)
        for name, rows in _columns(event):
            self._columns.setdefault(name, []).append(rows)

    def take(self, features: Tensor | None = None, details: Details | None = None) -> Minibatches | None:
        """The rows of all minibatches, one after the other, with `features` [n, F] of the first; None where there are none."""
        if self.last is None:
            return None
        rows = {name: torch.cat(pieces) for name, pieces in self._columns.items()}
        joined = Minibatches(
            epochs=tuple(self._epochs),
            counts=tuple(self._counts),
            log_ratio=rows["log_ratio"],
            advantages=rows["advantages"],
            valid=self._joined_valid(),
            losses={name: torch.stack(losses) for name, losses in self._losses.items()},
            logits=_of(rows, "logits/"),
            action_masks=_of(rows, "action_masks/"),
            log_std=_of(rows, "log_std/"),
            head_log_ratios=_of(rows, "head_log_ratios/"),
            relevance=_of(rows, "relevance/"),
            features=features,
            details=details,
            rows=rows.get("rows") if self._numbered else None,
        )
        self.last, self._numbered = None, True
        for kept in (self._epochs, self._counts, self._valid, self._losses, self._columns):
            kept.clear()
        return joined

    def _joined_valid(self) -> Tensor | None:
        """Which rows count, [R]; None where all do."""
        if all(valid is None for valid in self._valid):
            return None
        parts = zip(self._valid, self._counts, strict=True)
        known = next(valid for valid in self._valid if valid is not None)
        return torch.cat([known.new_ones(count) if valid is None else valid for valid, count in parts])


def _columns(event: MinibatchEnd) -> Iterator[tuple[str, Tensor]]:
    """What is kept row by row; the log-ratio of the only head is the log-ratio."""
    yield "log_ratio", event.log_ratio
    yield "advantages", event.advantages
    if event.rows is not None:
        yield "rows", event.rows
    for head, rows in event.logits.items():
        yield f"logits/{head}", rows
    for head, rows in event.action_masks.items():
        yield f"action_masks/{head}", rows
    for head, spread in event.log_std.items():
        yield f"log_std/{head}", spread.expand(len(event.log_ratio), -1)
    if len(event.head_log_ratios) > 1:
        for head, rows in event.head_log_ratios.items():
            yield f"head_log_ratios/{head}", rows
    for head, rows in event.relevance.items():
        yield f"relevance/{head}", rows


def _of(rows: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): column for name, column in rows.items() if name.startswith(prefix)}
