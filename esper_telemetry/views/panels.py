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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.text import Text

from esper_telemetry.views.series import Judgement

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
        log: True for a logarithmic axis where all values are positive.
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
        text: of the cell; a `Text` where its parts have styles of their own.
        style: terminal style such as `bold red`; empty for the default.
        sort: value that orders rows by this column; the text by default.
    """

    text: str | Text
    style: str = ""
    sort: float | str | None = None


@dataclass(frozen=True, slots=True)
class TableView:
    """A table of a run as it stands.

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
        table: returns the table, or None for a run that has none; it reads `RunView.last` and `RunView.latest`.
        place: order among the tables, smallest first.
        events: types of the journal's events that the table is made of; the list of a run's last events leaves them out.
        detail: returns what a view shows of one row, by its number; None where there is no more than the row.
        headings: (heading, meaning) of columns that a reader may ask about, for the help of the terminal.
    """

    name: str
    title: str
    table: Callable[[RunView], TableView | None]
    place: int = 100
    events: tuple[str, ...] = ()
    detail: Callable[[RunView, int], RenderableType] | None = None
    headings: tuple[tuple[str, str], ...] = ()

    def checked_table(self, view: RunView) -> TableView | None:
        """Return the table; raises TypeError where a view could not show it."""
        table = self.table(view)
        if table is not None and not isinstance(table, TableView):
            raise TypeError(f"a table is a TableView, got {table!r}")
        cells = [cell for row in (*table.rows, table.footer) for cell in row] if table else []
        if wrong := next(
            (cell for cell in cells if not isinstance(cell, TableCell) or not isinstance(cell.text, str | Text)), None
        ):
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
        item: returns the part, or None while there is nothing to say.
        place: order in the strip, smallest first; the alarms have 0.
    """

    name: str
    item: Callable[[RunView], StripItem | None]
    place: int = 100

    def checked_item(self, view: RunView) -> StripItem | None:
        """Return the part; raises TypeError where it is not a `StripItem`."""
        item = self.item(view)
        if item is not None and not isinstance(item, StripItem):
            raise TypeError(f"a part of the strip is a StripItem, got {item!r}")
        return item


ViewDeclaration = PanelDeclaration | TableDeclaration | StripDeclaration


