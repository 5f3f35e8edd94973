"""Gates of an LSTM or a GRU, recomputed exactly from the inputs and states of a stock `nn.LSTM` or `nn.GRU`.

torch packs the weights of the gates in the order [i, f, g, o], for a GRU [r, z, n]. Inputs and states of all steps are known, so all gates
of a sequence are one matrix product.

A GRU keeps the share z of its state, h = z h + (1 - z) n, so z has the role of an LSTM's forget gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, no_grad, torch
from esper_telemetry.core.metric import Metric, label, reports
from esper_telemetry.core.reduction import Counts, Mean
from esper_telemetry.metrics.statistics import SHARES, Quantiles, Sample, as_quantiles, ascending, histogram, keep, levels_for, quantiles

if TYPE_CHECKING:
    from torch import nn


LOW, HIGH, CANDIDATE_HIGH = 0.1, 0.9, 0.99
"""Gates below `LOW` or above `HIGH`, and candidates above `CANDIDATE_HIGH` in magnitude, are saturated (Karpathy 2015)."""
LONGEST = 2.0**24
"""The longest measurable timescale, because the largest float32 below 1 is 1 - 2^-24."""


@dataclass(frozen=True, slots=True)
class GateStats(MetricGroup, absent="no valid step, or a policy without an LSTM or a GRU", cost="sampled"):
    """Activation of the gates: i, f and o of an LSTM, r and z of a GRU."""

    gate: tuple[str, ...] = label()
    mean: Mean = reports(
        Metric.fraction("lstm/gate/{gate}/mean", 711, "mean of a gate", unit="activation").asks(
            "How far is this gate open on average: i writes, f keeps, o reads; z of a GRU keeps, r reads the old state?"
        )
    )
    sat_lo: Mean = reports(
        Metric.fraction("lstm/gate/{gate}/sat_lo", 712, "share of time that a gate is shut")
        .asks("How often is this gate closed, below 0.1? A closed f forgets everything, a closed i or o closes the memory.")
        .bounds(
            healthy="f, i, o: < 0.5",
            warn="f: > 0.7; i, o: > 0.9",
            critical="f: > 0.9; i, o: > 0.95",
            source="Karpathy 2015, 1506.02078; i and o of healthy runs below 0.03",
        )
        .changed("after 0.2.0: healthy and critical bounds of i and o; gates of a GRU")
    )
    sat_hi: Mean = reports(
        Metric.fraction("lstm/gate/{gate}/sat_hi", 713, "share of time that a gate is wide open")
        .asks("How often is this gate wide open, above 0.9? An f that is always open never forgets.")
        .bounds(healthy="f: < 0.8", warn="f: > 0.9", source="Karpathy 2015, 1506.02078; healthy runs 0 to 0.53")
    )
    activations: Counts = reports(
        Metric.fraction("lstm/gate/{gate}/hist", 715, "histogram of a gate", unit="activation").asks(
            "How are this gate's activations distributed, from closed to open?"
        )
    )


@dataclass(frozen=True, slots=True)
class CellStats(MetricGroup, absent="no valid step, or a policy without an LSTM or a GRU", cost="sampled"):
    """Saturation of the candidate and timescales of the cell."""

    saturated: Mean = reports(
        Metric.fraction("lstm/cand/sat", 714, "saturation of the candidate")
        .asks("How often is the candidate saturated, |g| above 0.99? Then gradients do not reach the inputs.")
        .bounds(source="not bounded: healthy runs reach 0.25")
    )
    timescales: Quantiles = reports(
        Metric.steps("lstm/timescale/median", 721, "median of timescales", low=1.0, of="p50")
        .asks("For how many steps does the median unit remember, 1 / (1 - mean f), z instead of f for a GRU?")
        .bounds(healthy="at least half the horizon that the task needs", critical="< 1.2", source="Tallec & Ollivier 2018, 1804.11188"),
        Metric.steps("lstm/timescale/p90", 722, "90 % quantile of timescales", low=1.0, of="p90")
        .asks("For how many steps do the 10 % of units with the longest memory remember?")
        .bounds(source="Tallec & Ollivier 2018, 1804.11188"),
    )
    beyond: Mean | None = reports(
        Metric.fraction("lstm/timescale/frac_beyond_bptt", 723, "share of units that remember beyond the sequence")
        .asks("What share of the units remembers longer than the sequences through which gradients flow?")
        .bounds(warn="> 0.5: such memory cannot be trained", source="heuristic")
        .absent("no valid step, or a policy without an LSTM or a GRU, or the length of the sequences is unknown")
        .advises("Train on longer sequences (num_steps), or accept that part of the memory is not trained.")
    )
    log_gain: Mean = reports(
        Metric.quantity("lstm/cell_log_gain", 724, "gradient that survives along the cell", unit="nats (ln)")
        .asks("How much of the gradient survives along the cell state through a whole sequence?")
        .bounds(
            healthy="> -0.25 per step",
            critical="< -1.8 per step: it vanishes in a few steps",
            source="steps times the mean of ln f between resets, Pascanu 2013, 1211.5063; bounds are per step because "
            "a bound for the whole would depend on its length: half-open gates, as before training, lose 22 nats in 32 steps "
            "and 89 in 128. Healthy: -8 in the 32 steps of measured runs; critical: a timescale of 1.2 steps, ln(1 - "
            "1/1.2)",
        )
        .absent("memory is reset at every step")
        .advises("Open the forget gate (bias 1), train on shorter sequences, or give the policy what it has to remember.")
    )


class LSTMWeights(NamedTuple):
    """Weights of a single-layer LSTM, gates in torch's order [i, f, g, o].

    Attributes:
        inputs: [4H, I].
        hidden: [4H, H].
        bias: [4H], of both.
    """

    inputs: Tensor
    hidden: Tensor
    bias: Tensor


class Gates(NamedTuple):
    """Activations of one layer, each [T, B, H].

    Attributes:
        by_name: its gates: i, f and o of an LSTM, r and z of a GRU.
        candidate: the candidate state before gating, g or n.
        h, c: the states after each step; a GRU has no c.
    """

    by_name: Mapping[str, Tensor]
    candidate: Tensor
    h: Tensor
    c: Tensor | None = None

    @property
    def keep_gate(self) -> Tensor:
        """The gate that decides how much of the state is kept."""
        return self.by_name["f" if "f" in self.by_name else "z"]


class GRUWeights(NamedTuple):
    """Weights of a single-layer GRU, gates in torch's order [r, z, n].

    Attributes:
        inputs: [3H, I].
        hidden: [3H, H].
        input_bias, hidden_bias: [3H].
    """

    inputs: Tensor
    hidden: Tensor
    input_bias: Tensor
    hidden_bias: Tensor


Weights: TypeAlias = LSTMWeights | GRUWeights


@no_grad
def lstm_weights(cell: nn.LSTM) -> LSTMWeights:
    """Return copies of a cell's present weights.

    Raises:
        ValueError: for several layers, whose inner outputs torch hides, both directions, or projected states.
    """
    _check_layer(cell)
    hidden = cell.get_parameter("weight_hh_l0").clone()
    bias = hidden.new_zeros(len(hidden))
    if cell.bias:
        bias = cell.get_parameter("bias_ih_l0") + cell.get_parameter("bias_hh_l0")
    return LSTMWeights(cell.get_parameter("weight_ih_l0").clone(), hidden, bias)


@no_grad
def gru_weights(cell: nn.GRU) -> GRUWeights:
    """Return copies of a cell's present weights; raise ValueError for several layers and both directions."""
    _check_layer(cell)
    hidden = cell.get_parameter("weight_hh_l0").clone()
    biases = [hidden.new_zeros(len(hidden)) for _ in range(2)]
    if cell.bias:
        biases = [cell.get_parameter(name).clone() for name in ("bias_ih_l0", "bias_hh_l0")]
    return GRUWeights(cell.get_parameter("weight_ih_l0").clone(), hidden, *biases)


