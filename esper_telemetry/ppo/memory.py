"""The recurrent state of one trunk on the host, from one rollout to the next."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from esper_telemetry.ppo.recurrent import Core

Array = npt.NDArray[Any]


class LSTMMemory:
    """What a trunk remembers of the episodes that are open.

    Attributes:
        state: [layers, parts, B, H] now.
        before: [layers, parts, B, H] when the rollout began.
        after: [T, layers, parts, B, H] after each step of the rollout, before an end of an episode cleared it.
    """

    def __init__(self, core: Core, num_steps: int, num_envs: int) -> None:
        shape = core.state_shape(num_envs)
        self.state, self.before = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.after = np.zeros((num_steps, *shape), np.float32)

    @property
    def outputs(self) -> Array:
        """[T, B, H]: what the core gave at each step."""
        outputs: Array = self.after[:, -1, 0]
        return outputs

    def begin(self) -> None:
        """A rollout begins: `before` becomes the state."""
        self.before[:] = self.state

    def keep(self, t: int, fresh: Array) -> None:
        """Step t is done; the environments in `fresh` [B] begin the next one without memory."""
        self.after[t] = self.state
        if fresh.any():
            self.state[:, :, fresh] = 0
