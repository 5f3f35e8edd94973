"""W&B loses rows if its client is killed or the disk is full: a resumed run reads what is on disk, and the sink checks the disk."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb
from sink_runs import record, run_info

from esper_telemetry.core.backends import WANDB_BLOCK_BYTES
from esper_telemetry.core.record import RunStatus
from esper_telemetry.delivery.delivery import Delivery
from esper_telemetry.delivery.status import Cursor, Cursors
from esper_telemetry.journal.file import Journal
from esper_telemetry.journal.lines import encode_end, encode_record, encode_run
from esper_telemetry.sinks import WandbSink
from esper_telemetry.sinks.wandb import wandb_run as wandb_run
from esper_telemetry.sinks.wandb import wandb_sink as wandb_sink
from esper_telemetry.sinks.wandb.wandb_run import DiskWatch
from esper_telemetry.sinks.wandb.wandb_sink import last_update, summary_of

pytestmark = pytest.mark.system

PROJECT = "walker"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_sink, "SETTLE_SECONDS", 0.01)
    monkeypatch.delenv("WANDB_MODE", raising=False)


@pytest.fixture(scope="module")
def first_part(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run directory of an offline run of five updates, whose file is longer than a block."""
    run_dir = tmp_path_factory.mktemp("first") / "run"
    run_dir.mkdir()
    sink = WandbSink(project=PROJECT, mode="offline")
    sink.open(run_info(run_dir))
    many = {f"my/number_{index}": float(index) for index in range(200)}
    sink.write([record(update, {**many, "policy/kl": 0.1 * update}) for update in range(1, 6)])
    sink.close(RunStatus.KILLED)
    wandb.teardown()
    yield run_dir
    wandb.teardown()


def files(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("wandb/offline-run-*/run-abc123.wandb"))


def updates(run_dir: Path) -> list[int]:
    """Return the updates of all rows of all parts, read as W&B reads them."""
    return [update for file in files(run_dir) for update in rows(file)]


def rows(file: Path) -> list[int]:
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(file)]
    entries = [json.loads(line) for line in subprocess.run(command, capture_output=True, check=True).stdout.splitlines()]
    return [int(entry["history"]["item"]["axis/update"]) for entry in entries if entry["type"] == "history"]


def test_the_last_update_on_disk_is_found_across_blocks(first_part: Path) -> None:
    (file,) = files(first_part)

    assert file.stat().st_size > WANDB_BLOCK_BYTES
    assert summary_of(file) == (PROJECT, 5, True)


def test_a_file_that_is_cut_off_holds_what_is_whole(first_part: Path, tmp_path: Path) -> None:
    """Cut off at any length: the number of updates only falls, and the reader never raises."""
    data, cut = files(first_part)[0].read_bytes(), tmp_path / "cut.wandb"
    updates_of_cuts = []
    for length in range(len(data), 0, -997):
        cut.write_bytes(data[:length])
        updates_of_cuts.append(summary_of(cut).update)

    assert updates_of_cuts == sorted(updates_of_cuts, reverse=True)
    assert {0, 1, 2, 3, 4, 5} == set(updates_of_cuts)


def test_only_parts_of_the_same_project_and_id_count(first_part: Path, tmp_path: Path) -> None:
    folder = first_part / "wandb"

    assert last_update(folder, "abc123", PROJECT, besides=tmp_path) == 5
    assert last_update(folder, "abc123", "another", besides=tmp_path) is None
    assert last_update(folder, "other", PROJECT, besides=tmp_path) is None
    assert last_update(folder, "abc123", PROJECT, besides=files(first_part)[0].parent) is None


@pytest.mark.parametrize("acknowledged", [2, 5], ids=["fewer acknowledged than on disk", "more acknowledged than on disk"])
def test_a_run_goes_on_behind_the_last_row_on_disk(first_part: Path, acknowledged: int, tmp_path: Path) -> None:
    """Three of five rows are on disk; the journal has seven records."""
    run_dir = tmp_path / "run"
    shutil.copytree(first_part, run_dir, symlinks=True)
    (file,) = files(run_dir)
    data = file.read_bytes()
    while summary_of(file).update > 3:
        data = data[:-50]
        file.write_bytes(data)
    journal = Journal.create(run_dir)
    journal.write(encode_run(run_info()), *[encode_record(record(update)) for update in range(1, acknowledged + 1)])
    offset = journal.path.stat().st_size
    journal.write(*[encode_record(record(update)) for update in range(acknowledged + 1, 8)], encode_end(RunStatus.FINISHED))
    sink = WandbSink(project=PROJECT, mode="offline")
    Cursors(run_dir).save(sink.name, Cursor(offset=offset, seq=acknowledged, records=acknowledged))

    delivery = Delivery(sink, journal.reader(), cursors=Cursors(run_dir))
    delivery.run()
    wandb.teardown()

    assert updates(run_dir) == [1, 2, 3, 4, 5, 6, 7]
    assert delivery.status.records == 7
    journal.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_full_disk_is_an_error_that_is_over_when_there_is_room_again(small: Path) -> None:
    disk = DiskWatch(small)
    disk.check()

    (small / "ballast").write_bytes(bytes(1_500_000))
    with pytest.raises(OSError, match="the disk is full: W&B would lose rows"):
        disk.check()

    (small / "ballast").unlink()
    disk.check()


def test_what_the_client_says_to_its_log_only_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_run, "LOG_CHECK_SECONDS", 0.0)
    log = tmp_path / "logs" / "debug-internal.log"
    log.parent.mkdir()
    log.write_text('{"level":"INFO","msg":"all is well"}\n')
    disk = DiskWatch(tmp_path)
    disk.check()

    with log.open("a") as file:
        file.write('{"level":"ERROR","msg":"writer: failed to save record: write run.wandb: no space left on device"}\n')
    with pytest.raises(OSError, match="W&B could not store some rows"):
        disk.check()
    disk.check()
