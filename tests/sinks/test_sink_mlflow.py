import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from backends_read import mlflow_client
from sink_runs import EVERY, record, run_info
from waiting import wait_until

from esper_telemetry import Telemetry, read_run
from esper_telemetry.core.record import Record, RunInfo, RunStatus
from esper_telemetry.sinks import MLflowSink, PermanentSinkError
from esper_telemetry.sinks.mlflow import database as mlflow_rows
from esper_telemetry.sinks.mlflow import mlflow_run as mlflow_run
from esper_telemetry.sinks.mlflow import mlflow_sink as mlflow_sink
from esper_telemetry.sinks.mlflow.database import ensure_database, metric_table
from esper_telemetry.testing.sinks import delivered

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a database, created once because that takes seconds."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def client(store: Path) -> Any:
    return mlflow_client(store)


def opened(run: RunInfo, sink: MLflowSink | None = None) -> MLflowSink:
    sink = sink or MLflowSink()
    sink.open(run)
    return sink


def mlflow_run_of(client: Any, run_id: str, experiment: str = "esper_telemetry") -> Any:
    experiment_id = client.get_experiment_by_name(experiment).experiment_id
    (run,) = client.search_runs([experiment_id], f"tags.`esper.run_id` = '{run_id}'")
    return run


def history(client: Any, run: Any, key: str) -> list[tuple[int, float, int]]:
    points = client.get_metric_history(run.info.run_id, key)
    return [(point.step, point.value, point.timestamp) for point in points]


