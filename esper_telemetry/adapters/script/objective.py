"""The losses of a script's minibatches, with the signs and factors of `MinibatchEnd`, and the objective that their graph computes.

Scripts write the value loss with and without a half, and the entropy's term with either sign. Both conventions are read off the first
minibatch, where the numbers that the term is computed from are there too.

Gradients are taken before the script's backward pass with `torch.autograd.grad`, which leaves `.grad`, weights and random numbers as they
are; the graph stays for the script's own pass. Shapes: N rows of the minibatch, d entries of the parameters, one after the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper_telemetry.adapters.columns import HeadColumns
from esper_telemetry.adapters.script import settings
from esper_telemetry.adapters.script import variables as names
from esper_telemetry.adapters.script.variables import MinibatchVariables, Ratio, Variables
from esper_telemetry.core.equations.objective import LossRows
from esper_telemetry.metrics.integrity.losses.entropy_loss import GAUSSIAN_ENTROPY
from esper_telemetry.metrics.integrity.steps.loss_gradients import TERM_LOSSES, flat64

MAX_SCALING_NODES = 4
"""Operations with numbers, such as a division, between a loss and what the backward pass begins with."""

SAME_LOSS = 1e-4
"""Error up to which a loss is the sum of its terms, next to the largest of them."""


class LossTerms(NamedTuple):
    """Gradients [d] of the terms of a minibatch's loss, float64, and their weights."""

    gradients: Mapping[str, Tensor]
    coefficients: Mapping[str, float]


def loss_terms(
    started: Tensor, variables: Variables, ratio: Ratio | None, facts: Mapping[str, Any], parameters: Sequence[Tensor]
) -> LossTerms | None:
    """Return the terms of the loss that a backward pass is for; the whole loss as `policy` where its terms do not add up to it.

    Args:
        started: what the pass begins with: the loss, or a multiple of it.
        ratio: of the minibatch; None of a loss without one.
        facts: of the run.
        parameters: that the gradients belong to.

    Returns None where listeners in the network, or several processes, would notice the pass.
    """
    modules = [value for value in variables.values() if isinstance(value, nn.Module)]
    hooked = any(part._backward_hooks or part._backward_pre_hooks for module in modules for part in module.modules())
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if hooked or several or any(parameter._backward_hooks for parameter in parameters) or not started.requires_grad:
        return None
    loss = names.find_total_loss(variables, lambda value: _is_multiple(started, value))
    loss = started if loss is None else loss
    with torch.enable_grad():
        rows = None if ratio is None else _rows(variables, ratio, facts)
        weights = None if rows is None else _weights(float(loss.detach().sum()), rows, variables)
        if rows is None or weights is None:
            losses, weights = {"policy": loss}, {"policy": 1.0}
        else:
            losses = {name: TERM_LOSSES[name](rows) for name in weights}
        return LossTerms({name: _gradient(term, parameters) for name, term in losses.items()}, weights)


