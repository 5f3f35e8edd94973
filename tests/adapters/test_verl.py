"""Telemetry of verl's trainer does not affect training, and its numbers equal verl's own and those of a second computation."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from esper_telemetry.lab.verl_cpu import ENVIRONMENT

pytest.importorskip("transfer_queue", reason="needs esper-telemetry[verl]")
os.environ |= ENVIRONMENT
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl imports deprecated modules of Ray
    pytest.importorskip("esper_telemetry.lab.verl_cpu.verl_faults", reason="needs esper-telemetry[verl]")

from adapter_runs import QUIET, assert_identical, taps_in
from backends_read import BACKENDS, assert_the_same_numbers_in_all_four
from verl.trainer.ppo import core_algos

from esper_telemetry import RunStatus, Telemetry, read_run
from esper_telemetry.adapters.verl import attach_trainer
from esper_telemetry.core.record import AlarmEvent
from esper_telemetry.journal.read import Run
from esper_telemetry.lab.small_language_model import save_model
from esper_telemetry.lab.verl_cpu.verl_faults import FAULTS, VerlFault
from esper_telemetry.lab.verl_cpu.verl_training import CpuTrainer, SamplingManager, cpu_config, local_ray, train

pytestmark = [pytest.mark.sb3, pytest.mark.filterwarnings("ignore")]  # Ray, verl and transformers emit deprecation warnings

ACTOR = "actor_rollout_ref__actor__"

WHOLE: dict[str, Any] = {f"{ACTOR}ppo_mini_batch_size": 8, f"{ACTOR}ppo_micro_batch_size_per_gpu": 64}
"""A minibatch per pass, and a forward pass per minibatch, so that verl's means of means are means over all tokens."""

