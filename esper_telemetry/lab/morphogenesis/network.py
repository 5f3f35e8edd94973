"""The networks of N environments: parameters as rows of one tensor, blueprints of seeds, and batched forward and backward passes.

There is one row per network, so that norms, optimizer steps and snapshots are single operations; every layer is a batched product.
Gradients are hand-written: for networks this small, autograd's graph would cost as much as the arithmetic. A blueprint selects which of
a slot's parameters a seed has; the others remain zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_telemetry.lab.morphogenesis.kinds import BLUEPRINTS, MAX_HIDDEN_UNITS, STYLES, Blueprint

Parameters = Mapping[str, Tensor]
Pull = Callable[[Tensor], tuple[Tensor, Parameters]]
"""Backward function: from the gradient at the value to the gradients at the features and the parameters."""

PullJoin = Callable[[Tensor], tuple[Tensor, Tensor, Parameters]]
"""Backward function of a join: from the gradient at the value to the gradients at the features, the parts' value, and the parameters."""

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
        parts = {"query": torch.bmm(key, at_scores.mT), "key": torch.bmm(query, at_scores), "value": torch.bmm(at_attention, shares)}
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
    """Turn the gradient after a ReLU with the values `after` into the gradient before it, in place; ten times as fast as a mask."""
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
"""Parts whose value and gradients are zero if their parameters are zero."""

JOINS = {"gated": (gated, ("gate", "gate_bias")), "multiplied": (multiplied, ())}
"""Ways to join the parts' value with the features, and their parameters; other styles add the value unchanged."""

ANATOMY = (*PARTS, *JOINS)
"""Names of the parts of seeds, and of the ways to join their value with the features."""

Owners = Mapping[str, Tensor | None]
"""Indices of the networks whose seeds have a part or a join; None for all; unused parts are left out."""


def effect(x: Tensor, seed: Parameters, who: Owners, tokens: int) -> tuple[Tensor, Callable[[Tensor, Parameters], Tensor]]:
    """Return the effect of a slot's seeds on features x [N, width, M], zero for networks without a seed, and its backward function.

    The backward function takes the gradient at the effect, writes the gradients of the parameters into tensors by name, and returns the
    gradient at x.
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


class Packing:
    """Layout of named parameters in a row.

    Attributes:
        shapes: shapes of the parameters, in order.
        size: entries of a row.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self.sizes = [prod(shape) for shape in self.shapes.values()]
        self.size = sum(self.sizes)

    def unpack(self, rows: Tensor) -> dict[str, Tensor]:
        """Return views of the parameters in rows [..., size or more], each [..., *shape]."""
        parts = rows[..., : self.size].split(self.sizes, -1)
        return {name: part.unflatten(-1, shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def norms(self, rows: Tensor) -> Tensor:
        """Return the norm of each parameter in rows [..., size or more], [..., parameters]; an infinite entry spoils all of its row."""
        parameter = torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes))
        member = F.one_hot(parameter).to(rows)
        return (rows[..., : self.size].square() @ member).sqrt()

    def pack(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the rows [..., size] of all parameters, each [..., *shape]."""
        return torch.cat([parameters[name].flatten(-len(shape)) if shape else parameters[name] for name, shape in self.shapes.items()], -1)


def seed_packing(width: int, *, attends: bool) -> Packing:
    """Return the layout of a slot's parameters for features of that width, with or without attention."""
    attention = dict.fromkeys(PARTS["attends"][1], (width, width)) if attends else {}
    return Packing(
        {
            "gain": (width,),
            "shift": (width,),
            "enter": (width, MAX_HIDDEN_UNITS),
            "enter_bias": (MAX_HIDDEN_UNITS,),
            "leave": (width, MAX_HIDDEN_UNITS),
            **attention,
            "gate": (width, 1),
            "gate_bias": (1,),
        }
    )


def anatomy() -> Tensor:
    """Return the parts of a seed by style and blueprint, [styles, blueprints, `ANATOMY`], bool."""
    rows = [[[kind.scales, kind.units > 0, kind.attends, style == "gated", style == "multiply"] for kind in BLUEPRINTS] for style in STYLES]
    return torch.tensor(rows)


def presence(packing: Packing) -> Tensor:
    """Return the parameters of a seed by style and blueprint, [styles, blueprints, size], bool."""
    rows = [torch.stack([_present(packing, kind, style) for kind in BLUEPRINTS]) for style in STYLES]
    return torch.stack(rows)


def _present(packing: Packing, blueprint: Blueprint, style: str) -> Tensor:
    parts = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in packing.shapes.items()}
    parts["gain"][:] = parts["shift"][:] = blueprint.scales
    parts["enter"][:, : blueprint.units] = True
    parts["enter_bias"][: blueprint.units] = True
    parts["leave"][:, : blueprint.units] = True
    for name in parts.keys() & PARTS["attends"][1]:
        parts[name][:] = blueprint.attends
    for name in JOINS["gated"][1]:
        parts[name][:] = style == "gated"
    return packing.pack(parts)


