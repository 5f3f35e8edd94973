"""`esper-telemetry diagnose`: the detectors over a journal, as text or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from esper_telemetry.commands.mistakes import wrong_use
from esper_telemetry.detectors import Diagnosis, Story, Thresholds
from esper_telemetry.detectors import diagnose as judge
from esper_telemetry.journal import Run, encode_alarm, plain, read_run

if TYPE_CHECKING:
    from esper_telemetry.cli import Diagnose

WIDTH = 120
"""Of the text where nobody looks: a pipe or a file."""

COLORS = {"critical": "red", "warn": "yellow", "info": "blue"}
INTERVENTION = "intervention"


def diagnose(options: Diagnose) -> int:
    """Prints what is wrong with a run, or that nothing is."""
    with wrong_use():
        Thresholds.parse(options.threshold)
        run = read_run(options.run_dir)
        thresholds = Thresholds.parse(options.threshold, Thresholds.of(run.info.facts))
    changes = [event.seq for event in run.events if event.type == INTERVENTION]
    found = judge(run.info.facts, run.records, thresholds=thresholds, interventions=changes)
    if options.json:
        print(json.dumps(_as_dict(run, found), indent=1))
    else:
        _print(run, found)
    return 0


def _as_dict(run: Run, found: Diagnosis) -> dict[str, Any]:
    """Everything as plain values, for programs."""
    return {
        "run": run.info.name,
        "updates": found.updates,
        "status": None if run.status is None else str(run.status),
        "incidents": [
            {
                "incident": incident.number,
                "cause": incident.cause,
                "since": incident.since,
                "text": incident.main.text,
                "standing": incident.standing(),
                "alarms": [encode_alarm(alarm) for alarm in incident.alarms],
            }
            for incident in found.incidents
        ],
        "events": [{"type": kind, **plain(data)} for kind, data in found.events],
        "unanswered": dict(found.unanswered),
    }


def _print(run: Run, found: Diagnosis) -> None:
    """What people read."""
    console = Console(width=None if Console().is_terminal else WIDTH, markup=False, highlight=False)
    console.print(f"{run.info.name}: {found.updates} updates, {run.status or 'not ended'}")
    for incident in found.incidents:
        console.print(_panel(incident))
    if not found.incidents:
        console.print(Text(_all_clear(found), style="green" if found.updates else "yellow"))
    for _, data in found.events:
        console.print(f"update {data['update']}: {data['text']}")
    if found.unanswered:
        console.print("\nCould not be answered:")
        for line in _open_questions(found):
            console.print(line)


def _all_clear(found: Diagnosis) -> str:
    if not found.updates:
        return "The journal has no records yet."
    return "Nothing is wrong" + (", as far as the records tell." if found.unanswered else ".")


def _panel(incident: Story) -> Panel:
    """One incident: what it is put down to, in words, and the alarms that came with it."""
    main = incident.main
    text = Text(main.text)
    others = [f"{kind} {_until(end)}" for kind, end in incident.standing().items()]
    text.append(f"\n\nAlarms: {', '.join(others)}", style="dim")
    title = f"incident {incident.number}, update {incident.since}: {incident.cause}"
    return Panel(text, title=title, title_align="left", border_style=COLORS[main.level])


def _until(end: int | None) -> str:
    return "(still on)" if end is None else f"(over at {end})"


def _open_questions(found: Diagnosis) -> Iterator[str]:
    """One line per reason, with the alarms that it leaves open."""
    reasons: dict[str, list[str]] = {}
    for kind, reason in found.unanswered.items():
        reasons.setdefault(reason, []).append(kind)
    for reason, kinds in reasons.items():
        yield f"  {', '.join(kinds)}: {reason}"
