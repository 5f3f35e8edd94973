"""The minibatches of a script: rows, losses, and gradients of the terms that PPO's objective would have, by the graphs of its losses.

A script with an optimizer for each network computes the losses of a minibatch separately, perhaps all of the actor's losses first.
Then the critic's first loss belongs to the actor's first loss, the second to the second, and so on.

Gradients are of terms computed from the same numbers as the script's own loss; they continue in the graph of the loss at these numbers.
`torch.autograd.grad` does not change `.grad`, weights or random numbers. The graph is kept for the script's own pass.

Shapes: N rows, d entries of the parameters, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from esper_telemetry.adapters.columns import HeadColumns, head_names
from esper_telemetry.adapters.script.acting import Acting, TrainedRows
from esper_telemetry.adapters.script.autograd_graph import NEGATIVE_LIKELIHOODS, SAME_LINE, graph_of, kind_of, leaves_in
from esper_telemetry.adapters.script.loss_reading import EntropyTerm, LossReading, PolicyTerm, ValueTerm
from esper_telemetry.adapters.script.script_rollouts import COLUMNS, RowFinder, ScriptRollout, name_of
from esper_telemetry.adapters.script.variables import Variables
from esper_telemetry.core.minibatch_objective import LossRows
from esper_telemetry.equations.entropy_loss import GAUSSIAN_ENTROPY
from esper_telemetry.equations.gradient import TERMS, flat64
from esper_telemetry.equations.transitions import checksums
from esper_telemetry.events import MinibatchEnd

SAME_WEIGHT = 0.02
"""Largest relative difference between the weight of a loss and its setting."""

HALF_SQUARE = (1.0, 2.0)
"""Factors between the weight of a squared error and its setting: the loss is half of the square, or the square."""

NO_CLIP = 1e9
"""Range of a ratio that is not clipped."""

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
    edges = {"policy": ("edge", "attached"), "value": ("edge", "attached"), "entropy": ("edge",), "left_out": ("edge",)}
    known = {name: (term, own) for name, own in edges.items() if (term := getattr(reading, name)) is not None}
    terms = {name: term._replace(**dict.fromkeys(own)) for name, (term, own) in known.items()}
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

    @property
    def knows_distributions(self) -> bool:
        """True if the distributions that the rollout was acted with are known."""
        return bool(self._acted_heads.logits or self._acted_heads.means)

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
    """Return the factor of a whole loss: the policy's weight if the other weights are their settings times this factor, otherwise 1."""
    scale, terms = policy.weight, ((value, "value", HALF_SQUARE), (entropy, "entropy", (1.0,)))
    known = [
        _excess(term.weight / scale, weights[name], factors) == 1.0
        for term, name, factors in terms
        if scale and term is not None and term.weight and weights.get(name)
    ]
    return scale if known and all(known) else 1.0


def _excess(weight: float, setting: float | None, factors: tuple[float, ...]) -> float:
    """The weight of a loss divided by its setting; 1 if they are equal up to a factor. Without either, only the sign counts."""
    if not setting or not weight:
        return -1.0 if weight < 0 else 1.0
    return 1.0 if any(abs(weight / setting / factor - 1) < SAME_WEIGHT for factor in factors) else weight / setting


class LossTerms(NamedTuple):
    """Gradients [d] of the terms of a minibatch's loss and of alternatives to them, float64, and the weights of the terms."""

    gradients: Mapping[str, Tensor]
    coefficients: Mapping[str, float]


def loss_terms(
    loss: Tensor,
    reading: LossReading | None,
    variables: Variables,
    parameters: Sequence[Tensor],
    settings: Mapping[str, float] = {},
    *,
    in_parts: bool = False,
) -> LossTerms | None:
    """Return the terms of a backward pass's loss; the whole loss as `policy` if some terms are not known.

    Args:
        loss: what the pass begins with.
        reading: of the loss; None if it could not be read.
        parameters: that the gradients belong to.
        settings: weights of the losses `value` and `entropy`.
        in_parts: other passes of the step have the rest of the loss: a common factor of the terms is their share.

    Returns None if listeners in the network, or several processes, would notice the pass.
    """
    parts = (part for module in variables.modules() for part in module.modules())
    hooked = any(part._backward_hooks or part._backward_pre_hooks for part in parts)
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if hooked or several or any(parameter._backward_hooks for parameter in parameters) or not loss.requires_grad:
        return None
    terms = None if reading is None else _terms(loss, reading, parameters, settings, in_parts=in_parts)
    if terms is not None:
        return terms
    whole = _gradient(loss.sum(), parameters)
    leaked = None if reading is None else _through_advantages(loss, reading, parameters)
    if leaked is None:
        return LossTerms({"policy": whole}, {"policy": 1.0})
    return LossTerms({"policy": whole - leaked, "advantages_attached": whole}, {"policy": 1.0})


