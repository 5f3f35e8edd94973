"""The fault matrix: each training meets one real fault. `make test-faults` runs it and writes docs/fault_matrix.md."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matrix_page
import pytest
from faulty_proxy import FORWARD, HANG, REFUSE, RESET, Proxy
from faulty_sinks import REFUSED
from trained_run import LIMIT_SECONDS, UPDATES, Outcome, at_update, descendants, deserted, outcome, repaired, started, updates_of
from waiting import wait_until

from esper_telemetry import doctor, read_run
from esper_telemetry.delivery.status import Cursors, read_status

pytestmark = pytest.mark.fault_matrix

BACKENDS = ("tensorboard", "wandb:matrix?mode=offline", "mlflow")
KILLS = int(os.environ.get("ESPER_FAULT_KILLS", "20"))
TRAINERS = 4
"""Processes that are killed at a time."""
NEED_ROOT = ("full disk, cleared again", "read-only directories")
LEAST_SPEED = 0.5
"""Limit for the ratio of costs: other work on the machine changes it by a fifth. The page shows the measured ratio."""

Check = Callable[[str, Outcome], None]


@pytest.fixture(scope="module")
def page() -> Iterator[matrix_page.Page]:
    collected = matrix_page.Page()
    yield collected
    collected.write(without=() if os.geteuid() == 0 else NEED_ROOT)


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory, page: matrix_page.Page) -> Outcome:
    run_dir = tmp_path_factory.mktemp("free") / "run"
    result = outcome(run_dir, started(run_dir, *BACKENDS))
    page.add("none", result, result)
    return result


@pytest.fixture
def check(page: matrix_page.Page, fault_free: Outcome) -> Check:
    """Record an outcome and assert what every fault requires: no lost update, no slowdown, and complete backends."""

    def checked(fault: str, found: Outcome) -> None:
        page.add(fault, found, fault_free)
        assert found.journalled >= found.trained - (found.ended != "finished"), f"{fault}: {found}"
        assert False not in found.whole.values(), f"{fault}: {found}"
        if found.speed is not None and fault_free.speed is not None:
            assert found.speed / fault_free.speed > LEAST_SPEED, f"{fault}: {found}"

    return checked


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = Server(tmp_path_factory.mktemp("server"))
    yield one
    one.kill()


class Server:
    """A real MLflow server behind a proxy that can fail."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.start()
        self.proxy = Proxy(self.port)
        self.sink = f"mlflow:http://127.0.0.1:{self.proxy.port}"

    def start(self) -> None:
        store = f"sqlite:///{self.directory}/server.db"
        command = [str(Path(sys.executable).with_name("mlflow")), "server", "--host", "127.0.0.1", "--workers", "1"]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), "--backend-store-uri", store],
            cwd=self.directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            # job execution would start ten unused processes
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )
        wait_until(self.answers, "the server", LIMIT_SECONDS)

    def answers(self) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        wait_until(lambda: not self.answers(), "the end of the server", LIMIT_SECONDS)


@pytest.mark.parametrize("mode", [REFUSE, RESET, "500", "401", HANG])
def test_a_server_that_is_ill(mode: str, server: Server, tmp_path: Path, check: Check) -> None:
    """The fault lasts from update 30 to the end of the run."""
    run_dir = tmp_path / "run"
    process = started(run_dir, "tensorboard", server.sink)
    at_update(run_dir, process, 30)
    server.proxy.become(mode)
    names = {REFUSE: "server refuses", RESET: "server resets", HANG: "server hangs"}
    result = outcome(run_dir, process, mend=lambda: server.proxy.become(FORWARD))

    check(names.get(mode, f"server answers {mode}"), result)


def test_a_server_that_is_killed_and_comes_back(server: Server, tmp_path: Path, check: Check) -> None:
    run_dir = tmp_path / "run"
    process = started(run_dir, "tensorboard", server.sink, updates=4 * UPDATES)
    at_update(run_dir, process, 20)
    server.kill()
    time.sleep(3.0)
    server.start()

    check("server killed and restarted", outcome(run_dir, process))


def limit_files(process: subprocess.Popen[str], most: int) -> None:
    """Prevent every process of the run from making a file larger than that."""
    hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
    for pid in (process.pid, *descendants(process, "esper_telemetry"), *descendants(process, "wandb-core")):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, hard))


