"""Telemetry of RLlib's learners does not affect training, and its numbers equal the trainer's."""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray", reason="needs ray[rllib]")
pytest.importorskip("tree", reason="needs ray[rllib]")
pytest.importorskip("gymnasium", reason="needs gymnasium")

import ray
import rllib_models
from adapter_runs import QUIET, assert_identical, differing_equations
from backends_read import BACKENDS, assert_the_same_numbers_in_all_four

from esper_telemetry import RunStatus, Telemetry, read_run
from esper_telemetry.adapters.columns import places_of_chunks
from esper_telemetry.adapters.rllib import attach_config

pytestmark = [pytest.mark.sb3, pytest.mark.filterwarnings("ignore")]  # Ray emits deprecation warnings


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")  # otherwise Ray writes a token to the home directory
        paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}  # actors import the models of the tests
        ray.init("local", num_cpus=8, include_dashboard=False, object_store_memory=100_000_000, runtime_env=paths)
        yield
        ray.shutdown()


@pytest.mark.parametrize("name", rllib_models.CONFIGS)
def test_weights_are_bit_identical(name: str, tmp_path: Path) -> None:
    """Optimizers and generators included; no metric fails, equations match, and rollouts and minibatches agree."""
    expected = rllib_models.train(rllib_models.CONFIGS[name](), 3)
    configuration = rllib_models.CONFIGS[name]()
    attach_config(configuration, lambda: Telemetry(run_dir=tmp_path / "run", level="debug", offload=False))

    actual = rllib_models.train(configuration, 3)

    run = read_run(tmp_path / "run")
    assert_identical(actual, expected)
    assert run.status is RunStatus.FINISHED
    assert [record.axes.update for record in run.records] == [1, 2, 3]
    for record in run.records:
        assert "telemetry/metric_errors" not in record.values
        assert record.values["integrity/ratio_init"] <= 1e-6
        assert record.values["integrity/gae_identity"] <= 1e-5
        assert record.values["integrity/rows_repeated"] == 0
        if name == "categorical":
            mean = record.values["rllib/env_runners/episode_return_mean"]
            assert record.values["episode/return_mean"] == pytest.approx(mean)
    steps = [record.values["rllib/env_runners/num_env_steps_sampled"] for record in run.records]
    assert [record.axes.env_step for record in run.records] == [*itertools.accumulate(steps)]
    assert differing_equations(run) == {}


def test_off_changes_no_object() -> None:
    algorithm = attach_config(rllib_models.config(), lambda: Telemetry(run_dir=None, level="off")).build_algo()
    learner = algorithm.learner_group._learner

    assert "compute_losses" not in vars(learner)
    algorithm.stop()


def recording(configuration: Any, path: Path) -> Any:
    settings = {"learner_class": rllib_models.RecordingLearner, "learner_config_dict": {"path": f"{path}/"}}
    return configuration.learners(**settings)


def module_numbers(minibatches: Any, name: str = "default_policy") -> dict[str, torch.Tensor]:
    """Log ratios [R] and RLlib's columns [R] of the rows of all minibatches that count; `sizes` are their numbers."""
    parts = [one[name] for one in minibatches]
    mask = torch.cat([part["loss_mask"].flatten() for part in parts])
    column = {key: torch.cat([part[key] for part in parts])[mask] for key in parts[0] if key != "loss"}
    means, log_std = column["outputs"].chunk(2, -1)
    chosen = torch.distributions.Normal(means, log_std.exp()).log_prob(column["actions"]).sum(-1)
    if not column["actions"].is_floating_point():
        chosen = column["outputs"].log_softmax(-1).gather(-1, column["actions"].long().unsqueeze(-1)).squeeze(-1)
    sizes = torch.stack([part["loss_mask"].sum() for part in parts])
    return {**column, "log_ratio": chosen - column["action_logp"], "sizes": sizes}


