"""`esper-telemetry workspace`: the dashboard of a run as a W&B workspace, written down, and saved where it is asked for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from esper_telemetry.cli.mistakes import WrongUse, wrong_use
from esper_telemetry.core.record import Axes, Record
from esper_telemetry.delivery.cursors import Cursors, replace_file
from esper_telemetry.journal.read import Run, read_run
from esper_telemetry.sinks.wandb.sink import WandbSink
from esper_telemetry.sinks.wandb.workspace import (
    PushError,
    default_entity,
    has_key,
    push,
    require_workspaces,
    specification,
)
from esper_telemetry.sinks.wandb.workspace import workspace as made_workspace

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Workspace

FILE: Final = "wandb_workspace.json"
SINK, JOINED, AXIS = "wandb:", "run/", "axis/"
FAILED: Final = 1


def workspace(options: Workspace) -> int:
    """Writes the specification and saves the workspace where that was asked for; 1 where the server does not take it."""
    os.environ.setdefault("WANDB_SILENT", "true")
    with wrong_use():
        require_workspaces()
        run = read_run(options.run_dir)
        sink = WandbSink(project=options.project or _project(options.run_dir))
        if options.push and not has_key():
            raise WrongUse("--push needs an API key of W&B, and there is none: wandb login, or WANDB_API_KEY")
    try:
        entity = options.entity or (default_entity() if options.push else "")
        with wrong_use():
            dashboard = made_workspace(
                run.info, keys(run, sink), project=sink.project, entity=entity, name=options.name
            )
            path = Path(options.output or Path(options.run_dir) / FILE)
            replace_file(path, json.dumps(specification(dashboard), indent=1) + "\n")
        print(f"the workspace {options.name!r} of project {sink.project} is in {path}")
        if options.push:
            print(f"and at {push(dashboard)}")
    except PushError as error:
        sys.stderr.write(f"esper-telemetry: {error}\n")
        return FAILED
    return 0


def keys(run: Run, sink: WandbSink) -> set[str]:
    """The keys that the sink shows of a run; of one without records those that are declared."""
    shown = sink.shown(run.info)
    records = run.records or [_of_all_declared(run)]
    return {key for record in records for key in shown(record) if not key.startswith(AXIS)}


def _of_all_declared(run: Run) -> Record:
    declared = {key: 0.0 for key in run.info.metrics if "{" not in key}
    return Record(0, Axes(update=0, env_step=0, gradient_step=0, wall_time=run.info.started), declared)


def _project(run_dir: str) -> str:
    """The W&B project that the run has been sent to; raises WrongUse where there is not exactly one."""
    found = sorted(set(_projects(run_dir)))
    if len(found) == 1:
        return found[0]
    said = f"has gone to several projects of W&B, {', '.join(found)}" if found else "has not gone to any project of W&B"
    raise WrongUse(f"{run_dir} {said}: say with --project which one the workspace is for")


def _projects(run_dir: str) -> Iterator[str]:
    for name in Cursors(Path(run_dir)).names():
        if name.startswith(SINK) and not name.startswith(SINK + JOINED):
            yield name.removeprefix(SINK)
