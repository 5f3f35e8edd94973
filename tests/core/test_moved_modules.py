"""Old module paths keep working as aliases of the new modules."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from esper_telemetry.core.moved_modules import MOVED, PACKAGE, new_path


def run_python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("esper_telemetry.faults", "esper_telemetry.lab.faults"),
        ("esper_telemetry.faults.fault", "esper_telemetry.lab.faults.fault"),
        ("esper_telemetry.environments.morphogenesis.policies", "esper_telemetry.lab.morphogenesis.policies"),
        ("esper_telemetry.environments.make", "esper_telemetry.ppo.environments.make"),
        ("esper_telemetry.journal.read", None),
        ("esper_telemetry", None),
        ("faults", None),
    ],
)
def test_the_longest_old_path_decides(old: str, new: str | None) -> None:
    assert new_path(old) == new


@pytest.mark.parametrize("new", sorted(MOVED.values()))
def test_every_new_path_exists(new: str) -> None:
    assert find_spec(PACKAGE + new) is not None


DOCUMENTED = (
    "from esper_telemetry.environments import make_env",
    "from esper_telemetry.faults import inject, schedule",
    "from esper_telemetry.foreign import read_foreign, read_source",
    "from esper_telemetry.hooks import Hooks",
    "from esper_telemetry.detectors import diagnose",
    "from esper_telemetry.relay import Delivery, replay",
    "from esper_telemetry.record import Record, RunInfo",
    "from esper_telemetry.wiring import attach",
    "from esper_telemetry.sinks.stored import Shown, Stored",
    "from esper_telemetry.sinks.tensorboard import TensorBoardSink",
    "from esper_telemetry.adapters.sb3 import TelemetryCallback",
)

EACH_IN_A_FORK = """
import os, sys
import torch  # once, for a second; nothing of the package
failed = []
for statement in sys.argv[1:]:
    if not os.fork():
        exec(statement)
        os._exit(0)
    if os.wait()[1]:
        failed.append(statement)
assert not failed, failed
"""


def test_documented_imports_of_earlier_releases_work_in_a_process_that_has_imported_nothing_of_the_package() -> None:
    run_python("-c", EACH_IN_A_FORK, *DOCUMENTED)


def test_a_module_and_its_classes_exist_once() -> None:
    code = (
        "import esper_telemetry.faults.fault as old, esper_telemetry.lab.faults.fault as new, esper_telemetry.faults;"
        "print(old is new, new.__spec__.name, new.__name__, esper_telemetry.faults.__name__)"
    )

    name = "esper_telemetry.lab.faults.fault"
    assert run_python("-c", code) == f"True {name} {name} esper_telemetry.lab.faults"


def test_a_missing_module_is_reported_by_the_name_that_was_asked_for() -> None:
    code = "import esper_telemetry.faults.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "No module named 'esper_telemetry.faults.nothing'" in done.stderr


def test_the_command_of_faults_runs_under_its_old_path() -> None:
    assert "esper_telemetry.lab.faults" in run_python("-m", "esper_telemetry.faults", "--help")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("detectors", "Thresholds"),
        ("detectors", "diagnose"),
        ("environments", "Layout"),
        ("environments", "make_env"),
        ("faults", "inject"),
        ("foreign", "read_foreign"),
        ("hooks", "Hooks"),
        ("metrics.gradients", "concentration"),
        ("metrics.gradients", "interference"),
        ("metrics.lstm", "lstm_gates"),
        ("relay", "doctor"),
        ("wiring", "attach"),
    ],
)
def test_documented_names_are_importable_from_where_they_were(module: str, name: str) -> None:
    """Each is a class or a function, whatever module of its package was imported before."""
    assert callable(getattr(import_module(f"esper_telemetry.{module}"), name))
