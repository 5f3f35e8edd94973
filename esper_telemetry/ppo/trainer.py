"""Proximal policy optimisation for vector environments, which emits its events, and evaluation of its policies."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.core import tensors as ops
from esper_telemetry.core.event_parts import Shard
from esper_telemetry.core.facts import DECLARED, UNCHECKED_FACT, optimizer_facts
from esper_telemetry.core.rate_schedule import SCHEDULE_FACT, RateSchedule
from esper_telemetry.ppo import checkpoint
from esper_telemetry.ppo.checkpoint import Checkpointables, Watchdog
from esper_telemetry.ppo.collectors.collector import collector_for
from esper_telemetry.ppo.config import POLICIES, PPOConfig, require
from esper_telemetry.ppo.emit import TrainerEvents, hooks_of
from esper_telemetry.ppo.environments.environment_protocol import Environment, Task, horizon_of, layout_of, reward_threshold_of
from esper_telemetry.ppo.gradient_ranks import Ranks
from esper_telemetry.ppo.normalizer import Normalizers, normalizers_for
from esper_telemetry.ppo.policy import ActorCritic, add, compiled, require_compiler
from esper_telemetry.ppo.ppo_objective import (
    STOP_FACTOR,
    ActorLoss,
    ObjectiveResult,
    TrunkOutputs,
    adapted_rate,
    backward_losses,
    backward_trunks,
    entropy_coef,
    head_gradients,
    loss_rows,
    mean_kl,
    objective,
    shard_gradients,
    steps_for,
)
from esper_telemetry.ppo.rollout import Batch, Rollout, flatten
from esper_telemetry.ppo.trainer_replay import TrainerReplay

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Numbers of the parameters in `malloc.h` of the GNU C library."""
MAX_TRIMMED_BYTES: Final = 256 << 20
"""Freed memory at the end of the heap that the process keeps."""
MAX_HEAP_BLOCK_BYTES: Final = 32 << 20
"""Maximum size of a block that the process keeps, the largest that the library allows."""