@pytest.mark.system
def test_a_request_holds_few_keys_of_many_records(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three records of 400 keys and two axes, as a server gets them: the first request ends within its 334th key."""
    sink = opened(run_info(store, run_id="ordered", metrics={}), MLflowSink(max_keys=400))
    assert sink._open is not None
    sink._open.table = None
    requests: list[list[str]] = []
    monkeypatch.setattr(sink._open.client, "log_batch", lambda run, metrics, **_: requests.append([metric.key for metric in metrics]))

    sink.write([record(update, {f"perf/k{n:03}": float(n) for n in range(400)}) for update in range(1, 4)])

    assert [len(request) for request in requests] == [1000, 206]
    assert len(set(requests[0])) == 334
    assert [*requests[0], *requests[1]] == sorted([*requests[0], *requests[1]])


EDGES = [record(update, {"policy/kl": value}) for update, value in enumerate([0.0, -1e-300, 1e308, 3, 0.1 + 0.2], start=1)]
AGAIN = [record(1, {"policy/kl": 9.0, "perf/once": 1.0}), *[record(update) for update in (2, 3, 3)], record(2, {"perf/late": 5.0})]


@pytest.mark.parametrize("records", [EDGES, AGAIN, [*AGAIN, *AGAIN]], ids=["edges", "steps-come-again", "twice"])
def test_history_and_latest_numbers_are_what_the_client_alone_makes_of_them(
    store: Path, client: Any, request: pytest.FixtureRequest, records: list[Record]
) -> None:
    """`perf/once` is only in the first record, and step 2000 repeats after 3000."""
    name = request.node.callspec.id
    fast, plain = (opened(run_info(store, run_id=f"{name}-{way}", metrics={})) for way in ("fast", "plain"))
    assert fast._open is not None and plain._open is not None and fast._open.table is not None
    plain._open.table = None

    for sink in (fast, plain):
        sink.write(records)

    ours, theirs = (mlflow_run_of(client, f"{name}-{way}") for way in ("fast", "plain"))
    assert ours.data.metrics == theirs.data.metrics
    for key in theirs.data.metrics:
        assert sorted(history(client, ours, key)) == sorted(history(client, theirs, key))


def test_only_the_latest_number_of_each_key_goes_through_the_client(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = opened(run_info(store, run_id="latest", metrics={}))
    assert sink._open is not None
    sent: list[tuple[str, int]] = []
    monkeypatch.setattr(sink._open.client, "log_batch", lambda run, metrics, **_: sent.extend((one.key, one.step) for one in metrics))

    sink.write([record(1, {"perf/once": 1.0}), *[record(update, {"perf/often": 1.0}) for update in range(2, 50)]])

    assert dict(sent) == {"perf/once": 1000, "perf/often": 49_000, "axis/update": 49_000, "axis/gradient_step": 49_000}
    assert len(sent) == 4


def test_nan_and_infinity_are_stored_as_mlflow_stores_them(store: Path, client: Any) -> None:
    from mlflow.entities import Metric

    run_id = opened(run_info(store, run_id="nonfinite"))._open.run_id  # type: ignore[union-attr]
    rows = metric_table(client)
    assert rows is not None
    for step, value in enumerate((math.nan, math.inf, -math.inf)):
        client.log_metric(run_id, "plain", value, timestamp=1, step=step)
        rows.add(run_id, [Metric("fast", value, 1, step)])

    plain, fast = ([repr(point.value) for point in client.get_metric_history(run_id, key)] for key in ("plain", "fast"))
    assert fast == plain and "nan" in fast


def test_rows_of_several_transactions_are_all_there(store: Path, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_rows, "MAX_ROWS", 7)
    sink = opened(run_info(store, run_id="transactions", metrics={}))
    sink.write([record(update, {"perf/a": float(update)}) for update in range(1, 20)])

    run = mlflow_run_of(client, "transactions")
    assert [value for _, value, _ in history(client, run, "perf/a")] == list(range(1, 20))


def test_rows_of_no_run_are_refused(client: Any) -> None:
    from mlflow.entities import Metric
    from mlflow.exceptions import MlflowException

    rows = metric_table(client)
    assert rows is not None
    with pytest.raises(MlflowException, match="FOREIGN KEY"):
        rows.add("0" * 32, [Metric("a", 1.0, 1, 1)])


def test_a_server_and_an_unknown_table_take_everything_through_the_client(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert metric_table(mlflow_client("http://127.0.0.1:9")) is None
    monkeypatch.setattr(mlflow_rows, "METRIC_COLUMNS", {"key", "value"})
    assert metric_table(client) is None


def test_the_run_page_is_complete(store: Path, client: Any) -> None:
    opened(run_info(store, run_id="page"))

    run = mlflow_run_of(client, "page")
    assert run.data.params == {"env": "CartPole-v1", "ppo.clip": "0.2", "ppo.sizes": "[64, 64]", "ppo.anneal": "True"}
    assert run.info.run_name == "cartpole"
    assert run.info.start_time == 1_700_000_000_000
    assert run.data.tags["mlflow.note.content"] == "**No outcome yet**\n\nNo alarm was raised.\n\nfirst try"
    assert run.data.tags["esper.tag.demo"] == "true"
    assert {"mlflow.user", "mlflow.source.name", "mlflow.runName"} <= set(run.data.tags)
    assert run.info.artifact_uri.startswith((store / "mlflow-artifacts").as_uri())


def test_what_all_metrics_mean_is_an_artifact_and_the_headlines_are_in_the_description(store: Path, client: Any, tmp_path: Path) -> None:
    """The whole catalogue is too long for tags. The description begins with the return and does not have `adv/grad_corr`."""
    values = {"adv/grad_corr": 0.5, "policy/kl": 0.25, "episode/return_mean_100": 7.0}
    delivered(MLflowSink(), run_info(store, run_id="all", metrics=EVERY), [record(1, values)])

    run = mlflow_run_of(client, "all")
    page = Path(client.download_artifacts(run.info.run_id, "metrics.md", str(tmp_path))).read_text()
    assert all(f"`{key}` |" in page for key in EVERY)
    assert not [name for name in run.data.tags if name.startswith("esper.metrics")]
    rows = [line.split("|")[1:3] for line in run.data.tags["mlflow.note.content"].splitlines() if line.startswith("|")]
    assert rows[0][1] == " at update 1, step 1,000 "
    assert [(name.split("`")[1], value) for name, value in rows[2:]] == [("episode/return_mean_100", " 7 "), ("policy/kl", " 0.25 ")]


def test_the_description_follows_the_values_while_nothing_happens(store: Path, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = opened(run_info(store, run_id="note"))
    sink.write([record(1, {"policy/kl": 0.25})])
    assert "policy/kl" not in mlflow_run_of(client, "note").data.tags["mlflow.note.content"]

    monkeypatch.setattr(mlflow_run, "NOTE_SECONDS", 0.0)
    sink.write([record(2, {"policy/kl": 0.5})])
    assert "`policy/kl` | 0.5 |" in mlflow_run_of(client, "note").data.tags["mlflow.note.content"]


def test_the_place_has_the_address_of_the_run_among_the_pages_for_model_training(store: Path, client: Any) -> None:
    sink = opened(run_info(store, run_id="place"))

    info = mlflow_run_of(client, "place").info
    address = f"http://localhost:5000/#/experiments/{info.experiment_id}/runs/{info.run_id}"
    assert sink.place(run_info(store, run_id="place")).pages == (
        ("run", f"{address}?workflowType=machine_learning"),
        ("charts", f"{address}/model-metrics?workflowType=machine_learning"),
    )
    assert sink.place(run_info(store, run_id="nobody")).pages[0][0] == "experiments"
    server = MLflowSink("http://user:secret@host:1/").place(run_info(store)).pages
    assert server == (("experiments", "http://host:1/#/experiments?workflowType=machine_learning"),)


def test_settings_with_odd_names_and_long_values_are_kept(store: Path, client: Any) -> None:
    opened(run_info(store, run_id="odd", config={"ar@100": "x" * 7000}))

    data = mlflow_run_of(client, "odd").data
    assert data.params == {"ar_100": "x" * 6000}
    assert data.tags["esper.keymap"] == '{"ar_100": "ar@100"}'


@pytest.mark.parametrize("status", [RunStatus.FAILED, RunStatus.INTERRUPTED, RunStatus.PREEMPTED, RunStatus.KILLED])
def test_the_status_says_how_the_run_ended(store: Path, client: Any, status: RunStatus) -> None:
    opened(run_info(store, run_id=status.value)).close(status)

    assert mlflow_run_of(client, status.value).info.status == ("FAILED" if status is RunStatus.FAILED else "KILLED")


def test_a_run_that_goes_on_is_the_same_run_and_keeps_its_settings(store: Path, client: Any) -> None:
    delivered(MLflowSink(), run_info(store, run_id="resumed"), [record(1)], RunStatus.KILLED)

    sink = opened(run_info(store, run_id="resumed", config={"env": "other", "new": 1}))
    assert mlflow_run_of(client, "resumed").info.status == "RUNNING"
    sink.write([record(2)])
    sink.close(RunStatus.FINISHED)

    run = mlflow_run_of(client, "resumed")
    assert run.info.status == "FINISHED"
    assert (run.data.params["env"], run.data.params["new"]) == ("CartPole-v1", "1")
    assert [step for step, _, _ in history(client, run, "policy/kl")] == [1000, 2000]


def test_a_run_is_shown_beneath_its_parent_given_by_either_id(store: Path, client: Any) -> None:
    opened(run_info(store, run_id="above"))
    above = mlflow_run_of(client, "above").info.run_id

    for run_id, parent in (("child", "above"), ("other", above)):
        for _ in range(2):
            opened(run_info(store, run_id=run_id), MLflowSink(parent=parent)).close(RunStatus.FINISHED)

        assert mlflow_run_of(client, run_id).data.tags["mlflow.parentRunId"] == above
    assert "mlflow.parentRunId" not in mlflow_run_of(client, "above").data.tags


def test_a_parent_that_is_not_there_is_a_mistake_before_anything_is_made(store: Path, client: Any) -> None:
    opened(run_info(store, run_id="someone"))

    with pytest.raises(PermanentSinkError, match="nobody"):
        opened(run_info(store, run_id="orphan"), MLflowSink(parent="nobody"))

    experiment = client.get_experiment_by_name("esper_telemetry")
    assert client.search_runs([experiment.experiment_id], "tags.`esper.run_id` = 'orphan'") == []


@pytest.mark.parametrize("checkpoints", [False, True])
def test_the_files_of_a_run_are_stored_when_it_ends(tmp_path: Path, store: Path, client: Any, checkpoints: bool) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.pt").write_bytes(b"weights")
    (tmp_path / "config.json").write_text('{"api_key": "***"}')
    run = run_info(tmp_path, run_id=f"files-{checkpoints}")

    opened(run, MLflowSink(f"sqlite:///{store}/mlflow.db", checkpoints=checkpoints)).close(RunStatus.FINISHED)

    mlflow_id = mlflow_run_of(client, run.run_id).info.run_id
    names = [artifact.path for artifact in client.list_artifacts(mlflow_id)]
    assert names == [*(["checkpoints"] if checkpoints else []), "config.json", "metrics.md", "run.md"]
    folder = Path(client.download_artifacts(mlflow_id, "", str(tmp_path)))
    assert (folder / "config.json").read_text() == '{"api_key": "***"}'
    assert (folder / "run.md").read_text().startswith("# cartpole")
    assert not checkpoints or (folder / "checkpoints" / "best.pt").read_bytes() == b"weights"


def test_checkpoints_that_are_not_there_are_missed_aloud(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(run_info(store, run_id="bare"), MLflowSink(checkpoints=True)).close(RunStatus.FINISHED)

    assert "no checkpoints of run cartpole" in caplog.text


def test_a_store_of_artifacts_that_is_away_costs_one_warning(store: Path, client: Any, caplog: pytest.LogCaptureFixture) -> None:
    client.create_experiment("away", artifact_location="file:///proc/nobody/writes/here")

    opened(run_info(store, run_id="away"), MLflowSink(experiment="away")).close(RunStatus.FINISHED)

    assert caplog.text.count("MLflow does not store") == 1
    assert mlflow_run_of(client, "away", "away").info.status == "FINISHED"


def test_a_joined_run_is_left_open_and_keeps_its_settings(store: Path, client: Any) -> None:
    theirs = client.create_run(client.create_experiment("joined"), run_name="theirs")
    sink = MLflowSink(f"sqlite:///{store}/mlflow.db", run_id=theirs.info.run_id)
    delivered(sink, run_info(), [record(1)])

    run = client.get_run(theirs.info.run_id)
    assert sink.in_process
    assert run.info.status == "RUNNING"
    assert run.data.metrics["policy/kl"] == 0.01
    assert run.data.params == {}


def test_a_run_that_is_not_there_cannot_be_joined(store: Path) -> None:
    with pytest.raises(PermanentSinkError, match="MLflow refuses"):
        opened(run_info(), MLflowSink(f"sqlite:///{store}/mlflow.db", run_id="0" * 32))


@pytest.mark.system
def test_a_new_database_is_made_without_a_word(store: Path) -> None:
    """In a separate process, because MLflow creates the tables of a store once per process."""
    code = (
        "from sink_runs import run_info; from pathlib import Path; from esper_telemetry.sinks import MLflowSink;"
        f"MLflowSink().open(run_info(Path({str(store / 'fresh')!r})))"
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])

    output = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True)

    assert (output.returncode, output.stdout, output.stderr) == (0, b"", b"")


TABLES = ["experiments (experiment_id INTEGER)", "_alembic_tmp_metrics (key TEXT)"]
"""MLflow's first tables, as left by a process that is killed while it creates them."""


@pytest.mark.system
@pytest.mark.parametrize("count", [0, 2])
def test_a_database_that_was_never_finished_is_made_anew(tmp_path: Path, count: int) -> None:
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.executescript("".join(f"CREATE TABLE {table};" for table in TABLES[:count]))
    (tmp_path / "mlflow.db").touch()

    delivered(MLflowSink(), run_info(tmp_path, run_id="again"), [record(1)])

    run = mlflow_run_of(mlflow_client(tmp_path), "again")
    assert run.data.metrics["policy/kl"] == 0.01
    assert sorted(path.name for path in tmp_path.glob("*.db*")) == ["mlflow.db", "mlflow.db.broken"]


def test_a_database_that_holds_runs_is_never_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(path)) as database:
        database.executescript("CREATE TABLE runs (run_uuid TEXT); INSERT INTO runs VALUES ('precious');")
    before = path.read_bytes()

    ensure_database(path)

    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["mlflow.db"]


