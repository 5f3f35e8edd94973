"""Graphs of losses: nodes, what their operations computed, and which tensors of the script they are of.

Shapes: N rows of the minibatch, A actions, D action dimensions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import functional

from esper_telemetry.adapters.script.variables import Variables
from esper_telemetry.updates.failure import Candidate, place_of, user_frames

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

RESHAPES = {
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1"),
    *("SqueezeBackward2", "UnsqueezeBackward0", "CloneBackward0", "AliasBackward0", "ToCopyBackward0"),
}

MIN_CELL_STEPS = 4
"""Steps of a recurrent cell in a loss that make a sequence: fewer may be several losses of single steps."""

VIEWS = {*RESHAPES, "ExpandBackward0", "TransposeBackward0", "PermuteBackward0"}
"""Operations that change only the shape of their input, not its entries; after `RESHAPES` the entries are in the same order."""

JOINTS = {"StackBackward0", "CatBackward0"}

SUMS = {"AddBackward0", "SubBackward0", "RsubBackward1", "NegBackward0", "MeanBackward0", "MeanBackward1"}
SUMS |= {"SumBackward0", "SumBackward1", "IndexBackward0", "SelectBackward0", *JOINTS, *VIEWS}
SUMS |= {"MaskedFillBackward0", "MaskedSelectBackward0", "IndexPutBackward0"}
"""Operations that are linear in all their inputs with a graph."""

EXPONENTIALS = {"ExpBackward0", "SoftmaxBackward0", "LogSoftmaxBackward0", "LogsumexpBackward0", "LogBackward0"}
"""Operations that probabilities come from."""

SOFTMAXES = {"LogSoftmaxBackward0", "SoftmaxBackward0"}
"""Operations from whose results scripts choose probabilities of actions, or logarithms of them."""

NORMALISERS = {*SOFTMAXES, "LogsumexpBackward0"}
"""Operations that normalise logits; `Categorical` subtracts their logsumexp."""

ERRORS = {"MseLossBackward0": "squared", "SmoothL1LossBackward0": "Huber", "HuberLossBackward0": "Huber"}

EXTREMES = {"MinimumBackward0", "MaximumBackward0"}

PRODUCTS = {"MulBackward0", "DivBackward0"}

PROJECTIONS = {"AddmmBackward0", "MmBackward0", "AddmvBackward0", "MvBackward0", "TBackward0", "AddBackward0"}
"""Operations between the outputs of a linear layer and its weight."""

SAME_LINE = 1e-5
"""Largest difference of two columns that are the same up to a factor and an offset, next to the largest entry."""


class DistributionGraphs(NamedTuple):
    """Log-probabilities and entropies that distributions have returned, with graphs."""

    log_probs: Sequence[Tensor]
    entropies: Sequence[Tensor]


NO_OUTPUTS = DistributionGraphs((), ())


class LayerOutputs(NamedTuple):
    """Outputs `start` to `stop` of the layer whose weight has this `id`."""

    weight: int
    start: int
    stop: int


class LossGraph:
    """The graph of a loss, and the tensors with graphs that a script holds.

    Attributes:
        consumers: of each node, the nodes that take its result, and which operand it is of theirs.
        linear: nodes between the loss and its terms.
        held: results of nodes that the script holds.
        tensors, columns: what it holds; columns have more than one entry.
        entropies, log_probs: of its distributions.
        values: the critic's estimates.
    """

    def __init__(
        self, loss: Tensor, nodes: Iterable[Node], held: Sequence[Tensor], outputs: DistributionGraphs, values: Sequence[Tensor]
    ) -> None:
        self.loss, self.outputs, self.values = loss, outputs, values
        self.consumers: dict[Node, list[tuple[Node, int]]] = {node: [] for node in nodes}
        for node in self.consumers:
            for place, child in enumerate(children_of(node)):
                if child in self.consumers:
                    self.consumers[child].append((node, place))
        self.linear = set[Node]()
        self.held = {one.grad_fn: one.detach() for one in held if one.grad_fn in self.consumers}
        self.tensors = [one for one in held if one.grad_fn is not None]
        self.columns = [one for one in held if one.numel() > 1]
        self.entropies = {one.grad_fn: one.detach() for one in outputs.entropies if one.grad_fn in self.consumers}
        self.log_probs = {one.grad_fn: one.detach() for one in outputs.log_probs if one.grad_fn in self.consumers}

    def value(self, node: Node, depth: int = MAX_VALUE_DEPTH) -> Tensor | None:
        """Return the result of an operation from the numbers that the script or the graph keeps."""
        held = self.held.get(node)
        if held is not None or not depth:
            return held

        def operand(place: int) -> Tensor:
            child = children_of(node)[place]
            number = None if child is None else self.value(child, depth - 1)
            if number is None and kind_of(node) in PRODUCTS:
                number = (node._saved_self, node._saved_other)[place]
            if number is None:
                raise LookupError
            return number

        try:
            return FORWARD[kind_of(node)](node, operand).detach()
        except LookupError:  # another operation, or a number that is not kept
            result = getattr(node, "_saved_result", None)
            return result.detach() if isinstance(result, Tensor) else self._kept_by_consumers(node)

    def _kept_by_consumers(self, node: Node) -> Tensor | None:
        for consumer, place in self.consumers[node]:
            names = ("_saved_self", "_saved_other")
            if kind_of(consumer) in {"PowBackward0", "ClampBackward1", *PRODUCTS, *EXTREMES}:
                number = getattr(consumer, names[place], None) if place < 2 else None
                if isinstance(number, Tensor):
                    return number.detach()
        return None

    def inputs(self, node: Node) -> Tensor | None:
        """Inputs [N, ...] of the first layer below a node."""
        for one in nodes_below(node):
            children = children_of(one)
            if kind_of(one) == "AddmmBackward0" and children[1] is None:
                rows = one._saved_mat1
            elif kind_of(one) in ("ConvolutionBackward0", "MmBackward0") and children[0] is None:
                rows = one._saved_input if kind_of(one) == "ConvolutionBackward0" else one._saved_self
            else:
                continue
            return None if rows is None else rows.detach()
        return None

    def layer_at(self, node: Node, count: int) -> LayerOutputs | None:
        """The outputs of a linear layer at a node, perhaps only some of the outputs."""
        node, start = through_views(node), 0
        while kind_of(node) == "SliceBackward0":
            start += axis_of(node._saved_start) if axis_of(node._saved_dim) in (-1, len(shape_of(node)) - 1) else 0
            node = through_views(children_of(node)[0])
        waiting = [node]
        while waiting:
            node = waiting.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None and leaf.dim() == 2:
                return LayerOutputs(id(leaf), start, start + count)
            if kind_of(node) in VIEWS | PROJECTIONS:  # the weight is the last factor
                waiting += [child for child in children_of(node) if child is not None]
        return None


def graph_of(output: Tensor) -> Collection[Node]:
    """Return the nodes of the graph of an output, the nearest first; empty without one."""
    return {} if output.grad_fn is None else nodes_below(output.grad_fn)


def detaches_states(graph: Iterable[Node], weights: Collection[int]) -> bool:
    """Return whether a graph has many steps of recurrent cells, and no gradient flows to the state of any of them.

    `weights` are of the states, by `id`.
    """
    uses = 0
    for node in graph:
        if kind_of(node) in ("AddmmBackward0", "MmBackward0"):
            state, leaf = children_of(node)[-2:]
            while leaf is not None and kind_of(leaf) in VIEWS | {"TBackward0"}:
                leaf = children_of(leaf)[0]
            if leaf is not None and id(getattr(leaf, "variable", None)) in weights:
                if state is not None:
                    return False
                uses += 1
    return uses >= MIN_CELL_STEPS


def takes_softmax_twice(graph: Iterable[Node]) -> bool:
    """Return whether a softmax in the graph of a loss is taken of the outputs of another one: probabilities were passed as logits."""
    for node in graph:
        child = children_of(node)[0] if kind_of(node) in NORMALISERS else None
        if child is not None and kind_of(through_views(child)) == "SoftmaxBackward0":
            return True
    return False


def leaves_in(nodes: Iterable[Node]) -> list[Tensor]:
    """Return the leaves among nodes of a graph."""
    return [one.variable for one in nodes if hasattr(one, "variable")]


def _all(node: Node, operand: Operands) -> list[Tensor]:
    return [operand(place) for place in range(len(children_of(node)))]


def _layer_output(node: Node, _: Operands) -> Tensor:
    bias, inputs, turned = children_of(node)
    leaf, weight = (getattr(bias, "variable", None), getattr(children_of(turned)[0], "variable", None) if turned else None)
    if (inputs is not None and node._saved_mat1 is None) or leaf is None or weight is None:
        raise LookupError
    return functional.linear(node._saved_mat1, weight, leaf)


REDUCTIONS = ("none", "mean", "sum")  # by the numbers in nodes


def _loss(function: Callable[..., Tensor], *options: str) -> Callable[[Node, Operands], Tensor]:
    """Return how the result of a loss function of torch is computed from a node, which keeps the options with these names."""

    def computed(node: Node, _: Operands) -> Tensor:
        saved = {name: getattr(node, f"_saved_{name}") for name in options}
        saved |= {"ignore_index": axis_of(saved["ignore_index"])} if "ignore_index" in saved else {}
        return function(node._saved_self, node._saved_target, reduction=REDUCTIONS[node._saved_reduction], **saved)

    return computed


def _sliced(node: Node, whole: Tensor) -> Tensor:
    axis, bounds = axis_of(node._saved_dim), (node._saved_start, node._saved_end, node._saved_step)
    rows = slice(*[None if bound is None else axis_of(bound) for bound in bounds])
    return whole.movedim(axis, 0)[rows].movedim(0, axis)


NEGATIVE_LIKELIHOODS: dict[str, Callable[[Node, Operands], Tensor]] = {
    **dict.fromkeys(("NllLossBackward0", "NllLoss2DBackward0"), _loss(functional.nll_loss, "weight", "ignore_index")),
    "BinaryCrossEntropyBackward0": _loss(functional.binary_cross_entropy, "weight"),
    "BinaryCrossEntropyWithLogitsBackward0": _loss(functional.binary_cross_entropy_with_logits, "weight", "pos_weight"),
}
"""Operations whose results are negative log-probabilities."""

FORWARD: dict[str, Callable[[Node, Operands], Tensor]] = {
    "AddmmBackward0": _layer_output,
    "MinimumBackward0": lambda node, _: torch.minimum(node._saved_self, node._saved_other),
    "MaximumBackward0": lambda node, _: torch.maximum(node._saved_self, node._saved_other),
    "PowBackward0": lambda node, _: node._saved_self.pow(node._saved_exponent),
    "LogBackward0": lambda node, _: node._saved_self.log(),
    "GatherBackward0": lambda node, _: node._saved_self.gather(axis_of(node._saved_dim), node._saved_index),
    "ClampBackward1": lambda node, _: node._saved_self.clamp(number_of(node._saved_min), number_of(node._saved_max)),
    "StackBackward0": lambda node, operand: torch.stack(_all(node, operand), axis_of(node._saved_dim)),
    "CatBackward0": lambda node, operand: torch.cat(_all(node, operand), axis_of(node._saved_dim)),
    "NegBackward0": lambda _, operand: -operand(0),
    "AbsBackward0": lambda _, operand: operand(0).abs(),
    "SumBackward1": lambda node, operand: operand(0).sum([*map(axis_of, node._saved_dim)], node._saved_keepdim),
    "SelectBackward0": lambda node, operand: operand(0).select(axis_of(node._saved_dim), axis_of(node._saved_index)),
    "SliceBackward0": lambda node, operand: _sliced(node, operand(0)),
    "IndexBackward0": lambda node, operand: operand(0)[tuple(slice(None) if index is None else index for index in node._saved_indices)],
    "WhereBackward0": lambda node, operand: torch.where(node._saved_condition, operand(0), operand(1)),
    "MulBackward0": lambda _, operand: operand(0) * operand(1),
    "DivBackward0": lambda _, operand: operand(0) / operand(1),
    **NEGATIVE_LIKELIHOODS,
    "MseLossBackward0": _loss(functional.mse_loss),
    "SmoothL1LossBackward0": _loss(functional.smooth_l1_loss, "beta"),
    "HuberLossBackward0": _loss(functional.huber_loss, "delta"),
    **dict.fromkeys(RESHAPES, lambda node, operand: operand(0).reshape(shape_of(node))),
}
"""The results of operations, from the tensors that their nodes keep and from their operands; LookupError if one is not known."""

UNBOUNDED: dict[str, tuple[str, Callable[[Node, Sequence[Tensor | None]], Tensor]]] = {
    "LogBackward0": ("the logarithm of", lambda node, _: node._saved_self.log()),
    "Log1PBackward0": ("the logarithm of 1 +", lambda node, _: node._saved_self.log1p()),
    "SqrtBackward0": ("the root of", lambda node, _: node._saved_result),
    "ExpBackward0": ("the exponential of", lambda node, _: node._saved_result),
    "PowBackward0": ("a power of", lambda node, _: node._saved_self.pow(node._saved_exponent)),
    "AtanhBackward0": ("the inverse tanh of", lambda node, _: node._saved_self.atanh()),
    "SoftmaxBackward0": ("a softmax of", lambda node, _: node._saved_result),
    "LogSoftmaxBackward0": ("a softmax of", lambda node, _: node._saved_result),
    "StdBackward0": ("a standard deviation of", lambda node, _: node._saved_result),
    "MulBackward0": ("a product of", lambda _, both: both[0] * both[1]),  # type: ignore[operator]
    "DivBackward0": ("a quotient of", lambda _, both: both[0] / both[1]),  # type: ignore[operator, arg-type]
}
"""Operations whose results may not be finite although their operands are: words, and the result from the node and its operands."""


def nonfinite_result(loss: Tensor, nodes: Collection[Node], variables: Variables) -> Candidate | None:
    """Return the first result of an operation in the graph of a loss that is not finite, with the variables around it."""
    if not nodes:
        return None
    held = list(variables.tensors())
    graph = LossGraph(loss, nodes, held, NO_OUTPUTS, ())
    operation = nonfinite_operation(graph)
    if operation is None and all(one.requires_grad or bool(one.isfinite().all()) for one in held):  # else a variable says more
        operation = nonfinite_operation(graph, given=True)
    if operation is None:
        return None
    node, result = operation
    above = dict[Node, None]()
    waiting = deque([node])
    while waiting:
        for consumer, _ in graph.consumers.get(waiting.popleft(), ()):
            if consumer not in above:
                above[consumer] = None
                waiting.append(consumer)
    own = {value.grad_fn: name for name, value in variables.named_values() if isinstance(value, Tensor) and value.grad_fn is not None}
    near = [next((own[one] for one in nearest if one in own), "") for nearest in (nodes_below(node), above)]
    places = [f" ({place})" if name and (place := place_of(name, user_frames())) else "" for name in near]
    texts = [f"{word} `{name}`{place}" for word, name, place in zip(("computed from", "for"), near, places, strict=True) if name]
    return Candidate(in_words(graph, node, result), result.clone(), made=" ".join(texts))


def nonfinite_operation(graph: LossGraph, *, given: bool = False) -> tuple[Node, Tensor] | None:
    """Return the first operation with a NaN result, otherwise the first one with an infinite result, and it; None if it is not known.

    With `given`, return the first one that has such an operand, which no operation made.
    """
    infinite: tuple[Node, Tensor] | None = None
    for node in in_order(node for node in graph.consumers if kind_of(node) in UNBOUNDED):
        operands = _operands(graph, node)
        try:
            result = UNBOUNDED[kind_of(node)][1](node, operands).detach()
        except TypeError:  # an operand is not known
            continue
        if given and any(one is not None and not bool(one.isfinite().all()) for one in operands):
            return node, result
        if any(one is not None and bool(one.isnan().any()) for one in operands):
            continue
        if bool(result.isnan().any()):
            return node, result
        is_new = all(one is None or not bool(one.isinf().any()) for one in operands)
        if infinite is None and is_new and bool(result.isinf().any()):
            infinite = node, result
    return infinite


def _operands(graph: LossGraph, node: Node) -> list[Tensor | None]:
    """Return the numbers of the first two operands of an operation, None for those that are not known."""
    children = [*children_of(node), None, None]
    saved = [getattr(node, name, None) for name in ("_saved_self", "_saved_other")]
    known = [one if child is None or isinstance(one, Tensor) else graph.value(child) for child, one in zip(children, saved, strict=False)]
    return [one.detach() if isinstance(one, Tensor) else None for one in known]


def in_words(graph: LossGraph, node: Node, result: Tensor) -> str:
    """Return an operation with the operands of its first entry that is NaN, or infinite without any, as "a product of 0 and 1"."""
    wrong = result.isnan() if bool(result.isnan().any()) else result.isinf()
    parts = []
    for child, numbers in zip([*children_of(node), None], _operands(graph, node), strict=False):
        if numbers is None:
            continue
        number = float(numbers.expand_as(wrong)[wrong].flatten()[0]) if numbers.dim() <= wrong.dim() else float("nan")
        below = None if child is None else through_views(child)
        is_log = below is not None and kind_of(below) == "LogBackward0" and number == float("-inf")
        parts.append("the logarithm of 0" if is_log else f"{number:.6g}")
    return f"{UNBOUNDED[kind_of(node)][0]} {' and '.join(parts) or 'numbers without a finite result'}"


def edge_of(output: Any) -> GradientEdge:
    """The edge of the graph that a tensor is at."""
    return GradientEdge(output.grad_fn, output.output_nr)


def nodes_below(node: Node) -> dict[Node, None]:
    """A node and all nodes below it, the nearest first."""
    found: dict[Node, None] = {node: None}
    waiting = deque([node])
    while waiting and len(found) < MAX_NODES:
        for child in children_of(waiting.popleft()):
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return found


def through_views(node: Node) -> Node:
    """Return the first node that changes more than the shape, at or below a node."""
    while kind_of(node) in VIEWS:
        node = children_of(node)[0]
    return node


def without_sign(node: Node) -> tuple[Node, bool]:
    """Return the node below negations and views, and whether the number of negations is odd."""
    negative, node = False, through_views(node)
    while kind_of(node) == "NegBackward0":
        negative, node = not negative, through_views(children_of(node)[0])
    return node, negative


def in_order(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes in the order in which the script computed their results."""
    return sorted(nodes, key=lambda node: int(node._sequence_nr()))


