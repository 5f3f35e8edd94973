"""Memory for the policy: stacked single-layer LSTM or GRU cells between layers without memory.

Training runs over whole padded sequences, one fused call per cell. Acting on a few rows is done in NumPy, where a step
takes a third of the time. A state is one array [layers, parts, B, H]: parts are hidden and cell state of an LSTM, the
hidden state of a GRU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from esper_telemetry.ppo.mlp import MLP
from esper_telemetry.ppo.sequences import Grid

Array = npt.NDArray[Any]
Advance = Callable[[Array, Array], Array]

PARTS = {"lstm": 2, "gru": 1}


class Core(nn.Module):
    """Stacked recurrent cells; orthogonal weights, zero biases.

    Args:
        kind: `lstm` or `gru`.
        inputs: width of what goes in.
        size: width of the state and of what comes out, H.
        layers: how many cells are stacked.
    """

    def __init__(self, kind: str, inputs: int, size: int, layers: int) -> None:
        super().__init__()
        self.kind, self.size = kind, size
        make = nn.LSTM if kind == "lstm" else nn.GRU
        self.cells = nn.ModuleList(make(inputs if layer == 0 else size, size) for layer in range(layers))
        for name, parameter in self.cells.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)

    def forward(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [L, B, H] of inputs [L, B, F], and the state [layers, parts, B, H] after the last of them."""
        after = []
        for cell, before in zip(self.cells, state, strict=True):
            if self.kind == "lstm":
                inputs, (hidden, memory) = cell(inputs, (before[:1].contiguous(), before[1:].contiguous()))
                after.append(torch.cat([hidden, memory]))
            else:
                inputs, hidden = cell(inputs, before.contiguous())
                after.append(hidden)
        return inputs, torch.stack(after)

    def state_shape(self, rows: int) -> tuple[int, int, int, int]:
        """Shape of the state of so many rows."""
        return len(self.cells), PARTS[self.kind], rows, self.size

    def as_numpy(self) -> Advance:
        """A function of inputs [B, F] and state, which it overwrites, that returns outputs [B, H]; reads the weights once."""
        make = lstm_step if self.kind == "lstm" else gru_step
        steps = [make(*matrices(cast("nn.RNNBase", cell))) for cell in self.cells]

        def advance(inputs: Array, state: Array) -> Array:
            for step, part in zip(steps, state, strict=True):
                inputs = step(inputs, part)
            return inputs

        return advance


class RecurrentTrunk(nn.Module):
    """An encoder of single observations, a core that remembers them, and a decoder of what it gives."""

    def __init__(self, encoder: MLP, core: Core, decoder: MLP) -> None:
        super().__init__()
        self.encoder, self.core, self.decoder = encoder, core, decoder
        self.inputs, self.features = encoder.inputs, decoder.features

    def forward(self, observations: Tensor, grid: Grid, state: Tensor) -> Tensor:
        """Features [N, F] of observations [N, ...] that stand in the grid; its runs begin in `state`."""
        outputs, _ = self.core(grid.pad(self.encoder(observations)), state)
        features: Tensor = self.decoder(grid.gather(outputs))
        return features

    def step(self, observations: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Features [B, F] of the observations [B, ...] that come next, and the state after them."""
        outputs, after = self.core(self.encoder(observations).unsqueeze(0), state)
        return self.decoder(outputs[0]), after


def matrices(cell: nn.RNNBase) -> tuple[Array, Array, Array, Array]:
    """Weights [F, G], [H, G] and biases [G] of a single-layer cell, as torch packs its gates."""
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    inputs, hidden, *biases = (cell.get_parameter(name).detach().cpu().numpy() for name in names)
    return inputs.T, hidden.T, biases[0], biases[1]


def lstm_step(inputs: Array, hidden: Array, bias: Array, hidden_bias: Array) -> Advance:
    """One step of an LSTM. σ(x) = ½ tanh(½x) + ½ makes one call of all four gates [i, f, g, o]."""
    size = len(hidden)
    scale = np.repeat(np.array([0.5, 0.5, 1.0, 0.5], np.float32), size)
    offset = np.repeat(np.array([0.5, 0.5, 0.0, 0.5], np.float32), size)
    weight = np.ascontiguousarray(np.concatenate([inputs, hidden]) * scale)
    bias = (bias + hidden_bias) * scale

    def step(rows: Array, state: Array) -> Array:
        remembered: Array
        remembered, memory = state
        gates = np.concatenate((rows, remembered), 1) @ weight
        gates += bias
        np.tanh(gates, out=gates)
        gates *= scale
        gates += offset
        memory *= gates[:, size : 2 * size]
        memory += gates[:, :size] * gates[:, 2 * size : 3 * size]
        np.tanh(memory, out=remembered)
        remembered *= gates[:, 3 * size :]
        return remembered

    return step


def gru_step(inputs: Array, hidden: Array, bias: Array, hidden_bias: Array) -> Advance:
    """One step of a GRU, gates [r, z, n]."""
    size = len(hidden)

    def step(rows: Array, state: Array) -> Array:
        remembered: Array
        (remembered,) = state
        left, right = rows @ inputs + bias, remembered @ hidden + hidden_bias
        gates = 0.5 * np.tanh(0.5 * (left[:, : 2 * size] + right[:, : 2 * size])) + 0.5
        new = np.tanh(left[:, 2 * size :] + gates[:, :size] * right[:, 2 * size :])
        remembered -= new
        remembered *= gates[:, size:]
        remembered += new
        return remembered

    return step
