"""Finds the policy's term of a loss: products of advantages and ratios, or of weights and log-probabilities.

Shapes: N rows of the minibatch, A actions, D action dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from esper_telemetry.adapters.columns import HEAD, HeadColumns
from esper_telemetry.adapters.script.autograd_graph import (
    EXPONENTIALS,
    EXTREMES,
    NEGATIVE_LIKELIHOODS,
    ROUNDING,
    SAME_LINE,
    SOFTMAXES,
    SUMS,
    VIEWS,
    LayerOutputs,
    LossGraph,
    Node,
    children_of,
    is_scaling,
    joined_rows,
    kind_of,
    kinds_below,
    line_error,
    nodes_below,
    number_of,
    shape_of,
    through_views,
    without_sign,
)
from esper_telemetry.adapters.script.critic_and_entropy import error_of
from esper_telemetry.adapters.script.loss_reading import PolicyTerm

PAIRS_ERROR = 1e-4  # of log-ratios whose rows differ by those of the new log-probabilities

MIN_SUMMED_ROWS = 4
"""Rows above which a slope of 1 for each row shows a sum, not a mean with a weight."""


LOG_PROBABILITIES = {"LogSoftmaxBackward0", "LogsumexpBackward0", "LogBackward0", "PowBackward0", *NEGATIVE_LIKELIHOODS}
"""Operations below log-probabilities: chosen from logarithms, or of a Gaussian."""


INDEXING = {"GatherBackward0", "IndexBackward0", "SelectBackward0", "NllLossBackward0", "MulBackward0"}
"""Operations by which scripts choose the log-probabilities of actions: by index, or times vectors of 0 and 1."""


FOLLOWED = {*EXTREMES, *SUMS, "WhereBackward0", "StackBackward0", "MinBackward0", "MaxBackward0"}
"""Operations below which products of advantages and ratios are searched for."""


class _Product(NamedTuple):
    """Advantages times a ratio or a log-probability: the factor [N], the node that it multiplies, and the clip between both.
    `attached` is the edge at which the factor's gradients continue, if any; `reshaped`: another function of the ratio is multiplied.
    """

    factor: Tensor
    node: Node
    clip: float | None
    is_ratio: bool
    attached: GradientEdge | None
    reshaped: bool = False


def policy_term(graph: LossGraph, node: Node, gradient: Tensor) -> PolicyTerm | None:
    """Return the policy's term at a node to which the loss has this gradient."""
    products = list(products_of(graph, node))
    if not products:
        return None
    plain = min(products, key=lambda one: (one.reshaped, one.clip is not None))
    # what is clipped around 1 is a ratio, however the script computes it
    plain = plain._replace(is_ratio=any(one.is_ratio and one.node is plain.node for one in products))
    clip = next((one.clip for one in products if one.clip is not None), None)
    factor = plain.factor
    kept = graph.value(plain.node)
    if kept is None and plain.is_ratio:
        return None
    number = torch.zeros(shape_of(plain.node)) if kept is None else kept  # a graph need not keep the sum of a density's terms
    number = -number if not plain.is_ratio and _is_negative_likelihood(graph, plain.node) else number
    per_dimension = plain.is_ratio and _is_per_dimension(graph, plain.node, factor)
    own, inverted = _log_probs(graph, plain.node) if plain.is_ratio else (None if kept is None else number.reshape(-1), False)
    count = factor.numel()
    pairs = plain.is_ratio and own is not None and count > 1 and number.shape == (count, count) and len(own) in (count, count**2)
    of_products = not plain.is_ratio and count > 1 and number.numel() == count and gradient.shape == (count, count)
    if pairs and own is not None and len(own) > count:  # each row's log-probabilities of all actions
        own = own.reshape(number.shape).diagonal()
    if number.numel() != factor.numel() and not pairs:
        factor = _of_shape(factor, shape_of(plain.node))
    negated = _is_negated(graph, node, factor, gradient, is_ratio=plain.is_ratio)
    rows = graph.value(node)
    slopes = gradient.reshape(-1)
    # a mean has slopes of weight / N; a sum gets weight 1, so that its size shows
    is_sum = plain.is_ratio and len(slopes) > MIN_SUMMED_ROWS and bool(((slopes.abs() - 1).abs() < ROUNDING).all())
    weight, valid = 1.0 if is_sum else float(slopes.abs().sum()), slopes != 0
    reshaped = pairs or any(one.reshaped for one in products)
    loss = None if rows is None or not weight or reshaped else (rows * gradient).sum() / weight
    flat = number.reshape(-1)
    # a ratio that is not a quotient of probabilities may be negative
    log_ratio = flat.abs().log().clamp(*exponents(flat.dtype)) if plain.is_ratio else None
    stored = _stored(graph, plain.node, own, flat) if plain.is_ratio else None
    log_ratios = None
    if per_dimension and log_ratio is not None:
        log_ratios = log_ratio.reshape(number.shape) * (-1 if inverted else 1)
        log_ratio, own = (log_ratio.reshape(number.shape).sum(-1), None if own is None else own.reshape(number.shape).sum(-1))
        factor, flat, valid = factor[..., 0], flat[: len(log_ratio)], valid.reshape(number.shape).any(-1)
    if pairs and log_ratio is not None and own is not None:
        table = log_ratio.reshape(number.shape)  # of each new log-probability to each old one
        axis = 1 if torch.allclose(table[:, 0] - table[0, 0], own - own[0], atol=PAIRS_ERROR) else 0
        log_ratio, flat, valid = table.mean(axis), flat[: len(own)], torch.ones_like(own, dtype=torch.bool)
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
        pairs=pairs or of_products,
    )


