"""`TelemetryCallback` on a real `GRPOTrainer`: numbers, identity, weights, failures, backends."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="these tests need esper-telemetry[trl]")

from adapter_runs import assert_identical, taps_in
from backends_read import BACKENDS, assert_the_same_numbers_in_all_four
from transformers import PrinterCallback
from trl import GRPOTrainer, RLOOConfig, RLOOTrainer, SFTTrainer

from esper_telemetry import Telemetry, read_run
from esper_telemetry.adapters.completions import CompletionsEnd, CompletionsUpdate, TokensEnd
from esper_telemetry.adapters.trl import TelemetryCallback
from esper_telemetry.importers.records import read_foreign
from esper_telemetry.importers.source import read_source
from esper_telemetry.journal.read import Run
from esper_telemetry.lab.language_models import FAULTS, HEALTHY, build_trainer, run_fault
from esper_telemetry.lab.small_language_model import save_model

pytestmark = [
    pytest.mark.trl,
    pytest.mark.filterwarnings("ignore"),  # transformers and TRL emit deprecation warnings
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), seed=1)


def trained(model: Path, *callbacks: TelemetryCallback, steps: int = 4, **settings: Any) -> Any:
    trainer = build_trainer(model, seed=1, steps=steps, callbacks=callbacks, **settings)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


def recorded(model: Path, run_dir: Path, steps: int = 4, **settings: Any) -> Run:
    with Telemetry([], run_dir=run_dir, offload=False) as telemetry:
        trained(model, TelemetryCallback(telemetry), steps=steps, **settings)
    return read_run(run_dir)


def test_numbers_are_those_that_trl_computes_itself(model: Path, tmp_path: Path) -> None:
    """With one step per record, TRL's own log lines are a second computation of most metrics."""
    records = recorded(model, tmp_path / "run", num_iterations=1).records
    pairs = {
        "lm/reward/mean": "trl/reward",
        "lm/entropy": "trl/entropy",
        "lm/kl_reference": "trl/kl",
        "lm/length/mean": "trl/completions/mean_length",
        "lm/length/max": "trl/completions/max_length",
        "lm/truncated_frac": "trl/completions/clipped_ratio",
        "lm/groups/zero_advantage": "trl/frac_reward_zero_std",
        "grad/global/norm_preclip": "trl/grad_norm",
    }

    assert len(records) == 4
    for record in records:
        theirs = {key: record.values[other] for key, other in pairs.items()}
        ours = {key: record.values[key] for key in pairs}
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_scaled_gradients_of_half_precision_are_measured_after_the_scale_is_removed(model: Path, tmp_path: Path) -> None:
    """Accelerate refuses half precision without a GPU, so the test gives its accelerator the scaler that it would have."""
    with Telemetry([], run_dir=tmp_path / "run", offload=False) as telemetry:
        trainer = build_trainer(model, seed=1, steps=3, callbacks=[TelemetryCallback(telemetry)], num_iterations=1)
        accelerator = trainer.accelerator
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=1024.0), True
        accelerator.state._mixed_precision = "fp16"
        trainer.train()

    for record in read_run(tmp_path / "run").records:
        assert record.values["grad/global/norm_preclip"] == pytest.approx(record.values["trl/grad_norm"], rel=1e-3)