@pytest.mark.system
def test_a_database_is_made_once_however_many_want_it(tmp_path: Path) -> None:
    """The second process finds half of the first one's tables, unless they are made in a draft file."""
    path = tmp_path / "mlflow.db"
    with ThreadPoolExecutor(3) as makers:
        list(makers.map(ensure_database, [path] * 3))

    mlflow_client(tmp_path).create_experiment("usable")
    assert [entry.name for entry in tmp_path.iterdir()] == ["mlflow.db"]


def test_only_a_child_process_gets_short_time_outs(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    sink = MLflowSink()
    assert environment == {}

    sink.prepare_child()

    assert environment == {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_DISABLE_TELEMETRY": "true"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_a_server_that_is_not_there_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.exceptions import MlflowException

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    with pytest.raises(MlflowException):
        opened(run_info(), MLflowSink(f"http://127.0.0.1:{free_port()}"))


USER, PASSWORD = "admin", "s3cret-p@ss/word"
WITH_PASSWORDS = find_spec("flask_wtf") is not None
needs_passwords = pytest.mark.skipif(not WITH_PASSWORDS, reason="MLflow's server asks for passwords with Flask-WTF only")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a password, if supported; it takes seconds to start, so the tests share it."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    users = f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{folder}/users.db\nadmin_username = {USER}\n"
    (folder / "auth.ini").write_text(f"{users}auth_cache_ttl_seconds = 600\n")  # otherwise half a second for every request
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    arguments += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder)]
    arguments += ["--app-name", "basic-auth"] if WITH_PASSWORDS else []
    settings = {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD,
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "of this test",
    }
    command = [sys.executable, "-m", "mlflow", "server", *arguments]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env={**os.environ, **settings}, start_new_session=True)
    try:
        wait_until(lambda: is_healthy(f"http://127.0.0.1:{port}"), "the MLflow server", 240.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # SIGTERM takes 20 seconds
        process.wait(30)


@pytest.fixture
def logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)