def _is_per_dimension(graph: LossGraph, ratio: Node, factor: Tensor) -> bool:
    """Return True for the ratios [N, D] of a Gaussian density that share one advantage [N, 1]; tokens are drawn from a softmax."""
    shape = shape_of(ratio)
    broadcast = len(shape) == 2 and shape[1] > 1 and factor.shape == (shape[0], 1)
    kinds = kinds_below(ratio) if broadcast else set()
    return bool(kinds & {"PowBackward0", "DivBackward0"}) and "LogSoftmaxBackward0" not in kinds


def _is_negated(graph: LossGraph, node: Node, factor: Tensor, gradient: Tensor, *, is_ratio: bool) -> bool:
    """Return True for negative advantages: the script holds them, the larger of two losses is taken, or unclipped gains are subtracted."""
    for sign in (False, True):
        own = -factor.reshape(-1) if sign else factor.reshape(-1)
        # products with a ratio of 1 are not advantages
        columns = [one for one in graph.columns if not (is_ratio and one.requires_grad)]
        if any(one.numel() == len(own) and torch.equal(own, one.reshape(-1)) for one in columns):
            return sign
    for sign in (False, True):  # perhaps of the rows of a larger array
        own = (-factor if sign else factor).detach().reshape(-1)
        larger = (one for one in columns if one.numel() > len(own) and one.dtype is own.dtype and bool((one == own[0]).any()))
        if any(bool(torch.isin(own, one).all()) for one in larger):  # which sorts
            return sign
        if any(one.numel() == len(own) and line_error(one.detach(), own) <= SAME_LINE for one in columns):
            return sign  # the advantages before they are normalised
    if kind_of(node) in EXTREMES:
        return kind_of(node) == "MaximumBackward0"
    return float(gradient.sum()) > 0


def products_of(graph: LossGraph, node: Node) -> Iterator[_Product]:
    """Yield the products of advantages and ratios in a term."""
    waiting, visited = [node], set[Node]()
    while waiting:
        node = through_views(waiting.pop())
        if node in visited:
            continue
        visited.add(node)
        product = _product(graph, node)
        if product is not None:
            yield product
        elif kind_of(node) in FOLLOWED:
            waiting += [child for child in children_of(node) if child is not None]


