"""`esper-telemetry diagnose`: the detectors over a journal, or over the logs of another trainer, as text or as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.panel import Panel
from rich.text import Text

from esper_telemetry.alarms.detectors import GRADIENTS_ALONE, SYMPTOMS
from esper_telemetry.alarms.diagnosis import Diagnosis, IncidentReport
from esper_telemetry.alarms.diagnosis import diagnose as judge
from esper_telemetry.alarms.rules.task import Failure, bad_ending
from esper_telemetry.alarms.thresholds import Thresholds
from esper_telemetry.cli.mistakes import WrongUse, without_warnings, wrong_use
from esper_telemetry.core.record import RUN_FAILED, RunStatus
from esper_telemetry.journal.file import damage_sentence, journal_path
from esper_telemetry.journal.lines import encode_alarm, plain
from esper_telemetry.journal.read import JournalContents, Run, held, read_run
from esper_telemetry.sinks.console import make_console

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Diagnose
    from esper_telemetry.importers.records import Foreign

WIDTH = 120
"""Columns of the text in a pipe or a file, where COLUMNS does not say how many."""

COLORS = {"critical": "red", "warn": "yellow", "info": "blue"}
FAILURE, INTERVENTION = "failure", "intervention"


OURS = frozenset({"telemetry/missing_metric", "telemetry/overhead", "telemetry/delivery"})
"""Questions that only a run of telemetry's own can be asked."""


def diagnose(options: Diagnose) -> int:
    """Prints what is wrong with a run, or that nothing is."""
    if bool(options.run_dir) == bool(options.source):
        raise WrongUse("diagnose needs either a run directory or --from; see esper-telemetry diagnose --help")
    return _foreign(options) if options.source else _own(options)


def _own(options: Diagnose) -> int:
    with wrong_use(), without_warnings():
        Thresholds.parse(options.threshold)
        if runs := runs_within(Path(options.run_dir)):
            return _list_runs(options.run_dir, runs, as_json=options.json)
        run = read_run(options.run_dir)
        thresholds = Thresholds.parse(options.threshold, Thresholds.of(run.info.facts))
    changes = [event.seq for event in run.events if event.type == INTERVENTION]
    failures = [
        Failure(event.seq, event.axes, event.data) for event in run.events if event.type == FAILURE and event.axes
    ]
    found = judge(
        run.info.facts,
        run.records,
        thresholds=thresholds,
        interventions=changes,
        failures=failures,
        alarms=run.alarms,
    )
    ending = bad_ending(run.status, run.records[-1].axes.update if run.records else 0, failures)
    if options.json:
        print(json.dumps(_own_as_dict(run, found, ending), indent=1))
    else:
        _print(f"{run.info.name}: {found.updates} updates, {run.status or 'not ended'}", found, ending)
        if run.damaged:
            print(f"\n{damage_sentence(journal_path(options.run_dir), run.damaged)}.")
    return 0


def runs_within(directory: Path) -> dict[str, JournalContents]:
    """Return the runs in the folders of a directory that is no run itself, the oldest first, by their paths."""
    found = {}
    for path in directory.iterdir() if directory.is_dir() and not _is_run(directory) else ():
        if _is_run(path):
            with suppress(ValueError):  # a journal that does not say which run it is
                found[str(path)] = held(path)
    return dict(sorted(found.items(), key=lambda item: item[1].info.started))


def _is_run(directory: Path) -> bool:
    try:
        journal_path(directory)
    except FileNotFoundError:
        return False
    return True


def _list_runs(directory: str, runs: Mapping[str, JournalContents], *, as_json: bool) -> int:
    """Print the status of each run and the command that diagnoses it."""
    if as_json:
        entries = [
            {"run_dir": path, "run": run.info.name, "updates": run.recorded, "status": run.status}
            for path, run in runs.items()
        ]
        print(json.dumps({"runs": entries}, indent=1))
        return 0
    print(f"{directory} is not a run, but holds {len(runs)}:")
    for path, run in runs.items():
        command = shlex.join(["esper-telemetry", "diagnose", path])
        print(f"  {run.info.name}, {run.recorded:,} updates, {run.status or 'not ended'}: {command}")
    return 0