def is_healthy(address: str) -> bool:
    try:
        urlopen(f"{address}/health", timeout=2).close()
    except OSError:
        return False
    return True


@pytest.mark.system
@pytest.mark.usefixtures("logged_in")
def test_a_server_holds_what_was_sent_and_its_first_names_repeat_the_headlines(server: str) -> None:
    """MLflow lists and draws metrics in alphabetical order. `doctor` ignores these keys, because they repeat other numbers."""
    run = run_info(metrics=EVERY)
    sink = opened(run, MLflowSink(server, experiment="walker"))
    values = {"policy/kl": 0.5, "adv/grad_corr": 0.1, "episode/return_mean_100": 7.0, "alarm/active": 0.0}
    sink.write([record(1, values), record(2, {**values, "alarm/active": 2.0})])
    sink.close(RunStatus.FAILED)

    client: Any = mlflow_client(server)
    stored = mlflow_run_of(client, "abc123", "walker")
    assert stored.info.status == "FAILED" and "esper.keymap" not in stored.data.tags
    assert history(client, stored, "alarm/active") == [(1000, 0.0, 1_700_000_001_000), (2000, 2.0, 1_700_000_002_000)]
    assert sorted(stored.data.metrics)[:3] == [*("0_overview/01 return", "0_overview/02 alarms", "0_overview/04 KL")]
    assert history(client, stored, "0_overview/02 alarms") == history(client, stored, "alarm/active")
    assert sink.stored(run).rows[2].keys() == {*values, "axis/update", "axis/gradient_step"}  # type: ignore[union-attr]
    address = f"{server}/#/experiments/{stored.info.experiment_id}/runs/{stored.info.run_id}?workflowType=machine_learning"
    assert sink.place(run).pages[0] == ("run", address)


