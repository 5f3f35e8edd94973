"""A resumed run continues from the state of its histories and alarms as if it had never stopped, however long it is."""

import itertools
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import run_python

from esper_telemetry import Telemetry, read_run
from esper_telemetry.alarms import Thresholds
from esper_telemetry.journal.read import JournalContents, read_contents
from esper_telemetry.pipeline.snapshot import SNAPSHOT_NAME, known_contents

UPDATES = 90
KEYS = ("policy/kl", "policy/entropy", "loss/value", "grad/global/norm_preclip", "value/explained_variance", "episode/return_mean")


def numbers() -> Iterator[dict[str, float]]:
    """A run whose KL spikes twice, and whose return falls at the end."""
    generator = np.random.default_rng(0)
    for update in range(1, UPDATES + 1):
        values = dict(zip(KEYS, (0.01, 0.6, 1.0, 0.5, 0.5, min(update, 60)), strict=True))
        values = {key: value * float(generator.lognormal(0.0, 0.1)) for key, value in values.items()}
        values["policy/kl"] *= 60.0 if update in (35, 36, 70, 71) else 1.0
        values["episode/return_mean_100"], values["episode/count"] = values["episode/return_mean"], 5.0
        yield values


def trained(run_dir: Path, *stops: int, until: int = UPDATES) -> None:
    """Train a run in parts, up to each of these updates."""
    rows = list(numbers())
    for first, last in itertools.pairwise((0, *stops, until)):
        part(run_dir, rows, first, last)


def part(run_dir: Path, rows: list[dict[str, float]], first: int, last: int) -> None:
    detect = Thresholds(off={"telemetry/overhead"})  # overhead depends on the clock
    facts = {"num_envs": 8, "num_steps": 64}
    with Telemetry(run_dir=run_dir, resume=first > 0, detect=detect, facts=facts) as telemetry:
        for update in range(first + 1, last + 1):
            telemetry.log(rows[update - 1])
            telemetry.flush(env_step=512 * update, update=update, gradient_step=16 * update)


def judged(run_dir: Path) -> list[dict[str, float]]:
    """Return the values that depend on the history, without times, memory and logged numbers."""
    own = ("perf/", "telemetry/", "system/")
    return [{key: value for key, value in record.values.items() if not key.startswith(own)} for record in read_run(run_dir).records]


def alarms(run_dir: Path) -> list[tuple[Any, ...]]:
    return [
        (alarm.type, alarm.event, alarm.axes.update, alarm.since, alarm.incident, alarm.cause, alarm.text)
        for alarm in read_run(run_dir).alarms
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole")
    trained(run_dir)
    return run_dir


@pytest.mark.system
@pytest.mark.parametrize("stops", [(36,), (20, 37, 71)])
def test_values_and_alarms_are_those_of_a_run_that_was_never_stopped(tmp_path: Path, whole: Path, stops: tuple[int, ...]) -> None:
    trained(tmp_path, *stops)

    assert alarms(whole), "nothing to compare"
    assert alarms(tmp_path) == alarms(whole)
    assert judged(tmp_path) == judged(whole)


@pytest.mark.system
def test_records_after_the_last_snapshot_are_judged_again(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process leaves the snapshot of update 30. Updates 31 to 36 are read from the journal."""
    monkeypatch.setattr("esper_telemetry.pipeline.in_process.SNAPSHOT_RECORDS", 30)
    if (child := os.fork()) == 0:
        monkeypatch.setattr("esper_telemetry.Telemetry.__exit__", lambda *_: os._exit(9))
        trained(tmp_path, until=36)
    os.waitpid(child, 0)
    known = known_contents(tmp_path)
    assert known is not None and (known.recorded, read_contents(tmp_path).recorded) == (30, 36)

    part(tmp_path, list(numbers()), 36, UPDATES)

    assert alarms(tmp_path) == alarms(whole)
    assert judged(tmp_path) == judged(whole)


def test_the_snapshot_says_what_a_whole_reading_of_the_journal_says(whole: Path) -> None:
    known = known_contents(whole)

    assert known is not None
    assert read_contents(whole, known=known, values=False) == read_contents(whole)


def damage(run_dir: Path, how: str) -> None:
    path = run_dir / SNAPSHOT_NAME
    head, rest = path.read_bytes().split(b"\n", 1)
    match how:
        case "empty":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(path.read_bytes()[:-1000])
        case "other rules":
            path.write_bytes(json.dumps({**json.loads(head), "fingerprint": "other"}).encode() + b"\n" + rest)
        case "other journal":
            path.write_bytes(json.dumps({**json.loads(head), "offset": 5}).encode() + b"\n" + rest)
        case "missing":
            path.unlink()


@pytest.mark.parametrize("how", ["empty", "cut", "other rules", "other journal", "missing"])
def test_without_a_snapshot_that_fits_the_records_are_judged_again(tmp_path: Path, whole: Path, how: str) -> None:
    trained(tmp_path, until=36)
    damage(tmp_path, how)
    part(tmp_path, list(numbers()), 36, UPDATES)

    assert alarms(tmp_path) == alarms(whole)


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self.path),)


def test_without_a_snapshot_the_journal_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first snapshot of the next part, in the middle of training, begins where reading ended."""
    trained(tmp_path, until=20)
    (tmp_path / SNAPSHOT_NAME).unlink()
    known_before: list[JournalContents | None] = []

    def reading(run_dir: Path, *, known: JournalContents | None, values: bool) -> JournalContents:
        known_before.append(known)
        return read_contents(run_dir, known=known, values=values)

    monkeypatch.setattr("esper_telemetry.pipeline.in_process.read_contents", reading)
    part(tmp_path, list(numbers()), 20, 40)

    assert [known is not None and known.recorded for known in known_before] == [20]


def test_a_snapshot_cannot_run_code(tmp_path: Path) -> None:
    trained(tmp_path / "run", until=3)
    path = tmp_path / "run" / SNAPSHOT_NAME
    head = path.read_bytes().partition(b"\n")[0]
    path.write_bytes(head + b"\n" + pickle.dumps(Touch(tmp_path / "touched")) * 2)

    part(tmp_path / "run", list(numbers()), 3, 6)

    assert read_contents(tmp_path / "run").recorded == 6
    assert not (tmp_path / "touched").exists()


TRAINED_PART = """
import logging, sys
from pathlib import Path
from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
with Telemetry(run_dir=Path(sys.argv[1]), level="debug", offload=False, resume=sys.argv[3] == "resume") as telemetry:
    trainer = PPO(make_env("CartPole-v1", num_envs=4), PPOConfig(policy=sys.argv[2], num_steps=32))
    attach(telemetry, trainer)
    trainer.learn(total_steps=3 * 32 * 4)
"""


@pytest.mark.system
@pytest.mark.parametrize("policy", ["mlp", "lstm"])
def test_the_snapshot_of_a_trainer_can_be_read_by_a_new_process(tmp_path: Path, policy: str) -> None:
    """Rules use classes such as the schedule of the learning rate, and load modules while the first updates are judged."""
    for part in ("begin", "resume"):
        output = run_python("-c", TRAINED_PART, tmp_path, policy, part).stdout

    assert "the run continues" in output
    assert "snapshot" not in output
