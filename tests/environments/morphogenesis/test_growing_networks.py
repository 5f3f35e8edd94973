"""Batched networks do what plain ones do, one at a time, and optimizers do what torch's do."""

from __future__ import annotations

import pytest
import torch
from growing import plain_loss
from torch import Tensor

from esper_telemetry.environments.morphogenesis.blueprints import BLUEPRINTS, STYLES, newborn, presence
from esper_telemetry.environments.morphogenesis.contributions import contributions, shapley_values
from esper_telemetry.environments.morphogenesis.learning import gradients
from esper_telemetry.environments.morphogenesis.network import Mixing, Network
from esper_telemetry.environments.morphogenesis.optimizers import Moments, adam, clipped, sgd
from esper_telemetry.environments.morphogenesis.packing import Packing
from esper_telemetry.environments.morphogenesis.tasks import Data

ENVS, SLOTS = 8, 2


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("tokens", "linear"), [(1, False), (1, True), (4, False)])
def test_gradients_are_those_of_each_network_alone(tokens: int, linear: bool) -> None:
    """Every style, blueprint and weight, isolated or not, against a plain implementation, to 1e-5."""
    network = Network(inputs=5, width=6, classes=3, slots=SLOTS, tokens=tokens, linear=linear)
    g = generator()
    hosts, seeds = network.hosts(ENVS, g), torch.randn(ENVS, SLOTS, network.seed.size, generator=g) / 3
    style = torch.arange(ENVS * SLOTS).view(ENVS, SLOTS) % len(STYLES)
    kind = (torch.arange(ENVS * SLOTS).view(ENVS, SLOTS) // 3) % len(BLUEPRINTS)
    isolated = torch.rand(ENVS, SLOTS, generator=g) < 0.4
    alpha = torch.where(isolated, 0.0, torch.rand(ENVS, SLOTS, generator=g))
    present = presence(network.seed)[style, kind]
    data = Data(torch.randn(12, 5, generator=g), torch.randint(3, (12,), generator=g))

    found = gradients(network, (hosts, seeds), present, data, Mixing(alpha, isolated, style))

    for env in range(ENVS):
        host = {name: part.clone().requires_grad_() for name, part in network.host.unpack(hosts[env]).items()}
        rows = [(seeds[env, slot] * present[env, slot]).clone().requires_grad_() for slot in range(SLOTS)]
        plan = {
            "inputs": data.inputs,
            "targets": data.targets,
            "tokens": tokens,
            "relu": not linear,
            "styles": [STYLES[int(i)] for i in style[env]],
            "isolated": isolated[env].tolist(),
            "alphas": alpha[env].tolist(),
        }
        loss = plain_loss(host, [network.seed.unpack(row) for row in rows], plan)
        loss.backward()
        assert torch.allclose(found.loss[env], loss.detach(), atol=1e-5)
        expected = network.host.pack({name: part.grad for name, part in host.items() if part.grad is not None})
        assert torch.allclose(found.hosts[env], expected, atol=1e-5)
        for slot, row in enumerate(rows):
            assert row.grad is not None
            assert torch.allclose(found.seeds[env, slot], row.grad * present[env, slot], atol=1e-5)


def test_a_seed_that_trains_alone_neither_changes_its_host_nor_is_felt_by_it() -> None:
    network = Network(inputs=5, width=6, classes=3, slots=1)
    g = generator()
    hosts, seeds = network.hosts(2, g), torch.randn(2, 1, network.seed.size, generator=g)
    data = Data(torch.randn(12, 5, generator=g), torch.randint(3, (12,), generator=g))
    zero, style = torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int64)
    everywhere = torch.ones(2, 1, network.seed.size, dtype=torch.bool)

    alone = gradients(network, (hosts, seeds), everywhere, data, Mixing(zero, torch.ones(2, 1).bool(), style))
    without = gradients(network, (hosts, seeds), everywhere, data, Mixing(zero, torch.zeros(2, 1).bool(), style))

    assert torch.equal(alone.loss, without.loss) and torch.allclose(alone.hosts, without.hosts, atol=1e-7)
    assert (alone.seeds.norm(dim=-1) > 0).all() and (without.seeds == 0).all()


