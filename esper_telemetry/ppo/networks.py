"""Networks of a policy: perceptrons, encoders of observations with images, and memory.

Multi-layer perceptrons are fast on a CPU: one autograd node per network, and NumPy for acting on a few rows. Such a small network is
bound by calls. On an AMD EPYC core `torch.tanh` takes ten times as long as `numpy.tanh`, and the matrix product for the first layer's
weight gradient four times as long as NumPy's (torch uses MKL, NumPy OpenBLAS).

Memory is stacked single-layer LSTM or GRU cells between layers without memory. Training runs over whole padded sequences, with one fused
call per cell. Acting on a few rows uses NumPy, which takes a third of the time. A state is one array [layers, parts, B, H]; the parts are
hidden and cell state of an LSTM, or the hidden state of a GRU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.ppo.environments.environment_protocol import Array, Image, ObservationLayout
from esper_telemetry.ppo.rollout import PARTS, Grid

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
        recorded = torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()  # `Layers` supports neither
        if rows.is_cpu and rows.dtype == torch.float32 and not recorded:
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
        activate = ARRAY_ACTIVATIONS[self.activation]

        def features(rows: Array) -> Array:
            rows = rows.reshape(len(rows), -1)
            for weight, bias in layers:
                rows = rows @ weight
                rows += bias
                activate(rows, out=rows)
            return rows

        return features


def relu(values: Array, out: Array) -> None:
    """Write max(values, 0) to `out`."""
    np.maximum(values, 0, out=out)


ARRAY_ACTIVATIONS: Mapping[str, Any] = {"tanh": np.tanh, "relu": relu}


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
            ARRAY_ACTIVATIONS[activation](sums, out=sums)
            outputs.append(sums)
        ctx.activation, ctx.outputs, ctx.weights = activation, outputs, weights
        return torch.from_numpy(outputs[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the rows, if needed, and of each layer's weight and bias."""
        outputs, weights, upstream = ctx.outputs, ctx.weights, gradients[0].numpy()
        needs_rows_gradient, rows = ctx.needs_input_grad[0], len(upstream)
        if rows <= TILE_ROWS:
            down, parameter_gradients = layer_gradients(outputs, weights, upstream, ctx.activation, through=needs_rows_gradient)
            return (down, None, *parameter_gradients)
        cuts = [slice(at, at + TILE_ROWS) for at in range(0, rows, TILE_ROWS)]
        parts = (
            layer_gradients([x[cut] for x in outputs], weights, upstream[cut], ctx.activation, through=needs_rows_gradient) for cut in cuts
        )
        downs, tiles = zip(*parts, strict=True)
        sums = [reduce(Tensor.add_, tensors) for tensors in zip(*tiles, strict=True)]
        return (torch.cat(downs) if needs_rows_gradient else None, None, *sums)


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
        parameter_gradients = [torch.from_numpy(inner.T @ outputs[level]), torch.from_numpy(inner).sum(0), *parameter_gradients]
        if level or through:
            upstream = inner @ weights[level]
    return torch.from_numpy(upstream) if through else None, parameter_gradients


def derivative(upstream: Array, outputs: Array, activation: str) -> Array:
    """Gradient before the activation, from the gradient after it and the activation's outputs."""
    if activation == "relu":
        return upstream * (outputs > 0)
    slope: Array = outputs * outputs
    np.subtract(1, slope, out=slope)
    return np.multiply(slope, upstream, out=slope)


def as_matrices(layer: nn.Module) -> tuple[Array, Array]:
    """Views of a linear layer's weight [inputs, outputs] and bias [outputs]."""
    assert isinstance(layer, nn.Linear)
    return layer.weight.detach().numpy().T, layer.bias.detach().numpy()


def orthogonal(layer: Layer, gain: float) -> Layer:
    """The layer with orthogonal weights of that gain and zero bias."""
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


class Architecture(NamedTuple):
    """Convolutions, and the width of the linear layer after them; for images whose shorter side is at least `smallest`.

    A convolution is the number of its filters, their width, and the stride.
    """

    smallest: int
    convolutions: Sequence[tuple[int, int, int]]
    features: int


