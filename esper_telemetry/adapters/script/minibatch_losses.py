"""Losses of a script's minibatches, and gradients of the terms that PPO's objective would have, by the graphs of its losses.

Gradients are of terms computed from the same numbers as the script's own loss; they continue in the graph of the loss at these numbers.
`torch.autograd.grad` does not change `.grad`, weights or random numbers. The graph is kept for the script's own pass.

Shapes: N rows, d entries of the parameters, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from esper_telemetry.adapters.columns import HeadColumns
from esper_telemetry.adapters.script.autograd_graph import NEGATIVE_LIKELIHOODS, graph_of, kind_of, leaves_in
from esper_telemetry.adapters.script.loss_reading import EntropyTerm, LossReading, PolicyTerm, ValueTerm
from esper_telemetry.adapters.script.variables import Variables
from esper_telemetry.core.minibatch_objective import LossRows
from esper_telemetry.equations.entropy_loss import GAUSSIAN_ENTROPY
from esper_telemetry.equations.gradient import TERMS, flat64

SAME_WEIGHT = 0.02
"""Largest relative difference between the weight of a loss and its setting."""

HALF_SQUARE = (1.0, 2.0)
"""Factors between the weight of a squared error and its setting: the loss is half of the square, or the square."""

NO_CLIP = 1e9
"""Range of a ratio that is not clipped."""


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
        likelihoods = None if policy.log_probs is None else sign * policy.log_probs
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