PANELS: Final = (
    PanelDeclaration(
        "learning",
        "Does it learn?",
        (
            ChartDeclaration(("episode/return_mean_100", "episode/return_mean")),
            ChartDeclaration(("eval/return_mean",)),
            ChartDeclaration(("episode/length_mean",)),
            ChartDeclaration(("policy/surrogate_gain",)),
        ),
        10,
    ),
    PanelDeclaration(
        "policy",
        "How far does the policy move?",
        (
            ChartDeclaration(("policy/kl", "policy/kl_max"), log=True),
            ChartDeclaration(("policy/clip_frac",)),
            ChartDeclaration(
                ("policy/ess_frac_min", "policy/ess_frac"),
                "Effective sample size of the update",
                label="worst effective sample size",
            ),
            ChartDeclaration(("policy/ratio/max", "policy/ratio/min"), "Largest and smallest ratio", log=True),
        ),
        20,
    ),
    PanelDeclaration(
        "exploration",
        "Does it explore?",
        (
            ChartDeclaration(("policy/entropy_norm", "policy/entropy_marginal_norm"), "Entropy of the policy"),
            ChartDeclaration(("policy/entropy",)),
            ChartDeclaration(("policy/std/mean", "policy/head/{head}/std"), log=True),
            ChartDeclaration(
                ("policy/head/{head}/entropy_norm",), "Entropy of each head", label="normalised entropy", min_lines=2
            ),
        ),
        30,
    ),
    PanelDeclaration(
        "critic",
        "Does the critic explain the returns?",
        (
            ChartDeclaration(("value/explained_variance", "value/r2")),
            ChartDeclaration(("value/bias_over_std",), label="bias of the critic"),
            ChartDeclaration(("value/loss_norm",), label="value loss over return variance", log=True),
            ChartDeclaration(("adv/raw/std", "ret/std"), "Spread of advantages and returns", log=True),
        ),
        40,
    ),
    PanelDeclaration(
        "gradients",
        "Are gradients and steps healthy?",
        (
            ChartDeclaration(
                ("grad/global/norm_preclip", "grad/{group}/norm_preclip"),
                label="gradient norm before clipping",
                log=True,
            ),
            ChartDeclaration(("grad/clip/coef", "grad/clip/coef_min"), log=True),
            ChartDeclaration(("grad/interference/critic_share",)),
            ChartDeclaration(("opt/update_to_weight",), log=True),
            ChartDeclaration(("opt/lr",)),
            ChartDeclaration(("repr/dormant_frac", "repr/dead_frac"), "Dormant and dead units"),
        ),
        50,
    ),
    PanelDeclaration(
        "memory",
        "Does memory work?",
        (
            ChartDeclaration(("lstm/{part}/rms",), label="size of the recurrent state", log=True),
            ChartDeclaration(("lstm/gate/{gate}/mean",)),
            ChartDeclaration(("lstm/timescale/median", "lstm/timescale/p90"), log=True),
            ChartDeclaration(("lstm/staleness", "lstm/staleness_first"), log=True),
            ChartDeclaration(("lstm/ablate_kl",), log=True),
            ChartDeclaration(("lstm/bptt/h0_grad_norm",), label="gradient at the first state", log=True),
            ChartDeclaration(("lstm/reset_rate",)),
        ),
        60,
    ),
    PanelDeclaration(
        "time",
        "Where does the time go?",
        (
            ChartDeclaration(("train/env_steps_per_second",)),
            ChartDeclaration(
                ("perf/environment_ms", "perf/inference_ms", "perf/update_ms", "perf/telemetry_ms"),
                "Time of an update",
                stacked=True,
            ),
            ChartDeclaration(("perf/telemetry_frac",)),
            ChartDeclaration(
                ("perf/memory/process_mib", "perf/memory/children_mib", "perf/memory/device_mib"), "Memory"
            ),
            ChartDeclaration(
                ("perf/memory/process_frac", "perf/memory/device_frac"), "Share of the memory that is taken"
            ),
        ),
        70,
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

    @property
    def table_events(self) -> frozenset[str]:
        """Types of the events that tables are made of."""
        return frozenset(event for table in self.tables for event in table.events)

    @classmethod
    def of(cls, declarations: Iterable[ViewDeclaration]) -> ViewDeclarations:
        """Return declarations by kind; raises TypeError for anything else, ValueError where two of a kind have one name."""
        by_kind: dict[type, dict[str, ViewDeclaration]] = {
            PanelDeclaration: {},
            TableDeclaration: {},
            StripDeclaration: {},
        }
        for one in declarations:
            if type(one) not in by_kind:
                raise TypeError(
                    f"views are made of PanelDeclaration, TableDeclaration and StripDeclaration, got {one!r}"
                )
            if by_kind[type(one)].setdefault(one.name, one) is not one:
                raise ValueError(f"there is a {type(one).__name__} {one.name!r} already")
        panels, tables, strip = (tuple(sorted(named.values(), key=lambda one: one.place)) for named in by_kind.values())
        return cls(panels, tables, strip)  # type: ignore[arg-type]  # by kind


@lru_cache(maxsize=1)
def view_declarations() -> ViewDeclarations:
    """Return the built-in declarations and those of plugins; a plugin that cannot be used costs a warning and its own."""
    from esper_telemetry.views.overview import STRIP, TABLES

    declarations: list[ViewDeclaration] = [*PANELS, *STRIP, *TABLES]
    problems: list[str] = []
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            value = entry.load()
            added = [value] if isinstance(value, ViewDeclaration) else list(value)
            ViewDeclarations.of([*declarations, *added])
        except Exception as error:  # a plugin's own code
            problems.append(f"The views of the plugin {entry.name!r} ({entry.value}) cannot be used: {error}")
            _logger.warning("esper-telemetry: %s", problems[-1])
        else:
            declarations += added
    return replace(ViewDeclarations.of(declarations), problems=tuple(problems))
