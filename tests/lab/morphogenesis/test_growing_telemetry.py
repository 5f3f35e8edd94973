"""Telemetry of morphogenesis: records and metrics of scripted and learning controllers, and the command line."""

from pathlib import Path

import pytest
import torch
from growing import recorded, tiny
from run_cli import run_cli

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.lab.morphogenesis.controllers import ScriptedRun
from esper_telemetry.lab.morphogenesis.environment import Morphogenesis
from esper_telemetry.lab.morphogenesis.growth_telemetry import GrowthStep
from esper_telemetry.lab.morphogenesis.metrics.environment_metrics import environment_stats
from esper_telemetry.lab.morphogenesis.metrics.seeds import gate_stats, seed_stats

ACTIVE = {"seed/active", "host/accuracy", "env/op/wait", "env/reward/rent", "seed/stage/training"}


def scripted(policy: str, *, num_steps: int = 16, num_envs: int = 8) -> ScriptedRun:
    return ScriptedRun(tiny(num_envs), PPOConfig(policy=policy, num_steps=num_steps))


@pytest.mark.system
@pytest.mark.parametrize("policy", ["heuristic", "oracle", "random"])
def test_scripted_runs_have_records_without_metrics_of_a_policy(policy: str, tmp_path: Path) -> None:
    records = recorded(scripted(policy), tmp_path / "run", 4 * 16 * 8)

    assert [record.axes.env_step for record in records] == [128, 256, 384, 512]
    assert all(record.values.keys() >= ACTIVE for record in records)
    assert [record.values["episode/count"] for record in records] == [0, 8, 0, 8]
    assert [("env/score" in record.values) for record in records] == [False, True, False, True]
    assert not [key for record in records for key in record.values if key.startswith(("policy/", "value/", "adv/"))]


def test_components_of_the_reward_and_stages_of_the_slots_add_up(tmp_path: Path) -> None:
    (record,) = recorded(scripted("oracle", num_steps=32), tmp_path / "run", 32 * 8)

    parts = sum(value for key, value in record.values.items() if key.startswith("env/reward/"))
    assert 32 * parts == pytest.approx(record.values["episode/return_mean"], rel=1e-4)
    assert sum(value for key, value in record.values.items() if key.startswith("seed/stage/")) == pytest.approx(2)
    assert sum(value for key, value in record.values.items() if key.startswith("env/op/")) == pytest.approx(1)


@pytest.mark.parametrize("level", ["normal", "debug"])
def test_single_hosts_and_seeds_are_shown_at_debug(level: str, tmp_path: Path) -> None:
    """Values after the last step. Rewards add up to the return, and an update is half an episode."""
    run, steps = scripted("oracle", num_envs=3), list[GrowthStep]()
    run.hooks.on(GrowthStep, steps.append)
    (first, second), last = recorded(run, tmp_path / "run", 2 * 16 * 3, level=level), steps[-1]
    single = {key: value for key, value in second.values.items() if "/each/" in key}
    if level == "normal":
        assert not single
        return
    assert [single[f"host/each/{env}/accuracy"] for env in range(3)] == pytest.approx(last.hosts["val_accuracy"].tolist())
    places = [f"{env}_{slot}" for env in range(3) for slot in range(2)]
    assert [single[f"seed/each/{place}/stage"] for place in places] == last.seeds["stage"].flatten().tolist()
    paid = sum(record.values[f"host/each/{env}/reward"] for record in (first, second) for env in range(3))
    assert paid / 3 == pytest.approx(second.values["episode/return_mean"], rel=1e-4)


@pytest.mark.system
@pytest.mark.parametrize("level", ["off", "debug"])
def test_telemetry_does_not_change_training(level: str, tmp_path: Path) -> None:
    def weights(telemetry: Telemetry | None) -> list[torch.Tensor]:
        env = tiny(4)
        config = PPOConfig(policy="lstm", num_steps=16, num_epochs=1, num_minibatches=2, lstm_size=8, hidden_sizes=(8,))
        trainer = PPO(env, config)
        if telemetry is not None:
            attach(telemetry, trainer)
        trainer.learn(3 * 16 * 4)
        return [env.colony.hosts, env.colony.seeds, *(p.detach() for p in trainer.policy.parameters())]

    with Telemetry(run_dir=tmp_path / "run", offload=False, level=level) as telemetry:
        with_telemetry = weights(telemetry)

    assert all(torch.equal(a, b) for a, b in zip(with_telemetry, weights(None), strict=True))