def _through_advantages(loss: Tensor, reading: LossReading, parameters: Sequence[Tensor]) -> Tensor | None:
    """The part of a loss's gradient that the policy's term sends through its advantages; None if they are detached, as they should be."""
    policy = reading.policy
    if policy is None or policy.attached is None or policy.valid is not None or policy.by_row or policy.reshaped:
        return None
    own = _of_advantages(loss, policy, partial(_rows, policy, reading.value), parameters)
    return None if own is None else own * (-policy.weight if reading.climbed else policy.weight)


def _of_advantages(loss: Tensor, policy: PolicyTerm, rows: Callable[..., LossRows], parameters: Sequence[Tensor]) -> Tensor | None:
    """Gradient [d] of the policy's term, without its weight, with respect to its advantages."""
    if policy.attached is None or (policy.log_ratio is not None and policy.clip is None):
        return None
    turn = -1 if policy.negated else 1
    numbers = turn * policy.advantages
    return _through(loss, policy.attached, numbers, lambda leaf: TERMS["policy"].of(rows(advantages=turn * leaf)), parameters)


def left_out(loss: Tensor, variables: Variables, parameters: Iterable[Tensor], others: Iterable[Tensor] = ()) -> dict[str, Tensor]:
    """Return the parameters, by name, that no optimizer trains, although the loss depends on them, or they have a gradient and are in the
    script's smallest module with all `parameters`. `others` are trained by other optimizers.
    """
    own = set(map(id, parameters))
    trained = own | set(map(id, others))
    named: list[dict[str, Tensor]] = [dict(module.named_parameters()) for module in variables.modules()]
    smallest = min((one for one in named if own <= set(map(id, one.values()))), key=len, default={})
    missing = {name: one for name, one in smallest.items() if one.requires_grad and one.grad is not None and id(one) not in trained}
    names = {id(value): name for name, value in variables.named_values() if isinstance(value, Tensor) and value.is_leaf}
    # weights that are plain tensors have a gradient from an earlier pass, unlike data that requires one
    leaves = [leaf for leaf in leaves_in(graph_of(loss)) if isinstance(leaf, nn.Parameter) or leaf.grad is not None]
    known = trained | set(map(id, missing.values()))
    return missing | {names.get(id(leaf), f"parameter_{place}"): leaf for place, leaf in enumerate(leaves) if id(leaf) not in known}


