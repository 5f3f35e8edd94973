"""Watching a module beside the network that hosts it: does it learn, and if not, why?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from esper_telemetry.adapters.listener import TimedListener
from esper_telemetry.core.metric import segment
from esper_telemetry.core.record import Level
from esper_telemetry.events import BackwardEnd, Hooks, Remover
from esper_telemetry.metrics.gradients.interference import pair_gradients
from esper_telemetry.telemetry import Telemetry, session_of


class PairSource(Protocol):
    """Anything that emits events."""

    @property
    def hooks(self) -> Hooks:
        """Where to listen."""


def watch_pair(telemetry: Telemetry, source: PairSource, name: str, *, module: nn.Module, host: nn.Module) -> Remover:
    """Measures the gradients of `module` next to those of `host` at every optimizer step; returns what ends this.

    For a module whose share in learning is in question: a new block, an adapter, a gated branch. It costs some tensor operations per
    step. Below NORMAL nothing is measured.

    Raises:
        ValueError: where one of them has no parameters, or they share some.
    """
    _check(name, module, host)
    if telemetry.level < Level.NORMAL:
        return lambda: None
    watch = _Watch(telemetry, segment(name), module, host)
    listener = TimedListener(session_of(telemetry).clock, source.hooks)
    listener.on(BackwardEnd, watch.observe)
    handle = module.register_forward_hook(watch.follow)

    def stop() -> None:
        listener.stop()
        handle.remove()

    return stop


def _check(name: str, module: nn.Module, host: nn.Module) -> None:
    own, hosts = ({id(parameter) for parameter in part.parameters()} for part in (module, host))
    if not own or not hosts:
        raise ValueError(f"pair {name!r} needs a module and a host with parameters, and one of them has none")
    if own & hosts:
        raise ValueError(f"pair {name!r} needs a module and a host apart, and they share {len(own & hosts)} parameters")


class _Watch:
    """One pair. The gradient at the module's output is the last that came before all gradients were there."""

    def __init__(self, telemetry: Telemetry, name: str, module: nn.Module, host: nn.Module) -> None:
        self._telemetry = telemetry
        self._name = name
        self._module, self._host = module, host
        self._upstream: Tensor | None = None

    def follow(self, _: nn.Module, __: object, output: object) -> None:
        """Waits for the gradient of an output."""
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self._arrived)

    @torch.no_grad()
    def observe(self, event: BackwardEnd) -> None:
        """Measures one step."""
        upstream, self._upstream = self._upstream, None
        own, hosts = (_part(event, part.parameters()) for part in (self._module, self._host))
        norms = (_norms(event, own), _norms(event, hosts))
        group = pair_gradients(self._name, list(own.values()), list(hosts.values()), norms=norms, upstream=upstream)
        self._telemetry.observe(group, epoch=event.epoch, step=event.step)

    def _arrived(self, gradient: Tensor) -> None:
        self._upstream = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)


def _part(event: BackwardEnd, parameters: Iterable[Tensor]) -> Mapping[int, Tensor]:
    """Gradients of these parameters, as far as they exist, by their place in the event."""
    wanted = {id(parameter) for parameter in parameters}
    found: dict[int, Tensor] = {}
    for place, name in enumerate(event.names):
        parameter = event.parameters[name]
        if id(parameter) in wanted and parameter.grad is not None:
            found[place] = parameter.grad
    return found


def _norms(event: BackwardEnd, part: Mapping[int, Tensor]) -> Tensor:
    return event.norms[list(part)]
