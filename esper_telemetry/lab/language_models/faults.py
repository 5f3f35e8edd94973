"""Ten faults of training a language model, each as a trainer that makes it, and the alarms that name it.

The sampling engine of a healthy run gives the log-probabilities that the trainer has: TRL keeps none where transformers generates.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from trl import GRPOTrainer

from esper_telemetry.lab.language_models.task import Reward, repeats_letter

STALE_GENERATIONS: Final = 4
"""Generations by which stale log-probabilities are old."""

ENGINE_NOISE: Final = 0.3
"""Standard deviation, in nats, of what is added to the log-probabilities of the engine."""

HOT: Final = 2.0
"""Temperature of sampling where the loss assumes 1."""


class HealthyTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL is not typed where it is not installed
    """A trainer whose sampling engine gives log-probabilities."""

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
        """Turn the sign of the advantages."""
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
        """Replace the old log-probabilities by those of an older copy of the model."""
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
class Fault:
    """One fault.

    Attributes:
        name: its name.
        named_by: types of alarms that name it.
        trainer: class of the trainer that makes it.
        reward: reward function of the run.
        settings: of the trainer, where they differ from those of the task.
    """

    name: str
    named_by: tuple[str, ...]
    trainer: type = HealthyTrainer
    reward: Reward = repeats_letter
    settings: Mapping[str, Any] = field(default_factory=dict)


HEALTHY: Final = Fault("healthy", ())
FAULTS: Final[tuple[Fault, ...]] = (
    Fault(
        "lr_x100",
        ("policy/kl_spike", "policy/kl_drift", "policy/clip_saturation", "lm/entropy_collapse", "opt/update_too_large"),
        settings={"learning_rate": 0.3},
    ),
    Fault("reward_sign", ("lm/advantage_sign",), TurnedSign),
    Fault("constant_reward", ("lm/dead_groups",), reward=always_half),
    Fault("wrong_grouping", ("lm/grouping",), WrongGroups),
    Fault("mask_shift", ("lm/mask",), ShiftedMask),
    Fault("stale_old", ("integrity/ratio_init",), StaleLogProbs),
    Fault("sampling_perturbed", ("lm/engine_mismatch",), NoisyEngine),
    Fault("temperature", ("lm/other_distribution",), HotSampling),
    Fault("length_reward", ("lm/length_reward",), reward=pays_length),
    Fault("bf16_log_probs", ("lm/rounded",), RoundedLogProbs),
)