class LossElsewhere(GRPOTrainer):  # type: ignore[misc, unused-ignore]  # TRL may be absent
    """A trainer that computes its loss in a function of its own, as Unsloth's does, and returns no log-probabilities with gradients."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        return (None, None) if torch.is_grad_enabled() else super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> torch.Tensor:
        self._get_per_token_logps_and_entropies(model)
        loss: torch.Tensor = model(input_ids=inputs["completion_ids"]).logits.logsumexp(-1).mean()
        return loss


def test_what_a_trainer_computes_elsewhere_is_absent_without_an_error(model: Path, tmp_path: Path) -> None:
    with Telemetry([], run_dir=tmp_path / "run", offload=False) as telemetry:
        trainer = build_trainer(model, seed=1, steps=2, callbacks=[TelemetryCallback(telemetry)])
        trainer.__class__ = LossElsewhere
        trainer.train()

    for record in read_run(tmp_path / "run").records:
        assert record.values.get("telemetry/metric_errors", 0) == 0
        assert {"lm/reward/mean", "grad/global/norm_preclip"} <= set(record.values)
        assert "lm/entropy" not in record.values


def test_ratios_are_those_of_the_two_passes(model: Path, tmp_path: Path) -> None:
    """An independent listener computes each token's ratio from the log-probabilities of both passes."""
    events: list[TokensEnd] = []
    with Telemetry([], run_dir=tmp_path / "run", offload=False) as telemetry:
        callback = TelemetryCallback(telemetry)
        callback.hooks.on(TokensEnd, events.append)
        trained(model, callback, steps=2)
    values = read_run(tmp_path / "run").records[0].values

    assert [event.step for event in events] == [0, 1]
    ratios = [(event.log_probs - event.old).exp()[event.mask] for event in events if event.old is not None]
    clipped = ((ratios[1] - 1).abs() > 0.2).float().mean()
    assert values["policy/ratio/max"] == pytest.approx(float(torch.cat(ratios).max()), rel=1e-5)
    assert values["policy/clip_frac"] == pytest.approx(float(clipped), rel=1e-5)


def test_the_first_pass_reproduces_the_log_probabilities_of_collection(model: Path, tmp_path: Path) -> None:
    records = recorded(model, tmp_path / "run", steps=6).records

    assert [record.axes.gradient_step for record in records] == [2, 4, 6]
    assert [record.axes.env_step for record in records] == [32, 64, 96]
    assert all(record.values["integrity/ratio_init"] < 1e-6 for record in records)
    assert all(record.values["lm/mask_errors"] == 0 for record in records)
    assert all(record.values["lm/groups/sign_agreement"] == 1 for record in records)
    assert all("telemetry/metric_errors" not in record.values for record in records)


def test_a_ratio_that_is_one_by_construction_is_said_to_be_and_not_reported(model: Path, tmp_path: Path) -> None:
    run = recorded(model, tmp_path / "run", num_iterations=1)

    assert all(record.values["lm/ratio_constructed"] == 1 for record in run.records)
    assert not [key for key in run.records[-1].values if key.startswith(("policy/", "integrity/ratio_init"))]


