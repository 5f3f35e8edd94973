"""Reads the terms of a loss from its graph before the backward pass, independent of the script's variable names.

A graph keeps the tensors that a backward pass needs: the ratio that is clipped, the advantages that multiply it, the bounds of the
clip, the error of the critic. From the loss downwards, sums, means and products with numbers are followed to the *terms*: the first
operations that are not linear. `torch.autograd.grad` up to these terms gives their weights. It leaves `.grad`, weights and the
graph as they are.

Shapes: N rows of the minibatch, A actions, D action dimensions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from esper_telemetry.adapters.columns import HeadColumns
from esper_telemetry.equations.entropy_loss import GAUSSIAN_ENTROPY

Node = Any
"""A node of torch's graph; the attributes that it has depend on its operation."""

Operands = Callable[[int], Tensor]
"""Returns the numbers of an operand of a node; raises LookupError if they are not known."""

MAX_NODES = 20_000
"""Largest number of nodes of a graph that are read: a policy with memory has thousands."""

MAX_VALUE_DEPTH = 16
"""Depth of operations for recomputing a number that the graph does not keep."""

ROUNDING = 1e-6
"""Largest relative difference between equal numbers in single precision."""

MIN_SUMMED_ROWS = 4
"""Rows above which a slope of 1 for each row shows a sum, not a mean with a weight."""

RESHAPES = {
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1"),
    *("SqueezeBackward2", "UnsqueezeBackward0", "CloneBackward0", "AliasBackward0", "ToCopyBackward0"),
}
VIEWS = {*RESHAPES, "ExpandBackward0", "TransposeBackward0", "PermuteBackward0"}
"""Operations that change only the shape of their input, not its entries; after `RESHAPES` the entries are in the same order."""

SUMS = {"AddBackward0", "SubBackward0", "RsubBackward1", "NegBackward0", "MeanBackward0", "MeanBackward1"}
JOINTS = {"StackBackward0", "CatBackward0"}
SUMS |= {"SumBackward0", "SumBackward1", "IndexBackward0", "SelectBackward0", *JOINTS, *VIEWS}
SUMS |= {"MaskedFillBackward0", "MaskedSelectBackward0", "IndexPutBackward0"}
"""Operations that are linear in all their inputs with a graph."""

EXPONENTIALS = {"ExpBackward0", "SoftmaxBackward0", "LogSoftmaxBackward0", "LogsumexpBackward0", "LogBackward0"}
"""Operations that probabilities come from."""

SOFTMAXES = {"LogSoftmaxBackward0", "SoftmaxBackward0"}
"""Operations from whose results scripts choose probabilities of actions, or logarithms of them."""

NORMALISERS = {*SOFTMAXES, "LogsumexpBackward0"}
"""Operations that normalise logits; `Categorical` subtracts their logsumexp."""

LOG_PROBABILITIES = {"LogSoftmaxBackward0", "LogsumexpBackward0", "LogBackward0", "PowBackward0"}
"""Operations below log-probabilities: chosen from logarithms, or of a Gaussian."""

ERRORS = {"MseLossBackward0": "squared", "SmoothL1LossBackward0": "Huber", "HuberLossBackward0": "Huber"}
EXTREMES = {"MinimumBackward0", "MaximumBackward0"}
PRODUCTS = {"MulBackward0", "DivBackward0"}
INDEXING = {"GatherBackward0", "IndexBackward0", "SelectBackward0", "NllLossBackward0", "MulBackward0"}
"""Operations by which scripts choose the log-probabilities of actions: by index, or times vectors of 0 and 1."""

PROJECTIONS = {"AddmmBackward0", "MmBackward0", "AddmvBackward0", "MvBackward0", "TBackward0", "AddBackward0"}
"""Operations between the outputs of a linear layer and its weight."""

FOLLOWED = {*EXTREMES, *SUMS, "WhereBackward0", "StackBackward0", "MinBackward0", "MaxBackward0"}
"""Operations below which products of advantages and ratios are searched for."""


class DistributionGraphs(NamedTuple):
    """Log-probabilities and entropies that distributions have returned, with graphs."""

    log_probs: Sequence[Tensor]
    entropies: Sequence[Tensor]


NO_OUTPUTS = DistributionGraphs((), ())


class PolicyTerm(NamedTuple):
    """The policy's term of a loss.

    Attributes:
        log_ratio: [N]; None for a policy gradient without a ratio.
        advantages: [N], as they multiply the ratio, or the log-probability.
        clip: range of the ratio around 1; None if it is not clipped.
        loss: 0-d, without its weight; None if the graph does not keep its rows.
        weight: of the loss.
        valid: [N], bool: rows that count; None if every row does.
        edge: edge of the graph at which gradients of the log-ratio, or of the log-probability, continue.
        log_probs: [N], of the actions now; None if the graph does not show them.
        inverted: the loss has the ratio of the old policy to the new one; `log_ratio` is new to old.
        attached: edge at which gradients of the advantages continue, of their negatives if `negated`; None if they are detached,
            as they should be.
        reshaped: this term or a related one multiplies a function of the ratio other than a clip: the loss is not PPO's.
        stored: [N], log-probabilities at collection, if the ratio is not their exponential difference.
        log_ratios: [N, D], if each action dimension has its own ratio; `log_ratio` and `log_probs` are the sums.
        by_row: the loss adds a term of each row; `edge` is of the first one.
    """

    log_ratio: Tensor | None
    advantages: Tensor
    clip: float | None
    loss: Tensor | None
    weight: float
    valid: Tensor | None
    edge: GradientEdge
    log_probs: Tensor | None
    inverted: bool = False
    attached: GradientEdge | None = None
    negated: bool = False
    reshaped: bool = False
    log_ratios: Tensor | None = None
    by_row: bool = False
    stored: Tensor | None = None

    def preferred(self, other: PolicyTerm) -> PolicyTerm:
        """Return the term that has a ratio and is not reshaped, or the first if they are equal.

        If the other term is reshaped, the loss is not PPO's, and the returned term is marked as reshaped too.
        """
        first, second = sorted((self, other), key=lambda one: (one.log_ratio is None, one.reshaped))
        return first._replace(loss=None, clip=None, reshaped=True) if second.reshaped else first

    @property
    def old_log_probs(self) -> Tensor | None:
        """[N], of the actions at collection. Without a ratio, a rollout is used once, before the policy changes."""
        if self.log_ratio is None or self.log_probs is None:
            return self.log_probs if self.log_ratio is None else None
        return self.log_probs - self.log_ratio if self.stored is None else self.stored


class ValueTerm(NamedTuple):
    """The critic's term of a loss.

    Attributes:
        values, returns: [N], current estimates, and their targets; `values` is None if the graph does not show them.
        old_values: [N], around which the values are clipped; None without a clip.
        clip: range of the values; None without one.
        kind: "squared", "Huber" or "absolute".
        edge: edge of the graph at which gradients of the values continue.
        loss: 0-d, without a weight: half the mean squared error, or the mean of a Huber loss.
        weight: of the loss; 0 for a critic that the loss leaves out.
    """

    values: Tensor | None
    returns: Tensor | None
    old_values: Tensor | None
    clip: float | None
    kind: str
    edge: GradientEdge
    loss: Tensor | None = None
    weight: float = 0.0


class EntropyTerm(NamedTuple):
    """The entropy's term of a loss.

    Attributes:
        entropies: [N], [N, D] or their mean; [N, A] of a softmax that the script computes itself, to be summed over choices.
        loss: 0-d, the negative mean over rows, without its weight.
        weight: of the loss; negative if entropy is penalised, 0 if it was computed and left out.
        edge: edge at which gradients of the entropies continue, of their negatives if `negated`; None without exactly one.
    """

    entropies: Tensor
    loss: Tensor
    weight: float
    edge: GradientEdge | None
    negated: bool = False

    def goes_with(self, other: EntropyTerm) -> bool:
        """Return whether the loss has the sum of both, as of two heads."""
        same = self.entropies.shape == other.entropies.shape and self.negated == other.negated
        return same and math.isclose(self.weight, other.weight, rel_tol=ROUNDING)

    def plus(self, other: EntropyTerm) -> EntropyTerm:
        """Return the sum."""
        return self._replace(entropies=self.entropies + other.entropies, loss=self.loss + other.loss, edge=None)


