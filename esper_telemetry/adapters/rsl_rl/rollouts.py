"""Rollouts of RSL-RL: what the storage does not keep, step by step, and the events of a complete rollout.

The storage keeps rewards with the value that it adds at time limits, and its advantages are normalised. So rewards and time limits are
copied as the environments return them, and advantages before normalisation are the returns minus the values, which RSL-RL normalises.

Shapes: T steps, B environments, D action dimensions, I inputs and H width of a recurrent layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from esper_telemetry.adapters.columns import EpisodeCounter, HeadColumns, next_values
from esper_telemetry.adapters.rsl_rl.facts import HEAD, is_gaussian, raw_model
from esper_telemetry.core.event_parts import Scale
from esper_telemetry.events import EpisodeEnd, RecurrentForward, RolloutEnd


class StorageRolloutRecorder:
    """Records what the environments return in one rollout after another.

    Args:
        complete: no episode has begun before the first step that is recorded.

    Attributes:
        environment_seconds: wall time between actions and their outcomes in this rollout.
    """

    def __init__(self, alg: Any, *, complete: bool) -> None:
        self._alg = alg
        self._counter = EpisodeCounter(alg.storage.num_envs, complete=complete)
        self._last_values: Tensor | None = None
        self._acted_at = perf_counter()
        self.begin()

    def begin(self) -> None:
        """Forget all steps: a rollout begins."""
        self._rewards: list[Tensor] = []
        self._time_outs: list[Tensor] = []
        self.environment_seconds = 0.0

    def after_action(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The policy chose actions."""
        self._acted_at = perf_counter()

    def after_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The environments answered; they may write the next answer into the same tensors."""
        self.environment_seconds += perf_counter() - self._acted_at
        _, rewards, _, extras = (*args, *kwargs.values())
        self._rewards.append(rewards.clone())
        if "time_outs" in extras:
            self._time_outs.append(extras["time_outs"].to(rewards.device, copy=True))

    def after_values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        """The critic was asked; its last answer before an update is that for the states after the last step."""
        self._last_values = result

    def event(self, *, update: int, env_step: int) -> RolloutEnd:
        """Return the event of the rollout, which is complete in the storage.

        RSL-RL adds the value of the last state acted in at time limits, where the critic's estimate of the state after it belongs: so
        that is what stands in `next_values`.
        """
        alg, storage = self._alg, self._alg.storage
        values, returns = storage.values.squeeze(-1), storage.returns.squeeze(-1)
        ended = storage.dones.squeeze(-1).bool()
        raw = torch.stack(self._rewards).to(values.device)
        limits = torch.zeros_like(ended)
        if len(self._time_outs) == len(self._rewards):
            limits = torch.stack(self._time_outs).to(ended.device).bool() & ended
        rewards = raw
        if alg.rnd:  # curiosity is part of the rewards that are learned from
            rewards = storage.rewards.squeeze(-1) - alg.gamma * values * limits
        assert self._last_values is not None
        columns = HeadColumns()
        if is_gaussian(alg) and storage.distribution_params is not None:
            means, stds = storage.distribution_params
            columns = HeadColumns(means={HEAD: means}, log_std={HEAD: stds.log()})
        return RolloutEnd(
            update=update,
            env_step=env_step,
            rewards=rewards,
            raw_rewards=raw if alg.rnd else None,
            values=values,
            advantages=returns - values,
            returns=returns,
            log_probs=storage.actions_log_prob.squeeze(-1),
            ended=ended,
            terminated=ended & ~limits,
            next_values=next_values(values, self._last_values.clone(), ended, torch.where(limits, values, 0.0)),
            actions={HEAD: storage.actions},
            gamma=alg.gamma,
            # [T, layers, parts, B, H], in which each step began
            states=torch.stack(storage.saved_hidden_state_a, 2) if storage.saved_hidden_state_a else None,
            scales=self._scales(),
            observations=observations_of(alg),
            last_values=self._last_values.clone().reshape(1, -1),
            time_limits=limits,
            **columns._asdict(),
        )

    def episodes(self, rollout: RolloutEnd) -> EpisodeEnd | None:
        """Return the event of the episodes that finished in a rollout; those that had begun before the first one are left out."""
        rewards = rollout.rewards if rollout.raw_rewards is None else rollout.raw_rewards
        return self._counter.episodes(rewards, rollout.ended, rollout.env_step)

    def _scales(self) -> dict[str, Scale]:
        """State of the running normaliser of the actor's observations; it cuts nothing, so the observations stand for what it returns."""
        actor: Any = raw_model(self._alg, "actor")
        if not getattr(actor, "obs_normalization", False) or not hasattr(actor.obs_normalizer, "mean"):
            return {}
        observations = observations_of(self._alg)
        if observations is None:
            return {}
        normalizer = actor.obs_normalizer
        return {"obs": Scale(normalizer.mean, normalizer.std, torch.inf, observations)}


def recurrent_event(alg: Any, states: Tensor | None) -> RecurrentForward | None:
    """Return the event of the actor's LSTM or GRU in a quarter of the environments; None without one of a single layer."""
    actor: Any = raw_model(alg, "actor")
    cell = getattr(getattr(actor, "rnn", None), "rnn", None)
    observations = observations_of(alg)
    if not isinstance(cell, nn.LSTM | nn.GRU) or cell.num_layers > 1 or states is None or observations is None:
        return None
    envs = max(1, observations.shape[1] // 4)
    with torch.no_grad():
        inputs = actor.obs_normalizer(observations[:, :envs])
    return RecurrentForward([cell], [inputs], [states[:, 0, :, :envs]])


def observations_of(alg: Any) -> Tensor | None:
    """Return the actor's observations of the rollout, [T, B, I]; None where a part of them is no vector."""
    actor: Any = raw_model(alg, "actor")
    parts = [alg.storage.observations[name] for name in actor.obs_groups]
    if not parts or any(part.dim() != 3 for part in parts):
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
