"""The process that feeds the sinks is restarted many times while every core is busy; `ESPER_SINK_STARTS=200` for more."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from journals import begun, end

from esper_telemetry.delivery.live import Deliveries
from esper_telemetry.sinks import as_sink

pytestmark = pytest.mark.system

STARTS = int(os.environ.get("ESPER_SINK_STARTS", "20"))
BACKENDS = ("tensorboard", "wandb:starts?mode=offline", "mlflow")
BUSY = "import os; os.nice(19)\nwhile True: pass"
"""The process under test lowers its priority, so these do, too: otherwise it would get a hundredth of a core."""


@pytest.fixture
def busy_cores() -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
    yield
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_clients_are_imported_whole_on_busy_cores(tmp_path: Path, busy_cores: None) -> None:
    broken: list[str] = []
    for number in range(STARTS):
        journal = begun(tmp_path / f"run{number}", 3)
        deliveries = Deliveries(journal, [as_sink(uri) for uri in BACKENDS])
        end(journal)
        report = deliveries.close(600.0)
        journal.close()
        broken += [f"start {number}: {sink}" for sink in report.sinks if not sink.complete or sink.errors]
        print(f"start {number}: {report}", flush=True)
    assert not broken
