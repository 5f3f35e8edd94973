"""N hosts and their seeds in one pass there and back: every weight has a leading environment axis, every layer is a batched product.

Gradients are written down by hand: these networks are so small that to record and replay a graph would cost as much as the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_telemetry.lab.morphogenesis.blueprints import seed_packing
from esper_telemetry.lab.morphogenesis.effects import Parameters, Who, effect, rectified_
from esper_telemetry.lab.morphogenesis.packing import Packing


class Mixing(NamedTuple):
    """How seeds take part in a pass.

    Attributes:
        alpha: [N, S], weight of each seed's effect.
        isolated: [N, S], bool: the seed learns as if it counted in full, and the host neither feels it nor is felt by it.
        who: by slot, which networks have seeds with which parts; those of neither weight nor isolation need not be named.
    """

    alpha: Tensor
    isolated: Tensor
    who: Sequence[Who]


class Views(NamedTuple):
    """Parameters by name, in the rows of all networks: those of the hosts [N, ...], and of each slot's seeds."""

    host: Mapping[str, Tensor]
    seeds: Sequence[Mapping[str, Tensor]]


class Pass(NamedTuple):
    """What a pass gives: logits [N, classes, M], and what the way back needs: inputs of the layers, features and effects of the slots."""

    logits: Tensor
    inputs: list[Tensor]
    features: list[Tensor]
    backs: list[Callable[[Tensor, Parameters], Tensor] | None]


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

    Attributes:
        host, seed: where parameters stand in a row of theirs.
        size: of a row that has room for either.
    """

    def __init__(
        self, *, inputs: int, width: int, classes: int, slots: int, tokens: int = 1, linear: bool = False
    ) -> None:
        self.slots, self.tokens, self.linear = slots, tokens, linear
        sizes = [inputs, *[width] * slots, classes]
        weights = {f"weight_{i}": (sizes[i + 1], sizes[i]) for i in range(slots + 1)}
        self.host = Packing({**weights, **{f"bias_{i}": (sizes[i + 1],) for i in range(slots + 1)}})
        self.seed = seed_packing(width, attends=tokens > 1)
        self.size = max(self.host.size, self.seed.size)

    def hosts(self, count: int, generator: torch.Generator) -> Tensor:
        """New hosts [count, size of a host] (He et al. 2015)."""

        def drawn(shape: tuple[int, ...]) -> Tensor:
            if len(shape) == 1:
                return torch.zeros(count, *shape, device=generator.device)
            scale = (2 / shape[1]) ** 0.5
            return torch.randn(count, *shape, generator=generator, device=generator.device).mul_(scale)

        return self.host.pack({name: drawn(shape) for name, shape in self.host.shapes.items()})

    def views(self, rows: Tensor) -> Views:
        """The parameters in rows [N, 1 + S, size]: a host in the first, its seeds in the others."""
        return Views(self.host.unpack(rows[:, 0]), [self.seed.unpack(rows[:, 1 + slot]) for slot in range(self.slots)])

    def forward(self, weights: Views, inputs: Tensor, mixing: Mixing, *, subsets: bool = False) -> Pass:
        """One pass of rows [M, inputs], the same for all N networks.

        Args:
            weights: of hosts and seeds; zero where a blueprint has no parameter.
            inputs: [M, inputs]; M is a multiple of `tokens`.
            mixing: how the seeds take part.
            subsets: every subset of the seeds is switched off in turn. A slot with seeds doubles the blocks of M columns that come out:
                in the second half it is off. What blocks have in common is computed once.
        """
        found = Pass(inputs, [inputs], [], [])
        for slot, who in enumerate(mixing.who):
            x = self._dense(weights.host, slot, found.inputs[-1])
            joined, back = x if self.linear else x.relu_(), None
            if who:
                value, back = effect(x, weights.seeds[slot], who, self.tokens)
                joined = torch.addcmul(x, mixing.alpha[:, slot, None, None], value)
                joined = torch.cat([joined, x], 2) if subsets else joined
            found.features.append(x)
            found.inputs.append(joined)
            found.backs.append(back)
        return found._replace(logits=self._dense(weights.host, self.slots, found.inputs[-1]))

    def backward(self, weights: Views, passed: Pass, d: Tensor, mixing: Mixing, gradients: Views) -> Tensor:
        """Writes every network's own gradients; returns the norms of those at the seeds' effects, [N, S].

        Args:
            weights, mixing: as in the pass.
            passed: what it gave, without subsets.
            d: gradients at the logits, [N, classes, M].
            gradients: to be written to, wherever a parameter is.
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
        """A layer [N, out, M] behind features [N, in, M], or behind inputs [M, in] that all networks share, where it is one product."""
        weight, bias = host[f"weight_{layer}"], host[f"bias_{layer}"]
        if layer:
            return torch.baddbmm(bias.unsqueeze(2), weight, h)
        return torch.addmm(bias.reshape(-1, 1), weight.flatten(0, 1), h.T).view(*bias.shape, -1)

    def _dense_slopes(self, d: Tensor, layer: int, h: Tensor, gradients: Parameters) -> None:
        slope = torch.bmm(d, h.mT) if layer else (d.flatten(0, 1) @ h).view(*d.shape[:2], -1)
        gradients[f"weight_{layer}"].copy_(slope)
        gradients[f"bias_{layer}"].copy_(d.sum(2))
