"""What views show of a run, by question: panels of charts, tables, and parts of the anomaly strip.

A plugin adds its own through the entry-point group `esper_telemetry.views`, which names a declaration or an iterable of them:

    [project.entry-points."esper_telemetry.views"]
    curiosity = "my_package.views:DECLARATIONS"

    DECLARATIONS = [
        PanelDeclaration("curiosity", "Does curiosity pay?", charts=(ChartDeclaration(("my/bonus",)),), place=25),
        TableDeclaration("rooms", "Rooms", rooms_table),
    ]
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.text import Text

from esper_telemetry.alarms.verdict.run_outcome import BAD, OutcomeKind
from esper_telemetry.core.record import CRITICAL_FROM, WARN_FROM
from esper_telemetry.views.run_parts import Judgement

if TYPE_CHECKING:
    from rich.console import RenderableType

    from esper_telemetry.views.run_view import RunView

ENTRY_POINT_GROUP: Final = "esper_telemetry.views"

_logger = logging.getLogger("esper_telemetry")


@dataclass(frozen=True, slots=True)
class ChartDeclaration:
    """Keys that share a chart and its y-axis, because they are in one unit.

    Attributes:
        keys: the keys, or templates such as `policy/head/{head}/kl`, the most important one first: its healthy range is drawn.
        title: heading; the name of the first metric by default.
        log: True for a logarithmic axis if all values are positive.
        stacked: True for parts of a whole, which are drawn on top of each other.
        label: short name of the first key, for a terminal of 80 columns; its metric's name by default.
        min_lines: number of keys with a value below which the chart is left out.
    """

    keys: tuple[str, ...]
    title: str = ""
    log: bool = False
    stacked: bool = False
    label: str = ""
    min_lines: int = 1


@dataclass(frozen=True, slots=True)
class PanelDeclaration:
    """Charts that answer one question.

    Attributes:
        name: unique name.
        question: that the charts answer.
        charts: in order; those without a value are left out.
        place: order among the panels, smallest first; the built-in ones have 10, 20, ... 70.
    """

    name: str
    question: str
    charts: tuple[ChartDeclaration, ...]
    place: int = 100


class TableCell(NamedTuple):
    """One cell of a table.

    Attributes:
        text: of the cell; a `Text` if its parts have different styles.
        style: terminal style such as `bold red`; empty for the default.
        sort: value that orders rows by this column; the text by default.
    """

    text: str | Text
    style: str = ""
    sort: float | str | None = None


@dataclass(frozen=True, slots=True)
class TableView:
    """A table of a run at present.

    Attributes:
        name, title: of its declaration.
        columns: headings.
        rows: cells by row; the first cell of a row names it.
        footer: means and totals, below the rows; empty without any.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    footer: tuple[TableCell, ...] = ()


@dataclass(frozen=True, slots=True)
class TableDeclaration:
    """A table that a view makes from a run.

    Attributes:
        name: unique name.
        title: heading.
        table: returns the table, or None for a run without one; it reads `RunView.last` and `RunView.latest`.
        place: order among the tables, smallest first.
        events: types of the journal's events that the table is made of; the list of a run's last events leaves them out.
        detail: returns what a view shows of one row, by its number; None if the row is all.
        headings: (heading, meaning) of columns that a reader may ask about, for the help of the terminal.
        keys: metrics or templates whose single environments, layers or the like are its rows.
    """

    name: str
    title: str
    table: Callable[[RunView], TableView | None]
    place: int = 100
    events: tuple[str, ...] = ()
    detail: Callable[[RunView, int], RenderableType] | None = None
    headings: tuple[tuple[str, str], ...] = ()
    keys: tuple[str, ...] = ()

    def checked_table(self, view: RunView) -> TableView | None:
        """Return the table; raises TypeError if a view could not show it."""
        table = self.table(view)
        if table is not None and not isinstance(table, TableView):
            raise TypeError(f"a table is a TableView, got {table!r}")
        cells = [cell for row in (*table.rows, table.footer) for cell in row] if table else []
        if wrong := next((cell for cell in cells if not isinstance(cell, TableCell) or not isinstance(cell.text, str | Text)), None):
            raise TypeError(f"a cell of a table is a TableCell with a text, got {wrong!r}")
        return table


