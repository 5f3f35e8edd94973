"""The steps of a rollout as they are taken: what the buffer will not hold."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.adapters.sb3.heads import drawn_from
from esper_telemetry.environments.protocol import Array


class Recurrence(NamedTuple):
    """What the actor's LSTM was given and gave in one step.

    Attributes:
        inputs: [B, I].
        before, after: h and c, [layers, B, H] each; zero before a step that begins an episode.
    """

    inputs: Tensor
    before: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]


class Steps:
    """T steps of B environments.

    Attributes:
        rewards, raw_rewards: [B] each, as the trainer got them, and as the environment gave them where they are scaled.
        dones, time_limits: [B] each, bool.
        drawn: what the policy drew from, see `heads.drawn_from`.
        recurrence: of each step; empty for a feed-forward policy.
        returns, lengths, times: of episodes that finished.
        environment_seconds: wall time between an action and its outcome.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._scaled = model.get_vec_normalize_env()
        self._sums = np.zeros(model.n_envs)
        self._lengths = np.zeros(model.n_envs, np.int64)
        self._whole = np.asarray(model._last_episode_starts, bool).copy()
        self._lstm: Recurrence | None = None
        self._acted = 0.0
        self.begin()

    def begin(self) -> None:
        """Forgets all steps: a rollout begins."""
        self.rewards: list[Array] = []
        self.raw_rewards: list[Array] = []
        self.dones: list[Array] = []
        self.time_limits: list[Array] = []
        self.drawn: list[Any] = []
        self.recurrence: list[Recurrence] = []
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.times: list[int] = []
        self.environment_seconds = 0.0

    def lstm(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The actor's LSTM was called."""
        inputs, states = args
        self._lstm = Recurrence(inputs[0].detach(), states, result[1])

    def acted(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The policy chose actions."""
        self.drawn.append(drawn_from(self._model.policy))
        if self._lstm is not None:
            self.recurrence.append(self._lstm)
        self._acted = time.perf_counter()

    def stepped(self, given: Mapping[str, Any]) -> None:
        """The environments answered; `given` are the local variables of the collecting loop."""
        self.environment_seconds += time.perf_counter() - self._acted
        rewards, dones = np.array(given["rewards"], np.float32), np.array(given["dones"], bool)
        self.rewards.append(rewards)
        self.dones.append(dones)
        raw = rewards
        if self._scaled is not None and self._scaled.norm_reward:
            raw = np.array(self._scaled.get_original_reward(), np.float32)
            self.raw_rewards.append(raw)
        self._sums += raw
        self._lengths += 1
        limits = np.zeros_like(dones)
        if dones.any():
            for index in np.flatnonzero(dones):
                limits[index] = self._finish(int(index), given["infos"][index])
        self.time_limits.append(limits)

    def _finish(self, index: int, info: Mapping[str, Any]) -> bool:
        """An episode is over; returns whether by a time limit. A monitor's account of it wins over our own."""
        known = info.get("episode")
        if known is not None or self._whole[index]:
            self.returns.append(float(known["r"] if known else self._sums[index]))
            self.lengths.append(int(known["l"] if known else self._lengths[index]))
            self.times.append(len(self.dones) - 1)
        self._sums[index], self._lengths[index], self._whole[index] = 0.0, 0, True
        return bool(info.get("TimeLimit.truncated", False)) and info.get("terminal_observation") is not None

    def states(self) -> Tensor | None:
        """In which each step began, [T, layers, 2, B, H]; None for a feed-forward policy."""
        return _pairs([step.before for step in self.recurrence])

    def states_after(self) -> Tensor | None:
        """In which each step ended, [T, layers, 2, B, H]."""
        return _pairs([step.after for step in self.recurrence])


def _pairs(states: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    if not states:
        return None
    hidden, memory = (torch.stack([pair[part] for pair in states]).detach() for part in (0, 1))
    return torch.stack([hidden, memory], 2)
