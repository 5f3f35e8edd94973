"""All faults, and how to find one.

Breaking a trainer for a while: now, or from an update on.
"""

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
"""By what they break: the optimizer and the losses, the data, the boundary of the environments, the network."""


def find(name: str, dose: float | None = None) -> Fault:
    """The fault of that name, or of a family of doses the one whose own dose is nearest; raises ValueError for an unknown name."""
    named = next((fault for fault in FAULTS if fault.name == name), None)
    kin = [fault for fault in FAULTS if fault.family == name]
    if named is not None:
        return named
    if kin:
        return kin[0] if dose is None else min(kin, key=lambda fault: distance(fault.dose, dose))
    known = sorted({fault.name for fault in FAULTS} | {fault.family for fault in FAULTS if fault.family})
    near = difflib.get_close_matches(name, known, n=3) or known
    raise ValueError(
        f"there is no fault {name!r}; {'did you mean' if len(near) <= 3 else 'there are'} {', '.join(near)}"
    )


def distance(one: float, other: float) -> float:
    """How many factors of e apart two doses are; infinite where their signs differ."""
    if one * other <= 0:
        return 0.0 if one == other else math.inf
    return abs(math.log(one / other))


@contextmanager
def inject(trainer: PPO, fault: str | Fault, dose: float | None = None) -> Iterator[Fault]:
    """Breaks the trainer within, and yields the fault.

        with inject(trainer, "lr_x100"):
            trainer.learn(total_steps=50_000)

    Steps, settings, wrappers and parameters that were replaced are put back; what the broken updates have learned stays.

    Raises:
        ValueError: an unknown fault, or a dose out of its range.
        NotApplicableError: the trainer lacks what the fault needs.
    """
    found = resolved(fault, dose)
    undo = applied(trainer, found, dose)
    try:
        yield found
    finally:
        undo()


def schedule(
    trainer: PPO, fault: str | Fault, dose: float | None = None, *, at_update: int, until: int | None = None
) -> Undo:
    """Breaks the trainer from that update on, its rollout included, and mends it before the update `until`.

    Returns the function that takes everything back, whenever it is called.

    Raises:
        ValueError: an unknown fault, a dose out of its range, an update that has passed.
        NotApplicableError: the trainer lacks what the fault needs.
    """
    found = resolved(fault, dose)
    _require_applicable(trainer, found, dose)
    if at_update <= trainer.updates:
        raise ValueError(f"at_update must come after the {trainer.updates} updates already made, got {at_update}")
    if until is not None and until <= at_update:
        raise ValueError(f"until must come after at_update {at_update}, got {until}")
    undos: list[Undo] = []

    def mend() -> None:
        while undos:
            undos.pop()()

    def turn(update: int) -> None:
        if update + 1 == at_update:
            undos.append(applied(trainer, found, dose))
        if update + 1 == until:
            mend()

    stop = trainer.hooks.on(UpdateEnd, lambda event: turn(event.update), last=True)
    turn(trainer.updates)

    def take_back() -> None:
        stop()
        mend()

    return take_back


def resolved(fault: str | Fault, dose: float | None) -> Fault:
    """The fault that is meant."""
    return fault if isinstance(fault, Fault) else find(fault, dose)


def applied(trainer: PPO, fault: Fault, dose: float | None) -> Undo:
    """Breaks the trainer; returns the function that mends it, which does so once."""
    undos = [fault.apply(trainer, _require_applicable(trainer, fault, dose))]

    def undo() -> None:
        while undos:
            undos.pop()()

    return undo


def _require_applicable(trainer: PPO, fault: Fault, dose: float | None) -> float:
    """The dose; raises where fault, dose and trainer do not fit."""
    missing = fault.missing(trainer)
    if missing is not None:
        raise NotApplicableError(missing)
    return fault.checked(dose)
