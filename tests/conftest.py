from __future__ import annotations

import fcntl
import gc
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from command_line import Finished

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