def cell_weights(cell: nn.LSTM | nn.GRU) -> Weights:
    """Return copies of the present weights of an LSTM or a GRU; raise ValueError as `lstm_weights`."""
    return lstm_weights(cell) if isinstance(cell, torch.nn.LSTM) else gru_weights(cell)


def _check_layer(cell: nn.LSTM | nn.GRU) -> None:
    if cell.num_layers != 1 or cell.bidirectional or cell.proj_size:
        raise ValueError(f"gates are known only for one layer, one direction and no projection, got {cell}")


def gates_of(weights: Weights, inputs: Tensor, hidden: Tensor, memory: Tensor | None) -> Gates:
    """Return the gates of an LSTM or a GRU whose state before every step is known; `memory` is the c of an LSTM."""
    if isinstance(weights, GRUWeights):
        return gru_gates(weights, inputs, hidden)
    assert memory is not None
    return gates_between(weights, inputs, hidden, memory)


@inference_mode
def gru_gates(weights: GRUWeights, inputs: Tensor, hidden: Tensor) -> Gates:
    """Return the gates of a GRU.

    Args:
        weights: from `gru_weights`.
        inputs: [T, B, I] inputs of the cell.
        hidden: [T, B, H] its state before each step, zero if memory was reset.
    """
    linear = torch.nn.functional.linear
    ours, before = (linear(inputs, weights.inputs, weights.input_bias), linear(hidden, weights.hidden, weights.hidden_bias))
    (r, z, n), (r_before, z_before, n_before) = ours.chunk(3, -1), before.chunk(3, -1)
    r, z = (r + r_before).sigmoid(), (z + z_before).sigmoid()
    n = (n + r * n_before).tanh()
    return Gates({"r": r, "z": z}, n, torch.lerp(n, hidden, z))