ARCHITECTURES = (
    Architecture(36, ((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512),  # Mnih et al. 2015
    Architecture(16, ((32, 4, 2), (64, 3, 2), (64, 3, 1)), 256),
    Architecture(8, ((16, 3, 1), (32, 3, 2)), 128),  # as for MinAtar's 10x10
)


MAX_PIXEL_RANGE = 2.0**16
"""Wider ranges are not bounds of pixels; such images are not scaled."""


class ImageEncoder(nn.Module):
    """Convolutions and a linear layer, each with a ReLU; orthogonal weights with gain √2, zero biases.

    Args:
        image: the input image; its range is mapped to 0 to 1 on the device.

    Attributes:
        features: width of the output.

    Raises:
        ValueError: a side is shorter than 8.
    """

    def __init__(self, image: Image) -> None:
        super().__init__()
        channels, *sides = image.channels_first
        design = architecture(image)
        self.image, self.features = image, design.features
        self.convolutions = nn.ModuleList()
        for filters, width, stride in design.convolutions:
            self.convolutions.append(orthogonal(nn.Conv2d(channels, filters, width, stride), gain=2**0.5))
            channels, sides = filters, [(side - width) // stride + 1 for side in sides]
        self.linear = orthogonal(nn.Linear(channels * math.prod(sides), design.features), gain=2**0.5)

    def forward(self, images: Tensor) -> Tensor:
        """Features [N, features] of images [N, *shape] as they are stored."""
        rows = self.scaled(images.permute(0, 3, 1, 2) if self.image.channels_last else images)
        for convolution in self.convolutions:
            rows = torch.relu(convolution(rows))
        return torch.relu(self.linear(rows.flatten(1)))

    def scaled(self, images: Tensor) -> Tensor:
        """The images as floats, their range mapped to 0 to 1."""
        low, high = self.image.low, self.image.high
        rows = images.float()
        if (low, high) == (0.0, 1.0) or not 0.0 < high - low <= MAX_PIXEL_RANGE:
            return rows
        return (rows - low) * (1.0 / (high - low))


def architecture(image: Image) -> Architecture:
    """Return the architecture for images of that size; raise ValueError if they are too small."""
    side = min(image.channels_first[1:])
    for parts in ARCHITECTURES:
        if side >= parts.smallest:
            return parts
    raise ValueError(f"images must be at least {ARCHITECTURES[-1].smallest} pixels on each side, got {image.shape}")


NUMBERS_WIDTH = 64
"""Width of the layer for the numbers next to an image."""


class ObservationEncoder(nn.Module):
    """Convolutions for each image and a layer for the numbers, with concatenated outputs.

    Args:
        layout: positions of the parts of an observation, with at least one image.
        activation: activation of the numbers' layer.

    Attributes:
        features: width of the output.
    """

    def __init__(self, layout: ObservationLayout, activation: str) -> None:
        super().__init__()
        self.layout = layout
        self.numbers = MLP(layout.numbers, (NUMBERS_WIDTH,), activation) if layout.numbers else None
        images = [ImageEncoder(image) for image in layout.images]
        self.images = nn.ModuleList(images)
        self.features = sum(image.features for image in images) + (NUMBERS_WIDTH if layout.numbers else 0)

    def forward(self, rows: Tensor) -> Tensor:
        """Features [N, features] of observations [N, *shape] as they are stored."""
        parts = [encode(image) for encode, image in zip(self.images, self.layout.images_of(rows), strict=True)]
        if self.numbers is not None:
            parts.append(self.numbers(self.layout.numbers_of(rows).contiguous()))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


class Encoded(nn.Module):
    """An encoder followed by hidden layers, which replaces plain hidden layers.

    Args:
        layout, activation: see `ObservationEncoder`.
        sizes: widths of the hidden layers; an empty sequence gives only the encoder.
    """

    def __init__(self, layout: ObservationLayout, sizes: Sequence[int], activation: str) -> None:
        super().__init__()
        self.encoder = ObservationEncoder(layout, activation)
        self.hidden = MLP(self.encoder.features, sizes, activation)
        self.inputs, self.features = math.prod(layout.shape), self.hidden.features

    def forward(self, observations: Tensor) -> Tensor:
        """Features [N, F] of observations [N, ...]."""
        features: Tensor = self.hidden(self.encoder(observations))
        return features


Advance = Callable[[Array, Array], Array]

CLOSED = -1e4  # closes a gate when added to its input: σ(-1e4) is 0 in float32


class Core(nn.Module):
    """Stacked recurrent cells; orthogonal weights, zero biases.

    Args:
        kind: `lstm` or `gru`.
        inputs: width of the inputs.
        size: width of the state and of the outputs, H.
        layers: number of stacked cells.
    """

    def __init__(self, kind: str, inputs: int, size: int, layers: int) -> None:
        super().__init__()
        self.kind, self.size = kind, size
        make = nn.LSTM if kind == "lstm" else nn.GRU
        self.cells = nn.ModuleList(make(inputs if layer == 0 else size, size) for layer in range(layers))
        for name, parameter in self.cells.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)

    def forward(self, inputs: Tensor, state: Tensor, marks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return outputs [L, B, H] of inputs [L, B, F], and the state [layers, parts, B, H] after the last of them.

        At marks of 1 in `marks` [L, B, 1], an LSTM forgets everything: the next step begins with a state of zeros. A memory stays in
        float32 even under autocast, because rounding at every step would make it forget.
        """
        if torch.is_autocast_enabled(inputs.device.type):
            with torch.autocast(inputs.device.type, enabled=False):
                outputs: tuple[Tensor, Tensor] = self(inputs.float(), state, marks)
                return outputs
        after = []
        for cell, before in zip(self.cells, state, strict=True):
            if self.kind == "lstm":
                inputs, moved = run_lstm(cast("nn.LSTM", cell), inputs, before, marks)
            else:
                inputs, moved = cell(inputs, before.contiguous())
            after.append(moved)
        return inputs, torch.stack(after)

    def state_shape(self, rows: int) -> tuple[int, int, int, int]:
        """Shape of the state for that many rows."""
        return len(self.cells), PARTS[self.kind], rows, self.size

    def as_numpy(self) -> Advance:
        """Return a function of inputs [B, F] and state, which it overwrites, that returns outputs [B, H]; it reads the weights once."""
        make = lstm_step if self.kind == "lstm" else gru_step
        steps = [make(*matrices(cast("nn.RNNBase", cell))) for cell in self.cells]

        def advance(inputs: Array, state: Array) -> Array:
            for step, part in zip(steps, state, strict=True):
                inputs = step(inputs, part)
            return inputs

        return advance


class RecurrentTrunk(nn.Module):
    """An encoder of single observations, a core that remembers them, and a decoder of the core's outputs."""

    def __init__(self, encoder: MLP | Encoded, core: Core, decoder: MLP) -> None:
        super().__init__()
        self.encoder, self.core, self.decoder = encoder, core, decoder
        self.inputs, self.features = encoder.inputs, decoder.features

    def forward(self, observations: Tensor, grid: Grid, state: Tensor) -> Tensor:
        """Features [N, F] of observations [N, ...] at their positions in the grid; its runs begin in `state`."""
        outputs, _ = self.core(grid.pad(self.encoder(observations)), state, grid.marks())
        features: Tensor = self.decoder(grid.gather(outputs))
        return features

    def step(self, observations: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Features [B, F] of the next observations [B, ...], and the state after them."""
        outputs, after = self.core(self.encoder(observations).unsqueeze(0), state)
        return self.decoder(outputs[0]), after


def run_lstm(cell: nn.LSTM, inputs: Tensor, state: Tensor, marks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return outputs [L, B, H] and the state [2, B, H] after the last step.

    A mark is another input that closes the gates i, f and o: then c = f c + i g and h = o tanh c are exactly 0, and
    gradients do not pass. So whole columns of episodes go through torch's one fused call for a sequence.
    """
    if marks is None:
        outputs, (hidden, memory) = cell(inputs, (state[:1].contiguous(), state[1:].contiguous()))
        return outputs, torch.cat([hidden, memory])
    closing = inputs.new_full((4, cell.hidden_size), CLOSED)
    closing[2] = 0.0
    weight = torch.cat([cell.get_parameter("weight_ih_l0"), closing.view(-1, 1)], 1)
    names = ("weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    outputs, hidden, memory = torch.lstm(
        torch.cat([inputs, marks], -1),
        (state[:1].contiguous(), state[1:].contiguous()),
        [weight, *(cell.get_parameter(name) for name in names)],
        has_biases=True,
        num_layers=1,
        dropout=0.0,
        train=True,
        bidirectional=False,
        batch_first=False,
    )
    return outputs, torch.cat([hidden, memory])


def matrices(cell: nn.RNNBase) -> tuple[Array, Array, Array, Array]:
    """Weights [F, G], [H, G] and biases [G] of a single-layer cell, as torch packs its gates."""
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    inputs, hidden, *biases = (cell.get_parameter(name).detach().cpu().numpy() for name in names)
    return inputs.T, hidden.T, biases[0], biases[1]


def lstm_step(inputs: Array, hidden: Array, bias: Array, hidden_bias: Array) -> Advance:
    """Return one step of an LSTM. With σ(x) = ½ tanh(½x) + ½, all four gates [i, f, g, o] take one call."""
    size = len(hidden)
    scale = np.repeat(np.array([0.5, 0.5, 1.0, 0.5], np.float32), size)
    offset = np.repeat(np.array([0.5, 0.5, 0.0, 0.5], np.float32), size)
    weight = np.ascontiguousarray(np.concatenate([inputs, hidden]) * scale)
    bias = (bias + hidden_bias) * scale

    def step(rows: Array, state: Array) -> Array:
        output: Array
        output, memory = state
        gates = np.concatenate((rows, output), 1) @ weight
        gates += bias
        np.tanh(gates, out=gates)
        gates *= scale
        gates += offset
        memory *= gates[:, size : 2 * size]
        memory += gates[:, :size] * gates[:, 2 * size : 3 * size]
        np.tanh(memory, out=output)
        output *= gates[:, 3 * size :]
        return output

    return step


def gru_step(inputs: Array, hidden: Array, bias: Array, hidden_bias: Array) -> Advance:
    """One step of a GRU, gates [r, z, n]."""
    size = len(hidden)

    def step(rows: Array, state: Array) -> Array:
        output: Array
        (output,) = state
        left, right = rows @ inputs + bias, output @ hidden + hidden_bias
        gates = 0.5 * np.tanh(0.5 * (left[:, : 2 * size] + right[:, : 2 * size])) + 0.5
        new = np.tanh(left[:, 2 * size :] + gates[:, :size] * right[:, 2 * size :])
        output -= new
        output *= gates[:, size:]
        output += new
        return output

    return step
