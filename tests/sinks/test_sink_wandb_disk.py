"""W&B silently loses rows if the disk is full, so the sink checks the disk first, and W&B's log afterwards."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper_telemetry.sinks.wandb import wandb_run as wandb_run
from esper_telemetry.sinks.wandb.wandb_run import DiskWatch

pytestmark = pytest.mark.system


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
