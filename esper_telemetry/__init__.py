"""Telemetry that tells you why your PPO run is going wrong, in the dashboard you already have open.

The tour:

    from esper_telemetry import PPO, PPOConfig, Telemetry, TensorBoardSink, attach, make_env

    with Telemetry([TensorBoardSink()], run_dir="runs/a") as telemetry:
        trainer = PPO(make_env("CartPole-v1", num_envs=8), PPOConfig())
        attach(telemetry, trainer)
        trainer.learn(total_steps=100_000)

and in a loop of your own:

    telemetry.observe(advantage_stats(advantages), value_fit(values, returns))
    telemetry.observe(gradient_health(agent), ratio_diagnostics(log_ratio, advantages, clip=0.2), epoch=epoch)
    telemetry.flush(env_step=global_step)

Names are imported when they are first used, so that a sink's process needs no torch and a trainer no backend.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper_telemetry.environments import make_env as make_env
    from esper_telemetry.group import Counts as Counts
    from esper_telemetry.group import Ess as Ess
    from esper_telemetry.group import Last as Last
    from esper_telemetry.group import Max as Max
    from esper_telemetry.group import Mean as Mean
    from esper_telemetry.group import Metric as Metric
    from esper_telemetry.group import MetricGroup as MetricGroup
    from esper_telemetry.group import Min as Min
    from esper_telemetry.group import Moments as Moments
    from esper_telemetry.group import Rows as Rows
    from esper_telemetry.group import Sum as Sum
    from esper_telemetry.group import label as label
    from esper_telemetry.group import reports as reports
    from esper_telemetry.hooks import Hooks as Hooks
    from esper_telemetry.journal import read_run as read_run
    from esper_telemetry.metrics import advantage_stats as advantage_stats
    from esper_telemetry.metrics import gradient_health as gradient_health
    from esper_telemetry.metrics import ratio_diagnostics as ratio_diagnostics
    from esper_telemetry.metrics import value_fit as value_fit
    from esper_telemetry.ppo import PPO as PPO
    from esper_telemetry.ppo import PPOConfig as PPOConfig
    from esper_telemetry.record import Alarm as Alarm
    from esper_telemetry.record import Axes as Axes
    from esper_telemetry.record import Level as Level
    from esper_telemetry.record import Record as Record
    from esper_telemetry.record import RunInfo as RunInfo
    from esper_telemetry.record import RunStatus as RunStatus
    from esper_telemetry.relay import doctor as doctor
    from esper_telemetry.relay import replay as replay
    from esper_telemetry.sinks import ConsoleSink as ConsoleSink
    from esper_telemetry.sinks import MLflowSink as MLflowSink
    from esper_telemetry.sinks import PermanentSinkError as PermanentSinkError
    from esper_telemetry.sinks import PrometheusSink as PrometheusSink
    from esper_telemetry.sinks import Sink as Sink
    from esper_telemetry.sinks import TensorBoardSink as TensorBoardSink
    from esper_telemetry.sinks import WandbSink as WandbSink
    from esper_telemetry.sinks import register_sink as register_sink
    from esper_telemetry.telemetry import Telemetry as Telemetry
    from esper_telemetry.wiring import attach as attach
    from esper_telemetry.wiring import watch_pair as watch_pair

__version__ = "0.1.0"

_HOME = {
    "environments": ("make_env",),
    "group": (
        *("Counts", "Ess", "Last", "Max", "Mean", "Min", "Moments", "Sum"),
        *("Metric", "MetricGroup", "Rows", "label", "reports"),
    ),
    "hooks": ("Hooks",),
    "journal": ("read_run",),
    "metrics": ("advantage_stats", "gradient_health", "ratio_diagnostics", "value_fit"),
    "ppo": ("PPO", "PPOConfig"),
    "record": ("Alarm", "Axes", "Level", "Record", "RunInfo", "RunStatus"),
    "relay": ("doctor", "replay"),
    "sinks": (
        *("ConsoleSink", "MLflowSink", "PrometheusSink", "TensorBoardSink", "WandbSink"),
        *("PermanentSinkError", "Sink", "register_sink"),
    ),
    "telemetry": ("Telemetry",),
    "wiring": ("attach", "watch_pair"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [*sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    """The public name, from the module that defines it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
