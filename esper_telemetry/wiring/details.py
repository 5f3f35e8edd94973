"""More columns of an update's minibatches, where anyone looks at them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from esper_telemetry.events import MinibatchEnd, MinibatchesEnd, RolloutEnd
from esper_telemetry.summary import Details


class DetailJoining:
    """Takes minibatches as they come and gives back what `Joining` does not keep of them."""

    def __init__(self) -> None:
        self._events: list[MinibatchEnd | MinibatchesEnd] = []

    def add(self, event: MinibatchEnd) -> None:
        """The next minibatch."""
        self._events.append(event)

    def add_all(self, event: MinibatchesEnd) -> None:
        """All of them, from a source that tells of none alone."""
        if event.values is not None:
            self._events.append(event)

    def take(self, rollout: RolloutEnd | None) -> Details | None:
        """All minibatches, with what the rollout knows of their rows where they say which they are; None where a column is missing."""
        events, self._events = self._events, []
        critic = [_joined([getattr(event, name) for event in events]) for name in ("values", "old_values", "returns")]
        values, old_values, returns = critic
        if values is None or old_values is None or returns is None:
            return None
        known = Details(
            values=values,
            old_values=old_values,
            returns=returns,
            means={head: torch.cat([event.means[head] for event in events]) for head in events[0].means},
        )
        rows = [event.rows for event in events if event.rows is not None]
        if rollout is None or len(rows) < len(events):
            return known
        return with_rollout(known, rollout, torch.cat(rows))


def _joined(columns: Sequence[Tensor | None]) -> Tensor | None:
    """[R]; None where there are no minibatches, or one lacks it."""
    known = [column for column in columns if column is not None]
    return torch.cat(known) if known and len(known) == len(columns) else None


def with_rollout(known: Details, rollout: RolloutEnd, rows: Tensor) -> Details:
    """The same with what was acted on in these rows [R] of the rollout."""
    return known._replace(
        raw_advantages=rollout.advantages.flatten()[rows],
        actions={head: rollout.actions[head].flatten()[rows] for head in rollout.logits},
        old_logits={head: logits.flatten(0, 1)[rows] for head, logits in rollout.logits.items()},
        old_means={head: means.flatten(0, 1)[rows] for head, means in rollout.means.items()},
        old_log_std={head: _of_rows(std, rows) for head, std in rollout.log_std.items()},
    )


def _of_rows(log_std: Tensor, rows: Tensor) -> Tensor:
    """[R, D] of [T, B, D], or of [D] where it does not depend on the state."""
    return log_std.expand(len(rows), -1) if log_std.dim() == 1 else log_std.flatten(0, 1)[rows]
