"""A ready-made W&B workspace: the charts of a run by question, what its headlines mean, its alarms, and which runs stand beside it."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable
from typing import Any, Final

from esper_telemetry.core.record import RunInfo
from esper_telemetry.core.redaction import masked
from esper_telemetry.sinks.layout import Section, described, family_of, sections
from esper_telemetry.sinks.protocol import require_package
from esper_telemetry.sinks.readme import guide

NAME: Final = "esper_telemetry"
"""What a workspace is called by default; there is one of a name in a project."""
OPEN_FAMILIES: Final = frozenset(["alarm", "episode", "policy", "value"])
"""Sections that are open when the page is."""
COLUMNS: Final = 3
ALARMS: Final = "alarm"
SUMMARY: Final = ("episode/return_mean_100", "alarms/active", "alarms/first", "alarms/raised")
"""Numbers and words of each run that stand beside its name."""
SYMBOLS: Final = frozenset(["So", "Sk", "Sm", "Sc", "Cs", "Cc"])
"""Kinds of letters that W&B refuses in a workspace's name: emojis, signs of arithmetic, control characters."""
NAME_LENGTH: Final = 11
ALPHABET: Final = "0123456789abcdefghijklmnopqrstuvwxyz"


class PushError(Exception):
    """The server did not take the workspace."""


def require_workspaces() -> None:
    """Raises ModuleNotFoundError with the install command unless `wandb-workspaces` is there; imports nothing."""
    require_package("wandb_workspaces", "a W&B workspace")


def workspace(run: RunInfo, keys: Iterable[str], *, project: str, entity: str = "", name: str = NAME) -> Any:
    """The workspace of the project in which such a run is shown, as an object of `wandb_workspaces`; nothing is sent.

    Args:
        run: whose metrics are described, and which is pinned where the entity is known.
        keys: that W&B holds; each stands in exactly one chart, those of alarms are found by their names when they come.
        project: of W&B.
        entity: user or team; empty where that is not known yet.
        name: what it is called.

    Raises ModuleNotFoundError with the install command where `wandb-workspaces` is missing, ValueError for a name that it does not take.
    """
    require_workspaces()
    import wandb_workspaces.workspaces as ws

    if not name.strip() or any(unicodedata.category(letter) in SYMBOLS for letter in name):
        raise ValueError(f"a workspace's name is made of letters, digits and punctuation, got {name!r}")
    shown = [section for section in sections(keys, run) if section.family != ALARMS]
    made = ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[_alarms(), *(_section(section, run) for section in shown)],
        settings=ws.WorkspaceSettings(x_axis="axis/env_step", ignore_outliers=False),
        runset_settings=_runs(run, pinned=[run.run_id] if entity else []),
    )
    made._internal_name = f"nw-{_short_name(entity, project, name)}-v"
    return made


def specification(made: Any) -> dict[str, Any]:
    """What W&B stores of a workspace, as plain values."""
    view = made._to_model()
    spec: dict[str, Any] = view.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {"entity": view.entity, "project": view.project, "name": view.name, "displayName": view.display_name} | {
        "spec": spec
    }


def has_key() -> bool:
    """Whether there is an API key for W&B; nothing is asked, and no server."""
    import wandb
    from wandb.errors import Error

    try:
        return bool(wandb.login(prompt=False, verify=False))
    except (Error, ValueError):
        return False


def default_entity() -> str:
    """The user or team that the key belongs to. Raises PushError where the server does not say."""
    import wandb

    try:
        entity = wandb.Api().default_entity
    except Exception as error:  # W&B's client raises its own errors, those of requests, and ValueError
        raise PushError(f"W&B cannot be asked whose key this is: {_brief(error)}") from error
    if not entity:
        raise PushError("W&B does not say whose key this is: give --entity")
    return str(entity)


def push(made: Any) -> str:
    """Saves the workspace and returns its address; one of that name in the project is replaced.

    Raises PushError where the server does not take it.
    """
    try:
        made._internal_id = _known_id(made)
        made.save()
        return str(made.url)
    except Exception as error:  # as above, and KeyError or TypeError for an answer without a view
        raise PushError(f"W&B does not save the workspace: {_brief(error)}") from error


def _known_id(made: Any) -> str:
    """The id under which the server has a workspace of this name; empty for none."""
    from wandb_workspaces.workspaces import internal

    short = internal._internal_name_to_url_query_str(made._internal_name)
    try:
        return str(internal.get_view_dict(made.entity, made.project, short)["id"])
    except ValueError:  # no such project, or no such view in it
        return ""


def _alarms() -> Any:
    """What is wrong, how badly, and the table that W&B has of it once a run has ended."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    axis = family_of(ALARMS).axis
    panels = [
        wr.MarkdownPanel(markdown=ABOUT_ALARMS),
        wr.LinePlot(title="Alarms raised", x=axis, y=["alarm/active"], range_y=(0, None)),
        wr.LinePlot(title="Severity of each alarm", x=axis, metric_regex="^alarm/.+/.+$", range_y=(0, 1)),
        wr.WeavePanelSummaryTable(table_name="alarms/table"),
    ]
    return ws.Section(name=family_of(ALARMS).question, panels=panels, is_open=True, layout_settings=_grid(2, 2))


ABOUT_ALARMS: Final = """\
**Alarms** are what detectors say of a run: `alarms/first` beside its name tells what broke first, `alarms/active` what is wrong now.
The table has every alarm with its evidence in words, once the run has ended.

`esper-telemetry diagnose RUN_DIR` says what to try, `esper-telemetry metrics KEY` what a chart means."""


def _section(section: Section, run: RunInfo) -> Any:
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    axis = family_of(section.family).axis
    panels: list[Any] = [wr.LinePlot(title=chart.title, x=axis, y=list(chart.keys)) for chart in section.charts]
    if told := guide([key for chart in section.charts for key in chart.keys if described(key, run).headline], run):
        panels.insert(0, wr.MarkdownPanel(markdown=told))
    return ws.Section(
        name=section.question,
        panels=panels,
        is_open=section.family in OPEN_FAMILIES,
        layout_settings=_grid(COLUMNS, 2 if len(panels) > COLUMNS else 1),
        panel_settings=ws.SectionPanelSettings(x_axis=axis),
    )


def _grid(columns: int, rows: int) -> Any:
    import wandb_workspaces.workspaces as ws

    return ws.SectionLayoutSettings(columns=columns, rows=rows)


def _runs(run: RunInfo, *, pinned: list[str]) -> Any:
    """All runs of the project, the newest first, with what became of each beside its name."""
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    settings = [f"config:{name}" for name in ("env", "seed") if name in run.config]
    return ws.RunsetSettings(
        order=[expr.Ordering(expr.Metric("CreatedTimestamp"), ascending=False)],
        pinned_columns=["run:displayName", "run:state", *(f"summary:{key}" for key in SUMMARY), *settings],
        pinned_runs=list(pinned),
    )


def _short_name(*parts: str) -> str:
    """A name as W&B gives workspaces, the same for the same parts: so a second push replaces the first."""
    number = int.from_bytes(hashlib.sha256("/".join(parts).encode()).digest())
    digits = []
    for _ in range(NAME_LENGTH):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(digits)


def _brief(error: Exception) -> str:
    """The first line of an error, with passwords masked."""
    return masked((f"{error}" or type(error).__name__).splitlines()[0])
