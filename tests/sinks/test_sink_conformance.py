"""Every bundled sink passes the plugin test kit, and the kit finds the faults of deliberately broken sinks."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sink_runs import run_info

from esper_telemetry.core.record import Record, RunInfo, RunStatus
from esper_telemetry.sinks import ConsoleSink, FunctionSink, MLflowSink, PrometheusSink, TensorBoardSink, WandbSink
from esper_telemetry.sinks.sink_protocol import StoredMetrics
from esper_telemetry.testing import CHECKS, FailingSink, MemorySink, check_sink
from esper_telemetry.testing import sinks as conformance

SLOW = ("many records", "sigterm")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use a working directory for MLflow's `mlruns`, and fewer records than users' sinks get."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(conformance, "MANY_RECORDS", 2000)


def offline() -> WandbSink:
    return WandbSink("kit", mode="offline")


BUNDLED: dict[str, Callable[[], Any]] = {
    "tensorboard": TensorBoardSink,
    "wandb": offline,
    "prometheus": PrometheusSink,
    "console": ConsoleSink,
    "function": lambda: FunctionSink(str),
}


@pytest.fixture(scope="session")
def mlflow_store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all checks, because creating it takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(params=[*BUNDLED, "mlflow"])
def factory(request: pytest.FixtureRequest) -> Callable[[], Any]:
    if request.param == "mlflow":
        store = request.getfixturevalue("mlflow_store")
        return lambda: MLflowSink(store)
    return BUNDLED[request.param]


@pytest.mark.system
def test_a_bundled_sink_passes(factory: Callable[[], Any]) -> None:
    assert set(check_sink(factory, leave_out=SLOW)) == CHECKS.keys() - set(SLOW)


@pytest.mark.slow
def test_a_bundled_sink_passes_what_takes_long_too(factory: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "MANY_RECORDS", 10_000)

    check_sink(factory, only=SLOW)


def test_a_sink_that_remembers_passes_everything() -> None:
    sink = MemorySink()

    assert check_sink(lambda: sink) == tuple(CHECKS)


class Forgetful(MemorySink):
    """Loses the first record of each batch."""

    def write(self, records: Sequence[Record]) -> None:
        super().write(records[1:])


class Double(MemorySink):
    """Writes everything twice."""

    def write(self, records: Sequence[Record]) -> None:
        super().write([*records, *records])


class Stepless(MemorySink):
    """Does not forward the step, so all rows have the same step."""

    def stored(self, run: RunInfo) -> StoredMetrics:
        *_, last = super().stored(run).rows.values()
        return StoredMetrics({1: last})


class Sanitising(MemorySink):
    """Maps two keys to one."""

    def stored(self, run: RunInfo) -> StoredMetrics:
        rows = super().stored(run).rows
        return StoredMetrics({u: {key.replace("/", "_"): value for key, value in row.items()} for u, row in rows.items()})

    def shown(self, run: RunInfo) -> Callable[[Record], dict[str, float]]:
        return lambda record: {key.replace("/", "_"): value for key, value in reversed(list(record.values.items()))}


class Fragile(MemorySink):
    """Cannot be closed twice."""

    def close(self, status: RunStatus) -> None:
        self.statuses.remove(status)


class Incomplete:
    """Has no `close`."""

    def open(self, run: RunInfo) -> None: ...

    def write(self, records: Sequence[Record]) -> None: ...


@pytest.mark.parametrize(
    ("kind", "check", "sentence"),
    [
        (Forgetful, "steps", "the backend lacks 3 numbers of updates \\[1\\]"),
        (Double, "steps", "numbers are stored more than once"),
        (Stepless, "steps", "the backend lacks 8[0-9] numbers"),
        (Sanitising, "collisions", "numbers differ from the journal's"),
        (Fragile, "closes twice", "list.remove"),
        (Incomplete, "protocol", "the method close is missing"),
    ],
)
def test_a_broken_sink_is_told_what_is_wrong(kind: Callable[[], Any], check: str, sentence: str) -> None:
    sink = kind()

    with pytest.raises(AssertionError, match=f"the sink fails the check '{check}'.*{sentence}"):
        check_sink(lambda: sink, only=[check])


def test_a_failing_sink_can_only_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    sink = FailingSink(fail_in={"open"}, error=None, hang_seconds=0.05)

    sink.open(run_info())

    assert pauses == [0.05] and sink.runs
    with pytest.raises(ValueError, match=r"got \['flush'\]"):
        FailingSink(fail_in={"flush"})


def test_a_check_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="unknown check 'everything': choose from protocol, steps"):
        check_sink(MemorySink, only=["everything"])
