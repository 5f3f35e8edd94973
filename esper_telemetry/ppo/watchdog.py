"""A watchdog: the last good weights are kept, and come back where an update leaves weights that are not finite."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

PATIENCE = 3
"""Rollbacks in a row after which training gives up."""


class Watchdog:
    """Looks at the weights once per update, which waits for the device.

    Attributes:
        rollbacks: how often the weights were put back, over the run.
    """

    def __init__(self, modules: nn.Module, optimizer: Optimizer) -> None:
        self.rollbacks = 0
        self._modules, self._optimizer = modules, optimizer
        self._in_a_row = 0
        self._good: dict[str, Tensor] = {}
        self.remember()

    def remember(self) -> None:
        """Takes the weights and statistics as they are for good."""
        self._good = {name: tensor.clone() for name, tensor in self._modules.state_dict().items()}

    def state_dict(self) -> dict[str, int]:
        """How often the weights were put back; good are those that are saved with it."""
        return {"rollbacks": self.rollbacks, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on counting, and takes the weights as they are for good."""
        self.rollbacks, self._in_a_row = state.get("rollbacks", 0), state.get("in_a_row", 0)
        self.remember()

    def look(self) -> bool:
        """Whether everything is finite; if not, the good state is back and the optimizer's moments are gone.

        Raises:
            FloatingPointError: for the third time in a row.
        """
        if self._finite():
            self._in_a_row = 0
            self.remember()
            return True
        self.rollbacks += 1
        self._in_a_row += 1
        if self._in_a_row >= PATIENCE:
            raise FloatingPointError(
                f"weights were not finite after {PATIENCE} updates in a row; rolled back each time"
            )
        self._modules.load_state_dict(self._good)
        self._optimizer.state.clear()
        return False

    def _finite(self) -> bool:
        tensors = [tensor for tensor in self._modules.state_dict().values() if tensor.is_floating_point()]
        return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())
