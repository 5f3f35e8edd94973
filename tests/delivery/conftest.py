from collections.abc import Iterator
from pathlib import Path

import pytest
from journals import Clock, begun

from esper_telemetry.delivery import delivery as delivery_module
from esper_telemetry.delivery import sender
from esper_telemetry.journal.file import Journal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = begun(tmp_path / "run")
    yield journal
    journal.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry at once, and poll for new lines continuously."""
    monkeypatch.setattr(sender, "FIRST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(delivery_module, "POLL_SECONDS", 0.001)