def newborn(packing: Packing, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return rows [*shape, size] of new seeds: input weights are random, output weights are zero."""

    def initial(name: str, size: tuple[int, ...]) -> Tensor:
        if name in ("enter", "query", "key", "value"):
            scale = ((2 if name == "enter" else 1) / size[0]) ** 0.5
            return torch.randn(*shape, *size, generator=generator, device=generator.device).mul_(scale)
        return torch.zeros(*shape, *size, device=generator.device)

    return packing.pack({name: initial(name, size) for name, size in packing.shapes.items()})


class Mixing(NamedTuple):
    """The part of the seeds in a pass.

    Attributes:
        alpha: [N, S], weight of each seed's effect.
        isolated: [N, S], bool: the seed learns as if it had full weight, and host and seed do not affect each other.
        who: by slot, the networks with each part; seeds without weight that are not isolated may be left out.
    """

    alpha: Tensor
    isolated: Tensor
    who: Sequence[Owners]


class Views(NamedTuple):
    """Parameters by name, in the rows of all networks: of the hosts [N, ...], and of each slot's seeds."""

    host: Mapping[str, Tensor]
    seeds: Sequence[Mapping[str, Tensor]]


class Pass(NamedTuple):
    """Logits [N, classes, M], and the values for the backward pass: inputs of the layers, features and effects of the slots."""

    logits: Tensor
    inputs: list[Tensor]
    features: list[Tensor]
    backs: list[Callable[[Tensor, Parameters], Tensor] | None]


class Network:
    """The architecture of hosts and seeds, without parameters.

    A host is a sequence of dense layers with a slot after each except the last. Inputs with tokens are rows of one-hot vectors, window by
    window. The host sees each token alone, and only seeds with attention see earlier tokens.

    Args:
        inputs: entries of an input row.
        width: units of the hidden layers.
        classes: number of classes.
        slots: hidden layers, S, each followed by a slot.
        tokens: rows of a window; 1 if rows are independent.
        linear: let hosts do without activations, so that only seeds are nonlinear.

    Attributes:
        host, seed: layouts of their rows.
        size: entries of a row for either.
    """

    def __init__(self, *, inputs: int, width: int, classes: int, slots: int, tokens: int = 1, linear: bool = False) -> None:
        self.slots, self.tokens, self.linear = slots, tokens, linear
        sizes = [inputs, *[width] * slots, classes]
        weights = {f"weight_{i}": (sizes[i + 1], sizes[i]) for i in range(slots + 1)}
        self.host = Packing({**weights, **{f"bias_{i}": (sizes[i + 1],) for i in range(slots + 1)}})
        self.seed = seed_packing(width, attends=tokens > 1)
        self.size = max(self.host.size, self.seed.size)

    def hosts(self, count: int, generator: torch.Generator) -> Tensor:
        """Return new hosts [count, size of a host] (He et al. 2015)."""

        def initial(shape: tuple[int, ...]) -> Tensor:
            if len(shape) == 1:
                return torch.zeros(count, *shape, device=generator.device)
            scale = (2 / shape[1]) ** 0.5
            return torch.randn(count, *shape, generator=generator, device=generator.device).mul_(scale)

        return self.host.pack({name: initial(shape) for name, shape in self.host.shapes.items()})

    def views(self, rows: Tensor) -> Views:
        """Return views of rows [N, 1 + S, size]: a host in the first, its seeds in the others."""
        return Views(self.host.unpack(rows[:, 0]), [self.seed.unpack(rows[:, 1 + slot]) for slot in range(self.slots)])

    def forward(self, weights: Views, inputs: Tensor, mixing: Mixing, *, subsets: bool = False) -> Pass:
        """Return the forward pass of rows [M, inputs], the same for all N networks.

        Args:
            weights: parameters of hosts and seeds; zero for parameters that a blueprint lacks.
            inputs: [M, inputs]; M is a multiple of `tokens`.
            mixing: part of the seeds.
            subsets: switch every subset of the seeds off in turn. A slot with seeds doubles the blocks of M output columns, and is off in
                the second half. Shared parts of the blocks are computed once.
        """
        passed = Pass(inputs, [inputs], [], [])
        for slot, who in enumerate(mixing.who):
            x = self._dense(weights.host, slot, passed.inputs[-1])
            joined, back = x if self.linear else x.relu_(), None
            if who:
                value, back = effect(x, weights.seeds[slot], who, self.tokens)
                joined = torch.addcmul(x, mixing.alpha[:, slot, None, None], value)
                joined = torch.cat([joined, x], 2) if subsets else joined
            passed.features.append(x)
            passed.inputs.append(joined)
            passed.backs.append(back)
        return passed._replace(logits=self._dense(weights.host, self.slots, passed.inputs[-1]))

    def backward(self, weights: Views, passed: Pass, d: Tensor, mixing: Mixing, gradients: Views) -> Tensor:
        """Write every network's own gradients; return the gradient norms at the seeds' effects, [N, S].

        Args:
            weights, mixing: arguments of the forward pass.
            passed: its result, without subsets.
            d: gradients at the logits, [N, classes, M].
            gradients: output, for every parameter.
        """
        alone = mixing.isolated.to(d.dtype)
        strength, through = mixing.alpha + alone, (1 - alone)[..., None, None]
        norms = []
        for slot in reversed(range(self.slots)):
            self._dense_slopes(d, slot + 1, passed.inputs[slot + 1], gradients.host)
            d = torch.bmm(weights.host[f"weight_{slot + 1}"].mT, d)
            norms.append(torch.linalg.vector_norm(d.flatten(1), dim=1))
            back = passed.backs[slot]
            if back is not None:
                at_effect = strength[:, slot, None, None] * d
                d = torch.addcmul(d, through[:, slot], back(at_effect, gradients.seeds[slot]))
            d = d if self.linear else rectified_(d, passed.features[slot])
        self._dense_slopes(d, 0, passed.inputs[0], gradients.host)
        return strength * torch.stack(norms[::-1], 1)

    def _dense(self, host: Parameters, layer: int, h: Tensor) -> Tensor:
        """Return a layer [N, out, M] of features [N, in, M], or of inputs [M, in] that all networks share, which is one product."""
        weight, bias = host[f"weight_{layer}"], host[f"bias_{layer}"]
        if layer:
            return torch.baddbmm(bias.unsqueeze(2), weight, h)
        return torch.addmm(bias.reshape(-1, 1), weight.flatten(0, 1), h.T).view(*bias.shape, -1)

    def _dense_slopes(self, d: Tensor, layer: int, h: Tensor, gradients: Parameters) -> None:
        slope = torch.bmm(d, h.mT) if layer else (d.flatten(0, 1) @ h).view(*d.shape[:2], -1)
        gradients[f"weight_{layer}"].copy_(slope)
        gradients[f"bias_{layer}"].copy_(d.sum(2))
