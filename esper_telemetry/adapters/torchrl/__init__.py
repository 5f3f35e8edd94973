"""TorchRL: telemetry for PPO with `ClipPPOLoss`, in a loop of the user's own (`attach_loss`) and in a `Trainer` (`attach_trainer`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.adapters.torchrl.listener import LossListener as LossListener
    from esper_telemetry.adapters.torchrl.listener import attach_loss as attach_loss
    from esper_telemetry.adapters.torchrl.listener import attach_trainer as attach_trainer

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {"esper_telemetry.adapters.torchrl.listener": ("LossListener", "attach_loss", "attach_trainer")},
)
