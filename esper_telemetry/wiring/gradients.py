"""Gradients of every minibatch, from the norms that clipping needs anyway, summarised once per update."""

from __future__ import annotations

import torch
from torch import Tensor

from esper_telemetry.events import BackwardEnd, RunStart, TrunkBackward, UpdateEnd
from esper_telemetry.metrics.gradients import (
    LayerGradients,
    coefficients,
    gradient_norms,
    group_interference,
    leaf_interference,
)
from esper_telemetry.record import Level
from esper_telemetry.telemetry import Telemetry
from esper_telemetry.wiring.family import Listener

MOST_LAYERS = 64
"""Tensors of which NORMAL still reports each; DEBUG reports all."""


class Gradients:
    """Observes `grad/*`."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._groups: dict[str, list[str]] = {}
        self._numels: dict[str, int] = {}
        self._passes: list[BackwardEnd] = []
        self._leaves: list[tuple[Tensor, Tensor]] = []

    def listen(self, listener: Listener) -> None:
        """Hears the backward passes and `UpdateEnd`."""
        listener.on(RunStart, self._declare)
        listener.on(TrunkBackward, self._keep_leaves)
        listener.on(BackwardEnd, self._passes.append)
        listener.on(UpdateEnd, self._observe)

    def _declare(self, event: RunStart) -> None:
        self._groups = dict(event.facts.get("groups", {}))

    def _keep_leaves(self, event: TrunkBackward) -> None:
        if event.shared:
            self._leaves.append((event.actor, event.critic))

    def _observe(self, _: UpdateEnd) -> None:
        passes, leaves = list(self._passes), list(self._leaves)
        self._passes.clear()
        self._leaves.clear()
        for part in _with_equal_names(passes):
            self._observe_passes(part, leaves if len(leaves) == len(part) else [])

    def _observe_passes(self, passes: list[BackwardEnd], leaves: list[tuple[Tensor, Tensor]]) -> None:
        first, epochs = passes[0], [event.epoch for event in passes]
        norms = torch.stack([event.norms for event in passes])
        numels = [first.parameters[name].numel() for name in first.names]
        found = gradient_norms(norms, first.names, self._groups, numels, max_norm=first.max_norm)
        if len(first.names) > MOST_LAYERS and self._telemetry.level < Level.DEBUG:
            found = found._replace(layers=LayerGradients(()))
        self._telemetry.observe(found, epoch=epochs)
        if leaves:
            actors, critics = zip(*leaves, strict=True)
            self._telemetry.observe(leaf_interference(actors, critics, coefs=coefficients(found.clip)), epoch=epochs)
        else:
            self._telemetry.observe(group_interference(found), epoch=epochs)


def _with_equal_names(passes: list[BackwardEnd]) -> list[list[BackwardEnd]]:
    """Backward passes with gradients in the same tensors, together; a frozen part of the network makes another list."""
    found: dict[tuple[str, ...], list[BackwardEnd]] = {}
    for event in passes:
        found.setdefault(event.names, []).append(event)
    return [part for names, part in found.items() if names]