def _product(graph: LossGraph, node: Node) -> _Product | None:
    if kind_of(node) != "MulBackward0":
        return None
    children = children_of(node)
    for place in (0, 1):
        child, (other, number) = children[place], node.next_functions[1 - place]
        factor = node._saved_other if place == 0 else node._saved_self
        if child is None or factor is None or factor.dtype is torch.bool:
            continue
        child = through_views(child)
        if kind_of(child) == "NegBackward0":
            child, factor = through_views(children_of(child)[0]), -factor
        inner, clip = _unclipped(graph, child)
        is_quotient = kind_of(inner) == "DivBackward0" and None in children_of(inner) and not is_scaling(inner)
        is_ratio = clip is not None or is_quotient or kind_of(inner) == "ExpBackward0"
        if other is not None and (other in nodes_below(inner) if is_ratio else EXPONENTIALS & kinds_below(other)):
            continue  # both have a graph: an entropy, unless the advantages are not detached
        ratio = None if is_ratio else ratio_below(graph, inner, factor.numel())
        if ratio is not None:
            return _Product(factor.detach(), ratio, None, is_ratio=True, attached=None, reshaped=True)
        of_log_probs = (one in graph.log_probs or kind_of(one) in LOG_PROBABILITIES for one in nodes_below(inner))
        if is_ratio or (factor.numel() > 1 and any(of_log_probs)):  # that a distribution returned, or that the script computed
            attached = None if other is None else GradientEdge(other, number)
            factor = -factor if not is_ratio and _is_negative_likelihood(graph, inner) else factor
            return _Product(factor.detach(), inner, clip, is_ratio, attached)
    return None


def ratio_below(graph: LossGraph, node: Node, count: int) -> Node | None:
    """Return the ratio of so many rows that an operation depends on: the exponential of a difference from numbers without a graph."""
    for one in nodes_below(node):
        if kind_of(one) == "ExpBackward0" and shape_of(one).numel() == count:
            below = through_views(children_of(one)[0])
            if kind_of(below) in ("SubBackward0", "AddBackward0") and children_of(below)[:2].count(None) == 1:
                return one
    return None


def _unclipped(graph: LossGraph, node: Node) -> tuple[Node, float | None]:
    """Return the node that is clipped to a range around 1, with half of that range; the node itself without a clip."""
    if kind_of(node) not in ("ClampBackward0", "ClampBackward1"):
        return node, None
    low, high = number_of(node._saved_min), number_of(node._saved_max)
    if low is None or high is None or not low < 1 < high or (low < 0 and abs(low + high - 2) > SAME_LINE * high):
        return node, None  # a range of more than 1 around it is a clip, too, which does nothing
    return through_views(children_of(node)[0]), max(high - 1, 1 - low)


def _log_probs(graph: LossGraph, ratio: Node) -> tuple[Tensor | None, bool]:
    """Log-probabilities now [N], below a ratio, and True if they are subtracted in the difference that it is the exponential of."""
    if kind_of(ratio) == "DivBackward0":
        place = 0 if children_of(ratio)[0] is not None else 1
        number = graph.value(children_of(ratio)[place])
        return _as_log_probs(number), place == 1
    if kind_of(ratio) != "ExpBackward0":
        node = _summand(graph, ratio)
        number = None if node is ratio else graph.value(node)
        return (None if number is None else number.reshape(-1)), False
    below = through_views(children_of(ratio)[0])
    if kind_of(below) not in ("SubBackward0", "AddBackward0"):
        return None, False
    first, second = children_of(below)[:2]
    if kind_of(below) == "AddBackward0" and None not in (first, second):
        return None, False
    node, is_negative = without_sign(second if first is None else first)
    number, has_two = graph.value(node), None not in (first, second)
    if _is_negative_likelihood(graph, node):
        number, is_negative = None if number is None else -number, not is_negative
    is_subtracted = is_negative != (first is None and kind_of(below) == "SubBackward0")
    return (None if number is None else number.reshape(-1)), is_subtracted and not has_two


def _is_negative_likelihood(graph: LossGraph, node: Node) -> bool:
    """Return True for a cross-entropy of the chosen actions, perhaps summed over several choices: a negative log-probability."""
    while kind_of(node) in SUMS:
        node = through_views(next(child for child in children_of(node) if child is not None))
    return kind_of(node) in NEGATIVE_LIKELIHOODS


