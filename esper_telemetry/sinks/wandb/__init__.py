"""Weights & Biases."""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.sinks.wandb.wandb_sink import WandbSink as WandbSink

__all__, __getattr__, __dir__ = lazy_names(__name__, {"esper_telemetry.sinks.wandb.wandb_sink": ("WandbSink",)})
