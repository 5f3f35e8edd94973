"""The dashboard of a run as a W&B workspace: real objects of `wandb-workspaces`, saved on a fake server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from fake_wandb import ENTITY, KEY, FakeWandb
from run_cli import CommandOutput
from sink_runs import EVERY, HISTOGRAM, record, run_info

from esper_telemetry.cli.arguments import WrongUse
from esper_telemetry.cli.main import run as run_command
from esper_telemetry.cli.stored_runs import keys
from esper_telemetry.core.record import MetricInfo, RunInfo
from esper_telemetry.delivery.status import Cursor, Cursors
from esper_telemetry.journal.read import read_run
from esper_telemetry.sinks import WandbSink, sink_protocol
from esper_telemetry.sinks.pages import safe
from esper_telemetry.sinks.wandb.workspace import specification, workspace
from esper_telemetry.testing.sinks import journalled

pytestmark = [
    pytest.mark.filterwarnings("ignore:Pydantic V1 style `@validator` validators"),  # in wandb-workspaces 0.4
    pytest.mark.system,
]

SEEN = {"policy/kl": 0.01, "policy/kl_max": 0.02, "policy/clip_frac": 0.1, "episode/return_mean_100": 10.0, "alarm/active": 0.0}


def spec_of(run: RunInfo, keys: set[str], **settings: Any) -> Any:
    return specification(workspace(run, keys, project="walker", **settings))["spec"]["section"]


def sections(spec: Any) -> dict[str, list[Any]]:
    return {section["name"]: section["panels"] for section in spec["panelBankConfig"]["sections"]}


def axes_and_keys(panels: list[Any]) -> list[tuple[str, list[str]]]:
    """Return the x-axis and the keys of each chart that names its keys."""
    return [(panel["config"]["xAxis"], panel["config"]["metrics"]) for panel in panels if panel["config"].get("metrics")]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has been sent to the project `walker`."""
    journalled(run_info(tmp_path / "run", metrics=EVERY), [record(1, SEEN, {"ret/hist": HISTOGRAM})])
    Cursors(tmp_path / "run").save("wandb:walker", Cursor(records=1))
    return tmp_path / "run"


@pytest.fixture
def server() -> Iterator[FakeWandb]:
    one = FakeWandb()
    yield one
    one.stop()


