"""Telemetry of RSL-RL's runners does not affect training, and its numbers equal the trainer's."""

from __future__ import annotations

import copy
import io
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("rsl_rl", reason="needs rsl-rl-lib")
pytest.importorskip("gymnasium", reason="needs gymnasium")

import rsl_rl_models
from adapter_runs import assert_identical, checked_equations, differing_equations, recorded_norms, taps_in

from esper_telemetry import RunStatus, Telemetry, read_run, watch_pair
from esper_telemetry.adapters.rsl_rl import attach_runner
from esper_telemetry.equations.equation import EQUATION_KEY
from esper_telemetry.importers import read_foreign, read_source

pytestmark = pytest.mark.sb3


def test_numbers_equal_those_of_the_trainer(tmp_path: Path) -> None:
    """Losses, entropy and rate equal RSL-RL's logs; KL divergences and norms equal the values it computes; episodes match its counts."""
    bare = rsl_rl_models.runner(rsl_rl_models.Pendulum, log_dir=tmp_path / "bare")
    kls: list[float] = []
    divergence = bare.alg.actor.get_kl_divergence

    def recording_divergence(old: Any, new: Any) -> Any:
        rows = divergence(old, new)
        kls.append(float(rows.mean()))
        return rows

    bare.alg.actor.get_kl_divergence = recording_divergence
    with recorded_norms() as norms:
        rsl_rl_models.learn(bare, 4)
    model = rsl_rl_models.runner(rsl_rl_models.Pendulum, log_dir=tmp_path / "logs")

    run = rsl_rl_models.recorded_run(model, tmp_path / "run", updates=4)

    storage, values = bare.alg.storage, run.records[-1].values
    returns, estimates = storage.returns, storage.values
    fit = 1 - (returns - estimates).var() / returns.var()
    assert values["value/explained_variance"] == pytest.approx(float(fit), abs=1e-4)
    assert values["adv/raw/mean"] == pytest.approx(float((returns - estimates).mean()), rel=1e-4)
    updates, steps = 4, 8
    for update, record in enumerate(run.records):
        of_update = slice(steps * update, steps * (update + 1))
        actor, critic = norms[0::2][of_update], norms[1::2][of_update]
        assert record.values["grad/actor/norm_preclip"] == pytest.approx(statistics.mean(actor), rel=1e-5)
        assert record.values["grad/critic/norm_preclip"] == pytest.approx(statistics.mean(critic), rel=1e-5)
        clipped = [min(1.0, norm) for norm in critic]
        assert record.values["grad/critic/norm_postclip"] == pytest.approx(statistics.mean(clipped), rel=1e-4)
        assert record.values["rsl_rl/kl/mean"] == pytest.approx(statistics.mean(kls[of_update]), rel=1e-5)
        assert record.values["loss/policy"] == pytest.approx(record.values["rsl_rl/loss/surrogate"], abs=1e-6)
        assert 2 * record.values["loss/value"] == pytest.approx(record.values["rsl_rl/loss/value"], rel=1e-5)
        assert record.values["policy/entropy"] == pytest.approx(record.values["rsl_rl/loss/entropy"], rel=1e-5)
        rates = [record.values[f"rsl_rl/learning_rate/{end}"] for end in ("min", "max")]
        assert rates[0] <= record.values["opt/lr"] <= rates[1]
        assert rates[0] <= record.values["rsl_rl/loss/learning_rate"] <= rates[1]
    assert len(norms) == 2 * updates * steps
    sampled = [record.values for record in run.records if "policy/kl_exact" in record.values]
    assert sampled
    for one in sampled:
        assert one["policy/kl_exact"] == pytest.approx(one["rsl_rl/kl/mean"], rel=1e-4)
    assert values["episode/return_mean_100"] == pytest.approx(statistics.mean(bare.logger.rewbuffer), rel=1e-5)
    assert values["episode/length_mean"] == 20
    assert values["episode/truncated_frac"] == 1


