"""A small language model that learns a verifiable task with TRL, and the faults that break it. It needs `esper-telemetry[trl]`.

    python -m esper_telemetry.lab.language_models --seeds 5 --steps 60

prints a table in Markdown. For each fault it counts the runs in which an alarm that names it was raised, and in which it was the first
cause; for healthy training it counts the runs with any alarm.

A random two-layer Llama with a character vocabulary learns to repeat the letter of its prompt. Nothing is downloaded, and an optimizer step
takes about 50 ms on one core. The sampling engine of a healthy run returns the trainer's log-probabilities, since TRL does not keep any if
transformers generates. Each fault is a trainer that makes it, with the alarms that name it.
"""

from __future__ import annotations

import copy
import random
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers
import tyro
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from esper_telemetry.adapters.trl import TelemetryCallback
from esper_telemetry.core.record import AlarmEvent
from esper_telemetry.journal.read import read_run
from esper_telemetry.lab.small_language_model import LETTERS, repeats_letter, save_model
from esper_telemetry.telemetry import Telemetry

Reward = Callable[..., list[float]]
"""A reward function of TRL."""


def prompts() -> Any:
    """Return the prompts: each letter with a question mark."""
    return Dataset.from_list([{"prompt": f"{letter}?"} for letter in LETTERS])


def build_trainer(
    directory: Path,
    *,
    seed: int,
    steps: int,
    rewards: Reward | list[Reward] = repeats_letter,
    callbacks: Sequence[Any] = (),
    trainer: type = GRPOTrainer,
    config: type = GRPOConfig,
    **settings: Any,
) -> Any:
    """Return a trainer that begins with the model of `directory`; `settings` override the task's settings.

    `config` is the class of the trainer's settings.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    chosen = {
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "num_iterations": 2,
        "max_completion_length": 6,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "beta": 0.01,
        **({"loss_type": "grpo"} if config is GRPOConfig else {}),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        **settings,
    }
    args = config(output_dir=str(directory / "trl"), max_steps=steps, seed=seed, disable_tqdm=True, **chosen)
    return trainer(str(directory), reward_funcs=rewards, args=args, train_dataset=prompts(), callbacks=list(callbacks))


STALE_GENERATIONS: Final = 4
"""Age of stale log-probabilities in generations."""

ENGINE_NOISE: Final = 0.3
"""Standard deviation, in nats, of the noise that is added to the log-probabilities of the engine."""

HOT: Final = 2.0
"""Temperature of sampling, while the loss assumes 1."""


class HealthyTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL is not typed if it is not installed
    """A trainer whose sampling engine returns log-probabilities."""

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*args, **kwargs)
        self.last_rewards = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: list[Any]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        batch["sampling_per_token_logps"] = batch["old_per_token_logps"].clone()
        return self.spoiled(batch)

    def spoiled(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch of completions as it is learned from."""
        return batch


