"""Finds the critic's term of a loss: errors of its estimates, clipped or not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from esper_telemetry.adapters.script.autograd_graph import (
    ERRORS,
    EXTREMES,
    JOINTS,
    VIEWS,
    LossGraph,
    Node,
    children_of,
    edge_of,
    joined_rows,
    kind_of,
    number_of,
    shape_of,
)
from esper_telemetry.adapters.script.loss_reading import ValueTerm


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
        errors = [error_of(graph, graph.through_views(child)) for child in children if child is not None]
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
        values, targets = map(_without_broadcast, (node._saved_self, node._saved_target)[:: 1 if place == 0 else -1])
        return _clipped_error(graph, children[place], values, targets, ERRORS[kind])
    square = kind == "PowBackward0" and node._saved_exponent == 2
    product = kind == "MulBackward0" and children[0] is not None and _same_difference(graph, *children)
    if not (square or product or kind == "AbsBackward0"):
        return None
    subtraction = graph.through_views(children[0])
    parts = children_of(subtraction) if kind_of(subtraction) == "SubBackward0" else []
    own = [place for place, part in enumerate(parts) if part is not None]
    if len(own) != 1:
        return None
    number = node._saved_self.detach()
    difference = number if own[0] == 0 else -number
    values = graph.value(parts[own[0]])
    near = _near(graph, parts[own[0]]) if values is None else None
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
    return _clipped_error(graph, parts[own[0]], values, returns, "squared" if kind != "AbsBackward0" else "absolute")


def _near(graph: LossGraph, node: Node) -> Tensor | None:
    """Values after a clip around others, which the graph does not keep."""
    clipped = _clipped_error(graph, node, None, None, "squared")
    if clipped.clip is None or clipped.old_values is None or clipped.values is None:
        return None
    return clipped.old_values + (clipped.values - clipped.old_values).clamp(-clipped.clip, clipped.clip)


def _clipped_error(graph: LossGraph, node: Node, values: Tensor | None, returns: Tensor | None, kind: str) -> ValueTerm:
    """Follow clipped values to the unclipped ones: old + clamp(values - old), or clamp(values, old - clip, old + clip)."""
    node = graph.through_views(node)
    if kind_of(node) == "ClampBackward0" and isinstance(node._saved_min, Tensor) and isinstance(node._saved_max, Tensor):
        low, high = node._saved_min.detach(), node._saved_max.detach()
        source, now = children_of(node)[0], node._saved_self.detach()
        limit = round(float(high.reshape(-1)[0] - low.reshape(-1)[0]) / 2, 6)
        edge = GradientEdge(source, 0)
        return ValueTerm(_flat(now), _flat(returns), _flat((low + high) / 2), limit, kind, edge)
    parts = [graph.through_views(child) for child in children_of(node) if child is not None]
    moved = parts[0] if kind_of(node) == "AddBackward0" and len(parts) == 1 else None
    if moved is not None and kind_of(moved) == "ClampBackward1" and number_of(moved._saved_max) is not None:
        below, difference = graph.through_views(children_of(moved)[0]), moved._saved_self.detach()
        source = children_of(below)[0] if kind_of(below) == "SubBackward0" else None
        if source is not None:
            now = graph.value(source)
            old = None if now is None else now.reshape(difference.shape) - difference
            limit, edge = float(moved._saved_max), GradientEdge(source, 0)
            return ValueTerm(_flat(now), _flat(returns), _flat(old), limit, kind, edge)
    return ValueTerm(_flat(values), _flat(returns), None, None, kind, GradientEdge(node, 0))


def _same_difference(graph: LossGraph, one: Node, other: Node) -> bool:
    """Return True for two factors that are the same difference of values and targets."""
    first, second = graph.through_views(one), graph.through_views(other) if other is not None else None
    if second is None or kind_of(first) != "SubBackward0" or kind_of(second) != "SubBackward0":
        return False
    return first is second or children_of(first) == children_of(second)


def row_errors(graph: LossGraph, slopes: Mapping[Node, Tensor]) -> dict[Node, ValueTerm]:
    """Return the critic's errors of single rows, in the order in which the values were computed."""
    errors = {node: error_of(graph, node) for node, slope in slopes.items() if slope.numel() == 1}
    known = {node: error for node, error in errors.items() if error is not None and _is_one_row(error)}
    return dict(sorted(known.items(), key=lambda one: int(one[1].edge.node._sequence_nr())))


def critic_of_rows(graph: LossGraph, errors: Mapping[Node, ValueTerm], slopes: Mapping[Node, Tensor]) -> ValueTerm | None:
    """The critic's term of the errors of single rows."""
    first = next(iter(errors.values()))
    rows = [graph.value(node) for node in errors]
    slope = torch.stack([slopes[node].reshape(()) for node in errors])
    weight = (1 if first.kind == "Huber" else 2) * float(slope.sum())
    if not weight or any(row is None for row in rows) or len({error.kind for error in errors.values()}) > 1:
        return None
    return first._replace(
        values=joined_rows([error.values for error in errors.values()]),
        returns=joined_rows([error.returns for error in errors.values()]),
        loss=(torch.stack([row.reshape(()) for row in rows if row is not None]) * slope).sum() / weight,
        weight=weight,
    )


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