def left_out(variables: Variables, parameters: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the parameters with a gradient, by name, that the script's smallest module with all of `parameters` has besides these."""
    own = {id(parameter) for parameter in parameters}
    best: dict[str, Tensor] | None = None
    for module in {id(value): value for value in variables.values() if isinstance(value, nn.Module)}.values():
        named: dict[str, Tensor] = dict(module.named_parameters())
        if own <= {id(parameter) for parameter in named.values()} and (best is None or len(named) < len(best)):
            best = named
    return {
        name: parameter
        for name, parameter in (best or {}).items()
        if id(parameter) not in own and parameter.requires_grad and parameter.grad is not None
    }


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the tensors in which the graph of a loss ends: those that its backward pass adds gradients to."""
    waiting, visited, leaves = [loss.grad_fn], set[Any](), []
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return leaves


def _is_multiple(started: Tensor, loss: Tensor) -> bool:
    """Return True where `started` is the loss, or comes from it by operations with numbers."""
    node: Any = started.grad_fn
    for _ in range(MAX_SCALING_NODES):
        if started is loss or (node is not None and node is loss.grad_fn):
            return True
        following = [] if node is None else [one for one, _ in node.next_functions if one is not None]
        if len(following) != 1:
            return False
        node = following[0]
    return False


def _rows(variables: Variables, ratio: Ratio, facts: Mapping[str, Any]) -> LossRows | None:
    """The rows of the minibatch with their graph; None where a column is missing."""
    count = ratio.log_ratio.numel()
    minibatch = names.find_minibatch(variables, count)
    values = variables.find(names.VALUES, _with_graph(count))
    entropy = variables.find(names.ENTROPY, _with_graph(count, 1))
    if minibatch.advantages is None or minibatch.returns is None or values is None or entropy is None:
        return None
    clip_value = facts.get("clip_value")
    if facts.get("clip") is None or (clip_value is not None and minibatch.old_values is None):
        return None
    log_ratio = _log_ratio(ratio)
    return LossRows(
        log_ratio=log_ratio,
        log_probs=log_ratio,
        values=values,
        entropy=entropy,
        advantages=minibatch.advantages,
        old_values=values.detach() if minibatch.old_values is None else minibatch.old_values,
        returns=minibatch.returns,
        clip=float(facts["clip"]),
        clip_value=clip_value,
    )


def _with_graph(*counts: int) -> Callable[[object], Tensor | None]:
    """Accept a tensor with a graph and one of these numbers of entries, as [N]."""

    def accept(value: object) -> Tensor | None:
        fits = isinstance(value, Tensor) and value.requires_grad and value.numel() in counts
        return value.reshape(-1) if fits and isinstance(value, Tensor) else None

    return accept


def _log_ratio(ratio: Ratio) -> Tensor:
    """The log-ratio [N] with its graph, from what the script holds: itself, the ratio, or the new log-probabilities."""
    number = ratio.log_ratio
    source = ratio.source if isinstance(ratio.source, Tensor) else number
    column = source.reshape(-1)
    if torch.equal(column.detach(), number):
        return column
    if torch.equal(column.detach().log(), number):
        return column.log()
    return column - (column.detach() - number)


@torch.no_grad()
def _weights(total: float, rows: LossRows, variables: Variables) -> dict[str, float] | None:
    """The weights with which the terms add up to the loss; None where none of the script's do. A value loss may lack its factor ½."""
    weights = settings.find_coefficients(variables)
    if "value" not in weights or "entropy" not in weights:
        return None
    terms = {name: float(loss(rows)) for name, loss in TERM_LOSSES.items()}
    largest = max(abs(weights.get(name, 1.0) * term) for name, term in terms.items())
    for half, sign in product((1.0, 2.0), (1.0, -1.0)):
        own = {"policy": 1.0, "value": half * weights["value"], "entropy": sign * weights["entropy"]}
        if abs(sum(own[name] * term for name, term in terms.items()) - total) <= SAME_LOSS * max(largest, 1e-8):
            return {name: weight for name, weight in own.items() if weight}
    return None


def _gradient(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients: Any = dict.fromkeys(map(id, parameters))
    if loss.requires_grad and trained:
        gradients |= zip(
            map(id, trained),
            torch.autograd.grad(loss.sum(), trained, retain_graph=True, allow_unused=True),
            strict=True,
        )
    return flat64([torch.zeros_like(p) if gradients[id(p)] is None else gradients[id(p)] for p in parameters])


MAX_FACTOR_ERROR = 0.02
"""Relative difference up to which a value loss is half the squared error or all of it."""


class LossReader:
    """Reads the losses of a script's minibatches.

    A script with an optimizer for each network computes one of the losses after the other's step: at that step its variable holds the loss
    of the minibatch before. Such a loss is left out.
    """

    def __init__(self) -> None:
        self._value_factor: float | None = None
        self._entropy_factor: float | None = None
        self._count = 0
        self._earlier: dict[str, tuple[weakref.ref[Tensor], int]] = {}

    def pass_over(self, variables: Variables) -> None:
        """An optimizer has taken another step of the same minibatch."""
        rows = id(names.find_rows(variables))
        self._earlier |= {
            name: (weakref.ref(loss), rows) for name, loss in names.find_losses(variables, self._count).items()
        }

    def read(self, variables: Variables, minibatch: MinibatchVariables, heads: HeadColumns) -> dict[str, Tensor]:
        """Return the losses of a minibatch, 0-d each, by the names of `MinibatchEnd`."""
        self._count = len(minibatch.advantages) if minibatch.advantages is not None else 0
        present = names.find_losses(variables, self._count)
        rows = id(names.find_rows(variables))
        of_earlier = {
            name for name, (loss, place) in self._earlier.items() if loss() is present.get(name) and place != rows
        }
        current = {name: loss for name, loss in present.items() if name not in of_earlier}
        losses = {name: loss.detach().mean() for name, loss in current.items()}
        if "value" in losses:
            if self._value_factor is None:
                self._value_factor = half_square_factor(losses["value"], minibatch)
            losses["value"] = losses["value"] * (self._value_factor or 1.0)
        if "entropy" in losses:
            if self._entropy_factor is None:
                known = mean_entropy(variables, heads)
                self._entropy_factor = None if known is None else entropy_sign(losses["entropy"], known)
            losses["entropy"] = losses["entropy"] * (self._entropy_factor or -1.0)
        return losses


def half_square_factor(loss: Tensor, minibatch: MinibatchVariables) -> float | None:
    """Return the factor that makes a value loss half the mean squared error, from a minibatch before the first step; None where the numbers
    that it is computed from are not there.
    """
    if minibatch.values is None or minibatch.returns is None:
        return None
    square = float((minibatch.values - minibatch.returns).square().mean())
    halves = (
        factor for factor in (1.0, 0.5) if square and abs(2 * float(loss) * factor / square - 1) < MAX_FACTOR_ERROR
    )
    return next(halves, 1.0)


def entropy_sign(term: Tensor, entropy: float) -> float:
    """Return -1 where a script's term is its entropy, and 1 where it is the negative."""
    return -1.0 if abs(float(term) - entropy) <= abs(float(term) + entropy) else 1.0


def mean_entropy(variables: Variables, heads: HeadColumns) -> float | None:
    """Return the mean entropy of the recorded distributions, in nats, or of the script's entropies of each row; None without either."""
    means = [-float((logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()) for logits in heads.logits.values()]
    means += [float((log_std + GAUSSIAN_ENTROPY).sum(-1).mean()) for log_std in heads.log_std.values()]
    if means:
        return sum(means)
    rows = variables.find(names.ENTROPY, names.as_column())
    return None if rows is None else float(rows.mean())