def test_equations_match_and_the_time_limits_of_rsl_rl_are_named_a_variant(tmp_path: Path) -> None:
    model = rsl_rl_models.runner(rsl_rl_models.Pendulum)

    run = rsl_rl_models.recorded_run(model, tmp_path / "run", updates=4, level="debug")

    assert {"advantages", "returns", "normalized_advantages", "log_probs", "minibatches"} <= checked_equations(run)
    assert differing_equations(run) == {"advantages": ["time_limit_current_value"], "minibatches": ["same_order"]}
    assert not any(alarm.type == "integrity/equation" for alarm in run.alarms)
    assert EQUATION_KEY + "value_loss" not in run.records[-1].values


def test_states_of_an_lstm_are_measured(tmp_path: Path) -> None:
    """The storage still holds the initial states of the last rollout's steps; the gates belong to the actor's LSTM."""
    model = rsl_rl_models.MODELS["lstm"]()

    run = rsl_rl_models.recorded_run(model, tmp_path / "run", level="debug")

    values, (hidden, cell) = run.records[-1].values, model.alg.storage.saved_hidden_state_a
    assert values["lstm/h/rms"] == pytest.approx(float(hidden.square().mean().sqrt()), rel=1e-4)
    assert values["lstm/c/rms"] == pytest.approx(float(cell.square().mean().sqrt()), rel=1e-4)
    assert 0 < values["lstm/gate/f/mean"] < 1


def test_gates_of_a_gru_are_measured(tmp_path: Path) -> None:
    run = rsl_rl_models.recorded_run(rsl_rl_models.runner(model="RNNModel", model_rnn_type="gru"), tmp_path, level="debug")

    values = run.records[-1].values
    assert 0 < values["lstm/gate/z/mean"] < 1
    assert values["lstm/timescale/median"] > 1
    assert "telemetry/metric_errors" not in values


def test_a_runner_learns_again_and_is_copied_while_it_listens(tmp_path: Path) -> None:
    model = rsl_rl_models.runner()
    copies: list[Any] = []
    with Telemetry([], run_dir=tmp_path / "run", offload=False) as telemetry:
        detach = attach_runner(telemetry, model)
        step = model.env.step

        def copying(actions: Any) -> Any:
            if not copies:
                stream = io.BytesIO()
                torch.save(model.alg.actor, stream)
                stream.seek(0)
                copies.extend([copy.deepcopy(model.alg.actor), torch.load(stream, weights_only=False)])
            return step(actions)

        model.env.step = copying
        rsl_rl_models.learn(model, 2)
        rsl_rl_models.learn(model, 2)
        detach()
        assert rsl_rl_models.taps_of(model) == []
        rsl_rl_models.learn(model, 1)

    assert [record.axes.update for record in read_run(tmp_path / "run").records] == [1, 2, 3, 4]
    assert not taps_in(module for one in copies for module in one.modules())


def test_an_exception_ends_the_run_as_failed_and_leaves_no_tap(tmp_path: Path) -> None:
    """The standard deviation becomes NaN, as in leggedrobotics/rsl_rl#33: the first non-finite tensor is named."""
    model = rsl_rl_models.runner()
    update = model.alg.update
    calls: list[None] = []

    def breaking() -> Any:
        calls.append(None)
        result = update()
        if len(calls) == 2:
            model.alg.actor.distribution.std_param.data.fill_(float("nan"))
        return result

    model.alg.update = breaking
    with pytest.raises(RuntimeError, match="std"), Telemetry([], run_dir=tmp_path / "run") as telemetry:
        attach_runner(telemetry, model)
        rsl_rl_models.learn(model, 5)

    run = read_run(tmp_path / "run")
    assert run.status is RunStatus.FAILED
    assert len(run.records) == 2
    assert "std_param" in (tmp_path / "run/journal.jsonl").read_text()
    assert rsl_rl_models.taps_of(model) == []


def test_other_algorithms_are_refused() -> None:
    class Other:
        alg = object()

    with Telemetry([], run_dir=None) as telemetry, pytest.raises(TypeError, match="has no actor"):
        attach_runner(telemetry, Other())
    with pytest.raises(TypeError, match="takes a Telemetry"):
        attach_runner(object(), rsl_rl_models.runner())  # type: ignore[arg-type] # what is tested


