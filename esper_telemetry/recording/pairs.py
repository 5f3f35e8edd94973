"""Compares the gradients of a module and of the network that hosts it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from esper_telemetry.core.metric import segment
from esper_telemetry.core.record import Level
from esper_telemetry.events import BackwardEnd, Remover
from esper_telemetry.metrics.gradients.actor_critic import pair_gradients
from esper_telemetry.recording.probes import TimedListener
from esper_telemetry.session import TelemetrySession
from esper_telemetry.updates.extensions import EventSource

logger = logging.getLogger("esper_telemetry")


def measure_pair(session: TelemetrySession, source: EventSource, name: str, *, module: nn.Module, host: nn.Module) -> Remover:
    """Measure the gradients of `module` and `host` at every optimizer step; see `watch_pair`."""
    own, hosts = ({id(parameter) for parameter in part.parameters()} for part in (module, host))
    if not own or not hosts:
        raise ValueError(f"pair {name!r} needs a module and a host with parameters, and one of them lacks them")
    if own & hosts:
        raise ValueError(f"pair {name!r} needs a module and a host apart, and they share {len(own & hosts)} parameters")
    if session.level < Level.NORMAL:
        return lambda: None
    probe = PairProbe(session, segment(name), module, host)
    listener = TimedListener(session.clock, source.hooks)
    listener.on(BackwardEnd, probe.observe)
    handle = module.register_forward_hook(probe.follow)

    def stop() -> None:
        listener.stop()
        handle.remove()

    return stop


class PairProbe:
    """Observes one pair. The gradient at the module's output is the last one before all parameters have gradients."""

    def __init__(self, telemetry: TelemetrySession, name: str, module: nn.Module, host: nn.Module) -> None:
        self._telemetry = telemetry
        self._name = name
        self._module, self._host = module, host
        self._upstream: Tensor | None = None
        self._warned = False

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("pair %r is not measured: its module and its host need parameters that the same optimizer trains", self._name)

    def __reduce__(self) -> tuple[type[_NoProbe], tuple[()]]:
        return _NoProbe, ()

    def follow(self, _: nn.Module, __: object, output: object) -> None:
        """Wait for the gradient of an output."""

        def arrived(gradient: Tensor) -> None:
            self._upstream = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)

        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(arrived)

    @torch.no_grad()
    def observe(self, event: BackwardEnd) -> None:
        """Measure one step, unless another optimizer trains one of the parts."""
        upstream, self._upstream = self._upstream, None
        trained = {id(parameter) for parameter in event.parameters.values()}
        for part in (self._module, self._host):
            learning = {id(parameter) for parameter in part.parameters() if parameter.requires_grad}
            if learning and learning.isdisjoint(trained):
                self._warn()
                return
        own, hosts = (_gradients(event, part.parameters()) for part in (self._module, self._host))
        norms = (event.norms[list(own)], event.norms[list(hosts)])
        group = pair_gradients(self._name, list(own.values()), list(hosts.values()), norms=norms, upstream=upstream)
        self._telemetry.observe((group,), epoch=event.epoch, step=event.step)


class _NoProbe:
    """Replacement of a `PairProbe` in copies and pickles of its module."""

    def follow(self, *_: object) -> None:
        """Do nothing."""


def _gradients(event: BackwardEnd, parameters: Iterable[Tensor]) -> Mapping[int, Tensor]:
    """Gradients of these parameters by their index in the event; parameters without a gradient are left out."""
    wanted = {id(parameter) for parameter in parameters}
    trained = {index: event.parameters[name] for index, name in enumerate(event.names)}
    return {index: p.grad for index, p in trained.items() if id(p) in wanted and p.grad is not None}
