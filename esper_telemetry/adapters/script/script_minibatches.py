"""The minibatches of a script, with the columns of its rollout.

A script with an optimizer for each network computes the losses of a minibatch separately, perhaps all of the actor's losses first.
Then the critic's first loss belongs to the actor's first loss, the second to the second, and so on.

Shapes: N rows of a minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.adapters.columns import HeadColumns, head_names
from esper_telemetry.adapters.script.acting import Acting, TrainedRows
from esper_telemetry.adapters.script.loss_reading import LossReading, PolicyTerm, ValueTerm
from esper_telemetry.adapters.script.minibatch_losses import losses_of, unused_entropy
from esper_telemetry.adapters.script.row_finder import COLUMNS, SAME_LINE, RowFinder
from esper_telemetry.adapters.script.script_rollouts import ScriptRollout, name_of
from esper_telemetry.adapters.script.variables import Variables
from esper_telemetry.equations.transitions import checksums
from esper_telemetry.events import MinibatchEnd

MIN_PASS = 0.75
"""Share of a rollout's transitions that a pass over it has at least."""

MAX_PASS = 3.0
"""Largest share, of a mistaken pass whose minibatches overlap."""


class ScriptMinibatch(NamedTuple):
    """A minibatch that the script has learned from.

    Attributes:
        epoch, step: pass over the rollout and optimizer step within the update, from 0.
        policy: term of its losses.
        reading: of its losses, not `complete` if the terms are separate losses.
        indices: [N] each, whole numbers of the script that may be the transitions of its rows.
        inputs: [N], checksums of the policy's inputs.
        earlier: [N], bool: rows that an earlier update was trained on; None if none is known.
    """

    epoch: int
    step: int
    policy: PolicyTerm
    reading: LossReading
    indices: Sequence[Tensor]
    inputs: Tensor | None = None
    earlier: Tensor | None = None

    @property
    def log_ratio(self) -> Tensor:
        """The log-ratio [N]; 0 for a policy gradient without a ratio, which uses each rollout once."""
        ratio = self.policy.log_ratio
        return torch.zeros_like(self.policy.advantages) if ratio is None else ratio

    def columns(self) -> dict[str, Tensor | None]:
        """Return the columns that a rollout has too, by role."""
        value = self.reading.value
        return {**self.reading.columns(), "values": None if value is None else value.old_values, "inputs": self.inputs}


def without_graph(reading: LossReading) -> LossReading:
    """Return a reading without the edges, which keep its graph alive."""

    def plain(term: Any) -> Any:
        edges = {"edge", "attached"} & set(() if term is None else term._fields)
        return None if term is None else term._replace(**dict.fromkeys(edges))

    terms = {name: plain(getattr(reading, name)) for name in ("policy", "value", "entropy", "left_out")}
    penalty = None if reading.penalty is None else reading.penalty._replace(edges=(), slopes=())
    return reading._replace(**terms, penalty=penalty)


class PassFinder:
    """Finds the variable in which a script counts its passes over the rollout, by its integers in the first update.

    It starts at 0 or 1 and grows by 1 after each pass. All passes but the last one have equally many minibatches.

    Attributes:
        key: of the variable, which `counted` has found; None without one.
    """

    def __init__(self) -> None:
        self.key: tuple[int, str] | None = None
        self._integers: list[dict[tuple[int, str], int]] = []
        self._counts: list[int] = []

    def add(self, integers: dict[tuple[int, str], int], count: int) -> None:
        """Add the integers at a minibatch of so many rows."""
        self._integers.append(integers)
        self._counts.append(count)

    def find(self, size: int) -> tuple[int, str] | None:
        """Return the key of the variable for a rollout of so many transitions; None if none counts its passes."""
        fitting: list[tuple[int, tuple[int, str]]] = []
        too_long: list[tuple[int, tuple[int, str]]] = []
        for key in self._integers[0] if self._integers else ():
            numbers = [integers.get(key, -1) for integers in self._integers]
            lengths = [len(list(run)) for _, run in groupby(numbers)]
            counts = all(0 <= after - before <= 1 for before, after in pairwise(numbers)) and numbers[0] in (0, 1)
            regular = len(lengths) > 1 and len(set(lengths[:-1])) == 1 and lengths[-1] <= lengths[0]
            rows = sum(self._counts[: lengths[0]])
            long_enough = rows >= MIN_PASS * size or "epoch" in key[1].lower()
            if counts and regular and long_enough and rows <= MAX_PASS * size:
                (fitting if rows <= size else too_long).append((lengths[0], key))
        if fitting:
            return max(fitting)[1]
        return min(too_long)[1] if too_long else None

    def passes(self, key: tuple[int, str]) -> list[int]:
        """Return the passes of the minibatches, from 0, by this variable."""
        return [integers[key] - self._integers[0][key] for integers in self._integers]

    def counted(self, minibatches: list[ScriptMinibatch], size: int) -> list[ScriptMinibatch]:
        """Return the minibatches with their passes at the end of the first update, and as they are after others."""
        if self._integers:
            self.key = self.find(size)
            if self.key is not None:
                pairs = zip(minibatches, self.passes(self.key), strict=True)
                minibatches = [one._replace(epoch=number) for one, number in pairs]
            self._integers.clear()
        return minibatches


