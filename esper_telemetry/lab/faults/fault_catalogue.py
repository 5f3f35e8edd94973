"""All faults by name, and applying one to a trainer: within a block (`inject`) or from an update on (`schedule`)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from contextlib import contextmanager

from esper_telemetry.events import UpdateEnd
from esper_telemetry.lab.faults.data import BOUNDARY, DATA
from esper_telemetry.lab.faults.fault import Fault, NotApplicableError, Undo
from esper_telemetry.lab.faults.optimisation import NETWORK, OPTIMISATION
from esper_telemetry.ppo.trainer import PPO

FAULTS: tuple[Fault, ...] = (*OPTIMISATION, *DATA, *BOUNDARY, *NETWORK)
"""Faults of the optimizer and the losses, the data, the boundary of the environments, and the network."""


def find(name: str, dose: float | None = None) -> Fault:
    """Return the fault with that name, or the nearest dose of a family; raise ValueError for an unknown name."""
    named = next((fault for fault in FAULTS if fault.name == name), None)
    family = [fault for fault in FAULTS if fault.family == name]
    if named is not None:
        return named
    if family:
        return family[0] if dose is None else min(family, key=lambda fault: _log_distance(fault.dose, dose))
    names = sorted({fault.name for fault in FAULTS} | {fault.family for fault in FAULTS if fault.family})
    near = difflib.get_close_matches(name, names, n=3) or names
    raise ValueError(f"there is no fault {name!r}; {'did you mean' if len(near) <= 3 else 'there are'} {', '.join(near)}")


def _log_distance(one: float, other: float) -> float:
    """Distance of two doses in factors of e; infinite if their signs differ."""
    if one * other <= 0:
        return 0.0 if one == other else math.inf
    return abs(math.log(one / other))


@contextmanager
def inject(trainer: PPO, fault: str | Fault, dose: float | None = None) -> Iterator[Fault]:
    """Break the trainer inside the block, and yield the fault.

            with inject(trainer, "lr_x100"):
                trainer.learn(total_steps=50_000)

        Steps, settings, wrappers and parameters that were replaced are restored; the effects of the broken updates on the weights are kept.

    Raises:
        ValueError: an unknown fault, or a dose out of its range.
        NotApplicableError: the trainer lacks what the fault needs.
    """
    fault = fault if isinstance(fault, Fault) else find(fault, dose)
    undo = fault.apply(trainer, _applicable_dose(trainer, fault, dose))
    try:
        yield fault
    finally:
        undo()


def schedule(trainer: PPO, fault: str | Fault, dose: float | None = None, *, at_update: int, until: int | None = None) -> Undo:
    """Break the trainer from that update on, including its rollout, and restore it before the update `until`.

    Returns a function that restores the trainer at any time.

    Raises:
        ValueError: an unknown fault, a dose out of its range, an update that has passed.
        NotApplicableError: the trainer lacks what the fault needs.
    """
    fault = fault if isinstance(fault, Fault) else find(fault, dose)
    checked_dose = _applicable_dose(trainer, fault, dose)
    if at_update <= trainer.updates:
        raise ValueError(f"at_update must come after the {trainer.updates} updates already made, got {at_update}")
    if until is not None and until <= at_update:
        raise ValueError(f"until must come after at_update {at_update}, got {until}")
    undos: list[Undo] = []

    def restore() -> None:
        while undos:
            undos.pop()()

    def after_update(update: int) -> None:
        if update + 1 == at_update:
            undos.append(fault.apply(trainer, checked_dose))
        if update + 1 == until:
            restore()

    unsubscribe = trainer.hooks.on(UpdateEnd, lambda event: after_update(event.update), last=True)
    after_update(trainer.updates)

    def undo() -> None:
        unsubscribe()
        restore()

    return undo


def _applicable_dose(trainer: PPO, fault: Fault, dose: float | None) -> float:
    """Return the dose; raise if fault, dose and trainer do not fit."""
    missing = fault.missing(trainer)
    if missing is not None:
        raise NotApplicableError(missing)
    return fault.checked(dose)