def test_seeds_are_counted_by_hand() -> None:
    """Two steps, one environment, two slots. Slot 0 is germinated, then pruned; slot 1 is fossilised. An episode has two steps."""
    unknown = torch.nan
    seeds = {
        "stage": torch.tensor([[[2, 5]], [[7, 6]]]),
        "life": torch.tensor([[[1, 8]], [[0, 9]]]),
        "alpha": torch.tensor([[[0.0, 0.5]], [[0.0, 1.0]]]),
        "blueprint": torch.tensor([[[1, 2]], [[0, 3]]]),
        "born": torch.tensor([[[True, False]], [[False, False]]]),
        "pruned": torch.tensor([[[False, False]], [[True, False]]]),
        "fossilized": torch.tensor([[[False, False]], [[False, True]]]),
        "norm": torch.tensor([[[unknown, 2.0]], [[unknown, 4.0]]]),
        "exploding": torch.tensor([[[unknown, 0.2]], [[unknown, 0.6]]]),
        "vanishing": torch.tensor([[[unknown, 0.0]], [[unknown, 0.0]]]),
        "sustained": torch.tensor([[[unknown, 0.0]], [[unknown, 0.1]]]),
        "ratio": torch.full((2, 1, 2), unknown),
        "contribution": torch.tensor([[[unknown, 0.1]], [[unknown, 0.3]]]),
        "shapley": torch.tensor([[[unknown, 0.2]], [[unknown, 0.2]]]),
        "cause": torch.tensor([[[-1, 0]], [[-1, 1]]]),
    }
    labels = {"stage": [f"s{i}" for i in range(10)], "cause": ["ok", "dormant"]}

    values = {key: value for group in seed_stats(seeds, labels, horizon=2) for key, value in group.values().items()}

    expected = {
        "seed/active": 1.5,
        "seed/germinated": 1,
        "seed/germination_rate": 1,
        "seed/success_frac": 0.5,
        "seed/alpha": 0.75,
        "seed/life": 6,
        "seed/grad/norm": 3,
        "seed/exploding": 0.6,
        "seed/exploding_sustained": 0.1,
        "seed/exploding_frac": 0.5,
        "seed/largest/environment": 0,
        "seed/largest/slot": 1,
        "seed/largest/stage": 6,
        "seed/largest/blueprint": 3,
        "seed/contribution": 0.2,
        "seed/contribution_min": 0.1,
        "seed/shapley/mean": 0.2,
        "seed/cause/dormant": 0.5,
        "seed/stage/s6": 0.5,
    }
    assert {key: values[key] for key in expected} == pytest.approx(expected)
    assert "seed/intensity_ratio" not in values


def test_gates_are_counted_by_hand() -> None:
    """One gate is tested three times and passed once. The other gate is never tested."""
    answers = {"g2": torch.tensor([[0, 1], [-1, 0]]), "g5": torch.full((2, 2), -1)}

    values = gate_stats(answers).values()

    assert values["seed/gate/g2/asked"] == 3 and values["seed/gate/g2/pass_frac"] == pytest.approx(1 / 3)
    assert values["seed/gate/g5/asked"] == 0 and "seed/gate/g5/pass_frac" not in values


def test_nonfinite_data_do_not_raise() -> None:
    env = tiny(2)
    names = ("score", "val_accuracy", "best", "growth", "nonfinite", "lobotomy", "divergence", "decides")
    hosts = {name: torch.full((3, 2), torch.nan) for name in names} | {"op": torch.zeros(3, 2, dtype=torch.int64)}
    hosts["ended"] = torch.tensor([False, False, True]).unsqueeze(1).expand(3, 2)
    stages = torch.zeros(3, 2, env.slot_count, dtype=torch.int64)

    values_by_group = [group.values() for group in environment_stats(hosts, {"rent": hosts["score"]}, stages, ops=["wait"])]

    assert not [key for values in values_by_group for key in values if key == "env/score"]


def test_the_environment_is_made_by_name() -> None:
    env = make_env("morphogenesis", num_envs=2, task="text")

    assert isinstance(env, Morphogenesis) and env.colony.task.name == "text"


@pytest.mark.system
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("policy", ["lstm", "heuristic"])
def test_the_command_line_trains_and_runs_scripts(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--num-envs", "4", "--num-steps", "8", "--total-steps", "64", "--run-dir", "run")

    code, _, error = run_cli(["train", "--env", "morphogenesis", "--task", "digits", "--policy", policy, *options], capfd)

    assert code == 0, error
    records = read_run(tmp_path / "run").records
    assert [record.axes.env_step for record in records] == [32, 64]
    assert "host/accuracy" in records[-1].values and ("policy/kl" in records[-1].values) == (policy == "lstm")
