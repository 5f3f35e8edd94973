"""The verdict on a run for programs: `diagnose --json`, and the tool `diagnose` of the MCP server.

`docs/diagnose.schema.json` describes the fields. By default an answer is at most `MAX_BYTES` long: collections are shortened, what is most
severe is kept, and `left_out` has the number of entries that are missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from esper_telemetry.alarms.diagnosis import Diagnosis, IncidentReport
from esper_telemetry.alarms.rule import AlarmRule
from esper_telemetry.alarms.rule_registry import alarm_rules
from esper_telemetry.alarms.verdict.published_settings import SettingChange, outside_settings, setting_change
from esper_telemetry.alarms.verdict.run_outcome import GOOD
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.record import AlarmEvent, RunInfo
from esper_telemetry.journal.lines import encode_alarm, plain
from esper_telemetry.views.equation_table import EquationRow
from esper_telemetry.views.verdict_text import is_symptom_alone

SCHEMA: Final = 1
"""Version of the answer; a field that changes its meaning, or goes, raises it."""
MAX_BYTES: Final = 8000
"""Length of an answer without `--all`."""
MAX_TEXT_CHARACTERS: Final = 600
"""Length of one text in such an answer."""
MAX_EVIDENCE: Final = 5
"""Values that show an incident in such an answer."""
RATE: Final = "opt/lr"
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
    advice = list(_advice(rows, incidents, facts))
    values = {
        "schema": SCHEMA,
        **head,
        "outcome": diagnosis.outcome.data(),
        "tone": str(diagnosis.tone),
        "summary": diagnosis.summary,
        "advice": advice,
        "next": _next_command(
            address, diagnosis, rows, advice, is_live=head.get("status", "") is None, shows_all=everything
        ),
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
        named = [(name, to) for name, to in rule.changes if not isinstance(to, str) or _wrapper(to) in advice]
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
            {
                "key": key,
                "value": value,
                "usual": usual.get(key) if isinstance(usual, Mapping) else None,
                "healthy": info.healthy if (info := run.describe(key)) else "",
            }
            for key, value in evidence.items()
            if value is not None
        ],
        "standing": incident.ends(),
        "alarms": [encode_alarm(alarm) for alarm in incident.alarms],
    }


def _wrapper(call: str) -> str:
    """Return the name in a call such as `gymnasium.wrappers.RescaleAction(env, -1, 1)`; advice that does not name it is not about it."""
    return call.partition("(")[0].rpartition(".")[2]


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
    equations: Sequence[Mapping[str, Any]],
    incidents: Sequence[Mapping[str, Any]],
    facts: Facts,
) -> Iterator[dict[str, Any]]:
    """Yield the changes of settings, the most certain one first: equations that differ, incidents, settings outside published ranges."""
    changes: dict[str, dict[str, Any]] = {}
    for row in equations:
        if row["state"] == "differs":
            changes[row["equation"]] = {
                **row["advice"],
                "because": f"equation {row['equation']}",
                "place": row["place"],
            }
    for incident in incidents:
        if (advice := incident["advice"])["setting"] is not None:
            changes.setdefault(
                advice["setting"], {**advice, "because": f"incident {incident['incident']}", "place": ""}
            )
    for name, _, _, text in outside_settings(facts):
        if (change := setting_change((name,), (), facts)) is not None:
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
    values["incidents"] = sorted(map(_brief, values["incidents"]), key=_urgency)
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
    alarms = [
        {**alarm, "text": "", "evidence": {}} for alarm in incident["alarms"] if alarm["event"] == AlarmEvent.RAISE
    ]
    return {**incident, "alarms": alarms, "evidence": incident["evidence"][:MAX_EVIDENCE]}


def _urgency(incident: Mapping[str, Any]) -> tuple[bool, bool, int]:
    """Return the order in which incidents are kept: lasting ones, critical ones, early ones."""
    return None not in incident["standing"].values(), incident["level"] != "critical", incident["incident"]


def cut_texts(value: Any, most: int = MAX_TEXT_CHARACTERS) -> Any:
    """Return plain values with texts beyond `most` characters cut in the middle, because a traceback ends with the exception."""
    if isinstance(value, str) and len(value) > most:
        return f"{value[: most // 2 - 3]} ... {value[-most // 2 + 2 :]}"
    if isinstance(value, Mapping):
        return {cut_texts(key, most): cut_texts(item, most) for key, item in value.items()}
    return [cut_texts(item, most) for item in value] if isinstance(value, list | tuple) else value
