"""Journals of real runs that were broken on purpose, kept small: only keys that rules read, four digits, stored by column.

A recording with the name of a run is a whole run: `python tests/alarms/recorded_runs.py runs JOURNALS NAME...` makes it again from the
journals that `python -m esper_telemetry.lab.faults score --keep JOURNALS` has written. A recording with the name of a type of alarm ends
with the first alarm of this type and has only what its text needs: `recorded_runs.py alarm RUN_DIR TYPE` makes it again from the run of
the test that raises this alarm. `recorded_runs.py table` prints the table in docs/alarms.md.
"""

import gzip
import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from esper_telemetry.alarms import Detectors, Thresholds
from esper_telemetry.core.record import RUN_FAILED, Alarm, AlarmEvent, Axes, Record
from esper_telemetry.journal.read import read_run

HERE = Path(__file__).parent / "recorded"
ENDINGS = ("/ema", "/ew_std", "/macd", "/acf1", "/page_hinkley", "/robust_z", "/mk_z", "/slope", "/goertzel", "/zero_frac", "/g")
MIDDLES = ("/threshold_", "/severity_", "/err/", "alarm/", "opt/weight_norm", "/norm_preclip/drift", "histogram", "/norm_postclip")
"""Parts of keys that no rule reads, or that would take half of the space."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One run.

    Attributes:
        name: name of its file.
        facts: facts of the run.
        broken: the first broken update.
        records: records of all updates.
        failure: data of the event of the exception that ended the run; empty without one.
    """

    name: str
    facts: Mapping[str, Any]
    broken: int
    records: tuple[Record, ...]
    failure: Mapping[str, Any]

    def raised(self) -> dict[str, Alarm]:
        """Types of alarm with the first alarm of each; an alarm before the break is listed under `before`.

        Alarms about telemetry count only in a recording of their own, because other recordings lack most keys.
        """
        detectors, raised = Detectors(self.facts), dict[str, Alarm]()
        for record in self.records:
            for alarm in detectors.step(record).alarms:
                if alarm.event is AlarmEvent.RAISE and (not alarm.type.startswith("telemetry/") or alarm.type == kind_of(self.name)):
                    raised.setdefault(alarm.type if record.axes.update >= self.broken else "before", alarm)
        if self.failure:
            last = self.records[-1]
            raised |= {alarm.type: alarm for alarm in detectors.failure(last.seq + 1, last.axes, self.failure).alarms}
        return raised


def kind_of(name: str) -> str:
    """Return the type of alarm that a name of a recording stands for, such as `task/no_episodes` for `task-no_episodes`."""
    return name.replace("-", "/", 1)


def names() -> list[str]:
    return sorted(path.name.removesuffix(".json.gz") for path in HERE.glob("*.json.gz"))


@cache
def alarms_of(name: str) -> dict[str, Alarm]:
    return load(name).raised()


def texts() -> dict[str, str]:
    """Return the texts of the first alarm of each type, of the recordings in the order of their names."""
    first = {kind: alarm.text for name in reversed(names()) for kind, alarm in alarms_of(name).items()}
    return {kind: " ".join(first[kind].split()) for kind in sorted(first)}


def load(name: str) -> Recorded:
    content = json.loads(gzip.decompress((HERE / f"{name}.json.gz").read_bytes()))
    columns, records = content["values"], []
    for row, (update, env_step, gradient_step, partial) in enumerate(content["axes"]):
        values = {key: float(column[row]) for key, column in columns.items() if column[row] is not None}
        axes = Axes(update, env_step, gradient_step, 1e9 + update)
        records.append(Record(update, axes, values, partial=bool(partial)))
    return Recorded(name, content["facts"], content["broken"], tuple(records), content.get("failure", {}))


def store(run: Recorded) -> None:
    keys = sorted({key for record in run.records for key in record.values})
    axes = [[r.axes.update, r.axes.env_step, r.axes.gradient_step, int(r.partial)] for r in run.records]
    values = {key: [record.values.get(key) for record in run.records] for key in keys}
    content = {"facts": dict(run.facts), "broken": run.broken, "axes": axes, "values": values}
    if run.failure:
        content["failure"] = dict(run.failure)
    text = json.dumps(content, separators=(",", ":")).encode()
    HERE.mkdir(exist_ok=True)
    (HERE / f"{run.name}.json.gz").write_bytes(gzip.compress(text, 9, mtime=0))


def with_keys(run: Recorded, keys: Collection[str]) -> Recorded:
    """Return the run with these keys only, as stored."""
    shorter = [
        replace(record, values={key: _short(value) for key, value in record.values.items() if key in keys}) for record in run.records
    ]
    return replace(run, records=tuple(shorter))


def wanted(key: str) -> bool:
    """Return True if some rule may read the key."""
    return not key.endswith(ENDINGS) and not any(part in key for part in MIDDLES)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def excerpt(run_dir: str, kind: str) -> Recorded:
    """Return the run up to the first alarm of this type, with the keys and facts that change the alarm's text."""
    journal = read_run(run_dir)
    failures = [event.data for event in journal.events if event.type == "failure"] if kind == RUN_FAILED else []
    on = Thresholds().with_changes({kind: "on"}).changes()  # for alarms that are off by default
    facts = {**journal.info.facts, "thresholds": on}
    run = Recorded(kind.replace("/", "-"), facts, 1, tuple(journal.records), dict(*failures[-1:]))
    run = with_keys(run, {key for record in run.records for key in record.values})
    last = run.raised()[kind].axes.update
    run = replace(run, records=tuple(record for record in run.records if record.axes.update <= last))
    text = run.raised()[kind].text

    def is_same(other: Recorded) -> bool:
        alarm = other.raised().get(kind)
        return alarm is not None and alarm.text == text

    for fact in run.facts:
        less = replace(run, facts={name: value for name, value in run.facts.items() if name != fact})
        run = less if is_same(less) else run
    keys = sorted({key for record in run.records for key in record.values})
    size = len(keys)
    while size:  # leave out ever smaller groups of keys
        for start in range(0, len(keys), size):
            less = with_keys(run, {key for record in run.records for key in record.values} - {*keys[start : start + size]})
            run = less if is_same(less) else run
        keys = sorted({key for record in run.records for key in record.values})
        size //= 2
    return run


def main(what: str, *words: str) -> None:
    from esper_telemetry.lab.faults.verdicts import read_journaled_run

    if what == "table":
        print("\n".join(f"| `{kind}` | {text} |" for kind, text in texts().items()))
    elif what == "alarm":
        store(excerpt(*words))
    else:
        for name in words[1:]:
            run = read_journaled_run(Path(words[0]) / name)
            recorded = Recorded(name, run.facts, run.run.at_update, tuple(run.records), {})
            store(with_keys(recorded, {key for record in run.records for key in record.values if wanted(key)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