class StripItem(NamedTuple):
    """A part of the anomaly strip: its text, and `critical` (red) or `warn` (yellow)."""

    text: str
    level: Judgement = "critical"


@dataclass(frozen=True, slots=True)
class StripDeclaration:
    """A part of the anomaly strip.

    Attributes:
        name: unique name.
        item: returns the part, or None if the part is left out.
        place: order in the strip, smallest first; the outcome has -10, the alarms have 0.
        keys: metrics or templates that it reads.
    """

    name: str
    item: Callable[[RunView], StripItem | None]
    place: int = 100
    keys: tuple[str, ...] = ()

    def checked_item(self, view: RunView) -> StripItem | None:
        """Return the part; raises TypeError if it is not a `StripItem`."""
        item = self.item(view)
        if item is not None and not isinstance(item, StripItem):
            raise TypeError(f"a part of the strip is a StripItem, got {item!r}")
        return item


ViewDeclaration = PanelDeclaration | TableDeclaration | StripDeclaration


def _chart(*keys: str, **options: Any) -> ChartDeclaration:
    return ChartDeclaration(keys, **options)


LEARNING: Final = (
    _chart("episode/return_mean_100", "episode/return_mean"),
    _chart("eval/return_mean"),
    _chart("episode/length_mean"),
    _chart("policy/surrogate_gain"),
)
POLICY: Final = (
    _chart("policy/kl", "policy/kl_max", log=True),
    _chart("policy/clip_frac"),
    _chart(*("policy/ess_frac_min", "policy/ess_frac"), title="Effective sample size of the update", label="worst effective sample size"),
    _chart("policy/ratio/max", "policy/ratio/min", title="Largest and smallest ratio", log=True),
)
EXPLORATION: Final = (
    _chart("policy/entropy_norm", "policy/entropy_marginal_norm", title="Entropy of the policy"),
    _chart("policy/entropy"),
    _chart("policy/std/mean", "policy/head/{head}/std", log=True),
    _chart("policy/head/{head}/entropy_norm", title="Entropy of each head", label="normalised entropy", min_lines=2),
)
CRITIC: Final = (
    _chart("value/explained_variance", "value/r2"),
    _chart("value/bias_over_std", label="bias of the critic"),
    _chart("value/loss_norm", label="value loss over return variance", log=True),
    _chart("adv/raw/std", "ret/std", title="Spread of advantages and returns", log=True),
)
GRADIENTS: Final = (
    _chart("grad/global/norm_preclip", "grad/{group}/norm_preclip", label="gradient norm before clipping", log=True),
    _chart("grad/clip/coef", "grad/clip/coef_min", log=True),
    _chart("grad/interference/critic_share"),
    _chart("opt/update_to_weight", log=True),
    _chart("opt/lr", "opt/lr/{group}", title="Learning rate"),
    _chart("repr/dormant_frac", "repr/dead_frac", title="Dormant and dead units"),
)
MEMORY: Final = (
    _chart("lstm/{part}/rms", label="size of the recurrent state", log=True),
    _chart("lstm/gate/{gate}/mean"),
    _chart("lstm/timescale/median", "lstm/timescale/p90", log=True),
    _chart("lstm/staleness", "lstm/staleness_first", log=True),
    _chart("lstm/ablate_kl", log=True),
    _chart("lstm/bptt/h0_grad_norm", label="gradient at the first state", log=True),
    _chart("lstm/reset_rate"),
)
TIME: Final = (
    _chart("train/env_steps_per_second"),
    _chart(*("perf/environment_ms", "perf/inference_ms", "perf/update_ms", "perf/telemetry_ms"), title="Time of an update", stacked=True),
    _chart("perf/telemetry_frac"),
    _chart("perf/memory/process_mib", "perf/memory/children_mib", "perf/memory/device_mib", title="Memory"),
    _chart("perf/memory/process_frac", "perf/memory/device_frac", title="Share of the memory that is taken"),
)
PANELS: Final = (
    PanelDeclaration("learning", "Does it learn?", LEARNING, 10),
    PanelDeclaration("policy", "How far does the policy move?", POLICY, 20),
    PanelDeclaration("exploration", "Does it explore?", EXPLORATION, 30),
    PanelDeclaration("critic", "Does the critic explain the returns?", CRITIC, 40),
    PanelDeclaration("gradients", "Are gradients and steps healthy?", GRADIENTS, 50),
    PanelDeclaration("memory", "Does memory work?", MEMORY, 60),
    PanelDeclaration("time", "Where does the time go?", TIME, 70),
)


