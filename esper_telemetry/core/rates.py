"""Learning rates of several optimizers or parameter groups, each under the name of the part of the network that it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from esper_telemetry.core.lazy import Tensor

if TYPE_CHECKING:
    from torch.optim import Optimizer

OWNERS: Final = ("actor", "critic")
"""Groups of a run that give parameter groups of optimizers their names."""


class GroupRate(NamedTuple):
    """A parameter group of an optimizer: its rate, its entry `name` (empty without one) and the `id` of each parameter."""

    rate: float | Tensor
    name: str
    parameters: frozenset[int]


def group_rates(optimizer: Optimizer) -> list[GroupRate]:
    """Return the present rates of an optimizer's parameter groups; groups without a rate are left out."""
    return [
        GroupRate(
            group["lr"].detach().clone() if isinstance(group["lr"], Tensor) else float(group["lr"]),
            str(group.get("name") or ""),
            frozenset(map(id, group["params"])),
        )
        for group in optimizer.param_groups
        if "lr" in group
    ]


def rates_by_name(
    rates: Sequence[GroupRate], parameters: Mapping[str, Tensor], groups: Callable[[], Mapping[str, Sequence[str]]]
) -> dict[str, float | Tensor]:
    """Return the rates by name; nothing if all are equal.

    A name is the group's own, else `actor`, `critic` or `shared` if it trains only that part, else `group_` and its position among all
    groups.

    Args:
        rates: rates of all optimizers, in order.
        parameters: parameters by name.
        groups: returns the run's parameter or module names by part; called if rates differ.
    """
    on_host = [one.rate for one in rates if not isinstance(one.rate, Tensor)]  # comparing tensors would synchronise
    if len(rates) < 2 or len(on_host) == len(rates) == on_host.count(on_host[0]):
        return {}
    parts = groups()
    named: dict[str, float | Tensor] = {}
    for place, one in enumerate(rates):
        members = [name for name, parameter in parameters.items() if id(parameter) in one.parameters]
        name = first = one.name or part_of(members, parts) or f"group_{place}"
        count = 1
        while name in named:  # an actor with and without weight decay
            count += 1
            name = f"{first}_{count}"
        named[name] = one.rate
    return named


def rate_fields(
    optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor], groups: Callable[[], Mapping[str, Sequence[str]]]
) -> dict[str, Any]:
    """Return `learning_rate` and `beta2` of the first optimizer, and `learning_rates`, as in `UpdateEnd`; see `rates_by_name`."""
    group = optimizers[0].param_groups[0]
    rates = [rate for optimizer in optimizers for rate in group_rates(optimizer)]
    return {
        "learning_rate": float(group["lr"]),
        "beta2": float(group["betas"][1]) if group.get("betas") else None,
        "learning_rates": rates_by_name(rates, parameters, groups),
    }


def part_of(names: Iterable[str], groups: Mapping[str, Sequence[str]]) -> str:
    """Return the part that these parameters make up, alone or with shared ones; empty if they serve actor and critic, or are unknown."""
    owners: set[str] = set()
    shared = False
    for name in names:
        own = [part for part in OWNERS if belongs(name, groups.get(part, ()))]
        shared = shared or len(own) > 1 or belongs(name, groups.get("shared", ()))
        owners.update(own if len(own) == 1 else ())
    if len(owners) == 1:
        return owners.pop()
    return "shared" if shared and not owners else ""


def belongs(name: str, members: Sequence[str]) -> bool:
    """Return whether `members` names the parameter or one of its modules."""
    return any(name == member or name.startswith(f"{member}.") for member in members)
