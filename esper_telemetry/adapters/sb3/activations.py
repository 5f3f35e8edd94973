"""How the layers of an actor respond, heard at its nonlinearities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from esper_telemetry.adapters.sb3.taps import listen

NONLINEAR = (nn.ReLU, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Mish, nn.Softplus)


class Heard:
    """What went through nonlinearities, in order.

    Attributes:
        layers: what they gave, [n, D] by name.
        last: what the last of them was given, [n, D]; None where there is none.
    """

    def __init__(self) -> None:
        self.layers: dict[str, Tensor] = {}
        self.last: Tensor | None = None

    def hear(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        """One was called."""
        self.layers[name], self.last = result.flatten(1), args[0].flatten(1)


@contextmanager
def heard(policy: Any) -> Iterator[Heard]:
    """Listens to the actor's nonlinearities; inner ones of convolutions are passed over, as their responses are maps and not units."""
    found = Heard()
    parts = {"features": policy.features_extractor, "actor": policy.mlp_extractor.policy_net}
    with ExitStack() as stack:
        for part, network in parts.items():
            for name, module in network.named_modules():
                if isinstance(module, NONLINEAR):
                    stack.callback(listen(module, "forward", partial(_flat_only, found, f"{part}_{name}")))
        yield found


def _flat_only(found: Heard, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
    if result.dim() == 2:
        found.hear(name.replace(".", "_"), args, kwargs, result)
