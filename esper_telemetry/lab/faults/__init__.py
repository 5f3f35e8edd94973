"""Faults that break a training run on purpose, and the score of the alarms that find them.

    with inject(trainer, "lr_x100"):
        trainer.learn(total_steps=50_000)

    schedule(trainer, "lr", dose=30, at_update=25)

`python -m esper_telemetry.lab.faults list` prints the faults, `score` trains them on several environments and scores the detectors.
"""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.lab.faults.fault import Fault as Fault
    from esper_telemetry.lab.faults.fault import NotApplicableError as NotApplicableError
    from esper_telemetry.lab.faults.fault_catalogue import FAULTS as FAULTS
    from esper_telemetry.lab.faults.fault_catalogue import find as find
    from esper_telemetry.lab.faults.fault_catalogue import inject as inject
    from esper_telemetry.lab.faults.fault_catalogue import schedule as schedule

__all__, __getattr__, __dir__ = lazy_names(__name__)
