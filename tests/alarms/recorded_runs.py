"""Journals of real runs that were broken on purpose, kept small: only keys that rules read, four digits, stored by column.

`python tests/alarms/recorded_runs.py JOURNALS NAME...` makes them again from journals that
`python -m esper_telemetry.lab.faults score --keep JOURNALS` has written; NAME is a directory in JOURNALS.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper_telemetry.alarms import Detectors
from esper_telemetry.core.record import Alarm, AlarmEvent, Axes, Record

HERE = Path(__file__).parent / "recorded"
ENDINGS = (
    "/ema",
    "/ew_std",
    "/macd",
    "/acf1",
    "/page_hinkley",
    "/robust_z",
    "/mk_z",
    "/slope",
    "/goertzel",
    "/zero_frac",
    "/g",
)
MIDDLES = (
    "/threshold_",
    "/severity_",
    "/err/",
    "alarm/",
    "opt/weight_norm",
    "/norm_preclip/drift",
    "histogram",
    "/norm_postclip",
)
"""Parts of keys that no rule reads, or that would take half of the space."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One run.

    Attributes:
        name: name of its file.
        facts: facts of the run.
        broken: the first broken update.
        records: records of all updates.
    """

    name: str
    facts: Mapping[str, Any]
    broken: int
    records: tuple[Record, ...]

    def raised(self) -> dict[str, Alarm]:
        """Types of alarm with the first alarm of each; earlier alarms than the break are listed under `before`."""
        detectors, raised = Detectors(self.facts), dict[str, Alarm]()
        for record in self.records:
            for alarm in detectors.step(record).alarms:
                if alarm.event is AlarmEvent.RAISE and not alarm.type.startswith("telemetry/"):
                    raised.setdefault(alarm.type if record.axes.update >= self.broken else "before", alarm)
        return raised


def names() -> list[str]:
    return sorted(path.name.removesuffix(".json.gz") for path in HERE.glob("*.json.gz"))


def load(name: str) -> Recorded:
    content = json.loads(gzip.decompress((HERE / f"{name}.json.gz").read_bytes()))
    columns, records = content["values"], []
    for row, (update, env_step, gradient_step, partial) in enumerate(content["axes"]):
        values = {key: float(column[row]) for key, column in columns.items() if column[row] is not None}
        axes = Axes(update, env_step, gradient_step, 1e9 + update)
        records.append(Record(update, axes, values, partial=bool(partial)))
    return Recorded(name, content["facts"], content["broken"], tuple(records))


def store(name: str, facts: Mapping[str, Any], broken: int, records: Iterable[Record]) -> None:
    stored = list(records)
    keys = sorted({key for record in stored for key in record.values if wanted(key)})
    axes = [[r.axes.update, r.axes.env_step, r.axes.gradient_step, int(r.partial)] for r in stored]
    values = {key: [_short(record.values.get(key)) for record in stored] for key in keys}
    content = {"facts": dict(facts), "broken": broken, "axes": axes, "values": values}
    text = json.dumps(content, separators=(",", ":")).encode()
    HERE.mkdir(exist_ok=True)
    (HERE / f"{name}.json.gz").write_bytes(gzip.compress(text, 9, mtime=0))


def wanted(key: str) -> bool:
    """Return True if some rule may read the key."""
    return not key.endswith(ENDINGS) and not any(part in key for part in MIDDLES)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def main(journals: str, *chosen: str) -> None:
    from esper_telemetry.lab.faults.verdicts import read_journaled_run

    for name in chosen:
        run = read_journaled_run(Path(journals) / name)
        store(name, run.facts, run.run.at_update, run.records)


if __name__ == "__main__":
    main(*sys.argv[1:])
