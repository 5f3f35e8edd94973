from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from command_line import Finished

# The networks here are small: more threads gain nothing, and where other processes need the cores they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes is the machine's affair: one that others use too may pause in the middle of any.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One training by the command line, six updates, with the console and all three backends."""
    from command_line import Finished, ended, started

    run_dir = tmp_path_factory.mktemp("finished") / "cartpole"
    command = ended(started(run_dir, "--total-steps", "5500", "--seed", "1"))
    assert command.code == 0, command
    return Finished(run_dir, command)
