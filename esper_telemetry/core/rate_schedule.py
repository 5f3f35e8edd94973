"""Learning rates: those of several optimizers or parameter groups, by the part of the network that each trains, and their schedule.

The schedule is a fact of the run: a straight line over the environment steps, or a table of rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper_telemetry.core.lazy import Tensor

Array = NDArray[np.float64]

SCHEDULE_FACT: Final = "learning_rate_schedule"
"""Fact of a run: the schedule of the learning rate as the fields of `RateSchedule`, absent if it is not known."""

MIN_TOLERANCE: Final = 1e-4
"""Tolerance for rounding, as a share of the largest rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSchedule:
    """A learning rate that changes from one number to another, in a straight line unless `curve` says otherwise.

    Attributes:
        initial, final: rates at the beginning and at the end; equal for a constant rate.
        total_steps: environment steps of the run.
        begin: environment steps before its first update, if a run was resumed.
        final_is_set: False if the settings say that the rate is annealed, but not to which number.
        counts: numbers that a program may count instead of updates, by name: `num_epochs`, `num_minibatches`, `num_envs`.
        curve: rates at equal distances from the beginning to the end of the run, the first `initial` and the last `final`; empty for a
            straight line.
        defect: name of the hypothesis that describes the curve: `negative`, `ending_early` or `restarting`; empty for a correct one. The
            reference is then its correct part, from the beginning to `sound_share`, stretched over the whole run.
        sound_share: share of the run after which the curve falls below 0, ends, or restarts.
    """

    initial: float
    final: float
    total_steps: int
    begin: int = 0
    final_is_set: bool = True
    counts: Mapping[str, int] = field(default_factory=dict)
    curve: Sequence[float] = ()
    defect: str = ""
    sound_share: float = 1.0

    @classmethod
    def tabulated(cls, rate: Callable[[float], float], *, points: int = 257, **settings: Any) -> RateSchedule:
        """Return the schedule of a function of the finished share of the run, 0 to 1; `settings` are other attributes."""
        curve = [float(rate(place / (points - 1))) for place in range(points)]
        defect, sound = _defect_of(np.array(curve))
        if defect:
            settings |= {"defect": defect, "sound_share": sound, "curve": tuple(curve)}
            return cls(initial=max(curve[: 2 + int(sound * points)]), final=0.0, **settings)
        straight = np.allclose(curve, np.linspace(curve[0], curve[-1], points), rtol=0, atol=1e-6 * max(map(abs, curve)))
        if straight and curve[0] < MAX_RISING_START * curve[-1]:
            curve.reverse()  # finished and remaining share were confused: the rate rises instead of falling
        return cls(initial=curve[0], final=curve[-1], curve=() if straight else tuple(curve), **settings)

    def fact(self) -> dict[str, Any]:
        """Return the value of the fact."""
        return {name: getattr(self, name) for name in self.__slots__}


def _defect_of(curve: Array) -> tuple[str, float]:
    """Return the name of the defect of a configured curve, and the share of the run before it; "" and 1 without a defect.

    Steps down, rises from 0, curved restarts (1608.03983) and ends above 0 are published schedules.
    """
    scale, last = float(np.abs(curve).max()), len(curve) - 1
    below = np.flatnonzero(curve < -MIN_TOLERANCE * scale)
    if len(below):
        return "negative", max(0, int(below[0]) - 1) / last
    moving = np.flatnonzero(curve > MIN_TOLERANCE * scale)
    if len(moving) and moving[-1] + 1 <= (1 - MIN_IDLE_SHARE) * last:
        return "ending_early", (int(moving[-1]) + 1) / last
    inner = curve[1:-1]  # x % 1 is 0 at both ends
    jumps = np.flatnonzero(np.diff(inner) > MIN_RESTART * scale)
    period = int(jumps[0]) + 1 if len(jumps) else 0
    if period < MIN_RESTART_POINTS:
        return "", 1.0
    line = np.linspace(inner[0], inner[period - 1], period)
    again = line[np.arange(len(inner)) % period]
    straight = np.abs(inner[:period] - line).max() <= MIN_TOLERANCE * scale
    repeats = np.mean(np.abs(inner - again) > MAX_RESTART_ERROR * scale) <= MAX_RESTART_ERROR
    if straight and repeats and line[0] - line[-1] > MIN_RESTART * scale:
        return "restarting", period / last
    return "", 1.0


MAX_RISING_START: Final = 0.05
"""Maximum first rate, as a share of the last one, of a straight rise that is a reversed decay."""

MIN_IDLE_SHARE: Final = 0.1
"""Minimum share of a run with a rate of 0 at its end for a curve that ends too soon."""

MIN_RESTART: Final = 0.1
"""Minimum fall and jump of a straight curve that restarts, as a share of its largest rate."""

MIN_RESTART_POINTS: Final = 8
"""Minimum points of a table between two jumps to determine the form of a curve between them."""

MAX_RESTART_ERROR: Final = 0.05
"""Share of the largest rate by which restarting lines may differ, and share of the points that may differ by more."""


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
