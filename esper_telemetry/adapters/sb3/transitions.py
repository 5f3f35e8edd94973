"""Steps of the environments as they are taken: observations that were acted on and returned, rewards, and actions on their way.

Only small copies are made between two steps; everything else happens when the rollout is complete.

Shapes: T steps, B environments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.adapters.columns import Array
from esper_telemetry.events import Transitions
from esper_telemetry.metrics.integrity.rollouts.transitions import MAX_CHECKSUM_ENTRIES, checksums, informative

MAX_KEPT_ENTRIES = 1 << 12
"""Entries of a step's observations up to which they are copied as the policy received them."""

MAX_KEPT_ROLLOUT_ENTRIES = 1 << 22
"""The same of a rollout: 16 megabytes."""

End = tuple[int, Array, Array, Sequence[Mapping[str, Any]]]
"""A step in which episodes ended: its number, `dones`, rewards and infos."""


class CollectedSteps(NamedTuple):
    """A rollout as it was collected.

    Attributes:
        transitions: what the environments returned; None where observations have several parts.
        acted: [T, B, ...], observations as the policy received them; None of large ones.
    """

    transitions: Transitions | None
    acted: Tensor | None


class StepRecorder:
    """Records the steps of one rollout after another.

    Args:
        env: of the model.
    """

    def __init__(self, env: Any) -> None:
        innermost = env
        while hasattr(innermost, "venv"):
            innermost = innermost.venv
        self._innermost = innermost
        self.begin()

    def begin(self) -> None:
        """Forget all steps: a rollout begins."""
        self._acted: list[Tensor] = []
        self._returned: list[Array] = []
        self._rewards: list[Array] = []
        self._sent: list[Array] = []
        self._received: list[Array] = []

    def after_action(self, args: tuple[Any, ...]) -> None:
        """The policy was called with these arguments."""
        if args and isinstance(args[0], Tensor) and args[0].numel() <= MAX_KEPT_ENTRIES:
            self._acted.append(args[0].clone())

    def after_step(self, variables: Mapping[str, Any]) -> None:
        """The environments answered; `variables` are the local ones of the collecting loop."""
        returned = variables.get("new_obs")
        sent = variables.get("clipped_actions", variables.get("actions"))  # MaskablePPO cuts none
        if isinstance(returned, np.ndarray):
            self._returned.append(_entries(returned).copy())
        self._rewards.append(variables["rewards"].copy())
        received = getattr(self._innermost, "actions", None)
        if isinstance(sent, np.ndarray) and isinstance(received, np.ndarray) and received.shape == sent.shape:
            self._sent.append(sent)
            self._received.append(received if received is sent else received.copy())

    def rewards(self) -> Array:
        """Rewards [T, B] as the collecting loop received them."""
        return np.stack(self._rewards)

    def finish(self, stored: Any, ends: Sequence[End]) -> CollectedSteps:
        """Return the rollout, of which the buffer has stored these observations; `ends` are its ends of episodes."""
        acted = self._acted
        is_complete_copy = (
            len(acted) == len(self._rewards) and sum(map(torch.Tensor.numel, acted)) <= MAX_KEPT_ROLLOUT_ENTRIES
        )
        complete = len(self._returned) == len(self._rewards) > 0 and isinstance(stored, np.ndarray)
        return CollectedSteps(
            self._transitions(stored, ends) if complete else None,
            torch.stack(acted) if is_complete_copy and acted else None,
        )

    def _transitions(self, stored: Array, ends: Sequence[End]) -> Transitions | None:
        observations = torch.from_numpy(stored)
        returned = np.stack(self._returned)
        own = _entries(stored.reshape(-1, *stored.shape[2:])).reshape(*stored.shape[:2], -1)
        if own.shape != returned.shape:
            return None
        places, rows = [], []
        for step, dones, _, infos in ends:
            for index in map(int, np.flatnonzero(dones)):
                final = infos[index].get("terminal_observation")
                if isinstance(final, np.ndarray | np.generic) and final.size == stored[0, 0].size:
                    places.append((step, index))
                    rows.append(np.asarray(final, stored.dtype).reshape(-1))
        finals = torch.full(own.shape[:2], torch.nan, dtype=torch.float64)
        if places:
            at = torch.tensor(places)
            finals[at[:, 0], at[:, 1]] = checksums(torch.from_numpy(_entries(np.stack(rows)).copy()).unsqueeze(0))[0]
        sent = received = _action_sums(self._sent, len(self._rewards))
        if any(one is not other for one, other in zip(self._sent, self._received, strict=True)):
            received = _action_sums(self._received, len(self._rewards))
        return Transitions(
            inputs=checksums(torch.from_numpy(np.ascontiguousarray(own))),
            outcomes=checksums(torch.from_numpy(returned.astype(stored.dtype))),
            finals=finals,
            rewards=torch.from_numpy(np.stack(self._rewards).astype(np.float64)),
            informative=informative(observations),
            sent=sent,
            received=received,
        )


def _entries(observations: Array) -> Array:
    """Some entries of each observation [B, ...], [B, n], those of which checksums are taken."""
    rows = observations.reshape(len(observations), -1)
    return rows[:, :: max(1, -(-rows.shape[1] // MAX_CHECKSUM_ENTRIES))]


def _action_sums(actions: Sequence[Array], steps: int) -> Tensor | None:
    if len(actions) != steps:
        return None
    stacked = torch.from_numpy(np.stack(actions).astype(np.float64))
    return checksums(stacked if stacked.dim() > 2 else stacked.unsqueeze(-1))