def kinds_below(node: Node) -> set[str]:
    """Return the names of the operations at and below a node."""
    return {kind_of(one) for one in nodes_below(node)}


def kind_of(node: Node) -> str:
    """Return the name of a node's operation."""
    return str(node.name())


def shape_of(node: Node) -> torch.Size:
    """The shape of an operation's result."""
    return torch.Size(node._input_metadata[0].shape)


def children_of(node: Node) -> list[Node]:
    """Return the nodes of an operation's inputs; None for numbers without a graph."""
    return [child for child, _ in node.next_functions]


def is_scaling(node: Node) -> bool:
    """Return True for a product with a number, or a division by one."""
    if kind_of(node) not in ("MulBackward0", "DivBackward0"):
        return False
    children = children_of(node)
    if kind_of(node) == "DivBackward0" and children[0] is None:
        return False
    if None not in children[:2] and len(children) > 1:
        return False
    factor = node._saved_other if children[0] is not None else node._saved_self
    return factor is None or factor.numel() == 1


def axis_of(dim: int) -> int:
    """An axis as torch's graph keeps it: negative ones are counted from 2^64."""
    return dim - (1 << 64) if dim >= 1 << 63 else dim


def number_of(bound: object) -> float | None:
    """A bound of a clamp, a number or a tensor with one entry."""
    if isinstance(bound, Tensor):
        return float(bound) if bound.numel() == 1 else None
    return float(bound) if isinstance(bound, int | float) else None


def joined_rows(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The rows of several columns as one column; None if one is missing."""
    known = [part for part in parts if part is not None]
    same = len(known) == len(parts) and len({part.shape[1:] for part in known}) == 1
    return torch.cat(known) if same else None


def line_error(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two arrays up to a positive factor and an offset, next to the largest entry of `other`.

    Correlations do not distinguish arrays whose difference is small.
    """
    first, second = (part.double().reshape(-1) for part in (one, other))
    first, second = first - first.mean(), second - second.mean()
    slope = (first @ second) / first.square().sum()
    error = (second - slope * first).abs().max() / second.abs().max()
    return float(torch.where((slope > 0) & error.isfinite(), error, torch.inf))
