"""Batched networks equal plain single networks, and the optimizers equal torch's optimizers."""

from collections.abc import Sequence

import pytest
import torch
from growing import plain_loss
from torch import Tensor

from esper_telemetry.lab.morphogenesis.feedback import contributions, shapley_values
from esper_telemetry.lab.morphogenesis.kinds import BLUEPRINTS, STYLES
from esper_telemetry.lab.morphogenesis.network import ANATOMY, INERT, Mixing, Network, Owners, Packing, anatomy, newborn, presence
from esper_telemetry.lab.morphogenesis.training import AdamMoments, Data, adam, clip, gradients, scores, sgd, validate

ENVS, SLOTS = 8, 2


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def together(network: Network, hosts: Tensor, seeds: Tensor) -> Tensor:
    """Return rows of hosts and seeds [N, 1 + S, size]."""
    rows = torch.zeros(len(hosts), 1 + network.slots, network.size)
    rows[:, 0, : network.host.size], rows[:, 1:, : network.seed.size] = hosts, seeds
    return rows


def who(style: Tensor, kind: Tensor, tokens: int) -> list[Owners]:
    """Return the networks with the style and blueprint of each slot, from [N, S]."""
    has = anatomy()[style, kind]
    names = [name for name in ANATOMY if tokens > 1 or name != "attends"]
    return [{name: has[:, slot, ANATOMY.index(name)].nonzero().squeeze(1) for name in names} for slot in range(style.shape[1])]


