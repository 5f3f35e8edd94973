"""Small TorchRL PPO programs: a plain loop with `ClipPPOLoss`, and `PPOTrainer`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from adapter_runs import moments, recorded, taps_in
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchRL emits deprecation warnings
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
    from torchrl.envs import Compose, GymEnv, GymWrapper, RewardScaling, SerialEnv, StepCounter, TransformedEnv
    from torchrl.modules import NormalParamExtractor, OneHotCategorical, ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE
    from torchrl.trainers.algorithms import PPOTrainer

from esper_telemetry import Telemetry
from esper_telemetry.adapters.torchrl import attach_loss, attach_trainer
from esper_telemetry.journal.read import Run

ENVS, STEPS, ROWS, EPOCHS = 4, 32, 32, 2
FRAMES = ENVS * STEPS
MAX_NORM = 0.5
ROLLOUT = FRAMES
FAILING = ("acting_distribution", "columns_of")
IN_BACKENDS = ("CartPole-v1", "CartPole-v1, PPOTrainer")


class Blind(gym.ObservationWrapper[Any, Any, Any]):
    def observation(self, observation: Any) -> Any:
        return 0 * observation


class DriftingNormalizer(nn.Module):
    """Normalises observations by statistics that every training pass moves."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, rows: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.mean = 0.9 * self.mean + 0.1 * rows.detach().flatten(0, -2).mean(0) + 0.05
        return rows - self.mean


