"""Built-in parts of the overview: the anomaly strip, one line that says what is wrong with a run now, and the table of its environments.

Plugins add parts and tables, see `views.panels.StripDeclaration` and `views.panels.TableDeclaration`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from esper_telemetry.core.record import CRITICAL_FROM, WARN_FROM
from esper_telemetry.views.panels import StripDeclaration, StripItem, TableCell, TableDeclaration, TableView

if TYPE_CHECKING:
    from esper_telemetry.views.run_view import RunView

NONFINITE_GRADIENTS: Final = "grad/global/norm_preclip_nonfinite"
EXPLODING: Final = re.compile(r"grad/(layer/)?[^/]+/severity_explode")
ZERO_GRADIENTS: Final = re.compile(r"grad/layer/([^/]+)/zero_frac")
MAX_EXPLODING_SEVERITY, MAX_KL, MAX_MEMORY_FRAC = 0.5, 0.05, 0.85


def strip_of_alarms(view: RunView) -> StripItem | None:
    """Return the number of alarms that are on, and the cause of the incident that began first."""
    active = [alarm for alarm in view.active.values() if alarm.severity >= WARN_FROM]
    if not active:
        return None
    first = min(active, key=lambda alarm: (alarm.incident, alarm.since))
    count = f"{len(active)} alarm{'' if len(active) == 1 else 's'}"
    is_critical = any(alarm.severity >= CRITICAL_FROM for alarm in active)
    cause = next((one.cause for one in view.diagnosis.incidents if one.number == first.incident), first.cause)
    return StripItem(f"{count}: {cause or first.type}", "critical" if is_critical else "warn")


def current(view: RunView, key: str) -> float | None:
    """Return the value of a key in the last record; None where that has none, since some counts are absent where they are zero."""
    updates = view.series(key).updates
    return view.last[key] if updates and view.axes is not None and updates[-1] == view.axes.update else None


def _nonfinite(view: RunView) -> StripItem | None:
    count = current(view, NONFINITE_GRADIENTS) or 0
    return StripItem(f"{count:.0f} NaN grads") if count > 0 else None


def _exploding(view: RunView) -> StripItem | None:
    """Layers where they are measured, else groups of parameters; healthy gradients have large severities too, so the alarm decides."""
    if "grad/explode" not in view.active:
        return None
    severities = {key: current(view, key) or 0.0 for key in view.keys if EXPLODING.fullmatch(key)}
    exploding = [key for key, severity in severities.items() if severity >= MAX_EXPLODING_SEVERITY]
    layers = [key for key in exploding if key.startswith("grad/layer/")]
    return StripItem(f"{len(layers or exploding)} exploding") if exploding else None


def _dead_layers(view: RunView) -> StripItem | None:
    """Tensors whose whole gradient was zero when it was last measured; not those of heads: one that no action needed has none."""
    heads = set(view.info.facts.get("heads") or ())
    names = [(match[1], key) for key in view.keys if (match := ZERO_GRADIENTS.fullmatch(key))]
    dead = [
        name for name, key in names if view.last[key] >= 1 and not (len(heads) > 1 and heads & set(name.split("_")))
    ]
    return StripItem(f"{len(dead)} dead layers", "warn") if dead else None


def _policy(view: RunView) -> StripItem | None:
    is_collapsed = "policy/entropy_collapse" in view.active or view.judgement("policy/entropy_norm") == "critical"
    is_wrong = is_collapsed or (current(view, "policy/kl") or 0.0) > MAX_KL
    return StripItem("PPO ⚠", "warn") if is_wrong else None


def _memory(view: RunView) -> StripItem | None:
    shares = [current(view, f"perf/memory/{name}_frac") or 0.0 for name in ("process", "device")]
    return StripItem("MEM ⚠") if max(shares) >= MAX_MEMORY_FRAC else None


PARTS: Final[tuple[tuple[str, Callable[[RunView], StripItem | None], int], ...]] = (
    ("alarms", strip_of_alarms, 0),
    ("nonfinite", _nonfinite, 40),
    ("exploding", _exploding, 50),
    ("dead_layers", _dead_layers, 60),
    ("policy", _policy, 70),
    ("memory", _memory, 80),
)
"""Name, item and place of each built-in part; places between them are for plugins."""

STRIP: Final = tuple(StripDeclaration(name, item, place) for name, item, place in PARTS)


ENVIRONMENTS_EVENT: Final = "environments"
MISSING: Final = TableCell("─", "dim")
COLUMNS: Final = {"return": "Return", "length": "Length", "last_return": "Last return", "last_length": "Last length"}


def number_cell(value: Any, style: str = "", form: str = ",.6g") -> TableCell:
    """Return the cell of a number; a dim dash where it is missing."""
    return MISSING if value is None else TableCell(format(value, form), style, float(value))


def environments_table(view: RunView) -> TableView | None:
    """Return one row per environment: the episode under way, the last one, and observations that never change."""
    event = view.latest.get(ENVIRONMENTS_EVENT)
    if event is None:
        return None
    data = event.data
    flags = data.get("constant") or [None] * len(data["return"])
    rows = []
    for env, flag in enumerate(flags):
        cells = [number_cell(data[column][env]) for column in COLUMNS]
        constant = (
            MISSING if flag is None else TableCell("constant", "bold red") if flag else TableCell("varies", "dim")
        )
        rows.append((TableCell(str(env), "cyan", env), *cells, number_cell(data["episodes"][env]), constant))
    shown, total = len(rows), int(data["environments"])
    title = f"Environments ({shown} of {total:,})" if shown < total else "Environments"
    names = ("Env", *COLUMNS.values(), "Episodes", "Observations")
    return TableView("environments", title, names, tuple(rows), _means(data))


def _means(data: Any) -> tuple[TableCell, ...]:
    cells = []
    for column in COLUMNS:
        known = [value for value in data[column] if value is not None]
        cells.append(number_cell(sum(known) / len(known) if known else None, form=",.4g"))
    return (TableCell("Σ", "bold"), *cells, number_cell(sum(data["episodes"])), MISSING)


TABLES: Final = (
    TableDeclaration(
        "environments",
        "Environments",
        environments_table,
        10,
        events=(ENVIRONMENTS_EVENT,),
        headings=(
            ("Return, Length", "of the episode under way"),
            ("Last return, Last length", "of the last episode that ended"),
            ("Observations", "constant: they were the same in all steps of the last rollout"),
        ),
    ),
)
