import pickle
import tomllib
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from sink_runs import record, run_info

from esper_telemetry.core.record import Record
from esper_telemetry.sinks import (
    ConsoleSink,
    FunctionSink,
    MLflowSink,
    PermanentSinkError,
    PrometheusSink,
    Sink,
    TensorBoardSink,
    WandbSink,
    as_sink,
    known_sinks,
    register_sink,
    sink_from_uri,
)
from esper_telemetry.sinks import sink_registry as uri_module
from esper_telemetry.sinks.sink_registry import BUNDLED, GROUP
from esper_telemetry.testing import MemorySink
from esper_telemetry.testing.sinks import delivered


@pytest.mark.parametrize(
    ("uri", "sink"),
    [
        ("console", ConsoleSink()),
        ("tensorboard", TensorBoardSink()),
        ("tensorboard:runs/a", TensorBoardSink("runs/a")),
        ("wandb", WandbSink()),
        ("wandb:walker?mode=offline", WandbSink(project="walker", mode="offline")),
        ("mlflow", MLflowSink()),
        ("mlflow:http://host:5000?experiment=walker", MLflowSink("http://host:5000", experiment="walker")),
        ("mlflow:sqlite:////tmp/a.db", MLflowSink("sqlite:////tmp/a.db")),
        ("wandb:a?entity=me&group=sweep&job_type=rank3", WandbSink("a", entity="me", group="sweep", job_type="rank3")),
        ("mlflow?parent=abc&checkpoints=true", MLflowSink(parent="abc", checkpoints=True)),
        ("mlflow?checkpoints=false", MLflowSink()),
        ("mlflow:postgresql+psycopg2://me@host/db", MLflowSink("postgresql+psycopg2://me@host/db")),
        ("mlflow:databricks", MLflowSink("databricks")),
        ("mlflow:uc:http://host", MLflowSink("uc:http://host")),
        ("mlflow:mlruns", MLflowSink("mlruns")),
        ("prometheus", PrometheusSink()),
        ("prometheus:9090", PrometheusSink(port=9090)),
        ("prometheus:/var/lib/run.prom", PrometheusSink("/var/lib/run.prom")),
    ],
)
def test_a_uri_gives_the_sink_with_these_settings(uri: str, sink: Sink) -> None:
    assert sink_from_uri(uri) == sink


