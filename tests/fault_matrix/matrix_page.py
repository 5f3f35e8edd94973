"""The table of docs/fault_matrix.md, from what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from trained_run import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "fault_matrix.md"
HEAD = """# What happens when something breaks

`make test-faults` trains with the named fault and writes this page; nothing in it is typed by hand. Every fault is a real one:
ports are closed, processes killed, disks filled. The training keeps a pace of 20 updates a second, as one with a slower environment would.

- **training**: how the process ended.
- **pace**: updates per second of wall time, as a ratio to the run without a fault.
- **cost**: updates per second of processor time of the training thread, the same ratio. Other work on the machine changes both;
  a page with ratios far from 1 in both directions was written on a busy one.
- **lost**: updates that were trained to their end and are not in the journal. A killed process may lose the one in flight.
- **backends**: what `doctor` says of each, after `replay --missing` where something had not been delivered by the end of the run.

| fault | training | pace | cost | updates | lost | backends |
|---|---|---|---|---|---|---|
"""


@dataclass
class Page:
    """Rows by fault; one that was met several times is summed up."""

    rows: dict[str, list[tuple[Outcome, Outcome]]] = field(default_factory=dict)

    def add(self, fault: str, found: Outcome, fault_free: Outcome) -> None:
        """Notes an outcome beside that of the run without a fault, on the page too."""
        self.rows.setdefault(fault, []).append((found, fault_free))
        self.write()

    def write(self) -> None:
        """Writes the page; rows of faults that were not met this time stay."""
        lines = {fault: _row(fault, pairs) for fault, pairs in self.rows.items()}
        PAGE.write_text(HEAD + "".join({**_written(), **lines}.values()), encoding="utf-8")


def _written() -> dict[str, str]:
    """The rows of the page as it is, by fault."""
    if not PAGE.exists():
        return {}
    rows = PAGE.read_text(encoding="utf-8").partition("|---|---|---|---|---|---|---|\n")[2].splitlines(keepends=True)
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def _row(fault: str, pairs: list[tuple[Outcome, Outcome]]) -> str:
    found, free = pairs[0]
    ended = sorted({outcome.ended for outcome, _ in pairs})
    trained = sum(outcome.trained for outcome, _ in pairs)
    lost = sum(max(0, outcome.trained - outcome.journalled) for outcome, _ in pairs)
    cells = (
        fault,
        ", ".join(ended),
        _ratio(found.wall, free.wall),
        _ratio(found.speed, free.speed),
        f"{trained:,}",
        str(lost),
        _backends([outcome for outcome, _ in pairs]),
    )
    return f"| {' | '.join(cells)} |\n"


def _backends(outcomes: list[Outcome]) -> str:
    names = sorted(
        {name.split(":http")[0] for outcome in outcomes for name, whole in outcome.whole.items() if whole is not None}
    )
    broken = [name for outcome in outcomes for name, whole in outcome.whole.items() if whole is False]
    return f"NOT equal: {', '.join(broken)}" if broken else f"equal: {', '.join(names)}"


def _ratio(value: float | None, reference: float | None) -> str:
    return "–" if value is None or not reference else f"{value / reference:.2f}"
