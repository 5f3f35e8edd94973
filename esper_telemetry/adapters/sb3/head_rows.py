"""Gradients of the parts of an action: each has rows of one layer, which gives the scores of all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from esper_telemetry.adapters.sb3.heads import Heads


class HeadColumns:
    """The rows of a policy's last layer, by the part of the action that they score.

    Args:
        policy: has `action_net`.
        heads: of its actions.
    """

    def __init__(self, policy: Any, heads: Heads) -> None:
        layer, count = getattr(policy, "action_net", None), len(heads.names)
        self._layer: nn.Linear | None = layer if isinstance(layer, nn.Linear) and count > 1 else None
        self._of = torch.empty(0, dtype=torch.long)
        self._count = count
        if self._layer is not None:
            sizes = heads.rows(self._layer.out_features)
            self._layer = self._layer if sizes else None
            self._of = torch.repeat_interleave(torch.arange(count), torch.tensor(sizes or [0] * count))

    def norms(self) -> Tensor | None:
        """L2 norm of each part's gradient, [H] in float64; None where there is one part, or the layer has no gradient."""
        layer = self._layer
        if layer is None or layer.weight.grad is None:
            return None
        with torch.no_grad():
            squares = layer.weight.grad.double().square().sum(1)
            if layer.bias is not None and layer.bias.grad is not None:
                squares += layer.bias.grad.double().square()
            empty = torch.zeros(self._count, dtype=torch.float64, device=squares.device)
            return empty.index_add_(0, self._of.to(squares.device), squares).sqrt_()