class PenaltyTerm(NamedTuple):
    """A divergence of the policy from the policy at collection, or an estimate of it, in a loss.

    Attributes:
        edges: of its parts, which are not linear in the outputs of the network.
        slopes: of the loss at these edges.
        weight: of the divergence; negative if the loss rewards it.
    """

    edges: Sequence[GradientEdge]
    slopes: Sequence[Tensor]
    weight: float

    @classmethod
    def of(cls, parts: Sequence[tuple[GradientEdge, Tensor, float | None]]) -> PenaltyTerm | None:
        """Return the penalty of some parts. The weight is of a part that is a divergence, if there is one, and of a log-ratio otherwise."""
        if not parts:
            return None
        edges, slopes, weights = zip(*parts, strict=True)
        known = [weight for weight in weights if weight is not None]
        weight = known[0] if known else -sum(float(slope.sum()) for slope in slopes)
        return cls(edges, slopes, weight) if weight else None


class LayerOutputs(NamedTuple):
    """Outputs `start` to `stop` of the layer whose weight has this `id`."""

    weight: int
    start: int
    stop: int


class LossReading(NamedTuple):
    """The terms of a loss.

    Attributes:
        total: 0-d, the loss itself; its negative if it is maximised.
        complete: the loss lacks other terms.
        left_out: the critic's estimates of these rows, if the loss does not depend on them; None otherwise.
        inputs: [N, ...], the network's inputs in these rows; None if the graph does not keep them.
        logits: [N, A], of a policy that computes its log-probabilities itself.
        actions: [N], whose log-probabilities it takes.
        source: of the logits.
        climbed: the optimizer maximises the loss; the terms belong to its negative.
        heads: distributions of its rows, if the script has used any for the log-probabilities.
        leaves: parameters that it depends on.
        penalty: on the divergence from the policy at collection, if any.
    """

    policy: PolicyTerm | None
    value: ValueTerm | None
    entropy: EntropyTerm | None
    total: Tensor
    complete: bool
    inputs: Tensor | None = None
    logits: Tensor | None = None
    actions: Tensor | None = None
    source: LayerOutputs | None = None
    left_out: ValueTerm | None = None
    climbed: bool = False
    heads: HeadColumns = HeadColumns()
    leaves: Sequence[Tensor] = ()
    penalty: PenaltyTerm | None = None

    @property
    def is_cleared(self) -> bool:
        """True if the script has cleared the gradients of its backward pass: no optimizer step can apply them."""
        can_be_zero = self.policy is not None and not bool(self.policy.advantages.any())
        gradients = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        return not (can_be_zero or any(bool(gradient.any()) for gradient in gradients))

    @property
    def is_whole(self) -> bool:
        """True if the loss includes the policy's and the critic's terms, or leaves the critic out, and no other ones."""
        return self.complete and self.penalty is None and (self.value or self.left_out) is not None


class _Product(NamedTuple):
    """Advantages times a ratio or a log-probability: the factor [N], the node that it multiplies, and the clip between both.
    `attached` is the edge at which the factor's gradients continue, if any. With `reshaped`, another function of the ratio is
    multiplied.
    """

    factor: Tensor
    node: Node
    clip: float | None
    is_ratio: bool
    attached: GradientEdge | None
    reshaped: bool = False


def read_loss(
    loss: Tensor,
    *,
    held: Iterable[Tensor] = (),
    outputs: DistributionGraphs = NO_OUTPUTS,
    values: Sequence[Tensor] = (),
    climbed: bool = False,
) -> LossReading | None:
    """Return the terms of a loss before its backward pass; None if it lacks terms of a policy and a critic.

    Args:
        loss: 0-d, with its graph.
        held: tensors of the script, which show numbers that the graph does not keep.
        outputs: of its distributions, with graphs.
        values: of layers with one unit, with graphs, the last one at the end.
        climbed: its optimizer maximises it.
    """
    held = [*held, *outputs.log_probs, *outputs.entropies, *values, loss]
    # a hook of the script would see a second backward pass, and `retain_grad` would add its gradients
    listens = any(one.grad_fn is not None and (one._backward_hooks or one.retains_grad) for one in held)
    if loss.grad_fn is None or loss.numel() != 1 or listens:
        return None
    return _LossReader(loss, held, outputs, values).read(climbed=climbed)


def joined(readings: Sequence[LossReading]) -> LossReading | None:
    """Return the losses of an optimizer step as one reading; None without one of a policy.

    Policy gradients without a ratio are joined row by row: their passes may divide the rows of a rollout. Other losses show the rows
    of the first pass.
    """
    policies = [one for one in readings if one.policy is not None]
    terms = [one.policy for one in policies if one.policy is not None]
    values = [one.value for one in readings if one.value is not None]
    if not terms:
        return None
    first = policies[0]._replace(value=values[0] if values else None)
    advantages = _joined_rows([one.advantages for one in terms])
    if len(terms) < 2 or advantages is None or any(one.log_ratio is not None for one in terms):
        return first
    log_probs = _joined_rows([one.log_probs for one in terms])
    if len(values) == len(terms):
        estimates, returns = _joined_rows([one.values for one in values]), _joined_rows([one.returns for one in values])
        first = first._replace(value=values[0]._replace(values=estimates, returns=returns))
    return first._replace(
        policy=terms[0]._replace(advantages=advantages, log_probs=log_probs, valid=None),
        inputs=_joined_rows([one.inputs for one in policies]),
        actions=_joined_rows([one.actions for one in policies]),
        logits=_joined_rows([one.logits for one in policies]),
    )


