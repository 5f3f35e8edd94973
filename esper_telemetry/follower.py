"""What stands in for the recorder on all ranks but the first: it writes nothing and opens nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper_telemetry.record import Axes, RunStatus


@dataclass(slots=True)
class Follower:
    """Knows where rank 0 writes."""

    run_dir: Path | None
    run: None = None
    offloaded: bool = False

    def start(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Nothing."""

    def event(self, kind: str, axes: Axes, data: Mapping[str, Any]) -> None:
        """Nothing."""

    def offload(self) -> None:
        """Nothing."""

    def close(self, status: RunStatus, timeout: float) -> None:
        """Nothing."""
