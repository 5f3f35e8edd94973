"""Compute the metrics of memory from the inputs of a reference case."""

import torch
from torch import Tensor, nn

from esper_telemetry.metrics.lstm.gates import gate_stats, lstm_gates, lstm_weights, timescales
from esper_telemetry.metrics.lstm.states import cell_growth, reset_stats, state_ages, state_size, state_staleness, state_stats
from vector_adapters.inputs import Inputs, Values, floats


def cell_of(inputs: Inputs) -> nn.LSTM:
    weights = {f"{name}_l0": floats(inputs[name]) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    cell = nn.LSTM(weights["weight_ih_l0"].shape[1], weights["weight_hh_l0"].shape[1]).double()
    cell.load_state_dict(weights)
    return cell


@torch.no_grad()
def unrolled(cell: nn.LSTM, inputs: Tensor, state: tuple[Tensor, Tensor], resets: Tensor) -> tuple[Tensor, Tensor]:
    """Return h and c of the stock LSTM after each step, [T, B, H] each; its state is cleared before the steps that reset."""
    h, c = (part.unsqueeze(0) for part in state)
    after = []
    for x, reset in zip(inputs, resets, strict=True):
        goes_on = (~reset.bool()).to(x.dtype).unsqueeze(-1)
        _, (h, c) = cell(x.unsqueeze(0), (h * goes_on, c * goes_on))
        after.append((h[0], c[0]))
    hidden, memory = zip(*after, strict=True)
    return torch.stack(hidden), torch.stack(memory)


def gates(inputs: Inputs) -> Values:
    """L1 to L4."""
    cell, x, resets = cell_of(inputs), floats(inputs["x"]), torch.tensor(inputs["reset"]).bool()
    state = floats(inputs["h0"]), floats(inputs["c0"])
    outputs, _ = unrolled(cell, x, state, resets)
    result = lstm_gates(lstm_weights(cell), x, outputs, state, resets)
    groups = gate_stats(result, resets, bptt_length=inputs.get("bptt_length"))
    states = torch.stack([result.h, result.c], 1).unsqueeze(1)
    values: Values = {**state_stats(state_size(states)).values(), **groups.gates.values(), **groups.cell.values()}
    return {**values, **{f"aux:{name}": part.tolist() for name, part in result._asdict().items()}}


def chrono(inputs: Inputs) -> Values:
    """L3, with constant pre-activations."""
    forget = floats(inputs["forget_preact"]).sigmoid()
    return {"aux:timescale": timescales(forget.view(1, 1, -1)).values.tolist()}


def staleness(inputs: Inputs) -> Values:
    """L6."""
    return state_staleness(floats(inputs["h_stored"]), floats(inputs["h_recomputed"])).values()


def resets(inputs: Inputs) -> Values:
    """L7."""
    flags = torch.tensor(inputs["reset"]).bool()
    return reset_stats(flags, state_ages(flags, torch.tensor(inputs["age_start"]))).values()


def growth(inputs: Inputs) -> Values:
    """L8."""
    return cell_growth(floats(inputs["mean_abs_c"]), floats(inputs["age"])).values()


STATES = [f"lstm/{part}/{name}" for part in "hc" for name in ("rms", "env_rms/max", "absmax", "mean")]
GATES = [f"lstm/gate/{gate}/{name}" for gate in "ifo" for name in ("mean", "sat_lo", "sat_hi")]
CELL = ["lstm/cand/sat", "lstm/cell_log_gain", *(f"lstm/timescale/{n}" for n in ("median", "p90", "frac_beyond_bptt"))]

ADAPTERS = {
    **dict.fromkeys([*STATES, *GATES, *CELL], gates),
    "lstm/staleness": staleness,
    **dict.fromkeys(["lstm/reset_rate", "lstm/chunk_no_reset_frac", "lstm/age/mean", "lstm/age/max"], resets),
    "lstm/c_growth": growth,
}
FORMULA_ADAPTERS = {"L3": chrono}
