"""Texts about the outcome of a run: the verdict of `diagnose`, and the summary at the end of a training command.

`answer` is the verdict for programs: `diagnose --json`, and the tool `diagnose` of the MCP server. `docs/diagnose.schema.json` describes
its fields. By default an answer is at most `MAX_BYTES` long: collections are shortened, what is most severe is kept, and `left_out` has the
number of entries that are missing.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from statistics import fmean
from typing import Any, Final

from rich.table import Table

from esper_telemetry.alarms.alarm_state import LACKS_FACTS
from esper_telemetry.alarms.detectors import GRADIENTS_ALONE, SYMPTOMS
from esper_telemetry.alarms.diagnosis import Diagnosis, IncidentReport, described_keys
from esper_telemetry.alarms.rule import AlarmRule
from esper_telemetry.alarms.thresholds import alarm_rules
from esper_telemetry.alarms.verdict.bounds import LATEST_RECORDS
from esper_telemetry.alarms.verdict.published_settings import SettingChange, outside_settings, setting_change, with_logged_rate
from esper_telemetry.alarms.verdict.remarks import LATER, REMARK, is_setting
from esper_telemetry.alarms.verdict.run_outcome import GOOD, OutcomeKind
from esper_telemetry.alarms.verdict.unusual import OBSERVE
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.messages import capitalized, end_text, number, without_numbers
from esper_telemetry.core.record import RUN_FAILED, AlarmEvent, Record, RunInfo, template_of
from esper_telemetry.equations.equation import EQUATION_KEY, equations
from esper_telemetry.history.recent_return import RECENT_RETURN
from esper_telemetry.journal.lines import encode_alarm, plain
from esper_telemetry.sinks.console import make_console
from esper_telemetry.sinks.end_block import RunEnd, print_lines
from esper_telemetry.views.document import Element, folded, h, items
from esper_telemetry.views.equation_table import EquationRow

MAX_REMEDIES: Final = 6
"""Suppliers of missing values that are named for an unexplained run; `--all` has all of them."""
NOTHING_UNUSUAL: Final = "No value whose usual range is known is unusual"
"""What is said of a bad outcome if neither an alarm nor a value explains it; imported runs have few such values."""
OUTCOME_VERBS: Final = {
    OutcomeKind.FLAT: "is flat",
    OutcomeKind.DECLINING: "declines",
    OutcomeKind.FAILED: "failed",
    OutcomeKind.CONVERGED: "has settled far below the threshold",
}


def verdict_document(
    head: str,
    diagnosis: Diagnosis,
    ending: str = "",
    *,
    untraced: Mapping[str, Sequence[str]] = {},
    list_unanswered: bool = False,
    asks_facts: bool = True,
) -> Iterator[Element]:
    """Yield a verdict: the sentence of a bad ending, what the run does, its incidents, and what is open.

    Settings outside all published ranges come before incidents that may follow from them.

    Args:
        head: name and length of the run.
        diagnosis: the verdict.
        ending: the sentence of a bad ending, or nothing.
        untraced: quantities that were not traced to the program's columns, by reason.
        list_unanswered: also list the questions that could not be answered.
        asks_facts: name the facts that would answer some of them, for a program that can give them.
    """
    yield h("p", head)
    if ending:  # this is the sentence of a failed run
        yield h("p", ending, css="bad")
    if not diagnosis.updates:
        yield h("p", "The journal has no records yet.", css="note")
    else:
        yield h("p", checks(diagnosis)) if ending else h("p", capitalized(diagnosis.summary), css=diagnosis.tone)
    notes = [] if diagnosis.shows_remarks else [data for kind, data in diagnosis.events if kind == REMARK]  # else the findings have them
    causes = [data for data in notes if is_setting(data.get("name", ""))]
    if any(incident.cause in diagnosis.certain for incident in diagnosis.incidents):
        causes = []
    yield from _remarks(causes)
    known: set[str] = set()
    for incident in diagnosis.incidents:
        words = without_numbers(incident.main.text)
        states = ", ".join(f"{kind} ({end_text(end)})" for kind, end in incident.ends().items())
        if words in known:
            yield h("p", f"incident {incident.number}, update {incident.since}: again {states}")
        elif not (ending and incident.cause == RUN_FAILED):
            known.add(words)
            note = " (a symptom; its cause is unknown)" if is_symptom_alone(diagnosis, incident) else ""
            yield h(
                "article",
                h("h3", f"incident {incident.number}, update {incident.since}: {incident.cause}{note}"),
                h("p", incident.main.text),
                h("p", f"Alarms: {states}", css="dim"),
                css=incident.main.level,
            )
    yield from findings(diagnosis, untraced)
    yield from _remarks(data for kind, data in diagnosis.events if (kind != REMARK or data in notes) and data not in causes)
    if diagnosis.unanswered:
        count = len(diagnosis.unanswered)
        questions = f"{count} question{'' if count == 1 else 's'} could not be answered"
        groups = unanswered_by_reason(diagnosis)
        lines = (
            f"{', '.join(kinds)}: {reason}" + (f"; supplied by {remedy}" if remedy else "") for (reason, remedy), kinds in groups.items()
        )
        yield h("br")
        yield (
            folded(questions, items(lines)) if list_unanswered else h("p", f"{questions}, as values were not reported; --all lists them.")
        )
        facts = [remedy for reason, remedy in groups if reason.startswith(LACKS_FACTS) and remedy]
        if facts and asks_facts and not list_unanswered:
            yield h("p", f"Some of them need only facts that you know: {', '.join(facts)}.")


def _remarks(remarks: Iterable[Mapping[str, Any]]) -> Iterator[Element]:
    return (h("p", f"update {data['update']}: {data['text']}") for data in remarks)


def checks(diagnosis: Diagnosis) -> str:
    """Return the sentence on how many checks passed, after the outcome of a run until it failed or was killed."""
    before, passed = diagnosis.outcome.before, diagnosis.summary.rpartition("; ")[2]
    return f"Until then {before}; {passed}" if before else capitalized(passed)


def findings(diagnosis: Diagnosis, untraced: Mapping[str, Sequence[str]] = {}) -> Iterator[Element]:
    """Yield the values beyond their critical bounds, and possible explanations of a run that no alarm explains."""
    if diagnosis.gradients_alone:
        yield h("p", f"{GRADIENTS_ALONE}.", css="note")
    if diagnosis.critical:
        count, described = len(diagnosis.critical), described_keys()
        lines = []
        for key, value in diagnosis.critical.items():
            info = described.get(template_of(key, described))
            lines.append(f"{key}: {number(value)}" + (f" (critical: {info.critical})" if info else ""))
        bounds, s = "its critical bound" if count == 1 else "their critical bounds", "s"[: count > 1]
        title = f"Beyond {bounds} ({count} value{s}, median{s} of the last {LATEST_RECORDS} updates)"
        yield folded(title, items(lines), is_open=True)
    if diagnosis.shows_remarks:
        yield from _unexplained(diagnosis, untraced)


def _unexplained(diagnosis: Diagnosis, untraced: Mapping[str, Sequence[str]]) -> Iterator[Element]:
    """Yield possible explanations of a run that failed, is flat, declines or is far below its goal.

    These are remarks that hold of few correct runs, what was not traced, other remarks, unusual values, and inputs that were not measured.
    """
    is_open, verb = diagnosis.unexplained, OUTCOME_VERBS[diagnosis.outcome.kind]
    if diagnosis.unexplained:
        effects = diagnosis.effects & {alarm.type for incident in diagnosis.incidents for alarm in incident.alarms}
        alarms = "its alarms show how but not why" if effects else "no alarm explains it"
        yield h("p", f"Unexplained: the run {verb}, and {alarms}.")
    else:
        yield h("p", f"The run {verb}, and its alarms were over before its end.")
    rare, usual = (
        [f"update {data['update']}: {data['text']}" for data in diagnosis.shown_remarks if _is_usual(data) is usual]
        for usual in (False, True)
    )
    texts = [*rare, *(f"not traced, and so not checked: {', '.join(names)}: {reason}" for reason, names in untraced.items()), *usual]
    if texts:
        yield folded("What may explain it", items(texts), is_open=is_open)
    if diagnosis.unusual:
        values = (f"{entry.key}: {entry.text}" for entry in diagnosis.unusual)
        count = len(diagnosis.unusual)
        title = f"Most unusual ({count} value{'s'[: count > 1]}, medians over the run)"
        yield folded(title, items(values), is_open=is_open)
    if diagnosis.unexplained and not texts and not any(entry.is_far for entry in diagnosis.unusual):
        known = "Each of these values occurs in some healthy runs" if diagnosis.unusual else NOTHING_UNUSUAL
        reason = ": the task may be too hard for this policy, or it may need more steps"
        yield h("p", f"{known}{reason if diagnosis.outcome.kind in (OutcomeKind.FLAT, OutcomeKind.CONVERGED) else ''}.")
    suppliers, lines = Counter(diagnosis.remedies.values()), []
    for remedy, count in suppliers.most_common(MAX_REMEDIES):
        kinds = [kind for kind, supplier in diagnosis.remedies.items() if supplier == remedy]
        lines.append(f"{remedy}: {', '.join(kinds[:3])}" + (f" and {count - 3} more" if count > 3 else ""))
    if any(remedy.startswith(OBSERVE) for remedy in suppliers):  # the user's own loop
        lines.append(f"{OBSERVE}(esper_telemetry.check_gae(...)) and others: equations, which `esper-telemetry check RUN` lists")
    if lines:
        yield folded("Not measured, and how to measure it", items(lines), is_open=is_open)


def _is_usual(remark: Mapping[str, Any]) -> bool:
    """Return whether a remark holds of many correct runs, too."""
    return not remark.get("certain") and bool(remark.get("quiet") or remark.get("unlikely"))


def unanswered_by_reason(diagnosis: Diagnosis) -> dict[tuple[str, str], list[str]]:
    """Return the types of alarm that cannot be raised, by reason and by what supplies what they lack."""
    alarms_by_reason: dict[tuple[str, str], list[str]] = {}
    for kind, reason in diagnosis.unanswered.items():
        alarms_by_reason.setdefault((reason, diagnosis.remedies.get(kind, "")), []).append(kind)
    return alarms_by_reason


def is_symptom_alone(diagnosis: Diagnosis, incident: IncidentReport) -> bool:
    """Return whether only gradients and optimizer steps show the incident: they name no cause."""
    return diagnosis.gradients_alone and incident.cause.startswith(SYMPTOMS)


SHARE: Final = "perf/telemetry_frac"
"""Shown as the mean of the run: an update that is sampled in full takes many times what others take."""
SUMMARY_LINES: Final[Mapping[str, tuple[str, str]]] = {
    RECENT_RETURN: ("return, last 100 episodes (or all)", ".1f"),
    "policy/kl": ("policy moved per update (KL)", ".3g"),
    "policy/clip_frac": ("ratios clipped", ".1%"),
    "policy/entropy_norm": ("exploration left (entropy)", ".0%"),
    "value/explained_variance": ("returns explained by the critic", ".0%"),
    "grad/global/norm_preclip": ("gradient norm before clipping", ".3g"),
    "train/env_steps_per_second": ("steps per second", ",.0f"),
    SHARE: ("telemetry's share of the time", ".1%"),
}
"""Label and format of the last value of each key in the summary."""
CONSTANT_RETURNS = 0.01
"""Standard deviation of the returns, as a share of their mean, below which no variance is left for the critic to explain."""


class Summary:
    """Keeps the last record of a run, and prints the end of a training command: its last values and the block about the whole run."""

    def __init__(self) -> None:
        self._last: Record | None = None
        self._shares: list[float] = []

    def observe(self, record: Record) -> None:
        """Keep a record; called as a sink."""
        self._last = record
        self._shares += [record.values[SHARE]] if SHARE in record.values else []

    def show(self, end: RunEnd) -> None:
        """Print the exception that ended the run or what it did, its incidents, its last values, and what opens it."""
        console = make_console(markup=False, highlight=False, soft_wrap=True)
        print_lines(console, end.verdict())
        if self._last is not None:
            axes, values = self._last.axes, dict(self._last.values)
            if self._shares:
                values[SHARE] = fmean(self._shares)
            table = Table("what telemetry saw last", "", header_style="bold")
            table.add_row("environment steps", f"{axes.env_step:,}")
            table.add_row("updates", f"{axes.update:,}")
            spread = values.get("ret/std", inf) / (abs(values.get("ret/mean", 0.0)) or inf)
            for key, (label, style) in SUMMARY_LINES.items():
                if key == "value/explained_variance" and spread < CONSTANT_RETURNS:
                    table.add_row(label, f"undefined: returns vary by {spread:.1%}")
                elif key in values:
                    table.add_row(label, format(values[key], style))
            console.print(table)
        print_lines(console, end.openings())


SCHEMA: Final = 1
"""Version of the answer; a field that changes its meaning, or goes, raises it."""
MAX_BYTES: Final = 8000
"""Length of an answer without `--all`."""
MAX_TEXT_CHARACTERS: Final = 600
"""Length of one text in such an answer."""
MAX_EVIDENCE: Final = 5
"""Values that show an incident in such an answer."""
RATE: Final = "opt/lr"
RATE_REMARKS: Final = ("learning_rate", f"learning_rate{LATER}")
SHORTENED: Final = {
    **dict.fromkeys(("read", "unread", "notes", "remedies", "unanswered", "damaged_lines", "events"), 4),
    **dict.fromkeys(("remarks", "unusual", "critical_values"), 2),
    **dict.fromkeys(("advice", "equations", "incidents"), 1),
}
"""Collections that may be shortened: the longest first, after its length was multiplied by this weight."""


def answer(
    head: Mapping[str, Any],
    diagnosis: Diagnosis,
    run: RunInfo,
    *,
    address: str,
    equations: Sequence[EquationRow] = (),
    details: Mapping[str, Any] | None = None,
    everything: bool = False,
) -> dict[str, Any]:
    """Return a verdict as plain values.

    Args:
        head: the first fields after the version.
        diagnosis: the verdict.
        run: the run's description.
        address: the run directory, or the option that names the logs, as on the command line.
        equations: of the run.
        details: further fields, which come last.
        everything: leave out nothing.
    """
    rules, facts = {rule.type: rule for rule in alarm_rules()}, Facts.of(run.facts)
    incidents = [_incident(one, diagnosis, run, rules.get(one.cause)) for one in diagnosis.incidents]
    rows = [_equation(row) for row in equations if everything or row.state in ("differs", "untraced")]
    remarks = [data for kind, data in diagnosis.events if kind == REMARK and data.get("name") in RATE_REMARKS]
    advice = list(_advice(rows, incidents, facts, max((data["value"] for data in remarks), default=None)))
    values = {
        "schema": SCHEMA,
        **head,
        "outcome": diagnosis.outcome.data(),
        "tone": str(diagnosis.tone),
        "summary": diagnosis.summary,
        "advice": advice,
        "next": _next_command(address, diagnosis, rows, advice, is_live=head.get("status", "") is None, shows_all=everything),
        "critical_values": dict(diagnosis.critical),
        "checks": diagnosis.checks,
        "incidents": incidents,
        "equations": rows,
        "events": [{"type": kind, **plain(data)} for kind, data in diagnosis.events],
        "unanswered": dict(diagnosis.unanswered),
        "remedies": dict(diagnosis.remedies),
        "unexplained": diagnosis.unexplained,
        "remarks": [plain(data) for data in diagnosis.shown_remarks] if diagnosis.shows_remarks else [],
        "unusual": [entry._asdict() for entry in diagnosis.unusual],
        "gradients_alone": diagnosis.gradients_alone,
        **(details or {}),
        "left_out": {},
    }
    return values if everything or len(to_text(values)) <= MAX_BYTES else shortened(values)


def to_text(values: object) -> str:
    """Return an answer as it is printed."""
    return json.dumps(values, indent=1)


def _incident(incident: IncidentReport, diagnosis: Diagnosis, run: RunInfo, rule: AlarmRule | None) -> dict[str, Any]:
    """Return an incident; `rule` is that of its cause, if it is installed here."""
    main = incident.main
    text, _, advice = " ".join(main.text.split()).partition(" Try: ")
    values, usual = main.evidence.get("values", {}), main.evidence.get("usual", {})
    rate = values.get(RATE) if isinstance(values, Mapping) else None
    change = None
    if rule is not None:
        # advice that does not name the wrapper in a call such as `gymnasium.wrappers.RescaleAction(env, -1, 1)` is not about it
        wrappers = {to: to.partition("(")[0].rpartition(".")[2] for _, to in rule.changes if isinstance(to, str)}
        named = [(name, to) for name, to in rule.changes if not isinstance(to, str) or wrappers[to] in advice]
        rate = rate if isinstance(rate, int | float) else None
        change = setting_change(rule.settings, named, Facts.of(run.facts), rate)
    evidence = {main.key: main.value, **(values if isinstance(values, Mapping) else {})}
    return {
        "incident": incident.number,
        "cause": None if is_symptom_alone(diagnosis, incident) else incident.cause,
        "level": str(main.level),
        "since": incident.since,
        "text": text if advice else main.text,
        "advice": _change(advice, change),
        "evidence": [
            {"key": key, "value": value, "usual": usual.get(key) if isinstance(usual, Mapping) else None, "healthy": _healthy(key, run)}
            for key, value in evidence.items()
            if value is not None
        ],
        "standing": incident.ends(),
        "alarms": [encode_alarm(alarm) for alarm in incident.alarms],
    }


def _healthy(key: str, run: RunInfo) -> str:
    """Return the healthy values of a key in words; empty if they are not known."""
    equation = equations().get(key.removeprefix(EQUATION_KEY)) if key.startswith(EQUATION_KEY) else None
    if equation is not None:
        return equation.healthy(Facts.of(run.facts).precision)
    info = run.describe(key)
    return info.healthy if info else ""


def _change(text: str, change: SettingChange | None) -> dict[str, Any]:
    """Return advice: a text, and the setting with its value and present value if the advice is about one."""
    setting, value, now = change or (None, None, None)
    return {"text": text, "setting": setting, "value": value, "now": now}


def _equation(row: EquationRow) -> dict[str, Any]:
    values = row.values()
    reference = row.equation.equation if row.state == "differs" else None
    setting = row.equation.name if row.state == "differs" else None
    return {
        **{name: values[name] for name in ("equation", "quantity", "reference", "state", "since", "place")},
        "text": row.result,
        "advice": {"text": values["advice"], "setting": setting, "value": reference, "now": None},
    }


def _advice(
    equations: Sequence[Mapping[str, Any]], incidents: Sequence[Mapping[str, Any]], facts: Facts, rate: float | None
) -> Iterator[dict[str, Any]]:
    """Yield the changes of settings, the most certain one first: equations that differ, incidents, settings outside published ranges.

    `rate` is the largest logged learning rate outside these ranges.
    """
    changes: dict[str, dict[str, Any]] = {}
    for row in equations:
        if row["state"] == "differs":
            changes[row["equation"]] = {**row["advice"], "because": f"equation {row['equation']}", "place": row["place"]}
    for incident in incidents:
        if (advice := incident["advice"])["setting"] is not None:
            changes.setdefault(advice["setting"], {**advice, "because": f"incident {incident['incident']}", "place": ""})
    for name, _, _, text in outside_settings(with_logged_rate(facts, rate)):
        if (change := setting_change((name,), (), facts, rate)) is not None:
            changes.setdefault(change.setting, {**_change(text, change), "because": "published settings", "place": ""})
    yield from changes.values()


def _next_command(
    address: str,
    diagnosis: Diagnosis,
    equations: Sequence[Mapping[str, Any]],
    advice: Sequence[Mapping[str, Any]],
    *,
    is_live: bool,
    shows_all: bool,
) -> dict[str, str]:
    """Return the command that leads on, and why."""
    is_directory = not address.startswith("--from")
    if is_directory and any(row["state"] == "differs" for row in equations):
        return _command("check", address, "it prints every equation, and what the numbers equal instead")
    if advice and is_directory:
        why = "change the setting, train again, and compare the returns"
        return _command("compare", address, why, "NEW_RUN --json")
    if is_live and is_directory:
        return _command("diagnose", address, "the run is still under way", "--json")
    if not shows_all and (diagnosis.incidents or diagnosis.outcome.kind not in GOOD):
        why = "it lists everything, with the questions that could not be answered and what supplies their inputs"
        return _command("diagnose", address, why, "--json --all")
    return _command("report", address, "it shows the whole run with its charts")


def _command(name: str, address: str, why: str, options: str = "") -> dict[str, str]:
    return {"command": f"esper-telemetry {name} {address} {options}".rstrip(), "why": why}


def shortened(values: dict[str, Any]) -> dict[str, Any]:
    """Return an answer of at most `MAX_BYTES`.

    Texts are cut, incidents keep only the beginnings of alarms and five values as evidence, and the longest collections lose entries until
    it fits.
    """
    values = cut_texts(values)
    values["incidents"] = sorted(  # lasting ones, critical ones, early ones
        map(_brief, values["incidents"]),
        key=lambda one: (None not in one["standing"].values(), one["level"] != "critical", one["incident"]),
    )
    present = [name for name in SHORTENED if name in values]
    totals = {name: len(values[name]) for name in present}
    while len(to_text(values)) > MAX_BYTES:
        lengths = {name: SHORTENED[name] * len(to_text(values[name])) for name in present if values[name]}
        name = max(lengths, key=lengths.__getitem__, default=None)
        if name is None:
            break
        kept = len(values[name]) - math.ceil(len(values[name]) / 8)
        values[name] = dict([*values[name].items()][:kept]) if isinstance(values[name], dict) else values[name][:kept]
        values["left_out"] = {one: totals[one] - len(values[one]) for one in present if len(values[one]) < totals[one]}
    values["incidents"] = sorted(values["incidents"], key=lambda incident: incident["incident"])
    return values


def _brief(incident: Mapping[str, Any]) -> dict[str, Any]:
    alarms = [{**alarm, "text": "", "evidence": {}} for alarm in incident["alarms"] if alarm["event"] == AlarmEvent.RAISE]
    return {**incident, "alarms": alarms, "evidence": incident["evidence"][:MAX_EVIDENCE]}


def cut_texts(value: Any, most: int = MAX_TEXT_CHARACTERS) -> Any:
    """Return plain values with texts beyond `most` characters cut in the middle, because a traceback ends with the exception."""
    if isinstance(value, str) and len(value) > most:
        return f"{value[: most // 2 - 3]} ... {value[-most // 2 + 2 :]}"
    if isinstance(value, Mapping):
        return {cut_texts(key, most): cut_texts(item, most) for key, item in value.items()}
    return [cut_texts(item, most) for item in value] if isinstance(value, list | tuple) else value
