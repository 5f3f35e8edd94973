import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from backends_read import AXES
from backends_read import wandb_entries as inspect
from permissions import keep_to_permissions
from sink_runs import EVERY, record, run_info

from esper_telemetry.core.record import RunStatus
from esper_telemetry.sinks import PermanentSinkError, WandbSink
from esper_telemetry.sinks.wandb.wandb_run import MAX_WAITING_ROWS
from esper_telemetry.testing.sinks import delivered

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without a W&B login."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "no-config"))


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    """Close open runs, so that none of another module's runs is used here, and none of ours there."""
    wandb.teardown()
    yield
    wandb.teardown()


def of_type(entries: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [entry[kind] for entry in entries if entry["type"] == kind]


def rows(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry["item"] for entry in of_type(entries, "history")]


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """An offline run of two updates that failed, read back."""
    directory = tmp_path_factory.mktemp("offline")
    sink = WandbSink(project="walker", mode="offline", group="sweep", job_type="rank3")
    sink.open(run_info(directory))
    sink.write([record(1)])
    sink.write([record(2, {"my_number": 1.0, "policy/kl": 0.5})])
    sink.close(RunStatus.FAILED)
    return inspect(directory)


def test_returns_are_drawn_over_steps_and_the_policy_over_updates(offline: list[dict[str, Any]]) -> None:
    metrics = [metric for metric in of_type(offline, "metric") if "step_metric" in metric]

    assert {metric.get("glob_name") or metric["name"]: metric["step_metric"] for metric in metrics} == {
        "0_overview/*": "axis/env_step",
        "episode/*": "axis/env_step",
        "policy/*": "axis/update",
        "my_number": "axis/update",
    }


def test_the_first_names_repeat_the_headlines(tmp_path: Path) -> None:
    """W&B orders the sections of its charts by name. `doctor` ignores these keys, because they repeat other numbers."""
    run = run_info(tmp_path, metrics=EVERY)
    sink = WandbSink(mode="offline")
    values = {"policy/kl": 0.5, "adv/grad_corr": 0.1, "episode/return_mean_100": 7.0, "alarm/active": 0.0}
    delivered(sink, run, [record(1, values)])

    entries = inspect(tmp_path)
    names = [name for name in sorted(rows(entries)[0]) if not name.startswith("_")]
    assert names[:3] == [*("0_overview/01 return", "0_overview/02 alarms", "0_overview/04 KL")]
    assert rows(entries)[0][names[0]] == 7.0
    assert sink.stored(run).rows[1].keys() == {*values, *AXES}  # type: ignore[union-attr]


def test_the_run_has_its_name_settings_and_exit_code(offline: list[dict[str, Any]]) -> None:
    run = of_type(offline, "run")[0]

    assert (run["run_id"], run["project"], run["display_name"]) == ("abc123", "walker", "cartpole")
    assert run["config"]["update"]["ppo"] == {"clip": 0.2, "sizes": [64, 64], "anneal": True}
    assert (run["tags"], run["notes"]) == (["demo"], "first try")
    assert (run["run_group"], run["job_type"]) == ("sweep", "rank3")
    assert [record["exit_code"] for record in of_type(offline, "exit")] == [1]


@pytest.mark.system
def test_what_wandb_refuses_costs_that_item_and_no_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tag has at most 64 characters."""
    sink = WandbSink(mode="offline")
    delivered(sink, run_info(tmp_path, tags=("t" * 65, "good"), name="n" * 3000), [record(1, {"policy/kl": 0.5})])

    (run,) = of_type(inspect(tmp_path), "run")[:1]
    assert run["tags"] == ["good"] and len(rows(inspect(tmp_path))) == 1
    (warning,) = [one.getMessage() for one in caplog.records if "does not accept" in one.getMessage()]
    assert warning.startswith("W&B does not accept the tag 'tttt") and "Tags must be between 1 and 64" in warning


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Any]:
    """A run that a user has open."""
    run = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True, console="off"))
    yield run
    run.finish()


def joined(run: Any) -> WandbSink:
    sink = WandbSink(run=run)
    sink.open(run_info(run_id="ours"))
    return sink


def ended(sink: WandbSink, theirs: Any, directory: Path) -> list[dict[str, Any]]:
    """End both, and return all entries."""
    sink.close(RunStatus.FINISHED)
    theirs.finish()
    return inspect(directory)


def logged_pairs(entries: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Return the owner's and the sink's number in each row."""
    return [(row.get("loss"), row.get("axis/update")) for row in rows(entries)]


def test_rows_of_an_owner_who_passes_steps_are_never_lost(theirs: Any, tmp_path: Path, caplog: Any) -> None:
    """The owner logs updates 1, 4 and 5 twice each, with consecutive steps. The newest of our rows in between stays."""
    sink = joined(theirs)
    for update in range(1, 7):
        if update in (1, 4, 5):
            theirs.log({"loss": update}, step=update)
        sink.write([record(update, {"policy/kl": update, f"perf/only_{update}": 1.0})])
        if update in (1, 4, 5):
            theirs.log({"again": update}, step=update)
    entries = ended(sink, theirs, tmp_path)
    assert logged_pairs(entries) == [(1, 3), (4, 4), (5, 6)]
    assert [row["again"] for row in rows(entries)] == [1, 4, 5]
    assert rows(entries)[0].get("perf/only_1") is None
    assert sum("shows only the newest of several" in entry.getMessage() for entry in caplog.records) == 1


Call = Callable[[WandbSink, Any], object]


def ours(*updates: int) -> Call:
    return lambda sink, theirs: sink.write([record(update) for update in updates])


def logs(loss: int, **settings: Any) -> Call:
    return lambda sink, theirs: theirs.log({"loss": loss}, **settings)


def fills(row: int) -> tuple[Call, ...]:
    """Return an owner's two calls for one row, with our record in between."""
    return logs(row, commit=False), ours(row), lambda sink, theirs: theirs.log({"again": row})


@pytest.mark.parametrize(
    ("calls", "pairs"),
    [
        # Without steps: the first record waits for the owner's first call, which shows how the owner counts them.
        (
            (ours(1), logs(1), ours(2), logs(2), ours(3, 4)),
            [(1, None), (None, 1), (None, 2), (2, None), (None, 3), (None, 4)],
        ),
        ((*fills(1), *fills(2)), [(1, 1), (2, 2)]),
        # Steps are seen through the module, too.
        ((lambda *_: wandb.log({"loss": 1}, step=100), ours(1), lambda *_: wandb.log({"loss": 2}, step=200), ours(2)), [(1, 1), (2, 2)]),
        # An owner who never logs gets a row per record.
        (map(ours, range(1, MAX_WAITING_ROWS + 4)), [(None, update) for update in range(1, MAX_WAITING_ROWS + 4)]),
        # Three records wait until an owner who comes late passes a step. The newest joins that row.
        ((ours(1, 2, 3), logs(0, step=0), ours(4), logs(1, step=1)), [(0, 4), (1, None)]),
    ],
    ids=["without steps", "row in two calls", "steps of the module", "no calls", "late"],
)
def test_rows_are_shared_with_the_owner(theirs: Any, tmp_path: Path, calls: Iterable[Call], pairs: list[tuple[Any, Any]]) -> None:
    sink = joined(theirs)
    for call in calls:
        call(sink, theirs)

    assert logged_pairs(ended(sink, theirs, tmp_path)) == pairs


def test_a_joined_run_stays_open_as_it_was(theirs: Any, tmp_path: Path) -> None:
    sink = joined(theirs)
    assert (sink.in_process, sink.name) == (True, f"wandb:run/{theirs.id}")
    sink.write([record(1)])
    sink.close(RunStatus.FAILED)

    theirs.log({"loss": 1})
    theirs.finish()

    entries = inspect(tmp_path)
    assert [entry["exit_code"] for entry in of_type(entries, "exit")] == [0]  # a run of a second also has its `runtime`
    assert not any("glob_name" in metric for metric in of_type(entries, "metric"))
    assert [config["update"]["esper_telemetry"]["run_id"] for config in of_type(entries, "config")] == ["ours"]


def test_a_run_that_its_owner_has_ended_takes_no_more(theirs: Any) -> None:
    sink = joined(theirs)
    theirs.finish()

    with pytest.raises(PermanentSinkError, match="the W&B run accepts no more rows"):
        sink.write([record(1)])


KILL_CORE = """
import os, pathlib, signal, sys, time
from sink_runs import EVERY, record, run_info
from esper_telemetry.core.record import RunStatus
from esper_telemetry.sinks import DeadClientError, WandbSink

sink = WandbSink(mode="offline")
sink.prepare_child()
sink.open(run_info(pathlib.Path(sys.argv[1])))
ours = f"PPid:\\t{os.getpid()}\\n"
children = [path.parent for path in pathlib.Path("/proc").glob("[0-9]*/status") if ours in path.read_text()]
(core,) = [path for path in children if b"wandb-core" in (path / "cmdline").read_bytes()]
os.kill(int(core.name), signal.SIGKILL)

def attempt(action):
    try:
        action()
    except DeadClientError as error:
        return str(error).split(":")[0]

for update in range(1, 100):  # the first row after the death may still go into the socket
    said = attempt(lambda: sink.write([record(update)]))
    if said:
        break
    time.sleep(0.1)
print(said, attempt(lambda: sink.close(RunStatus.FINISHED)), sep="\\n")
"""


@pytest.mark.system
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="finds the client's process in /proc")
def test_a_dead_client_process_is_told_apart(tmp_path: Path) -> None:
    """In a separate process, because W&B is unusable in a process whose client has died.

    The process also has a foreign client process, which a sink in a child process does not use.
    """
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    command = [sys.executable, "-c", KILL_CORE, str(tmp_path)]

    environment = {**os.environ, "PYTHONPATH": path, "WANDB_SERVICE": "3-1-unix-/nowhere/socket"}

    done = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert done.stdout.splitlines() == ["the W&B client process is gone"] * 2


