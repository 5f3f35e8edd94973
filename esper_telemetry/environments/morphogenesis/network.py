"""N hosts and their seeds in one forward pass: every weight has a leading environment axis, every layer is a batched product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_telemetry.environments.morphogenesis.blueprints import STYLES, seed_packing
from esper_telemetry.environments.morphogenesis.packing import Packing

MULTIPLY, GATED = STYLES.index("multiply"), STYLES.index("gated")


class Mixing(NamedTuple):
    """How seeds take part in a pass.

    Attributes:
        alpha: [N, S], weight of each seed's effect.
        isolated: [N, S], bool: the seed learns as if it counted in full, and the host neither feels it nor is felt by it.
        style: [N, S], index into `STYLES`.
    """

    alpha: Tensor
    isolated: Tensor
    style: Tensor


class Output(NamedTuple):
    """What a pass gives: logits [N, M, classes], and the effect of each slot before it is weighed, [N, M, width]."""

    logits: Tensor
    effects: list[Tensor]


class Network:
    """The shape of hosts and seeds; holds no parameters.

    A host is a row of dense layers with a slot behind each but the last. Inputs with tokens are rows of one-hot vectors, window by
    window: the host sees each token alone, and only seeds that attend see those before it.

    Args:
        inputs: entries of an input row.
        width: of the hidden layers.
        classes: what rows are told apart into.
        slots: hidden layers, S, each followed by a slot.
        tokens: rows of a window; 1 where rows are independent.
        linear: hosts have no activations, so that whatever bends is a seed.
    """

    def __init__(
        self, *, inputs: int, width: int, classes: int, slots: int, tokens: int = 1, linear: bool = False
    ) -> None:
        self.slots, self.tokens, self.linear = slots, tokens, linear
        sizes = [inputs, *[width] * slots, classes]
        weights = {f"weight_{i}": (sizes[i], sizes[i + 1]) for i in range(slots + 1)}
        self.host = Packing({**weights, **{f"bias_{i}": (sizes[i + 1],) for i in range(slots + 1)}})
        self.seed = seed_packing(width)

    def hosts(self, count: int, generator: torch.Generator) -> Tensor:
        """New hosts [count, size] (He et al. 2015)."""

        def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
            if len(shape) == 1:
                return torch.zeros(count, *shape, device=generator.device)
            scale = (2 / shape[0]) ** 0.5
            return torch.randn(count, *shape, generator=generator, device=generator.device).mul_(scale)

        return self.host.pack({name: drawn(name, shape) for name, shape in self.host.shapes.items()})

    def forward(self, hosts: Tensor, seeds: Tensor, inputs: Tensor, mixing: Mixing, *, subsets: bool = False) -> Output:
        """One pass of rows [M, inputs], the same for all N networks.

        Args:
            hosts: [N, size of a host].
            seeds: [N, S, size of a seed], zero where a blueprint has no parameter.
            inputs: [M, inputs]; M is a multiple of `tokens`.
            mixing: how the seeds take part.
            subsets: every subset of the seeds is switched off in turn: 2^S blocks of M rows each come out, in which seed s is off
                where bit s of the block's number is set. What blocks have in common is computed once.
        """
        host = self.host.unpack(hosts)
        h, effects = inputs.expand(len(hosts), *inputs.shape), []
        for slot in range(self.slots):
            h = self._dense(host, slot, h)
            h = h if self.linear else F.relu(h)
            isolated = mixing.isolated[:, slot, None, None]
            x = torch.where(isolated, h.detach(), h)
            effect = self._effect(x, self.seed.unpack(seeds[:, slot]), mixing.style[:, slot, None, None])
            effects.append(effect)
            weighed = torch.addcmul(h, mixing.alpha[:, slot, None, None], effect)
            h = torch.cat([weighed, h], 1) if subsets else weighed + isolated * (effect - effect.detach())
        return Output(self._dense(host, self.slots, h), effects)

    def _dense(self, host: Mapping[str, Tensor], layer: int, h: Tensor) -> Tensor:
        return torch.baddbmm(host[f"bias_{layer}"].unsqueeze(1), h, host[f"weight_{layer}"])

    def _effect(self, x: Tensor, seed: Mapping[str, Tensor], style: Tensor) -> Tensor:
        """What a seed adds to its features x [N, M, width], by its style [N, 1, 1]."""
        normed = F.layer_norm(x, x.shape[-1:])
        units = F.relu(torch.baddbmm(seed["enter_bias"].unsqueeze(1), x, seed["enter"]))
        found = torch.baddbmm(normed * seed["gain"].unsqueeze(1) + seed["shift"].unsqueeze(1), units, seed["leave"])
        if self.tokens > 1:
            found = found + self._attention(normed, seed)
        gate = torch.sigmoid(torch.baddbmm(seed["gate_bias"].unsqueeze(1), x, seed["gate"]))
        joined = torch.where(style == GATED, gate * found, found)
        return torch.where(style == MULTIPLY, x * torch.tanh(found), joined)

    def _attention(self, x: Tensor, seed: Mapping[str, Tensor]) -> Tensor:
        """Causal attention with one head among the tokens of each window."""
        query, key, value = (
            torch.bmm(x, seed[name]).unflatten(1, (-1, self.tokens)) for name in ("query", "key", "value")
        )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.bmm(found.flatten(1, 2), seed["out"])