class ScriptMinibatches:
    """Joins the losses of each minibatch of an update, in order, and the transitions of its rows.

    Attributes:
        rollout: of the update; None if it was not found.
        size: number of its transitions, 0 if it was not found.
        critic_apart: the critic has had a separate loss.
        targets: names of the variable with the targets of its first one.
    """

    def __init__(self) -> None:
        self.rollout: ScriptRollout | None = None
        self.size = self._row_count = self._first_pass = 0
        self.critic_apart = False
        self.targets: tuple[str, ...] = ()
        self._waiting: list[ScriptMinibatch] = []  # for the critic's loss, or for earlier minibatches
        # the update began with a loss of the critic, so that each belongs to the next loss of the policy; None before
        self._critic_first: bool | None = None
        self._values: list[ValueTerm] = []  # that wait for those
        self._passes, self._trained_rows = PassFinder(), TrainedRows()
        self._rows: RowFinder | None = None
        self._acted_heads = HeadColumns()

    def begin(self) -> None:
        """Begin an update."""
        self._critic_first, self._row_count = None, 0
        self._values.clear()

    def begin_rollout(self, rollout: ScriptRollout | None, observations: Tensor | None, acting: Acting | None, heads: HeadColumns) -> None:
        """Record the rollout of the update, if it was found, and what it was acted with."""
        self.rollout, self.size, self._acted_heads = rollout, 0 if rollout is None else rollout.rewards.numel(), heads
        self._rows = None
        if rollout is not None:
            own = {name: getattr(rollout, name) for name in COLUMNS if name != "inputs"}
            if observations is not None:
                own["inputs"] = checksums(observations.float()).to(rollout.values.device)
            self._rows = RowFinder(own)
        self._trained_rows.begin(acting)

    def pass_of(self, variables: Variables, step: int) -> int:
        """Number of the pass over the rollout at an optimizer step of the update, from 0."""
        number = None if self._passes.key is None else variables.integers().get(self._passes.key)
        if number is not None:
            self._first_pass = number if step == 0 else self._first_pass
            return max(0, number - self._first_pass)
        return self._row_count // self.size if self.size else 0

    def add(self, minibatch: ScriptMinibatch, integers: dict[tuple[int, str], int] | None) -> None:
        """Add a loss with a term of the policy; in the first update with the script's integers, which show its passes."""
        count, inputs = len(minibatch.policy.advantages), minibatch.reading.inputs
        if integers is not None:
            self._passes.add(integers, count)
        is_first_pass = self._row_count <= self.size
        self._row_count += count
        if inputs is not None:
            inputs = checksums(inputs.reshape(1, count, -1).float())[0] if len(inputs) == count else None
        earlier = self._trained_rows.add(inputs) if inputs is not None and is_first_pass else None
        reading = minibatch.reading._replace(inputs=None, logits=None, leaves=())
        minibatch = minibatch._replace(reading=reading, inputs=inputs, earlier=earlier)
        self._critic_first = bool(self._critic_first)
        if self._values and reading.value is None:
            minibatch = _with_value(minibatch, self._values.pop(0))
        self._waiting.append(minibatch)

    def add_value(self, value: ValueTerm, variables: Variables | None = None) -> None:
        """Add a loss of only the critic to the first minibatch that lacks one; otherwise drop it, unless the critic is trained first.

        The script's variables show the name of its targets.
        """
        self.critic_apart = True
        place = self._first_waiting()
        self._critic_first = self._critic_first is not False
        if self._critic_first:
            self._values.append(value)
        elif place < len(self._waiting):
            self._waiting[place] = _with_value(self._waiting[place], value)
        if variables is not None and not self.targets and value.returns is not None:
            self.targets = (name_of(value.returns, self.size, variables),)

    def take(self, weights: Mapping[str, float], *, has_bonus: bool, all_of_them: bool = False) -> Iterator[MinibatchEnd]:
        """Return the minibatches whose losses are known, up to the first that waits; or all of them, at the end of an update.

        `weights` are of the losses by the settings, which have a weight of the entropy if it `has_bonus`.
        """
        if all_of_them:
            self._waiting = self._passes.counted(self._waiting, self.size)
        count = len(self._waiting) if all_of_them else self._first_waiting()
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return (self._event_of(minibatch, weights, has_bonus=has_bonus) for minibatch in taken)

    def _first_waiting(self) -> int:
        waiting = (place for place, one in enumerate(self._waiting) if one.reading.value is None)
        return next(waiting, len(self._waiting))

    def _event_of(self, minibatch: ScriptMinibatch, weights: Mapping[str, float], *, has_bonus: bool) -> MinibatchEnd:
        reading, policy, rollout = minibatch.reading, minibatch.policy, self.rollout
        value = reading.value if reading.value is not None or self.critic_apart else reading.left_out
        rows = advantage_rows = None
        if self._rows is not None:
            rows = self._rows.rows_of(minibatch.columns(), minibatch.indices)
        if self._rows is not None and rows is not None:
            rows = rows.to(policy.advantages.device)
            advantage_rows = self._rows.rows_of_advantages(policy.advantages, rows, minibatch.indices)
        is_counted = self._passes.key is not None or not self.size % len(policy.advantages)
        if self.critic_apart and value is not None and rows is not None and rollout is not None:
            value = without_other_rows(value, rollout, rows)
        returns, old_values = (None, None) if value is None else (value.returns, value.old_values)
        if rows is not None and rollout is not None and (value is None or value.values is not None):
            old_values = rollout.values.reshape(-1)[rows]
            returns = rollout.targets(returns, rows, policy.advantages)
        if value is not None and value.loss is None and value.values is not None and returns is not None:
            value = value._replace(loss=(value.values - returns.to(value.values)).square().mean() / 2)
        if reading.entropy is None and reading.is_whole and has_bonus:
            reading = reading._replace(entropy=unused_entropy(reading.heads))
        if policy.log_ratio is None and rows is not None and not (reading.heads.logits or reading.heads.means):
            # the distributions acted on are the ones trained
            reading = reading._replace(heads=self._acted_heads.map(lambda column: column.flatten(0, 1)[rows]))
        parts = () if policy.log_ratios is None else policy.log_ratios.unbind(-1)
        return MinibatchEnd(
            epoch=minibatch.epoch if is_counted else 0,  # the end of a pass is not known
            step=minibatch.step,
            log_ratio=minibatch.log_ratio,
            advantages=policy.advantages,
            values=None if value is None else value.values,
            old_values=old_values,
            returns=returns,
            losses=losses_of(reading, value, weights),
            valid=policy.valid,
            rows=rows,
            advantage_rows=advantage_rows,
            earlier=minibatch.earlier,
            head_log_ratios=dict(zip(head_names(len(parts)), parts, strict=True)),
            **reading.heads._asdict(),
        )


