"""Proximal policy optimisation for vector environments, with an event for everything worth watching."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_telemetry import ops
from esper_telemetry.environments.protocol import VectorEnvironment
from esper_telemetry.events import (
    BackwardEnd,
    EpisodeEnd,
    MinibatchEnd,
    RolloutEnd,
    RunStart,
    TrunkBackward,
    UpdateEnd,
)
from esper_telemetry.hooks import Hooks
from esper_telemetry.ppo.backward import backward_losses, backward_trunks, gradient, leaf
from esper_telemetry.ppo.collector import Collector
from esper_telemetry.ppo.config import PPOConfig
from esper_telemetry.ppo.policy import ActorCritic
from esper_telemetry.ppo.rollout import Batch, Rollout, flatten
from esper_telemetry.ppo.steps import UpdateSteps

FACTS = (
    "max_grad_norm",
    "clip",
    "gamma",
    "gae_lambda",
    "normalize_advantages",
    "num_steps",
    "num_epochs",
    "num_minibatches",
    "learning_rate",
    "value_coef",
    "entropy_coef",
)


class Result(NamedTuple):
    """What the policy says of a minibatch now: log-ratio [N], values [N], scores by head [N, size], losses by name."""

    log_ratio: Tensor
    values: Tensor
    scores: Mapping[str, Tensor]
    losses: Mapping[str, Tensor]


class PPO:
    """Trains a policy in the environments.

    Attributes:
        env, config, policy, optimizer: what it is made of.
        hooks: who is told of what happens.
        steps: the parts of the update; replace one to vary the algorithm.
        env_steps, updates, gradient_steps: what has been done so far.

    Raises ValueError where the minibatches do not divide a rollout.
    """

    def __init__(
        self, env: VectorEnvironment, config: PPOConfig | None = None, *, device: str | torch.device = "cpu"
    ) -> None:
        self.config = config or PPOConfig()
        self.config.check_rollout(env.num_envs)
        self.env = env
        self.hooks = Hooks()
        self.steps = UpdateSteps()
        self.policy = build_policy(env, self.config).to(device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.config.learning_rate, eps=1e-5, fused=True)
        self.env_steps = self.updates = self.gradient_steps = 0
        self._collector = Collector(env, self.policy, self.config.num_steps, self.config.seed)
        self._generator = torch.Generator().manual_seed(self.config.seed)
        coefficients = {"policy": 1.0, "value": self.config.value_coef, "entropy": self.config.entropy_coef}
        self._weights = {name: torch.tensor(weight, device=device) for name, weight in coefficients.items()}
        self._parameters = dict(self.policy.named_parameters())

    def learn(self, total_steps: int) -> None:
        """Trains until that many environment steps are collected, those of earlier calls included.

        Raises:
            ValueError: they are collected already.
            FloatingPointError: observations or weights are not finite; to go on would be to train on noise.
        """
        if total_steps <= self.env_steps:
            raise ValueError(f"total_steps must exceed the {self.env_steps} steps already collected, got {total_steps}")
        if self.hooks.wants(RunStart):
            self.hooks.emit(RunStart(asdict(self.config), self.facts(total_steps)))
        while self.env_steps < total_steps:
            self._set_learning_rate(1 - self.env_steps / total_steps)
            self._train_once()

    def facts(self, total_steps: int) -> dict[str, Any]:
        """What detectors need to know of this run; plain Python."""
        config = self.config
        return {
            "env": self.env.name,
            "total_steps": total_steps,
            "num_envs": self.env.num_envs,
            "precision": "fp32",
            "optimizer": type(self.optimizer).__name__,
            "advantage_correction": 1,
            "groups": self.policy.groups(),
            "heads": {name: spec.kind for name, spec in self.env.action_specs.items()},
            **{name: getattr(config, name) for name in FACTS},
        }

    def _set_learning_rate(self, remaining: float) -> None:
        if self.config.anneal_learning_rate:
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.learning_rate * remaining

    def _train_once(self) -> None:
        """One rollout and the update it feeds."""
        rollout = self._collector.collect()
        self.updates += 1
        self.env_steps += rollout.transitions
        start = time.perf_counter()
        self._update(rollout)
        self.policy.check_finite()
        if self.hooks.wants(UpdateEnd):
            seconds = {**self._collector.seconds, "update": time.perf_counter() - start}
            rate = self.optimizer.param_groups[0]["lr"]
            self.hooks.emit(UpdateEnd(self.updates, self.env_steps, self.gradient_steps, rate, seconds))

    def _update(self, rollout: Rollout) -> None:
        """Several passes over a rollout."""
        config = self.config
        advantages = self.steps.advantages(rollout, config.gamma, config.gae_lambda)
        returns = advantages + rollout.values
        self._tell_rollout(rollout, advantages, returns)
        batch = flatten(rollout, advantages, returns)
        if config.normalize_advantages:
            batch = replace(batch, advantages=self.steps.normalize(batch.advantages))
        step = 0
        for epoch in range(config.num_epochs):
            for minibatch in self.steps.minibatches(batch, config.num_minibatches, self._generator):
                self._optimize(minibatch, epoch, step)
                step += 1

    def _optimize(self, batch: Batch, epoch: int, step: int) -> None:
        """One optimizer step.

        The losses end at detached copies of the trunk outputs, one leaf for the actor and one for the critic: their
        gradients there separate the two at no cost, and the trunk is backed up through once.
        """
        outputs = self.policy.trunks(batch.observations)
        actor, critic = leaf(outputs[0]), leaf(outputs[-1])
        result = self._losses(batch, actor, critic)
        backward_losses(result.losses, self._weights)
        if self.hooks.wants(TrunkBackward):
            shared = list(self.policy.actor.parameters()) if self.policy.critic is None else []
            self.hooks.emit(TrunkBackward(epoch, step, outputs, gradient(actor), gradient(critic), shared))
        backward_trunks(outputs, gradient(actor), gradient(critic))
        self._descend(epoch, step)
        if self.hooks.wants(MinibatchEnd):
            self._tell_minibatch(batch, (epoch, step), result)

    def _losses(self, batch: Batch, actor: Tensor, critic: Tensor) -> Result:
        """The losses of a minibatch as functions of the trunk outputs; the entropy only where it counts."""
        config, policy = self.config, self.policy
        scores = policy.scores(actor)
        normalized = policy.normalize(scores)
        log_ratio = policy.log_prob(normalized, batch.actions) - batch.log_probs
        values = policy.values(critic)
        losses = {
            "policy": self.steps.policy_loss(log_ratio, batch.advantages, config.clip),
            "value": self.steps.value_loss(values, batch.returns),
        }
        if config.entropy_coef:
            losses["entropy"] = -policy.entropy(normalized)
        return Result(log_ratio, values, scores, losses)

    def _descend(self, epoch: int, step: int) -> None:
        """Clips the gradients by their global norm, steps the optimizer and drops the gradients."""
        config = self.config
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        if config.max_grad_norm is not None or self.hooks.wants(BackwardEnd):
            norms = ops.gradient_norms(list(gradients.values()))
            if self.hooks.wants(BackwardEnd):
                names = tuple(gradients)
                self.hooks.emit(BackwardEnd(epoch, step, self._parameters, names, norms, config.max_grad_norm))
            if config.max_grad_norm is not None:
                ops.clip_gradients(list(gradients.values()), norms, config.max_grad_norm)
        self.optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None
        self.gradient_steps += 1

    def _tell_rollout(self, rollout: Rollout, advantages: Tensor, returns: Tensor) -> None:
        if self.hooks.wants(RolloutEnd):
            self.hooks.emit(
                RolloutEnd(
                    update=self.updates,
                    env_step=self.env_steps,
                    rewards=rollout.rewards,
                    values=rollout.values,
                    advantages=advantages,
                    returns=returns,
                    log_probs=rollout.log_probs,
                    ended=rollout.ended,
                    terminated=rollout.terminated,
                    next_values=rollout.next_values,
                    actions=rollout.actions,
                    gamma=self.config.gamma,
                    valid=rollout.valid,
                )
            )
        episodes = self._collector.episodes
        if episodes.returns and self.hooks.wants(EpisodeEnd):
            self.hooks.emit(EpisodeEnd(self.env_steps, episodes.returns, episodes.lengths))

    def _tell_minibatch(self, batch: Batch, place: tuple[int, int], result: Result) -> None:
        descriptions = {name: self.policy.head(name).description(score) for name, score in result.scores.items()}
        self.hooks.emit(
            MinibatchEnd(
                *place,
                log_ratio=result.log_ratio.detach(),
                advantages=batch.advantages,
                values=result.values.detach(),
                old_values=batch.values,
                returns=batch.returns,
                losses={name: loss.detach() for name, loss in result.losses.items()},
                logits=select(descriptions, "logits"),
                log_std=select(descriptions, "log_std"),
            )
        )


def build_policy(env: VectorEnvironment, config: PPOConfig) -> ActorCritic:
    """The policy for these environments; its weights depend on the seed alone, and torch's generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return ActorCritic(env.observation_shape, env.action_specs, config)


def select(descriptions: Mapping[str, Mapping[str, Tensor]], key: str) -> dict[str, Tensor]:
    """By head, what the descriptions that have `key` say under it."""
    return {name: description[key] for name, description in descriptions.items() if key in description}