@pytest.mark.system
@needs_passwords
@pytest.mark.usefixtures("logged_in")
def test_a_password_in_the_address_opens_the_server_and_is_shown_nowhere(
    server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole path: journal, child process, server with artifacts. Then every file of the run is searched for the password."""
    quoted, client = quote(PASSWORD, safe=""), mlflow_client(server)
    sink = MLflowSink(server.replace("://", f"://{USER}:{quoted}@"), experiment="secret", checkpoints=True)
    with monkeypatch.context() as without_variables:
        for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
            without_variables.delenv(name)
        with Telemetry([sink], run_dir=tmp_path / "run", config={"to": sink.tracking_uri}, close_timeout=200) as telemetry:
            (tmp_path / "run" / "checkpoints").mkdir()
            (tmp_path / "run" / "checkpoints" / "latest.pt").write_bytes(b"weights")
            telemetry.log({"my/number": 1.0})
            telemetry.flush(env_step=8)

    info = read_run(tmp_path / "run").info
    run = mlflow_run_of(client, info.run_id, "secret")
    assert (run.info.status, run.data.metrics["my/number"]) == ("FINISHED", 1.0)
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["checkpoints", "config.json", "metrics.md", "run.md"]
    expected = server.replace("://", f"://{USER}:***@")
    assert (sink.name, sink.place(info).where, info.config["to"]) == (f"mlflow:{expected}", expected, expected)
    files = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    output = "".join(capfd.readouterr()).encode()
    assert [text for text in [*files, output] if PASSWORD.encode() in text or quoted.encode() in text] == []


@pytest.mark.system
@needs_passwords
def test_nobody_is_let_in_without_the_password_and_nothing_is_tried_again(server: str) -> None:
    for address in (server, server.replace("://", f"://{USER}:guessed@")):
        with pytest.raises(PermanentSinkError, match="error code 401") as refused:
            opened(run_info(), MLflowSink(address))

        assert "guessed" not in str(refused.value)


@pytest.mark.system
def test_a_file_is_read_without_mlflow_and_as_its_client_reads_it(store: Path, client: Any) -> None:
    """Metrics that MLflow does not list for a run are left out, even if the table has rows for them."""
    run = run_info(store, run_id="bulk")
    delivered(MLflowSink(), run, [record(update, {"policy/kl": 0.5, "policy/entropy": float(update)}) for update in (1, 2, 3)])
    with closing(sqlite3.connect(store / "mlflow.db")) as database, database:
        run_uuid = mlflow_run_of(client, "bulk").info.run_id
        database.execute("DELETE FROM latest_metrics WHERE run_uuid = ? AND key = 'policy/entropy'", (run_uuid,))
    code = (
        "import sys; from pathlib import Path; from esper_telemetry.core.record import RunInfo;"
        "from esper_telemetry.sinks import MLflowSink;"
        f"run = RunInfo('bulk', 'bulk', Path({str(store)!r}), 0.0); print(MLflowSink().stored(run)); print('mlflow' in sys.modules)"
    )

    output_lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()

    through_client = mlflow_sink._through_client(client, run, "esper_telemetry")
    assert output_lines == [str(through_client), "False"]
    assert through_client.rows[3] == {"policy/kl": 0.5, "axis/update": 3.0, "axis/gradient_step": 48.0}
    assert through_client.ended


@pytest.mark.system
def test_a_file_with_other_tables_is_read_through_the_client(store: Path, monkeypatch: pytest.MonkeyPatch, client: Any) -> None:
    run = run_info(store, run_id="other")
    delivered(MLflowSink(), run, [record(1, {"policy/kl": 0.5})])
    monkeypatch.setattr(mlflow_sink, "READ_METRICS", "SELECT no_such_column FROM metrics WHERE run_uuid = ?1")

    assert MLflowSink().stored(run) == mlflow_sink._through_client(client, run, "esper_telemetry")
