"""Outcomes of short real runs: learning, a policy that does not move, a crash, and a user's own loop without returns."""

import json
from pathlib import Path
from typing import Any

import pytest
from run_cli import run_cli

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.journal.read import last_outcome
from esper_telemetry.metrics.episodes import episode_stats
from esper_telemetry.testing import MemorySink
from esper_telemetry.views.compare.compared_runs import read_compared
from esper_telemetry.views.report import position
from esper_telemetry.views.run_view import open_view

pytestmark = pytest.mark.system


def train(run_dir: Path, steps: int, **settings: Any) -> MemorySink:
    """Train CartPole and return what the sinks received."""
    memory = MemorySink()
    config = PPOConfig(**{"num_steps": 128, "learning_rate": 2.5e-3, "num_epochs": 8, "seed": 1, **settings})
    with Telemetry([memory], run_dir=run_dir) as telemetry:
        trainer = PPO(make_env("CartPole-v1", num_envs=8), config)
        attach(telemetry, trainer)
        trainer.learn(total_steps=steps)
    return memory


def diagnosis(run_dir: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    command = run_cli(["diagnose", run_dir, *options], capsys)
    assert command.code == 0
    return " ".join(command.out.split())


def test_a_run_that_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = train(tmp_path / "run", 30_000)

    text = diagnosis(tmp_path / "run", capsys)
    kinds = [event.data["outcome"] for event in memory.outcomes]
    last = last_outcome(tmp_path / "run")

    assert "learning" in kinds
    assert kinds[-1] in ("learning", "converged", "solved")
    assert last is not None and last.data == memory.outcomes[-1].data
    assert str(last.data["text"])[1:] in text and "checks passed" in text
    assert read_run(tmp_path / "run").info.facts["reward_threshold"] == 475


@pytest.mark.usefixtures("one_core")
def test_a_policy_that_does_not_move_is_flat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", 26_000, learning_rate=1e-9)

    data = json.loads(diagnosis(tmp_path / "run", capsys, "--json"))

    assert data["outcome"]["outcome"] == "flat"
    assert [incident["cause"] for incident in data["incidents"]] == ["policy/kl_stall"] or data["unexplained"]


def test_a_loop_that_crashes_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = MemorySink()
    with pytest.raises(KeyError), Telemetry([memory], run_dir=tmp_path / "run") as telemetry:
        for update in range(1, 31):
            telemetry.observe(episode_stats([float(update), update + 1.0] * 6, [10, 11] * 6))
            telemetry.flush(env_step=1000 * update)
        raise KeyError("joint 7")

    text = diagnosis(tmp_path / "run", capsys)

    assert [event.data["outcome"] for event in memory.outcomes] == ["learning", "failed", "failed"]
    assert "/run: 30 updates, failed The run failed at update 31: KeyError: 'joint 7'." in text


def test_a_loop_without_returns_says_how_to_report_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Telemetry([], run_dir=tmp_path / "run") as telemetry:
        for update in range(1, 31):
            telemetry.log({"policy/kl": 0.01})
            telemetry.flush(env_step=1000 * update)

    text = diagnosis(tmp_path / "run", capsys)
    everything = diagnosis(tmp_path / "run", capsys, "--all")

    assert (
        "Too short to tell: no returns are reported: observe esper_telemetry.metrics.episode_stats(returns, lengths) after each rollout"
        in text
    )
    assert "questions could not be answered, as values were not reported; --all lists them." in text
    assert 'Some of them need only facts that you know: Telemetry(facts={"precision": ...}), ' in text
    assert (
        "reward/constant: no record has reward/std, reward/absmax; supplied by "
        "telemetry.observe(esper_telemetry.metrics.reward_stats(...))" in everything
    )
    assert 'the facts of the run lack total_steps; supplied by Telemetry(facts={"total_steps": ...})' in everything
    assert "lstm" not in everything


def test_the_return_is_one_number_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Thirty updates of 12 episodes with returns of 10, 20, ..., 300: the last hundred have a mean of 263.2, as in `test_outcome.py`."""
    memory = MemorySink()
    with Telemetry(["console", memory], run_dir=tmp_path / "run") as telemetry:
        for update in range(1, 31):
            telemetry.observe(episode_stats([10.0 * update] * 12, [10 * update] * 12))
            telemetry.flush(env_step=1200 * update)
    printed = capsys.readouterr().out

    view, run = open_view(tmp_path / "run"), read_compared(str(tmp_path / "run"))
    last = last_outcome(tmp_path / "run")
    assert last is not None and last.data["last"] == 263.2
    assert view.outcome.last == view.last["episode/return_mean_100"] == run.final_return("episode/return_mean", 1e9)
    assert memory.records[-1].values["episode/return_mean_100"] == 263.2
    assert position(view)["return"] == "263.2"
    assert "return 263.2" in printed and "Learning: return 20 -> 263 in 30 updates" in printed
