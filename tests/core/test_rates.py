"""Names of the learning rates of several optimizers and parameter groups."""

from typing import Any

import pytest
import torch
from torch import nn

from esper_telemetry.core.rate_schedule import group_rates, rates_by_name

PARTS = {"actor": ["pi", "log_std"], "critic": ["vf"], "shared": ["trunk"]}


def network() -> nn.ParameterDict:
    return nn.ParameterDict({name: torch.zeros(2) for name in ("trunk", "pi", "log_std", "vf")})


def named(*optimizers: dict[str, float] | list[dict[str, Any]]) -> dict[str, float | torch.Tensor]:
    """Return the rates of optimizers, each given by its groups: a map from parameters to rates, or torch's own arguments."""
    model = network()
    rates = []
    for groups in optimizers:
        if isinstance(groups, dict):
            groups = [{"params": names.split(), "lr": rate} for names, rate in groups.items()]
        groups = [{**group, "params": [model[name] for name in group["params"]]} for group in groups]
        rates += group_rates(torch.optim.SGD(groups, lr=0.5))
    return rates_by_name(rates, dict(model.named_parameters()), lambda: PARTS)


@pytest.mark.parametrize(
    ("optimizers", "rates"),
    [
        # a single rate is `opt/lr`, for any number of groups and optimizers
        ([{"trunk pi log_std vf": 0.1}], {}),
        ([{"trunk": 0.1, "pi log_std": 0.1}, {"vf": 0.1}], {}),
        # two optimizers, one with two groups; a shared parameter belongs to the optimizer that trains it
        ([{"pi log_std": 0.1}, {"vf": 0.2}], {"actor": 0.1, "critic": 0.2}),
        ([{"trunk pi log_std": 0.1, "vf": 0.2}], {"actor": 0.1, "critic": 0.2}),
        ([{"trunk": 0.1, "pi": 0.2, "vf": 0.3}], {"shared": 0.1, "actor": 0.2, "critic": 0.3}),
        # two groups of one part
        ([{"pi": 0.1, "log_std": 0.2}], {"actor": 0.1, "actor_2": 0.2}),
        # a group with both parts is named by its position among all groups
        ([{"log_std": 0.2, "trunk pi vf": 0.1}], {"actor": 0.2, "group_1": 0.1}),
        # the group's own name has priority
        ([[{"params": ["pi"], "name": "head"}, {"params": ["vf"], "lr": 0.1}]], {"head": 0.5, "critic": 0.1}),
    ],
)
def test_rates_have_the_names_of_the_parts_that_they_train(optimizers: list[Any], rates: dict[str, float]) -> None:
    assert named(*optimizers) == rates


def test_rates_on_a_device_are_not_compared() -> None:
    """`capturable` optimizers keep their rate in a tensor; comparing two would wait for the GPU."""
    model = network()
    optimizer = torch.optim.SGD([{"params": [model["pi"]]}, {"params": [model["vf"]]}], lr=torch.tensor(0.5))

    rates = rates_by_name(group_rates(optimizer), dict(model.named_parameters()), lambda: PARTS)
    for group in optimizer.param_groups:
        group["lr"].zero_()

    assert {name: float(rate) for name, rate in rates.items()} == {"actor": 0.5, "critic": 0.5}
