"""The kit that every sink of esper_telemetry passes."""

from __future__ import annotations

from pathlib import Path

import pytest
from esper_telemetry_trackio import TrackioSink

from esper_telemetry.testing import CHECKS, check_sink


def test_the_sink_passes_the_kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))

    assert check_sink(TrackioSink) == tuple(CHECKS)
