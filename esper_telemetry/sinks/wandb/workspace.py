"""A W&B workspace for a run: its charts by question, the meaning of its headlines, its alarms, and a list of runs."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable
from typing import Any, Final

from esper_telemetry.core.record import RunInfo
from esper_telemetry.core.redaction import masked
from esper_telemetry.sinks.layout import Section, described, family_of, sections
from esper_telemetry.sinks.pages import guide
from esper_telemetry.sinks.sink_protocol import require_package

DEFAULT_NAME: Final = "esper_telemetry"
"""A project has at most one workspace with this name."""
OPEN_FAMILIES: Final = frozenset(["alarm", "episode", "policy", "value"])
"""Families whose sections are open when the page opens."""
GRID_COLUMNS: Final = 3
ALARMS: Final = "alarm"
SUMMARY_COLUMNS: Final = ("episode/return_mean_100", "alarms/active", "alarms/first", "alarms/raised")
"""Entries of each run's summary that are shown next to its name."""
FORBIDDEN_CATEGORIES: Final = frozenset(["So", "Sk", "Sm", "Sc", "Cs", "Cc"])
"""Unicode categories that W&B refuses in a workspace's name: emojis, mathematical symbols, control characters."""
SHORT_NAME_LENGTH: Final = 11
ALPHABET: Final = "0123456789abcdefghijklmnopqrstuvwxyz"

ALARMS_GUIDE: Final = """\
**Alarms** are the findings of the detectors. Next to the run's name, `alarms/first` shows what broke first, and `alarms/active` what is
wrong now. The table lists every alarm with its evidence in words, once the run has ended.

`esper-telemetry diagnose RUN_DIR` says what to try, `esper-telemetry metrics KEY` explains a chart."""


class PushError(Exception):
    """The server did not accept the workspace."""


def require_workspaces() -> None:
    """Raise ModuleNotFoundError with the install command unless `wandb-workspaces` is installed; imports nothing."""
    require_package("wandb_workspaces", "a W&B workspace")


def workspace(run: RunInfo, keys: Iterable[str], *, project: str, entity: str = "", name: str = DEFAULT_NAME) -> Any:
    """Return the project's workspace for such a run, as an object of `wandb_workspaces`; nothing is sent.

    Args:
        run: run with the descriptions of the metrics; it is pinned if the entity is known.
        keys: keys in W&B; each is in exactly one chart. Alarms are shown by a pattern of their names.
        project: W&B project.
        entity: user or team; empty if it is not known yet.
        name: name of the workspace.

    Raises:
        ModuleNotFoundError: `wandb-workspaces` is missing; the message has the install command.
        ValueError: W&B would refuse the name.
    """
    require_workspaces()
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    if not name.strip() or any(unicodedata.category(letter) in FORBIDDEN_CATEGORIES for letter in name):
        raise ValueError(f"a workspace's name may contain only letters, digits and punctuation, got {name!r}")
    settings = [f"config:{setting}" for setting in ("env", "seed") if setting in run.config]
    shown = [section for section in sections(keys, run) if section.family != ALARMS]
    made = ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[_alarm_section(), *(_section(section, run) for section in shown)],
        settings=ws.WorkspaceSettings(x_axis="axis/env_step", ignore_outliers=False),
        runset_settings=ws.RunsetSettings(
            order=[expr.Ordering(expr.Metric("CreatedTimestamp"), ascending=False)],
            pinned_columns=["run:displayName", "run:state", *(f"summary:{key}" for key in SUMMARY_COLUMNS), *settings],
            pinned_runs=[run.run_id] if entity else [],
        ),
    )
    made._internal_name = f"nw-{_short_name(entity, project, name)}-v"
    return made


def specification(made: Any) -> dict[str, Any]:
    """Return the contents of a workspace as W&B stores them, as plain values."""
    view = made._to_model()
    return {
        "entity": view.entity,
        "project": view.project,
        "name": view.name,
        "displayName": view.display_name,
        "spec": view.spec.model_dump(mode="json", by_alias=True, exclude_none=True),
    }


def has_key() -> bool:
    """Return whether an API key for W&B exists; asks neither the user nor a server."""
    import wandb
    from wandb.errors import Error

    try:
        return bool(wandb.login(prompt=False, verify=False))
    except (Error, ValueError):
        return False


def default_entity() -> str:
    """Return the user or team that the key belongs to; raises PushError if the server does not say."""
    import wandb

    try:
        entity = wandb.Api().default_entity
    except Exception as error:  # W&B's client raises its own errors, errors of requests, and ValueError
        raise PushError(f"W&B did not say who owns this key: {_first_line(error)}") from error
    if not entity:
        raise PushError("W&B does not say who owns this key: give --entity")
    return str(entity)


def push(made: Any) -> str:
    """Save the workspace, replacing the project's workspace with that name; returns its address. Raises PushError if the server refuses."""
    from wandb_workspaces.workspaces import internal

    try:
        short = internal._internal_name_to_url_query_str(made._internal_name)
        try:
            made._internal_id = str(internal.get_view_dict(made.entity, made.project, short)["id"])
        except ValueError:  # no such project, or no such view in it
            made._internal_id = ""
        made.save()
        return str(made.url)
    except Exception as error:  # as above, and KeyError or TypeError for an answer without a view
        raise PushError(f"W&B did not save the workspace: {_first_line(error)}") from error


def _alarm_section() -> Any:
    """Return the active alarms, their severities, and the table that W&B gets when a run ends."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    family = family_of(ALARMS)
    panels = [
        wr.MarkdownPanel(markdown=ALARMS_GUIDE),
        wr.LinePlot(title="Alarms raised", x=family.axis, y=["alarm/active"], range_y=(0, None)),
        wr.LinePlot(title="Severity of each alarm", x=family.axis, metric_regex="^alarm/.+/.+$", range_y=(0, 1)),
        wr.WeavePanelSummaryTable(table_name="alarms/table"),
    ]
    layout = ws.SectionLayoutSettings(columns=2, rows=2)
    return ws.Section(name=family.question, panels=panels, is_open=True, layout_settings=layout)


def _section(section: Section, run: RunInfo) -> Any:
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    axis = family_of(section.family).axis
    panels: list[Any] = [wr.LinePlot(title=chart.title, x=axis, y=list(chart.keys)) for chart in section.charts]
    if text := guide([key for chart in section.charts for key in chart.keys if described(key, run).headline], run):
        panels.insert(0, wr.MarkdownPanel(markdown=text))
    return ws.Section(
        name=section.question,
        panels=panels,
        is_open=section.family in OPEN_FAMILIES,
        layout_settings=ws.SectionLayoutSettings(columns=GRID_COLUMNS, rows=2 if len(panels) > GRID_COLUMNS else 1),
        panel_settings=ws.SectionPanelSettings(x_axis=axis),
    )


def _short_name(*parts: str) -> str:
    """Return a name in W&B's form, the same for the same parts, so that a second push replaces the first."""
    number = int.from_bytes(hashlib.sha256("/".join(parts).encode()).digest())
    digits = []
    for _ in range(SHORT_NAME_LENGTH):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(digits)


def _first_line(error: Exception) -> str:
    return masked((f"{error}" or type(error).__name__).splitlines()[0])