NONFINITE_GRADIENTS: Final = "grad/global/norm_preclip_nonfinite"
EXPLODING: Final = re.compile(r"grad/(layer/)?[^/]+/severity_explode")
ZERO_GRADIENTS: Final = re.compile(r"grad/layer/([^/]+)/zero_frac")
STRIP_KEYS: Final = frozenset(
    {NONFINITE_GRADIENTS, "policy/kl", "policy/entropy_norm", "perf/memory/process_frac", "perf/memory/device_frac"}
)
"""Keys that parts of the strip judge by separate bounds."""
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


def _outcome(view: RunView) -> StripItem | None:
    kind = view.outcome.kind
    return StripItem(str(kind), "critical" if kind is OutcomeKind.FAILED else "warn") if kind in BAD else None


def _critical_values(view: RunView) -> StripItem | None:
    """Values beyond their critical bounds, except values that other parts of the strip or active alarms are about."""
    elsewhere = STRIP_KEYS | {alarm.key for alarm in view.active.values()}
    keys = [key for key in view.critical_now if key not in elsewhere]
    return StripItem(f"{len(keys)} critical value{'' if len(keys) == 1 else 's'}: {keys[0]}", "warn") if keys else None


def current(view: RunView, key: str) -> float | None:
    """Return the value of a key in the last record; None if that lacks the key, as some counts of zero are absent."""
    updates = view.series(key).updates
    return view.last[key] if updates and view.axes is not None and updates[-1] == view.axes.update else None


def _nonfinite(view: RunView) -> StripItem | None:
    count = current(view, NONFINITE_GRADIENTS) or 0
    return StripItem(f"{count:.0f} NaN grads") if count > 0 else None


def _exploding(view: RunView) -> StripItem | None:
    """Layers if they are measured, else groups of parameters; healthy gradients have large severities too, so the alarm decides."""
    if "grad/explode" not in view.active:
        return None
    severities = {key: current(view, key) or 0.0 for key in view.keys if EXPLODING.fullmatch(key)}
    exploding = [key for key, severity in severities.items() if severity >= MAX_EXPLODING_SEVERITY]
    layers = [key for key in exploding if key.startswith("grad/layer/")]
    return StripItem(f"{len(layers or exploding)} exploding") if exploding else None


def _dead_layers(view: RunView) -> StripItem | None:
    """Tensors whose whole gradient was zero in the last measurement, without heads, which have no gradient if no action used them."""
    heads = set(view.facts.heads or ())
    names = [(match[1], key) for key in view.keys if (match := ZERO_GRADIENTS.fullmatch(key))]
    dead = [name for name, key in names if view.last[key] >= 1 and not (len(heads) > 1 and heads & set(name.split("_")))]
    return StripItem(f"{len(dead)} dead layers", "warn") if dead else None


def _policy(view: RunView) -> StripItem | None:
    is_collapsed = "policy/entropy_collapse" in view.active or view.judgement("policy/entropy_norm") == "critical"
    is_wrong = is_collapsed or (current(view, "policy/kl") or 0.0) > MAX_KL
    return StripItem("PPO ⚠", "warn") if is_wrong else None


def _memory(view: RunView) -> StripItem | None:
    shares = [current(view, f"perf/memory/{name}_frac") or 0.0 for name in ("process", "device")]
    return StripItem("MEM ⚠") if max(shares) >= MAX_MEMORY_FRAC else None


STRIP: Final = (
    StripDeclaration("outcome", _outcome, -10),
    StripDeclaration("alarms", strip_of_alarms, 0),
    StripDeclaration("nonfinite", _nonfinite, 40, (NONFINITE_GRADIENTS,)),
    StripDeclaration("exploding", _exploding, 50, ("grad/layer/{layer}/severity_explode", "grad/{group}/severity_explode")),
    StripDeclaration("dead_layers", _dead_layers, 60, ("grad/layer/{layer}/zero_frac",)),
    StripDeclaration("policy", _policy, 70, ("policy/entropy_norm", "policy/entropy_marginal_norm", "policy/kl")),
    StripDeclaration("memory", _memory, 80, ("perf/memory/process_frac", "perf/memory/device_frac")),
    StripDeclaration("critical_values", _critical_values, 90),
)
"""The built-in parts of the anomaly strip, one line that says what is wrong with a run now; places between them are for plugins."""

