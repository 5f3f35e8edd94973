"""Telemetry of PPO in TorchRL does not affect training, and its numbers equal the loss module's."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from torch import nn

pytest.importorskip("torchrl", reason="needs torchrl")
pytest.importorskip("gymnasium", reason="needs gymnasium")

import torchrl_models
from adapter_runs import assert_identical, checked_equations, differing_equations, recorded_norms
from torchrl_models import FRAMES, Program

from esper_telemetry import RunStatus, Telemetry, read_run, watch_pair
from esper_telemetry.adapters.torchrl import attach_loss
from esper_telemetry.importers import read_foreign, read_source

pytestmark = [pytest.mark.sb3, pytest.mark.filterwarnings("ignore")]
"""TorchRL emits deprecation warnings."""


@pytest.mark.parametrize("kind", ["loop", "trainer"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_every_equation_that_is_shown_matches(env: str, kind: str, tmp_path: Path) -> None:
    by_trainer = kind == "trainer"
    program = Program(env, updates=4, estimator={"average_gae": by_trainer}, uses_trainer=by_trainer)

    run = torchrl_models.recorded_run(program, tmp_path / "run", level="debug")

    shown = {"advantages", "returns", "normalized_advantages", "log_probs", "minibatches", "policy_loss", "value_loss"}
    assert shown <= checked_equations(run)
    assert differing_equations(run) == {}
    assert not any(alarm.type == "integrity/equation" for alarm in run.alarms)
    assert [record.axes.gradient_step for record in run.records] == [8, 16, 24, 32]
    assert ("torchrl/r_training" in run.records[-1].values) == by_trainer


def test_numbers_equal_those_of_the_loss_module(tmp_path: Path) -> None:
    """Means over the minibatches of the values that `ClipPPOLoss` returns, and the norms that `clip_grad_norm_` returns."""
    bare = Program(learning_rate=3e-3)
    outputs: list[Any] = []
    forward = bare.loss.forward

    def recording(batch: Any) -> Any:
        result = forward(batch)
        outputs.append(result.detach())
        return result

    bare.loss.forward = recording
    with recorded_norms() as norms:
        bare.learn()
    program = Program(learning_rate=3e-3)

    run = torchrl_models.recorded_run(program, tmp_path / "run")

    def mean(name: str, update: int) -> float:
        return statistics.mean(float(output[name]) for output in outputs[8 * update : 8 * (update + 1)])

    for update, record in enumerate(run.records):
        values = record.values
        assert values["policy/kl_k1"] == pytest.approx(mean("kl_approx", update), abs=1e-6)
        later = [float(output["clip_fraction"]) for output in outputs[8 * update + 1 : 8 * (update + 1)]]
        # the first minibatch's ratios are 1
        assert values["policy/clip_frac"] == pytest.approx(statistics.mean(later), abs=1e-6)
        # over all rows, not a mean of minibatches
        assert values["policy/ess_frac"] == pytest.approx(mean("ESS", update), rel=1e-3)
        assert values["policy/ratio/mean"] == pytest.approx(mean("mean_ratio", update), rel=1e-5)
        assert values["policy/entropy"] == pytest.approx(mean("entropy", update), rel=1e-5)
        assert values["loss/policy"] == pytest.approx(mean("loss_objective", update), abs=1e-6)
        assert values["loss/value"] == pytest.approx(mean("loss_critic", update), rel=1e-5)  # 0.5 of the squared error
        expected = statistics.mean(norms[8 * update : 8 * (update + 1)])
        assert values["grad/global/norm_preclip"] == pytest.approx(expected, rel=1e-5)
    assert len(outputs) == len(norms) == 24


def test_episodes_equal_those_of_the_environments(tmp_path: Path) -> None:
    """CartPole pays 1 for each step, so returns equal the lengths that `StepCounter` counts."""
    lengths: list[list[int]] = []

    def after_batch(batch: Any) -> None:
        done = batch["next", "done"]
        lengths.append(batch["next", "step_count"][done].tolist())

    Program().learn(after_batch)
    run = torchrl_models.recorded_run(Program(), tmp_path / "run")

    for record, finished in zip(run.records, lengths, strict=True):
        assert record.values["episode/count"] == len(finished)
        assert record.values["episode/return_mean"] == pytest.approx(statistics.mean(finished))
        assert record.values["episode/length_mean"] == pytest.approx(statistics.mean(finished))


def test_a_loop_that_asks_the_estimator_once_has_its_passes(tmp_path: Path) -> None:
    """The pass of a minibatch then follows from the number of rows before it."""
    program = Program()
    estimate = program.estimator
    seen: list[None] = []

    def once(batch: Any) -> None:
        if len(seen) % program.epochs == 0:
            estimate(batch)
        seen.append(None)

    program.estimator = once
    with Telemetry([], run_dir=tmp_path / "run", offload=False) as telemetry:
        attach_loss(telemetry, program.loss, program.optimizer, estimate)
        program.learn()

    values = read_run(tmp_path / "run").records[-1].values
    assert values["integrity/rows_repeated"] == 0
    assert "policy/kl_epoch_slope" in values


def test_an_exception_ends_the_run_as_failed_and_leaves_no_tap(tmp_path: Path) -> None:
    program = Program()
    batches: list[None] = []

    def breaking(batch: Any) -> None:
        batches.append(None)
        if len(batches) == 2:
            raise RuntimeError("the program broke")

    with pytest.raises(RuntimeError, match="broke"), Telemetry([], run_dir=tmp_path / "run") as telemetry:
        attach_loss(telemetry, program.loss, program.optimizer, program.estimator)
        program.learn(breaking)

    run = read_run(tmp_path / "run")
    assert run.status is RunStatus.FAILED
    assert len(run.records) == 1
    assert torchrl_models.taps_of(program) == []


def test_other_losses_are_refused() -> None:
    with Telemetry([], run_dir=None) as telemetry, pytest.raises(TypeError, match="ClipPPOLoss, got Telemetry and Linear"):
        attach_loss(telemetry, nn.Linear(1, 1), Program().optimizer)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_its_own_logs_are_read(env: str, tmp_path: Path) -> None:
    """In a `PPOTrainer`'s TensorBoard files, each tag maps to a key or is listed as unread."""
    from torchrl.record.loggers import TensorboardLogger

    trainer = Program(env, updates=6).trainer(logger=TensorboardLogger(exp_name="logs", log_dir=str(tmp_path)))
    trainer.train()

    run = read_foreign(read_source(f"tensorboard:{tmp_path}/logs"))

    assert run.trainer == "TorchRL"
    assert [record.axes.env_step for record in run.records] == [FRAMES * update for update in range(1, 7)]
    assert {"policy/kl_k1", "policy/clip_frac", "policy/entropy", "grad/global/norm_preclip", "reward/mean"} <= set(run.used)
    assert set(run.unused) == {
        *("action_norm", "action_norm_std", "done_percentage", "loss_critic", "loss_entropy", "optim_steps"),
        *("r_max", "r_total", "r_training_std"),
    }


def test_a_module_beside_its_host(tmp_path: Path) -> None:
    """The loss module runs the user's own layers, so hooks on them see its passes; weights are unchanged."""
    bare = Program()
    bare.learn()
    expected = torchrl_models.fingerprint(bare)
    program = Program()
    network = program.actor.module[0].module
    with Telemetry([], run_dir=tmp_path) as telemetry:
        listener = attach_loss(telemetry, program.loss, program.optimizer, program.estimator)
        assert listener is not None
        watch_pair(telemetry, listener, "head", module=network[2], host=network[0])
        program.learn()

    for record in read_run(tmp_path).records:
        assert record.values["grad/pair/head/connected"] == 1
        assert record.values["grad/pair/head/upstream"] > 0
        assert record.values["grad/pair/head/intensity_ratio"] == pytest.approx(
            record.values["grad/pair/head/intensity"] / record.values["grad/pair/head/host_intensity"]
        )
        assert record.values["grad/entropy/norm"] > 0
    assert_identical(torchrl_models.fingerprint(program), expected)
