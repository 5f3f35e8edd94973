"""What stands in for the recorder on all ranks but the first: it writes nothing and opens nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper_telemetry.ranks.peers import Peers, portable
from esper_telemetry.record import Axes, RunStatus
from esper_telemetry.recorder import Recorder
from esper_telemetry.watch import Found


@dataclass(slots=True)
class Follower:
    """Knows where rank 0 writes."""

    run_dir: Path | None
    run: None = None
    offloaded: bool = False

    axes: None = None
    recorded: int = 0

    def start(self, config: Mapping[str, Any], facts: Mapping[str, Any], axes: Axes) -> None:
        """Nothing."""

    def covers(self, axes: Axes) -> bool:
        """False: several ranks resume no run."""
        return False

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
    outcome = peers.tell(portable(claimed) if isinstance(claimed, Exception) else claimed and claimed.run_dir)
    if isinstance(outcome, Exception):
        peers.leave()
        raise claimed if isinstance(claimed, Exception) else outcome
    return claimed if isinstance(claimed, Recorder) else Follower(outcome)