def _summand(graph: LossGraph, node: Node) -> Node:
    """Return what numbers without a graph are added to, or subtracted from; the node itself without any."""
    while kind_of(node) in ("SubBackward0", "AddBackward0") and children_of(node)[:2].count(None) == 1:
        node = through_views(next(child for child in children_of(node) if child is not None))
    return node


def _stored(graph: LossGraph, ratio: Node, own: Tensor | None, number: Tensor) -> Tensor | None:
    """Log-probabilities at collection [N] of a ratio that is a quotient, or a difference near 0 or 1; None of an exponential."""
    if kind_of(ratio) == "DivBackward0":
        other = ratio._saved_other if children_of(ratio)[0] is not None else ratio._saved_self
        return None if other is None or other.numel() != number.numel() else _as_log_probs(other)
    if kind_of(ratio) == "ExpBackward0" or own is None or len(own) != len(number):
        return None
    offset = 1 if float((number - 1).abs().mean()) < float(number.abs().mean()) else 0
    return own - number + offset


def is_row_log_prob(graph: LossGraph, node: Node) -> bool:
    """Return True for the log-probability of one action, which is a term if its advantage is a number."""
    if shape_of(node).numel() != 1 or node in graph.entropies or error_of(graph, node) is not None:
        return False
    is_gathered = kind_of(node) == "GatherBackward0" and bool(LOG_PROBABILITIES & kinds_below(node))
    return node in graph.log_probs or is_gathered or kind_of(node) in NEGATIVE_LIKELIHOODS


def policy_of_rows(graph: LossGraph, nodes: Sequence[Node], slopes: Mapping[Node, Tensor]) -> PolicyTerm | None:
    """The policy's term whose advantages are numbers that multiply the log-probabilities of single actions."""
    numbers = [graph.value(node) for node in nodes]
    factors = [_factor_above(graph, node) for node in nodes]
    slope = torch.stack([slopes[node].reshape(()) for node in nodes])
    place = next((place for place, factor in enumerate(factors) if factor), None)
    if (place is None and None in factors) or any(number is None for number in numbers):
        return None
    weight = 1.0 if place is None else abs(float(slope[place]) / float(factors[place] or 1.0))
    if not weight:  # all advantages are 0 if no place has another one
        return None
    log_probs = torch.stack([number.reshape(()) for number in numbers if number is not None])
    sign = log_probs.new_tensor([-1.0 if kind_of(node) in NEGATIVE_LIKELIHOODS else 1.0 for node in nodes])
    log_probs, advantages = sign * log_probs, -sign * slope / weight
    loss = -(advantages * log_probs).mean()
    edge = GradientEdge(nodes[0], 0)
    return PolicyTerm(None, advantages, None, loss, weight * len(nodes), None, edge, log_probs, by_row=True)


def _factor_above(graph: LossGraph, node: Node) -> float | None:
    """Return the number by which the script multiplies a result first; None if it multiplies it by none."""
    while True:
        consumers = graph.consumers[node]
        if len(consumers) != 1:
            return None
        ((node, place),) = consumers
        if kind_of(node) == "MulBackward0" and is_scaling(node):
            return number_of(node._saved_other if place == 0 else node._saved_self)
        if kind_of(node) not in VIEWS | {"NegBackward0"}:
            return None


def choices_of(graph: LossGraph, nodes: Sequence[Node]) -> tuple[Tensor | None, Tensor | None, LayerOutputs | None]:
    """Logits, actions and layer of `_choice`, of the rows of several nodes."""
    logits, actions, sources = zip(*map(partial(_choice, graph), nodes), strict=True)
    return joined_rows(logits), joined_rows(actions), sources[0]


