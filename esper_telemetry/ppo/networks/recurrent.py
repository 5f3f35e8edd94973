"""Memory for the policy: stacked single-layer LSTM or GRU cells between layers without memory.

Training runs over whole padded sequences, with one fused call per cell. Acting on a few rows uses NumPy, which
takes a third of the time. A state is one array [layers, parts, B, H]; the parts are hidden and cell state of an LSTM, or the
hidden state of a GRU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.ppo.environments.environment_protocol import Array
from esper_telemetry.ppo.networks.encoders import Encoded
from esper_telemetry.ppo.networks.mlp import MLP
from esper_telemetry.ppo.rollout import PARTS, Grid

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
