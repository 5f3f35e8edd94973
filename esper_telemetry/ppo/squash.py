"""Real numbers squashed into the bounds of an action space."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper_telemetry.ppo.environments.protocol import ActionSpec

Array = npt.NDArray[Any]

LOG_TWO = math.log(2.0)


class Squash(nn.Module):
    """From real numbers into bounds: tanh, then an affine map onto [low, high].

    Raises:
        ValueError: a bound is not finite.
    """

    bounds: Tensor

    def __init__(self, part: str, spec: ActionSpec) -> None:
        super().__init__()
        low, high = (np.array(bounds, np.float64) for bounds in bounds_of(spec))
        if not np.isfinite([low, high]).all():
            raise ValueError(
                f"squash needs finite bounds, but the action part {part!r} has low={low.tolist()} and high={high.tolist()}"
            )
        self._low, self._high = low.astype(np.float32), high.astype(np.float32)
        self._middle, self._reach = ((part / 2).astype(np.float32) for part in (low + high, high - low))
        rows = np.stack([self._low, self._high, self._middle, self._reach])
        self.register_buffer("bounds", torch.from_numpy(rows), persistent=False)

    def forward(self, drawn: Tensor) -> Tensor:
        """Actions within the bounds [..., D], from what was drawn [..., D]."""
        low, high, middle, reach = self.bounds
        actions: Tensor = (middle + reach * drawn.tanh()).clamp(low, high)
        return actions

    def as_numpy(self, drawn: Array) -> Array:
        """The same in NumPy."""
        actions: Array = np.clip(self._middle + self._reach * np.tanh(drawn), self._low, self._high)
        return actions

    def log_slope(self, drawn: Tensor) -> Tensor:
        """Log derivative of the tanh, [...] summed over dimensions: log(1 - tanh²u) = 2 (log 2 - u - softplus(-2u)).

        This form does not underflow for large |u| (Haarnoja et al. 2018, arXiv:1812.05905, appendix C).
        """
        slope: Tensor = 2.0 * (LOG_TWO - drawn - F.softplus(-2.0 * drawn)).sum(-1)
        return slope


def bounds_of(spec: ActionSpec) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Lower and upper bounds of a continuous part, infinite where it has none."""
    unbounded = (math.inf,) * spec.size
    return spec.low or tuple(-bound for bound in unbounded), spec.high or unbounded
