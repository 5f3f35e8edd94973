"""The built-in tables: the environments of a vectorised run. Plugins add theirs, see `views.panels.TableDeclaration`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from esper_telemetry.views.panels import TableCell, TableDeclaration, TableView

if TYPE_CHECKING:
    from esper_telemetry.views.run_view import RunView

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
    TableDeclaration("environments", "Environments", environments_table, 10, events=(ENVIRONMENTS_EVENT,)),
)