def test_seeds_are_the_identity_at_birth() -> None:
    network = Network(inputs=5, width=6, classes=3, slots=SLOTS, tokens=4)
    g = generator()
    hosts, seeds = network.hosts(2, g), newborn(network.seed, (2, SLOTS), g)
    x, style = torch.randn(8, 5, generator=g), torch.zeros(2, SLOTS, dtype=torch.int64)

    def logits(alpha: float) -> Tensor:
        weights = torch.full((2, SLOTS), alpha)
        return network.forward(hosts, seeds, x, Mixing(weights, weights < 0, style)).logits

    assert torch.equal(logits(1.0), logits(0.0))


def test_all_subsets_of_seeds_are_switched_off_in_one_pass() -> None:
    network = Network(inputs=5, width=6, classes=3, slots=3)
    g = generator()
    hosts, seeds = network.hosts(2, g), torch.randn(2, 3, network.seed.size, generator=g)
    x, style = torch.randn(4, 5, generator=g), torch.zeros(2, 3, dtype=torch.int64)
    alpha = torch.rand(2, 3, generator=g)

    found = network.forward(hosts, seeds, x, Mixing(alpha, alpha < 0, style), subsets=True).logits.unflatten(1, (8, 4))

    for subset in range(8):
        off = torch.tensor([subset >> slot & 1 for slot in range(3)]).bool()
        one = network.forward(hosts, seeds, x, Mixing(alpha.masked_fill(off, 0.0), alpha < 0, style)).logits
        assert torch.allclose(found[:, subset], one, atol=1e-6)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_optimizers_are_torchs_row_by_row(name: str) -> None:
    """Row 1 rests in the second of three steps and goes on with what it remembered."""
    g = generator()
    rows, steps = torch.randn(2, 4, generator=g), torch.randn(3, 2, 4, generator=g)
    step, moments, found = (adam if name == "adam" else sgd), Moments.of(rows), rows
    for number, gradient in enumerate(steps):
        found, moments = step(found, gradient, moments, 0.1, torch.tensor([True, number != 1]))

    for row, numbers in ((0, (0, 1, 2)), (1, (0, 2))):
        parameter = torch.nn.Parameter(rows[row].clone())
        options = {"lr": 0.1} if name == "adam" else {"lr": 0.1, "momentum": 0.9}
        optimizer = (torch.optim.Adam if name == "adam" else torch.optim.SGD)([parameter], **options)  # type: ignore[arg-type]
        for number in numbers:
            parameter.grad = steps[number, row]
            optimizer.step()
        assert torch.allclose(found[row], parameter.detach(), atol=1e-5)
        assert moments.steps[row] == len(numbers)


def test_moments_of_a_dead_seed_are_gone_and_those_of_others_stay() -> None:
    rows = torch.ones(2, 3)
    moments = Moments(rows, rows * 2, torch.tensor([5.0, 7.0])).cleared(torch.tensor([True, False]))

    assert [part[0].sum().item() for part in moments] == [0, 0, 0]
    assert [part[1].sum().item() for part in moments] == [3, 6, 7]


def test_each_row_is_clipped_by_its_own_norm() -> None:
    """Norms 5 and 0.5; only the first exceeds 1."""
    found, norms = clipped(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)

    assert norms.tolist() == pytest.approx([5.0, 0.5])
    assert found.norm(dim=-1).tolist() == pytest.approx([1.0, 0.5], abs=1e-5)


def test_contributions_and_shapley_values_of_two_seeds() -> None:
    """Accuracies 0.9 with both, 0.7 without seed 0, 0.6 without seed 1, 0.5 without any.

    Alone off: 0.2 and 0.3. Shapley: seed 0 adds 0.1 first and 0.2 last, so 0.15; seed 1 adds 0.2 first and 0.3 last, so 0.25.
    """
    accuracy = torch.tensor([[0.9, 0.7, 0.6, 0.5]])

    assert contributions(accuracy)[0].tolist() == pytest.approx([0.2, 0.3])
    assert shapley_values(accuracy)[0].tolist() == pytest.approx([0.15, 0.25])


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_shapley_values_add_up(slots: int) -> None:
    accuracy = torch.rand(16, 2**slots, generator=generator(slots))

    assert torch.allclose(shapley_values(accuracy).sum(1), accuracy[:, 0] - accuracy[:, -1], atol=1e-6)


def test_what_is_packed_is_unpacked() -> None:
    packing = Packing({"a": (2, 3), "b": (4,)})
    rows = torch.arange(20.0).view(2, 10)

    assert {name: part.shape for name, part in packing.unpack(rows).items()} == {"a": (2, 2, 3), "b": (2, 4)}
    assert torch.equal(packing.pack(packing.unpack(rows)), rows)
