"""What stands in for the recorder on all ranks but the first: it writes nothing and opens nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from esper_telemetry.core.record import Axes, RunStatus
from esper_telemetry.pipeline.ranks import Peers, portable
from esper_telemetry.pipeline.run import Recorder
from esper_telemetry.pipeline.watch import Found


class LeaderState(NamedTuple):
    """What rank 0 says of its recorder, attributes as there."""

    run_dir: Path | None
    axes: Axes | None


@dataclass(slots=True)
class Follower:
    """Knows where rank 0 writes, and what an earlier part of the run has recorded there: the ranks record the same updates."""

    run_dir: Path | None
    axes: Axes | None = None
    run: None = None
    offloaded: bool = False

    @property
    def recorded(self) -> int:
        """The last update that earlier parts of the run have recorded."""
        return self.axes.update if self.axes else 0

    def start(self, config: Mapping[str, Any], facts: Mapping[str, Any], axes: Axes) -> None:
        """Nothing."""

    def covers(self, axes: Axes) -> bool:
        """Whether an earlier part of the run has recorded this update."""
        return self.axes is not None and axes.within(self.axes)

    def sync(self) -> None:
        """Nothing."""

    def found(self) -> tuple[Found, ...]:
        """Nothing: the first rank says for how long the level is raised."""
        return ()

    def event(self, kind: str, axes: Axes, data: Mapping[str, Any]) -> None:
        """Nothing."""

    def offload(self) -> None:
        """Nothing."""

    def close(self, status: RunStatus, timeout: float) -> None:
        """Nothing."""


def recorder_for(peers: Peers | None, claim: Callable[[], Recorder]) -> Recorder | Follower:
    """Rank 0's recorder, and on the others one that writes nothing; what rank 0 raises is raised on all of them."""
    if peers is None:
        return claim()
    claimed: Recorder | Exception | None = None
    if peers.rank == 0:
        try:
            claimed = claim()
        except Exception as error:  # whatever it is, the others wait to hear of it
            claimed = error
    outcome = peers.tell(_told(claimed))
    if isinstance(outcome, Exception):
        peers.leave()
        raise claimed if isinstance(claimed, Exception) else outcome
    return claimed if isinstance(claimed, Recorder) else Follower(*outcome)


def _told(claimed: Recorder | Exception | None) -> LeaderState | Exception | None:
    if isinstance(claimed, Exception):
        return portable(claimed)
    return None if claimed is None else LeaderState(claimed.run_dir, claimed.axes)