class Program:
    """The pieces of a PPO program, as its author builds them.

    Args:
        env: name of the environment.
        scale: factor on rewards.
        observed: module between observations and the actor.
        learning_rate, loss, estimator: settings of the optimizer, the loss and the estimator.
        uses_trainer: whether `train` uses `PPOTrainer` instead of the plain loop.
    """

    def __init__(
        self,
        env: str = "CartPole-v1",
        *,
        seed: int = 1,
        envs: int = ENVS,
        steps: int = STEPS,
        updates: int = 3,
        scale: float | None = None,
        learning_rate: float = 3e-4,
        rows: int = ROWS,
        epochs: int = EPOCHS,
        width: int = 32,
        observed: nn.Module | None = None,
        blind: bool = False,
        loss: Mapping[str, Any] | None = None,
        estimator: Mapping[str, Any] | None = None,
        device: str = "cpu",
        uses_trainer: bool = False,
    ) -> None:
        self.uses_trainer = uses_trainer
        torch.distributions.Distribution.set_default_validate_args(False)  # as importing TorchRL does
        torch.manual_seed(seed)
        self.epochs, self.minibatches = epochs, envs * steps // rows
        self.frames = updates * envs * steps
        transforms = [StepCounter(), *([] if scale is None else [RewardScaling(0.0, scale)])]

        def make() -> Any:
            return GymWrapper(Blind(gym.make(env))) if blind else GymEnv(env)

        self.env = TransformedEnv(SerialEnv(envs, make), Compose(*transforms))
        self.env.set_seed(seed)
        size = self.env.observation_spec["observation"].shape[-1]
        self.actor, self.critic = (network.to(device) for network in self._networks(size, width, observed))
        self.loss = ClipPPOLoss(
            self.actor,
            self.critic,
            **{"critic_coeff": 0.5, "entropy_coeff": 0.01, "loss_critic_type": "l2", "normalize_advantage": True, **(loss or {})},
        )
        self.estimator = GAE(value_network=self.critic, **{"gamma": 0.99, "lmbda": 0.95, **(estimator or {})})
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=learning_rate)
        devices = {} if device == "cpu" else {"env_device": "cpu", "policy_device": device, "storing_device": device}
        self.collector = Collector(self.env, self.actor, frames_per_batch=envs * steps, total_frames=self.frames, **devices)
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(envs * steps, device=device), sampler=SamplerWithoutReplacement(), batch_size=rows
        )

    def _networks(self, size: int, width: int, observed: nn.Module | None) -> tuple[Any, Any]:
        continuous = self.env.action_spec.dtype.is_floating_point
        outputs = 2 * self.env.action_spec.shape[-1] if continuous else self.env.action_spec.shape[-1]
        layers: list[nn.Module] = [nn.Linear(size, width), nn.Tanh(), nn.Linear(width, outputs)]
        if observed is not None:
            layers.insert(0, observed)
        keys = ["loc", "scale"] if continuous else ["logits"]
        if continuous:
            layers.append(NormalParamExtractor())
        spec = self.env.action_spec_unbatched
        bounds = {"low": spec.space.low, "high": spec.space.high} if continuous else {}
        actor = ProbabilisticActor(
            TensorDictModule(nn.Sequential(*layers), in_keys=["observation"], out_keys=keys),
            in_keys=keys,
            spec=spec,
            distribution_class=TanhNormal if continuous else OneHotCategorical,
            distribution_kwargs=bounds,
            return_log_prob=True,
        )
        value = nn.Sequential(nn.Linear(size, width), nn.Tanh(), nn.Linear(width, 1))
        return actor, ValueOperator(value, in_keys=["observation"])

    def learn(self, after_batch: Callable[[Any], None] | None = None) -> None:
        """The plain loop of TorchRL's tutorial."""
        for batch in self.collector:
            if after_batch is not None:
                after_batch(batch)
            self.learn_from(batch)
        self.collector.shutdown()

    def learn_from(self, batch: Any) -> None:
        for _ in range(self.epochs):
            self.estimator(batch)
            self.buffer.empty()
            self.buffer.extend(batch.reshape(-1))
            for _ in range(self.minibatches):
                losses = self.loss(self.buffer.sample())
                total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                total.backward()
                nn.utils.clip_grad_norm_(self.loss.parameters(), MAX_NORM)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def trainer(self, **settings: Any) -> Any:
        """The same program with TorchRL's trainer, which normalises advantages over the batch."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return PPOTrainer(
                collector=self.collector,
                total_frames=self.frames,
                frame_skip=1,
                optim_steps_per_batch=None,  # the sampler's own number: given explicitly, it leaves every second pass empty
                loss_module=self.loss,
                optimizer=self.optimizer,
                num_epochs=self.epochs,
                replay_buffer=self.buffer,
                clip_norm=MAX_NORM,
                progress_bar=False,
                gae=self.estimator,
                log_interval=1,
                **settings,
            )


LARGE: Mapping[str, Any] = {"steps": 256, "rows": 128, "epochs": 4, "updates": 6}
"""Settings of a rollout that is large enough to judge."""

BROKEN: Mapping[str, Callable[[], Program]] = {
    "learning_rate_x100": lambda: Program(learning_rate=3e-2, **LARGE),
    "reward_1e4": lambda: Program(scale=1e4, **LARGE),
    "constant_observations": lambda: Program(blind=True, **LARGE),
    "drifting_normalizer": lambda: Program(observed=DriftingNormalizer(), **LARGE),
}
CAUSES = {
    "learning_rate_x100": {"policy/kl_spike", "opt/update_too_large"},
    "reward_1e4": {"reward/unscaled"},
    "constant_observations": {"obs/constant"},
    "drifting_normalizer": {"integrity/ratio_init"},
}
HEALTHY = {"large": lambda: Program(**{**LARGE, "updates": 10})}
MODELS = {
    f"{env}, PPOTrainer" if uses_trainer else env: partial(Program, env, uses_trainer=uses_trainer)
    for env in ("CartPole-v1", "Pendulum-v1")
    for uses_trainer in (False, True)
}


def train(program: Program, updates: int, telemetry: Telemetry | None = None) -> Program:
    """Run the program, which has its own number of updates."""
    if program.uses_trainer:
        trainer = program.trainer()
        if telemetry is not None:
            attach_trainer(telemetry, trainer)
        trainer.train()
        return program
    if telemetry is not None:
        attach_loss(telemetry, program.loss, program.optimizer, program.estimator)
    program.learn()
    return program


def taps_of(program: Program) -> list[str]:
    return taps_in([program.loss, program.estimator, *program.loss.modules()], program.optimizer)


def recorded_run(program: Program, run_dir: Path, **settings: Any) -> Run:
    return recorded(train, program, run_dir, **settings)[0]


def fingerprint(program: Program) -> dict[str, Tensor]:
    weights = {name: parameter.detach().clone() for name, parameter in program.loss.named_parameters()}
    return {**weights, **moments(program.optimizer), "generator": torch.get_rng_state()}