@pytest.mark.parametrize("settings", [{"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 2, "steps_per_generation": 1}])
def test_accumulated_passes_are_one_step(model: Path, tmp_path: Path, settings: dict[str, int]) -> None:
    """Each step has two passes; if each pass has its own generation, one record holds both generations."""
    records = recorded(model, tmp_path / "run", num_iterations=1, per_device_train_batch_size=16, **settings).records

    assert [record.axes.gradient_step for record in records] == [1, 2, 3, 4]
    assert [record.axes.env_step for record in records] == [32, 64, 96, 128]
    assert records[-1].values["grad/global/norm_preclip"] == pytest.approx(records[-1].values["trl/grad_norm"], rel=1e-4)


def test_turns_of_the_model_are_counted_where_others_wrote_too(model: Path, tmp_path: Path) -> None:
    """Every second completion holds a token of its environment, after which the model writes again."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        written = [[3 + place % 4, 4, 5, 6] for place in range(len(prompts))]
        masks = [[1, 0, 1, 1] if place % 2 else [1] * 4 for place in range(len(prompts))]
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": written, "logprobs": None, "env_mask": masks}

    run = recorded(model, tmp_path / "run", trainer=partial(GRPOTrainer, rollout_func=rollout))

    assert {record.values["lm/turns/mean"] for record in run.records} == {1.5}
    assert {record.values["lm/turns/max"] for record in run.records} == {2.0}


def test_ratios_of_rloo_are_those_of_whole_completions(model: Path, tmp_path: Path) -> None:
    """A listener of the trainer's own loss computes the ratio of each completion; the KL in the rewards hides the advantages' sign."""
    events: list[TokensEnd] = []
    old: list[torch.Tensor] = []
    with Telemetry([], run_dir=tmp_path / "run", offload=False) as telemetry:
        callback = TelemetryCallback(telemetry)
        callback.hooks.on(TokensEnd, events.append)
        trainer = build_trainer(model, seed=1, steps=2, callbacks=[callback], trainer=RLOOTrainer, config=RLOOConfig, reward_weights=[1.0])
        compute = trainer._compute_loss

        def listening(network: Any, inputs: Any) -> Any:
            old.append(inputs["old_logps"])
            return compute(network, inputs)

        trainer._compute_loss = listening
        trainer.train()
    run = read_run(tmp_path / "run")
    values = run.records[0].values
    ratios = [
        torch.stack([row[mask].sum() for row, mask in zip(event.log_probs, event.mask, strict=True)]).sub(before).exp()
        for event, before in zip(events, old, strict=True)
    ]

    assert run.info.facts["trainer"] == "trl RLOOTrainer"
    assert values["integrity/ratio_init"] < 1e-5
    assert values["lm/ratio_constructed"] == 0
    assert values["policy/ratio/max"] == pytest.approx(float(torch.cat(ratios).max()), rel=1e-5)
    assert values["lm/sequence/logratio_absmax"] == pytest.approx(float(ratios[1].log().abs().max()), rel=1e-5)
    lengths = events[1].mask.sum(-1)
    per_token = float((ratios[1].log() / lengths).abs().max())
    assert values["lm/sequence/mean_logratio_absmax"] == pytest.approx(per_token, rel=1e-5)
    assert values["policy/clip_frac"] == pytest.approx(float(((ratios[1] - 1).abs() > 0.2).float().mean()), rel=1e-5)
    assert "lm/groups/sign_agreement" not in values
    assert "telemetry/metric_errors" not in values


def test_alarms_show_the_best_the_worst_and_the_longest_completion(model: Path, tmp_path: Path) -> None:
    """Texts are shortened and lose secrets; `samples=False` keeps none."""
    events: list[CompletionsEnd] = []
    with Telemetry([], run_dir=tmp_path / "run", offload=False) as telemetry:
        for samples in (True, False):
            callback = TelemetryCallback(telemetry, samples=samples)
            callback.hooks.on(CompletionsEnd, events.append)
            trained(model, callback, steps=1)
    event, without = events
    best, worst, longest = event.samples
    rewards = event.total_rewards

    assert not without.samples
    assert (best.reward, worst.reward) == (float(rewards.max()), float(rewards.min()))
    assert longest.tokens == int(event.lengths.max())
    assert all(len(sample.prompt) == 2 and sample.completion for sample in event.samples)
    alarm = recorded(model, tmp_path / "large", steps=6, learning_rate=0.3).alarms[0]
    assert [sample["kind"] for sample in alarm.evidence["samples"]] == ["best", "worst", "longest"]
    secret = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7xY9z"
    update = CompletionsUpdate((replace(event, samples=(best._replace(completion=f"{secret} " + 300 * "ab "),)),))
    (sample,) = update.alarm_evidence(alarm)["samples"]
    assert "aB3dE5gH7jK9" not in sample["completion"]
    assert len(sample["completion"]) < 410
    assert sample["kind"] == "best"


@pytest.mark.parametrize("level", ["off", "normal", "debug"])
def test_weights_are_bit_identical(model: Path, tmp_path: Path, level: str) -> None:
    plain = trained(model).model.state_dict()

    with Telemetry([], run_dir=tmp_path / "run", level=level, offload=False) as telemetry:
        watched = trained(model, TelemetryCallback(telemetry)).model.state_dict()

    assert_identical(watched, plain)


def test_the_trainer_is_left_as_it_was_after_training_and_after_an_exception(model: Path, tmp_path: Path) -> None:
    def fails(**_: Any) -> list[float]:
        raise ZeroDivisionError("no reward")

    with Telemetry([], run_dir=tmp_path / "run", offload=False) as telemetry:
        assert taps_in([trained(model, TelemetryCallback(telemetry))]) == []

    trainer = None
    with pytest.raises(ZeroDivisionError), Telemetry([], run_dir=tmp_path / "failed", offload=False) as telemetry:
        trainer = build_trainer(model, seed=1, steps=4, rewards=fails, callbacks=[TelemetryCallback(telemetry)])
        trainer.train()
    assert taps_in([trainer]) == []
    assert read_run(tmp_path / "failed").status == "failed"


def test_a_listener_that_fails_costs_its_events_and_not_the_training(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug of telemetry")

    monkeypatch.setattr("esper_telemetry.adapters.trl.TrainerListener._after_loss", broken)
    run = recorded(model, tmp_path / "run")

    assert len(run.records) == 2
    assert "lm/entropy" not in run.records[-1].values
    assert "a bug of telemetry" in caplog.text


def test_checkpoints_are_clean_and_training_goes_on_from_them(model: Path, tmp_path: Path) -> None:
    with Telemetry([], run_dir=tmp_path / "a", offload=False) as telemetry:
        trained(model, TelemetryCallback(telemetry), save_strategy="steps", save_steps=2)
    with Telemetry([], run_dir=tmp_path / "b", offload=False) as telemetry:
        trainer = build_trainer(model, seed=1, steps=6, callbacks=[TelemetryCallback(telemetry)])
        trainer.train(resume_from_checkpoint=str(model / "trl" / "checkpoint-4"))

    assert [record.axes.gradient_step for record in read_run(tmp_path / "b").records] == [6]
    assert [record.axes.env_step for record in read_run(tmp_path / "b").records] == [96]


def test_another_trainer_is_refused_by_name(model: Path) -> None:
    class Other:
        callback_handler: Any = None

        def begin(self, callback: TelemetryCallback) -> None:
            self.callback_handler = type("Handler", (), {"callbacks": [callback]})
            callback.on_train_begin(None, None, None)

    with Telemetry([]) as telemetry, pytest.raises(TypeError, match="watches GRPOTrainer, got Other, which has no _calculate_rewards"):
        Other().begin(TelemetryCallback(telemetry))
    assert not hasattr(SFTTrainer, "_calculate_rewards")


def test_all_three_backends_hold_what_the_journal_holds(model: Path, tmp_path: Path) -> None:
    with Telemetry(list(BACKENDS), run_dir=tmp_path, close_timeout=60) as telemetry:
        trained(model, TelemetryCallback(telemetry))

    assert_the_same_numbers_in_all_four(tmp_path)


def test_an_unedited_script_is_recorded(tmp_path: Path) -> None:
    """`esper-telemetry run` attaches the callback; the script does not mention it."""
    script = Path(__file__).parents[2] / "examples" / "language_model.py"
    run_dir = tmp_path / "run"
    command = [sys.executable, "-W", "ignore", "-m", "esper_telemetry", "run", "--run-dir", str(run_dir), str(script)]
    done = subprocess.run([*command, "--plain", "--steps", "4"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "attached TelemetryCallback to GRPOTrainer" in done.stderr
    assert [record.axes.gradient_step for record in read_run(run_dir).records] == [2, 4]


def test_a_log_of_trl_is_read_by_diagnose(model: Path, tmp_path: Path) -> None:
    """TRL itself writes to TensorBoard; the numbers equal our own record's."""
    logs = tmp_path / "logs"
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(logs)
    try:
        run = recorded(model, tmp_path / "run", steps=3, num_iterations=1, report_to="tensorboard")
    finally:
        del os.environ["TENSORBOARD_LOGGING_DIR"]

    imported = read_foreign(read_source(f"tensorboard:{logs}"))

    assert imported.trainer == "TRL"
    for ours, theirs in zip(run.records, imported.records, strict=True):
        for key in ("lm/reward/mean", "lm/entropy", "lm/kl_reference", "lm/length/mean", "lm/truncated_frac"):
            assert theirs.values[key] == pytest.approx(ours.values[key], rel=1e-4, abs=1e-6), key
    assert "train/num_tokens" in imported.unused


@pytest.mark.parametrize("name", ["healthy", "reward_sign", "mask_shift"])
def test_the_fault_bed_names_what_is_wrong(name: str, tmp_path: Path) -> None:
    fault = {fault.name: fault for fault in (HEALTHY, *FAULTS)}[name]

    verdict = run_fault(fault, seed=1, steps=12, directory=tmp_path)

    assert verdict.cause in (fault.named_by or ("",)), verdict
