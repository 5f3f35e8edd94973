"""Finds the entropy's term of a loss, from distributions or from probabilities times their logarithms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from esper_telemetry.adapters.script.autograd_graph import (
    ROUNDING,
    VIEWS,
    LossGraph,
    Node,
    axis_of,
    children_of,
    edge_of,
    is_scaling,
    kind_of,
    number_of,
    shape_of,
)
from esper_telemetry.adapters.script.loss_reading import EntropyTerm
from esper_telemetry.equations.entropy_loss import GAUSSIAN_ENTROPY


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


LARGE_BONUS = 0.1
"""Weight of a mean entropy above which a sum is taken for a mistake: published ones are at most 0.01."""


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


def row_entropies(graph: LossGraph, slopes: Mapping[Node, Tensor]) -> list[Node]:
    """Return the products of probabilities and their logarithms of single rows."""
    single = (node for node, slope in slopes.items() if slope.dim() == 1 or (slope.dim() == 2 and len(slope) == 1))
    return graph.in_order(node for node in single if plogp(graph, node) is not None)


def entropy_of_rows(graph: LossGraph, nodes: Sequence[Node], slopes: Mapping[Node, Tensor]) -> EntropyTerm | None:
    """The entropy's term of the products of single rows."""
    products = torch.stack([plogp(graph, node).reshape(-1) for node in nodes])  # type: ignore[union-attr]  # they are such
    numbers, sign = -products, 1 if _is_negative(graph, nodes[0], products[0]) else -1
    slope = sign * torch.stack([slopes[node].reshape(-1) for node in nodes])
    weight = -float(slope.sum())
    return EntropyTerm(numbers, (numbers * slope).sum() / weight, weight, None) if weight else None
