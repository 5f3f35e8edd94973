"""`esper-telemetry diagnose`: judge a journal, or the logs of another trainer, and print the verdict as text or as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from esper_telemetry.alarms.diagnosis import Diagnosis
from esper_telemetry.alarms.thresholds import Thresholds
from esper_telemetry.alarms.verdict.run_outcome import BAD, OutcomeKind
from esper_telemetry.cli.arguments import WrongUse, echo, without_warnings, wrong_use
from esper_telemetry.core.record import CRITICAL_FROM, WARN_FROM, AlarmLevel, RunStatus
from esper_telemetry.journal.file import damage_sentence, holds_run, journal_path
from esper_telemetry.journal.lines import plain
from esper_telemetry.journal.read import JournalContents, read_contents
from esper_telemetry.views.document import print_document
from esper_telemetry.views.equation_table import by_reason
from esper_telemetry.views.run_view import RunView, judged_again, open_logs, open_verdict, open_view
from esper_telemetry.views.verdict_text import answer, to_text, verdict_document

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Diagnose

FAILS_ON: Final = 3
"""Exit code of a run that meets the condition of `--fail-on`."""


def diagnose(options: Diagnose) -> int:
    """Print the outcome of a run and its incidents; return the exit code."""
    if bool(options.run_dir) == bool(options.source):
        raise WrongUse("diagnose needs either a run directory or --from; see esper-telemetry diagnose --help")
    if options.run_dir and (options.map or options.run is not None):
        given = f"--map {options.map[0]}" if options.map else f"--run {options.run}"
        raise WrongUse(f"{given} is for logs of another trainer, which are given with --from, not for the run directory {options.run_dir}")
    return _diagnose_logs(options) if options.source else _diagnose_journal(options)


def _diagnose_journal(options: Diagnose) -> int:
    with wrong_use(), without_warnings():
        Thresholds.parse(options.threshold)
        if runs := _runs_within(Path(options.run_dir)):
            if options.fail_on:
                raise WrongUse(f"--fail-on judges one run, and {options.run_dir} holds {len(runs)}")
            _list_runs(options.run_dir, runs, as_json=options.json)
            return 0
        is_again = options.again or options.threshold
        view = judged_again(options.run_dir, options.threshold) if is_again else open_verdict(options.run_dir)
        verdict = view.diagnosis
    if options.json:
        print(to_text(run_answer(view, options.run_dir, everything=options.all)))
    else:
        head = f"{view.info.name}: {verdict.updates} updates, {view.status or 'not ended'}"
        # a sample of the records lacks most results of equations
        rows = () if view.sampled or not verdict.shows_remarks else view.equations()
        untraced = by_reason(rows, "untraced")
        asks = not view.info.facts.get("columns_by_name")  # a script cannot give any
        print_document(verdict_document(head, verdict, view.ending, untraced=untraced, list_unanswered=options.all, asks_facts=asks))
        if view.damage:
            echo(f"\n{damage_sentence(journal_path(options.run_dir), view.damage)}.")
    return _exit_code(verdict, view.ending, options.fail_on)


def run_answer(view: RunView, directory: str, *, everything: bool = False) -> dict[str, Any]:
    """Return the verdict on a run as plain values; `directory` is the run's as it was given."""
    failure = view.latest.get("failure") if view.status is RunStatus.FAILED else None
    head = {
        "run": view.info.name,
        "updates": view.diagnosis.updates,
        "status": None if view.status is None else str(view.status),
        "ending": view.ending,
        "failure": None if failure is None else plain(failure.data),
        "damaged_lines": list(view.damage),
    }
    # the equations count updates, and a sample lacks most of them
    rows = (open_view(directory, judged=True) if view.sampled else view).equations()
    return answer(head, view.diagnosis, view.info, address=shlex.quote(directory), equations=rows, everything=everything)


def _diagnose_logs(options: Diagnose) -> int:
    """Judge the logs of another trainer; the verdict also lists the alarms that the logs cannot answer."""
    with wrong_use():
        if holds_run(Path(options.source)):
            raise WrongUse(f"{options.source} is a run of this package: esper-telemetry diagnose {shlex.quote(options.source)}")
        columns = dict(map(_column, options.map))
        thresholds = Thresholds.parse(options.threshold)
        view = open_logs(options.source, columns=columns, run=options.run, thresholds=thresholds)
    verdict, axes = view.diagnosis, view.axes
    if options.json:
        head = {"run": view.name, "updates": verdict.updates, "trainer": view.facts.trainer or "", "x": view.x_label}
        read = {"notes": list(view.notes), "read": dict(view.used), "unread": list(view.unused)}
        address = f"--from {shlex.quote(view.source)}"
        values = answer(head, verdict, view.info, address=address, details=read, everything=options.all)
        print(to_text(values))
    else:
        reach = f", up to {axes.env_step:,} {view.x_label}" if axes and view.x_label != "rows" else ""
        head_line = f"{view.name}: {verdict.updates:,} {view.row_label}{'s'[: verdict.updates != 1]} of {view.facts.trainer or ''}{reach}"
        print_document(verdict_document(head_line, verdict, list_unanswered=options.all))
        for note in view.notes:
            echo(note)
        print("\nRead as:")
        for key, tag in view.used.items():
            echo(f"  {key}: {tag}")
        if view.unused:
            echo(f"\nNot read: {', '.join(view.unused)}")
    return _exit_code(verdict, "", options.fail_on)


def _column(pair: str) -> tuple[str, str]:
    """Return key and column of KEY=COLUMN."""
    key, mark, column = pair.partition("=")
    if not (key and mark and column):
        raise WrongUse(f"--map needs KEY=COLUMN, such as episode/return_mean=reward, got {pair!r}")
    return key, column


def _exit_code(verdict: Diagnosis, ending: str, level: str | None) -> int:
    """Return `FAILS_ON` for a run that meets the condition `level`, 0 for others and without a level.

    A failed run meets every condition. A flat or declining run meets all except `critical`, which requires critical alarms.
    """
    if level is None:
        return 0
    kind = verdict.outcome.kind
    failed = bool(ending) or kind is OutcomeKind.FAILED
    if failed or (kind in BAD and level != AlarmLevel.CRITICAL):
        return FAILS_ON
    if level == "flat":  # considers only the outcome
        return 0
    least = CRITICAL_FROM if level == AlarmLevel.CRITICAL else WARN_FROM
    alarms = (alarm for incident in verdict.incidents for alarm in incident.alarms)
    return FAILS_ON if any(alarm.severity >= least for alarm in alarms) else 0


def _runs_within(directory: Path) -> dict[str, JournalContents]:
    """Return the runs in the folders of a directory that is not a run, oldest first, by their paths."""
    runs = {}
    for path in directory.iterdir() if directory.is_dir() and not holds_run(directory) else ():
        if holds_run(path):
            with suppress(ValueError):  # a journal that does not say which run it is
                runs[str(path)] = read_contents(path)
    return dict(sorted(runs.items(), key=lambda item: item[1].info.started))


def _list_runs(directory: str, runs: Mapping[str, JournalContents], *, as_json: bool) -> None:
    """Print the status of each run and the command that diagnoses it."""
    if as_json:
        entries = [{"run_dir": path, "run": run.info.name, "updates": run.recorded, "status": run.status} for path, run in runs.items()]
        print(json.dumps({"runs": entries}, indent=1))
        return
    echo(f"{directory} is not a run, but holds {len(runs)}:")
    for path, run in runs.items():
        command = shlex.join(["esper-telemetry", "diagnose", path])
        echo(f"  {run.info.name}, {run.recorded:,} updates, {run.status or 'not ended'}: {command}")
