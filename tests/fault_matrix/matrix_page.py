"""The table of docs/fault_matrix.md, made from measured outcomes."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from trained_run import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "fault_matrix.md"
HEAD = """# What happens when something breaks

`make test-faults` trains with the named faults, all in one run, and writes this page; nothing in it is typed by hand. Every fault is real:
ports are closed, processes killed, disks filled. The training keeps a pace of 20 updates a second, as one with a slower environment would.

- **training**: how the process ended.
- **pace**: updates per second of wall time, as a ratio to the run without a fault.
- **cost**: updates per second of processor time of the training thread, the same ratio. Other work on the machine changes both;
  a page with ratios far from 1 in both directions was written on a busy one.
- **lost**: updates that were trained to their end and are not in the journal. A killed process may lose the record in flight.
- **backends**: what `doctor` says of each, after `replay --missing` where something had not been delivered by the end of the run.

| fault | training | pace | cost | updates | lost | backends |
|---|---|---|---|---|---|---|
"""


FAULTS = (
    "none",
    "server refuses",
    "server resets",
    "server answers 500",
    "server answers 401",
    "server hangs",
    "server killed and restarted",
    "quota used up, raised again",
    "full disk, cleared again",
    "read-only directories",
    "kill -9 of wandb-core",
    "sqlite locked for 8 s",
    "slow sink, 10 s a write",
    "three records refused",
    "fork",
    "clock jumps back an hour",
    "ends before MLflow is open",
    "kill -9 of the trainer",
    "SIGTERM to the trainer",
)
"""Rows, in order; rows of killed trainers add the number of kills."""


@dataclass
class Page:
    """Rows by fault; several outcomes of one fault are summed."""

    rows: dict[str, list[tuple[Outcome, Outcome]]] = field(default_factory=dict)

    def add(self, fault: str, found: Outcome, fault_free: Outcome) -> None:
        """Add an outcome, together with the outcome of the run without a fault."""
        if fault.partition(",")[0] not in FAULTS and fault not in FAULTS:
            raise ValueError(f"the page has no row for {fault!r}")
        self.rows.setdefault(fault, []).append((found, fault_free))

    def write(self, *, without: Collection[str] = ()) -> None:
        """Write the page if all faults, apart from `without`, occurred in this run; else print the rows."""
        rows = {fault: _row(fault, pairs) for fault, pairs in self.rows.items()}
        names = {name: next((fault for fault in rows if fault.startswith(name)), None) for name in FAULTS}
        table = "".join(rows[fault] for fault in names.values() if fault is not None)
        if all(name in without or fault is not None for name, fault in names.items()):
            PAGE.write_text(HEAD + table, encoding="utf-8")
        else:
            print(f"\nnot all faults were met, so {PAGE.name} stays as it is:\n{table}")


def _row(fault: str, pairs: list[tuple[Outcome, Outcome]]) -> str:
    first, free = pairs[0]
    ended = sorted({outcome.ended for outcome, _ in pairs})
    updates = sum(outcome.trained for outcome, _ in pairs)
    lost = sum(max(0, outcome.trained - outcome.journalled) for outcome, _ in pairs)
    cells = (
        fault,
        ", ".join(ended),
        _ratio(first.wall, free.wall),
        _ratio(first.speed, free.speed),
        f"{updates:,}",
        str(lost),
        _backends([outcome for outcome, _ in pairs]),
    )
    return f"| {' | '.join(cells)} |\n"


def _backends(outcomes: list[Outcome]) -> str:
    names = sorted({name.split(":http")[0] for outcome in outcomes for name, whole in outcome.whole.items() if whole is not None})
    broken = [name for outcome in outcomes for name, whole in outcome.whole.items() if whole is False]
    return f"NOT equal: {', '.join(broken)}" if broken else f"equal: {', '.join(names)}"


def _ratio(value: float | None, reference: float | None) -> str:
    return "–" if value is None or not reference else f"{value / reference:.2f}"