def _terms(
    loss: Tensor, reading: LossReading, parameters: Sequence[Tensor], settings: Mapping[str, float], *, in_parts: bool
) -> LossTerms | None:
    """The terms of a loss whose parts are all known, with omitted terms at the weights of the settings; None for other losses."""
    policy, value, entropy = reading.policy, reading.value, reading.entropy
    clipless = policy is not None and policy.log_ratio is not None and policy.clip is None and reading.penalty is None
    if not reading.complete or clipless or (policy is not None and (policy.by_row or policy.valid is not None)):
        return None
    is_squared = value is not None and value.kind == "squared"
    if value is not None and is_squared and (value.values is None or value.returns is None):
        return None
    if entropy is not None and entropy.edge is None and entropy.weight:
        return None
    # a policy gradient without a ratio may be the sum over an episode
    is_plain = in_parts or policy is None or policy.log_ratio is None
    scale = 1.0 if policy is None or is_plain else common_factor(policy, value, entropy, settings)
    rows, weights = partial(_rows, policy, value), dict[str, float]()
    sources: dict[str, tuple[GradientEdge, Tensor | None, Callable[[Tensor], Tensor]]] = {}
    if policy is not None:
        sign = -1 if policy.inverted or kind_of(policy.edge.node) in NEGATIVE_LIKELIHOODS else 1
        # the slopes do not depend on the log-probabilities, so unknown ones may be 0
        likelihoods = torch.zeros_like(policy.advantages) if policy.log_probs is None else sign * policy.log_probs
        source, policy_loss = likelihoods, lambda leaf: TERMS["policy"].of(rows(log_probs=sign * leaf))
        if policy.log_ratio is not None:
            source, policy_loss = ((sign * policy.log_ratio).exp(), lambda leaf: TERMS["policy"].of(rows(log_ratio=sign * leaf.log())))
        sources["policy"], weights["policy"] = (policy.edge, source, policy_loss), policy.weight / scale
    known: dict[str, Tensor] = {}
    if value is not None:
        if is_squared:
            sources["value"] = value.edge, value.values, lambda leaf: TERMS["value"].of(rows(values=leaf))
        else:  # another function of the error: the script's own
            (slopes,) = torch.autograd.grad(loss, [value.edge], retain_graph=True)
            sign = -1 if reading.climbed else 1
            known["value"] = _gradient(value.edge, parameters, slopes) * sign / (value.weight or 1.0)
        weights["value"] = value.weight / scale or settings.get("value", 1.0)
    if entropy is not None and entropy.edge is not None and (entropy.weight or settings.get("entropy")):
        # mean over rows of the sum over the choices of a row; the script's own mean if it has taken one
        count = len(policy.advantages) if policy is not None else 1
        divisor = (count if entropy.entropies.numel() >= count else 1) * (-1 if entropy.negated else 1)
        sources["entropy"] = entropy.edge, entropy.entropies, lambda leaf: -leaf.sum() / divisor
        weights["entropy"] = abs(entropy.weight / scale) or settings["entropy"]  # the bonus is subtracted
    for name, (edge, numbers, term) in sources.items():
        gradient = _through(loss, edge, numbers, term, parameters)
        if gradient is None:
            return None
        known[name] = gradient
    if reading.penalty is not None:
        penalty = reading.penalty
        known["kl_penalty"] = _gradient([*penalty.edges], parameters, [*penalty.slopes]) / penalty.weight
    own = None if policy is None else _of_advantages(loss, policy, rows, parameters)
    known |= {} if own is None else {"advantages_attached": known["policy"] + own}
    if value is not None and value.attached is not None and is_squared:
        moved = _through(loss, value.attached, value.returns, lambda leaf: TERMS["value"].of(rows(returns=leaf)), parameters)
        leaked = 0.0 if own is None or not weights["value"] else own * weights["policy"] / weights["value"]  # advantages of the same graph
        known |= {} if moved is None else {"targets_attached": known["value"] + moved + leaked}
    return LossTerms({name: -one if reading.climbed else one for name, one in known.items()}, weights)


def _rows(policy: PolicyTerm | None, value: ValueTerm | None, **changes: Tensor) -> LossRows:
    """The rows of a minibatch, with some columns replaced by leaves."""
    column = policy.advantages if policy is not None else next(iter(changes.values()))
    zeros = torch.zeros_like(column)
    values = zeros if value is None or value.values is None else value.values
    columns: dict[str, Any] = {
        "log_ratio": zeros if policy is None or policy.log_ratio is None else policy.log_ratio,
        "log_probs": zeros if policy is None or policy.log_probs is None else policy.log_probs,
        "values": values,
        "entropy": zeros,
        "advantages": zeros if policy is None else policy.advantages,
        "old_values": values if value is None or value.old_values is None else value.old_values,
        "returns": zeros if value is None or value.returns is None else value.returns,
        "clip": None if policy is None else NO_CLIP if policy.clip is None and policy.log_ratio is not None else policy.clip,
        "clip_value": None if value is None else value.clip,
    }
    return LossRows(**{**columns, **changes})


def _through(
    loss: Tensor, edge: GradientEdge, numbers: Tensor | None, term: Callable[[Tensor], Tensor], parameters: Sequence[Tensor]
) -> Tensor | None:
    """Gradient [d] of a term with respect to the parameters, through the graph below an edge with these numbers."""
    (own,) = torch.autograd.grad(loss, [edge], retain_graph=True, allow_unused=True)
    if numbers is None or (own is not None and own.numel() != numbers.numel()):
        return None
    with torch.enable_grad():
        leaf = numbers.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(term(leaf), [leaf])
    shape = edge.node._input_metadata[edge.output_nr].shape if own is None else own.shape
    return _gradient(edge, parameters, slope.reshape(shape))


def _gradient(output: Any, parameters: Sequence[Tensor], slope: Any = None) -> Tensor:
    """Gradient [d] of an output, or of several with as many slopes, float64; 0 for parameters that it does not depend on."""
    outputs, slopes = (output, slope) if isinstance(output, list) else ([output], [slope])
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients: Any = dict.fromkeys(map(id, parameters))
    if trained:
        own = torch.autograd.grad(outputs, trained, slopes, retain_graph=True, allow_unused=True)
        gradients |= zip(map(id, trained), own, strict=True)
    return flat64([torch.zeros_like(p) if gradients[id(p)] is None else gradients[id(p)] for p in parameters])
