"""Every example runs on its own, as a user would start it, and does what it says."""

import csv
import os
import re
import runpy
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from forked import run_python

from esper_telemetry import RunStatus, Sink, read_run
from esper_telemetry.testing import CHECKS, check_sink

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.system]

EXAMPLES = Path(__file__).parents[1] / "examples"
TWO_UPDATES = ("--total-steps", "2048")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(name: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", *TWO_UPDATES, "--run-dir", "run", *options])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_every_example_is_tested() -> None:
    text = Path(__file__).read_text(encoding="utf-8")

    tested = re.findall(r"\"(?:examples/)?(\w+)(?:\.py)?\"|def test_(\w+)", text)

    assert {path.stem for path in EXAMPLES.glob("*.py")} <= {name for pair in tested for name in pair}


def test_cartpole(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The run is in TensorBoard, and the last line of output names the journal."""
    run("cartpole", monkeypatch)

    result = read_run("run")
    assert result.status is RunStatus.FINISHED
    assert result.info.name == "cartpole"
    assert "episode/return_mean_100" in result.records[-1].values
    assert len(list((here / "run/tensorboard").glob("events.*"))) == 1
    assert capfd.readouterr().out.endswith(f"journal: {here / 'run/journal.jsonl'}\n")


def test_custom_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.9 · 0.7^n is below 0.3, the middle of the ramp, from the fifth update on: the third such update in a row raises the alarm."""
    run("custom_alarm", monkeypatch)

    (alarm,) = read_run("run").alarms
    assert (alarm.type, alarm.since, alarm.axes.update) == ("explore/coverage_lost", 5, 7)


def test_custom_alarm_takes_other_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 0.8 and 0.4 the middle is 0.6: 0.9 · 0.7^2 is below it."""
    run("custom_alarm", monkeypatch, "--threshold", "coverage_low=0.8", "coverage_high=0.4")

    (alarm,) = read_run("run").alarms
    assert (alarm.since, alarm.axes.update) == (3, 5)


def test_custom_sink(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("custom_sink", monkeypatch, "--csv", "ppo.csv")

    with (here / "ppo.csv").open() as file:
        rows = list(csv.DictReader(file))
    records = read_run("run").records
    assert [int(row["env_step"]) for row in rows] == [record.axes.env_step for record in records]
    assert [float(row["policy/kl"]) for row in rows] == [record.values["policy/kl"] for record in records]


def test_custom_metric(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    run("custom_metric", monkeypatch)

    result = read_run("run")
    assert {"surprise/mean", "surprise/worst", "my/threads"} <= result.records[0].values.keys()
    assert result.records[0].values["surprise/worst"] >= result.records[0].values["surprise/mean"] > 0
    described = result.info.describe("surprise/mean")
    assert described is not None
    assert described.question == "How wrong is one step's expectation?"
    assert "'surprise/mean': " in capfd.readouterr().out


def test_memory(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Both policies are trained and compared; no files are left over."""
    monkeypatch.setattr(sys, "argv", ["memory.py", "--total-steps", "2000"])
    runpy.run_path(str(EXAMPLES / "memory.py"), run_name="__main__")

    lines = capfd.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if "mean return of the last" in line] == ["lstm", "mlp"]
    assert list(here.iterdir()) == []


def test_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the action has its own head, and the second part stays within its bounds."""
    run("pixels", monkeypatch)

    result = read_run("run")
    keys = {"policy/head/side/entropy_norm", "policy/head/height/std/mean", "policy/head/height/bound_frac"}
    assert result.status is RunStatus.FINISHED
    assert keys <= result.records[-1].values.keys()


def test_resume(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When started again with more steps, it continues in the same journal from the first run's checkpoint."""
    run("resume", monkeypatch)
    run("resume", monkeypatch, "--total-steps", "4096")

    result = read_run("run")
    assert [record.axes.update for record in result.records] == list(range(1, len(result.records) + 1))
    assert result.records[-1].axes.env_step >= 4096
    assert result.info.resumed_from is not None
    assert result.info.resumed_from["update"] == result.info.resumed_from["recorded"] >= 2
    assert len(list((here / "run/tensorboard").glob("events.*"))) == 2


def test_unedited() -> None:
    """Under `run` it prints the same output as on its own, and a journal is written."""
    script = [str(EXAMPLES / "unedited.py"), *TWO_UPDATES]
    alone = run_python(*script)
    watched = run_python("-m", "esper_telemetry", "run", "--run-dir", "run", *script)

    assert alone.returncode == watched.returncode == 0, watched.stderr
    assert watched.stdout == alone.stdout
    result = read_run("run")
    assert [record.axes.env_step for record in result.records] == [1024, 2048]
    keys = {"policy/kl", "grad/clip/coef", "episode/return_mean_100", "value/explained_variance", "policy/entropy_norm"}
    assert all(keys <= record.values.keys() for record in result.records)


def test_old_logs(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A table in SB3's format, in which the policy's KL jumps."""
    rows = [f"{128 * place},{0.01 if place < 20 else 2.0},-0.02" for place in range(1, 31)]
    (here / "progress.csv").write_text("\n".join(["time/total_timesteps,train/approx_kl,train/policy_gradient_loss", *rows]))
    monkeypatch.setattr(sys, "argv", ["old_logs.py", "csv:progress.csv"])
    runpy.run_path(str(EXAMPLES / "old_logs.py"), run_name="__main__")

    printed = capfd.readouterr().out
    assert "30 updates of Stable-Baselines3" in printed or "29 updates of Stable-Baselines3" in printed
    assert "policy/kl_spike: Since update" in printed


@pytest.mark.trl
@pytest.mark.filterwarnings("ignore")  # transformers and TRL emit deprecation warnings
def test_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four optimizer steps make two updates of 32 completions each."""
    pytest.importorskip("trl", reason="the example needs esper-telemetry[trl]")
    monkeypatch.setattr(sys, "argv", ["examples/language_model.py", "--steps", "4", "--run-dir", "run"])
    runpy.run_path(str(EXAMPLES / "language_model.py"), run_name="__main__")

    result = read_run("run")
    assert [record.axes.env_step for record in result.records] == [32, 64]
    assert all({"policy/kl", "lm/entropy"} <= record.values.keys() for record in result.records)


OTHER_TRAINERS = (
    ("sb3", "stable_baselines3", "env_step", [1024, 2048], "policy/kl sb3/train/approx_kl"),
    ("rsl_rl_runner", "rsl_rl", "env_step", [1024, 2048], "policy/kl grad/actor/norm_preclip rsl_rl/loss/surrogate"),
    ("rsl_rl_runner --writer", "rsl_rl", "env_step", [1024, 2048], "policy/kl grad/actor/norm_preclip rsl_rl/loss/surrogate"),
    ("skrl_agent", "skrl", "env_step", [1024, 2048], "policy/kl skrl/loss/policy_loss"),
    ("rl_games_runner", "rl_games", "env_step", [1024, 2048], "policy/kl rl_games/losses/a_loss"),
    ("torchrl_loop", "torchrl", "gradient_step", [40, 80], "policy/kl adv/raw/std episode/return_mean_100"),
    ("rllib_runner", "ray", "update", [1, 2], "policy/kl rllib/learners/default_policy/vf_loss"),
)


@pytest.mark.filterwarnings("ignore")  # rl_games, tensorboardX, TorchRL and Ray emit deprecation warnings
@pytest.mark.parametrize(
    ("example", "package", "axis", "values", "keys"),
    [
        (
            "own_loop",
            "gymnasium",
            "gradient_step",
            [16, 32],
            "adv/raw/std value/explained_variance grad/clip/coef policy/kl opt/lr",
        ),
        ("custom_adapter", "gymnasium", "env_step", [512, 1024, 1536, 2048], "adv/raw/std policy/entropy grad/actor/norm_preclip opt/lr"),
        *(pytest.param(*row, marks=pytest.mark.sb3) for row in OTHER_TRAINERS),
    ],
)
def test_runs_of_other_loops(example: str, package: str, axis: str, values: list[int], keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics of every part of the update are recorded; tests/adapters compares their numbers."""
    name, *options = example.split()
    pytest.importorskip(package, reason=f"needs {package}")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # otherwise Ray writes a token to the home directory
    run(name, monkeypatch, *options)

    result = read_run("run")
    assert result.status is RunStatus.FINISHED
    assert [getattr(record.axes, axis) for record in result.records] == values
    assert all({*keys.split()} <= record.values.keys() for record in result.records)


@pytest.mark.sb3
def test_verl_runner() -> None:
    """The program does not name telemetry: verl's driver, an actor of Ray, loads the plugin of the installed package."""
    pytest.importorskip("transfer_queue", reason="needs esper-telemetry[verl]")
    options = ["--steps", "2", "--workers", "2", "--critic", "--run-dir", "run", "--sinks", "console"]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "verl_runner.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    assert done.returncode == 0, done.stderr[-4000:]
    result = read_run("run")
    assert result.status is RunStatus.FINISHED
    assert [record.axes.env_step for record in result.records] == [64, 128]
    assert all({"policy/kl", "value/explained_variance"} <= record.values.keys() for record in result.records)


def test_on_alarm(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The learning rate was raised by mistake; the callback restores it, and the journal marks the change as deliberate."""
    run("on_alarm", monkeypatch, "--total-steps", "32768")

    result = read_run("run")
    rates = [record.values["opt/lr"] for record in result.records]
    mistake = 1 + next(i for i, rate in enumerate(rates) if rate > rates[0])
    assert rates[mistake - 1] > 20 * rates[0] > 20 * rates[-1]
    assert next(event.data["reason"] for event in result.events if event.type == "intervention").startswith("restored the")
    assert result.alarms[0].event == "raise" and result.alarms[0].since >= mistake
    assert f"raise: {result.alarms[0].type} since update" in capfd.readouterr().out


PLUGINS = {"swanlab": "swanlab:my-project?mode=offline", "clearml": "clearml:my-project?offline=true"}
LONG_CHECKS = ("many records", "sigterm")


def plugin_sink(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the class that the entry point of a plugin in `examples/` names."""
    plugin = EXAMPLES / f"{name}_plugin"
    project = tomllib.loads((plugin / "pyproject.toml").read_text())["project"]
    monkeypatch.syspath_prepend(str(plugin))
    return EntryPoint(name, project["entry-points"]["esper_telemetry.sinks"][name], "esper_telemetry.sinks").load()


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_package_has_an_entry_point_that_is_a_sink(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend's package need not be there to make the sink, only to open it."""
    kind = plugin_sink(name, monkeypatch)

    sink: Any = kind.from_uri("my-project", {})

    assert sink.name == f"{name}:my-project"
    assert isinstance(sink, Sink)
    assert check_sink(kind, only=["protocol"]) == ("protocol",)


@pytest.mark.filterwarnings("ignore")  # what a backend's packages deprecate
@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_passes_the_kit(name: str, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    pytest.importorskip(name, reason="the plugin's own dependency")
    for variable in ("SWANLAB_SAVE_DIR", "CLEARML_CACHE_DIR"):
        monkeypatch.setenv(variable, str(here))
    kind, options = plugin_sink(name, monkeypatch), PLUGINS[name].partition("?")[2].split("=")

    chosen = check_sink(lambda: kind.from_uri("my-project", dict([options])), leave_out=LONG_CHECKS)

    assert set(chosen) == CHECKS.keys() - set(LONG_CHECKS)
