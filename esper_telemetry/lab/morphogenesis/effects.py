"""The effects of seeds on features: every part is a function that returns its value and its backward function.

Tensors are [K, features, M] for K networks and M rows, so that products run along M, which is long, and not along the few features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Parameters = Mapping[str, Tensor]
Pull = Callable[[Tensor], tuple[Tensor, Parameters]]
"""Backward function: from the gradient at the value to those at the features and the parameters."""

PullJoin = Callable[[Tensor], tuple[Tensor, Tensor, Parameters]]
"""Backward function of a join: from the gradient at the value to those at the features, at the parts' value, and at the parameters."""

NORM_EPS = 1e-5
"""Added to the variance of normalised features."""


def units(x: Tensor, own: Parameters, _: int) -> tuple[Tensor, Pull]:
    """Return the value of a network of two layers with ReLU."""
    inner = torch.baddbmm(own["enter_bias"].unsqueeze(2), own["enter"].mT, x).relu_()

    def pull(d: Tensor) -> tuple[Tensor, Parameters]:
        slope = rectified_(torch.bmm(own["leave"].mT, d), inner)
        slopes = {"enter": torch.bmm(x, slope.mT), "enter_bias": slope.sum(2), "leave": torch.bmm(d, inner.mT)}
        return torch.bmm(own["enter"], slope), slopes

    return torch.bmm(own["leave"], inner), pull


def scaled(x: Tensor, own: Parameters, _: int) -> tuple[Tensor, Pull]:
    """Return normalised features, scaled and shifted."""
    normed, pull_normed = _normed(x)
    gain = own["gain"].unsqueeze(2)

    def pull(d: Tensor) -> tuple[Tensor, Parameters]:
        return pull_normed(gain * d), {"gain": (d * normed).sum(2), "shift": d.sum(2)}

    return torch.addcmul(own["shift"].unsqueeze(2), gain, normed), pull


def attended(x: Tensor, own: Parameters, tokens: int) -> tuple[Tensor, Pull]:
    """Return causal attention with one head over the tokens of each window of normalised features."""
    normed, pull_normed = _normed(x)
    query, key, value = (_windows(torch.bmm(own[name], normed), tokens) for name in ("query", "key", "value"))
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
    scale = x.shape[1] ** -0.5
    shares = (torch.bmm(query.mT, key) * scale).masked_fill(future, -torch.inf).softmax(2)
    attention = _rows(torch.bmm(value, shares.mT), len(x))

    def pull(d: Tensor) -> tuple[Tensor, Parameters]:
        at_attention = _windows(torch.bmm(own["out"].mT, d), tokens)
        at_shares = torch.bmm(at_attention.mT, value)
        at_scores = scale * shares * (at_shares - (at_shares * shares).sum(2, keepdim=True))
        parts = {
            "query": torch.bmm(key, at_scores.mT),
            "key": torch.bmm(query, at_scores),
            "value": torch.bmm(at_attention, shares),
        }
        slopes = {name: _rows(part, len(x)) for name, part in parts.items()}
        gradients = {name: torch.bmm(slope, normed.mT) for name, slope in slopes.items()}
        at_normed = sum(torch.bmm(own[name].mT, slope) for name, slope in slopes.items())
        return pull_normed(torch.as_tensor(at_normed)), {**gradients, "out": torch.bmm(d, attention.mT)}

    return torch.bmm(own["out"], attention), pull


def gated(x: Tensor, value: Tensor, own: Parameters) -> tuple[Tensor, PullJoin]:
    """Return the parts' value times a gate that depends on the features."""
    gate = torch.sigmoid(torch.baddbmm(own["gate_bias"].unsqueeze(2), own["gate"].mT, x))

    def pull(d: Tensor) -> tuple[Tensor, Tensor, Parameters]:
        slope = (d * value).sum(1, keepdim=True) * gate * (1 - gate)
        return own["gate"] * slope, gate * d, {"gate": torch.bmm(x, slope.mT), "gate_bias": slope.sum(2)}

    return gate * value, pull


def multiplied(x: Tensor, value: Tensor, _: Parameters) -> tuple[Tensor, PullJoin]:
    """Return the features times the tanh of the parts' value."""
    factor = 2 * torch.sigmoid(2 * value) - 1  # tanh, ten times as fast

    def pull(d: Tensor) -> tuple[Tensor, Tensor, Parameters]:
        return d * factor, d * x * (1 - factor.square()), {}

    return x * factor, pull