def test_a_quota_that_is_used_up_and_raised_again(tmp_path: Path, check: Check) -> None:
    """Neither the journal nor MLflow's database can grow for two seconds."""
    run_dir = tmp_path / "run"
    process = started(run_dir, "tensorboard", "mlflow", updates=4 * UPDATES)
    wait_until(partial(has_lines, run_dir, 40), "40 lines of the journal", LIMIT_SECONDS)
    journal = run_dir / "journal.jsonl"
    limit_files(process, journal.stat().st_size)
    time.sleep(0.5)
    full = journal.stat().st_size
    time.sleep(2.0)
    assert journal.stat().st_size == full, "the quota was not used up"
    limit_files(process, resource.RLIM_INFINITY)

    check("quota used up, raised again", outcome(run_dir, process))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_a_full_disk_that_is_cleared_again(tmp_path: Path, check: Check) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(disk)], check=True)
    try:
        run_dir = disk / "run"
        process = started(run_dir, "tensorboard", "mlflow", updates=4 * UPDATES)
        wait_until(partial(has_lines, run_dir, 40), "40 lines of the journal", LIMIT_SECONDS)
        ballast = disk / "ballast"
        with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        before = updates_of(run_dir)
        at_update(run_dir, process, before + 60)
        assert len(read_run(run_dir).records) < before + 50, "the disk was not full"
        ballast.unlink()
        result = outcome(run_dir, process)
        check("full disk, cleared again", result)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_a_directory_that_cannot_be_written(tmp_path: Path, check: Check) -> None:
    run_dir = tmp_path / "run"
    for name in ("tensorboard", "wandb"):
        (run_dir / name).mkdir(parents=True)
        subprocess.run(["mount", "--bind", str(run_dir / name), str(run_dir / name)], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", str(run_dir / name)], check=True)

    def mend() -> None:
        for name in ("tensorboard", "wandb"):
            subprocess.run(["umount", "--lazy", str(run_dir / name)], check=True)

    check("read-only directories", outcome(run_dir, started(run_dir, *BACKENDS), mend=mend))


def test_a_client_process_that_is_killed(tmp_path: Path, check: Check) -> None:
    """kill -9 of wandb-core; accepted rows that it has not stored yet are sent again."""
    run_dir = tmp_path / "run"
    process = started(run_dir, *BACKENDS, updates=3 * UPDATES)
    at_update(run_dir, process, 20)
    wait_until(lambda: descendants(process, "wandb-core"), "wandb-core", LIMIT_SECONDS)
    at_update(run_dir, process, updates_of(run_dir) + 20)
    for pid in descendants(process, "wandb-core"):
        os.kill(pid, signal.SIGKILL)

    check("kill -9 of wandb-core", outcome(run_dir, process))


def test_a_database_that_somebody_else_holds(tmp_path: Path, check: Check) -> None:
    run_dir = tmp_path / "run"
    process = started(run_dir, "tensorboard", "mlflow", updates=2 * UPDATES)
    at_update(run_dir, process, 20)
    wait_until(lambda: "mlflow" in Cursors(run_dir).names(), "the cursor of MLflow", LIMIT_SECONDS)
    with closing(sqlite3.connect(run_dir / "mlflow.db", timeout=30)) as database:
        database.execute("BEGIN EXCLUSIVE")
        time.sleep(8.0)
        database.rollback()

    check("sqlite locked for 8 s", outcome(run_dir, process))


def test_a_sink_that_takes_ten_seconds_a_write(tmp_path: Path, check: Check) -> None:
    run_dir = tmp_path / "run"

    check("slow sink, 10 s a write", outcome(run_dir, started(run_dir, *BACKENDS, "slow")))


def test_records_that_are_refused(tmp_path: Path, check: Check) -> None:
    run_dir = tmp_path / "run"
    result = outcome(run_dir, started(run_dir, *BACKENDS, "picky"))

    lines = (run_dir / "dead_letter.jsonl").read_text(encoding="utf-8").splitlines()
    letters = [json.loads(line)["record"]["axes"]["update"] for line in lines]
    status = read_status(run_dir)["picky"]
    assert sorted(letters) == sorted(REFUSED)
    assert (status["sent"], status["pending"], status["quarantined"]) == (result.journalled - 3, 0, 3)
    check("three records refused", result)


def test_a_forked_copy(tmp_path: Path, check: Check) -> None:
    run_dir = tmp_path / "run"
    result = outcome(run_dir, started(run_dir, *BACKENDS, flags=("--fork",)))

    assert all("my/child" not in record.values for record in read_run(run_dir).records)
    check("fork", result)


def test_a_run_that_ends_before_a_backend_is_open(tmp_path: Path, check: Check) -> None:
    """Twenty updates take a second, MLflow takes three: the process that feeds the sinks continues alone, without a repair."""
    run_dir = tmp_path / "run"
    process = started(run_dir, *BACKENDS, updates=20, flags=("--hurry",))
    process.wait()
    assert read_status(run_dir)["mlflow"]["under_way"], "MLflow was open before the end"
    wait_until(partial(deserted, run_dir, process), "the end of the run", LIMIT_SECONDS)

    assert [sink.equal for sink in doctor(run_dir).sinks] == [True, True, True]
    assert {entry["state"] for entry in read_status(run_dir).values()} == {"closed"}
    check("ends before MLflow is open", outcome(run_dir, process))


def test_a_clock_that_jumps(tmp_path: Path, check: Check) -> None:
    run_dir = tmp_path / "run"

    check("clock jumps back an hour", outcome(run_dir, started(run_dir, *BACKENDS, flags=("--clock",))))


def test_a_trainer_that_is_killed_at_random_moments(tmp_path: Path, check: Check) -> None:
    """Only the update in progress may be missing from the journal; all others are delivered, and the runs end as killed."""

    def killed(moment: Moment) -> Ended:
        run_dir = tmp_path / f"run{moment.attempt}"
        process = started(run_dir, *moment.sinks, updates=10**6)
        at_update(run_dir, process, moment.update)
        time.sleep(moment.seconds)
        process.kill()
        wait_until(partial(deserted, run_dir, process), "the end of the run", LIMIT_SECONDS)
        return run_dir, process

    for run_dir, process in several_at_once(killed, moments(seed=7, last=60)):
        result = outcome(run_dir, process)
        assert read_run(run_dir).status == "killed"
        check(f"kill -9 of the trainer, {KILLS} times", result)


def test_a_trainer_that_is_told_to_end_at_random_moments(tmp_path: Path, check: Check) -> None:
    """SIGTERM, as a scheduler sends it to the command line: the update in progress is finished, and the run is `preempted`."""

    def terminated(moment: Moment) -> Ended:
        run_dir = tmp_path / f"run{moment.attempt}"
        process = command_line(run_dir, moment.sinks)
        wait_until(partial(has_lines, run_dir, moment.update), "the moment of the signal", LIMIT_SECONDS)
        time.sleep(moment.seconds)
        process.terminate()
        wait_until(partial(deserted, run_dir, process), "the end of the run", LIMIT_SECONDS)
        return run_dir, process

    for run_dir, process in several_at_once(terminated, moments(seed=8, last=30)):
        _, complaint = process.communicate()
        run = read_run(run_dir)
        assert (process.returncode, run.status) == (143, "preempted"), complaint
        updates = [record.axes.update for record in run.records]
        assert updates == list(range(1, len(updates) + 1))
        result = Outcome("preempted", None, None, len(updates), len(updates), repaired(run_dir))
        check(f"SIGTERM to the trainer, {KILLS} times", result)
        assert doctor(run_dir).status == "preempted"


def command_line(run_dir: Path, sinks: Sequence[str]) -> subprocess.Popen[str]:
    backends = [word for sink in sinks for word in ("--sink", sink)]
    options = ("--env", "CartPole-v1", "--total-steps", "100000000", "--num-envs", "4", "--num-steps", "128")
    command = [sys.executable, "-m", "esper_telemetry", "train", *options, "--run-dir", str(run_dir), *backends]
    environment = {**os.environ, "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)


class Moment(NamedTuple):
    """When to end a trainer, as seconds after an update, and its sinks."""

    attempt: int
    update: int
    seconds: float
    sinks: Sequence[str]


Ended = tuple[Path, "subprocess.Popen[str]"]


def moments(*, seed: int, last: int) -> list[Moment]:
    """One moment per attempt; the first attempt has all backends."""
    draw = random.Random(seed)
    return [
        Moment(attempt, draw.randint(2, last), draw.random() * 0.1, BACKENDS if attempt == 0 else ("tensorboard",))
        for attempt in range(KILLS)
    ]


def several_at_once(meet: Callable[[Moment], Ended], found: Iterable[Moment]) -> list[Ended]:
    """Outcomes of concurrent trainings; a killed trainer's speed is not measured."""
    with ThreadPoolExecutor(TRAINERS) as pool:
        return list(pool.map(meet, found))


def has_lines(run_dir: Path, lines: int) -> bool:
    journal = run_dir / "journal.jsonl"
    return journal.exists() and journal.read_bytes().count(b"\n") > lines