def _with_value(minibatch: ScriptMinibatch, value: ValueTerm) -> ScriptMinibatch:
    """Return a minibatch with a loss of the critic, unless that is of another number of rows."""
    if value.returns is not None and len(value.returns) != len(minibatch.policy.advantages):
        return minibatch
    return minibatch._replace(reading=minibatch.reading._replace(value=value, complete=False))


def without_other_rows(value: ValueTerm, rollout: ScriptRollout, rows: Tensor) -> ValueTerm:
    """Return a separate loss of the critic without its columns if it has other rows of the rollout than the policy's [N]."""
    targets, values = value.returns, value.values
    if targets is None or values is None or targets.shape != rows.shape or values.shape != rows.shape:
        return value
    returns, stored = rollout.returns.flatten().to(targets), rollout.values.flatten().to(values)
    ordered, order = returns.sort()
    above = torch.searchsorted(ordered, targets).clamp(1, len(order) - 1)
    own = order[torch.where(ordered[above] - targets < targets - ordered[above - 1], above, above - 1)]  # the nearest
    rounding = SAME_LINE * returns.abs().max()
    if bool(((returns[rows] - targets).abs() <= rounding).all()) or bool(((returns[own] - targets).abs() > rounding).any()):
        return value
    # the critic's estimates, which its steps change, tell its rows from targets in the wrong order
    alike = torch.corrcoef(torch.stack([values, stored[own], stored[rows]])).nan_to_num()[0]
    return value._replace(values=None, old_values=None, returns=None) if bool(alike[1] > alike[2]) else value