def rectified_(d: Tensor, after: Tensor) -> Tensor:
    """Turn the gradient after a ReLU with the values `after` into that before it, in place; ten times as fast as a mask."""
    gradient: Tensor = torch.ops.aten.threshold_backward.grad_input(d, after, 0, grad_input=d)
    return gradient


def _normed(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return standardised features, and their backward function."""
    centred = x - x.mean(1, keepdim=True)
    slope = (centred.square().mean(1, keepdim=True) + NORM_EPS).rsqrt()
    normed = centred * slope

    def pull(d: Tensor) -> Tensor:
        return slope * (d - d.mean(1, keepdim=True) - normed * (d * normed).mean(1, keepdim=True))

    return normed, pull


def _windows(x: Tensor, tokens: int) -> Tensor:
    """Return [K, width, M] by window, [K M / tokens, width, tokens]."""
    return x.view(*x.shape[:2], -1, tokens).transpose(1, 2).flatten(0, 1)


def _rows(x: Tensor, count: int) -> Tensor:
    """Return the inverse of `_windows` for K networks."""
    return x.view(count, -1, *x.shape[1:]).transpose(1, 2).flatten(2)


PARTS = {
    "scales": (scaled, ("gain", "shift")),
    "units": (units, ("enter", "enter_bias", "leave")),
    "attends": (attended, ("query", "key", "value", "out")),
}
"""Parts of seeds and their parameters; the value is the sum of the parts."""

INERT = ("units",)
"""Parts whose value and gradients are zero where their parameters are zero."""

JOINS = {"gated": (gated, ("gate", "gate_bias")), "multiplied": (multiplied, ())}
"""Ways to join the parts' value with the features, and their parameters; other styles add the value unchanged."""

Owners = Mapping[str, Tensor | None]
"""Indices of the networks whose seeds have a part or a join; None for all; without those that no seed has."""


def effect(
    x: Tensor, seed: Parameters, who: Owners, tokens: int
) -> tuple[Tensor, Callable[[Tensor, Parameters], Tensor]]:
    """Return the effect of a slot's seeds on features x [N, width, M], zero where a network has none, and its backward function.

    The backward function takes the gradient at the effect, writes those of the parameters into tensors by name, and returns that at x.
    """
    total, pulls, pulls_join = None, list[tuple[Tensor | None, Pull]](), list[tuple[Tensor | None, PullJoin]]()
    for name, (part, needs) in PARTS.items():
        if name in who:
            rows = who[name]
            value, pull = part(_pick(x, rows), {need: _pick(seed[need], rows) for need in needs}, tokens)
            total = _plus(total, rows, value, x)
            pulls.append((rows, pull))
    total = torch.zeros_like(x) if total is None else total
    for name, (join, needs) in JOINS.items():
        if name in who:
            rows = who[name]
            own = {need: _pick(seed[need], rows) for need in needs}
            value, pull_join = join(_pick(x, rows), _pick(total, rows), own)
            total = _put(total, rows, value)
            pulls_join.append((rows, pull_join))

    def back(d: Tensor, gradients: Parameters) -> Tensor:
        at_x = None
        for rows, pull_join in reversed(pulls_join):
            at_own, at_value, slopes = pull_join(_pick(d, rows))
            at_x, d = _plus(at_x, rows, at_own, x), _put(d, rows, at_value)
            _write(gradients, rows, slopes)
        for rows, pull in pulls:
            at_own, slopes = pull(_pick(d, rows))
            at_x = _plus(at_x, rows, at_own, x)
            _write(gradients, rows, slopes)
        return torch.zeros_like(x) if at_x is None else at_x

    return total, back


def _pick(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)


def _plus(total: Tensor | None, rows: Tensor | None, value: Tensor, like: Tensor) -> Tensor:
    """Return the total, None at first, plus a value in the given rows."""
    if rows is None:
        return value if total is None else total + value
    return (torch.zeros_like(like) if total is None else total).index_add(0, rows, value)


def _put(tensor: Tensor, rows: Tensor | None, value: Tensor) -> Tensor:
    return value if rows is None else tensor.index_copy(0, rows, value)


def _write(gradients: Parameters, rows: Tensor | None, slopes: Parameters) -> None:
    for name, slope in slopes.items():
        if rows is None:
            gradients[name].copy_(slope)
        else:
            gradients[name].index_copy_(0, rows, slope)