def test_the_class_path_of_the_logger_records_the_same(tmp_path: Path) -> None:
    """One configuration entry: the usual TensorBoard file is written, too, and a second `learn` continues the run."""
    logger = {"class_name": "esper_telemetry.adapters.rsl_rl:TelemetryWriter", "sinks": [], "offload": False}
    model = rsl_rl_models.runner(log_dir=tmp_path / "logs", logger=logger)
    rsl_rl_models.learn(model, 2)
    rsl_rl_models.learn(model, 1)
    run = read_run(tmp_path / "logs/telemetry")

    other = rsl_rl_models.runner(log_dir=tmp_path / "others")
    expected = rsl_rl_models.recorded_run(other, tmp_path / "run", updates=2)

    assert [record.axes.update for record in run.records] == [1, 2, 3]
    assert run.status is RunStatus.FINISHED
    for key in ("policy/kl", "grad/actor/norm_preclip", "rsl_rl/policy/mean_std", "rsl_rl/loss/value"):
        assert run.records[1].values[key] == expected.records[1].values[key]
    assert list((tmp_path / "logs").glob("events.out.tfevents.*"))
    assert (tmp_path / "logs/model_1.pt").exists()
    assert logger["class_name"] == model.cfg["logger"]["class_name"]  # leggedrobotics/rsl_rl#229: it was removed
    assert rsl_rl_models.taps_of(model) == []


@pytest.mark.parametrize("name", ["cartpole", "pendulum"])
def test_its_own_logs_are_read(name: str, tmp_path: Path) -> None:
    """In RSL-RL's TensorBoard files, each tag maps to a key or is listed as unread."""
    model = rsl_rl_models.MODELS[name](log_dir=tmp_path / "logs")
    rsl_rl_models.learn(model, 12)

    run = read_foreign(read_source(f"tensorboard:{tmp_path}/logs"))

    assert run.trainer == "RSL-RL"
    assert len(run.records) == 12
    assert {"loss/value", "loss/policy", "policy/entropy", "opt/lr", "episode/return_mean_100"} <= set(run.used)
    assert set(run.unused) == {
        *("Perf/collection_time", "Perf/learning_time"),
        *("Train/mean_reward/time", "Train/mean_episode_length/time"),
    }


def test_learning_rates_of_actor_and_critic(tmp_path: Path) -> None:
    """One optimizer with a group for each; the critic's rate is ten times as large."""
    model = rsl_rl_models.runner(schedule="fixed")
    parts = (model.alg.actor, model.alg.critic)
    groups = [{"params": list(part.parameters()), "lr": rate} for part, rate in zip(parts, (1e-4, 1e-3), strict=True)]
    model.alg.optimizer = torch.optim.Adam(groups)

    for record in rsl_rl_models.recorded_run(model, tmp_path).records:
        rates = {key: value for key, value in record.values.items() if key.startswith("opt/lr")}
        assert rates == {"opt/lr": pytest.approx(1e-4), "opt/lr/actor": 1e-4, "opt/lr/critic": 1e-3}


def test_a_module_beside_its_host_and_the_gradient_of_the_bonus(tmp_path: Path) -> None:
    """Weights are unchanged; the bonus pulls at one log standard deviation in each row of a minibatch: 0.01 / √rows."""
    bare = rsl_rl_models.runner(rsl_rl_models.Pendulum)
    rsl_rl_models.learn(bare, 2)
    expected = rsl_rl_models.fingerprint(bare)
    model = rsl_rl_models.runner(rsl_rl_models.Pendulum)
    with Telemetry([], run_dir=tmp_path) as telemetry:
        attached = attach_runner(telemetry, model)
        layers = [layer for layer in model.alg.actor.modules() if isinstance(layer, nn.Linear)]
        watch_pair(telemetry, attached, "head", module=layers[-1], host=layers[0])
        rsl_rl_models.learn(model, 2)

    rows = rsl_rl_models.ROLLOUT // model.alg.num_mini_batches
    for record in read_run(tmp_path).records:
        assert record.values["grad/pair/head/connected"] == 1
        assert record.values["grad/pair/head/intensity"] > 0
        assert record.values["grad/pair/head/upstream"] > 0
        assert record.values["grad/entropy/norm"] == pytest.approx(0.01 / rows**0.5)
    assert_identical(rsl_rl_models.fingerprint(model), expected)