class FakeInit:
    """Replaces `wandb.init`, which would need a network or a full disk."""

    def __init__(self, fails: Callable[[dict[str, Any]], bool], sync_dir: Path) -> None:
        self.fails = fails
        self.calls: list[dict[str, Any]] = []
        self.settings = type("Settings", (), {"sync_dir": str(sync_dir)})

    def __call__(self, **settings: Any) -> Any:
        self.calls.append(settings)
        if self.fails(settings):
            raise wandb.errors.CommError("no route to host")
        return self

    def teardown(self) -> None:
        """Replaces the end of the client's process, which other tests still use."""

    def define_metric(self, *names: str, **settings: object) -> None:
        """Define nothing."""


@pytest.mark.parametrize(("mode", "key", "used"), [("auto", False, "offline"), ("auto", True, "online"), ("online", False, "online")])
def test_without_a_key_the_run_is_offline(mode: str, key: bool, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init = FakeInit(lambda settings: False, tmp_path / "wandb")
    monkeypatch.setattr(wandb, "init", init)
    if key:
        monkeypatch.setattr(wandb, "login", lambda **settings: True)  # the real function would ask the server for the name

    WandbSink(mode=mode).open(run_info(tmp_path))

    assert [call["mode"] for call in init.calls] == [used]


def test_with_a_key_that_is_none_the_run_is_offline_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "garbage")
    sink = WandbSink()
    delivered(sink, run_info(tmp_path), [record(1)])

    assert len(rows(inspect(tmp_path))) == 1
    assert "W&B refuses the key that is set" in caplog.text


