"""All faults, and how to find one."""

from __future__ import annotations

import difflib
import math

from esper_telemetry.lab.faults.boundary import BOUNDARY
from esper_telemetry.lab.faults.data import DATA
from esper_telemetry.lab.faults.fault import Fault
from esper_telemetry.lab.faults.network import NETWORK
from esper_telemetry.lab.faults.optimisation import OPTIMISATION

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
