"""Events of the trainer: one method per event, which does nothing without a listener.

As little as possible happens between two minibatches: the trainer pushes this code out of the processor's caches, so that a line takes
several times as long as after the update. So `MinibatchEnd` and `BackwardEnd` are built and emitted after the last step, unless a hook
wants them immediately.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from esper_telemetry.core import tensors as ops
from esper_telemetry.core.event_parts import Shard
from esper_telemetry.core.minibatch_objective import LossRows, MinibatchForward, MinibatchObjective
from esper_telemetry.core.rate_schedule import GroupRate, group_rates, rates_by_name
from esper_telemetry.events import (
    NONE,
    AfterUpdate,
    BackwardEnd,
    BeforeUpdate,
    EpisodeEnd,
    EvaluationEnd,
    HeadsBackward,
    Hooks,
    MinibatchEnd,
    MinibatchStart,
    OptimizerStep,
    RecurrentForward,
    Rollback,
    RolloutEnd,
    RunStart,
    TrunkBackward,
    UpdateEnd,
)
from esper_telemetry.ppo.environments.environment_protocol import Environment
from esper_telemetry.ppo.networks import RecurrentTrunk
from esper_telemetry.ppo.policy import ActorCritic
from esper_telemetry.ppo.ppo_objective import ObjectiveResult, TrunkOutputs
from esper_telemetry.ppo.rollout import Batch, Rollout

if TYPE_CHECKING:
    from esper_telemetry.ppo.trainer import PPO
    from esper_telemetry.ppo.trainer_replay import TrainerReplay


@runtime_checkable
class EmittingEnvironment(Protocol):
    """An environment that emits its own events; its trainer emits on the same hooks."""

    @property
    def hooks(self) -> Hooks:
        """Hooks of the environment."""


def hooks_of(env: Environment) -> Hooks:
    """Return the environment's hooks, so that listeners of a trainer hear both; new hooks if it has none."""
    return env.hooks if isinstance(env, EmittingEnvironment) and isinstance(env.hooks, Hooks) else Hooks()