def exponents(dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and the largest number whose exponential is neither 0 nor infinite in this precision."""
    kind = torch.finfo(dtype)
    return math.log(kind.smallest_normal) + math.log(kind.eps), math.log(kind.max)


def graph_of(output: Tensor) -> Collection[Node]:
    """Return the nodes of the graph of an output."""
    return _below(output.grad_fn)


def takes_softmax_twice(loss: Tensor) -> bool:
    """Return whether a softmax in the graph of a loss is taken of the outputs of another one: probabilities were passed as logits."""
    for node in graph_of(loss):
        child = _children(node)[0] if _kind(node) in NORMALISERS else None
        while child is not None and _kind(child) in VIEWS:
            child = _children(child)[0]
        if child is not None and _kind(child) == "SoftmaxBackward0":
            return True
    return False


def leaves_of(output: Tensor) -> list[Tensor]:
    """Return the leaves of an output's graph, to which its backward pass adds gradients."""
    return leaves_below(output.grad_fn)


def leaves_below(node: Node) -> list[Tensor]:
    """Return the leaves at and below a node."""
    return [one.variable for one in _below(node) if hasattr(one, "variable")]


class _LossReader:
    def __init__(
        self, loss: Tensor, held: Sequence[Tensor], outputs: DistributionGraphs, values: Sequence[Tensor]
    ) -> None:
        self.loss, self.outputs, self.values = loss, outputs, values
        self.consumers: dict[Node, list[tuple[Node, int]]] = {node: [] for node in _below(loss.grad_fn)}
        for node in self.consumers:
            for place, child in enumerate(_children(node)):
                if child in self.consumers:
                    self.consumers[child].append((node, place))
        self.linear = set[Node]()  # between the loss and its terms
        self._under: dict[Node, Collection[Node]] = {}
        self.held = {one.grad_fn: one.detach() for one in held if one.grad_fn in self.consumers}
        self.tensors = [one for one in held if one.grad_fn is not None]
        self.columns = [one for one in held if one.numel() > 1]
        self.entropies = {one.grad_fn: one.detach() for one in outputs.entropies if one.grad_fn in self.consumers}
        self.log_probs = {one.grad_fn: one.detach() for one in outputs.log_probs if one.grad_fn in self.consumers}

    def read(self, *, climbed: bool) -> LossReading | None:
        """Return the terms; None without a term of a policy or critic."""
        terms = list(dict.fromkeys(self._terms(self.loss.grad_fn)))
        edges = [GradientEdge(node, number) for node, number in terms]
        descended = -self.loss if climbed else self.loss
        gradients = torch.autograd.grad(descended, edges, retain_graph=True, allow_unused=True) if terms else ()
        slopes = {node: gradient for (node, _), gradient in zip(terms, gradients, strict=True) if gradient is not None}
        chosen = [node for node in self._in_order(slopes) if self._is_row_log_prob(node)] if len(slopes) > 1 else []
        errors, bonuses = self._row_errors(slopes), self._row_entropies(slopes)
        policy = self._policy_of_rows(chosen, slopes) if len(chosen) > 1 else None
        value = self._value_of_rows(errors, slopes) if len(errors) > 1 else None
        entropy = self._entropy_of_rows(bonuses, slopes) if policy is not None and len(bonuses) == len(chosen) else None
        by_row = {
            *(chosen if policy is not None else ()),
            *(errors if value is not None else ()),
            *(bonuses if entropy is not None else ()),
        }
        others, parts = 0, list[tuple[GradientEdge, Tensor, float | None]]()
        bonus = any(node in self.entropies or self._is_plogp(node) for node, _ in terms)
        for place, ((node, _), gradient) in enumerate(zip(terms, gradients, strict=True)):
            if gradient is None or node in by_row:
                continue
            divergence = self._divergence(node)
            if divergence is not None:
                own = self._own_gradient(place, edges, gradients)
                choices = own.shape[-1] if _kind(node) == "MulBackward0" else 1  # whose products are summed
                weight = divergence * float(own.sum()) / choices
                parts += [(edges[place], own, weight if divergence else None)] if bool(own.any()) else []
                continue
            if node in self.log_probs or hasattr(node, "variable"):  # the policy's term depends on them too
                gradient = self._own_gradient(place, edges, gradients)
            term = (
                self._entropy(node, gradient, sampled=not bonus)
                or self._policy(node, gradient)
                or self._value(node, gradient)
            )
            if isinstance(term, PolicyTerm) and policy is None:
                policy, others = term, others + term.reshaped
            elif isinstance(term, ValueTerm) and value is None:
                value = term
            elif isinstance(term, EntropyTerm) and (entropy is None or entropy.goes_with(term)):
                entropy = term if entropy is None else entropy.plus(term)
            elif bool(self._own_gradient(place, edges, gradients).any()):
                others += 1
                if policy is not None and isinstance(term, PolicyTerm):
                    policy = policy.preferred(term)
        if policy is None and value is None:
            return None
        first = (policy or value).edge.node  # type: ignore[union-attr]  # one of them is there
        nodes = chosen if policy is not None and policy.by_row else [first]
        logits, actions, source = (None, None, None) if policy is None else self._choices(nodes)
        heads = HeadColumns()
        if policy is not None and logits is None and not self.log_probs:
            heads, drawn, layer = self._gaussian(policy.edge.node)
            actions, source = (actions, source) if drawn is None else (drawn, layer)
            if drawn is not None and policy.log_probs is None and policy.log_ratio is not None:
                means, log_std = heads.means["action"], heads.log_std["action"]
                density = torch.distributions.Normal(means, log_std.exp()).log_prob(drawn).sum(-1)
                policy = policy._replace(log_probs=density)
        left_out = None
        if policy is not None and not others:
            entropy = self._unused_entropy(len(policy.advantages)) if entropy is None else entropy
            left_out = self._unused_values(len(policy.advantages)) if value is None else None
        if entropy is not None and policy is not None:  # the entropy is the sum over the choices of a row
            choices = max(1, entropy.entropies.numel() // len(policy.advantages))
            entropy = entropy._replace(weight=entropy.weight / choices, loss=entropy.loss * choices)
        return LossReading(
            policy=policy,
            value=value,
            entropy=entropy,
            total=descended.detach().reshape(()),
            complete=not others,
            climbed=climbed,
            inputs=_joined_rows([self._inputs(node) for node in nodes]),
            logits=logits,
            actions=actions,
            source=source,
            heads=heads,
            left_out=left_out,
            penalty=PenaltyTerm.of(parts),
        )

    def _unused_values(self, count: int) -> ValueTerm | None:
        """The critic's estimates of the rows that the loss does not depend on."""
        estimates = [*self.values, *(one for one in self.tensors if self._joins_estimates(one))]
        unused = [one for one in estimates if one.numel() == count and one.grad_fn not in self.consumers]
        if not unused or any(one.grad_fn in self.consumers for one in estimates if one.numel() == count):
            return None
        return ValueTerm(unused[-1].detach().reshape(-1), None, None, None, "squared", _edge(unused[-1]))

    def _joins_estimates(self, tensor: Tensor) -> bool:
        """Return True for the critic's estimates of several steps, concatenated."""
        own = {one.grad_fn for one in self.values}
        waiting, visited = [tensor.grad_fn], set[Node]()
        while waiting:
            node = waiting.pop()
            visited.add(node)
            if _kind(node) in JOINTS | VIEWS:
                waiting += [child for child in _children(node) if child is not None]
            elif node not in own and not (_kind(node) == "AddmmBackward0" and _shape(node)[-1] == 1):
                return False
        return len(visited) > 1 and not own.isdisjoint(visited)

    def _unused_entropy(self, count: int) -> EntropyTerm | None:
        """The entropies of the rows that the loss does not depend on, from the last distribution."""
        unused = [one for one in self.outputs.entropies if one.dim() and len(one) == count]
        if len(unused) != 1 or unused[0].grad_fn in self.consumers:
            return None
        entropies = unused[0].detach()
        return EntropyTerm(entropies, -entropies.sum() / count, 0.0, _edge(unused[0]))

    def _is_below(self, node: Node, top: Node) -> bool:
        """Return whether a node is below another one, whose nodes are kept: a loss of many steps has as many terms."""
        if top not in self._under:
            self._under[top] = _below(top)
        return node in self._under[top]

    def _own_gradient(self, place: int, edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None]) -> Tensor:
        """Gradient of the loss with respect to a term, without paths through the other terms, which may be above it."""
        others = [  # with slopes that leave out the paths through terms above them, which would count twice
            (edge, self._own_gradient(other, edges, gradients))
            for other, (edge, gradient) in enumerate(zip(edges, gradients, strict=True))
            if other != place and gradient is not None and self._is_below(edges[place].node, edge.node)
        ]
        own = gradients[place]
        assert own is not None
        if not others:
            return own
        above, slopes = zip(*others, strict=True)
        (through,) = torch.autograd.grad(above, [edges[place]], slopes, retain_graph=True, allow_unused=True)
        if through is None:
            return own
        rest = own - through
        return rest if float(rest.abs().max()) > ROUNDING * float(own.abs().max()) else torch.zeros_like(own)

    def _terms(self, node: Node, number: int = 0) -> Iterator[tuple[Node, int]]:
        """Yield the first operations below that are not linear, with the number of their output."""
        waiting = [(node, number)]
        while waiting:
            node, number = waiting.pop()
            if node in self.linear:
                continue
            self.linear.add(node)
            joined = self._joined_entropies(node) if _kind(node) in JOINTS else None
            self.entropies |= {} if joined is None else {node: joined}
            output = node in self.entropies or node in self.log_probs
            chosen = _kind(node) == "GatherBackward0" and self._is_plogp(self._through_views(_children(node)[0]))
            if not output and (_kind(node) in SUMS or chosen or _is_scaling(node) or self._weighs_rows(node)):
                waiting += [(child, place) for child, place in node.next_functions if child is not None]
            else:
                yield node, number

    def _weighs_rows(self, node: Node) -> bool:
        """Return True for rows of a term times numbers without a graph, such as a mask of padding, or rows where a condition holds."""
        children = _children(node)
        if _kind(node) not in ("MulBackward0", "DivBackward0", "WhereBackward0") or children.count(None) != 1:
            return False
        if _kind(node) == "DivBackward0" and children[0] is None:
            return False
        below = self._through_views(next(child for child in children if child is not None))
        while _kind(below) in ("SumBackward1", "MeanBackward1"):  # of each sequence
            below = self._through_views(_children(below)[0])
        rows = self._without_sign(below)[0]
        if below in self.entropies or next(self._products(rows), None) is not None or self._weighs_rows(rows):
            return True
        return self._error(rows) is not None and self._ratio_below(rows, _shape(rows).numel()) is None

    # the policy

    def _policy(self, node: Node, gradient: Tensor) -> PolicyTerm | None:
        products = list(self._products(node))
        if not products:
            return None
        plain = min(products, key=lambda one: (one.reshaped, one.clip is not None))
        # what is clipped around 1 is a ratio, however the script computes it
        plain = plain._replace(is_ratio=any(one.is_ratio and one.node is plain.node for one in products))
        clip = next((one.clip for one in products if one.clip is not None), None)
        factor = plain.factor
        number = self.value(plain.node)
        if number is None:
            return None
        per_dimension = plain.is_ratio and self._is_per_dimension(plain.node, factor)
        if number.numel() != factor.numel():
            factor = _of_shape(factor, _shape(plain.node))
        negated = self._is_negated(node, factor, gradient, is_ratio=plain.is_ratio)
        rows = self.value(node)
        slopes = gradient.reshape(-1)
        # a mean has slopes of weight / N; a sum gets weight 1, so that its size shows
        is_sum = plain.is_ratio and len(slopes) > MIN_SUMMED_ROWS and bool(((slopes.abs() - 1).abs() < ROUNDING).all())
        weight, valid = 1.0 if is_sum else float(slopes.abs().sum()), slopes != 0
        reshaped = any(one.reshaped for one in products)
        loss = None if rows is None or not weight or reshaped else (rows * gradient).sum() / weight
        flat = number.reshape(-1)
        # a ratio that is not a quotient of probabilities may be negative
        log_ratio = flat.abs().log().clamp(*exponents(flat.dtype)) if plain.is_ratio else None
        own, inverted = self._log_probs(plain.node) if plain.is_ratio else (flat, False)
        stored = self._stored(plain.node, own, flat) if plain.is_ratio else None
        log_ratios = None
        if per_dimension and log_ratio is not None:
            log_ratios = log_ratio.reshape(number.shape) * (-1 if inverted else 1)
            log_ratio, own = (
                log_ratio.reshape(number.shape).sum(-1),
                None if own is None else own.reshape(number.shape).sum(-1),
            )
            factor, flat, valid = factor[..., 0], flat[: len(log_ratio)], valid.reshape(number.shape).any(-1)
        return PolicyTerm(
            log_ratio=-log_ratio if inverted and log_ratio is not None else log_ratio,
            advantages=(-factor if negated else factor).reshape(-1),
            clip=None if reshaped else clip,
            loss=loss,
            weight=weight,
            valid=None if bool(valid.all()) or len(valid) != len(flat) else valid,
            edge=GradientEdge(plain.node, 0),
            log_probs=own,
            inverted=inverted,
            attached=plain.attached,
            negated=negated,
            reshaped=reshaped,
            log_ratios=log_ratios,
            stored=stored,
        )

    def _is_per_dimension(self, ratio: Node, factor: Tensor) -> bool:
        """Return True for the ratios [N, D] of a Gaussian density that share one advantage [N, 1]; tokens are drawn from a softmax."""
        shape = _shape(ratio)
        broadcast = len(shape) == 2 and shape[1] > 1 and factor.shape == (shape[0], 1)
        kinds = _kinds(ratio) if broadcast else set()
        return bool(kinds & {"PowBackward0", "DivBackward0"}) and "LogSoftmaxBackward0" not in kinds

    def _is_negated(self, node: Node, factor: Tensor, gradient: Tensor, *, is_ratio: bool) -> bool:
        """Return True if a factor is the negative advantages: the script holds them, the larger of two losses is taken, or the
        gains of an unclipped loss are subtracted.
        """
        for sign in (False, True):
            own = -factor.reshape(-1) if sign else factor.reshape(-1)
            # products with a ratio of 1 are not advantages
            columns = [one for one in self.columns if not (is_ratio and one.requires_grad)]
            if any(one.numel() == len(own) and torch.equal(own, one.reshape(-1)) for one in columns):
                return sign
        for sign in (False, True):  # perhaps of the rows of a larger array
            own = (-factor if sign else factor).detach().reshape(-1)
            larger = (one for one in columns if one.numel() > len(own) and one.dtype is own.dtype)
            if any(bool(torch.isin(own, one).all()) for one in larger):
                return sign
        if _kind(node) in EXTREMES:
            return _kind(node) == "MaximumBackward0"
        return float(gradient.sum()) > 0

    def _products(self, node: Node) -> Iterator[_Product]:
        """Yield the products of advantages and ratios in a term."""
        waiting, visited = [node], set[Node]()
        while waiting:
            node = self._through_views(waiting.pop())
            if node in visited:
                continue
            visited.add(node)
            product = self._product(node)
            if product is not None:
                yield product
            elif _kind(node) in FOLLOWED:
                waiting += [child for child in _children(node) if child is not None]

    def _product(self, node: Node) -> _Product | None:
        if _kind(node) != "MulBackward0":
            return None
        children = _children(node)
        for place in (0, 1):
            child, (other, number) = children[place], node.next_functions[1 - place]
            factor = node._saved_other if place == 0 else node._saved_self
            if child is None or factor is None or factor.dtype is torch.bool:
                continue
            child = self._through_views(child)
            if _kind(child) == "NegBackward0":
                child, factor = self._through_views(_children(child)[0]), -factor
            inner, clip = self._unclipped(child)
            is_quotient = _kind(inner) == "DivBackward0" and None in _children(inner) and not _is_scaling(inner)
            is_ratio = clip is not None or is_quotient or _kind(inner) == "ExpBackward0"
            if other is not None and (other in _below(inner) if is_ratio else EXPONENTIALS & _kinds(other)):
                continue  # both have a graph: an entropy, unless the advantages are not detached
            ratio = None if is_ratio else self._ratio_below(inner, factor.numel())
            if ratio is not None:
                return _Product(factor.detach(), ratio, None, is_ratio=True, attached=None, reshaped=True)
            if is_ratio or (factor.numel() > 1 and LOG_PROBABILITIES & _kinds(inner)):
                attached = None if other is None else GradientEdge(other, number)
                return _Product(factor.detach(), inner, clip, is_ratio, attached)
        return None

    def _ratio_below(self, node: Node, count: int) -> Node | None:
        """Return the ratio of so many rows that an operation depends on: the exponential of a difference from numbers without a graph."""
        for one in _below(node):
            if _kind(one) == "ExpBackward0" and _shape(one).numel() == count:
                below = self._through_views(_children(one)[0])
                if _kind(below) in ("SubBackward0", "AddBackward0") and _children(below)[:2].count(None) == 1:
                    return one
        return None

    def _unclipped(self, node: Node) -> tuple[Node, float | None]:
        """Return the node that is clipped to a range around 1, with half of that range; the node itself without a clip."""
        if _kind(node) not in ("ClampBackward0", "ClampBackward1"):
            return node, None
        low, high = _number(node._saved_min), _number(node._saved_max)
        if low is None or high is None or not 0 <= low < 1 < high:
            return node, None
        return self._through_views(_children(node)[0]), max(high - 1, 1 - low)

    def _without_sign(self, node: Node) -> tuple[Node, bool]:
        """Return the node below negations and views, and whether the number of negations is odd."""
        negative, node = False, self._through_views(node)
        while _kind(node) == "NegBackward0":
            negative, node = not negative, self._through_views(_children(node)[0])
        return node, negative

    def _log_probs(self, ratio: Node) -> tuple[Tensor | None, bool]:
        """Log-probabilities now [N], below a ratio, and True if they are subtracted in the difference that it is the exponential of."""
        if _kind(ratio) == "DivBackward0":
            place = 0 if _children(ratio)[0] is not None else 1
            number = self.value(_children(ratio)[place])
            return _as_log_probs(number), place == 1
        if _kind(ratio) != "ExpBackward0":
            node = self._summand(ratio)
            number = None if node is ratio else self.value(node)
            return (None if number is None else number.reshape(-1)), False
        below = self._through_views(_children(ratio)[0])
        if _kind(below) not in ("SubBackward0", "AddBackward0"):
            return None, False
        first, second = _children(below)[:2]
        if _kind(below) == "AddBackward0" and None not in (first, second):
            return None, False
        node, is_negative = self._without_sign(second if first is None else first)
        number, has_two = self.value(node), None not in (first, second)
        is_subtracted = is_negative != (first is None and _kind(below) == "SubBackward0")
        return (None if number is None else number.reshape(-1)), is_subtracted and not has_two

    def _summand(self, node: Node) -> Node:
        """Return what numbers without a graph are added to, or subtracted from; the node itself without any."""
        while _kind(node) in ("SubBackward0", "AddBackward0") and _children(node)[:2].count(None) == 1:
            node = self._through_views(next(child for child in _children(node) if child is not None))
        return node

    def _stored(self, ratio: Node, own: Tensor | None, number: Tensor) -> Tensor | None:
        """Log-probabilities at collection [N] of a ratio that is a quotient, or a difference near 0 or 1; None of an exponential."""
        if _kind(ratio) == "DivBackward0":
            other = ratio._saved_other if _children(ratio)[0] is not None else ratio._saved_self
            return None if other is None or other.numel() != number.numel() else _as_log_probs(other)
        if _kind(ratio) == "ExpBackward0" or own is None or len(own) != len(number):
            return None
        offset = 1 if float((number - 1).abs().mean()) < float(number.abs().mean()) else 0
        return own - number + offset

    # terms of single rows, which a script adds one by one

    def _in_order(self, nodes: Iterable[Node]) -> list[Node]:
        """Return the nodes in the order in which the script computed their results."""
        return sorted(nodes, key=lambda node: int(node._sequence_nr()))

    def _is_row_log_prob(self, node: Node) -> bool:
        """Return True for the log-probability of one action, which is a term if its advantage is a number."""
        if _shape(node).numel() != 1 or node in self.entropies or self._error(node) is not None:
            return False
        return node in self.log_probs or (_kind(node) == "GatherBackward0" and bool(LOG_PROBABILITIES & _kinds(node)))

    def _row_errors(self, slopes: Mapping[Node, Tensor]) -> dict[Node, ValueTerm]:
        """Return the critic's errors of single rows, in the order in which the values were computed."""
        errors = {node: self._error(node) for node, slope in slopes.items() if slope.numel() == 1}
        known = {node: error for node, error in errors.items() if error is not None and _is_one_row(error)}
        return dict(sorted(known.items(), key=lambda one: int(one[1].edge.node._sequence_nr())))

    def _row_entropies(self, slopes: Mapping[Node, Tensor]) -> list[Node]:
        """Return the products of probabilities and their logarithms of single rows."""
        single = (node for node, slope in slopes.items() if slope.dim() == 1 or (slope.dim() == 2 and len(slope) == 1))
        return self._in_order(node for node in single if self._is_plogp(node))

    def _policy_of_rows(self, nodes: Sequence[Node], slopes: Mapping[Node, Tensor]) -> PolicyTerm | None:
        """The policy's term whose advantages are numbers that multiply the log-probabilities of single actions."""
        numbers = [self.value(node) for node in nodes]
        factors = [self._factor_above(node) for node in nodes]
        slope = torch.stack([slopes[node].reshape(()) for node in nodes])
        place = next((place for place, factor in enumerate(factors) if factor), None)
        if (place is None and None in factors) or any(number is None for number in numbers):
            return None
        weight = 1.0 if place is None else abs(float(slope[place]) / float(factors[place] or 1.0))
        if not weight:  # all advantages are 0 if no place has another one
            return None
        log_probs = torch.stack([number.reshape(()) for number in numbers if number is not None])
        advantages = -slope / weight
        loss = -(advantages * log_probs).mean()
        edge = GradientEdge(nodes[0], 0)
        return PolicyTerm(None, advantages, None, loss, weight * len(nodes), None, edge, log_probs, by_row=True)

    def _factor_above(self, node: Node) -> float | None:
        """Return the number by which the script multiplies a result first; None if it multiplies it by none."""
        while True:
            consumers = self.consumers[node]
            if len(consumers) != 1:
                return None
            ((node, place),) = consumers
            if _kind(node) == "MulBackward0" and _is_scaling(node):
                return _number(node._saved_other if place == 0 else node._saved_self)
            if _kind(node) not in VIEWS | {"NegBackward0"}:
                return None

    def _value_of_rows(self, errors: Mapping[Node, ValueTerm], slopes: Mapping[Node, Tensor]) -> ValueTerm | None:
        """The critic's term of the errors of single rows."""
        first = next(iter(errors.values()))
        rows = [self.value(node) for node in errors]
        slope = torch.stack([slopes[node].reshape(()) for node in errors])
        weight = (1 if first.kind == "Huber" else 2) * float(slope.sum())
        if not weight or any(row is None for row in rows) or len({error.kind for error in errors.values()}) > 1:
            return None
        return first._replace(
            values=_joined_rows([error.values for error in errors.values()]),
            returns=_joined_rows([error.returns for error in errors.values()]),
            loss=(torch.stack([row.reshape(()) for row in rows if row is not None]) * slope).sum() / weight,
            weight=weight,
        )

    def _entropy_of_rows(self, nodes: Sequence[Node], slopes: Mapping[Node, Tensor]) -> EntropyTerm | None:
        """The entropy's term of the products of single rows."""
        products = torch.stack([self._plogp(node).reshape(-1) for node in nodes])  # type: ignore[union-attr]  # they are such
        numbers, sign = -products, 1 if self._is_negative(nodes[0], products[0]) else -1
        slope = sign * torch.stack([slopes[node].reshape(-1) for node in nodes])
        weight = -float(slope.sum())
        return EntropyTerm(numbers, (numbers * slope).sum() / weight, weight, None) if weight else None

    def _choices(self, nodes: Sequence[Node]) -> tuple[Tensor | None, Tensor | None, LayerOutputs | None]:
        """Logits, actions and layer of `_choice`, of the rows of several nodes."""
        logits, actions, sources = zip(*map(self._choice, nodes), strict=True)
        return _joined_rows(logits), _joined_rows(actions), sources[0]

    def _choice(self, node: Node) -> tuple[Tensor | None, Tensor | None, LayerOutputs | None]:
        """Logits [N, A], actions [N] and layer of log-probabilities that are taken from a softmax by the script itself."""
        logits = actions = source = None
        for one in _below(node):
            if _kind(one) in SOFTMAXES and logits is None and self._is_chosen_from(one):
                chosen_from = one._saved_result.detach().reshape(-1, one._saved_result.shape[-1])
                logits = chosen_from if _kind(one) == "LogSoftmaxBackward0" else chosen_from.log()
                source = self._layer_of(one)
            elif _kind(one) == "GatherBackward0" and actions is None:
                actions = one._saved_index.reshape(-1)
            elif _kind(one) == "IndexBackward0" and actions is None and len(one._saved_indices) == 2:
                chosen = one._saved_indices[1]  # of each row by `[range(N), actions]`
                actions = None if chosen is None or None in one._saved_indices else chosen.reshape(-1)
        return logits, actions, source

    def _gaussian(self, node: Node) -> tuple[HeadColumns, Tensor | None, LayerOutputs | None]:
        """Parameters, actions [N, D] and layer of the means of a Gaussian's density that the script computes itself.

        Its standard deviations are the exponential of a parameter.
        """
        below = _below(node)
        log_std: Tensor | None = None
        for one in below:
            leaf = (
                getattr(self._through_views(_children(one)[0]), "variable", None)
                if _kind(one) == "ExpBackward0"
                else None
            )
            log_std = leaf if leaf is not None and leaf.dim() <= 2 and log_std is None else log_std
        squares = (one for one in below if _kind(one) == "PowBackward0" and one._saved_exponent == 2)
        for square in squares:
            difference = self._through_views(_children(square)[0])
            parts = _children(difference) if _kind(difference) == "SubBackward0" else []
            own = [place for place, part in enumerate(parts) if part is not None]
            means = self.value(parts[own[0]]) if len(own) == 1 else None
            if log_std is None or means is None or means.dim() != 2 or means.shape != square._saved_self.shape:
                continue
            sign = -1 if own[0] == 0 else 1
            actions = means + sign * square._saved_self.detach()
            spread = log_std.detach().reshape(-1, log_std.shape[-1]).expand_as(means).clone()
            return (
                HeadColumns(means={"action": means}, log_std={"action": spread}),
                actions,
                self._layer_at(parts[own[0]], means.shape[1]),
            )
        return HeadColumns(), None, None

    def _layer_of(self, log_softmax: Node) -> LayerOutputs | None:
        """The outputs of a linear layer below a softmax."""
        return self._layer_at(_children(log_softmax)[0], _shape(log_softmax)[-1])

    def _layer_at(self, node: Node, count: int) -> LayerOutputs | None:
        """The outputs of a linear layer at a node, perhaps only some of the outputs."""
        node, start = self._through_views(node), 0
        while _kind(node) == "SliceBackward0":
            start += _axis(node._saved_start) if _axis(node._saved_dim) in (-1, len(_shape(node)) - 1) else 0
            node = self._through_views(_children(node)[0])
        waiting = [node]
        while waiting:
            node = waiting.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None and leaf.dim() == 2:
                return LayerOutputs(id(leaf), start, start + count)
            if _kind(node) in VIEWS | PROJECTIONS:  # the weight is the last factor
                waiting += [child for child in _children(node) if child is not None]
        return None

    def _is_chosen_from(self, log_probs: Node) -> bool:
        """Return False for log-probabilities that are weights of a mixture: sums with others, and no entry is chosen."""
        waiting = [log_probs]
        while waiting:
            for consumer, _ in self.consumers.get(waiting.pop(), ()):
                if _kind(consumer) in VIEWS:
                    waiting.append(consumer)
                elif _kind(consumer) in INDEXING:
                    return True
        return False

    # a penalty on the divergence from the policy at collection

    def _divergence(self, node: Node) -> int | None:
        """Return the sign with which a term increases a divergence, 0 for log-ratios, whose sign other parts decide; None for other terms.

        Estimates are of log-ratios r: -r, r² and exp(r) - 1 - r (http://joschu.net/blog/kl-approx.html). A divergence has the products
        of probabilities at collection p, or now q, and the difference of their logarithms.
        """
        kind, children = _kind(node), _children(node)
        if any(consumer in self.linear and self._is_log_ratio(consumer) for consumer, _ in self.consumers[node]):
            return 0 if self._is_log_prob(node) else None
        if kind == "LogBackward0" and self._is_exponential(self._through_views(children[0])):
            return 0
        if self._is_exponential(node):
            return 1
        if kind == "PowBackward0" and node._saved_exponent == 2:
            return 1 if self._is_log_ratio(self._through_views(children[0])) else None
        if kind != "MulBackward0":
            return None
        for place, (factor, child) in enumerate(zip((node._saved_other, node._saved_self), children, strict=False)):
            other = children[1 - place]
            below = None if child is None else self._through_views(child)
            if below is None or factor is None or not _are_probabilities(factor):
                continue
            is_difference = self._is_log_ratio(below)
            if other is None and (is_difference or self._is_log_prob(below)):
                first = _kind(below) == "SubBackward0" and _children(below)[0] is None
                return 1 if is_difference and first else -1
            if other is not None and is_difference and EXPONENTIALS & _kinds(other):
                return 1
        return None

    def _is_log_prob(self, node: Node) -> bool:
        """Return True for log-probabilities, of the chosen actions or of all."""
        node = self._without_sign(node)[0]
        while _kind(node) in ("GatherBackward0", "IndexBackward0"):
            node = self._through_views(_children(node)[0])
        return node in self.log_probs or (
            _kind(node) in ("LogSoftmaxBackward0", "LogBackward0", "SubBackward0") and bool(EXPONENTIALS & _kinds(node))
        )

    def _is_log_ratio(self, node: Node) -> bool:
        """Return True for the difference of log-probabilities and as many numbers without a graph."""
        children = _children(node)[:2]
        if _kind(node) not in ("SubBackward0", "AddBackward0") or children.count(None) != 1:
            return False
        return self._is_log_prob(next(child for child in children if child is not None))

    def _is_exponential(self, node: Node) -> bool:
        """Return True for the ratio of probabilities now and at collection, or its inverse."""
        if _kind(node) == "DivBackward0":
            return None in _children(node) and not _is_scaling(node) and bool(EXPONENTIALS & _kinds(node))
        return _kind(node) == "ExpBackward0" and self._is_log_ratio(self._without_sign(_children(node)[0])[0])

    # the critic

    def _value(self, node: Node, gradient: Tensor) -> ValueTerm | None:
        error = self._error(node)
        if error is None:
            return None
        halves = 1 if error.kind == "Huber" else 2  # the rows of a Huber loss have the factor ½
        rows, weight = self.value(node), halves * float(gradient.sum())
        loss = None if rows is None or not weight else (rows * gradient).sum() / weight
        return error._replace(loss=loss, weight=weight)

    def _error(self, node: Node) -> ValueTerm | None:
        """Differences of values and targets: both columns if they are known, and the clip."""
        kind, children = _kind(node), _children(node)
        if kind in EXTREMES:
            errors = [self._error(self._through_views(child)) for child in children if child is not None]
            known = [one for one in errors if one is not None]
            if len(known) != 2:
                return None
            clipped = next((one for one in known if one.clip is not None), None)
            plain = next((one for one in known if one.clip is None), known[0])
            if clipped is None:
                return plain
            values = plain.values if plain.values is not None else clipped.values
            returns = plain.returns if plain.returns is not None else clipped.returns
            return plain._replace(values=values, returns=returns, old_values=clipped.old_values, clip=clipped.clip)
        if kind in ERRORS:
            place = 0 if children[0] is not None else 1
            values, targets = map(
                _without_broadcast, (node._saved_self, node._saved_target)[:: 1 if place == 0 else -1]
            )
            return self._clipped_error(children[place], values, targets, ERRORS[kind])
        square = kind == "PowBackward0" and node._saved_exponent == 2
        product = kind == "MulBackward0" and children[0] is not None and self._same_difference(*children)
        if not (square or product or kind == "AbsBackward0"):
            return None
        subtraction = self._through_views(children[0])
        parts = _children(subtraction) if _kind(subtraction) == "SubBackward0" else []
        own = [place for place, part in enumerate(parts) if part is not None]
        if len(own) != 1:
            return None
        number = node._saved_self.detach()
        difference = number if own[0] == 0 else -number
        values = self.value(parts[own[0]])
        near = self._near(parts[own[0]]) if values is None else None
        returns = None
        if near is not None and near.numel() == number.numel():
            returns = near.reshape(number.shape) - difference
        elif values is not None and values.numel() == number.numel():
            values = values.reshape(number.shape)
            returns = values - difference
        elif values is not None and values.numel() ** 2 == number.numel() and difference.dim() == 2:
            rows = 0 if values.shape[-1:] == (1,) else 1  # [N, 1] less [N], or [N] less [N, 1]
            returns = values.reshape(-1)[0] - difference.select(rows, 0)
        else:
            values = None
        return self._clipped_error(parts[own[0]], values, returns, "squared" if kind != "AbsBackward0" else "absolute")

    def _near(self, node: Node) -> Tensor | None:
        """Values after a clip around others, which the graph does not keep."""
        clipped = self._clipped_error(node, None, None, "squared")
        if clipped.clip is None or clipped.old_values is None or clipped.values is None:
            return None
        return clipped.old_values + (clipped.values - clipped.old_values).clamp(-clipped.clip, clipped.clip)

    def _clipped_error(self, node: Node, values: Tensor | None, returns: Tensor | None, kind: str) -> ValueTerm:
        """Follow clipped values to the unclipped ones: old + clamp(values - old), or clamp(values, old - clip, old + clip)."""
        node = self._through_views(node)
        if (
            _kind(node) == "ClampBackward0"
            and isinstance(node._saved_min, Tensor)
            and isinstance(node._saved_max, Tensor)
        ):
            low, high = node._saved_min.detach(), node._saved_max.detach()
            source, now = _children(node)[0], node._saved_self.detach()
            limit = round(float(high.reshape(-1)[0] - low.reshape(-1)[0]) / 2, 6)
            edge = GradientEdge(source, 0)
            return ValueTerm(_flat(now), _flat(returns), _flat((low + high) / 2), limit, kind, edge)
        parts = [self._through_views(child) for child in _children(node) if child is not None]
        moved = parts[0] if _kind(node) == "AddBackward0" and len(parts) == 1 else None
        if moved is not None and _kind(moved) == "ClampBackward1" and _number(moved._saved_max) is not None:
            below, difference = self._through_views(_children(moved)[0]), moved._saved_self.detach()
            source = _children(below)[0] if _kind(below) == "SubBackward0" else None
            if source is not None:
                now = self.value(source)
                old = None if now is None else now.reshape(difference.shape) - difference
                limit, edge = float(moved._saved_max), GradientEdge(source, 0)
                return ValueTerm(_flat(now), _flat(returns), _flat(old), limit, kind, edge)
        return ValueTerm(_flat(values), _flat(returns), None, None, kind, GradientEdge(node, 0))

    def _same_difference(self, one: Node, other: Node) -> bool:
        """Return True for two factors that are the same difference of values and targets."""
        first, second = self._through_views(one), self._through_views(other) if other is not None else None
        if second is None or _kind(first) != "SubBackward0" or _kind(second) != "SubBackward0":
            return False
        return first is second or _children(first) == _children(second)

    # the entropy

    def _entropy(self, node: Node, gradient: Tensor, *, sampled: bool) -> EntropyTerm | None:
        """The entropy's term; with `sampled` log-probabilities are taken for one."""
        entropies, negated = self.entropies.get(node), False
        if entropies is not None:
            numbers, slopes = entropies, gradient
        elif sampled and node in self.log_probs:  # of the actions taken, instead of the entropy
            numbers, slopes, negated = -self.log_probs[node], -gradient, True
        elif (products := self._plogp(node)) is not None:
            used = gradient != 0  # perhaps only of the chosen actions
            negated = not self._is_negative(node, products)
            numbers, slopes = -products, -gradient if negated else gradient
            if not bool(used.all()):
                numbers, slopes = numbers[used], slopes[used]
        elif any(_kind(one) == "ExpBackward0" for one, _ in self.consumers.get(node, ())) and hasattr(node, "variable"):
            # the logarithm of standard deviations [D], whose sum is the entropy but for a constant
            numbers = node.variable.detach() + GAUSSIAN_ENTROPY
            weight = -float(gradient.mean())
            return EntropyTerm(numbers, -numbers.sum(), weight, None) if weight else None
        else:
            return None
        weight = -float(slopes.sum())
        contribution = (numbers * slopes).sum()
        loss = contribution / weight if weight else -numbers.mean()
        return EntropyTerm(numbers, loss, weight, GradientEdge(node, 0), negated=negated)

    def _joined_entropies(self, node: Node) -> Tensor | None:
        """Entropies of the distributions of several steps, concatenated in the script's shape."""
        parts = [self._entropies_of(child) for child in _children(node)]
        known = [part.reshape(-1) for part in parts if part is not None]
        count = sum(map(len, known))
        whole = len(known) == len(parts) and count == _shape(node).numel()
        return torch.cat(known).reshape(_shape(node)) if whole else None

    def _entropies_of(self, node: Node) -> Tensor | None:
        """Entropies [N] of a distribution over N rows, as torch computes them: of a softmax, or of independent Gaussians."""
        numbers: Tensor
        negative = summed = False
        while len(_children(node)) == 1 and _kind(node) in {"NegBackward0", "SumBackward1", *VIEWS}:
            negative ^= _kind(node) == "NegBackward0"
            summed = summed or _kind(node) == "SumBackward1"
            node = _children(node)[0]
        products = self._plogp(node) if negative and summed else None
        if products is not None and not self._is_negative(node, products):
            numbers = -products
        else:
            logs = [child for child in _children(node) if child is not None and _kind(child) == "LogBackward0"]
            if negative or _kind(node) != "AddBackward0" or len(logs) != 1:
                return None
            numbers = logs[0]._saved_self.detach().log() + GAUSSIAN_ENTROPY
        return numbers.sum(-1) if summed else numbers

    def _is_plogp(self, node: Node) -> bool:
        """Return True for probabilities times their logarithms, of all actions or of the chosen ones."""
        return self._plogp(node) is not None

    def _is_negative(self, node: Node, products: Tensor) -> bool:
        """Return True for a node with -p log p."""
        own = (node._saved_self * node._saved_other).detach()
        return float((own * products.reshape(own.shape)).sum()) < 0

    def _plogp(self, node: Node) -> Tensor | None:
        """Return the products p log p of probabilities and their logarithms, whose negatives a node may have; None for other numbers."""
        if _kind(node) != "MulBackward0":
            return None
        one: Tensor | None = node._saved_self
        other: Tensor | None = node._saved_other
        if one is None or other is None or one.dim() < 1 or one.shape != other.shape:
            return None
        one, other = one.detach(), other.detach()
        for probs, logs in ((one, other), (other, one)):
            if torch.allclose(probs.abs(), logs.exp(), atol=1e-5):
                return probs.abs() * logs
        return None

    # numbers of nodes

    def value(self, node: Node, depth: int = MAX_VALUE_DEPTH) -> Tensor | None:
        """Return the result of an operation from the numbers that the script or the graph keeps."""
        held = self.held.get(node)
        if held is not None or not depth:
            return held

        def operand(place: int) -> Tensor:
            child = _children(node)[place]
            number = None if child is None else self.value(child, depth - 1)
            if number is None and _kind(node) in PRODUCTS:
                number = (node._saved_self, node._saved_other)[place]
            if number is None:
                raise LookupError
            return number

        try:
            return FORWARD[_kind(node)](node, operand).detach()
        except LookupError:  # another operation, or a number that is not kept
            result = getattr(node, "_saved_result", None)
            return result.detach() if isinstance(result, Tensor) else self._kept_by_consumers(node)

    def _kept_by_consumers(self, node: Node) -> Tensor | None:
        for consumer, place in self.consumers[node]:
            names = ("_saved_self", "_saved_other")
            if _kind(consumer) in {"PowBackward0", "ClampBackward1", *PRODUCTS, *EXTREMES}:
                number = getattr(consumer, names[place], None) if place < 2 else None
                if isinstance(number, Tensor):
                    return number.detach()
        return None

    def _through_views(self, node: Node) -> Node:
        while _kind(node) in VIEWS:
            node = _children(node)[0]
        return node

    def _inputs(self, node: Node) -> Tensor | None:
        """Inputs [N, ...] of the first layer below a node."""
        for one in _below(node):
            children = _children(one)
            if _kind(one) == "AddmmBackward0" and children[1] is None:
                rows = one._saved_mat1
            elif _kind(one) in ("ConvolutionBackward0", "MmBackward0") and children[0] is None:
                rows = one._saved_input if _kind(one) == "ConvolutionBackward0" else one._saved_self
            else:
                continue
            return None if rows is None else rows.detach()
        return None


def _without_broadcast(column: Tensor) -> Tensor:
    """Return the entries of a column from before it was broadcast against another one."""
    repeated = [size > 1 and stride == 0 for size, stride in zip(column.shape, column.stride(), strict=True)]
    return column.detach()[tuple([slice(1) if one else slice(None) for one in repeated])]


def _errors(node: Node, _: Operands) -> Tensor:
    """The result of `F.mse_loss` and related functions."""
    reduction = ("none", "mean", "sum")[node._saved_reduction]
    own, target, loss = node._saved_self, node._saved_target, torch.nn.functional
    if _kind(node) == "MseLossBackward0":
        return loss.mse_loss(own, target, reduction=reduction)
    if _kind(node) == "SmoothL1LossBackward0":
        return loss.smooth_l1_loss(own, target, reduction=reduction, beta=node._saved_beta)
    return loss.huber_loss(own, target, reduction=reduction, delta=node._saved_delta)


def _all(node: Node, operand: Operands) -> list[Tensor]:
    return [operand(place) for place in range(len(_children(node)))]


def _layer_output(node: Node, _: Operands) -> Tensor:
    """The result of a linear layer, from its inputs and its parameters."""
    bias, inputs, turned = _children(node)
    leaf, weight = getattr(bias, "variable", None), getattr(_children(turned)[0], "variable", None) if turned else None
    if (inputs is not None and node._saved_mat1 is None) or leaf is None or weight is None:
        raise LookupError
    return torch.nn.functional.linear(node._saved_mat1, weight, leaf)


FORWARD: dict[str, Callable[[Node, Operands], Tensor]] = {
    "AddmmBackward0": _layer_output,
    "MinimumBackward0": lambda node, _: torch.minimum(node._saved_self, node._saved_other),
    "MaximumBackward0": lambda node, _: torch.maximum(node._saved_self, node._saved_other),
    "PowBackward0": lambda node, _: node._saved_self.pow(node._saved_exponent),
    "LogBackward0": lambda node, _: node._saved_self.log(),
    "GatherBackward0": lambda node, _: node._saved_self.gather(_axis(node._saved_dim), node._saved_index),
    "ClampBackward1": lambda node, _: node._saved_self.clamp(_number(node._saved_min), _number(node._saved_max)),
    "StackBackward0": lambda node, operand: torch.stack(_all(node, operand), _axis(node._saved_dim)),
    "CatBackward0": lambda node, operand: torch.cat(_all(node, operand), _axis(node._saved_dim)),
    "NegBackward0": lambda _, operand: -operand(0),
    "AbsBackward0": lambda _, operand: operand(0).abs(),
    "SumBackward1": lambda node, operand: operand(0).sum([*map(_axis, node._saved_dim)], node._saved_keepdim),
    "SelectBackward0": lambda node, operand: operand(0).select(_axis(node._saved_dim), _axis(node._saved_index)),
    "IndexBackward0": lambda node, operand: operand(0)[
        tuple(slice(None) if index is None else index for index in node._saved_indices)
    ],
    "WhereBackward0": lambda node, operand: torch.where(node._saved_condition, operand(0), operand(1)),
    "MulBackward0": lambda _, operand: operand(0) * operand(1),
    "DivBackward0": lambda _, operand: operand(0) / operand(1),
    **dict.fromkeys(ERRORS, _errors),
    **dict.fromkeys(RESHAPES, lambda node, operand: operand(0).reshape(_shape(node))),
}
"""The results of operations, from the tensors that their nodes keep and from their operands; LookupError if one is not known."""


def _of_shape(factor: Tensor, shape: torch.Size) -> Tensor:
    """Return a factor in the shape of the other factor. If several entries multiply one, as in [N, N] times [N], return their mean."""
    whole = torch.broadcast_shapes(shape, factor.shape)
    padded = (1,) * (len(whole) - len(shape)) + shape
    axes = [axis for axis, size in enumerate(padded) if size != whole[axis]]
    factor = factor.expand(whole)
    return factor.mean(axes).reshape(shape) if axes else factor


def _edge(output: Any) -> GradientEdge:
    """The edge of the graph that a tensor is at."""
    return GradientEdge(output.grad_fn, output.output_nr)


def _below(node: Node) -> dict[Node, None]:
    """A node and all nodes below it, the nearest first."""
    found: dict[Node, None] = {node: None}
    waiting = deque([node])
    while waiting and len(found) < MAX_NODES:
        for child in _children(waiting.popleft()):
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return found


def _kinds(node: Node) -> set[str]:
    return {_kind(one) for one in _below(node)}


def _kind(node: Node) -> str:
    return str(node.name())


def _shape(node: Node, number: int = 0) -> torch.Size:
    """The shape of an operation's result."""
    return torch.Size(node._input_metadata[number].shape)


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions]