@pytest.mark.parametrize("inert", [False, True])
@pytest.mark.parametrize(("tokens", "linear"), [(1, False), (1, True), (4, False)])
def test_gradients_are_those_of_each_network_alone(tokens: int, linear: bool, inert: bool) -> None:
    """Every style, blueprint and weight, isolated or not, against a plain implementation, to 1e-5.

    Parts without an effect in some places may be computed everywhere.
    """
    network = Network(inputs=5, width=6, classes=3, slots=SLOTS, tokens=tokens, linear=linear)
    g = generator()
    style = torch.arange(ENVS * SLOTS).view(ENVS, SLOTS) % len(STYLES)
    kind = (torch.arange(ENVS * SLOTS).view(ENVS, SLOTS) // 3) % (len(BLUEPRINTS) - (tokens == 1))
    isolated = torch.rand(ENVS, SLOTS, generator=g) < 0.4
    alpha = torch.where(isolated, 0.0, torch.rand(ENVS, SLOTS, generator=g))
    present = presence(network.seed)[style, kind]
    hosts, seeds = network.hosts(ENVS, g), torch.randn(ENVS, SLOTS, network.seed.size, generator=g) / 3 * present
    data = Data(torch.randn(12, 5, generator=g), torch.randint(3, (12,), generator=g))
    rows = together(network, hosts, seeds)
    found = torch.zeros_like(rows)

    has = [{**one, **dict.fromkeys(INERT)} if inert else one for one in who(style, kind, tokens)]
    mixing = Mixing(alpha, isolated, has)
    logs, _ = gradients(network, network.views(rows), data, mixing, network.views(found))
    losses = scores(logs, data.targets)[0].mean(1)

    for env in range(ENVS):
        host = {name: part.clone().requires_grad_() for name, part in network.host.unpack(hosts[env]).items()}
        alone = [seeds[env, slot].clone().requires_grad_() for slot in range(SLOTS)]
        plan = {
            "inputs": data.inputs,
            "targets": data.targets,
            "tokens": tokens,
            "relu": not linear,
            "styles": [STYLES[int(i)] for i in style[env]],
            "isolated": isolated[env].tolist(),
            "alphas": alpha[env].tolist(),
        }
        loss = plain_loss(host, [network.seed.unpack(row) for row in alone], plan)
        loss.backward()
        assert torch.allclose(losses[env], loss.detach(), atol=1e-5)
        expected = network.host.pack({name: part.grad for name, part in host.items() if part.grad is not None})
        assert torch.allclose(found[env, 0, : network.host.size], expected, atol=1e-5)
        for slot, row in enumerate(alone):
            assert row.grad is not None
            assert torch.allclose(found[env, 1 + slot, : network.seed.size], row.grad * present[env, slot], atol=1e-5)


def test_an_isolated_seed_and_its_host_do_not_affect_each_other() -> None:
    network = Network(inputs=5, width=6, classes=3, slots=1)
    g = generator()
    rows = together(network, network.hosts(2, g), torch.randn(2, 1, network.seed.size, generator=g))
    data = Data(torch.randn(12, 5, generator=g), torch.randint(3, (12,), generator=g))
    zero, everyone = torch.zeros(2, 1), [dict.fromkeys(("units", "scales"))]

    def found(*, isolated: bool, weights: Sequence[Owners]) -> tuple[Tensor, Tensor]:
        slopes = torch.zeros_like(rows)
        mixing = Mixing(zero, torch.full((2, 1), isolated), weights)
        return gradients(network, network.views(rows), data, mixing, network.views(slopes))[0], slopes

    alone, slopes = found(isolated=True, weights=everyone)
    without, host_slopes = found(isolated=False, weights=[{}])

    assert torch.equal(alone, without) and torch.allclose(slopes[:, 0], host_slopes[:, 0], atol=1e-7)
    assert (slopes[:, 1].norm(dim=-1) > 0).all() and (host_slopes[:, 1] == 0).all()


def test_new_seeds_are_the_identity() -> None:
    network = Network(inputs=5, width=6, classes=3, slots=SLOTS, tokens=4)
    g = generator()
    rows = together(network, network.hosts(2, g), newborn(network.seed, (2, SLOTS), g))
    x, everyone = torch.randn(8, 5, generator=g), [dict.fromkeys(("scales", "units", "attends"))] * SLOTS

    def logits(alpha: float) -> Tensor:
        weights = torch.full((2, SLOTS), alpha)
        return network.forward(network.views(rows), x, Mixing(weights, weights < 0, everyone)).logits

    assert torch.equal(logits(1.0), logits(0.0))


def test_all_subsets_of_seeds_are_switched_off_in_one_pass() -> None:
    network = Network(inputs=5, width=6, classes=3, slots=3)
    g = generator()
    weights = network.views(together(network, network.hosts(2, g), torch.randn(2, 3, network.seed.size, generator=g)))
    x, everyone = torch.randn(4, 5, generator=g), [dict.fromkeys(("scales", "units"))] * 3
    alpha = torch.rand(2, 3, generator=g)

    found = network.forward(weights, x, Mixing(alpha, alpha < 0, everyone), subsets=True).logits.unflatten(2, (8, 4))

    for subset in range(8):
        off = torch.tensor([subset >> slot & 1 for slot in range(3)]).bool()
        one = network.forward(weights, x, Mixing(alpha.masked_fill(off, 0.0), alpha < 0, everyone)).logits
        assert torch.allclose(found[:, :, subset], one, atol=1e-5)


def test_switching_an_empty_slot_off_changes_nothing() -> None:
    """Three slots, the second one empty: subset 2 equals subset 0, and subset 6 equals subset 4."""
    network = Network(inputs=5, width=6, classes=3, slots=3)
    g = generator()
    rows = together(network, network.hosts(2, g), torch.randn(2, 3, network.seed.size, generator=g))
    data = Data(torch.randn(40, 5, generator=g), torch.randint(3, (40,), generator=g))
    alpha, one = torch.tensor([[1.0, 0.0, 0.5]] * 2), {"units": None}

    loss, accuracy = validate(network, rows, data, Mixing(alpha, alpha < 0, [one, {}, one]))
    full, _ = validate(network, rows, data, Mixing(alpha, alpha < 0, [one, one, one]))

    assert loss.shape == accuracy.shape == (2, 8) and torch.allclose(loss, full, atol=1e-5)
    assert torch.equal(loss[:, [2, 3, 6, 7]], loss[:, [0, 1, 4, 5]]) and not torch.equal(loss[:, 0], loss[:, 1])


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_optimizers_equal_torch_row_by_row(name: str) -> None:
    """Row 1 skips the second of three steps and continues with its moments."""
    g = generator()
    rows, steps = torch.randn(2, 4, generator=g), torch.randn(3, 2, 4, generator=g)
    step, moments, found = (adam if name == "adam" else sgd), AdamMoments.of(rows), rows.clone()
    for number, gradient in enumerate(steps):
        step(found, gradient, moments, 0.1, torch.tensor([True, number != 1]))

    for row, numbers in ((0, (0, 1, 2)), (1, (0, 2))):
        parameter = torch.nn.Parameter(rows[row].clone())
        options = {"lr": 0.1} if name == "adam" else {"lr": 0.1, "momentum": 0.9}
        optimizer = (torch.optim.Adam if name == "adam" else torch.optim.SGD)([parameter], **options)  # type: ignore[arg-type]
        for number in numbers:
            parameter.grad = steps[number, row]
            optimizer.step()
        assert torch.allclose(found[row], parameter.detach(), atol=1e-5)
        assert moments.steps[row] == len(numbers)


def test_moments_are_cleared_by_row() -> None:
    rows = torch.ones(2, 3)
    moments = AdamMoments(rows, rows * 2, torch.tensor([5.0, 7.0]))
    moments.clear(torch.tensor([True, False]))

    assert [part[0].sum().item() for part in moments] == [0, 0, 0]
    assert [part[1].sum().item() for part in moments] == [3, 6, 7]


def test_each_row_is_clipped_by_its_own_norm() -> None:
    """Norms 5 and 0.5: only the first exceeds 1."""
    found = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    norms = clip(found, 1.0)

    assert norms.tolist() == pytest.approx([5.0, 0.5])
    assert found.norm(dim=-1).tolist() == pytest.approx([1.0, 0.5], abs=1e-5)


def test_contributions_and_shapley_values_of_two_seeds() -> None:
    """Accuracies: 0.9 with both, 0.7 without seed 0, 0.6 without seed 1, 0.5 without any.

    Contributions: 0.2 and 0.3. Shapley: seed 0 adds 0.1 if first and 0.2 if last, so 0.15; seed 1 adds 0.2 and 0.3, so 0.25.
    """
    accuracy = torch.tensor([[0.9, 0.7, 0.6, 0.5]])

    assert contributions(accuracy)[0].tolist() == pytest.approx([0.2, 0.3])
    assert shapley_values(accuracy)[0].tolist() == pytest.approx([0.15, 0.25])


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_shapley_values_add_up(slots: int) -> None:
    accuracy = torch.rand(16, 2**slots, generator=generator(slots))

    assert torch.allclose(shapley_values(accuracy).sum(1), accuracy[:, 0] - accuracy[:, -1], atol=1e-6)


def test_norms_are_those_of_each_parameter() -> None:
    """Rows may be longer than the parameters. An infinite entry makes the norm of its row infinite."""
    packing = Packing({"a": (2,), "b": (2, 2), "c": ()})
    rows = torch.tensor([[3.0, 4, 1, 1, 1, 1, -6, 9], [torch.inf, 4, 1, 1, 1, 1, -6, 9]])

    norms = packing.norms(rows)

    assert norms[0].tolist() == [5, 2, 6]
    assert not norms[1].isfinite().any()