class TrainerEvents:
    """Emits the events of a trainer, built from its state."""

    def __init__(self, trainer: PPO) -> None:
        # a reference cycle would keep the tensors of a trainer that is no longer used
        self._trainer: PPO = weakref.proxy(trainer)
        self._backwards: list[tuple[int, int, tuple[str, ...], Tensor]] = []
        self._minibatches: list[tuple[int, int, tuple[Any, ...], ObjectiveResult, Mapping[str, Tensor]]] = []
        self._log_std: Mapping[str, Tensor] = NONE
        self._replay: TrainerReplay | None = None
        self._collected: RolloutEnd | None = None
        self._start = self._cpu_start = 0.0
        self._rates: list[GroupRate] = []

    @property
    def _hooks(self) -> Hooks:
        return self._trainer.hooks  # looked up now, because a test or a user may replace them

    def run_start(self, total_steps: int) -> None:
        """Emit `RunStart`."""
        if self._hooks.wants(RunStart):
            trainer = self._trainer
            counts = (trainer.updates, trainer.env_steps, trainer.gradient_steps)
            self._hooks.emit(RunStart(asdict(trainer.config), trainer.facts(total_steps), *counts))

    def update_start(self) -> None:
        """Store when the update began, and its initial learning rates."""
        self._start, self._cpu_start = time.perf_counter(), time.process_time()
        self._rates = group_rates(self._trainer.optimizer)

    @property
    def numbers_rows(self) -> bool:
        """True if minibatches must number the transitions of their rows."""
        return self._hooks.wants(MinibatchEnd)

    def rollout_end(self, rollout: Rollout, acted: Rollout, advantages: Tensor, returns: Tensor) -> None:
        """Emit `RolloutEnd`, `RecurrentForward` for a policy with a memory, and `EpisodeEnd` if an episode finished.

        The update reads `rollout`, which was collected as `acted`; masks and relevance are those used for acting.
        """
        hooks, trainer = self._hooks, self._trainer
        if hooks.wants(RolloutEnd):
            self._collected = self._rollout_event(
                replace(rollout, action_masks=acted.action_masks, relevance=acted.relevance), advantages, returns
            )
            hooks.emit(self._collected)
        if rollout.recurrence is not None and hooks.wants(RecurrentForward):
            event = recurrent_event(trainer.policy, rollout, trainer.minibatch_envs)
            if event is not None:
                hooks.emit(event)
        episodes = trainer.collector.episodes
        if episodes.returns and hooks.wants(EpisodeEnd):
            hooks.emit(EpisodeEnd(trainer.env_steps, episodes.returns, episodes.lengths, episodes.times))

    def before_update(self, replay: Callable[[], TrainerReplay]) -> None:
        """Emit `BeforeUpdate`; `replay` builds an object that passes the rollout through the policy again."""
        wanted = self._hooks.wants(BeforeUpdate) or self._hooks.wants(AfterUpdate)
        self._replay = replay() if wanted else None
        event, self._collected = self._collected, None
        if self._replay is not None:
            collection = None if event is None else self._replay.collection(event)
            self._hooks.emit(BeforeUpdate(self._trainer.updates, self._replay, collection, self._trainer.policy))

    def after_update(self) -> None:
        """Emit `AfterUpdate`."""
        replay, self._replay = self._replay, None
        if replay is not None:
            self._hooks.emit(AfterUpdate(self._trainer.updates, replay, self._trainer.policy))

    def minibatch_start(self, epoch: int, step: int, shards: Callable[[Batch, int], Sequence[Shard]], batch: Batch) -> None:
        """Emit `MinibatchStart` before the first step, and keep the standard deviations, which each step changes."""
        if self.numbers_rows:
            self._log_std = self._trainer.policy.constant_log_std()
        if step == 0 and self._hooks.wants(MinibatchStart):
            self._hooks.emit(MinibatchStart(epoch, step, partial(shards, batch)))

    def minibatch_objective(
        self, epoch: int, step: int, rows: Callable[[ActorCritic], AbstractContextManager[LossRows]], learning_rate: float | None
    ) -> None:
        """Emit `MinibatchObjective`; not with several ranks, whose averaged gradients a single rank cannot recompute."""
        trainer = self._trainer
        if self._hooks.wants(MinibatchObjective) and trainer.ranks.alone:
            event = MinibatchObjective(
                epoch=epoch,
                step=step,
                steps=trainer.config.num_epochs * trainer.config.num_minibatches,
                forward=lambda: MinibatchForward(trainer.policy, rows),
                coefficients=trainer.coefficients,
                parameters=trainer.parameters,
                optimizer=trainer.optimizer,
                max_norm=trainer.config.max_grad_norm,
                learning_rate=learning_rate,
                gradient_step=trainer.gradient_steps,
            )
            self._hooks.emit(event)

    def heads_backward(
        self, epoch: int, step: int, output: Tensor, gradients: Callable[[Batch, Tensor], Mapping[str, Tensor]], batch: Batch
    ) -> None:
        """Emit `HeadsBackward` for a policy with several heads, while the graph below the trunk's output exists."""
        policy = self._trainer.policy
        if self._hooks.wants(HeadsBackward) and len(policy.heads) > 1 and output.requires_grad:
            trunk = {f"actor.{name}": parameter for name, parameter in policy.actor.named_parameters()}
            self._hooks.emit(HeadsBackward(epoch, step, output, gradients(batch, output), trunk))

    def trunk_backward(self, epoch: int, step: int, outputs: tuple[Tensor, ...], leaves: TrunkOutputs) -> None:
        """Emit `TrunkBackward`, once the leaves have their gradients."""
        if self._hooks.wants(TrunkBackward):
            policy = self._trainer.policy
            shared = list(policy.actor.parameters()) if policy.critic is None else []
            self._hooks.emit(TrunkBackward(epoch, step, outputs, *leaves.gradients(), shared))

    def backward_end(self, epoch: int, step: int, gradients: Mapping[str, Tensor], norms: Tensor | None) -> None:
        """Emit `BackwardEnd`.

        Args:
            gradients: gradients over all ranks, before clipping, by the names of their parameters.
            norms: [K], L2 norm of each; None if nothing is clipped.
        """
        hooks = self._hooks
        if hooks.wants(BackwardEnd):
            if norms is None:
                norms = ops.gradient_norms(list(gradients.values()))
            self._backwards.append((epoch, step, tuple(gradients), norms))
            if hooks.wants_now(BackwardEnd):
                self._emit_backwards()

    def _emit_backwards(self) -> None:
        backwards, self._backwards = self._backwards, []
        hooks, parameters, max_norm = self._hooks, self._trainer.parameters, self._trainer.config.max_grad_norm
        for epoch, step, names, norms in backwards:
            hooks.emit(BackwardEnd(epoch, step, parameters, names, norms, max_norm))

    def optimizer_step(self, epoch: int, step: int) -> None:
        """Emit `OptimizerStep`."""
        if step == 0:  # a hook of the user may have set another rate
            self._rates = group_rates(self._trainer.optimizer)
        if self._hooks.wants(OptimizerStep):
            self._hooks.emit(OptimizerStep(epoch, step, self._trainer.optimizer, self._trainer.parameters))

    def minibatch_end(self, epoch: int, step: int, batch: Batch, result: ObjectiveResult) -> None:
        """Emit `MinibatchEnd`."""
        hooks = self._hooks
        if hooks.wants(MinibatchEnd):
            self._minibatches.append((epoch, step, columns_of(batch), without_graph(result, batch), self._log_std))
            if hooks.wants_now(MinibatchEnd):
                self._emit_minibatches()

    def minibatches_end(self) -> None:
        """Emit the postponed events, even if the update was interrupted."""
        self._emit_backwards()
        self._emit_minibatches()

    def _emit_minibatches(self) -> None:
        minibatches, self._minibatches = self._minibatches, []
        hooks, policy = self._hooks, self._trainer.policy
        for epoch, step, columns, result, log_std in minibatches:
            advantages, old_values, returns, masks, old_log_probs, relevance, rows = columns
            descriptions = describe(policy, result.scores, masks)
            parts = {name: result.head_log_probs[name] - old for name, old in old_log_probs.items()}
            event = MinibatchEnd(
                epoch,
                step,
                log_ratio=result.log_ratio,
                advantages=advantages,
                values=result.values,
                old_values=old_values,
                returns=returns,
                losses=result.losses,
                logits=descriptions.logits,
                action_masks=masks,
                log_std={**descriptions.log_std, **log_std},  # before the step, if it does not depend on the state
                head_log_ratios=parts or dict.fromkeys(result.scores, result.log_ratio),
                relevance=relevance,
                means=descriptions.means,
                rows=rows,
            )
            hooks.emit(event)

    def rollback(self, rollbacks: int) -> None:
        """Emit `Rollback`, the number `rollbacks` of this run."""
        self._hooks.emit(Rollback(self._trainer.updates, self._trainer.env_steps, rollbacks))

    def update_end(self, epochs: int, coefficients: Mapping[str, float]) -> None:
        """Emit `UpdateEnd`."""
        if not self._hooks.wants(UpdateEnd):
            return
        trainer = self._trainer
        seconds = {**trainer.collector.seconds, "update": time.perf_counter() - self._start}
        cpu_seconds = {**trainer.collector.cpu_seconds, "update": time.process_time() - self._cpu_start}
        self._hooks.emit(
            UpdateEnd(
                update=trainer.updates,
                env_step=trainer.env_steps,
                gradient_step=trainer.gradient_steps,
                learning_rate=float(self._rates[0].rate),
                learning_rates=rates_by_name(self._rates, trainer.parameters, trainer.policy.groups),
                seconds=seconds,
                epochs=epochs,
                coefficients=coefficients,
                cpu_seconds=cpu_seconds,
                beta2=trainer.optimizer.param_groups[0]["betas"][1],
            )
        )

    def evaluation_end(self, returns: Sequence[float], lengths: Sequence[int]) -> None:
        """Emit `EvaluationEnd`."""
        self._hooks.emit(EvaluationEnd(self._trainer.env_steps, returns, lengths))

    def _rollout_event(self, rollout: Rollout, advantages: Tensor, returns: Tensor) -> RolloutEnd:
        trainer = self._trainer
        descriptions = describe(trainer.policy, rollout.scores, rollout.action_masks)
        return RolloutEnd(
            update=trainer.updates,
            env_step=trainer.env_steps,
            gamma=trainer.config.gamma,
            rewards=rollout.rewards,
            values=rollout.values,
            advantages=advantages,
            returns=returns,
            log_probs=rollout.log_probs,
            ended=rollout.ended,
            terminated=rollout.terminated,
            next_values=rollout.next_values,
            actions=rollout.actions,
            valid=rollout.valid,
            raw_rewards=rollout.raw_rewards,
            head_log_probs=rollout.head_log_probs,
            action_masks=rollout.action_masks,
            relevance=rollout.relevance,
            logits=descriptions.logits,
            means=descriptions.means,
            log_std=descriptions.log_std,
            bounds=trainer.policy.bounds(),
            states=None if rollout.recurrence is None else rollout.recurrence.before(),
            scales=trainer.normalizers.scales(rollout),
            observations=rollout.observations,
        )