class TurnedSign(HealthyTrainer):
    """Advantages of the wrong sign."""

    def spoiled(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Flip the sign of the advantages."""
        return {**batch, "advantages": -batch["advantages"]}


class WrongGroups(HealthyTrainer):
    """Rewards reshaped into groups along the wrong axis."""

    def spoiled(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Compare every eighth completion with each other."""
        grouped = self.last_rewards.sum(-1).view(self.num_generations, -1)
        advantages = (grouped - grouped.mean(0)) / (grouped.std(0) + 1e-4)
        return {**batch, "advantages": advantages.flatten()}


class ShiftedMask(HealthyTrainer):
    """A completion mask that begins one token late and ends one token late."""

    def spoiled(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Shift the mask."""
        mask = batch["completion_mask"].roll(1, dims=1)
        mask[:, 0] = 0
        return {**batch, "completion_mask": mask}


class StaleLogProbs(HealthyTrainer):
    """Old log-probabilities of weights that are some generations old."""

    def spoiled(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Replace the old log-probabilities by an older copy's."""
        self.copies = [*getattr(self, "copies", []), copy.deepcopy(self.model).eval()][-STALE_GENERATIONS:]
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        with torch.no_grad():
            old = self._get_per_token_logps_and_entropies(self.copies[0], ids, mask, batch["completion_ids"].size(1))[0]
        return {**batch, "old_per_token_logps": old}


class NoisyEngine(HealthyTrainer):
    """An engine with other numerics than the trainer."""

    def spoiled(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add noise to the log-probabilities of the engine."""
        engine = batch["sampling_per_token_logps"]
        noise = torch.randn(engine.shape, generator=torch.Generator().manual_seed(int(self.state.global_step)))
        return {**batch, "sampling_per_token_logps": engine + ENGINE_NOISE * noise}


class HotSampling(HealthyTrainer):
    """Sampling at another temperature than the loss assumes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generation_config.temperature = HOT


class RoundedLogProbs(HealthyTrainer):
    """Log-probabilities rounded to bfloat16."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        log_probs, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return (log_probs.bfloat16().float(), *others)


def always_half(completions: list[str], **_: Any) -> list[float]:
    """Return the same reward for every completion."""
    return [0.5] * len(completions)


def pays_length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the number of tokens of each completion."""
    return [float(len(ids)) for ids in completion_ids]


@dataclass(frozen=True, slots=True)
class LanguageFault:
    """One fault.

    Attributes:
        name: its name.
        named_by: types of alarms that name it.
        trainer: class of the trainer that makes it.
        reward: reward function of the run.
        settings: settings of the trainer that differ from the task's.
    """

    name: str
    named_by: tuple[str, ...]
    trainer: type = HealthyTrainer
    reward: Reward = repeats_letter
    settings: Mapping[str, Any] = field(default_factory=dict)


HEALTHY: Final = LanguageFault("healthy", ())
FAULTS: Final[tuple[LanguageFault, ...]] = (
    LanguageFault(
        "lr_x100",
        ("policy/kl_spike", "policy/kl_drift", "policy/clip_saturation", "lm/entropy_collapse", "opt/update_too_large"),
        settings={"learning_rate": 0.3},
    ),
    LanguageFault("reward_sign", ("lm/advantage_sign",), TurnedSign),
    LanguageFault("constant_reward", ("lm/dead_groups",), reward=always_half),
    LanguageFault("wrong_grouping", ("lm/grouping",), WrongGroups),
    LanguageFault("mask_shift", ("lm/mask",), ShiftedMask),
    LanguageFault("stale_old", ("integrity/ratio_init",), StaleLogProbs),
    LanguageFault("sampling_perturbed", ("lm/engine_mismatch",), NoisyEngine),
    LanguageFault("temperature", ("lm/other_distribution",), HotSampling),
    LanguageFault("length_reward", ("lm/length_reward",), reward=pays_length),
    LanguageFault("bf16_log_probs", ("lm/rounded",), RoundedLogProbs),
)


class FirstIncident(NamedTuple):
    """Outcome of one run: the types of all alarms raised, and the cause that the first incident names."""

    alarms: tuple[str, ...]
    cause: str
    update: int


def run_fault(fault: LanguageFault, *, seed: int, steps: int, directory: Path) -> FirstIncident:
    """Train with a fault and return the alarms."""
    model = save_model(directory / f"{fault.name}-{seed}", seed=seed)
    run_dir = model / "run"
    with Telemetry([], run_dir=run_dir) as telemetry:
        trainer = build_trainer(
            model,
            seed=seed,
            steps=steps,
            rewards=fault.reward,
            callbacks=[TelemetryCallback(telemetry)],
            trainer=fault.trainer,
            **fault.settings,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    raised = [alarm for alarm in read_run(run_dir).alarms if alarm.event is AlarmEvent.RAISE]
    first = min(raised, key=lambda alarm: alarm.axes.update, default=None)
    if first is None:
        return FirstIncident((), "", 0)
    incident = [alarm for alarm in raised if alarm.incident == first.incident]
    cause = incident[-1].cause or first.type
    return FirstIncident(tuple(sorted({alarm.type for alarm in raised})), str(cause).partition(":")[0], first.axes.update)


@dataclass(frozen=True, slots=True)
class Options:
    """Score the alarms on the faults of language models.

    Attributes:
        seeds: runs of each fault, and of healthy training.
        steps: optimizer steps of each run; two make an update.
        only: names of faults, or `healthy`; all by default.
        verbose: print each run's alarms.
    """

    seeds: int = 5
    steps: int = 60
    only: tuple[str, ...] = ()
    verbose: bool = False


def score(options: Options) -> str:
    """Run the bed and return its table."""
    lines = ["| run | named | first cause | update | other alarms |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as directory:
        for fault in (HEALTHY, *FAULTS):
            if options.only and fault.name not in options.only:
                continue
            runs = [run_fault(fault, seed=seed, steps=options.steps, directory=Path(directory)) for seed in range(1, options.seeds + 1)]
            for run in runs if options.verbose else ():
                print(fault.name, run)
            named = sum(bool(set(run.alarms) & set(fault.named_by)) for run in runs)
            causes = sum(run.cause in fault.named_by for run in runs)
            others = sorted({alarm for run in runs for alarm in run.alarms} - set(fault.named_by))
            updates = sorted(run.update for run in runs if run.cause)
            median = str(updates[len(updates) // 2]) if updates else ""
            if fault is HEALTHY:
                alarmed = sum(bool(run.alarms) for run in runs)
                lines.append(f"| healthy | {alarmed} of {len(runs)} with any alarm | | {median} | {', '.join(others)} |")
            else:
                lines.append(f"| {fault.name} | {named} of {len(runs)} | {causes} of {len(runs)} | {median} | {', '.join(others)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(score(tyro.cli(Options, args=arguments)))


if __name__ == "__main__":
    main()
