"""The optimizers of a script: their parameters by name, learning rates, clip calls, and backward passes for each step."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from esper_telemetry.adapters.script import settings
from esper_telemetry.adapters.script.loss_reading import LossReading
from esper_telemetry.adapters.script.network_logs import ClipCall
from esper_telemetry.adapters.script.variables import Variables, as_number, groups_of, parameter_names
from esper_telemetry.core.rate_schedule import GroupRate, group_rates, rates_by_name


class ScriptOptimizers:
    """Records the optimizers that have stepped since training by PPO began.

    Attributes:
        known: optimizers that have stepped.
        several: more than one has.
        learning_rate: of the update's first step, but not of a critic's optimizer that another one follows.
        first_rate: of the first step of all.
        clips: calls by which the gradients of each optimizer's last step were clipped.
        trained: parameters that have had gradients, by name.
    """

    def __init__(self) -> None:
        self.known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.several = False
        self.learning_rate = self.first_rate = 0.0
        self.clips: weakref.WeakKeyDictionary[Optimizer, list[ClipCall]] = weakref.WeakKeyDictionary()
        self.trained: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._rates: dict[int, list[GroupRate]] = {}  # of each optimizer, at its first step in the update
        self._owners: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        self._rate_is_critics = False
        # of each parameter that had a gradient: scripts may make new optimizers of a parameter
        self._steps_of: Counter[int] = Counter()
        self._early: list[set[int]] = [set(), {0}]  # parameters of the second and third step of an update
        self._last_steps = 3  # of the update before
        self._pass_counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._last_passes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def begin(self, optimizer: Optimizer, variables: Variables) -> dict[str, list[str]]:
        """Name the parameters of the first optimizer, and return them by the networks that they serve."""
        self._names = parameter_names(variables, parameters_of(optimizer))
        self.first_rate = float(optimizer.param_groups[0]["lr"])
        return groups_of(self._names.values())

    def named_parameters(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The optimizer's parameters by name; parameters that were added later are numbered."""
        parameters = enumerate(parameters_of(optimizer))
        return {self._names.get(id(one), f"parameter_{len(self._names) + place}"): one for place, one in parameters}

    def reached(self, leaves: Iterable[Tensor], more: Iterable[object] = ()) -> list[Optimizer]:
        """Return the optimizers, known or among `more` values, that have some of these leaves."""
        own, seen = set(map(id, leaves)), [*self.known, *(one for one in more if isinstance(one, Optimizer))]
        return [one for one in seen if not own.isdisjoint(map(id, parameters_of(one)))]

    def climb(self, leaves: Iterable[Tensor], more: Iterable[object] = ()) -> bool:
        """Return True if an optimizer of some of these leaves maximises, also among `more` values, such as before the first update."""
        return any(group.get("maximize") for one in self.reached(leaves, more) for group in one.param_groups)

    def add_pass(self, leaves: Iterable[Tensor]) -> None:
        """Count a backward pass that ends in these leaves."""
        for optimizer in self.reached(leaves):
            self._pass_counts[optimizer] = self._pass_counts.get(optimizer, 0) + 1

    def passes(self, optimizer: Optimizer) -> int:
        """Number of backward passes before the optimizer's last step; 1 if it has taken none."""
        return self._last_passes.get(optimizer, 1)

    def add(self, optimizer: Optimizer, variables: Variables, readings: Sequence[LossReading], *, is_first: bool) -> None:
        """Record an optimizer that is about to step, perhaps as the first one of an update, with the gradients of these losses."""
        self.add_rates(optimizer, variables, readings, is_first=is_first)
        self.known.add(optimizer)
        self.several = self.several or len(self.known) > 1

    def add_rates(self, optimizer: Optimizer, variables: Variables, readings: Sequence[LossReading], *, is_first: bool) -> None:
        """Record the rates of a step; a single rate has the name of the network whose loss it follows, or of its variable."""
        self._rates = {} if is_first else self._rates
        if id(optimizer) not in self._rates:
            self._rates[id(optimizer)] = self._rates_of(optimizer, variables, readings)
        self.keep_rate(optimizer, is_first=is_first)

    def _rates_of(self, optimizer: Optimizer, variables: Variables, readings: Sequence[LossReading]) -> list[GroupRate]:
        rates = group_rates(optimizer)
        if len(rates) != 1:
            return rates
        if optimizer not in self._owners:
            alone = (one for one in readings if one.policy is None or one.value is None)
            owners = {"critic" if one.policy is None else "actor" for one in alone}
            if len(owners) != 1:
                own = groups_of(name for name, value in variables.named_values() if value is optimizer)
                owners = own.keys() & {"actor", "critic"}
            self._owners[optimizer] = owners.pop() if len(owners) == 1 else ""
        return [rates[0]._replace(name=rates[0].name or self._owners[optimizer])]

    def keep_rate(self, optimizer: Optimizer, *, is_first: bool = False) -> None:
        """Keep the rate of an update's first step, or of the first one that is not of a critic's optimizer."""
        if is_first or self._rate_is_critics:
            self.learning_rate = float(optimizer.param_groups[0]["lr"])
            self._rate_is_critics = self._owners.get(optimizer) == "critic"

    def count_step(self, optimizer: Optimizer) -> None:
        """Count the step that an optimizer has taken."""
        self._steps_of.update(id(one) for one in parameters_of(optimizer) if one.grad is not None)

    def steps_of(self, optimizer: Optimizer) -> int:
        """Number of steps that its parameters have taken."""
        return max(self._steps_of[id(one)] for one in parameters_of(optimizer))

    def after_step(self, optimizer: Optimizer, calls: list[ClipCall], passes: int, step: int) -> None:
        """Record a traced step, its clip calls, and the number of passes, which are not counted by optimizer before the first step."""
        self.clips[optimizer] = calls
        self._last_passes[optimizer] = self._pass_counts.pop(optimizer, max(1, passes))
        if step in (1, 2):
            self._early[step - 1] = set(map(id, parameters_of(optimizer)))

    def end_update(self, steps: int, groups: Mapping[str, list[str]]) -> dict[str, float | Tensor]:
        """End an update of so many steps, and return its rates by the names of their groups."""
        self._last_steps = steps
        return rates_by_name([rate for own in self._rates.values() for rate in own], self.trained, lambda: groups)

    def steps_with_turns(self, update: int) -> int:
        """Number of steps after which the check is due. Successive updates check different optimizers, which alternate or follow."""
        in_turns = self._early[0] != self._early[1]
        return 3 + update % 2 if in_turns else self._last_steps if update % 2 else 3

    def rate_of_settings(self, optimizer: Optimizer, variables: Variables, stated: float | None) -> float | None:
        """The only optimizer's learning rate as stated, if its own rate is constant and the settings do not explain this."""
        rate = float(optimizer.param_groups[0]["lr"])
        if self.several or rate != self.first_rate:
            return None
        others = (value for name, value in variables.named_values() if settings.is_rate(name))
        return None if any(as_number(value) == rate for value in others) else stated

    def max_norm(self, optimizer: Optimizer, variables: Variables) -> float | None:
        """The limit to which the last step was clipped; the setting if nothing was, and None for several limits or a partial clip."""
        positive = variables.find(settings.MAX_NORM, lambda value: limit if (limit := as_number(value) or 0) > 0 else None)
        calls = self.clips.get(optimizer, [])
        if not calls:
            return None if self.several else positive
        own = parameters_of(optimizer)
        sets = {id(p) for p in own}, {id(p) for p in own if p.requires_grad}
        whole = len(calls) == 1 and calls[0].parameters in sets
        return (calls[0].max_norm or positive) if whole else None


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
