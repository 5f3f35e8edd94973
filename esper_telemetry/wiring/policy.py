"""What the minibatches of an update say of the policy, summarised in one pass when the update is over."""

from __future__ import annotations

import torch
from torch import Tensor

from esper_telemetry.events import MinibatchEnd, RunStart, UpdateEnd
from esper_telemetry.metrics import (
    entropy_stats,
    loss_terms,
    normalized_advantage_stats,
    ratio_diagnostics,
)
from esper_telemetry.telemetry import Telemetry
from esper_telemetry.wiring.family import Listener, stack, stack_valid


class Policy:
    """Observes `policy/*`, `adv/norm/*`, `loss/*` and the identity of the first minibatch."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._clip: float | None = None
        self._minibatches: list[MinibatchEnd] = []

    def listen(self, listener: Listener) -> None:
        """Hears the minibatches and `UpdateEnd`."""
        listener.on(RunStart, self._declare)
        listener.on(MinibatchEnd, self._minibatches.append)
        listener.on(UpdateEnd, self._observe)

    def _declare(self, event: RunStart) -> None:
        self._clip = event.facts.get("clip")

    def _observe(self, _: UpdateEnd) -> None:
        minibatches = list(self._minibatches)
        self._minibatches.clear()
        if not minibatches:
            return
        valid = stack_valid([m.log_ratio for m in minibatches], [m.valid for m in minibatches])
        log_ratio = stack([m.log_ratio for m in minibatches])
        advantages = stack([m.advantages for m in minibatches])
        epochs = [m.epoch for m in minibatches]
        self._telemetry.observe(
            ratio_diagnostics(log_ratio, advantages, clip=self._clip, valid=valid, dim=-1),
            normalized_advantage_stats(advantages, valid=valid, dim=-1),
            epoch=epochs,
        )
        self._observe_entropy(minibatches, valid, epochs)
        self._observe_losses(minibatches, epochs)

    def _observe_entropy(self, minibatches: list[MinibatchEnd], valid: Tensor | None, epochs: list[int]) -> None:
        first = minibatches[0]
        logits = {head: stack([m.logits[head] for m in minibatches]) for head in first.logits}
        masks = {head: stack([m.action_masks[head] for m in minibatches]) for head in first.action_masks}
        log_std = {head: stack([_per_row(m, head) for m in minibatches]) for head in first.log_std}
        if logits or log_std:
            self._telemetry.observe(
                entropy_stats(logits, action_masks=masks, log_std=log_std, valid=valid, dim=-1), epoch=epochs
            )

    def _observe_losses(self, minibatches: list[MinibatchEnd], epochs: list[int]) -> None:
        losses = {name: torch.stack([m.losses[name] for m in minibatches]) for name in minibatches[0].losses}
        counts = [len(m.log_ratio) for m in minibatches]
        self._telemetry.observe(loss_terms(**losses, count=counts), epoch=epochs)


def _per_row(minibatch: MinibatchEnd, head: str) -> Tensor:
    """Log standard deviations [N, D] of a head, whether or not they depend on the state."""
    return minibatch.log_std[head].expand(len(minibatch.log_ratio), -1)
