"""The optimizer's steps and state."""

import math

import pytest
import torch
from torch import nn

from esper_telemetry.metrics import optimizer as adam
from esper_telemetry.metrics.optimizer import (
    adam_parameters,
    adam_pieces,
    adam_state,
    adam_step,
    adam_steps,
    learning_rate,
    state_reset,
    weight_growth,
    weight_norm,
)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("rate", [3e-4, torch.tensor(3e-4)])
def test_learning_rate_is_the_first_groups(rate: float) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)

    assert learning_rate(optimizer).values() == {"opt/lr": pytest.approx(3e-4)}


@pytest.mark.parametrize("fused", [False, True])
def test_step_size_is_what_adam_really_changed(fused: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused)
    for _ in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        stepped(model, optimizer)

    moved = float(weight_norm([p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]))
    result = adam_step(optimizer).values()
    assert result["opt/update_to_weight"] == pytest.approx(moved / float(weight_norm(before)), rel=1e-3)
    assert result["opt/update_rms_over_lr"] == pytest.approx(moved / math.sqrt(8) / 1e-2, rel=1e-3)
    assert result["opt/stable_rms"] > 0


def test_layers_are_named() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    stepped(model, optimizer)

    result = adam_steps(optimizer, ["weight", "bias"])[1].values()

    statistics = ("update_to_weight", "weight_norm")
    assert set(result) == {f"opt/{what}/{name}" for what in statistics for name in ("weight", "bias")}
    assert result["opt/weight_norm/weight"] == pytest.approx(float(model.weight.detach().norm()), rel=1e-6)


def test_other_optimizers_and_unused_ones_have_no_adam_keys() -> None:
    parameter = nn.Parameter(torch.zeros(1))

    assert adam_step(torch.optim.SGD([parameter], lr=0.1)).values() == {}
    assert adam_step(torch.optim.Adam([parameter])).values() == {}
    assert adam_steps(torch.optim.Adam([parameter]), ["w"])[1].values() == {}


def test_signal_share_of_constant_gradients_is_one() -> None:
    weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight])
    for _ in range(5):
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    assert adam_step(optimizer).values()["opt/snr_share"] == pytest.approx(1.0)


def test_signal_share_of_pure_noise_is_zero_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(20_000, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight])
    for _ in range(60):
        weight.grad = torch.randn(weight.shape, dtype=torch.float64, generator=generator)
        optimizer.step()

    assert adam_step(optimizer).values()["opt/snr_share"] == pytest.approx(0.0, abs=5e-3)


def test_growth_is_the_logarithm_of_the_norms_ratio() -> None:
    assert weight_growth([torch.tensor([6.0, 8.0])], torch.tensor(5.0)).values() == {"opt/weight_growth": pytest.approx(math.log(2))}
    assert weight_growth([torch.zeros(2)], torch.tensor(5.0)).values() == {}


def test_optimizer_made_anew_in_mid_training_is_noticed() -> None:
    """Two of three parameters have fewer steps than before: their moments are lost."""
    before = torch.tensor([32.0, 32.0, 32.0])

    assert state_reset(torch.tensor([33.0, 33.0, 33.0]), before).values() == {"opt/state_reset": 0.0}
    assert state_reset(torch.tensor([1.0, 33.0, 1.0]), before).values() == {"opt/state_reset": 2.0}


def test_the_first_look_at_an_optimizer_has_nothing_to_compare_with() -> None:
    assert state_reset(torch.ones(2), None).values() == {}
    assert state_reset(torch.ones(2), torch.ones(3)).values() == {}


@pytest.mark.parametrize("fused", [False, True])
def test_copies_of_the_state_say_what_the_optimizer_says(fused: bool) -> None:
    """A copy stays the same during later steps of the optimizer. The moment before the step is the step's starting point."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused)
    stepped(model, optimizer)
    average = optimizer.state[model.weight]["exp_avg"].clone()
    stepped(model, optimizer)

    copy, now = adam_state(adam_parameters(optimizer)), adam_step(optimizer).values()
    stepped(model, optimizer)

    assert adam_step(copy).values() == now
    assert adam_step(optimizer).values() != now
    torch.testing.assert_close(copy.moment_before()[:6] / 0.9, average.double().flatten())


@pytest.mark.parametrize("most", [1, 5, 8, 1000])
def test_pieces_say_what_the_whole_says(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of one piece may have their own settings, step counts and types, and one has no gradient."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1), nn.Linear(1, 1).double())
    rates = [{"params": layer.parameters(), "lr": 10.0**-place} for place, layer in enumerate(model, start=2)]
    optimizer = torch.optim.Adam(rates, betas=(0.8, 0.99), eps=1e-5)
    for skipped in (*model[1].parameters(), None, None):
        for parameter in model.parameters():
            parameter.grad = None if parameter is skipped else torch.full_like(parameter, 0.3)
        optimizer.step()
    model[0].bias.grad = None
    names = [name for name, _ in model.named_parameters()]

    whole = {key: value for group in adam_steps(optimizer, names) for key, value in group.values().items()}
    monkeypatch.setattr(adam, "MAX_PIECE_NUMBERS", most)
    pieces, copied = adam_steps(optimizer, names), adam_steps(adam_state(adam_parameters(optimizer)), names)

    assert len(list(adam_pieces(optimizer))) == {1: 6, 5: 3, 8: 2, 1000: 1}[most]
    for groups in (pieces, copied):
        assert {**groups[0].values(), **groups[1].values()} == pytest.approx(whole, rel=1e-6)


def test_a_step_in_short_numbers_is_reckoned_in_longer_ones() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([weight], lr=1e-2)
    weight.grad = torch.ones_like(weight)
    optimizer.step()

    state, result = adam_state(adam_parameters(optimizer)), adam_step(optimizer).values()

    assert {state.weights.dtype, state.exp_avg.dtype, state.exp_avg_sq.dtype} == {torch.float32}
    assert result["opt/update_rms_over_lr"] == pytest.approx(1.0, rel=1e-2)
    assert result["opt/stable_rms"] == pytest.approx(1.0, rel=1e-2)