GSPO = {f"{ACTOR}policy_loss__loss_mode": "gspo", f"{ACTOR}clip_ratio_low": 0.02, f"{ACTOR}clip_ratio_high": 0.04}

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {f"{ACTOR}use_kl_loss": True},
    "rloo": {"algorithm__adv_estimator": "rloo", f"{ACTOR}shuffle": True},
    "gspo": GSPO,
    "ppo": {"algorithm__adv_estimator": "gae", "algorithm__lam": 0.9, "algorithm__gamma": 0.99},
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")  # otherwise Ray writes a token to the home directory
        environment.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        with local_ray():
            yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every policy loss that verl computes, in this process."""
    calls: list[dict[str, Any]] = []
    for name, loss in [*core_algos.POLICY_LOSS_REGISTRY.items()]:

        def recording(*, loss: Any = loss, **arguments: Any) -> Any:
            calls.append({key: x.detach().clone() for key, x in arguments.items() if isinstance(x, torch.Tensor)})
            return loss(**arguments)

        monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, name, recording)
    return calls


def recorded(model: Path, run_dir: Path, *, steps: int = 3, fault: VerlFault | None = None, **settings: Any) -> Run:
    fault = fault or VerlFault("healthy", ())
    config = cpu_config(model, steps=steps, **{**fault.settings, **settings})
    with Telemetry([], run_dir=run_dir, offload=False, detect=QUIET) as telemetry:
        train(config, telemetry, trainer=fault.trainer, manager=fault.manager)
    return read_run(run_dir)


def weights(trainer: CpuTrainer) -> dict[str, torch.Tensor]:
    workers = trainer.actor_rollout_wg.workers[0].worker.worker_dict
    engines = [getattr(worker, "actor", worker).engine for name, worker in workers.items() if name != "ref"]
    named = {}
    for place, engine in enumerate(engines):
        for name, parameter in engine.module.named_parameters():
            named[f"{place}.{name}"] = parameter.to_local()
            moments = engine.optimizer.state[parameter]
            named |= {f"{place}.{name}.{key}": x.to_local() for key, x in moments.items() if hasattr(x, "to_local")}
    return {name: x.detach().clone() for name, x in named.items()}


def taps_of(trainer: CpuTrainer) -> list[str]:
    workers = trainer.actor_rollout_wg.workers[0].worker.worker_dict.values()
    owners = [trainer, *(getattr(worker, "actor", worker) for worker in workers)]
    owners += [worker.engine for worker in owners[1:]]
    return taps_in(owners)


def test_numbers_are_those_that_verl_computes_itself(model: Path, tmp_path: Path) -> None:
    records = recorded(model, tmp_path / "run", **WHOLE).records
    pairs = {
        "lm/reward/mean": "verl/critic/score/mean",
        "lm/length/mean": "verl/response_length/mean",
        "lm/length/max": "verl/response_length/max",
        "lm/entropy": "verl/actor/entropy_loss",
        "policy/kl_k1": "verl/actor/ppo_kl",
        "lm/mismatch/kl": "verl/rollout_corr/k3_kl",
        "grad/global/norm_preclip": "verl/actor/grad_norm",
        "opt/lr": "verl/actor/lr",
    }

    assert len(records) == 3
    for record in records:
        ours = {key: record.values[key] for key in pairs}
        assert ours == pytest.approx({key: record.values[other] for key, other in pairs.items()}, rel=1e-4, abs=1e-6)
        # verl's mean includes the first pass, in which nothing is clipped
        assert record.values["policy/clip_frac_active"] == pytest.approx(2 * record.values["verl/actor/pg_clipfrac"])
        assert record.values["perf/update_ms"] == pytest.approx(1000 * record.values["verl/timing_s/update_actor"])
        assert {"verl/timing_s/gen", "verl/timing_s/old_log_prob", "verl/timing_s/step"} <= record.values.keys()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_minibatches_are_those_of_verls_losses(name: str, model: Path, tmp_path: Path, losses: list[dict[str, Any]]) -> None:
    """Every token's ratio is computed again from the arguments of verl's loss; GSPO has one ratio per completion (2507.18071, eq. 7)."""
    run = recorded(model, tmp_path / "run", steps=2, **ALGORITHMS[name])
    per_update, first = len(losses) // 2, 2  # calls of an update, and of its first minibatch

    assert run.status is RunStatus.FINISHED
    assert [record.axes.env_step for record in run.records] == [64, 128]
    assert [record.axes.gradient_step for record in run.records] == [4, 8]
    for update, record in enumerate(run.records):
        values, log_ratios, tokens = record.values, [], 0
        for call in losses[update * per_update : (update + 1) * per_update]:
            mask = call["response_mask"].bool()
            log_ratio = (call["log_prob"] - call["old_log_prob"]) * mask
            tokens += int(mask.sum())
            mean = log_ratio.sum(-1) / mask.sum(-1)
            log_ratios.append(mean if name == "gspo" else log_ratio[mask])
        ratio, later = torch.cat(log_ratios).exp(), torch.cat(log_ratios[first:]).exp()
        bound = 0.02 if name == "gspo" else 0.2
        assert values["integrity/ratio_init"] <= 1e-6
        assert values["lm/tokens"] == tokens
        assert values["policy/ratio/max"] == pytest.approx(float(ratio.max()), rel=1e-5)
        assert values["policy/kl"] == pytest.approx(float((ratio - 1 - ratio.log()).mean()), rel=1e-3, abs=1e-8)
        assert values["policy/clip_frac"] == pytest.approx(float(((later - 1).abs() > bound).float().mean()), rel=1e-5)
        assert values["lm/mask_errors"] == 0
        assert values["lm/mismatch/mult_error"] == pytest.approx(1, abs=1e-5)
        assert ("lm/groups/sign_agreement" in values) == (name != "ppo")
        assert values.get("lm/groups/sign_agreement", 1) == 1
        assert ("lm/kl_reference" in values) == (name == "grpo")
        assert "telemetry/metric_errors" not in values


def test_advantages_and_values_of_ppo_are_computed_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GAE backwards over each completion, from the rewards and the values that verl passes to its estimator."""
    calls: list[dict[str, torch.Tensor]] = []
    original = core_algos.compute_gae_advantage_return

    def recording(**arguments: Any) -> Any:
        calls.append({key: x.clone() for key, x in arguments.items() if isinstance(x, torch.Tensor)})
        return original(**arguments)

    monkeypatch.setattr(core_algos, "compute_gae_advantage_return", recording)
    records = recorded(model, tmp_path / "run", steps=2, **ALGORITHMS["ppo"]).records

    for call, record in zip(calls, records, strict=True):
        advantages, returns, values = [], [], []
        for reward, value, mask in zip(call["token_level_rewards"], call["values"], call["response_mask"].bool(), strict=True):
            following = last = 0.0
            for r, v in reversed([*zip(reward[mask].tolist(), value[mask].tolist(), strict=True)]):
                last = r + 0.99 * following - v + 0.99 * 0.9 * last
                following = v
                advantages.append(last)
                returns.append(last + v)
                values.append(v)
        raw, target = torch.tensor(advantages), torch.tensor(returns)
        explained = 1 - (target - torch.tensor(values)).var() / target.var()
        assert record.values["adv/raw/mean"] == pytest.approx(float(raw.mean()), rel=1e-4, abs=1e-6)
        assert record.values["adv/raw/std"] == pytest.approx(float(raw.std()), rel=1e-2)
        assert record.values["value/explained_variance"] == pytest.approx(float(explained), abs=1e-4)
        assert record.values["integrity/gae_identity"] <= 1e-5
        assert record.values["grad/actor/norm_preclip"] == pytest.approx(record.values["verl/actor/grad_norm"], rel=1e-4)
        assert record.values["grad/critic/norm_preclip"] == pytest.approx(record.values["verl/critic/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("level", ["off", "normal", "debug"])
def test_weights_are_bit_identical(level: str, model: Path, tmp_path: Path) -> None:
    """Of the actor and the critic, with the moments of their optimizers."""
    config = cpu_config(model, steps=2, **ALGORITHMS["ppo"])
    plain = weights(train(config))

    with Telemetry([], run_dir=tmp_path / "run", level=level, offload=False) as telemetry:
        watched = weights(train(config, telemetry))

    assert_identical(watched, plain)


def test_two_workers_report_as_one(model: Path, tmp_path: Path) -> None:
    """Ray's actors with FSDP2 on gloo. verl reduces the norm of gradients over the workers itself; the driver knows all completions."""
    config = cpu_config(model, steps=2, workers=2, actor_rollout_ref__actor__ppo_mini_batch_size=8)
    with Telemetry([], run_dir=tmp_path / "run", offload=False) as telemetry:
        train(config, telemetry, in_process=False)
    records = read_run(tmp_path / "run").records

    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert [record.axes.env_step for record in records] == [64, 128]
    for record in records:
        values = record.values
        assert values["grad/global/norm_preclip"] == pytest.approx(values["verl/actor/grad_norm"], rel=1e-5)
        assert values["lm/tokens"] == 2 * 64 * values["lm/length/mean"]
        assert values["lm/completions"] == 64
        assert values["lm/reward/mean"] == pytest.approx(values["verl/critic/score/mean"], rel=1e-6)
        assert values["integrity/ratio_init"] <= 1e-6
        assert "telemetry/metric_errors" not in values


def test_the_trainer_is_left_as_it_was_after_training_and_after_an_exception(model: Path, tmp_path: Path) -> None:
    trainers: list[CpuTrainer] = []

    class Failing(SamplingManager):
        def reward(self, *_: Any) -> float:
            raise ZeroDivisionError("no reward")

    class Kept(CpuTrainer):
        def fit(self, agent_loop_manager: Any) -> None:
            trainers.append(self)
            assert taps_of(self)
            super().fit(agent_loop_manager)

    for name, manager in ("whole", SamplingManager), ("failed", Failing):
        try:
            with Telemetry([], run_dir=tmp_path / name, offload=False) as telemetry:
                train(cpu_config(model, steps=1), telemetry, trainer=Kept, manager=manager)
        except ZeroDivisionError:
            assert name == "failed"

    assert [taps_of(trainer) for trainer in trainers] == [[], []]
    assert read_run(tmp_path / "whole").status is RunStatus.FINISHED
    assert read_run(tmp_path / "failed").status is RunStatus.FAILED


@pytest.mark.parametrize(
    "name", ["verl.DriverListener._emit_tokens", "verl.DriverListener._after_advantage", "verl_workers.WorkerListener._after_loss"]
)
def test_a_listener_that_fails_costs_its_events_and_not_the_training(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug of telemetry")

    plain = weights(train(cpu_config(model, steps=2)))
    monkeypatch.setattr(f"esper_telemetry.adapters.{name}", broken)
    with Telemetry([], run_dir=tmp_path / "run", offload=False) as telemetry:
        watched = weights(train(cpu_config(model, steps=2), telemetry))

    assert_identical(watched, plain)
    assert "a bug of telemetry" in caplog.text
    assert read_run(tmp_path / "run").status is RunStatus.FINISHED


def test_another_object_is_refused() -> None:
    with Telemetry([], run_dir=None) as telemetry, pytest.raises(TypeError, match="takes a Telemetry and verl's PPOTrainer"):
        attach_trainer(telemetry, object())


def test_the_plugin_does_nothing_unless_it_is_switched_on() -> None:
    """It imports neither torch nor verl, and adds no finder of modules."""
    code = "import sys; n = len(sys.meta_path); import esper_telemetry.adapters.verl_plugin; "
    code += "print(len(sys.meta_path) - n, 'torch' in sys.modules, 'verl' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ESPER_", "VERL_"))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)

    assert done.stdout == "0 False False\n"


