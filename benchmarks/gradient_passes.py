"""Passes over the gradients of a network: clipping, and telemetry's measurements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from networks import Network, with_gradients
from torch import Tensor, nn

from esper_telemetry.core import tensors as ops
from esper_telemetry.metrics.gradients.gradient_health import finite_norms
from esper_telemetry.updates.evidence import layer_table
from esper_telemetry.updates.update import GradientSample, Update

LIMITS = {"does not clip": 1e6, "clips": 1e-3}
"""Limits of the global norm."""

TORCH, OURS = "clip_grad_norm_", "norms per tensor, then clip"
NORMAL, DEBUG = "NORMAL pass", "DEBUG pass"


class Gradients:
    """The gradients of a network, which are restored before every pass."""

    def __init__(self, network: Network) -> None:
        self.model, _ = with_gradients(network)
        self.parameters = list(self.model.parameters())
        self._kept = [gradient.clone() for gradient in self.now()]

    def now(self) -> list[Tensor]:
        """Return the gradients."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def restore(self) -> None:
        """Restore the gradients in the order of a backward pass: the first layers' come last and are still in the cache."""
        torch._foreach_copy_(self.now()[::-1], self._kept[::-1])

    def left_by(self, clip: Callable[[float], object], limit: float) -> list[Tensor]:
        """Return the gradients after clipping."""
        self.restore()
        clip(limit)
        return [gradient.clone() for gradient in self.now()]

    def torch(self, limit: float) -> Tensor:
        """Clip as torch does; return only the global norm."""
        norm: Tensor = nn.utils.clip_grad_norm_(self.parameters, limit)
        return norm

    def ours(self, limit: float) -> Tensor:
        """Clip as the bundled trainer does; return the norm of every tensor."""
        gradients = self.now()
        norms = ops.gradient_norms(gradients)
        ops.clip_gradients(gradients, norms, limit)
        return norms

    def normal(self) -> object:
        """Measure NORMAL's values per minibatch: the norm of every tensor, and the non-finite entries if a norm is not finite."""
        return finite_norms(self.now())

    def debug(self) -> object:
        """Measure DEBUG's values per update: norm, extremes, mean, spread, shares of zeros and decades of every tensor."""
        gradients = self.now()
        names = tuple(str(index) for index in range(len(gradients)))
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        return layer_table(Update(sample=GradientSample(names, tuple(map(Tensor.numel, gradients)), (flat,))))

    def check_equal(self, limit: float) -> None:
        """Raise AssertionError if the two clipped gradients differ in a bit."""
        ours, theirs = self.left_by(self.ours, limit), self.left_by(self.torch, limit)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), f"gradients differ at limit {limit}"


def passes(gradients: Gradients) -> dict[str, Callable[[], object]]:
    """Return all passes by name; the first one of each comparison is torch's."""
    found: dict[str, Callable[[], object]] = {}
    for what, limit in LIMITS.items():
        found[f"{TORCH}, {what}"] = partial(gradients.torch, limit)
        found[f"{OURS}, {what}"] = partial(gradients.ours, limit)
    return found | {NORMAL: gradients.normal, DEBUG: gradients.debug}
