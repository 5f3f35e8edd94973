"""Collecting rollouts: the shared part of collectors on the host and on a device.

A step of a rollout needs only the actor. Noise is sampled for the whole rollout at once. Values, log-probabilities and episode statistics
are computed after the rollout in one batch each, because the weights have not changed meanwhile.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.ppo.environments.environment_protocol import Array, Environment, Masked, restore_state, saved_state
from esper_telemetry.ppo.normalizer import PLAIN, Normalizers
from esper_telemetry.ppo.policy import ActorCritic
from esper_telemetry.ppo.rollout import Rollout

Resets = Callable[[Any], Any]
Actions = TypeVar("Actions")
Outcome = TypeVar("Outcome")

CPU_SAMPLE_STRIDE: Final = 16
FIRST_CPU_SAMPLE: Final = 5
"""Steps between samples of the environments' processor time, and the first one; reading that clock takes about as long as a step."""
MAX_SEED: Final = 2**31


def at_ends(ended: Any) -> Any:
    """Return the flags [B] unchanged: memory is reset after every end of an episode."""
    return ended


class EpisodeTotals:
    """Returns and lengths of episodes, counted once per rollout instead of at every step.

    Attributes:
        returns, lengths: returns and lengths of the episodes that finished in the last rollout, in that order.
        times: the step of the rollout at which each of them finished.
    """

    def __init__(self, num_envs: int) -> None:
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.times: list[int] = []
        self._open_return = np.zeros(num_envs)
        self._open_length = np.zeros(num_envs, np.int64)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums of the open episodes."""
        sums = {"returns": self._open_return, "lengths": self._open_length}
        return {name: torch.from_numpy(values.copy()) for name, values in sums.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue the open episodes of a saved state."""
        self._open_return[:], self._open_length[:] = state["returns"].numpy(), state["lengths"].numpy()

    def forget(self) -> None:
        """Drop the open episodes, which will not continue."""
        self._open_return.fill(0.0)
        self._open_length.fill(0)

    def count(self, rewards: Array, ended: Array, valid: Array | None) -> None:
        """Add a rollout: rewards, ended and valid are [T, B]; invalid rows do not count."""
        steps = np.ones(rewards.shape, np.int64) if valid is None else valid.astype(np.int64)
        times, envs = np.nonzero(ended)
        self.times = times.tolist()
        self.returns = self._close(self._open_return, rewards * steps, times, envs).tolist()
        self.lengths = self._close(self._open_length, steps, times, envs).tolist()

    @staticmethod
    def _close(open_sums: Array, amounts: Array, times: Array, envs: Array) -> Array:
        """Return the sums [E] of `amounts` [T, B] over the episodes that end at (times, envs); `open_sums` [B] is carried."""
        running = open_sums + np.cumsum(amounts, 0, dtype=open_sums.dtype)
        ends = running[times, envs]
        order = np.lexsort((times, envs))
        totals: Array = np.empty_like(ends)
        previous = np.where(envs[order][1:] == envs[order][:-1], ends[order][:-1], 0)
        totals[order] = ends[order] - np.concatenate([np.zeros(min(1, len(ends)), ends.dtype), previous])
        open_sums[:] = running[-1]
        np.subtract.at(open_sums, envs, totals)
        return totals