def test_numbers_equal_those_of_the_trainer(tmp_path: Path) -> None:
    """Of the last update, computed again from what RLlib's learner had in its hands, and RLlib's own results."""
    run = rllib_models.recorded_run(recording(rllib_models.pendulum(), tmp_path), tmp_path / "run", level="debug")

    minibatches, norms = torch.load(tmp_path / "0.pt", weights_only=False)
    column, values = module_numbers(minibatches), run.records[-1].values
    ratio = column["log_ratio"].double().exp()
    kl = (ratio - 1 - column["log_ratio"]).split(column["sizes"].tolist())
    assert values["policy/kl"] == pytest.approx(statistics.mean(float(one.mean()) for one in kl), rel=0.02)
    assert values["policy/kl_max"] == pytest.approx(max(float(one.mean()) for one in kl), rel=1e-4)
    assert values["policy/ratio/max"] == pytest.approx(float(ratio.max()), rel=1e-5)
    later = ratio[int(column["sizes"][0]) :]  # after the first step
    assert values["policy/clip_frac"] == pytest.approx(float(((later - 1).abs() > 0.3).double().mean()), rel=1e-6)
    assert values["adv/norm/mean"] == pytest.approx(float(column["advantages"].double().mean()), abs=1e-6)
    assert values["grad/global/norm_preclip"] == pytest.approx(statistics.mean(norms), rel=1e-5)
    squares = (column["values"] - column["value_targets"]).double().square().split(column["sizes"].tolist())
    assert values["loss/value"] == pytest.approx(statistics.mean(float(one.mean()) / 2 for one in squares), rel=0.02)
    total = statistics.mean(float(one["default_policy"]["loss"]) for one in minibatches)
    assert values["loss/total"] == pytest.approx(total, rel=0.02)
    rllib = {key.rsplit("/", 1)[1]: x for key, x in values.items() if key.startswith("rllib/learners/default_policy/")}
    assert rllib["vf_loss"] == pytest.approx(float(squares[-1].mean()), rel=1e-5)  # of the last minibatch
    assert values["opt/lr"] == pytest.approx(rllib["default_optimizer_learning_rate"])
    assert values["episode/count"] == values.get("rllib/env_runners/num_episodes", 0)


def test_two_learners_make_one_run_with_exact_sums(tmp_path: Path) -> None:
    """Two learners and four environment runners: counts, means and extremes over the rows of both learners."""
    run = rllib_models.recorded_run(recording(rllib_models.two_learners(), tmp_path), tmp_path / "run", updates=2)

    saved = [torch.load(tmp_path / f"{learner}.pt", weights_only=False) for learner in range(2)]
    columns, values = [module_numbers(minibatches) for minibatches, _ in saved], run.records[-1].values
    log_ratio = torch.cat([column["log_ratio"] for column in columns]).double()
    advantages = torch.cat([column["advantages"] for column in columns]).double()
    assert run.status is RunStatus.FINISHED
    assert run.info.facts["ranks"] == 2
    assert values["policy/logratio/mean"] == pytest.approx(float(log_ratio.mean()), rel=1e-6)
    assert values["policy/ratio/max"] == pytest.approx(float(log_ratio.exp().max()), rel=1e-6)
    assert values["adv/norm/mean"] == pytest.approx(float(advantages.mean()), abs=1e-9)
    assert values["adv/norm/std"] == pytest.approx(float(advantages.std(correction=0)), rel=1e-6)
    assert values["grad/global/norm_preclip"] == pytest.approx(statistics.mean(saved[1][1]), rel=1e-5)
    assert values["integrity/ratio_init"] <= 1e-6
    assert values["episode/count"] == values["rllib/env_runners/num_episodes"]
    steps = [record.values["rllib/env_runners/num_env_steps_sampled"] for record in run.records]
    assert run.records[-1].axes.env_step == sum(steps)
    assert differing_equations(run) == {}


def test_each_of_two_modules_is_a_head(tmp_path: Path) -> None:
    configuration = recording(rllib_models.two_modules(), tmp_path)
    run = rllib_models.recorded_run(configuration, tmp_path / "run", updates=2)

    minibatches, _ = torch.load(tmp_path / "0.pt", weights_only=False)
    values = run.records[-1].values
    for name in ("cart", "pendulum"):
        ratio = module_numbers(minibatches, name)["log_ratio"].double().exp()
        assert values[f"policy/head/{name}/ratio/max"] == pytest.approx(float(ratio.max()), rel=1e-5)
        assert values[f"policy/head/{name}/entropy"] > 0
        assert values[f"grad/head/{name}/norm"] > 0
    assert run.info.facts["heads"] == {"cart": "categorical", "pendulum": "continuous"}


