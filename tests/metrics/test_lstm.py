"""Memory: gates against the stock LSTM; statistics of states, resets and ages on numbers worked by hand."""

import math

import pytest
import torch
from torch import Tensor, nn

from esper_telemetry.metrics.lstm.gates import (
    Gates,
    gate_stats,
    gates_between,
    gru_gates,
    gru_weights,
    lstm_weights,
    timescales,
)
from esper_telemetry.metrics.lstm.states import (
    bptt_stats,
    bucket_width,
    cell_growth,
    first_staleness,
    memory_use,
    reset_stats,
    state_ages,
    state_size,
    state_stats,
)

STEPS, ENVS, INPUTS, UNITS = 12, 3, 5, 7


def stock(dtype: torch.dtype) -> tuple[nn.LSTM, Tensor, tuple[Tensor, Tensor], Tensor]:
    """Return a stock cell, inputs, a first state and resets."""
    generator = torch.Generator().manual_seed(0)
    cell = nn.LSTM(INPUTS, UNITS).to(dtype)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
    inputs = torch.randn(STEPS, ENVS, INPUTS, generator=generator, dtype=dtype)
    state = torch.randn(2, ENVS, UNITS, generator=generator, dtype=dtype)
    return cell, inputs, (state[0], state[1]), torch.rand(STEPS, ENVS, generator=generator) < 0.3


