from __future__ import annotations

import fcntl
import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from command_line import Finished
    from journals import Clock

    from esper_telemetry import Telemetry
    from esper_telemetry.journal.file import Journal

# Without this, a third of the time in which tests are collected goes to collections of garbage.
gc.set_threshold(50_000, 20, 100)

# The networks in these tests are small: more threads gain no time and wait for cores that other processes use.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# MLflow's server would start eight more processes, each using three seconds of a core, for jobs that no test submits.
os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")

# Without a deadline for examples, because any of them may pause on a shared machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collections."""
    gc.freeze()


@pytest.fixture(autouse=True)
def distribution_checks() -> Iterator[None]:
    """Enable torch's argument checks for distributions again after each test: `torch.compile` disables them in the whole process."""
    yield
    if "torch.distributions" in sys.modules:
        sys.modules["torch.distributions"].Distribution.set_default_validate_args(__debug__)


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one core: this process measures everything, because a second process takes seconds to import torch."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One training by the command line: six updates, the console and all three backends. All test processes read the same run."""
    from command_line import Ended, Finished, ended, started

    place = tmp_path_factory.getbasetemp()
    place = (place.parent if "PYTEST_XDIST_WORKER" in os.environ else place) / "finished"
    place.mkdir(exist_ok=True)
    saved_command = place / "command.json"
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not saved_command.exists():
            command = ended(started(place / "cartpole", "--total-steps", "5500", "--seed", "1"))
            assert command.code == 0, command
            saved_command.write_text(json.dumps(command))
    return Finished(place / "cartpole", Ended(*json.loads(saved_command.read_text())))


@pytest.fixture(params=range(2))
def seed(request: pytest.FixtureRequest) -> int:
    """Two draws of random columns for each test that takes a seed."""
    number: int = request.param
    return number


@pytest.fixture
def telemetry(tmp_path: Path) -> Iterator[Telemetry]:
    """Open telemetry in `tmp_path / "run"`."""
    from esper_telemetry import Telemetry

    with Telemetry(run_dir=tmp_path / "run") as opened:
        yield opened


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    from journals import Clock

    return Clock(monkeypatch)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    from journals import begun

    journal = begun(tmp_path / "run")
    yield journal
    journal.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry at once, and poll for new lines continuously."""
    from esper_telemetry.delivery import delivery, sender

    monkeypatch.setattr(sender, "FIRST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(delivery, "POLL_SECONDS", 0.001)