class RolloutClock:
    """Wall and processor time of one rollout since the clock's creation."""

    def __init__(self) -> None:
        self._start, self._cpu_start = time.perf_counter(), time.process_time()
        self.environment = self._sampled_cpu = 0.0
        self._steps = self._samples = 0

    def step(self, step: Callable[[Actions], Outcome], actions: Actions) -> Outcome:
        """Take a step of the environments; return its outcome."""
        start = time.perf_counter()
        if self._steps % CPU_SAMPLE_STRIDE == FIRST_CPU_SAMPLE:
            cpu_start = time.process_time()
            outcome = step(actions)
            self._sampled_cpu += time.process_time() - cpu_start
            self._samples += 1
        else:
            outcome = step(actions)
        self.environment += time.perf_counter() - start
        self._steps += 1
        return outcome

    def seconds(self) -> dict[str, float]:
        """Return the wall time of the rollout's parts `environment` and `inference`."""
        rollout = time.perf_counter() - self._start
        return {"environment": self.environment, "inference": rollout - self.environment}

    def cpu_seconds(self) -> dict[str, float]:
        """Return the processor time of the `rollout` and, if a step was sampled, of its two parts, scaled up from the samples."""
        rollout = time.process_time() - self._cpu_start
        if not self._samples:
            return {"rollout": rollout}
        environment = min(self._sampled_cpu * self._steps / self._samples, rollout)
        return {"rollout": rollout, "environment": environment, "inference": rollout - environment}


class RolloutCollector(ABC):
    """Runs the actor in environments and keeps the results, from one rollout to the next.

    Args:
        env: the environments; they are reset.
        policy: chooses the actions.
        num_steps: T, steps per rollout.
        seed: seed of the noise, and of environments without their own seed.
        normalizers: normalisers of observations and rewards; every rollout updates them.
        greedy: take the most likely actions instead of sampling them.

    Attributes:
        env: the environments; assign others to step those instead.
        episodes: counts the episodes.
        seconds, cpu_seconds: wall and processor time of the last rollout and its parts, as measured on the host.
    """

    def __init__(
        self, env: Environment, policy: ActorCritic, num_steps: int, seed: int, normalizers: Normalizers = PLAIN, *, greedy: bool = False
    ) -> None:
        self.env: Any = env
        self.policy, self.num_steps = policy, num_steps
        self.episodes = EpisodeTotals(env.num_envs)
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        self._normalizers, self._greedy = normalizers, greedy
        self._device = policy.value.weight.device
        # on the host, so that a seed gives the same noise on every device
        self._generator = torch.Generator().manual_seed(seed)
        self._action_masks: Callable[[], Mapping[str, Any]] = env.action_masks if isinstance(env, Masked) else dict

    def collect(self, resets: Resets = at_ends) -> Rollout:
        """Return the next rollout, which is valid until the next call.

        Args:
            resets: maps the ends of episodes to the resets of memory, both [B] bool.
        """
        clock = RolloutClock()
        self._begin()
        for t in range(self.num_steps):
            self._store(t, clock.step(self.env.step, self._act(t)), resets)
        rollout = self._finish()
        self.seconds, self.cpu_seconds = clock.seconds(), clock.cpu_seconds()
        return rollout

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which the next rollout continues; the environment's state is None if it cannot be saved."""
        return {
            "environment": saved_state(self.env),
            **self._position(),
            "episodes": self.episodes.state_dict(),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; if the environment could not be saved, begin new episodes, different from the first ones."""
        self._generator.set_state(state["generator"])
        if state["environment"] is None:
            seed = int(torch.randint(MAX_SEED, (), generator=self._generator))
            self._begin_episodes(self.env.reset(seed))
            self.episodes.forget()
            self._normalizers.forget()
            return
        restore_state(self.env, state["environment"])
        self._load_position(state)
        self.episodes.load_state_dict(state["episodes"])

    @abstractmethod
    def _begin(self) -> None:
        """Prepare a rollout."""

    @abstractmethod
    def _act(self, t: int) -> Any:
        """Return the actions of step t, in the environments' format."""

    @abstractmethod
    def _store(self, t: int, step: Any, resets: Resets) -> None:
        """Store the outcome of step t."""

    @abstractmethod
    def _finish(self) -> Rollout:
        """Return the rollout."""

    @abstractmethod
    def _begin_episodes(self, observations: Any) -> None:
        """Store the first observations [B, ...] of new episodes, and reset the policy's memory."""

    @abstractmethod
    def _position(self) -> dict[str, Any]:
        """Return the last `observations`, the `fresh` flags of new episodes, and `memories`, the recurrent states."""

    @abstractmethod
    def _load_position(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `_position`."""
