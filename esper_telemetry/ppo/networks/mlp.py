"""Multi-layer perceptrons that are fast on a CPU: one autograd node per network, and NumPy for acting on a few rows.

Such a small network is bound by calls. On an AMD EPYC core `torch.tanh` takes ten times as long as `numpy.tanh`, and the
matrix product for the first layer's weight gradient four times as long as NumPy's (torch uses MKL, NumPy OpenBLAS).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.ppo.environments.environment_protocol import Array

Network = Callable[[Array], Array]
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)

TILE_ROWS = 2048
"""Rows that are backpropagated at once, so that intermediate results stay in the cache: with minibatches of 32,768 rows this makes the
trainer 1.4 times as fast."""


class MLP(nn.Module):
    """Hidden layers with an activation after each; orthogonal weights with gain √2.

    Args:
        inputs: length of a flattened observation.
        sizes: widths of the layers; an empty sequence gives the identity.
        activation: `tanh` or `relu`.
    """

    def __init__(self, inputs: int, sizes: Sequence[int], activation: str) -> None:
        super().__init__()
        widths = [inputs, *sizes]
        self.activation = activation
        self.inputs = inputs
        self.features = widths[-1]
        self.layers = nn.ModuleList(orthogonal(nn.Linear(a, b), gain=2**0.5) for a, b in itertools.pairwise(widths))

    def forward(self, observations: Tensor) -> Tensor:
        """Features [N, F] of observations [N, ...]."""
        rows = observations.flatten(1)
        if not self.layers:
            return rows
        if rows.is_cpu and rows.dtype == torch.float32 and not needs_plain_operations():
            linears = cast("Iterable[nn.Linear]", self.layers)  # `parameters()` would search the module tree for them
            parameters = [tensor for linear in linears for tensor in (linear.weight, linear.bias)]
            features: Tensor = Layers.apply(rows, self.activation, *parameters)  # type: ignore[no-untyped-call] # torch has no types here
            return features
        return self.plain(rows)

    def plain(self, rows: Tensor) -> Tensor:
        """Features [N, F] by ordinary operations, for other devices and precisions."""
        activate = torch.tanh if self.activation == "tanh" else torch.relu
        for layer in self.layers:
            rows = activate(layer(rows))
        return rows

    def responses(self, observations: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the outputs of each layer for observations [N, ...], before and after its activation."""
        activate = torch.tanh if self.activation == "tanh" else torch.relu
        rows = observations.flatten(1)
        for layer in self.layers:
            before = layer(rows)
            rows = activate(before)
            yield before, rows

    def as_numpy(self) -> Network:
        """Return the network as a NumPy function of [N, ...]. It reads the weights in place and follows them until they are moved."""
        layers = [as_matrices(layer) for layer in self.layers]
        activate: Any = np.tanh if self.activation == "tanh" else relu

        def features(rows: Array) -> Array:
            rows = rows.reshape(len(rows), -1)
            for weight, bias in layers:
                rows = rows @ weight
                rows += bias
                activate(rows, out=rows)
            return rows

        return features


def needs_plain_operations() -> bool:
    """Return True if a compiler records operations or autocast changes their precision; `Layers` supports neither."""
    return torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()


class Layers(torch.autograd.Function):
    """Linear layers, each followed by an activation, as one node with a backward pass written out."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, activation: str, *parameters: Tensor) -> Tensor:
        """Features [N, F]; parameters are weight and bias of each layer in turn."""
        outputs = [rows.detach().numpy()]
        weights = [weight.detach().numpy() for weight in parameters[::2]]
        for weight, bias in zip(weights, parameters[1::2], strict=True):
            sums = outputs[-1] @ weight.T
            sums += bias.detach().numpy()
            outputs.append(activate_(sums, activation))
        ctx.activation, ctx.outputs, ctx.weights = activation, outputs, weights
        return torch.from_numpy(outputs[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the rows, if needed, and of each layer's weight and bias."""
        outputs, weights, upstream = ctx.outputs, ctx.weights, gradients[0].numpy()
        needs_rows_gradient, rows = ctx.needs_input_grad[0], len(upstream)
        if rows <= TILE_ROWS:
            down, parameter_gradients = layer_gradients(
                outputs, weights, upstream, ctx.activation, through=needs_rows_gradient
            )
            return (down, None, *parameter_gradients)
        cuts = [slice(at, at + TILE_ROWS) for at in range(0, rows, TILE_ROWS)]
        parts = (
            layer_gradients(
                [x[cut] for x in outputs], weights, upstream[cut], ctx.activation, through=needs_rows_gradient
            )
            for cut in cuts
        )
        downs, tiles = zip(*parts, strict=True)
        return (
            torch.cat(downs) if needs_rows_gradient else None,
            None,
            *(sum_of(tensors) for tensors in zip(*tiles, strict=True)),
        )


def layer_gradients(
    outputs: Sequence[Array], weights: Sequence[Array], upstream: Array, activation: str, *, through: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Return the gradients of the rows, if needed, and of each layer's weight and bias in turn.

    Args:
        outputs: the rows [N, inputs] and the output of each layer, [N, width].
        weights: weights of each layer.
        upstream: gradient at the last of the outputs.
        activation: `tanh` or `relu`.
        through: whether the gradient of the rows is needed.
    """
    parameter_gradients: list[Tensor] = []
    for level in reversed(range(len(weights))):
        inner = derivative(upstream, outputs[level + 1], activation)
        parameter_gradients = [
            torch.from_numpy(inner.T @ outputs[level]),
            torch.from_numpy(inner).sum(0),
            *parameter_gradients,
        ]
        if level or through:
            upstream = inner @ weights[level]
    return torch.from_numpy(upstream) if through else None, parameter_gradients


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Add the other tensors to the first and return it."""
    first, *others = tensors
    for tensor in others:
        first.add_(tensor)
    return first


def activate_(values: Array, activation: str) -> Array:
    """The values, activated in place."""
    activate: Any = np.tanh if activation == "tanh" else relu
    activate(values, out=values)
    return values


def derivative(upstream: Array, outputs: Array, activation: str) -> Array:
    """Gradient before the activation, from the gradient after it and the activation's outputs."""
    slope: Array = outputs > 0 if activation == "relu" else outputs * outputs
    if activation == "tanh":
        np.subtract(1, slope, out=slope)
        np.multiply(slope, upstream, out=slope)
        return slope
    return upstream * slope


def as_matrices(layer: nn.Module) -> tuple[Array, Array]:
    """Views of a linear layer's weight [inputs, outputs] and bias [outputs]."""
    assert isinstance(layer, nn.Linear)
    return layer.weight.detach().numpy().T, layer.bias.detach().numpy()


def relu(values: Array, out: Array) -> None:
    """Write max(values, 0) to `out`."""
    np.maximum(values, 0, out=out)


def orthogonal(layer: Layer, gain: float) -> Layer:
    """The layer with orthogonal weights of that gain and zero bias."""
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