def test_without_a_server_the_run_is_offline_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.teardown()  # a run that another test left open would need the id
    init = FakeInit(lambda settings: settings["mode"] == "online", tmp_path / "wandb")
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "teardown", init.teardown)

    WandbSink(mode="online").open(run_info(tmp_path))

    assert [(call["mode"], call["id"]) for call in init.calls] == [("online", "abc123"), ("offline", "abc123")]
    assert "W&B cannot be reached (CommError: no route to host); the run is kept offline" in caplog.text


@pytest.mark.system
def test_a_run_that_lands_elsewhere_is_reported(tmp_path: Path) -> None:
    """W&B cannot write into the directory, and uses the system's temporary directory."""
    run_dir, temporary = tmp_path / "run", tmp_path / "temporary"
    run_dir.mkdir(mode=0o555)
    temporary.mkdir()
    script = (
        "import sys, pathlib, sink_runs; from esper_telemetry import RunStatus; from esper_telemetry.sinks import WandbSink\n"
        "sink = WandbSink(mode='offline'); sink.open(sink_runs.run_info(pathlib.Path(sys.argv[1]))); sink.close(RunStatus.FINISHED)"
    )

    with_a_client_of_its_own = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}

    done = subprocess.run(
        [sys.executable, "-c", script, str(run_dir)],
        env={**with_a_client_of_its_own, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=keep_to_permissions,
    )

    (where,) = temporary.glob("wandb/offline-run-*")
    assert f"W&B cannot write to {run_dir} and keeps the run in {where}" in done.stderr


@pytest.mark.parametrize(
    ("mode", "environment", "reason"),
    [
        ("offline", {}, "the sink has mode=offline"),
        ("auto", {"WANDB_MODE": "offline"}, "WANDB_MODE=offline is set"),
        ("auto", {}, "no API key was found"),
        ("online", {"WANDB_API_KEY": "x" * 40}, "the server could not be reached or refused the API key"),
    ],
)
def test_the_place_of_an_offline_run_says_why_it_is_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, environment: dict[str, str], reason: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    place = WandbSink(mode=mode).place(run_info(tmp_path))
    assert reason in place.note
    assert place.command == f"wandb sync {tmp_path}/wandb/offline-run-*-abc123"