@torch.no_grad()
def unrolled(cell: nn.LSTM, inputs: Tensor, state: tuple[Tensor, Tensor], resets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states of the stock cell before and after each step, [T, 2, B, H] each."""
    now, before, after = torch.stack(state), [], []
    for x, reset in zip(inputs, resets, strict=True):
        now = now.masked_fill(reset.unsqueeze(-1), 0.0)
        before.append(now)
        _, (h, c) = cell(x.unsqueeze(0), (now[:1], now[1:]))
        now = torch.cat([h, c])
        after.append(now)
    return torch.stack(before), torch.stack(after)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_gates_give_the_states_of_the_stock_lstm(dtype: torch.dtype, tolerance: float) -> None:
    cell, inputs, state, resets = stock(dtype)
    before, after = unrolled(cell, inputs, state, resets)
    weights = lstm_weights(cell)

    result = gates_between(weights, inputs, before[:, 0], before[:, 1])

    torch.testing.assert_close(result.h, after[:, 0], rtol=0, atol=tolerance)
    torch.testing.assert_close(result.c, after[:, 1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@torch.no_grad()
def test_layers_one_by_one_give_what_a_stack_of_them_gives(layers: int, bias: bool, batch_first: bool) -> None:
    """A stock stack hides the states of its inner layers; a cell for each layer shows them."""
    torch.manual_seed(layers)
    stack = nn.LSTM(INPUTS, UNITS, layers, bias=bias, batch_first=batch_first).double()
    inputs = torch.randn(STEPS, ENVS, INPUTS, dtype=torch.float64)
    state = torch.randn(2, layers, ENVS, UNITS, dtype=torch.float64)
    expected, (_, last) = stack(inputs.transpose(0, 1) if batch_first else inputs, (state[0], state[1]))

    result, never = inputs, torch.zeros(STEPS, ENVS, dtype=torch.bool)
    for layer in range(layers):
        cell = nn.LSTM(result.shape[-1], UNITS, bias=bias).double()
        for name, parameter in cell.named_parameters():
            parameter.copy_(stack.get_parameter(name.replace("_l0", f"_l{layer}")))
        before, _ = unrolled(cell, result, (state[0, layer], state[1, layer]), never)
        gates = gates_between(lstm_weights(cell), result, before[:, 0], before[:, 1])
        assert gates.c is not None
        torch.testing.assert_close(gates.c[-1], last[layer], rtol=0, atol=1e-12)
        result = gates.h

    torch.testing.assert_close(result, expected.transpose(0, 1) if batch_first else expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_gates_give_the_states_of_the_stock_gru(bias: bool) -> None:
    """One step of the stock cell at a time, from states with resets. z interpolates between the candidate and the old state."""
    torch.manual_seed(0)
    cell = nn.GRU(INPUTS, UNITS, bias=bias).double()
    inputs, before = torch.randn(STEPS, ENVS, INPUTS).double(), torch.randn(STEPS, ENVS, UNITS).double()
    before[3] = 0.0
    after = torch.stack([cell(x[None], h[None])[0][0] for x, h in zip(inputs, before, strict=True)])

    gates = gru_gates(gru_weights(cell), inputs, before)

    torch.testing.assert_close(gates.h, after, rtol=0, atol=1e-12)
    torch.testing.assert_close((1 - gates.keep_gate) * gates.candidate + gates.keep_gate * before, after, rtol=0, atol=1e-12)


def test_the_update_gate_of_a_gru_decides_what_it_remembers() -> None:
    """z of 0.95 and 0.05 in two units: they remember 20 and 1.05 steps. One of two gates is wide open, the other closed. r is 0.5."""
    z = torch.tensor([0.95, 0.05], dtype=torch.float64).expand(4, 3, 2)
    half = torch.full_like(z, 0.5)

    groups = gate_stats(Gates({"r": half, "z": z}, half, half), torch.zeros(4, 3, dtype=torch.bool), bptt_length=4)

    assert groups.gates.values() == {
        **{f"lstm/gate/r/{name}": value for name, value in (("mean", 0.5), ("sat_lo", 0.0), ("sat_hi", 0.0))},
        **{f"lstm/gate/z/{name}": 0.5 for name in ("mean", "sat_lo", "sat_hi")},
    }
    values = groups.cell.values()
    assert values["lstm/timescale/median"] == pytest.approx((20 + 1 / 0.95) / 2)
    assert values["lstm/timescale/frac_beyond_bptt"] == 0.5
    assert values["lstm/cell_log_gain"] == pytest.approx(4 * (math.log(0.95) + math.log(0.05)) / 2)


def test_weights_are_copies() -> None:
    cell = nn.LSTM(INPUTS, UNITS, bias=False)
    weights = lstm_weights(cell)
    for parameter in cell.parameters():
        nn.init.zeros_(parameter)

    assert weights.inputs.abs().min() > 0 and weights.hidden.abs().min() > 0
    assert not weights.bias.any()


@pytest.mark.parametrize("settings", [{"num_layers": 2}, {"bidirectional": True}, {"proj_size": 2}])
def test_layers_whose_gates_torch_hides_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="one layer, one direction"):
        lstm_weights(nn.LSTM(INPUTS, UNITS, **settings))


def constant_gates(f: Tensor) -> Gates:
    half = torch.full_like(f, 0.5)
    return Gates({"i": half, "f": f, "o": half}, half, half, half)


def test_timescales_are_quantiles_over_units_of_their_mean_forget_gates() -> None:
    """Mean f of 0.5, 0.75 and 0.9: units remember 2, 4 and 10 steps, and one of the three more than 5."""
    f = torch.tensor([[[0.4, 0.75, 0.9]], [[0.6, 0.75, 0.9]]], dtype=torch.float64)

    values = gate_stats(constant_gates(f), torch.zeros(2, 1, dtype=torch.bool), bptt_length=5).cell.values()

    assert values["lstm/timescale/median"] == pytest.approx(4)
    assert values["lstm/timescale/p90"] == pytest.approx(4 + 0.8 * 6)
    assert values["lstm/timescale/frac_beyond_bptt"] == pytest.approx(1 / 3)
    assert values["lstm/cell_log_gain"] == pytest.approx(2 * f.log().mean().item())


def test_an_open_forget_gate_remembers_as_long_as_its_precision_tells() -> None:
    assert timescales(torch.ones(4, 2, 3)).values.tolist() == [2.0**24] * 3


def test_a_shut_forget_gate_has_a_finite_gain_and_shows_as_shut() -> None:
    groups = gate_stats(constant_gates(torch.zeros(4, 2, 3)), torch.zeros(4, 2, dtype=torch.bool))

    assert groups.gates.values()["lstm/gate/f/sat_lo"] == 1
    assert -400 < groups.cell.values()["lstm/cell_log_gain"] < -300
    assert "lstm/timescale/frac_beyond_bptt" not in groups.cell.values()


def test_gates_of_steps_that_are_not_valid_do_not_count() -> None:
    f = torch.full((2, 2, 3), 0.95)
    f[1, 1] = math.nan
    valid = torch.tensor([[True, True], [True, False]])

    groups = gate_stats(constant_gates(f), torch.zeros(2, 2, dtype=torch.bool), valid=valid)

    assert groups.gates.values()["lstm/gate/f/sat_hi"] == 1
    assert groups.cell.values()["lstm/timescale/median"] == pytest.approx(20, rel=1e-5)


def test_states_are_measured_over_layers_units_and_valid_steps() -> None:
    """Two steps, one layer, h and c, two environments, two units. The second environment's second state is not valid.

    h: 3, 4 and 0, 0 and 1, -1: squares add to 27 over 6 entries; environments: 25 / 4 and 2 / 2. c is 2 h.
    """
    h = torch.tensor([[[3.0, 4.0], [1.0, -1.0]], [[0.0, 0.0], [9.0, 9.0]]])
    states = torch.stack([h, 2 * h], 1).unsqueeze(1)
    valid = torch.tensor([[True, True], [True, False]])

    values = state_stats(state_size(states), valid=valid).values()

    assert values["lstm/h/rms"] == pytest.approx(math.sqrt(27 / 6))
    assert values["lstm/c/rms"] == pytest.approx(2 * math.sqrt(27 / 6))
    assert values["lstm/h/env_rms/max"] == pytest.approx(2.5)
    assert values["lstm/h/absmax"] == 4
    assert values["lstm/h/mean"] == pytest.approx(7 / 6)
    assert "lstm/h/rms_nonfinite" not in values


def test_the_state_of_a_gru_has_one_part() -> None:
    values = state_stats(state_size(torch.ones(4, 2, 1, 3, 5))).values()

    assert values["lstm/h/rms"] == pytest.approx(1)
    assert not [key for key in values if key.startswith("lstm/c/")]


def test_states_that_are_not_finite_are_counted_and_left_out() -> None:
    states = torch.ones(2, 1, 2, 3, 5)
    states[0, 0, 1, 0, 0] = math.nan
    states[1, 0, 1, 2, 4] = math.inf

    values = state_stats(state_size(states)).values()

    assert values["lstm/c/rms_nonfinite"] == 2
    assert values["lstm/c/rms"] == values["lstm/c/absmax"] == pytest.approx(1)


def test_empty_states_are_those_that_are_exactly_zero() -> None:
    states = torch.full((2, 1, 2, 2, 3), 1e-30)
    states[1, :, :, 0] = 0.0
    states[0, :, 0, 1] = 0.0

    assert state_size(states).empty.tolist() == [[False, False], [True, False]]


def test_ages_count_from_the_reset_and_go_on_from_the_rollout_before() -> None:
    resets = torch.tensor([[False, True], [False, False], [True, False]])

    assert state_ages(resets, torch.tensor([7, 7])).tolist() == [[7, 0], [8, 1], [0, 2]]


def test_resets_on_invalid_steps_do_not_count() -> None:
    """One of five valid steps resets. The second environment has no valid reset. Ages: 0, 1, 0 and 4, 5."""
    resets = torch.tensor([[True, False], [False, False], [False, True]])
    valid = torch.tensor([[True, True], [True, True], [True, False]])
    ages = torch.tensor([[0, 4], [1, 5], [0, 0]])

    values = reset_stats(resets, ages, valid=valid).values()

    assert values["lstm/reset_rate"] == pytest.approx(0.2)
    assert values["lstm/chunk_no_reset_frac"] == 0.5
    assert values["lstm/age/mean"] == 2
    assert values["lstm/age/max"] == 5


def test_a_cell_that_grows_by_one_a_step_grows_by_the_oldest_age_over_its_median() -> None:
    """|c| = 1 + age over ages 0 to 8: slope 1, median 5; buckets of two ages keep their mean age."""
    ages = torch.arange(9).repeat(3, 1)

    for width in (1, 2):
        values = cell_growth(1.0 + ages.double(), ages, width=width).values()
        oldest = 8
        median = 5 if width == 1 else 5.5
        assert values["lstm/c_growth"] == pytest.approx(oldest / median)


def test_a_cell_that_does_not_change_does_not_grow_and_one_age_says_nothing() -> None:
    assert cell_growth(torch.ones(5), torch.arange(5)).values() == {"lstm/c_growth": 0}
    assert cell_growth(torch.ones(5), torch.zeros(5)).values() == {}


def test_buckets_reach_four_rollouts_back() -> None:
    assert [bucket_width(steps) for steps in (1, 16, 17, 128, 2048)] == [1, 1, 2, 8, 128]


def test_gradients_through_time_compare_the_beginning_with_the_end() -> None:
    """Norms: 13 over both layers, 5 in the last one, 2.5 at the end: 5 / 2.5."""
    first = torch.tensor([[[0.0, 12.0]], [[3.0, 4.0]]])

    values = bptt_stats(first, torch.tensor([[1.5, 2.0]])).values()

    assert values == {"lstm/bptt/h0_grad_norm": 13.0, "lstm/bptt/profile_ratio": 2.0}


@pytest.mark.parametrize("last", [[0.0, 0.0], [math.nan, 1.0]])
def test_without_a_gradient_at_the_end_there_is_no_profile(last: list[float]) -> None:
    assert set(bptt_stats(torch.ones(1, 1, 2), torch.tensor([last])).values()) == {"lstm/bptt/h0_grad_norm"}


def test_memory_is_used_as_far_as_the_policy_differs_without_it() -> None:
    rows = {"op": torch.tensor([0.2, 0.4]), "arg": torch.tensor([1.0, 1.0])}

    values = memory_use(rows, relevant={"arg": torch.tensor([True, False])}).values()

    assert values == {"lstm/ablate_kl": pytest.approx((1.2 + 0.4) / 2)}


def test_staleness_before_the_first_step_has_a_key_of_its_own() -> None:
    stored = torch.tensor([[3.0, 4.0]])

    assert first_staleness(stored, stored * 1.5).values() == {"lstm/staleness_first": 0.5}
