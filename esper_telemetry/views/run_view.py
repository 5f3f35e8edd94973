"""A run as people look at it: outcome, incidents, panels by question, progress. Made from a journal, or from the logs of another trainer.

    view = open_view("runs/a")
    for panel in view.panels():
        ...
    view.refresh()          # reads what was appended since

A journal that is still written is read on from the last complete line. Memory does not grow with the run: of each key the smallest and
the largest value of equally long groups of updates are kept.
"""

from __future__ import annotations

import bisect
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from esper_telemetry.alarms.detectors import LastingFinding
from esper_telemetry.alarms.diagnosis import Diagnosis, IncidentReport, RunJudge, is_course
from esper_telemetry.alarms.metric_entries import descriptions
from esper_telemetry.alarms.rule import WARNING, Finding
from esper_telemetry.alarms.rules.task_alarms import Failure, bad_ending
from esper_telemetry.alarms.thresholds import Thresholds
from esper_telemetry.alarms.verdict.bounds import LATEST_RECORDS, critical_values
from esper_telemetry.alarms.verdict.published_settings import OutsideSetting, outside_settings
from esper_telemetry.alarms.verdict.remarks import REMARK
from esper_telemetry.alarms.verdict.run_outcome import NOT_OBSERVED, OUTCOME, Outcome, OutcomeJudge, OutcomeKind
from esper_telemetry.alarms.verdict.unusual import keys_without_bounds, notable
from esper_telemetry.core.backends import limit_mlflow_requests
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.messages import capitalized
from esper_telemetry.core.record import Alarm, AlarmEvent, Axes, Record, RunInfo, RunStatus, template_of
from esper_telemetry.core.redaction import masked
from esper_telemetry.history.recent_return import UPDATE_RETURN
from esper_telemetry.importers.records import ImportedRun, read_foreign
from esper_telemetry.importers.source import READERS, read_source
from esper_telemetry.journal.file import DamagedLine, JournalReader, journal_path, last_entries
from esper_telemetry.journal.lines import End, Entry, JournalEvent, end_status
from esper_telemetry.journal.read import run_info
from esper_telemetry.journal.record_columns import Segment, segments
from esper_telemetry.views.equation_table import EquationHistory, EquationRow
from esper_telemetry.views.panels import ChartDeclaration, PanelDeclaration, StripItem, TableView, ViewDeclaration, view_declarations
from esper_telemetry.views.run_parts import (
    DEFAULT_POINTS,
    MAX_LINES,
    RATE_UPDATES,
    ChartView,
    HealthyRange,
    IncidentView,
    Judgement,
    LineView,
    PanelView,
    RunProgress,
    Series,
    SeriesBuffer,
    incident_view,
    judge,
    run_progress,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

CHUNK_LINES: Final = 50
"""Decoded at a time: 500 took 26 MB more at 12,400 updates of 428 keys."""
MAX_WHOLE_BYTES: Final = 16 << 20
"""Size of a journal of which `open_verdict` reads all records: it takes half a second."""
VERDICT_RECORDS: Final = 400
"""Records over the run, and at its end, from which a verdict takes what is unusual and which inputs are missing."""
MAX_EVENTS: Final = 200
"""Latest events that are kept."""
TELEMETRY_ALARMS: Final = frozenset({"telemetry/missing_metric", "telemetry/overhead", "telemetry/delivery"})
"""Alarms that only a run with this package's telemetry can raise."""

T = TypeVar("T")


def open_view(
    source: str | Path, *, max_points: int = DEFAULT_POINTS, judged: bool = False, thresholds: Thresholds | None = None
) -> RunView:
    """Return the view of a run, read up to its end.

    Args:
        source: a run directory, or the address of another trainer's logs as `--from` takes it.
        max_points: values that are kept of each key, at least 6; 0 for all.
        judged: judge what the journal does not hold, too: what could not be answered, what is unusual, and the equations. Records that
            were not judged when they were written are judged now; logs always are.
        thresholds: bounds to judge logs by.

    Raises:
        FileNotFoundError: if the run does not exist.
        ValueError: if the journal does not say which run it is, or an address is wrong.
        ModuleNotFoundError: if a backend's package is missing.
    """
    address = str(source)
    if address.partition(":")[0] in READERS and not Path(address).is_dir():
        return open_logs(address, max_points=max_points, thresholds=thresholds)
    view = RunView(run_info(source), address, max_points=max_points, judged=judged)
    if view._judge is not None and journal_path(source).stat().st_size > MAX_WHOLE_BYTES:
        # judging the outcome of 100,000 records takes three seconds
        ending = last_entries(source)
        known = any(isinstance(entry, JournalEvent) and entry.type == OUTCOME for entry in ending)
        view._judge.is_outcome_recorded = known and end_status(ending) is not None
    view.refresh()
    return view


def open_sample(run_dir: str | Path, records: int, *, max_points: int = DEFAULT_POINTS, judged: bool = False) -> RunView:
    """Return the view of a run by all alarms, and so many records over the run and at its end; raises as `open_view`.

    Its attribute `sampled` is True if records were left out.
    """
    with closing(JournalReader(journal_path(run_dir))) as reader:
        lines, updates, is_complete = reader.sample(records, is_rare=is_rare_event, every_form=judged)
        info = reader.head_of(lines) or run_info(run_dir)  # which raises
        view = RunView(info, str(run_dir), max_points=max_points, judged=judged)
        for begin in range(0, len(lines), CHUNK_LINES):
            decoded = (reader.decode(line, position) for position, line in lines[begin : begin + CHUNK_LINES])
            view._add([entry for entry in decoded if entry is not None])
        view.updates = max(view.updates, updates)
        view.damage, view.sampled, view._offset = reader.damaged_lines(), not is_complete, reader.offset
        if view.sampled:
            reader.damage.clear()  # a view of all records reports it
    return view


def open_verdict(run_dir: str | Path) -> RunView:
    """Return a judged view of a run, from the verdict in its journal and a sample of its records if the journal has a recent verdict.

    A sample has few points of each series. Raises as `open_view`.
    """
    if journal_path(run_dir).stat().st_size > MAX_WHOLE_BYTES:
        view = open_sample(run_dir, VERDICT_RECORDS, judged=True)
        if view._judge is not None and view._judge.has_recorded(view.updates):
            return view
    return open_view(str(run_dir), judged=True)


def judged_again(run_dir: str | Path, bounds: Sequence[str] = ()) -> RunView:
    """Return a view of a run whose records are all judged, by the run's bounds and others, NAME=VALUE; raises as `open_view`."""
    view = RunView(run_info(run_dir), str(run_dir))
    view._judge = RunJudge(view.info.facts, Thresholds.parse(bounds, Thresholds.of(view.info.facts)))
    view._equations = EquationHistory(view.facts)
    view.refresh()
    return view


def open_logs(
    address: str,
    *,
    columns: Mapping[str, str] | None = None,
    run: int | None = None,
    max_points: int = DEFAULT_POINTS,
    thresholds: Thresholds | None = None,
) -> RunView:
    """Return the view of logs of another trainer, judged; raises as `read_source` and `read_foreign`, which have `run` and `columns`."""
    if address.startswith("mlflow:"):
        limit_mlflow_requests()
    imported = read_foreign(read_source(address, run), columns)
    metrics = descriptions()
    facts = {"trainer": imported.trainer, **imported.facts}
    info = RunInfo("imported", masked(imported.name), None, 0.0, config=imported.facts, facts=facts, metrics=metrics)
    view = RunView(info, masked(address), max_points=max_points)
    view._import(imported, thresholds or Thresholds())
    return view


class RunView:
    """A run at present; `open_view` makes one.

    Attributes:
        source: directory or address.
        info: the run's description: name, config, facts, versions, descriptions of metrics.
        facts: of `info`.
        status: how the run ended; None for a run under way, or if it was killed together with its helpers.
        axes: of the last record; None before the first.
        updates: number of records.
        last: the latest value of each key.
        alarms: beginning, worsening and end of each, in order.
        active: the latest event of each alarm that is on, by type.
        events: the latest events, without evidence.
        latest: the last event of each type.
        interventions: updates after which something was changed on purpose.
        x_label: unit of `Series.env_steps`.
        used, unused: what the logs of another trainer were read as, by key, and tags that were not read.
        notes: on what was read of them, a sentence each.
        row_label: what a row of them is.
        damage: numbers of the lines that could not be understood.
        sampled: True if records of the journal were left out, see `open_sample`.
    """

    def __init__(self, info: RunInfo, source: str, *, max_points: int = DEFAULT_POINTS, judged: bool = False) -> None:
        self.info, self.facts, self.source = info, Facts.of(info.facts), source
        self.status: RunStatus | None = None
        self.axes: Axes | None = None
        self.updates = 0
        self.last: dict[str, float] = {}
        self.alarms: list[Alarm] = []
        self.active: dict[str, Alarm] = {}
        self.events: deque[JournalEvent] = deque(maxlen=MAX_EVENTS)
        self.latest: dict[str, JournalEvent] = {}
        self.interventions: list[int] = []
        self.x_label = "environment steps"
        self.used: Mapping[str, str] = {}
        self.unused: Sequence[str] = ()
        self.notes: Sequence[str] = ()
        self.row_label = "update"
        self.damage: tuple[DamagedLine, ...] = ()
        self.sampled = False
        self._max_points = max_points
        self._buffers: dict[str, SeriesBuffer] = {}
        self._positions = SeriesBuffer(max_points)
        self._reports: dict[int, IncidentReport] = {}
        self._course: list[tuple[str, Mapping[str, Any]]] = []
        self._remarks: list[Mapping[str, Any]] = []
        self._failures: list[Failure] = []
        self._latest: deque[Mapping[str, float]] = deque(maxlen=LATEST_RECORDS)
        self._clock: deque[tuple[int, float]] = deque(maxlen=RATE_UPDATES + 1)
        self._outcome = OutcomeJudge(info.facts)
        self._judge = RunJudge(info.facts, as_recorded=True) if judged else None
        self._equations = EquationHistory(self.facts) if judged else None
        self._diagnosis: Diagnosis | None = None
        self._imported: ImportedRun | None = None
        self._problems: dict[ViewDeclaration, str] = {}
        self._offset = 0

    @property
    def name(self) -> str:
        """Display name."""
        return self.info.name or self.info.run_id

    @property
    def run_dir(self) -> Path | None:
        """Directory of the journal; None for logs of another trainer."""
        return self.info.run_dir

    @property
    def ended(self) -> bool:
        """True if no record will follow, unless the run is resumed."""
        return self.status is not None or self._imported is not None

    @property
    def keys(self) -> list[str]:
        """Keys that have had a value, in the order in which they appeared."""
        return list(self._buffers)

    def refresh(self, limit: int | None = None) -> int:
        """Read what was appended to the journal since, at most `limit` lines; return the number of entries that were read.

        Raises FileNotFoundError if the journal is gone.
        """
        if self.run_dir is None:
            return 0
        reader, count = JournalReader(journal_path(self.run_dir), self._offset), 0
        try:
            if limit is None:
                for segment in segments(reader):
                    count += self._add_segment(segment, reader)
                    self._offset = reader.offset
                return count
            while entries := reader.read(min(CHUNK_LINES, limit - count)):
                count += len(entries)
                self._offset = reader.offset
                self._add(entries)
                if count >= limit:
                    break
        finally:
            self._offset = reader.offset
            self.damage += reader.damaged_lines()
            reader.close()
        return count

    def _import(self, imported: ImportedRun, thresholds: Thresholds) -> None:
        self._imported, self.x_label = imported, imported.x
        self.used, self.unused, self.notes = imported.used, imported.unused, imported.notes
        self.row_label = imported.unit
        findings: dict[str, list[LastingFinding]] = {}
        for remark in imported.remarks:
            finding = Finding(WARNING, remark.key, remark.value, instance="log").with_text(partial(str, remark.text))
            findings.setdefault(remark.alarm, []).append((remark.update, remark.until, finding))
        self._judge = RunJudge(imported.facts, thresholds.without(TELEMETRY_ALARMS), findings=findings)
        self._equations = EquationHistory(self.facts)
        for record in imported.records:
            self._add_record(record)
        for incident in self.diagnosis.incidents:
            self._add_alarms(incident.alarms)

    def _add(self, entries: Sequence[Entry]) -> None:
        self._diagnosis = None
        if self._judge:
            self._judge.expect(entry for entry in entries if isinstance(entry, Alarm))
        for entry in entries:
            if not isinstance(entry, End):
                self.status = None
            match entry:
                case Record():
                    self._add_record(entry)
                case Alarm():
                    self._add_alarms([entry])
                case JournalEvent():
                    self._add_event(entry)
                case RunInfo():
                    # a resumed run has another line; descriptions of keys stay
                    entry.metrics.update({**self.info.metrics, **entry.metrics})
                    self.info, self.facts = entry, Facts.of(entry.facts)
                case End(status=status):
                    self.status = status

    def _add_segment(self, segment: Segment, reader: JournalReader) -> int:
        """Add the lines of a segment, whose values go into the series by columns; return their number."""
        last_rare = {line.kind: line for line in segment.others if is_rare_event(line.kind)}
        others = [line for line in segment.others if last_rare.get(line.kind, line) is line]
        updates, steps = segment.counts[:, 1], segment.counts[:, 2]
        before = np.maximum.accumulate([self.axes.update if self.axes else -1, *updates])[:-1]
        rows = np.flatnonzero(updates > before)  # the first record of an update counts
        records, done = segment.records(rows.tolist()), 0
        for line in [*others, None]:
            end = len(rows) if line is None else int(np.searchsorted(rows, line.before))
            for record in islice(records, max(0, end - done)):
                self.status = None
                self._note_record(record)
            done = max(done, end)
            if line is not None and (entry := reader.decode(reader.bytes_at(line.position, line.length), line.position)):
                self._add([entry])
        updates, steps, values = updates[rows], steps[rows], segment.values[rows]
        self._positions.extend(updates, steps, updates.astype(float))
        for column, key in enumerate(segment.keys):
            self._buffer(key).extend(updates, steps, values[:, column])
            if len(present := np.flatnonzero(~np.isnan(values[:, column]))):
                self.last[key] = float(values[present[-1], column])
        return len(segment.counts) + len(segment.others)

    def _buffer(self, key: str) -> SeriesBuffer:
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = SeriesBuffer(self._max_points)
        return buffer

    def _add_record(self, record: Record) -> None:
        axes = record.axes
        if self.axes is not None and axes.update <= self.axes.update:  # the first record of an update counts
            return
        self._positions.add(axes.update, axes.env_step, axes.update)
        for key, value in record.values.items():
            self._buffer(key).add(axes.update, axes.env_step, value)
        self.last.update(record.values)
        self._note_record(record)

    def _note_record(self, record: Record) -> None:
        axes = record.axes
        self.axes, self.updates, self._diagnosis = axes, self.updates + 1, None
        self._latest.append(record.values)
        self._clock.append((axes.env_step, axes.wall_time))
        if self._judge:
            self._judge.record(record)
        else:
            self._outcome.step(record)
        if self._equations:
            self._equations.add(record)

    def _add_alarms(self, alarms: Iterable[Alarm]) -> None:
        for alarm in alarms:
            self.alarms.append(alarm)
            IncidentReport.add(self._reports, alarm)
            if alarm.event is AlarmEvent.CLEAR:
                self.active.pop(alarm.type, None)
            else:
                self.active[alarm.type] = alarm

    def _add_event(self, event: JournalEvent) -> None:
        if event.type == "metrics":
            self.info.metrics.update(event.data)
            return
        self.latest[event.type] = event
        if is_rare_event(event.type):
            return
        self.events.append(event)
        if self._judge:
            self._judge.event(event.type, event.data)
        if is_course(event.type, event.data):
            self._course.append((event.type, event.data))
        if event.type == REMARK:
            self._remarks.append(event.data)
        elif event.type == "intervention":
            self.interventions.append(self.axes.update if self.axes else 0)
            if self._judge:
                self._judge.intervention()
        elif event.type == "failure" and event.axes is not None:
            self._failures.append(Failure(event.seq, event.axes, event.data))
            if self._judge:
                self._judge.failure(self._failures[-1])

    @property
    def diagnosis(self) -> Diagnosis:
        """The verdict so far."""
        if self._diagnosis is None:
            self._diagnosis = self._judged() if self._judge else self._recorded()
        return self._diagnosis

    def _judged(self) -> Diagnosis:
        assert self._judge is not None
        diagnosis = self._judge.diagnosis(self.status, self.updates if self.sampled else None)
        if self._imported is None:
            return diagnosis
        imported = self._imported
        unanswered = {} if imported.off_policy else diagnosis.unanswered
        # only the trainer could have logged more, so the reasons say what was not logged
        reasons = {
            kind: reason.replace("no record has ", "not logged: ").replace("the facts of the run lack ", "setting not logged: ")
            for kind, reason in unanswered.items()
        }
        for key, tag in imported.missing.items():
            found = re.compile(rf"\b{re.escape(key)}(?=[,_ ]|$)")
            reasons = {kind: found.sub(f"{key} ({tag})", reason) for kind, reason in reasons.items()}
        remedies = {kind: imported.hint(reason.removeprefix("not logged: ")) for kind, reason in reasons.items()}
        hint = imported.hint(UPDATE_RETURN)
        returns = "no returns are logged" + (f", which are supplied by {hint}" if hint else "")
        text = diagnosis.outcome.text.replace(NOT_OBSERVED, returns)
        text = re.sub(r"(in [\d,]+) updates", rf"\1 {imported.unit}s", text)
        outcome = replace(diagnosis.outcome, text=text)
        raised = {alarm.type for incident in diagnosis.incidents for alarm in incident.alarms}
        seen = [{"update": each.update, "text": each.text} for each in imported.remarks if each.alarm not in raised]
        events = (*((REMARK, remark) for remark in seen), *diagnosis.events)
        diagnosis = replace(diagnosis, remarks=(*seen, *diagnosis.remarks), events=events)
        return replace(diagnosis, outcome=outcome, unanswered=reasons, remedies={kind: hint for kind, hint in remedies.items() if hint})

    def _recorded(self) -> Diagnosis:
        outcome = Outcome() if not self.updates else Outcome(text="too short to tell so far", updates=self.updates)
        # before the end the journal has an outcome only when its kind changes
        is_written = OUTCOME in self.latest and self.status is not None
        if self.updates and not is_written and not self.sampled:
            outcome = self._outcome.so_far()
        elif OUTCOME in self.latest:
            with suppress(ValueError):  # a kind of a later version
                outcome = Outcome.of(self.latest[OUTCOME].data)
        if self.ending and outcome.kind is not OutcomeKind.FAILED:
            outcome = replace(outcome, kind=OutcomeKind.FAILED, text=f"failed: {self.ending.rstrip('.')}")
        unanswered = self.latest.get("detectors/unanswered")
        return Diagnosis(
            self.updates,
            tuple(self._reports.values()),
            tuple(self._course),
            dict(unanswered.data.get("questions", {})) if unanswered else {},
            remarks=tuple(self._remarks),
            outcome=outcome,
            critical=self._critical(self._latest, outcome.kind),
        )

    @property
    def outcome(self) -> Outcome:
        """What the run does so far."""
        return self.diagnosis.outcome

    @property
    def critical_now(self) -> Mapping[str, float]:
        """Values of the last record that are beyond the critical bounds of their metrics, by key."""
        return self._critical([*self._latest][-1:], self.outcome.kind)

    def _critical(self, records: Iterable[Mapping[str, float]], outcome: OutcomeKind) -> dict[str, float]:
        aside = keys_without_bounds(self.facts, self._latest)
        return notable(critical_values(records, self.info.metrics, aside), self.facts, outcome)

    @property
    def ending(self) -> str:
        """The sentence on a run that failed or was killed; empty for any other run."""
        return bad_ending(self.status, self.axes.update if self.axes else 0, self._failures)

    @property
    def incidents(self) -> list[IncidentView]:
        """The incidents in order, each with its sentence, advice and evidence."""
        return [incident_view(report, self.info, self._buffers) for report in self.diagnosis.incidents]

    def series(self, key: str) -> Series:
        """Return the values of a key; none for one that has not appeared."""
        buffer = self._buffers.get(key)
        return buffer.series if buffer else Series()

    @property
    def first_step(self) -> int:
        """Environment steps at the first record; 0 before it."""
        return next(iter(self._positions.series.env_steps), 0)

    def step_of(self, update: int) -> int:
        """Return the environment steps at an update, or at the next one whose position is kept; 0 before the first record."""
        updates, steps, _ = self._positions.series
        return steps[min(bisect.bisect_left(updates, update), len(updates) - 1)] if updates else 0

    def panels(self) -> list[PanelView]:
        """Return the panels of all installed declarations that have a value, by place; one that raises is among `problems`."""

        def panel(declared: PanelDeclaration) -> PanelView:
            return PanelView(declared.name, declared.question, tuple(filter(None, map(self._chart, declared.charts))))

        panels = [self._of_plugin(one, partial(panel, one)) for one in view_declarations().panels]
        return [panel for panel in panels if panel is not None and panel.charts]

    def chart(self, *keys: str, log: bool = False) -> ChartView | None:
        """Return a chart of keys or templates; None if no key has a value."""
        return self._chart(ChartDeclaration(keys, log=log))

    def _chart(self, declared: ChartDeclaration) -> ChartView | None:
        matched = list(dict.fromkeys(key for template in declared.keys for key in self._matching(template)))
        if len(matched) < declared.min_lines:
            return None
        lines = tuple(self._line(key, single=len(matched) == 1) for key in matched[:MAX_LINES])
        info = self.info.describe(key := lines[0].key)
        name = info.name if info and info.name else key
        if info and len(lines) == 1:  # which of the metrics of that name it is
            name += "".join(f" ({part})" for part in self.placeholders(key).values())
        return ChartView(
            title=declared.title or capitalized(name),
            unit=info.unit if info and info.unit.strip("1") else "",
            lines=lines,
            healthy=lines[0].healthy,
            info=info,
            log=declared.log and all(value > 0 for line in lines for value in line.series.values),
            stacked=declared.stacked,
            hidden=len(matched) - len(lines),
        )

    def _matching(self, template: str) -> list[str]:
        if "{" not in template:
            return [template] if template in self._buffers else []
        pattern = re.compile(re.sub(r"\\\{[a-z_]+\\\}", "[^/]+", re.escape(template)))
        return [key for key in self._buffers if pattern.fullmatch(key) and template_of(key, self.info.metrics) in (template, key)]

    def _line(self, key: str, *, single: bool) -> LineView:
        info, series, parts = self.info.describe(key), self.series(key), self.placeholders(key)
        label = info.name if info and info.name else key
        if parts:
            label = key if single else "/".join(parts.values())
        judgement, since = self.judgement(key), None
        others: dict[str, Series] = {}
        for update, earlier in zip(reversed(series.updates), reversed(series.values), strict=True) if judgement else ():
            if not judge(info, earlier, partial(self._value_at, key, update, others)):
                break
            since = update
        healthy = HealthyRange.parse(info.healthy) if info else None
        return LineView(key, label, series, self.last.get(key), judgement, healthy, since)

    def judgement(self, key: str) -> Judgement:
        """Return the state of the latest value of a key with respect to the bounds of its metric; empty without a value."""
        if key not in self.last:
            return ""
        return judge(self.info.describe(key), self.last[key], lambda other: self.last.get(self._beside(key, other)))

    def placeholders(self, key: str) -> dict[str, str]:
        """Return what a key has instead of the braces of its template, such as `forget` for `{gate}`."""
        pairs = zip(template_of(key, self.info.metrics).split("/"), key.split("/"), strict=False)
        return {declared: own for declared, own in pairs if declared.startswith("{")}

    def _beside(self, key: str, template: str) -> str:
        """Return the key of another metric for the head, group or layer of `key`."""
        for declared, own in self.placeholders(key).items():
            template = template.replace(declared, own)
        return template

    def _value_at(self, key: str, update: int, others: dict[str, Series], template: str) -> float | None:
        """Return the value that another metric had at an update; `others` keeps its values for the next call."""
        if template not in others:
            others[template] = self.series(self._beside(key, template))
        updates, _, values = others[template]
        place = bisect.bisect_right(updates, update)
        return values[place - 1] if place else None

    def tables(self) -> list[TableView]:
        """Return the tables of all installed declarations that the run has, by place; one that raises is among `problems`."""
        tables = [self._of_plugin(one, partial(one.checked_table, self)) for one in view_declarations().tables]
        return [table for table in tables if table is not None]

    def strip(self) -> list[StripItem]:
        """Return the parts of the anomaly strip; none if nothing is wrong; one that raises is among `problems`."""
        items = [self._of_plugin(one, partial(one.checked_item, self)) for one in view_declarations().strip]
        return [item for item in items if item is not None]

    def detail(self, table: str, row: int) -> RenderableType:
        """Return what a table shows of one of its rows: a sentence if there is nothing more."""
        declared = next((one for one in view_declarations().tables if one.name == table), None)
        if declared is None or declared.detail is None:
            return "No more is known about this row."
        detail = self._of_plugin(declared, partial(declared.detail, self, row))
        return self._problems.get(declared, "") if detail is None else detail

    def _of_plugin(self, declared: ViewDeclaration, make: Callable[[], T]) -> T | None:
        """Return what a declaration makes of this view; None if it raises, which does not affect other parts."""
        self._problems.pop(declared, None)
        try:
            return make()
        except (Exception, SystemExit) as error:  # a plugin's own code
            kind = type(declared).__name__.removesuffix("Declaration").lower()
            self._problems[declared] = f"The {kind} {declared.name!r} cannot be shown: {type(error).__name__}: {error}"
            return None

    @property
    def problems(self) -> list[str]:
        """Sentences on plugins whose views cannot be used, and on parts that raised when they were last made."""
        return [*view_declarations().problems, *self._problems.values()]

    def progress(self, now: float | None = None) -> RunProgress:
        """Return position and speed; `now` is in seconds since the epoch, by default the present."""
        return run_progress(self.info, self.axes, self._clock, self.last, ended=self.ended, now=now)

    def equations(self) -> list[EquationRow]:
        """Return a row for each declared equation; none for a view that was not opened with `judged`."""
        return [] if self._equations is None else self._equations.rows(self.info)

    def outside_settings(self) -> list[OutsideSetting]:
        """Return the settings that no published configuration has."""
        return list(outside_settings(self.facts))


def is_rare_event(kind: str) -> bool:
    """Return True for a type of events of which a view needs the last one only: evidence, and what tables are made of."""
    return kind.startswith("evidence/") or any(kind in table.events for table in view_declarations().tables)
