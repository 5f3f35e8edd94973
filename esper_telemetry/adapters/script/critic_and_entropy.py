"""Finds the critic's term of a loss, errors of its estimates, clipped or not, and the entropy's term, of distributions or of p log p."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from esper_telemetry.adapters.script.autograd_graph import (
    ERRORS,
    EXTREMES,
    JOINTS,
    ROUNDING,
    VIEWS,
    LossGraph,
    Node,
    axis_of,
    children_of,
    edge_of,
    in_order,
    is_scaling,
    joined_rows,
    kind_of,
    number_of,
    shape_of,
    through_views,
)
from esper_telemetry.adapters.script.loss_reading import EntropyTerm, ValueTerm
from esper_telemetry.equations.entropy_loss import GAUSSIAN_ENTROPY

LAYERS = {"AddmmBackward0", "AddmvBackward0"}
ROW_CHOICES = {"SliceBackward0", "SelectBackward0", "IndexBackward0"}
"""Operations that compute a layer's outputs, and that take some of them."""

LARGE_BONUS = 0.1
"""Weight of a mean entropy above which a sum is taken for a mistake: published ones are at most 0.01."""


def critic_term(graph: LossGraph, node: Node, gradient: Tensor) -> ValueTerm | None:
    """Return the critic's term at a node to which the loss has this gradient."""
    error = error_of(graph, node)
    if error is None:
        return None
    halves = 1 if error.kind == "Huber" else 2  # the rows of a Huber loss have the factor ½
    rows, weight = graph.value(node), halves * float(gradient.sum())
    loss = None if rows is None or not weight else (rows * gradient).sum() / weight
    return error._replace(loss=loss, weight=weight)


def error_of(graph: LossGraph, node: Node) -> ValueTerm | None:
    """Differences of values and targets: both columns if they are known, and the clip."""
    kind, children = kind_of(node), children_of(node)
    if kind in EXTREMES:
        errors = [error_of(graph, through_views(child)) for child in children if child is not None]
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
        place, attached = _estimates_of(node)
        values, targets = map(_without_broadcast, (node._saved_self, node._saved_target)[:: 1 if place == 0 else -1])
        return _clipped_error(graph, children[place or 0], values, targets, ERRORS[kind])._replace(attached=attached)
    square = kind == "PowBackward0" and node._saved_exponent == 2
    product = kind == "MulBackward0" and children[0] is not None and _same_difference(graph, *children)
    if not (square or product or kind == "AbsBackward0"):
        return None
    subtraction = through_views(children[0])
    place, attached = _estimates_of(subtraction) if kind_of(subtraction) == "SubBackward0" else (None, None)
    if place is None:
        return None
    number, part = node._saved_self.detach(), children_of(subtraction)[place]
    difference = number if place == 0 else -number
    values = graph.value(part)
    near = _near(graph, part) if values is None else None
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
    error = _clipped_error(graph, part, values, returns, "squared" if kind != "AbsBackward0" else "absolute")
    return error._replace(attached=attached)


def _estimates_of(difference: Node) -> tuple[int | None, GradientEdge | None]:
    """Return which of two operands the critic's estimates are, and the edge of the targets if they have a graph, too.

    Then the estimates are the operand that is a layer's output, perhaps some of its rows; the place is None if both are, or neither is.
    """
    edges = difference.next_functions[:2]
    attached = [place for place, (child, _) in enumerate(edges) if child is not None]
    if len(attached) == 1:
        return attached[0], None
    outputs = [place for place in attached if kind_of(_through_rows(edges[place][0])) in LAYERS]
    return (outputs[0], GradientEdge(*edges[1 - outputs[0]])) if len(outputs) == 1 else (None, None)


def _through_rows(node: Node) -> Node:
    """Return the first node that changes more than the shape and the choice of rows, at or below a node."""
    while kind_of(node) in VIEWS | ROW_CHOICES:
        node = children_of(node)[0]
    return node


def _near(graph: LossGraph, node: Node) -> Tensor | None:
    """Values after a clip around others, which the graph does not keep."""
    clipped = _clipped_error(graph, node, None, None, "squared")
    if clipped.clip is None or clipped.old_values is None or clipped.values is None:
        return None
    return clipped.old_values + (clipped.values - clipped.old_values).clamp(-clipped.clip, clipped.clip)


