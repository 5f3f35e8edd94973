"""What goes through a script's LSTM while it collects a rollout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

MOST = 4
"""Environments in which the gates are looked at."""

LARGEST = 1 << 24
"""Numbers that are kept at most."""


class Passed(NamedTuple):
    """One step of a rollout: h and c before it, [layers, 2, B, H], and the input in the first environments, [b, I]."""

    states: Tensor
    inputs: Tensor


class Remembered(NamedTuple):
    """A rollout: states [T, layers, 2, B, H] and inputs [T, b, I] of the module."""

    module: nn.LSTM
    states: Tensor
    inputs: Tensor


class ScriptMemory:
    """Keeps the steps of the first LSTM that is stepped without gradients."""

    def __init__(self) -> None:
        self._module: nn.LSTM | None = None
        self._passed: list[Passed] = []
        self._size = 0

    def see(self, module: nn.Module, arguments: tuple[object, ...]) -> None:
        """A call of a module, before it: keeps those of one step of an LSTM, outside of training."""
        if not isinstance(module, nn.LSTM) or torch.is_grad_enabled() or len(arguments) < 2:
            return
        inputs, states = arguments[0], arguments[1]
        if not isinstance(inputs, Tensor) or not isinstance(states, tuple) or inputs.dim() != 3:
            return
        steps = inputs.shape[1 if module.batch_first else 0]
        if steps != 1 or module.bidirectional or self._module not in (None, module):
            return
        self._module = module
        size = 2 * states[0].numel()
        if self._size + size <= LARGEST:
            self._size += size
            rows = inputs.reshape(-1, inputs.shape[-1])[:MOST]
            self._passed.append(Passed(torch.stack([part.detach() for part in states], 1), rows.detach().clone()))

    def take(self, steps: int, size: int) -> Remembered | None:
        """What was kept since the last call of the rollout's T steps; None where that does not fit it."""
        found, self._passed, self._size = self._passed[:steps], [], 0
        if self._module is None or len(found) < steps or any(step.states.shape[2] != size for step in found):
            return None
        states = torch.stack([step.states for step in found])
        return Remembered(self._module, states, torch.stack([step.inputs for step in found]))