def command(run_dir: Path, *options: str, server: FakeWandb | None = None) -> CommandOutput:
    """Run `esper-telemetry workspace` as in a terminal, for a user with or without a key for that server."""
    home = run_dir.parent
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": str(home), "NETRC": str(home / "netrc")}
    if server is not None:
        environment |= {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
    words = [sys.executable, "-m", "esper_telemetry", "workspace", str(run_dir), *options]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    return CommandOutput(done.returncode, done.stdout, done.stderr)


def test_charts_stand_under_the_question_that_they_answer_below_what_its_headlines_mean() -> None:
    dashboard = sections(spec_of(run_info(metrics=EVERY), {*SEEN, "value/r2", "my/key"}))

    questions = ["Is anything wrong?", "Is it learning?", "Is the policy moving too far?", "Is the critic useful?", "Your own: my"]
    assert list(dashboard) == questions
    assert axes_and_keys(dashboard["Is it learning?"]) == [("axis/env_step", ["episode/return_mean_100"])]
    panels, kl = dashboard["Is the policy moving too far?"], EVERY["policy/kl"]
    assert axes_and_keys(panels) == [("axis/update", [key]) for key in ("policy/kl", "policy/clip_frac", "policy/kl_max")]
    assert panels[0]["viewType"] == "Markdown Panel"
    rows = panels[0]["config"]["value"].splitlines()
    assert [row.split("`")[1] for row in rows[2:]] == ["policy/kl", "policy/clip_frac"]
    assert kl.question in rows[2] and safe(kl.action) in rows[2]


def test_alarms_are_drawn_by_their_names_whenever_they_come() -> None:
    panels = sections(spec_of(run_info(metrics=EVERY), {"alarm/active", "alarm/policy/kl_spike"}))["Is anything wrong?"]

    assert axes_and_keys(panels) == [("axis/update", ["alarm/active"])]
    (pattern,) = [panel["config"]["metricRegex"] for panel in panels if "metricRegex" in panel["config"]]
    assert pattern == "^alarm/.+/.+$"
    assert '"alarms/table"' in json.dumps(panels[-1])


def test_every_key_of_the_registry_finds_a_chart() -> None:
    keys = {key for key in EVERY if "{" not in key and not key.startswith("alarm/")}

    charts = [chart for panels in sections(spec_of(run_info(metrics=EVERY), keys)).values() for chart in axes_and_keys(panels)]

    assert sorted(key for _, drawn_keys in charts for key in drawn_keys) == sorted({*keys, "alarm/active"})


def test_the_list_of_runs_says_what_became_of_each() -> None:
    (runs,) = spec_of(run_info(config={"env": "a", "clip": 1}, metrics=EVERY), set(SEEN), entity="me")["runSets"]

    assert list(runs["runFeed"]["columnPinned"]) == [
        "run:displayName",
        "run:state",
        "summary:episode/return_mean_100",
        "summary:alarms/active",
        "summary:alarms/first",
        "summary:alarms/raised",
        "config:env",
    ]
    assert runs["sort"]["keys"] == [{"key": {"section": "run", "name": "createdAt"}, "ascending": False}]
    assert len(runs["pinnedRunIds"]) == 1


def test_what_users_call_their_metrics_cannot_become_markup() -> None:
    mine = {"my/key": MetricInfo("", "<b>|bold</b>?", name="x | `y`", headline=1)}

    panel = sections(spec_of(run_info(metrics=mine), {"my/key"}))["Your own: my"][0]

    assert "<b>" not in panel["config"]["value"]
    assert panel["config"]["value"].splitlines()[2].count(" | ") == 3


def test_the_command_writes_the_specification(run_dir: Path) -> None:
    output = command(run_dir)

    assert (output.code, output.err) == (0, "")
    assert str(run_dir / "wandb_workspace.json") in output.out
    saved = json.loads((run_dir / "wandb_workspace.json").read_text())
    assert (saved["project"], saved["displayName"]) == ("walker", "esper_telemetry")
    panels = [panel for panels in sections(saved["spec"]["section"]).values() for panel in panels]
    assert sorted(key for _, keys in axes_and_keys(panels) for key in keys) == sorted([*SEEN, "ret/hist"])


def test_a_run_without_records_gets_the_charts_of_what_it_declares(tmp_path: Path) -> None:
    journalled(run_info(tmp_path / "new", metrics=EVERY), [], status=None)

    assert {"policy/kl", "value/r2", "lstm/reset_rate"} <= keys(read_run(tmp_path / "new"), WandbSink(project="walker"))


def test_pushed_again_it_is_one_workspace_and_under_another_name_another(run_dir: Path, server: FakeWandb) -> None:
    first, second = command(run_dir, "--push", server=server), command(run_dir, "--push", server=server)
    third = command(run_dir, "--push", "--name", "second", "--entity", "team", server=server)

    assert [(output.code, output.err) for output in (first, second, third)] == [(0, "")] * 3
    assert f"{server.url}/{ENTITY}/walker?nw=" in first.out
    assert first.out == second.out
    (view, other) = server.views.values()
    assert (view["entityName"], view["projectName"], view["displayName"]) == (ENTITY, "walker", "esper_telemetry")
    assert (other["entityName"], other["displayName"], other["type"]) == ("team", "second", "project-view")
    sent, saved = json.loads(view["spec"]), json.loads((run_dir / "wandb_workspace.json").read_text())["spec"]
    assert sections(sent["section"]).keys() == sections(saved["section"]).keys()
    assert KEY not in json.dumps([sent, saved])


def test_a_server_that_does_not_take_it_is_a_failure_in_one_sentence(run_dir: Path, server: FakeWandb) -> None:
    server.status = 500

    output = command(run_dir, "--push", server=server)

    assert output.code == 1
    assert output.err.startswith("esper-telemetry: W&B did not save the workspace: ")
    assert output.err.count("\n") == 1
    assert KEY not in output.err
    assert server.views == {}


def test_without_a_key_nothing_is_written(run_dir: Path) -> None:
    output = command(run_dir, "--push")

    assert output.code == 2
    assert output.err == ("esper-telemetry: --push needs an API key of W&B: run wandb login, or set WANDB_API_KEY\n")
    assert not (run_dir / "wandb_workspace.json").exists()


def test_without_the_package_a_sentence_says_how_to_get_it(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> ModuleSpec | None:
        return None if name == "wandb_workspaces" else ModuleSpec(name, None)

    monkeypatch.setattr(sink_protocol, "find_spec", without)
    needed = r"a W&B workspace needs wandb-workspaces: pip install 'esper-telemetry\[wandb\]'"

    with pytest.raises(WrongUse, match=needed):
        run_command(["workspace", str(run_dir)])

    assert not (run_dir / "wandb_workspace.json").exists()


@pytest.mark.parametrize(
    ("sinks", "output"), [([], "was not sent to any W&B project"), (["wandb:a", "wandb:b"], "was sent to several W&B projects, a, b")]
)
def test_a_project_that_is_not_known_is_asked_for(tmp_path: Path, sinks: list[str], output: str) -> None:
    journalled(run_info(tmp_path / "new", metrics=EVERY), [], status=None)
    for sink in sinks:
        Cursors(tmp_path / "new").save(sink, Cursor())

    with pytest.raises(WrongUse, match=f"{output}: choose the project of the workspace with --project"):
        run_command(["workspace", str(tmp_path / "new")])


@pytest.mark.parametrize(("options", "output"), [(["--project", "a/b"], "got 'a/b'"), (["--name", "\N{SNOWMAN}"], "got '\N{SNOWMAN}'")])
def test_names_that_wandb_refuses_are_named(run_dir: Path, options: list[str], output: str) -> None:
    with pytest.raises(WrongUse, match=output):
        run_command(["workspace", str(run_dir), *options])

    assert not (run_dir / "wandb_workspace.json").exists()
