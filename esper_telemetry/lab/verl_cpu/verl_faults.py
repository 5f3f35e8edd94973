"""Trainings of verl with one fault each, and the alarms that name it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.single_controller.base.decorator import register

from esper_telemetry.lab.verl_cpu.verl_training import BY_ROWS, CpuTrainer, SamplingManager, SamplingWorker

STALE_UPDATES: Final = 4
"""Age of stale log-probabilities in updates."""

ENGINE_NOISE: Final = 0.3
"""Standard deviation, in nats, of the noise that is added to the log-probabilities of the engine."""


class FlippedSign(CpuTrainer):
    """Advantages of the wrong sign."""

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        super()._compute_advantage(batch, metrics)
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages"])
        fields = TensorDict({"advantages": -data["advantages"]}, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


class WrongLambda(CpuTrainer):
    """Advantages with another lambda than the configuration's."""

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        algorithm = self.config.algorithm
        configured, algorithm.lam = algorithm.lam, 0.3
        batch = super()._compute_advantage(batch, metrics)
        algorithm.lam = configured
        return batch


class StaleWorker(SamplingWorker):
    """Old log-probabilities of weights that are some updates old."""

    copies: tuple[dict[str, Tensor], ...] = ()

    @register(dispatch_mode=BY_ROWS)  # type: ignore[untyped-decorator, unused-ignore]
    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        """Compute them with an older copy of the weights."""
        module = self.actor.engine.module
        now = {name: value.clone() for name, value in module.state_dict().items()}
        self.copies = (*self.copies, now)[-STALE_UPDATES:]
        module.load_state_dict(self.copies[0])
        output = self.actor.infer_batch(data)
        module.load_state_dict(now)
        return output.cpu()


class StaleTrainer(CpuTrainer):
    """A trainer with stale log-probabilities."""

    worker = StaleWorker


class NoisyWorker(SamplingWorker):
    """An engine with other numerics than the trainer."""

    @register(dispatch_mode=BY_ROWS)  # type: ignore[untyped-decorator, unused-ignore]
    def sample(self, data: TensorDict) -> TensorDict:
        """Add noise to the log-probabilities."""
        sampled = super().sample(data)
        sampled["rollout_log_probs"] += ENGINE_NOISE * torch.randn(sampled["rollout_log_probs"].shape)
        return sampled


class NoisyTrainer(CpuTrainer):
    """A trainer whose engine has other numerics."""

    worker = NoisyWorker


class HotWorker(SamplingWorker):
    """Sampling at another temperature than the loss assumes."""

    temperature = 2.0


class HotTrainer(CpuTrainer):
    """A trainer that samples at another temperature."""

    worker = HotWorker


class ShiftedSamplingMask(SamplingManager):
    """A mask that leaves out the first token."""

    def row(self, *args: Any) -> dict[str, Any]:
        """Shift the mask."""
        fields = super().row(*args)
        mask = torch.ones_like(fields["response_mask"])
        mask[0] = 0
        return fields | {"response_mask": mask, "loss_mask": mask}


class ConstantReward(SamplingManager):
    """The same reward for every completion."""

    def reward(self, prompt: str, response: Tensor, text: str) -> float:
        """Return a half."""
        return 0.5


class LengthReward(SamplingManager):
    """A reward for length."""

    def reward(self, prompt: str, response: Tensor, text: str) -> float:
        """Return the number of tokens."""
        return float(len(response))


@dataclass(frozen=True, slots=True)
class VerlFault:
    """One fault.

    Attributes:
        name: its name.
        named_by: types of alarms that name it.
        trainer: class of the trainer that makes it.
        manager: class that samples and scores.
        settings: settings that differ from the task's, as in `cpu_config`.
    """

    name: str
    named_by: tuple[str, ...]
    trainer: type[CpuTrainer] = CpuTrainer
    manager: type[SamplingManager] = SamplingManager
    settings: Mapping[str, Any] = field(default_factory=dict)


ONE_EACH: Final = {
    "actor_rollout_ref__rollout__n": 1,
    "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu": 8,
}
"""Settings with one completion per prompt."""

FAULTS: Final[tuple[VerlFault, ...]] = (
    VerlFault(
        "lr_x100",
        ("policy/kl_spike", "policy/kl_drift", "policy/clip_saturation", "lm/entropy_collapse", "opt/update_too_large"),
        settings={"actor_rollout_ref__actor__optim__lr": 0.3},
    ),
    VerlFault("advantage_sign", ("lm/advantage_sign",), FlippedSign),
    VerlFault("constant_reward", ("lm/dead_groups",), manager=ConstantReward),
    VerlFault("group_of_one", ("lm/grouping",), settings=ONE_EACH),
    VerlFault("mask_shift", ("lm/mask",), manager=ShiftedSamplingMask),
    VerlFault("stale_old", ("integrity/ratio_init",), StaleTrainer),
    VerlFault("engine_mismatch", ("lm/engine_mismatch",), NoisyTrainer),
    VerlFault("temperature", ("lm/other_distribution", "lm/engine_mismatch"), HotTrainer),
    VerlFault("length_reward", ("lm/length_reward",), manager=LengthReward),
    VerlFault("gae_lambda", ("integrity/equation",), WrongLambda, settings={"algorithm__adv_estimator": "gae"}),
)
