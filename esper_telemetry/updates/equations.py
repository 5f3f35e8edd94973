"""The equations that the columns of a sampled update allow to check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from esper_telemetry.updates.containment import Measurement
from esper_telemetry.updates.data import UpdateData
from esper_telemetry.updates.target_equations import target_checks


def equation_checks(update: UpdateData, facts: Mapping[str, Any]) -> Iterator[Measurement]:
    """Yield the check of every equation whose columns the update has; `facts` are those of the run."""
    yield from target_checks(update, facts)