@inference_mode
def gates_between(weights: LSTMWeights, inputs: Tensor, hidden: Tensor, memory: Tensor) -> Gates:
    """Return the gates of an LSTM whose state before every step is known, so that a pass over time is not needed.

    Args:
        weights: from `lstm_weights`.
        inputs: [T, B, I] inputs of the cell.
        hidden, memory: [T, B, H] its states h and c before each step, zero if memory was reset.
    """
    matrix = torch.cat([weights.inputs, weights.hidden], 1)
    i, f, g, o = torch.nn.functional.linear(torch.cat([inputs, hidden], -1), matrix, weights.bias).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * memory + i * g
    return Gates({"i": i, "f": f, "o": o}, g, o * c.tanh(), c)


def side_by_side(layers: Sequence[Gates]) -> Gates:
    """Return the gates of several layers as if they were one."""
    by_name = {name: torch.cat([layer.by_name[name] for layer in layers], -1) for name in layers[0].by_name}
    return Gates(by_name, torch.cat([layer.candidate for layer in layers], -1), torch.cat([layer.h for layer in layers], -1))


class GateGroups(NamedTuple):
    """The groups of one layer's gates."""

    gates: GateStats
    cell: CellStats


@inference_mode
def gate_stats(gates: Gates, resets: Tensor, *, bptt_length: int | None = None, valid: Tensor | None = None) -> GateGroups:
    """Return saturation of the gates, timescales and the gain along the cell state.

    Timescales are 1 / (1 - mean f) of each unit, with z instead of f for a GRU. They are summarised by quantiles over units, because one
    unit that never forgets would dominate a mean.

    Args:
        gates: T steps, from `gates_between` or `gru_gates`.
        resets: [T, B] bool: memory is reset at this step.
        bptt_length: steps through which gradients flow; None if it is unknown.
        valid: [T, B] bool; None if every step is valid.
    """
    counts = torch.ones_like(resets, dtype=torch.bool) if valid is None else valid.bool()
    return GateGroups(_openness(gates, counts), _cell_stats(gates, resets.bool(), bptt_length, counts))


def _openness(gates: Gates, valid: Tensor) -> GateStats:
    x = torch.stack(list(gates.by_name.values())).flatten(1)
    s = keep(x.double(), _per_unit(valid, gates.keep_gate).flatten())
    return GateStats(
        gate=tuple(gates.by_name),
        mean=s.mean(s.values),
        sat_lo=s.share(s.values < LOW),
        sat_hi=s.share(s.values > HIGH),
        activations=histogram(s, SHARES),
    )


def _cell_stats(gates: Gates, resets: Tensor, bptt_length: int | None, valid: Tensor) -> CellStats:
    written = keep(gates.candidate.flatten().double(), _per_unit(valid, gates.candidate).flatten())
    units = timescales(gates.keep_gate, valid=valid)
    at_levels = quantiles(ascending(units), units.count, levels_for(gates.keep_gate))
    # For a closed gate, use the logarithm of the smallest number of its type.
    log_keep = gates.keep_gate.clamp(min=torch.finfo(gates.keep_gate.dtype).tiny).double().log()
    lasting = keep(log_keep.flatten(), _per_unit(valid & ~resets, gates.keep_gate).flatten())
    gain = lasting.mean(lasting.values)
    return CellStats(
        saturated=written.share(written.values.abs() > CANDIDATE_HIGH),
        timescales=as_quantiles(at_levels, units.count),
        beyond=None if bptt_length is None else units.share(units.values > bptt_length),
        log_gain=Mean(len(resets) * gain.total, gain.count),
    )


def _per_unit(flags: Tensor, like: Tensor) -> Tensor:
    return flags.unsqueeze(-1).expand_as(like)


@inference_mode
def timescales(forget: Tensor, *, valid: Tensor | None = None) -> Sample:
    """Return the steps for which each of the H units remembers, T = 1 / (1 - mean f), as a sample of units.

    A constant pre-activation b gives T = 1 + e^b (Tallec & Ollivier 2018).

    Args:
        forget: [T, B, H] activation of the forget gate.
        valid: [T, B] bool; None if every step is valid.
    """
    by_unit = forget.flatten(0, 1).t()
    s = keep(by_unit.double(), None if valid is None else valid.bool().flatten())
    mean = s.values.sum(-1) / s.count
    return keep(1 / (1 - mean).clamp(min=1 / LONGEST), None)
