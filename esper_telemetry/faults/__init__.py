"""Ways to break a training run on purpose, and the score of who noticed.

    with inject(trainer, "lr_x100"):
        trainer.learn(total_steps=50_000)

    schedule(trainer, "lr", dose=30, at_update=25)

`python -m esper_telemetry.faults list` says what there is, `score` runs faults on several environments and judges the detectors.
"""

from esper_telemetry.faults.catalogue import FAULTS, find
from esper_telemetry.faults.fault import Fault, NotApplicableError
from esper_telemetry.faults.injection import inject, schedule

__all__ = ["FAULTS", "Fault", "NotApplicableError", "find", "inject", "schedule"]