def test_places_of_chunks() -> None:
    """Chunks of 3, 2, 4 and 1 steps: the second and the fourth go on, so they end the two columns 3 + 2 and 4 + 1."""
    assert places_of_chunks([3, 2, 4, 1], [True, False, True, False], 1) == ([1, 8, 0, 7], 2)
    assert places_of_chunks([3, 2], [True, True], 4) == ([0, 1], 2)


class Broken(rllib_models.RecordingLearner):
    def compute_gradients(self, loss_per_module: Any, **kwargs: Any) -> Any:
        if self._weights_seq_no == 2:
            raise RuntimeError("broken learner")
        return super().compute_gradients(loss_per_module, **kwargs)


def test_an_exception_ends_the_run_as_failed(tmp_path: Path) -> None:
    configuration = recording(rllib_models.config(), tmp_path).learners(learner_class=Broken)

    with pytest.raises(RuntimeError, match="broken learner"):
        rllib_models.recorded_run(configuration, tmp_path / "run")

    run = read_run(tmp_path / "run")
    assert run.status is RunStatus.FAILED
    assert [record.axes.update for record in run.records] == [1, 2]


@pytest.mark.parametrize(
    "broken", [("LearnerListener._evaluated", "as_grid", "RolloutEnd"), ("flatten_dict",), ("SurroundingTap",), ("LearnerListener.start",)]
)
def test_a_failure_of_telemetry_does_not_reach_training(broken: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from esper_telemetry.adapters import rllib

    expected = rllib_models.train(rllib_models.config(), 2)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("telemetry is broken")

    for name in broken:
        monkeypatch.setattr(f"{rllib.__name__}.{name}", fails)
    configuration = attach_config(rllib_models.config(), lambda: Telemetry(run_dir=tmp_path))

    assert_identical(rllib_models.train(configuration, 2), expected)


def test_other_configurations_are_refused() -> None:
    from ray.rllib.algorithms.dqn import DQNConfig

    with pytest.raises(TypeError, match="takes RLlib's PPOConfig"):
        attach_config(DQNConfig(), Telemetry)
    with pytest.raises(TypeError, match="and a function"):
        attach_config(rllib_models.config(), "runs/a")  # type: ignore[arg-type] # what is tested


def test_all_three_backends_hold_what_the_journal_holds(tmp_path: Path) -> None:
    rllib_models.recorded_run(rllib_models.config(), tmp_path, sinks=list(BACKENDS), offload=True, close_timeout=60)

    assert_the_same_numbers_in_all_four(tmp_path)


FAULTS = {
    "learning_rate_x100": ({"policy/kl_spike", "opt/update_too_large"}, {}),
    "lambda": ({"integrity/equation"}, {"advantages": "other_lambda"}),
    "no_terminals": ({"integrity/equation"}, {"advantages": "termination_bootstrapped"}),
    "no_clip": ({"integrity/equation"}, {"policy_loss": "no_clip"}),
}
"""First alarms of broken runs, and what their equations recognise."""


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_incident_names_the_fault(name: str, tmp_path: Path) -> None:
    run = rllib_models.recorded_run(rllib_models.BROKEN[name](), tmp_path, updates=3, detect=QUIET)

    types, hypotheses = FAULTS[name]
    first = next(alarm for alarm in run.alarms if alarm.event == "raise")
    assert first.type in types
    assert first.cause in types
    assert {equation: names[0] for equation, names in differing_equations(run).items()} == hypotheses
    if name == "learning_rate_x100":
        assert "lr is 0.1" in first.text  # RLlib's name of the setting


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_default_configuration_raises_nothing(seed: int, tmp_path: Path) -> None:
    run = rllib_models.recorded_run(rllib_models.default_config(seed), tmp_path, updates=5, detect=QUIET)

    assert [alarm.type for alarm in run.alarms] == []