def _clipped_error(graph: LossGraph, node: Node, values: Tensor | None, returns: Tensor | None, kind: str) -> ValueTerm:
    """Follow clipped values to the unclipped ones: old + clamp(values - old), or clamp(values, old - clip, old + clip)."""
    node = through_views(node)
    if kind_of(node) == "ClampBackward0" and isinstance(node._saved_min, Tensor) and isinstance(node._saved_max, Tensor):
        low, high = node._saved_min.detach(), node._saved_max.detach()
        source, now = children_of(node)[0], node._saved_self.detach()
        limit = round(float(high.reshape(-1)[0] - low.reshape(-1)[0]) / 2, 6)
        edge = GradientEdge(source, 0)
        return ValueTerm(_flat(now), _flat(returns), _flat((low + high) / 2), limit, kind, edge)
    parts = [through_views(child) for child in children_of(node) if child is not None]
    moved = parts[0] if kind_of(node) == "AddBackward0" and len(parts) == 1 else None
    if moved is not None and kind_of(moved) == "ClampBackward1" and number_of(moved._saved_max) is not None:
        below, difference = through_views(children_of(moved)[0]), moved._saved_self.detach()
        source = children_of(below)[0] if kind_of(below) == "SubBackward0" else None
        if source is not None:
            now = graph.value(source)
            old = None if now is None else now.reshape(difference.shape) - difference
            limit, edge = float(moved._saved_max), GradientEdge(source, 0)
            return ValueTerm(_flat(now), _flat(returns), _flat(old), limit, kind, edge)
    return ValueTerm(_flat(values), _flat(returns), None, None, kind, GradientEdge(node, 0))


def _same_difference(graph: LossGraph, one: Node, other: Node) -> bool:
    """Return True for two factors that are the same difference of values and targets."""
    first, second = through_views(one), through_views(other) if other is not None else None
    if second is None or kind_of(first) != "SubBackward0" or kind_of(second) != "SubBackward0":
        return False
    return first is second or children_of(first) == children_of(second)


def critic_of_rows(graph: LossGraph, slopes: Mapping[Node, Tensor]) -> tuple[ValueTerm | None, Collection[Node]]:
    """Return the critic's term of the errors of single rows, if there are several, and their nodes."""
    errors = {node: error_of(graph, node) for node, slope in slopes.items() if slope.numel() == 1}
    known = {node: error for node, error in errors.items() if error is not None and _is_one_row(error)}
    # in the order in which the values were computed
    known = dict(sorted(known.items(), key=lambda one: int(one[1].edge.node._sequence_nr())))
    rows = [graph.value(node) for node in known]
    if len(known) < 2 or any(row is None for row in rows) or len({error.kind for error in known.values()}) > 1:
        return None, known
    first, slope = next(iter(known.values())), torch.stack([slopes[node].reshape(()) for node in known])
    weight = (1 if first.kind == "Huber" else 2) * float(slope.sum())
    if not weight:
        return None, known
    term = first._replace(
        values=joined_rows([error.values for error in known.values()]),
        returns=joined_rows([error.returns for error in known.values()]),
        loss=(torch.stack([row.reshape(()) for row in rows if row is not None]) * slope).sum() / weight,
        weight=weight,
    )
    return term, known


def left_out_values(graph: LossGraph, count: int) -> ValueTerm | None:
    """The critic's estimates of the rows that the loss does not depend on."""
    estimates = [*graph.values, *(one for one in graph.tensors if _joins_estimates(graph, one))]
    unused = [one for one in estimates if one.numel() == count and one.grad_fn not in graph.consumers]
    if not unused or any(one.grad_fn in graph.consumers for one in estimates if one.numel() == count):
        return None
    return ValueTerm(unused[-1].detach().reshape(-1), None, None, None, "squared", edge_of(unused[-1]))


def _joins_estimates(graph: LossGraph, tensor: Tensor) -> bool:
    """Return True for the critic's estimates of several steps, concatenated."""
    own = {one.grad_fn for one in graph.values}
    waiting, visited = [tensor.grad_fn], set[Node]()
    while waiting:
        node = waiting.pop()
        visited.add(node)
        if kind_of(node) in JOINTS | VIEWS:
            waiting += [child for child in children_of(node) if child is not None]
        elif node not in own and not (kind_of(node) == "AddmmBackward0" and shape_of(node)[-1] == 1):
            return False
    return len(visited) > 1 and not own.isdisjoint(visited)


def _is_one_row(error: ValueTerm) -> bool:
    columns = (error.values, error.returns)
    return error.clip is None and all(column is not None and column.numel() == 1 for column in columns)


def _without_broadcast(column: Tensor) -> Tensor:
    """Return the entries of a column from before it was broadcast against another one."""
    repeated = [size > 1 and stride == 0 for size, stride in zip(column.shape, column.stride(), strict=True)]
    return column.detach()[tuple([slice(1) if one else slice(None) for one in repeated])]


def _flat(column: Tensor | None) -> Tensor | None:
    return None if column is None else column.reshape(-1)


def entropy_term(graph: LossGraph, node: Node, gradient: Tensor, *, sampled: bool) -> EntropyTerm | None:
    """The entropy's term; with `sampled` log-probabilities are taken for one."""
    entropies, negated = graph.entropies.get(node), False
    if entropies is not None:
        numbers, slopes = entropies, gradient
    elif sampled and node in graph.log_probs:  # of the actions taken, instead of the entropy
        numbers, slopes, negated = -graph.log_probs[node], -gradient, True
    elif (products := plogp(graph, node)) is not None:
        used = gradient != 0  # perhaps only of the chosen actions
        negated = not _is_negative(graph, node, products)
        numbers, slopes = -products, -gradient if negated else gradient
        if not bool(used.all()):
            numbers, slopes = numbers[used], slopes[used]
    elif any(kind_of(one) == "ExpBackward0" for one, _ in graph.consumers.get(node, ())) and hasattr(node, "variable"):
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


