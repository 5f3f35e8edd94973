"""`esper-telemetry metrics`: the catalogue in the terminal or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table

from esper_telemetry.catalogue import catalogue

if TYPE_CHECKING:
    from esper_telemetry.cli import Metrics


def metrics(options: Metrics) -> int:
    """Prints every declared metric."""
    if options.json:
        print(json.dumps([{"key": metric.key, **asdict(metric.info())} for metric in catalogue()], indent=1))
        return 0
    shares = {"unit": 2, "what it tells": 5, "healthy": 2, "warn": 2, "critical": 2}
    columns = (Column(title, ratio=share) for title, share in shares.items())
    table = Table(Column("key", no_wrap=True), *columns, expand=True)
    for metric in catalogue():
        table.add_row(metric.key, metric.unit, metric.question, metric.healthy, metric.warn, metric.critical)
    Console(width=None if Console().is_terminal else 200, markup=False).print(table)
    return 0