def _is_scaling(node: Node) -> bool:
    """Return True for a product with a number, or a division by one."""
    if _kind(node) not in ("MulBackward0", "DivBackward0"):
        return False
    children = _children(node)
    if _kind(node) == "DivBackward0" and children[0] is None:
        return False
    if None not in children[:2] and len(children) > 1:
        return False
    factor = node._saved_other if children[0] is not None else node._saved_self
    return factor is None or factor.numel() == 1


def _axis(dim: int) -> int:
    """An axis as torch's graph keeps it: negative ones are counted from 2^64."""
    return dim - (1 << 64) if dim >= 1 << 63 else dim


def _number(bound: object) -> float | None:
    """A bound of a clamp, a number or a tensor with one entry."""
    if isinstance(bound, Tensor):
        return float(bound) if bound.numel() == 1 else None
    return float(bound) if isinstance(bound, int | float) else None


def _is_one_row(error: ValueTerm) -> bool:
    columns = (error.values, error.returns)
    return error.clip is None and all(column is not None and column.numel() == 1 for column in columns)


def _joined_rows(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The rows of several columns as one column; None if one is missing."""
    known = [part for part in parts if part is not None]
    same = len(known) == len(parts) and len({part.shape[1:] for part in known}) == 1
    return torch.cat(known) if same else None


def _are_probabilities(numbers: Tensor) -> bool:
    """Return True for the probabilities of all choices [..., A] of each row."""
    whole = numbers.dim() > 1 and numbers.shape[-1] > 1 and numbers.is_floating_point()
    return whole and bool((numbers >= 0).all()) and bool(((numbers.sum(-1) - 1).abs() < 1e-4).all())


def _as_log_probs(numbers: Tensor | None) -> Tensor | None:
    """Probabilities [N], or densities, as their logarithms; numbers of which some are not positive are logarithms already."""
    if numbers is None:
        return None
    flat = numbers.detach().reshape(-1)
    return flat.log() if bool((flat > 0).all()) else flat


def _flat(column: Tensor | None) -> Tensor | None:
    return None if column is None else column.reshape(-1)
