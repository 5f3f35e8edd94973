"""CueRecall: a task of ten steps that needs memory, two factored heads and a mask; solved in a minute on one core."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from esper_telemetry.ppo.environments.environment_protocol import ActionSpec, TensorStep

LENGTH, CUES, ARGUMENTS, NOISE = 10, 4, 3, 2
RECALL, ARGUMENT = 1.0, 0.3


class CueRecall:
    """B episodes of ten steps whose phases differ, as tensors.

    An observation holds a one-hot cue of four, shown only at the first step, two noise values and t/10. The action has
    two parts: `op` (4), and `arg` (3), which matters unless op is 0. The reward is 1 if op equals the cue, after the first
    step, and 0.3 if op is not 0 and arg is t mod 3. The largest return is 9 + Σ 0.3 over the steps with op > 0: about 11,
    since a cue of 0 excludes the second part. Without memory, one cue in four is right.

    Args:
        num_envs: B.
        seed: makes the episodes repeatable.
        device: device of its tensors.
        stale_cue: use the cue of the previous episode, which is unpredictable for a policy whose memory does not
            cross episodes.
    """

    name = "cue-recall"
    horizon = LENGTH
    observation_shape = (CUES + NOISE + 1,)

    def __init__(self, num_envs: int = 16, *, seed: int | None = None, device: str | torch.device = "cpu", stale_cue: bool = False) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}")
        self.num_envs, self.device, self.stale_cue = num_envs, torch.device(device), stale_cue
        self.action_specs = {
            "op": ActionSpec("categorical", CUES),
            "arg": ActionSpec("categorical", ARGUMENTS, given="op", relevant_for=tuple(range(1, CUES))),
        }
        self._seed = seed
        self._generator = torch.Generator(self.device)
        self._time = self._cue = self._previous = torch.zeros(num_envs, dtype=torch.int64, device=self.device)

    def reset(self, seed: int | None = None) -> Tensor:
        """Begin episodes at random phases, so that their ends are spread over the rollout; return [B, 7]."""
        seed = seed if self._seed is None else self._seed
        if seed is not None:
            self._generator.manual_seed(seed)
        self._time, self._cue, self._previous = self._draw(LENGTH), self._draw(CUES), self._draw(CUES)
        return self._observe()

    def step(self, actions: Mapping[str, Tensor]) -> TensorStep:
        """Take op [B] and arg [B]."""
        op, arg = actions["op"], actions["arg"]
        cue = self._previous if self.stale_cue else self._cue
        rewards = RECALL * ((op == cue) & (self._time > 0)) + ARGUMENT * ((op > 0) & (arg == self._time % ARGUMENTS))
        terminated = self._time == LENGTH - 1
        self._previous = torch.where(terminated, self._cue, self._previous)
        self._cue = torch.where(terminated, self._draw(CUES), self._cue)
        self._time = torch.where(terminated, 0, self._time + 1)
        return TensorStep(self._observe(), rewards, terminated, torch.zeros_like(terminated))

    def close(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Tensor]:
        """Phases, cues and the random generator."""
        state = {"time": self._time, "cue": self._cue, "previous": self._previous}
        return {**state, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state."""
        self._time, self._cue, self._previous = (state[name].to(self.device) for name in ("time", "cue", "previous"))
        self._generator.set_state(state["generator"])

    def _draw(self, bound: int) -> Tensor:
        return torch.randint(bound, (self.num_envs,), generator=self._generator, device=self.device)

    def _observe(self) -> Tensor:
        cue = torch.nn.functional.one_hot(self._cue, CUES) * (self._time == 0).unsqueeze(-1)
        noise = torch.randn(self.num_envs, NOISE, generator=self._generator, device=self.device)
        return torch.cat([cue, noise, self._time.unsqueeze(-1) / LENGTH], -1)