def _foreign(options: Diagnose) -> int:
    """What others have logged holds less, and what it lacks is a part of the answer."""
    from esper_telemetry.importers.records import read_foreign
    from esper_telemetry.importers.source import read_source

    if options.source.startswith("mlflow:"):
        from esper_telemetry.sinks.mlflow.sink import limit_requests

        limit_requests()
    with wrong_use():
        thresholds = Thresholds.parse(options.threshold)
        run = read_foreign(read_source(options.source))
    found = judge(run.facts, run.records, thresholds=thresholds.without(OURS))
    found = replace(found, unanswered={kind: as_logged(reason) for kind, reason in found.unanswered.items()})
    if options.json:
        print(json.dumps(_foreign_as_dict(run, found), indent=1))
        return 0
    last = run.records[-1].axes.env_step
    _print(f"{run.name}: {found.updates} updates of {run.trainer}, up to {last:,} {run.x}", found)
    print("\nRead as:")
    for key, tag in run.used.items():
        print(f"  {key}: {tag}")
    return 0


def as_logged(reason: str) -> str:
    """Why a question is open, where nobody but the trainer could have logged more."""
    return reason.replace("no record has ", "not logged: ").replace("the run does not say its ", "setting not logged: ")


def _own_as_dict(run: Run, found: Diagnosis, ending: str) -> dict[str, Any]:
    status = None if run.status is None else str(run.status)
    failures = [event.data for event in run.events if event.type == FAILURE] if run.status is RunStatus.FAILED else []
    failure = plain(failures[-1]) if failures else None
    head: dict[str, Any] = {
        "run": run.info.name,
        "updates": found.updates,
        "status": status,
        "ending": ending,
        "failure": failure,
    }
    head["damaged_lines"] = list(run.damaged)
    return _as_dict(head, found)


def _foreign_as_dict(run: Foreign, found: Diagnosis) -> dict[str, Any]:
    head = {"run": run.name, "updates": found.updates, "trainer": run.trainer, "x": run.x}
    return {**_as_dict(head, found), "read": dict(run.used), "unread": list(run.unused)}


def _as_dict(head: Mapping[str, Any], found: Diagnosis) -> dict[str, Any]:
    """Everything as plain values, for programs."""
    return {
        **head,
        "incidents": [
            {
                "incident": incident.number,
                "cause": None if _symptom_alone(found, incident) else incident.cause,
                "since": incident.since,
                "text": incident.main.text,
                "standing": incident.ends(),
                "alarms": [encode_alarm(alarm) for alarm in incident.alarms],
            }
            for incident in found.incidents
        ],
        "events": [{"type": kind, **plain(data)} for kind, data in found.events],
        "unanswered": dict(found.unanswered),
        "gradients_alone": found.gradients_alone,
    }


def _print(head: str, found: Diagnosis, ending: str = "") -> None:
    """What people read; a bad ending comes first."""
    console = make_console(piped_width=WIDTH, markup=False, highlight=False)
    console.print(head)
    if ending:
        console.print(Text(ending, style="bold red"))
    for incident in found.incidents:
        if not (ending and incident.cause == RUN_FAILED):
            console.print(_panel(incident, symptom=_symptom_alone(found, incident)))
    if found.gradients_alone:
        console.print(Text(f"{GRADIENTS_ALONE}.", style="yellow"))
    elif not found.incidents and not ending:
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


def _symptom_alone(found: Diagnosis, incident: IncidentReport) -> bool:
    """Whether an incident is known by gradients and steps of the optimizer alone, which name no cause."""
    return found.gradients_alone and incident.cause.startswith(SYMPTOMS)


def _panel(incident: IncidentReport, *, symptom: bool) -> Panel:
    """One incident: what it is put down to, in words, and the alarms that came with it."""
    main = incident.main
    text = Text(main.text)
    others = [f"{kind} {_until(end)}" for kind, end in incident.ends().items()]
    text.append(f"\n\nAlarms: {', '.join(others)}", style="dim")
    title = f"incident {incident.number}, update {incident.since}: {incident.cause}{' (a symptom; cause not known)' if symptom else ''}"
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
