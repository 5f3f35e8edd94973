"""The minibatches of a script: columns and losses from the graphs of its losses.

A script with an optimizer for each network computes the losses of a minibatch separately, perhaps all of the actor's losses first.
Then the critic's first loss belongs to the actor's first loss, the second to the second, and so on.

Shapes: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.adapters.columns import HeadColumns
from esper_telemetry.adapters.script.loss_reading import EntropyTerm, LossReading, PolicyTerm, ValueTerm
from esper_telemetry.equations.entropy_loss import GAUSSIAN_ENTROPY

SAME_WEIGHT = 0.02
"""Largest relative difference between the weight of a loss and its setting."""

HALF_SQUARE = (1.0, 2.0)
"""Factors between the weight of a squared error and its setting: the loss is half of the square, or the square."""


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
        return {
            "log_probs": self.policy.old_log_probs,
            "returns": None if value is None else value.returns,
            "values": None if value is None else value.old_values,
            "advantages": self.policy.advantages,
            "inputs": self.inputs,
        }


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
    """

    def __init__(self) -> None:
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


@dataclass
class MinibatchQueue:
    """Joins the losses of each minibatch of an update, in order.

    Attributes:
        minibatches: that wait for the critic's loss, or for earlier minibatches.
        critic_apart: the critic has had a separate loss.
        critic_first: this update began with a loss of the critic, so that each belongs to the next loss of the policy; None before.
        values: losses of the critic that wait for those.
    """

    minibatches: list[ScriptMinibatch] = field(default_factory=list)
    critic_apart: bool = False
    critic_first: bool | None = None
    values: list[ValueTerm] = field(default_factory=list)

    def begin(self) -> None:
        """Begin an update."""
        self.critic_first = None
        self.values.clear()

    def add(self, minibatch: ScriptMinibatch) -> None:
        """Add a loss with a term of the policy."""
        self.critic_first = bool(self.critic_first)
        if self.values and minibatch.reading.value is None:
            minibatch = _with_value(minibatch, self.values.pop(0))
        self.minibatches.append(minibatch)

    def add_value(self, value: ValueTerm) -> None:
        """Add a loss of only the critic to the first minibatch that lacks one; otherwise drop it, unless the critic is trained first."""
        self.critic_apart = True
        place = self._first_waiting()
        self.critic_first = self.critic_first is not False
        if self.critic_first:
            self.values.append(value)
        elif place < len(self.minibatches):
            self.minibatches[place] = _with_value(self.minibatches[place], value)

    def take(self, *, all_of_them: bool = False) -> list[ScriptMinibatch]:
        """Return the minibatches whose losses are known, up to the first that waits; or all of them."""
        count = len(self.minibatches) if all_of_them else self._first_waiting()
        taken, self.minibatches = self.minibatches[:count], self.minibatches[count:]
        return taken

    def _first_waiting(self) -> int:
        waiting = (place for place, one in enumerate(self.minibatches) if one.reading.value is None)
        return next(waiting, len(self.minibatches))


def _with_value(minibatch: ScriptMinibatch, value: ValueTerm) -> ScriptMinibatch:
    """Return a minibatch with a loss of the critic, unless that is of another number of rows."""
    if value.returns is not None and len(value.returns) != len(minibatch.policy.advantages):
        return minibatch
    return minibatch._replace(reading=minibatch.reading._replace(value=value, complete=False))


def losses_of(reading: LossReading, value: ValueTerm | None, weights: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the losses of a minibatch with that term of the critic, 0-d each, by the names of `MinibatchEnd`.

    A weight that differs from its setting, by more than the factor ½ of a squared error, changes the loss.
    """
    policy, entropy, losses = reading.policy, reading.entropy, dict[str, Tensor]()
    assert policy is not None
    scale = common_factor(policy, value, entropy, weights)
    if policy.loss is not None and (reading.penalty is None or policy.clip is not None):  # a penalty may replace the clip
        losses["policy"] = policy.loss
    if value is not None and value.loss is not None:
        losses["value"] = value.loss * _excess(value.weight / scale, weights.get("value"), HALF_SQUARE)
    if entropy is not None:
        losses["entropy"] = entropy.loss * _excess(entropy.weight / scale, weights.get("entropy"), (1.0,))
    if reading.is_whole:
        losses["total"] = reading.total / scale
    return losses


def unused_entropy(heads: HeadColumns) -> EntropyTerm | None:
    """Return the entropy of a minibatch's distributions as a term that its loss lacks; None without any distribution."""
    means = [-(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean() for logits in heads.logits.values()]
    means += [(log_std + GAUSSIAN_ENTROPY).sum(-1).mean() for log_std in heads.log_std.values()]
    if not means:
        return None
    entropy = torch.stack(means).sum()
    return EntropyTerm(entropy, -entropy, 0.0, None)


def common_factor(policy: PolicyTerm, value: ValueTerm | None, entropy: EntropyTerm | None, weights: Mapping[str, float]) -> float:
    """Return the factor of a whole loss. It is the weight of the policy's term if the other terms have that factor times their
    settings, and 1 otherwise.
    """
    scale, terms = policy.weight, ((value, "value", HALF_SQUARE), (entropy, "entropy", (1.0,)))
    known = [
        _excess(term.weight / scale, weights[name], factors) == 1.0
        for term, name, factors in terms
        if scale and term is not None and term.weight and weights.get(name)
    ]
    return scale if known and all(known) else 1.0


def _excess(weight: float, setting: float | None, factors: tuple[float, ...]) -> float:
    """The weight of a loss divided by its setting; 1 if they are equal up to one of these factors. Without either, only the sign
    counts.
    """
    if not setting or not weight:
        return -1.0 if weight < 0 else 1.0
    return 1.0 if any(abs(weight / setting / factor - 1) < SAME_WEIGHT for factor in factors) else weight / setting