def factor_of_sum(graph: LossGraph, node: Node, rows: int) -> float | None:
    """Return the number by which the loss multiplies a sum over so many rows; None if it takes their mean."""
    factor, summed = 1.0, False
    while len(consumers := graph.consumers.get(node, [])) == 1:
        ((consumer, place),) = consumers
        kind, shape = kind_of(consumer), shape_of(node)
        if kind in ("SumBackward0", "SumBackward1"):
            axes = [*map(axis_of, consumer._saved_dim)] if kind == "SumBackward1" else range(len(shape))
            summed |= math.prod(shape[axis] for axis in axes) % rows == 0
        elif is_scaling(consumer):
            number = number_of(consumer._saved_other if place == 0 else consumer._saved_self)
            if not number:
                return None
            scale = 1 / number if kind == "DivBackward0" else number
            summed &= not math.isclose(abs(scale) * rows, 1, rel_tol=ROUNDING)
            factor *= scale
        elif kind in ("SubBackward0", "AddBackward0") and place == 1:
            factor *= float(consumer._saved_alpha)
        node = consumer
    return abs(factor) if summed and abs(factor) * rows > LARGE_BONUS else None


def joined_entropies(graph: LossGraph, node: Node) -> Tensor | None:
    """Entropies of the distributions of several steps, concatenated in the script's shape."""
    parts = [_entropies_of(graph, child) for child in children_of(node)]
    known = [part.reshape(-1) for part in parts if part is not None]
    count = sum(map(len, known))
    whole = len(known) == len(parts) and count == shape_of(node).numel()
    return torch.cat(known).reshape(shape_of(node)) if whole else None


def _entropies_of(graph: LossGraph, node: Node) -> Tensor | None:
    """Entropies [N] of a distribution over N rows, as torch computes them: of a softmax, or of independent Gaussians."""
    numbers: Tensor
    negative = summed = False
    while len(children_of(node)) == 1 and kind_of(node) in {"NegBackward0", "SumBackward1", *VIEWS}:
        negative ^= kind_of(node) == "NegBackward0"
        summed = summed or kind_of(node) == "SumBackward1"
        node = children_of(node)[0]
    products = plogp(graph, node) if negative and summed else None
    if products is not None and not _is_negative(graph, node, products):
        numbers = -products
    else:
        logs = [child for child in children_of(node) if child is not None and kind_of(child) == "LogBackward0"]
        if negative or kind_of(node) != "AddBackward0" or len(logs) != 1:
            return None
        numbers = logs[0]._saved_self.detach().log() + GAUSSIAN_ENTROPY
    return numbers.sum(-1) if summed else numbers


def _is_negative(graph: LossGraph, node: Node, products: Tensor) -> bool:
    """Return True for a node with -p log p."""
    own = (node._saved_self * node._saved_other).detach()
    return float((own * products.reshape(own.shape)).sum()) < 0


def plogp(graph: LossGraph, node: Node) -> Tensor | None:
    """Return the products p log p of probabilities and their logarithms, whose negatives a node may have; None for other numbers."""
    if kind_of(node) != "MulBackward0":
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


def left_out_entropy(graph: LossGraph, count: int) -> EntropyTerm | None:
    """The entropies of the rows that the loss does not depend on, from the last distribution."""
    unused = [one for one in graph.outputs.entropies if one.dim() and len(one) == count]
    if len(unused) != 1 or unused[0].grad_fn in graph.consumers:
        return None
    entropies = unused[0].detach()
    return EntropyTerm(entropies, -entropies.sum() / count, 0.0, edge_of(unused[0]))


def entropy_of_rows(graph: LossGraph, slopes: Mapping[Node, Tensor], count: int) -> tuple[EntropyTerm | None, Collection[Node]]:
    """Return the entropy's term of the products of probabilities and their logarithms of so many single rows, and their nodes."""
    single = (node for node, slope in slopes.items() if slope.dim() == 1 or (slope.dim() == 2 and len(slope) == 1))
    known = {node: products.reshape(-1) for node in in_order(single) if (products := plogp(graph, node)) is not None}
    if not known or len(known) != count:
        return None, known
    products = torch.stack([*known.values()])
    numbers, sign = -products, 1 if _is_negative(graph, next(iter(known)), products[0]) else -1
    slope = sign * torch.stack([slopes[node].reshape(-1) for node in known])
    weight = -float(slope.sum())
    return EntropyTerm(numbers, (numbers * slope).sum() / weight, weight, None) if weight else None, known
