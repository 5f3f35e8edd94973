"""Collecting rollouts from environments on the host, with as few calls per step as possible.

A step needs only the actor. Noise is drawn for the whole rollout at once; values, log-probabilities and episode
statistics are computed after it, in one batch each: the weights have not changed meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from esper_telemetry.ppo.checkpoint import new_seed
from esper_telemetry.ppo.collectors.base import EVERY, FIRST, EpisodeCounter, ProcessorClock
from esper_telemetry.ppo.collectors.choices import Choices
from esper_telemetry.ppo.collectors.inference import Acting, Final, LSTMMemory, acting, estimate, remember, tensor
from esper_telemetry.ppo.environments.protocol import Array, Masked, Saveable, Step, VectorEnvironment, layout_of
from esper_telemetry.ppo.normalizer import PLAIN, Normalizers
from esper_telemetry.ppo.policy import ActorCritic
from esper_telemetry.ppo.rollout import Rollout, RolloutRecurrence

Resets = Callable[[Array], Array]


def at_ends(ended: Array) -> Array:
    """Memory begins anew after every end of an episode: the flags [B] as they are."""
    return ended


class Collector:
    """Acts in the environments and remembers what happened, from one rollout to the next.

    Args:
        greedy: takes the likeliest choices instead of drawing them.

    Attributes:
        episodes: counts the episodes.
        seconds: wall time that the last rollout spent in `environment` and in `inference`.
        cpu_seconds: processor time of the last `rollout`, and of these two parts of it.
    """

    def __init__(
        self,
        env: VectorEnvironment,
        policy: ActorCritic,
        num_steps: int,
        seed: int,
        normalizers: Normalizers = PLAIN,
        *,
        greedy: bool = False,
    ) -> None:
        shape = (num_steps, env.num_envs)
        self._normalizers = normalizers
        self.env, self.policy, self.num_steps = env, policy, num_steps
        self.episodes = EpisodeCounter(env.num_envs)
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        self._generator = torch.Generator().manual_seed(seed)
        self._layout = layout_of(env)
        self._observations = np.zeros((num_steps + 1, env.num_envs, *env.observation_shape), self._layout.dtype)
        self._rewards = np.zeros(shape, np.float32)
        self._terminated, self._truncated, self._valid = (np.zeros(shape, bool) for _ in range(3))
        self._fresh = np.zeros((num_steps + 1, env.num_envs), bool)
        self._finals: list[Final] = []
        self._memories = {name: LSTMMemory(core, *shape) for name, core in policy.cores().items()}
        self._raw = np.zeros_like(self._observations) if normalizers.observations else self._observations
        self._normalize: Callable[[Array], Array] | None = None
        self._raw[-1] = env.reset(seed)
        self._masks: Callable[[], Mapping[str, Array]] | None = env.action_masks if isinstance(env, Masked) else None
        masked = tuple(self._masks()) if self._masks else ()
        self._choices = Choices(env, policy, num_steps, masked, greedy=greedy)
        self._fresh[-1] = True

    def collect(self, resets: Resets = at_ends) -> Rollout:
        """The next rollout; it holds until the next call.

        Args:
            resets: where memory begins anew, from where episodes ended, [B] bool both.
        """
        clock = ProcessorClock()
        self._begin()
        act = acting(self.policy)
        memory = self._memories.get("actor")
        state = None if memory is None else memory.state
        environment, start = 0.0, time.perf_counter()
        for t in range(self.num_steps):
            scores = act.scores(act.actor(self._observations[t], state))
            actions = self._choices.choose(t, scores, self._masks() if self._masks else {})
            before = time.perf_counter()
            step = clock.step(self.env.step, actions) if t % EVERY == FIRST else self.env.step(actions)
            environment += time.perf_counter() - before
            self._store(t, step)
            if memory is not None:
                self._fresh[t + 1] = resets(self._terminated[t] | self._truncated[t] | ~self._valid[t])
                memory.keep(t, self._fresh[t + 1])
        rollout = self._finish(act)
        self.seconds = {"environment": environment, "inference": time.perf_counter() - start - environment}
        self.cpu_seconds = clock.seconds(self.num_steps)
        return rollout

    def state_dict(self) -> dict[str, Any]:
        """What the next rollout goes on from; the environment's state is None where it cannot be saved."""
        return {
            "environment": self.env.state_dict() if isinstance(self.env, Saveable) else None,
            "observations": torch.from_numpy(self._raw[-1].copy()),
            "fresh": torch.from_numpy(self._fresh[-1].copy()),
            "memories": {name: torch.from_numpy(memory.state.copy()) for name, memory in self._memories.items()},
            "episodes": {name: sums.clone() for name, sums in self.episodes.state_dict().items()},
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state; begins new episodes where the environment could not be saved."""
        self._generator.set_state(state["generator"])
        if state["environment"] is None:
            self._begin_anew()
            return
        assert isinstance(self.env, Saveable)
        self.env.load_state_dict(state["environment"])
        self._raw[-1], self._fresh[-1] = state["observations"].numpy(), state["fresh"].numpy()
        for name, memory in self._memories.items():
            memory.state[:] = state["memories"][name].numpy()
        self.episodes.load_state_dict(state["episodes"])

    def _begin_anew(self) -> None:
        """Begins episodes everywhere, other ones than at the start of the run."""
        self._raw[-1] = self.env.reset(new_seed(self._generator))
        self._fresh[-1] = True
        for memory in self._memories.values():
            memory.state.fill(0.0)
        self.episodes.forget()
        self._normalizers.forget()

    def _begin(self) -> None:
        self._raw[0] = self._raw[-1]
        if self._normalizers.observations:
            self._normalize = self._normalizers.observations.as_numpy()
            self._observations[0] = self._normalize(self._raw[0])
        self._fresh[0] = self._fresh[-1]
        self._valid.fill(True)
        self._finals.clear()
        self._choices.begin(self._generator)
        if self._memories:
            self._memories["actor"].begin()

    def _store(self, t: int, step: Step) -> None:
        self._raw[t + 1] = step.observations
        if self._normalize:
            self._observations[t + 1] = self._normalize(self._raw[t + 1])
        self._rewards[t] = step.rewards
        self._terminated[t] = step.terminated
        self._truncated[t] = step.truncated
        if step.valid is not None:
            self._valid[t] = step.valid
        if step.final_observations is not None:
            rows = np.flatnonzero(step.truncated & ~step.terminated)
            if len(rows):
                last = step.final_observations[rows].astype(self._layout.dtype)
                self._finals.append(Final(t, rows, self._normalize(last) if self._normalize else last))

    def _finish(self, act: Acting) -> Rollout:
        self._choices.check_finite(self._raw, self._layout)
        if "critic" in self._memories:
            remember(act, self._observations, self._memories["critic"], self._fresh)
        memory = self._memories.get("critic", self._memories.get("actor"))
        values, next_values = estimate(act, self._observations, self._terminated, self._finals, memory)
        ended = self._terminated | self._truncated
        valid = None if self._valid.all() else self._valid
        self.episodes.count(self._rewards, ended, valid)
        device = self.policy.value.weight.device
        rollout = Rollout(
            observations=tensor(self._observations[:-1], device),
            rewards=tensor(self._rewards, device),
            values=tensor(values, device),
            next_values=tensor(next_values, device),
            ended=tensor(ended, device),
            terminated=tensor(self._terminated, device),
            valid=None if valid is None else tensor(valid, device),
            transitions=self._rewards.size if valid is None else int(valid.sum()),
            recurrence=self._recurrence(valid, device),
            **self._choices.finish(device)._asdict(),
        )
        return self._normalizers.finish(rollout, tensor(self._raw[:-1], device))

    def _recurrence(self, valid: Array | None, device: torch.device) -> RolloutRecurrence | None:
        if not self._memories:
            return None
        states = {name: tensor(memory.before, device) for name, memory in self._memories.items()}
        return RolloutRecurrence(states, self._fresh[:-1], tensor(self._memories["actor"].after, device), valid)
