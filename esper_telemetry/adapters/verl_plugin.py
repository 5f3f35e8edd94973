"""Entry point of the group `verl.plugins`: records every training of verl if `ESPER_TELEMETRY_RUN_DIR` is set, and does nothing otherwise.

verl loads the plugin in each of its processes. Only the process that trains imports `PPOTrainer`, whose `fit` is wrapped there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

RUN_DIR_VARIABLE = "ESPER_TELEMETRY_RUN_DIR"
"""Directory of the run, which all records are written to; `auto` for a new one below `runs`."""

SINKS_VARIABLE = "ESPER_TELEMETRY_SINKS"
"""Sinks, such as `console,tensorboard`; `console` by default."""

TRAINER_MODULE = "verl.trainer.ppo.v1.trainer_base"

_logger = logging.getLogger("esper_telemetry")


@contextmanager
def recorded(trainer: Any, run_dir: str, sinks: list[str]) -> Iterator[None]:
    """Context in which a trainer is recorded. If telemetry cannot start, it costs a warning."""
    from esper_telemetry.adapters.verl import attach_trainer
    from esper_telemetry.telemetry import Telemetry

    with ExitStack() as stack:
        try:
            telemetry = stack.enter_context(Telemetry(sinks, run_dir=run_dir, name="verl"))
            attach_trainer(telemetry, trainer)
        except Exception as error:
            _logger.warning("esper-telemetry: this training is not recorded: %s", error)
        yield


def wrap_fit(module: ModuleType) -> None:
    """Record `PPOTrainer.fit` of verl's module."""
    fit: Callable[..., Any] = module.PPOTrainer.fit
    run_dir, sinks = os.environ[RUN_DIR_VARIABLE], os.environ.get(SINKS_VARIABLE, "console")

    @wraps(fit)
    def recorded_fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with recorded(trainer, run_dir, [one for one in sinks.split(",") if one]):
            return fit(trainer, *args, **kwargs)

    module.PPOTrainer.fit = recorded_fit


if os.environ.get(RUN_DIR_VARIABLE):
    from esper_telemetry.adapters.script.patches import AfterImport

    AfterImport({TRAINER_MODULE: wrap_fit}).install()