@pytest.mark.parametrize(
    "uri",
    [
        "wandb:a",
        "wandb:a?mode=offline&entity=me&group=my+sweep&job_type=rank3",
        "mlflow",
        "mlflow:http://host:5000?experiment=my+walker&parent=abc&checkpoints=true",
    ],
)
def test_a_sink_knows_the_uri_that_it_is_made_from(uri: str) -> None:
    assert getattr(sink_from_uri(uri), "uri") == uri  # noqa: B009  # an optional part of the protocol


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (
            "tensorbord",
            "unknown sink 'tensorbord'; known sinks are console, mlflow, prometheus, tensorboard, trackio, wandb; did you mean "
            "tensorboard?",
        ),
        ("wandb?mood=offline", "sink wandb has no option 'mood': it knows mode, entity, group, job_type; did you mean mode?"),
        ("wandb?mode=ofline", "mode must be one of auto, online, offline, got 'ofline'; did you mean offline or online?"),
        ("wandb?mode=online&mode=offline", "option 'mode' is given more than once in sink wandb?mode=online&mode=offline"),
        ("wandb:p?entity=", "entity of a W&B run must not be empty, got ''"),
        (
            "mlflow:gopher://x",
            "MLflow does not support the scheme 'gopher' of a tracking URI, got 'gopher://x': "
            "it knows http, https, sqlite, postgresql, mysql, mssql, file, databricks, databricks-uc, uc",
        ),
        (
            "mlflow:htpp://me:secret@host",
            "MLflow does not support the scheme 'htpp' of a tracking URI, got 'htpp://me:***@host'; did you mean http or https?",
        ),
        (
            "mlflow:127.0.0.1:5000",
            "a tracking URI of MLflow must begin with its scheme, got '127.0.0.1:5000'; did you mean http://127.0.0.1:5000?",
        ),
        ("mlflow:http://", "the tracking URI of an MLflow server must be like http://HOST:PORT, got 'http://'"),
        ("mlflow:http://host:99999", "the tracking URI 'http://host:99999' of MLflow cannot be read: Port out of range 0-65535"),
        ("mlflow:sqlite://a.db", "the tracking URI of an SQLite database must be like sqlite:///FILE, got 'sqlite://a.db'"),
        ("mlflow:sqlite:///", "the tracking URI of an SQLite database must be like sqlite:///FILE, got 'sqlite:///'"),
        ("mlflow:postgresql:a", "the tracking URI of a database must be like postgresql://USER@HOST/NAME, got 'postgresql:a'"),
        ("prometheus:0", "port must be from 1 to 65535, got 0"),
        ("prometheus:70000", "port must be from 1 to 65535, got 70000"),
        (
            "prometheus:localhost:9090",
            "PrometheusSink takes a file, or a port of this machine such as prometheus:9090, got 'localhost:9090'",
        ),
        ("prometheus:-1", "PrometheusSink takes a file, or a port of this machine such as prometheus:9090, got '-1'"),
        ("tensorboard:s3://bucket", "TensorBoardSink writes into a directory of this machine, got 's3://bucket'"),
        ("mlflow?checkpoints=yes", "option checkpoints of sink mlflow must be true or false, got 'yes'"),
        ("mlflow?parent=", "parent must be the id of a run and cannot be combined with run_id, got ''"),
        ("tensorboard:a?b=c", "sink tensorboard has no option 'b': it takes none"),
        ("console:loud", "sink console takes nothing after its name, got 'loud'"),
    ],
)
def test_a_wrong_uri_is_one_sentence_with_the_offending_value(uri: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        sink_from_uri(uri)

    assert str(caught.value) == message


@pytest.mark.parametrize("make", [TensorBoardSink, WandbSink, MLflowSink])
def test_a_missing_package_is_reported_when_the_sink_is_made(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper_telemetry.sinks.sink_protocol.find_spec", lambda name: None)

    with pytest.raises(ModuleNotFoundError, match=rf"{make.__name__} needs \w+: pip install 'esper-telemetry\[\w+\]'"):
        make()


def test_bundled_sinks_are_the_entry_points_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert project["entry-points"][GROUP] == BUNDLED


@pytest.mark.parametrize("sink", [TensorBoardSink(), WandbSink(), MLflowSink()])
def test_backends_run_in_the_child_process_and_so_can_be_pickled(sink: Any) -> None:
    assert pickle.loads(pickle.dumps(sink)) == sink
    assert not sink.in_process


def test_the_name_of_a_sink_holds_no_password() -> None:
    assert MLflowSink("http://me:secret@host:5000").name == "mlflow:http://me:***@host:5000"


def test_a_function_is_a_sink_that_is_called_with_each_record() -> None:
    records_received: list[Record] = []

    sink = as_sink(records_received.append)
    delivered(sink, run_info(), [record(1), record(2)])

    assert isinstance(sink, FunctionSink)
    assert [each.seq for each in records_received] == [1, 2]


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (42, "a sink has open, write and close, or is callable, or is a URI; got 42"),
        (TensorBoardSink, "a sink must be an object, got the class TensorBoardSink: write TensorBoardSink()"),
    ],
)
def test_anything_else_is_no_sink(thing: object, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        as_sink(thing)

    assert str(caught.value) == message


class Greeter(MemorySink):
    """A user's sink, made from the text after its name."""

    def __init__(self, greeting: str = "hello") -> None:
        super().__init__(name=greeting)


def shout(record: Record) -> None:
    """A user's function."""


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint(name, f"{__name__}:{target}", uri_module.GROUP) for name, target in PLUGINS.items()]
    monkeypatch.setattr(uri_module, "entry_points", lambda group: entries)


PLUGINS = {"greeter": "Greeter", "shout": "shout"}


@pytest.mark.usefixtures("plugins")
def test_an_entry_point_may_be_a_class_or_a_function() -> None:
    assert sink_from_uri("greeter") == Greeter()
    assert sink_from_uri("greeter:hi") == Greeter("hi")
    assert sink_from_uri("shout") == FunctionSink(shout)
    with pytest.raises(ValueError, match="sink shout is a function and takes nothing after its name, got 'x'"):
        sink_from_uri("shout:x")


@pytest.mark.usefixtures("plugins")
def test_bundled_sinks_are_known_where_the_package_is_not_installed() -> None:
    assert set(known_sinks()) == {"console", "tensorboard", "wandb", "mlflow", "prometheus", "trackio", "greeter", "shout"}


@pytest.mark.parametrize("sink", [TensorBoardSink(), WandbSink(), MLflowSink()])
def test_a_run_without_directory_needs_a_place_in_the_settings(sink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    with pytest.raises(PermanentSinkError, match=r"cannot be written, because run 'cartpole' is without a run directory: give"):
        sink.open(run_info(None))


def test_a_registered_sink_has_a_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uri_module, "_registered", {})
    asked: list[tuple[str, dict[str, str]]] = []

    def made(rest: str, options: Mapping[str, str]) -> MemorySink:
        asked.append((rest, dict(options)))
        return MemorySink(name=f"mine:{rest}")

    register_sink("mine", made)

    assert as_sink("mine:here?a=1").name == "mine:here"  # type: ignore[attr-defined]  # a name is optional
    assert asked == [("here", {"a": "1"})]
    with pytest.raises(ValueError, match="known sinks are console, mine, mlflow"):
        as_sink("yours")


def test_registering_over_a_sink_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(uri_module, "_registered", {})

    register_sink("wandb", lambda rest, options: MemorySink())

    assert isinstance(as_sink("wandb:x"), MemorySink)
    assert "sink wandb is registered again" in caplog.text


@pytest.mark.parametrize("name", ["", "My Sink", "a:b"])
def test_a_name_that_no_uri_can_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="the name of a sink may contain only"):
        register_sink(name, lambda rest, options: MemorySink())