@torch.no_grad()
def recurrent_event(policy: ActorCritic, rollout: Rollout, envs: int) -> RecurrentForward | None:
    """Return the event of the actor's memory in the first `envs` environments; None for a policy without one."""
    trunk, memory = policy.actor, rollout.recurrence
    if memory is None or not isinstance(trunk, RecurrentTrunk):
        return None
    cells = [cell for cell in trunk.core.cells if isinstance(cell, nn.LSTM | nn.GRU)]
    below = [memory.after[:, layer, 0, :envs] for layer in range(len(cells) - 1)]
    with policy.autocast():
        encoded = trunk.encoder(rollout.observations[:, :envs].flatten(0, 1)).float()
    inputs = [encoded.unflatten(0, (-1, envs)), *below]
    return RecurrentForward(cells, inputs, memory.before(envs).unbind(1))


columns_of: Callable[[Batch], tuple[Any, ...]] = attrgetter(
    "advantages", "values", "returns", "action_masks", "head_log_probs", "relevance", "rows"
)
"""Columns of a minibatch that are kept; the trainer needs the memory of its observations for the next one."""


def without_graph(result: ObjectiveResult, batch: Batch) -> ObjectiveResult:
    """Return the same tensors without their graphs, which hold the outputs of the trunk and their gradients.

    With a single head, its log-probabilities are left out.
    """
    log_ratio, values, scores, head_log_probs, losses = result
    return ObjectiveResult(
        log_ratio.detach(),
        values.detach(),
        {name: score.detach() for name, score in scores.items()},
        {name: head_log_probs[name].detach() for name in batch.head_log_probs},
        {name: loss.detach() for name, loss in losses.items()},
    )


class Descriptions(NamedTuple):
    """Distributions of the heads, by head; see `events.MinibatchEnd`."""

    logits: dict[str, Tensor]
    log_std: dict[str, Tensor]
    means: dict[str, Tensor]


def describe(policy: ActorCritic, scores: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Descriptions:
    """Return the distributions of the heads from their scores."""
    descriptions = Descriptions({}, {}, {})
    for name, score in scores.items():
        for part, value in policy.head(name).description(score, masks.get(name)).items():
            getattr(descriptions, part)[name] = value
    return descriptions