def _choice(graph: LossGraph, node: Node) -> tuple[Tensor | None, Tensor | None, LayerOutputs | None]:
    """Logits [N, A], actions [N] and layer of log-probabilities that are taken from a softmax by the script itself."""
    logits = actions = source = None
    for one in nodes_below(node):
        if kind_of(one) in SOFTMAXES and logits is None and _is_chosen_from(graph, one):
            chosen_from = one._saved_result.detach().reshape(-1, one._saved_result.shape[-1])
            logits = chosen_from if kind_of(one) == "LogSoftmaxBackward0" else chosen_from.log()
            source = graph.layer_at(children_of(one)[0], shape_of(one)[-1])
        elif kind_of(one) == "GatherBackward0" and actions is None:
            actions = one._saved_index.reshape(-1)
        elif kind_of(one) == "IndexBackward0" and actions is None and len(one._saved_indices) == 2:
            chosen = one._saved_indices[1]  # of each row by `[range(N), actions]`
            actions = None if chosen is None or None in one._saved_indices else chosen.reshape(-1)
        elif kind_of(one) in NEGATIVE_LIKELIHOODS and actions is None:
            actions = one._saved_target.reshape(-1).long()
            if kind_of(one).startswith("Binary") and logits is None:
                chances = one._saved_self.detach().reshape(-1)
                chances = chances.sigmoid() if "Logits" in kind_of(one) else chances
                logits = torch.stack([1 - chances, chances], 1).log()
    return logits, actions, source


def gaussian_of(graph: LossGraph, node: Node) -> tuple[HeadColumns, Tensor | None, LayerOutputs | None]:
    """Parameters, actions [N, D] and layer of the means of a Gaussian's density that the script computes itself.

    Its standard deviations are the exponential of a parameter, or divide the differences before they are squared.
    """
    below = nodes_below(node)
    log_std: Tensor | None = None
    for one in below:
        leaf = getattr(through_views(children_of(one)[0]), "variable", None) if kind_of(one) == "ExpBackward0" else None
        log_std = leaf if leaf is not None and leaf.dim() <= 2 and log_std is None else log_std
    squares = (one for one in below if kind_of(one) == "PowBackward0" and one._saved_exponent == 2)
    for square in squares:
        difference, size = through_views(children_of(square)[0]), square._saved_self.detach()
        if kind_of(difference) == "DivBackward0":
            std = difference._saved_other.detach()
            difference, size, log_std = through_views(children_of(difference)[0]), size * std, std.log()
        parts = children_of(difference) if kind_of(difference) == "SubBackward0" else []
        own = [place for place, part in enumerate(parts) if part is not None]
        means = graph.value(parts[own[0]]) if len(own) == 1 else None
        if log_std is None or means is None or means.dim() != 2 or means.shape != size.shape:
            continue
        sign = -1 if own[0] == 0 else 1
        actions = means + sign * size
        spread = log_std.detach().reshape(-1, log_std.shape[-1]).expand_as(means).clone()
        return (HeadColumns(means={HEAD: means}, log_std={HEAD: spread}), actions, graph.layer_at(parts[own[0]], means.shape[1]))
    return HeadColumns(), None, None


def _is_chosen_from(graph: LossGraph, log_probs: Node) -> bool:
    """Return False for log-probabilities that are weights of a mixture: sums with others, and no entry is chosen."""
    waiting = [log_probs]
    while waiting:
        for consumer, _ in graph.consumers.get(waiting.pop(), ()):
            if kind_of(consumer) in VIEWS:
                waiting.append(consumer)
            elif kind_of(consumer) in INDEXING:
                return True
    return False


def exponents(dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and the largest number whose exponential is neither 0 nor infinite in this precision."""
    kind = torch.finfo(dtype)
    return math.log(kind.smallest_normal) + math.log(kind.eps), math.log(kind.max)


def _of_shape(factor: Tensor, shape: torch.Size) -> Tensor:
    """Return a factor in the shape of the other factor. If several entries multiply one, as in [N, N] times [N], return their mean."""
    whole = torch.broadcast_shapes(shape, factor.shape)
    padded = (1,) * (len(whole) - len(shape)) + shape
    axes = [axis for axis, size in enumerate(padded) if size != whole[axis]]
    factor = factor.expand(whole)
    return factor.mean(axes).reshape(shape) if axes else factor


def _as_log_probs(numbers: Tensor | None) -> Tensor | None:
    """Probabilities [N], or densities, as their logarithms; numbers of which some are not positive are logarithms already."""
    if numbers is None:
        return None
    flat = numbers.detach().reshape(-1)
    return flat.log() if bool((flat > 0).all()) else flat
