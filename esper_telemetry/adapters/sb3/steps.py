"""The steps of a rollout as they are taken: what the buffer will not hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.adapters.sb3.drawn import BLOCK, DrawnRecorder
from esper_telemetry.adapters.sb3.heads import Description
from esper_telemetry.ppo.environments.protocol import Array

NOTHING = b"\0"


class StepRecurrence(NamedTuple):
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

    What the buffer will hold when the rollout is whole is read there; between two steps only the rest is kept.

    Attributes:
        rewards: [T, B], as the trainer got them; a time limit's bootstrap is not in them.
        raw_rewards: [B] each, as the environment gave them; empty where they are not scaled.
        ended: [T, B], bool.
        time_limits: [T, B], bool: episodes that a time limit ended.
        described: what the policy drew from, [t, B, ...] of some steps after those of others; see `heads.Description`.
        recurrence: of each step; empty for a feed-forward policy.
        returns, lengths, times: of episodes that finished.
        environment_seconds: wall time between an action and its outcome.
    """

    def __init__(self, model: Any, drawn: DrawnRecorder) -> None:
        self._model, self._policy = model, model.policy
        self._kept, self._joined = drawn.kept, drawn.joined
        scaled = model.get_vec_normalize_env()
        self._scaled = scaled if scaled is not None and scaled.norm_reward else None
        self._recurrent = hasattr(model.policy, "lstm_actor")
        self._sums = np.zeros(model.n_envs)
        self._lengths = np.zeros(model.n_envs, np.int64)
        self._whole = np.asarray(model._last_episode_starts, bool).copy()
        self._lstm: StepRecurrence | None = None
        self._acted = 0.0
        self.begin()

    def begin(self) -> None:
        """Forgets all steps: a rollout begins."""
        self.rewards: Array = np.zeros((0, 0), np.float32)
        self.raw_rewards: list[Array] = []
        self.ended: Array = np.zeros((0, 0), bool)
        self.time_limits: Array = np.zeros((0, 0), bool)
        self._ends: list[tuple[int, Array, Array, Sequence[Mapping[str, Any]]]] = []
        self.described: list[Description] = []
        self._drawn: list[Any] = []
        self.recurrence: list[StepRecurrence] = []
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.times: list[int] = []
        self.environment_seconds = 0.0

    def lstm(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The actor's LSTM was called."""
        inputs, states = args
        self._lstm = StepRecurrence(inputs[0].detach(), states, result[1])

    def acted(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The policy chose actions."""
        drawn = self._drawn
        drawn.append(self._kept(self._policy))
        if len(drawn) == BLOCK:
            self._describe()
        if self._recurrent and self._lstm is not None:
            self.recurrence.append(self._lstm)
        self._acted = perf_counter()

    def stepped(self, given: Mapping[str, Any]) -> None:
        """The environments answered; `given` are the local variables of the collecting loop."""
        self.environment_seconds += perf_counter() - self._acted
        dones = given["dones"]
        if dones.tobytes().strip(NOTHING):  # a sixth of what `dones.any()` takes
            rewards = given["rewards"].copy()  # a time limit's bootstrap will be added in place
            self._ends.append((given["n_steps"], dones.copy(), rewards, given["infos"]))
        if self._scaled is not None:
            self.raw_rewards.append(self._scaled.get_original_reward())

    def finish(self) -> None:
        """The rollout is whole: says which episodes ended in it, and which of them by a time limit."""
        if self._drawn:
            self._describe()
        self.rewards = self._model.rollout_buffer.rewards.copy()
        self.ended = np.zeros(self.rewards.shape, bool)
        for time_step, dones, rewards, _ in self._ends:
            self.ended[time_step], self.rewards[time_step] = dones, rewards
        self.time_limits = np.zeros_like(self.ended)
        raw = (np.stack(self.raw_rewards) if self.raw_rewards else self.rewards).astype(np.float64)
        since = np.zeros(len(self._sums), np.int64)
        for time_step, dones, _, infos in self._ends:
            for index in map(int, np.flatnonzero(dones)):
                own = self._sums[index] + raw[since[index] : time_step + 1, index].sum()
                self._finish(time_step, index, infos[index], (own, self._lengths[index] + time_step + 1 - since[index]))
                since[index] = time_step + 1
        self._sums += [raw[first:, index].sum() for index, first in enumerate(since)]
        self._lengths += len(raw) - since

    def _describe(self) -> None:
        drawn, self._drawn = self._drawn, []
        self.described.append(self._joined(drawn, torch.stack))

    def _finish(self, time_step: int, index: int, info: Mapping[str, Any], own: tuple[float, int]) -> None:
        """An episode is over. A monitor's account of it wins over our own."""
        known = info.get("episode")
        if known is not None or self._whole[index]:
            self.returns.append(float(known["r"] if known else own[0]))
            self.lengths.append(int(known["l"] if known else own[1]))
            self.times.append(time_step)
        self._sums[index], self._lengths[index], self._whole[index] = 0.0, 0, True
        limited = bool(info.get("TimeLimit.truncated", False)) and info.get("terminal_observation") is not None
        self.time_limits[time_step, index] = limited

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