def test_a_run_that_cannot_be_recorded_is_trained(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plugin wraps `fit`; here its directory is a file."""
    from esper_telemetry.adapters import verl_plugin

    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv(verl_plugin.RUN_DIR_VARIABLE, str(tmp_path / "file"))
    module: Any = type(sys)("trainer_base")
    module.PPOTrainer = CpuTrainer
    monkeypatch.setattr(CpuTrainer, "fit", CpuTrainer.fit)
    verl_plugin.wrap_fit(module)

    trainer = train(cpu_config(model, steps=1))

    assert trainer.global_steps == 2
    assert "this training is not recorded" in caplog.text


def test_all_three_backends_hold_what_the_journal_holds(model: Path, tmp_path: Path) -> None:
    with Telemetry(list(BACKENDS), run_dir=tmp_path, close_timeout=60) as telemetry:
        train(cpu_config(model, steps=3), telemetry)

    assert_the_same_numbers_in_all_four(tmp_path)


def test_texts_are_evidence_of_alarms(model: Path, tmp_path: Path) -> None:
    fault = {fault.name: fault for fault in FAULTS}["lr_x100"]
    alarm = recorded(model, tmp_path / "run", steps=2, fault=fault).alarms[0]

    samples = alarm.evidence["samples"]
    assert [sample["kind"] for sample in samples] == ["best", "worst", "longest"]
    assert all(sample["prompt"] and sample["completion"] for sample in samples)


@pytest.mark.parametrize("name", ["lr_x100", "advantage_sign", "group_of_one", "mask_shift", "stale_old", "engine_mismatch", "gae_lambda"])
def test_faults_are_named(name: str, model: Path, tmp_path: Path) -> None:
    fault = {fault.name: fault for fault in FAULTS}[name]
    alarms = recorded(model, tmp_path / "run", steps=5, fault=fault).alarms
    raised = [alarm.type for alarm in alarms if alarm.event is AlarmEvent.RAISE]

    assert set(raised) & set(fault.named_by), raised


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_it_learns_in_silence(estimator: str, seed: int, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", seed=seed)
    run = recorded(model, tmp_path / "run", steps=12, seed=seed, algorithm__adv_estimator=estimator)
    rewards = [record.values["lm/reward/mean"] for record in run.records]

    assert sum(rewards[-3:]) > 1.3 * sum(rewards[:3])
    assert [alarm.type for alarm in run.alarms] == []
