"""Attaching: the trainer's events become records, wherever they are summarised, until telemetry is detached."""

from pathlib import Path
from typing import Any

import pytest
from attached_run import learned, untimed
from torch import Tensor

from esper_telemetry import PPO, Level, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.events import Hooks, OptimizerStep, RolloutEnd
from esper_telemetry.ppo.trainer_replay import TrainerReplay


def trainer(env: str = "CartPole-v1", **settings: Any) -> PPO:
    config = PPOConfig(num_steps=32, num_epochs=2, num_minibatches=2, **settings)
    return PPO(make_env(env, num_envs=4), config)


def values_of(run_dir: Path, *, offload: bool, level: str = "normal", **settings: Any) -> list[dict[str, float]]:
    """Return the records' values of some updates, without values that depend on the clock."""
    return [untimed(record.values) for record in learned(trainer(**settings), run_dir, 3 * 128, offload=offload, level=level).records]


@pytest.mark.system
@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"shared_trunk": True, "entropy_coef": 0.01}, set()),
        pytest.param({"max_grad_norm": None, "policy": "lstm"}, set(), marks=pytest.mark.slow),
        (
            {"policy": "lstm", "lstm_size": 8, "env": "cue-recall", "level": "debug", "normalize_observations": True},
            {"policy/kl_exact", "policy/kl_post", "policy/entropy_grad_ratio", "norm/obs/clip_frac"},
        ),
    ],
)
def test_the_worker_measures_what_the_trainer_would(tmp_path: Path, settings: dict[str, Any], keys: set[str]) -> None:
    in_worker = values_of(tmp_path / "worker", offload=True, **settings)
    in_process = values_of(tmp_path / "process", offload=False, **settings)

    assert in_worker == in_process
    assert len(in_process) >= 3
    assert keys <= in_process[-1].keys()


@pytest.mark.system
@pytest.mark.parametrize("method", ["outputs", "activations", "state_gradients"])
def test_a_bug_in_a_probe_leaves_training_alone(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise IndexError("a bug")

    monkeypatch.setattr(TrainerReplay, method, broken)
    updates = values_of(tmp_path, offload=False, level="debug", policy="lstm")

    assert len(updates) >= 3
    assert all("policy/kl" in values for values in updates)
    assert read_run(tmp_path).records[0].values["telemetry/metric_errors"] >= 1
    assert any("IndexError: a bug" in record.getMessage() for record in caplog.records)


def test_learning_in_two_parts_is_one_run(tmp_path: Path) -> None:
    with Telemetry(run_dir=tmp_path, offload=False) as telemetry:
        source = trainer(shared_trunk=True)
        attach(telemetry, source)
        source.learn(1)
        source.learn(200)

    records = read_run(tmp_path).records
    assert [record.axes.update for record in records] == [1, 2]
    assert all({"grad/interference/cos_feat", "grad/shared/norm_preclip"} <= record.values.keys() for record in records)


@pytest.mark.system
@pytest.mark.parametrize(
    ("settings", "offload"),
    [({}, False), ({"squash": True}, False), ({"squash": True}, True), ({"state_dependent_std": True}, False)],
    ids=str,
)
def test_spread_and_bounds_of_a_continuous_policy_are_those_of_its_rollouts(
    tmp_path: Path, settings: dict[str, Any], offload: bool
) -> None:
    """Pendulum's bounds are ±2. A squashed action is at a bound if it reaches 99 % of the bound. σ = e is wide enough for both."""
    rollouts: list[tuple[Tensor, Tensor]] = []
    with Telemetry([], run_dir=tmp_path / "run", offload=offload) as telemetry:
        source = trainer("Pendulum-v1", log_std=1.0, **settings)
        source.hooks.on(RolloutEnd, lambda event: rollouts.append((event.actions["action"].clone(), event.log_std["action"].exp())))
        attach(telemetry, source)
        source.learn(300)

    first, last = (record.values for record in (read_run(tmp_path / "run").records[index] for index in (0, -1)))
    (before, _), (actions, std) = rollouts[-2:]
    beyond = 2 * actions.tanh() if "squash" in settings else actions
    bound = 1.98 if "squash" in settings else 2.0
    share = float((beyond.abs() >= bound).double().mean())
    moved = float((actions.mean() - before.mean()).abs() / std.mean())
    assert 0.05 < share < 0.9
    assert last["policy/head/action/bound_frac"] == pytest.approx(share, abs=1e-9)
    assert last["policy/head/action/action_shift"] == pytest.approx(moved, rel=1e-4)
    assert "policy/head/action/action_shift" not in first
    assert "policy/entropy" in last and "policy/entropy_norm" not in last
    assert 0 < last["policy/head/action/std/min"] <= last["policy/head/action/std/mean"] < 4
    assert ("state_dependent_std" in settings) == (last["policy/head/action/std/min"] < 0.999 * last["policy/head/action/std/mean"])


def test_minimal_reports_a_headline_per_family_and_integrity(tmp_path: Path) -> None:
    last = values_of(tmp_path, offload=False, level="minimal")[-1]

    assert {"policy/kl", "value/explained_variance", "grad/global/norm_preclip", "integrity/ratio_init"} <= set(last)
    assert "policy/kl_k1" not in last


def test_off_registers_nothing() -> None:
    source = trainer()

    attach(Telemetry(level=Level.OFF), source)

    assert source.hooks.__dict__ == Hooks().__dict__


def test_detaching_ends_the_records_and_the_hooks(tmp_path: Path) -> None:
    with Telemetry(run_dir=tmp_path, offload=False) as telemetry:
        source = trainer()
        detach = attach(telemetry, source)
        source.learn(1)
        detach()
        source.learn(256)

    assert len(read_run(tmp_path).records) == 1


def test_the_run_carries_the_trainers_config_and_facts(tmp_path: Path) -> None:
    values_of(tmp_path, offload=False)
    info = read_run(tmp_path).info

    assert info.config["num_epochs"] == 2
    assert info.facts["max_grad_norm"] == 0.5
    assert info.facts["groups"]["critic"]


def test_minibatches_of_an_update_that_an_exception_ended_do_not_join_the_next_one(tmp_path: Path) -> None:
    """Two epochs of two minibatches; one update breaks off at its third step."""

    def interrupt(event: OptimizerStep) -> None:
        if event.step == 2:
            remove()
            raise RuntimeError("the user's own")

    with Telemetry(run_dir=tmp_path / "run", offload=False) as telemetry:
        source = trainer()
        attach(telemetry, source)
        source.learn(1)
        remove = source.hooks.on(OptimizerStep, interrupt)
        with pytest.raises(RuntimeError, match="own"):
            source.learn(source.env_steps + 1)
        source.learn(source.env_steps + 1)

    records = read_run(tmp_path / "run").records
    assert [record.axes.update for record in records] == [1, 3]
    assert [record.values["integrity/rows_repeated"] for record in records] == [0, 0]
    rows = [record.values["adv/minibatch_rows"] for record in records]
    assert max(rows) < 1.5 * min(rows)
