"""Steps of the environments as Stable-Baselines3 takes them; see `event_parts.Transitions`.

At each step, small parts of the observations, the rewards and the executed actions are copied. Everything else happens when the
rollout is complete.

Shapes: T steps, B environments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.adapters.columns import Array, cast_change
from esper_telemetry.core.event_parts import Transitions
from esper_telemetry.equations.transitions import MAX_CHECKSUM_ENTRIES, checksums, informative

MAX_KEPT_ENTRIES = 1 << 12
"""Largest number of entries in a step's observations that are copied as the policy received them."""

MAX_KEPT_ROLLOUT_ENTRIES = 1 << 22
"""The same limit for a rollout: 16 megabytes."""

STEP_FUNCTIONS = ("step_wait", "step")
"""Methods of environments that step together, which also reset an environment whose episode has ended."""


class StepEnds(NamedTuple):
    """A step in which episodes ended: its number, `dones` [B], and infos."""

    step: int
    dones: Array
    infos: Sequence[Mapping[str, Any]]


def ended_rows(ends: Sequence[StepEnds]) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """Yield step, environment and infos of each end of an episode."""
    for step, dones, infos in ends:
        for index in map(int, np.flatnonzero(dones)):
            yield step, index, infos[index]


class StepRecorder:
    """Records the steps of one rollout after another.

    Args:
        env: of the model.

    Attributes:
        innermost: the environments beneath its wrappers.
    """

    def __init__(self, env: Any) -> None:
        self.innermost = env
        while hasattr(self.innermost, "venv"):
            self.innermost = self.innermost.venv
        self._answers: list[tuple[Array | None, Array]] = []
        self.begin(whole=True)

    def begin(self, *, whole: bool) -> None:
        """Forget all steps: a rollout begins, which is recorded if `whole`."""
        self._whole = whole
        self._acted: list[Tensor] = []
        # of each step, rewards [B] and some entries of the observations, [B, n], None of several parts: as the environments returned them,
        # and as the loop shows them, which may change them
        self._outcomes: list[tuple[Array, Array | None, Array | None]] = []
        self._sent: list[Array] = []
        self._received: list[Array] = []
        self._cast = 0.0

    @property
    def shown_env(self) -> object | None:
        """The first environment if it is in this process; the others store its observations with the dtype of their space."""
        envs = getattr(self.innermost, "envs", None)
        return envs[0] if isinstance(envs, list) and envs and hasattr(envs[0], "__dict__") else None

    def after_env_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The first environment returned this."""
        if self._whole:
            self._cast = max(self._cast, cast_change(result[0], self.innermost.observation_space.dtype))

    def after_action(self, args: tuple[Any, ...]) -> None:
        """The policy was called with these arguments."""
        if args and isinstance(args[0], Tensor) and args[0].numel() <= MAX_KEPT_ENTRIES:
            self._acted.append(args[0].clone())

    def after_answer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The environments returned this to the collecting loop."""
        if self._whole:
            kept = _entries(result[0]).copy() if isinstance(result[0], np.ndarray) else None
            self._answers.append((kept, np.array(result[1])))

    def after_step(self, variables: Mapping[str, Any], rewards: Array) -> None:
        """The environments answered; `variables` are the local ones of the collecting loop, `rewards` [B] as it received them."""
        answers, self._answers = self._answers, []
        observations = variables.get("new_obs")
        last = answers[-1][0] if answers else None
        # a loop may give them another name
        shown = _entries(observations).copy() if isinstance(observations, np.ndarray) else last
        returned = shown if last is None or shown is None or last.shape != shown.shape else last
        # a loop that repeats its actions adds the rewards of several answers
        paid = answers[0][1] if len(answers) == 1 and answers[0][1].shape == rewards.shape else rewards
        self._outcomes.append((paid, returned, shown))
        sent = variables.get("clipped_actions", variables.get("actions"))  # MaskablePPO cuts none
        received = getattr(self.innermost, "actions", None)
        if isinstance(sent, np.ndarray) and isinstance(received, np.ndarray) and received.shape == sent.shape:
            self._sent.append(sent)
            self._received.append(received if received is sent else received.copy())

    def acted(self) -> Tensor | None:
        """Observations [T, B, ...] as the policy received them; None of large ones."""
        complete = len(self._acted) == len(self._outcomes) > 0
        few = sum(map(torch.Tensor.numel, self._acted)) <= MAX_KEPT_ROLLOUT_ENTRIES
        return torch.stack(self._acted) if complete and few else None

    def transitions(self, stored: Any, ends: Sequence[StepEnds], resets: ResetCounter) -> Transitions | None:
        """Return the rollout, of which the buffer has stored these observations; None if they have several parts."""
        if not isinstance(stored, np.ndarray) or any(shown is None for _, _, shown in self._outcomes) or not self._outcomes:
            return None
        columns: Any = zip(*self._outcomes, strict=True)
        paid, returned, shown = map(np.stack, columns)
        kept, delayed = (shown == returned).all(-1), (shown[1:] == returned[:-1]).all(-1)
        # a loop that swaps some observations, or delays all, makes a mistake; a loop that scales them acts on the
        # observations that it shows
        if 2 * max(kept.mean(), delayed.mean() if delayed.size else 0.0) < 1:
            returned = shown
        own = _entries(stored.reshape(-1, *stored.shape[2:])).reshape(*stored.shape[:2], -1)
        if own.shape != returned.shape:
            return None
        finals = torch.full(own.shape[:2], torch.nan, dtype=torch.float64)
        last = [((step, index), info.get("terminal_observation")) for step, index, info in ended_rows(ends)]
        known = [
            (place, np.asarray(one, stored.dtype).reshape(-1))
            for place, one in last
            if isinstance(one, np.ndarray | np.generic) and one.size == stored[0, 0].size
        ]
        if known:
            places, rows = zip(*known, strict=True)
            finals[torch.tensor(places).unbind(1)] = checksums(torch.from_numpy(_entries(np.stack(rows)))[None])[0]
        sent = received = self._action_sums(self._sent)
        if any(one is not other for one, other in zip(self._sent, self._received, strict=True)):
            received = self._action_sums(self._received)
        return Transitions(
            inputs=checksums(torch.from_numpy(np.ascontiguousarray(own))),
            outcomes=checksums(torch.from_numpy(returned.astype(stored.dtype))),
            finals=finals,
            rewards=torch.from_numpy(paid.astype(np.float64)),
            informative=informative(torch.from_numpy(stored)),
            sent=sent,
            received=received,
            resets=resets.take(),
            cast=self._cast,
        )

    def _action_sums(self, actions: Sequence[Array]) -> Tensor | None:
        if len(actions) != len(self._outcomes):
            return None
        stacked = torch.from_numpy(np.stack(actions).astype(np.float64))
        return checksums(stacked if stacked.dim() > 2 else stacked.unsqueeze(-1))


