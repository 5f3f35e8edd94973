"""Twenty thousand records of 150 values through all sinks: memory stays flat, and no record is lost.

`pytest -q -m slow -rP tests/delivery/test_soak.py` prints the memory of both processes over time.
"""

import os
import random
import time
from functools import partial
from pathlib import Path

import pytest
from waiting import wait_until

from esper_telemetry import Axes, Record, RunInfo, RunStatus, doctor
from esper_telemetry.delivery.live import Deliveries
from esper_telemetry.journal.file import Journal
from esper_telemetry.journal.lines import encode_end, encode_record, encode_run
from esper_telemetry.sinks import as_sink

RECORDS = int(os.environ.get("ESPER_SOAK_RECORDS", "20000"))
KEYS = 150
SINKS = ("tensorboard", "wandb:soak?mode=offline", "mlflow", "prometheus")
FLAT_MB = 20.0


def resident_mb(pid: int | str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


def reached(deliveries: Deliveries, records: int) -> bool:
    return min(status.records for status in deliveries.stats().sinks.values()) >= records


@pytest.mark.slow
def test_twenty_thousand_records_leave_memory_flat_and_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes have warmed up after a quarter of the records, and stay within 20 MB from then on."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    draw = random.Random(1)
    journal = Journal.create(tmp_path / "run")
    journal.write(encode_run(RunInfo("soak", "soak", tmp_path / "run", time.time())))
    deliveries = Deliveries(journal, [as_sink(sink) for sink in SINKS])
    measured: list[tuple[float, float]] = []
    began = time.monotonic()
    for update in range(1, RECORDS + 1):
        values = {f"my/key_{key}": draw.gauss(0.0, 1.0) for key in range(KEYS)}
        axes = Axes(update, update * 128, update * 16, 1.7e9 + update / 8)
        journal.write(encode_record(Record(update, axes, values)))
        if update % max(1, RECORDS // 20) == 0:
            behind = update - RECORDS // 20  # all clients have started when memory is measured
            wait_until(partial(reached, deliveries, behind), "the slowest sink", 3600.0)
            if deliveries.child_pid is not None:
                sizes = (resident_mb("self"), resident_mb(deliveries.child_pid))
                print(f"{update:6} records, {time.monotonic() - began:5.0f} s: {sizes[0]:.0f} MB, deliveries {sizes[1]:.0f} MB")
                if update > RECORDS // 4:
                    measured.append(sizes)
    journal.write(encode_end(RunStatus.FINISHED, seq=RECORDS + 1))
    report = deliveries.close(1800.0)
    journal.close()

    for process, sizes in zip(("this process", "the deliveries"), zip(*measured, strict=True), strict=True):
        assert max(sizes) - sizes[0] < FLAT_MB, f"{process}: {[round(size) for size in sizes]} MB"
    assert report.complete, str(report)
    health = doctor(tmp_path / "run")
    for sink in health.sinks:
        print(f"{sink.name}: {sink.audit and sink.audit.numbers} numbers, equal: {sink.equal}")
    assert [sink.equal for sink in health.sinks if sink.audit is not None] == [True] * 3
