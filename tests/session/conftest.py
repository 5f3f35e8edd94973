from collections.abc import Iterator
from pathlib import Path

import pytest

from esper_telemetry import Telemetry


@pytest.fixture
def telemetry(tmp_path: Path) -> Iterator[Telemetry]:
    """Open telemetry in `tmp_path / "run"`."""
    with Telemetry(run_dir=tmp_path / "run") as opened:
        yield opened
