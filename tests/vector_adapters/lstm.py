"""Compute the metrics of memory from the inputs of a reference case."""

import torch
from torch import Tensor, nn

from esper_telemetry.metrics.lstm.gates import gate_stats, gates_between, lstm_weights, timescales
from esper_telemetry.metrics.lstm.states import cell_growth, reset_stats, state_ages, state_size, state_staleness, state_stats
from vector_adapters.inputs import Inputs, Values, floats, of_formula, of_keys


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


@of_keys(
    "lstm/",
    "h/rms h/env_rms/max h/absmax h/mean c/rms c/env_rms/max c/absmax c/mean gate/i/mean gate/i/sat_lo gate/i/sat_hi",
    "gate/f/mean gate/f/sat_lo gate/f/sat_hi gate/o/mean gate/o/sat_lo gate/o/sat_hi cand/sat cell_log_gain timescale/median",
    "timescale/p90 timescale/frac_beyond_bptt",
)
def gates(inputs: Inputs) -> Values:
    cell, x, resets = cell_of(inputs), floats(inputs["x"]), torch.tensor(inputs["reset"]).bool()
    state = floats(inputs["h0"]), floats(inputs["c0"])
    goes_on = (~resets).double().unsqueeze(-1)
    after = unrolled(cell, x, state, resets)
    hidden, memory = (torch.cat([first[None], part[:-1]]) * goes_on for first, part in zip(state, after, strict=True))
    result = gates_between(lstm_weights(cell), x, hidden, memory)
    groups = gate_stats(result, resets, bptt_length=inputs.get("bptt_length"))
    parts = {**result.by_name, "g": result.candidate, "h": result.h, "c": torch.as_tensor(result.c)}
    states = torch.stack([parts["h"], parts["c"]], 1).unsqueeze(1)
    values: Values = {**state_stats(state_size(states)).values(), **groups.gates.values(), **groups.cell.values()}
    return {**values, **{f"aux:{name}": part.tolist() for name, part in parts.items()}}


@of_formula("L3")
def chrono(inputs: Inputs) -> Values:
    """L3, with constant pre-activations."""
    forget = floats(inputs["forget_preact"]).sigmoid()
    return {"aux:timescale": timescales(forget.view(1, 1, -1)).values.tolist()}


@of_keys("lstm/staleness")
def staleness(inputs: Inputs) -> Values:
    return state_staleness(floats(inputs["h_stored"]), floats(inputs["h_recomputed"])).values()


@of_keys("lstm/", "reset_rate chunk_no_reset_frac age/mean age/max")
def resets(inputs: Inputs) -> Values:
    flags = torch.tensor(inputs["reset"]).bool()
    return reset_stats(flags, state_ages(flags, torch.tensor(inputs["age_start"]))).values()


@of_keys("lstm/c_growth")
def growth(inputs: Inputs) -> Values:
    return cell_growth(floats(inputs["mean_abs_c"]), floats(inputs["age"])).values()