class PPO:
    """Trainer of a policy in vector environments.

    Attributes:
        env, config, policy, optimizer, normalizers: its parts.
        collector, generator: collect rollouts and shuffle them.
        watchdog: restores finite weights; None unless the settings ask for it.
        ranks: the processes that train together.
        hooks: functions that receive its events.
        events: emits them.
        checkpointables: objects that are saved and loaded with it.
        parameters: trainable parameters by name.
        coefficients: weights of the losses in this update.
        steps: the steps of the update; replace one to vary the algorithm.
        env_steps, updates, gradient_steps: counts since the run began.
        joins: types of events that it emits once per update instead of once per minibatch: none.

    Raises:
        ValueError: the minibatches do not divide a rollout, or ranks might take different numbers of steps.
    """

    joins: tuple[type, ...] = ()

    def __init__(self, env: Environment, config: PPOConfig | None = None, *, device: str | torch.device = "cpu") -> None:
        self.config = config or PPOConfig()
        require(self.config.policy in POLICIES, f"policy must be one of {', '.join(POLICIES)}", self.config.policy)
        self.config.check_rollout(env.num_envs)
        self.env = env
        self.hooks = hooks_of(env)
        self.checkpointables = Checkpointables()
        self.ranks = Ranks.current()
        self.config.check_ranks(env.num_envs, self.ranks.size)
        self.steps = steps_for(self.config, self.ranks)
        self.policy = build_policy(env, self.config).to(device)
        self.ranks.share(self.policy)
        # the epsilon of OpenAI Baselines and Stable-Baselines3; torch's own is 1e-8
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.config.learning_rate, eps=1e-5, fused=True)
        self.env_steps = self.updates = self.gradient_steps = 0
        self.normalizers = normalizers_for(env, self.config, self.ranks).to(device)
        self.collector = collector_for(
            env, self.policy, self.normalizers, num_steps=self.config.num_steps, seed=self.ranks.seed(self.config.seed)
        )
        self.generator = torch.Generator().manual_seed(self.config.seed)
        self.watchdog: Watchdog | None = None
        if self.config.watchdog:
            self.watchdog = Watchdog(torch.nn.ModuleList([self.policy, self.normalizers]), self.optimizer)
        self.events = TrainerEvents(self)
        self._objective = objective
        if self.config.compile:
            require_compiler(self.policy.value.weight.device)
            self._objective = compiled(objective)
        self._stopping = self._agreed_to_stop = False
        self.parameters = dict(self.policy.named_parameters())
        if self.config.stop_on_nonfinite:
            ops.stop_at_nonfinite(self.parameters)
        self._device = self.policy.value.weight.device
        self.coefficients: dict[str, float] = {}
        self._learning_rate: float | None = None  # unless it follows the KL divergence
        self._weights: dict[str, Tensor] = {}
        self._schedule(1.0)

    def learn(self, total_steps: int) -> None:
        """Train until that many environment steps are collected, including the steps of earlier calls.

        Raises:
            ValueError: they are collected already.
            FloatingPointError: observations, weights, or with `stop_on_nonfinite` gradients are not finite.
        """
        if total_steps <= self.env_steps:
            raise ValueError(f"total_steps must exceed the {self.env_steps} steps already collected, got {total_steps}")
        if self._device.type == "cpu":
            retain_freed_memory()
        self.events.run_start(total_steps)
        self._agreed_to_stop = False
        while self.env_steps < total_steps and not self._agreed_to_stop:
            self._schedule(1 - self.env_steps / total_steps)
            self._train_once()
        self._stopping = False

    def stop(self) -> None:
        """Make `learn` return after the update in progress, or the first one; hooks and signal handlers may call it."""
        self._stopping = True

    def evaluate(self, env: Environment, *, seed: int = 0) -> Evaluation:
        """Return the outcome of one episode in each of these environments with the most likely actions; training does not change."""
        evaluation = evaluate(self.policy, env, self.normalizers, seed=seed)
        self.events.evaluation_end(evaluation.returns, evaluation.lengths)
        return evaluation

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which training continues."""
        return checkpoint.state_of(self)

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint atomically; every rank calls it, and rank 0 writes."""
        return checkpoint.save(self, path)

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint, as does attached telemetry; raise ValueError, with the difference, if it does not fit."""
        checkpoint.load(self, path)

    def facts(self, total_steps: int) -> dict[str, Any]:
        """Return the facts of a run that detectors read, as plain data."""
        config = self.config
        return {
            "env": self.env.name,
            "total_steps": total_steps,
            "num_envs": self.env.num_envs * self.ranks.size,
            "ranks": self.ranks.size,
            "horizon": horizon_of(self.env),
            "reward_threshold": reward_threshold_of(self.env),
            **optimizer_facts(self.optimizer),
            "advantage_correction": 1,
            "groups": self.policy.groups(),
            "value_head": ["value"],
            "heads": {name: spec.kind for name, spec in self.env.action_specs.items()},
            "squashed": config.squash,
            **{name: value for name, value in asdict(config).items() if name in DECLARED},
            **self._schedule_fact(total_steps),
            UNCHECKED_FACT: self._unchecked_equations(),
        }

    def _unchecked_equations(self) -> dict[str, str]:
        """Return why equations that the events do not cover cannot be checked."""
        environment = "the bundled trainer keeps only what it stored, and no copy of what its environments returned"
        reasons = dict.fromkeys(("transitions", "stored_rewards", "executed_actions"), environment)
        reasons["total_loss"] = "the bundled trainer adds the gradients of its losses, and does not compute a total loss"
        if not (self.config.entropy_coef or self.config.final_entropy_coef):
            reasons["entropy_loss"] = "entropy_coef is 0, so there is no entropy loss"
        if self.config.desired_kl is not None:
            reasons["schedules"] = "the KL sets the learning rate (desired_kl)"
        return reasons

    def _schedule_fact(self, total_steps: int) -> dict[str, Any]:
        """Return the fact of the learning rate's schedule; empty if the KL adapts the rate."""
        config = self.config
        if config.desired_kl is not None:
            return {}
        schedule = RateSchedule(
            initial=config.learning_rate,
            final=0.0 if config.anneal_learning_rate else config.learning_rate,
            total_steps=total_steps,
            begin=self.env_steps,
            counts={"num_epochs": config.num_epochs, "num_minibatches": config.num_minibatches, "num_envs": self.env.num_envs},
        )
        return {SCHEDULE_FACT: schedule.fact()}

    def _schedule(self, remaining: float) -> None:
        """Set the learning rate and the weights of the losses, when a fraction `remaining` of the run, 1 to 0, is left."""
        config = self.config
        if config.desired_kl is None:
            self._learning_rate = config.learning_rate * (remaining if config.anneal_learning_rate else 1.0)
            for group in self.optimizer.param_groups:
                group["lr"] = self.steps.learning_rate(self._learning_rate)
        weights = {"policy": 1.0, "value": config.value_coef, "entropy": entropy_coef(config, remaining)}
        if weights != self.coefficients:
            self.coefficients = weights
            self._weights = {name: torch.tensor(weight, device=self._device) for name, weight in weights.items()}

    def _train_once(self) -> None:
        """Collect one rollout and update the policy with it; then the ranks agree whether to continue."""
        rollout = self.collector.collect(self.steps.resets)
        self.updates += 1
        (transitions,) = self.ranks.totals(rollout.transitions)
        self.env_steps += transitions
        self.events.update_start()
        epochs = self._update(rollout)
        if self.watchdog is None:
            self.policy.check_finite()
        elif not self.watchdog.check():
            self.events.rollback(self.watchdog.rollbacks)
        self.events.update_end(epochs, self.coefficients)
        self._agreed_to_stop = self.ranks.totals(self._stopping)[0] > 0

    def _update(self, acted: Rollout) -> int:
        """Learn from a rollout as it was collected, in several passes; return how many, 0 without transitions."""
        config, rollout = self.config, self.steps.transform(acted)
        advantages = self.steps.advantages(rollout, config.gamma, config.gae_lambda)
        returns = self.steps.returns(advantages, rollout.values)
        self.events.rollout_end(rollout, acted, advantages, returns)
        batch = flatten(rollout, advantages, returns, numbered=self.events.numbers_rows)
        if not len(batch):  # every row of a very short rollout was a reset
            return 0
        if config.normalize_advantages and not config.normalize_minibatches:
            batch = replace(batch, advantages=self.steps.normalize(batch.advantages))
        self.events.before_update(
            lambda: TrainerReplay(self.policy, rollout, batch, returns, acted=acted, loss=self._loss_of_actor(), envs=self.minibatch_envs)
        )
        try:
            step = 0
            for epoch in range(config.num_epochs):
                log_ratios = []
                for minibatch in self.steps.minibatches(batch, config.num_minibatches, self.generator):
                    log_ratios.append(self._optimize(minibatch, epoch, step))
                    step += 1
                if self._finish_pass(epoch, log_ratios):
                    break
        finally:
            self.events.minibatches_end()
        self.events.after_update()
        return epoch + 1

    @property
    def minibatch_envs(self) -> int:
        """Number of environments whose rows make up about one minibatch."""
        return max(1, self.env.num_envs // self.config.num_minibatches)

    def _loss_of_actor(self) -> ActorLoss:
        """Return the part of the loss that depends on the actor's trunk, with the present weights."""
        return ActorLoss(self._objective, self.policy, self.steps, self._weights, self.config.clip, self.coefficients["entropy"] > 0)

    def _finish_pass(self, epoch: int, log_ratios: list[Tensor]) -> bool:
        """Adapt the learning rate after the last pass; return True if a pass moved the policy so far that it is the last.

        It reads the device only if a setting needs the KL divergence.
        """
        config, last = self.config, epoch + 1 == self.config.num_epochs
        if config.target_kl is None and (config.desired_kl is None or not last):
            return False
        kl = mean_kl(log_ratios, self.ranks)
        stop = config.target_kl is not None and not kl <= STOP_FACTOR * config.target_kl
        if config.desired_kl is not None and (stop or last):
            for group in self.optimizer.param_groups:
                group["lr"] = adapted_rate(group["lr"], kl, config.desired_kl)
        return stop

    def _optimize(self, batch: Batch, epoch: int, step: int) -> Tensor:
        """Take one optimizer step; return the log-ratios [N] before it.

        The losses end at detached copies of the trunk outputs, one leaf for the actor and one for the critic. Their
        gradients there separate the two at no cost, and one backward pass goes through the trunk.
        """
        raw_advantages = batch.advantages
        if self.config.normalize_advantages and self.config.normalize_minibatches:
            batch = replace(batch, advantages=self.steps.normalize(raw_advantages))
        self.events.minibatch_start(epoch, step, self._shards, batch)
        rows = partial(loss_rows, batch=batch, raw_advantages=raw_advantages, config=self.config)
        self.events.minibatch_objective(epoch, step, rows, self._learning_rate)
        outputs = self.policy.trunks(batch.observations, batch.grid())
        leaves = TrunkOutputs(outputs[0], outputs[-1]).leaves()
        result = self._losses(batch, leaves)
        backward_losses(result.losses, self._weights)
        self.events.heads_backward(epoch, step, outputs[0], self._head_gradients, batch)
        self.events.trunk_backward(epoch, step, outputs, leaves)
        backward_trunks(outputs, leaves)
        self._descend(epoch, step, len(batch))
        self.events.minibatch_end(epoch, step, batch, result)
        return result.log_ratio.detach()

    def _shards(self, batch: Batch, count: int) -> list[Shard]:
        """Return the gradients of `count` parts of a minibatch; `.grad` fields are not changed."""

        def loss(part: Batch) -> Tensor:
            outputs = self.policy.trunks(part.observations, part.grid())
            losses = self._losses(part, TrunkOutputs(outputs[0], outputs[-1])).losses
            return add([self._weights[name] * loss for name, loss in losses.items()])

        return shard_gradients(batch, count, loss, list(self.parameters.values()))

    def _head_gradients(self, batch: Batch, output: Tensor) -> dict[str, Tensor]:
        """Return the gradient of the actor's loss through each head; `.grad` fields are not changed."""
        settings: dict[str, Any] = {"clip": self.config.clip, "bonus": self.coefficients["entropy"] > 0}
        return head_gradients(self.policy, self.steps, batch, output, self._weights, **settings)

    def _losses(self, batch: Batch, outputs: TrunkOutputs) -> ObjectiveResult:
        """Return the losses of a minibatch as functions of the trunk outputs; the entropy only if it has a weight."""
        bonus = self.coefficients["entropy"] > 0
        return self._objective(self.policy, self.steps, batch, outputs, clip=self.config.clip, bonus=bonus)

    def _descend(self, epoch: int, step: int, rows: int) -> None:
        """Average the gradients of all ranks, clip them by their global norm, step the optimizer and drop them."""
        named = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        gradients, max_norm = list(named.values()), self.config.max_grad_norm
        self.ranks.average(gradients, rows)
        if max_norm is None:
            self.events.backward_end(epoch, step, named, norms=None)
        else:
            norms = ops.gradient_norms(gradients)
            self.events.backward_end(epoch, step, named, norms)
            ops.clip_gradients(gradients, norms, max_norm)
        self.optimizer.step()
        self.events.optimizer_step(epoch, step)
        for parameter in self.parameters.values():
            parameter.grad = None
        self.gradient_steps += 1


EVALUATION_STEPS: Final = 128
"""Steps that an evaluation takes between checks of which episodes have ended."""


class Evaluation(NamedTuple):
    """The first episode of each environment.

    Attributes:
        returns: undiscounted sums of raw rewards; up to the step limit for an episode that did not end in time.
        lengths: steps.
    """

    returns: Sequence[float]
    lengths: Sequence[int]


def evaluate(policy: ActorCritic, env: Environment, normalizers: Normalizers, *, seed: int = 0, max_steps: int = 10_000) -> Evaluation:
    """Run one episode in each environment, with the most likely choice or the mean of every head.

    Args:
        policy: policy to evaluate; its memory begins empty.
        env: environments; each runs one episode, so that short episodes are not preferred.
        normalizers: used with their present statistics, which do not change.
        seed: seed of the episodes, unless the environment has its own.
        max_steps: limit for episodes that do not end.
    """
    collector = collector_for(env, policy, normalizers.frozen(), num_steps=EVALUATION_STEPS, seed=seed, greedy=True)
    returns, lengths = torch.zeros(env.num_envs, dtype=torch.float64), torch.zeros(env.num_envs, dtype=torch.int64)
    unfinished = torch.ones(env.num_envs, dtype=torch.bool)
    for _ in range(0, max_steps, EVALUATION_STEPS):
        rollout = collector.collect()
        ended, in_first = rollout.ended.cpu(), first_episode(rollout.ended.cpu(), unfinished)
        if rollout.valid is not None:
            in_first &= rollout.valid.cpu()
        returns += torch.where(in_first, rollout.rewards.cpu().double(), 0.0).sum(0)
        lengths += in_first.sum(0)
        unfinished &= ~ended.any(0)
        if not unfinished.any():
            break
    return Evaluation(returns.tolist(), lengths.tolist())


def first_episode(ended: Tensor, unfinished: Tensor) -> Tensor:
    """Return flags [T, B] of the steps that belong to the first episode of environments that have not finished it [B]."""
    before = ended.int().cumsum(0) - ended.int()
    return (before == 0) & unfinished


def build_policy(env: Task, config: PPOConfig) -> ActorCritic:
    """Return the policy for these environments; its weights depend only on the seed, and torch's generator is not used."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return ActorCritic(layout_of(env), env.action_specs, config)


def retain_freed_memory() -> bool:
    """Make the GNU C library retain freed blocks in this process; return False if another library is used.

    By default it returns large freed blocks to the system, and requests them again page by page, zeroed. With minibatches
    of tens of thousands of rows this takes a fifth of the training time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trimmed = mallopt(M_TRIM_THRESHOLD, MAX_TRIMMED_BYTES)
    return bool(trimmed and mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES))