class ResetCounter:
    """Counts resets of the training environments outside their steps, if the trainer then acts on an earlier observation.

    An evaluation in these environments is such a reset. A program that resets them on purpose replaces the model's last observation.

    Args:
        innermost: environments of the model, beneath wrappers of all of them.
    """

    def __init__(self, model: Any, innermost: Any) -> None:
        self._model, self._innermost = model, innermost
        self._returned: Any = None
        self._before: list[Any] = []
        self._pending = self._count = 0

    @property
    def owners(self) -> list[object]:
        """Objects whose `reset` begins an episode: single environments if they are in this process, shared with others or not."""
        envs = getattr(self._innermost, "envs", None)
        present = [getattr(env, "unwrapped", env) for env in envs] if isinstance(envs, list) else [self._innermost]
        return [owner for owner in {id(one): one for one in present}.values() if hasattr(owner, "__dict__")]

    def after_reset(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """An environment was reset: in a step of the model's environments, or by anything else."""
        frame = sys._getframe(1)
        while frame.f_back is not None:
            if frame.f_code.co_name in STEP_FUNCTIONS and frame.f_locals.get("self") is self._innermost:
                return
            frame = frame.f_back
        self._pending += 1
        self._before += [self._model._last_obs, self._returned]

    def after_step(self, variables: Mapping[str, Any]) -> None:
        """The environments answered an action, which was chosen for the model's last observation."""
        if self._pending:
            if any(self._model._last_obs is one for one in self._before):
                self._count += self._pending
            self._pending, self._before = 0, []
        self._returned = variables.get("new_obs")

    def take(self) -> int:
        """Return the number since the last call."""
        count, self._count = self._count, 0
        return count


def _entries(observations: Array) -> Array:
    """Some entries of each observation [B, ...], [B, n], of which checksums are taken."""
    rows = observations.reshape(len(observations), -1)
    return rows[:, :: max(1, -(-rows.shape[1] // MAX_CHECKSUM_ENTRIES))]
