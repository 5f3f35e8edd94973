"""Alarms in the console, TensorBoard, W&B and MLflow, each read back from storage."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from backends_read import mlflow_client, wandb_entries, wandb_rows
from scripted import an_alarm
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper_telemetry.core.record import AlarmEvent, Axes, Record, RunInfo, RunStatus
from esper_telemetry.journal.lines import JournalEvent
from esper_telemetry.sinks import ConsoleSink, MLflowSink, TensorBoardSink, WandbSink
from esper_telemetry.sinks.pages import MAX_ALARMS, IncidentCards

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")

SPIKE = an_alarm(2, severity=0.9, evidence={"worst": [{"log_ratio": 3.0}]})
WARNING = an_alarm(3, "grad/explode", severity=0.5, cause="policy/kl_spike", key="grad/global/norm_preclip")
WORSE = an_alarm(4, "grad/explode", severity=0.8, event=AlarmEvent.UPDATE, since=3, cause="policy/kl_spike")
OVER = an_alarm(6, event=AlarmEvent.CLEAR, severity=0.0, since=2, value=None)
ALARMS = (SPIKE, WARNING, WORSE, OVER)


def run_info(run_dir: Path, **changes: Any) -> RunInfo:
    return RunInfo(**{"run_id": "abc123", "name": "cartpole", "run_dir": run_dir, "started": 1_700_000_000.0, **changes})


def record(update: int) -> Record:
    return Record(update, Axes(update, update * 1000, update * 16, 1_700_000_000.0 + update), {"policy/kl": 0.01 * update})


def send_updates(sink: Any) -> Iterator[int]:
    """Write six updates with the alarms in between, as the delivery does; yield each before it is written."""
    for update in range(1, 7):
        yield update
        sink.write([record(update)])
        for alarm in ALARMS:
            if alarm.axes.update == update:
                sink.alarm(alarm)


def send_alarms(sink: Any, run: RunInfo, status: RunStatus = RunStatus.FINISHED) -> None:
    sink.open(run)
    list(send_updates(sink))
    sink.close(status)


def test_the_console_has_a_line_for_what_begins_and_for_what_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    send_alarms(ConsoleSink(), run_info(Path()))

    lines = [line for line in capsys.readouterr().out.splitlines() if "/" in line and "step" not in line]
    assert lines == [
        "CRITICAL policy/kl_spike  Since update 2 policy/kl has been too large. Try a lower learning rate.",
        "WARN grad/explode  Since update 3 policy/kl has been too large. Try a lower learning rate.",
        "policy/kl_spike  ended at update 6, active since 2",
    ]


def test_critical_is_red_a_warning_yellow_and_the_end_green(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    sink = ConsoleSink()
    sink.open(run_info(Path()))
    for alarm in ALARMS:
        sink.alarm(an_alarm(2, text="[red]not markup[/red]") if alarm is SPIKE else alarm)

    red, yellow, green = capsys.readouterr().out.splitlines()
    assert "31m" in red and "[red]not markup[/red]" in red
    assert "33m" in yellow and "32m" in green


def pages(directory: Path) -> list[tuple[int, str]]:
    events = EventAccumulator(str(directory), size_guidance={"tensors": 0}).Reload()
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors("0_verdict")]


def test_tensorboard_has_the_incident_at_each_step_where_it_changes(tmp_path: Path) -> None:
    send_alarms(TensorBoardSink(), run_info(tmp_path))

    texts = pages(tmp_path / "tensorboard")
    assert [step for step, _ in texts] == [2000, 3000, 4000, 6000]
    assert [text.splitlines()[2:5:2] for _, text in texts] == [
        [
            "## Incident 1, since update 2: policy/kl\\_spike",
            f"**Since update 2 policy/kl has been too large. Try a lower learning rate.** (critical, {state})",
        ]
        for state in (*["still active"] * 3, "ended at update 6")
    ]
    with_it = [[line for line in text.splitlines() if line.startswith("- ")] for _, text in texts]
    assert with_it == [
        [],
        *[
            [f"- **grad/explode** ({level}, still active): Since update 3 policy/kl has been too large."]
            for level in ("warn", "critical", "critical")
        ],
    ]


def test_tensorboard_goes_on_with_an_incident_of_an_earlier_part(tmp_path: Path) -> None:
    sink = TensorBoardSink()
    sink.open(run_info(tmp_path))
    sink.recall([SPIKE, WARNING])
    sink.alarm(OVER)
    sink.close(RunStatus.FINISHED)

    ((step, text),) = pages(tmp_path / "tensorboard")
    assert step == 6000 and "ended at update 6" in text and text.count("\n- ") == 1


@pytest.fixture(autouse=True)
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a W&B login, whose artifacts are stored only in the test's directory."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "no-config"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb-data"))


@pytest.fixture(autouse=True, scope="module")
def teardown() -> Iterator[None]:
    yield
    wandb.teardown()


def assert_wandb_has_the_alarms(directory: Path) -> list[dict[str, Any]]:
    entries = wandb_entries(directory)
    alerts = [entry["alert"] for entry in entries if entry["type"] == "alert"]
    assert [(alert["title"], alert["level"]) for alert in alerts] == [
        ("policy/kl_spike", "ERROR"),
        ("grad/explode", "WARN"),
        ("grad/explode", "ERROR"),
    ]
    assert all(alert["wait_duration"] == "300000" for alert in alerts)
    assert alerts[0]["text"].startswith("Since update 2 policy/kl has been too large.")
    updates = [entry["summary"].get("update", {}) for entry in entries if entry["type"] == "summary"]
    summary = {key: value for update in updates for key, value in update.items()}
    assert summary["alarms/raised"] == 2
    assert summary["alarms/active"] == "grad/explode"
    assert summary["alarms/first"].startswith("policy/kl_spike: Since update 2")
    assert summary["verdict"] == "no outcome yet (policy/kl_spike since update 2)"
    (table,) = directory.glob("wandb/offline-run-*/files/media/table/alarms/*.json")
    rows = json.loads(table.read_text())
    assert rows["columns"][:5] == ["update", "env_step", "event", "type", "level"]
    assert [row[:4] for row in rows["data"]] == [
        [2, 2000, "raise", "policy/kl_spike"],
        [3, 3000, "raise", "grad/explode"],
        [4, 4000, "update", "grad/explode"],
        [6, 6000, "clear", "policy/kl_spike"],
    ]
    return entries


@pytest.mark.system
def test_wandb_alerts_and_keeps_a_table_without_a_row_more(tmp_path: Path) -> None:
    send_alarms(WandbSink(mode="offline"), run_info(tmp_path))

    entries = assert_wandb_has_the_alarms(tmp_path)
    assert [row["axis/update"] for row in wandb_rows(entries)] == [1, 2, 3, 4, 5, 6]
    notes = [entry["run"]["notes"] for entry in entries if entry["type"] == "run" and "notes" in entry["run"]]
    assert "**policy/kl\\_spike** (" in notes[-1] and "`policy/kl` | 0.06 |" in notes[-1]


@pytest.mark.system
def test_a_wandb_run_that_was_joined_keeps_its_steps(tmp_path: Path) -> None:
    """Its owner logs with `step=`; the alarms do not change those steps."""
    settings = wandb.Settings(console="off", silent=True)
    run = wandb.init(mode="offline", dir=str(tmp_path), project="theirs", settings=settings, reinit="create_new")
    sink = WandbSink(run=run)
    sink.open(run_info(tmp_path))
    for update in send_updates(sink):
        run.log({"theirs": update}, step=update * 10)
    sink.close(RunStatus.FINISHED)
    run.finish()

    entries = assert_wandb_has_the_alarms(tmp_path)
    history = [entry["history"]["item"] for entry in entries if entry["type"] == "history"]
    assert [(row["_step"], row["theirs"], row["axis/update"]) for row in history] == [(n * 10, n, n) for n in range(1, 7)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def client(store: Path) -> Any:
    return mlflow_client(store)


def mlflow_run(client: Any, run_id: str) -> Any:
    experiment_id = client.get_experiment_by_name("esper_telemetry").experiment_id
    (run,) = client.search_runs([experiment_id], f"tags.`esper.run_id` = '{run_id}'")
    return run


def artifact(client: Any, run: Any, name: str, directory: Path) -> str:
    return Path(client.download_artifacts(run.info.run_id, name, str(directory))).read_text()


@pytest.mark.system
def test_mlflow_has_the_verdict_and_the_incidents(store: Path, client: Any, tmp_path: Path) -> None:
    send_alarms(MLflowSink(), run_info(store, run_id="own"))

    run = mlflow_run(client, "own")
    verdict = "no outcome yet (policy/kl_spike since update 2)"  # grad/explode, which was raised with it, is active
    assert run.data.tags["esper.verdict"] == verdict
    assert not [name for name in run.data.tags if name.startswith(("esper.alarm", "esper.metrics", "esper.outcome"))]
    note = run.data.tags["mlflow.note.content"].splitlines()
    assert note[:2] == ["**No outcome yet**", ""] and note[2].startswith("**policy/kl\\_spike** (")
    assert note[-3:] == ["| value | at update 6, step 6,000 | healthy |", "|---|---|---|", note[-1]]
    assert "`policy/kl` | 0.06 |" in note[-1]
    page = artifact(client, run, "incidents.md", tmp_path)
    assert page.startswith("# What went wrong\n\n## Incident 1, since update 2: policy/kl\\_spike")
    (incident,) = json.loads(artifact(client, run, "incidents.json", tmp_path))
    assert (incident["cause"], incident["since"], len(incident["alarms"])) == ("policy/kl_spike", 2, 4)
    assert incident["alarms"][0]["evidence"] == {"worst": [{"log_ratio": 3.0}]}


@pytest.mark.system
def test_a_joined_mlflow_run_gets_them_too_and_stays_open(store: Path, client: Any, tmp_path: Path) -> None:
    send_alarms(MLflowSink(), run_info(store, run_id="first"))  # makes the experiment
    theirs = client.create_run(client.get_experiment_by_name("esper_telemetry").experiment_id)

    send_alarms(MLflowSink(f"sqlite:///{store}/mlflow.db", run_id=theirs.info.run_id), run_info(store))

    run = client.get_run(theirs.info.run_id)
    assert run.info.status == "RUNNING"
    assert "policy/kl_spike" in run.data.tags["esper.verdict"] and "mlflow.note.content" not in run.data.tags
    assert "Incident 1" in artifact(client, run, "incidents.md", tmp_path)


@pytest.mark.system
def test_an_incident_that_is_under_way_is_stored_already(store: Path, client: Any, tmp_path: Path) -> None:
    sink = MLflowSink()
    sink.open(run_info(store, run_id="under-way"))
    sink.alarm(SPIKE)

    assert "policy/kl" in artifact(client, mlflow_run(client, "under-way"), "incidents.md", tmp_path)


@pytest.mark.system
def test_a_store_without_artifacts_costs_a_warning_and_no_number(
    store: Path, client: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    MLflowSink().open(run_info(store, run_id="first"))
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the artifacts should go")
    theirs = client.create_run(client.create_experiment("blocked", artifact_location=f"file://{blocked}"))

    send_alarms(MLflowSink(f"sqlite:///{store}/mlflow.db", run_id=theirs.info.run_id), run_info(store))

    run = client.get_run(theirs.info.run_id)
    assert run.data.metrics["policy/kl"] == pytest.approx(0.06)
    assert "policy/kl_spike" in run.data.tags["esper.verdict"]
    assert len([entry for entry in caplog.records if "does not store incidents" in entry.message]) == 1


def test_the_page_is_bounded_and_what_it_says_is_not_taken_for_markup() -> None:
    storm = IncidentCards()
    storm.add(*(an_alarm(update, text="a | b <b>") for update in range(2 * MAX_ALARMS)))

    assert len(storm.alarms) == MAX_ALARMS
    assert "a \\| b &lt;b>" in storm.page()


def test_an_incident_whose_cause_is_found_later_is_called_by_it() -> None:
    late = IncidentCards([WARNING, an_alarm(3, cause="policy/kl_spike")])

    assert late.page().splitlines()[2] == "## Incident 1, since update 3: policy/kl\\_spike"


@pytest.mark.system
def test_each_backend_shows_the_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The outcome sentence is a line in the console, a text in TensorBoard, and a tag and the description in MLflow."""
    text = "learning: return 21 -> 340 in 48 updates"
    event = JournalEvent("outcome", {"outcome": "learning", "text": text}, 1, record(1).axes)
    for sink in (ConsoleSink(), TensorBoardSink(), MLflowSink()):
        sink.open(run_info(tmp_path))
        sink.write([record(1)])
        sink.outcome(event)
        sink.close(RunStatus.FINISHED)

    run = mlflow_run(mlflow_client(tmp_path), "abc123")

    assert f"outcome  update 1  {text}" in capsys.readouterr().out
    assert pages(tmp_path / "tensorboard") == [(1000, "# Learning: return 21 -> 340 in 48 updates\n\nNo alarm was raised.\n")]
    assert run.data.tags["esper.verdict"] == "learning (no alarms): return 21 -> 340 in 48 updates"
    assert run.data.tags["mlflow.note.content"].startswith("**Learning: return 21 -> 340 in 48 updates**")