ENVIRONMENTS_EVENT: Final = "environments"
MISSING_CELL: Final = TableCell("─", "dim")
ENVIRONMENT_COLUMNS: Final = {"return": "Return", "length": "Length", "last_return": "Last return", "last_length": "Last length"}


def number_cell(value: Any, form: str = ",.6g") -> TableCell:
    """Return the cell of a number; a dim dash if it is missing."""
    return MISSING_CELL if value is None else TableCell(format(value, form), sort=float(value))


def environments_table(view: RunView) -> TableView | None:
    """Return one row per environment: the episode under way, the last one, and observations that never change."""
    event = view.latest.get(ENVIRONMENTS_EVENT)
    if event is None:
        return None
    data = event.data
    flags = {None: MISSING_CELL, True: TableCell("constant", "bold red"), False: TableCell("varies", "dim")}
    rows, means = [], []
    for env, flag in enumerate(data.get("constant") or [None] * len(data["return"])):
        cells = [number_cell(data[column][env]) for column in (*ENVIRONMENT_COLUMNS, "episodes")]
        rows.append((TableCell(str(env), "cyan", env), *cells, flags[flag]))
    for column in ENVIRONMENT_COLUMNS:
        values = [value for value in data[column] if value is not None]
        means.append(number_cell(sum(values) / len(values) if values else None, ",.4g"))
    footer = (TableCell("Σ", "bold"), *means, number_cell(sum(data["episodes"])), MISSING_CELL)
    total = int(data["environments"])
    title = f"Environments ({len(rows)} of {total:,})" if len(rows) < total else "Environments"
    names = ("Env", *ENVIRONMENT_COLUMNS.values(), "Episodes", "Observations")
    return TableView("environments", title, names, tuple(rows), footer)


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


@dataclass(frozen=True, slots=True)
class ViewDeclarations:
    """All declarations that are installed, each kind by place.

    Attributes:
        panels, tables, strip: the declarations.
        problems: a sentence for each plugin whose declarations cannot be used.
    """

    panels: tuple[PanelDeclaration, ...]
    tables: tuple[TableDeclaration, ...]
    strip: tuple[StripDeclaration, ...]
    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, declarations: Iterable[ViewDeclaration]) -> ViewDeclarations:
        """Return declarations by kind; raises TypeError for anything else, ValueError if two of a kind have one name."""
        kinds = (PanelDeclaration, TableDeclaration, StripDeclaration)
        by_kind: dict[type, dict[str, ViewDeclaration]] = {kind: {} for kind in kinds}
        for one in declarations:
            if type(one) not in by_kind:
                raise TypeError(f"views are made of {', '.join(kind.__name__ for kind in kinds)}, got {one!r}")
            if by_kind[type(one)].setdefault(one.name, one) is not one:
                raise ValueError(f"there is a {type(one).__name__} {one.name!r} already")
        panels, tables, strip = (tuple(sorted(named.values(), key=lambda one: one.place)) for named in by_kind.values())
        return cls(panels, tables, strip)  # type: ignore[arg-type]  # by kind


@lru_cache(maxsize=1)
def view_declarations() -> ViewDeclarations:
    """Return the built-in declarations and the plugins' declarations; a plugin that cannot be used costs a warning and its own."""
    declarations: list[ViewDeclaration] = [*PANELS, *STRIP, *TABLES]
    problems: list[str] = []
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            value = entry.load()
            added = [value] if isinstance(value, ViewDeclaration) else list(value)
            ViewDeclarations.of([*declarations, *added])
        except (Exception, SystemExit) as error:  # a plugin's own code
            problems.append(f"The views of the plugin {entry.name!r} ({entry.value}) cannot be used: {error}")
            _logger.warning("esper-telemetry: %s", problems[-1])
        else:
            declarations += added
    return replace(ViewDeclarations.of(declarations), problems=tuple(problems))
