"""`esper-telemetry workspace`: write the dashboard of a run as a W&B workspace, and save it there on request."""

from __future__ import annotations

import json
import os
import sys
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
SINK, JOINED_RUN = "wandb:", "wandb:run/"
FAILED: Final = 1


def workspace(options: Workspace) -> int:
    """Write the specification and, with --push, save the workspace; 1 if the server does not accept it."""
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
    """Return the keys that the sink shows of a run; of a run without records, those that are declared."""
    shown = sink.shown(run.info)
    declared = {key: 0.0 for key in run.info.metrics if "{" not in key}
    axes = Axes(update=0, env_step=0, gradient_step=0, wall_time=run.info.started)
    records = run.records or [Record(0, axes, declared)]
    return {key for record in records for key in shown(record) if not key.startswith("axis/")}


def _project(run_dir: str) -> str:
    """Return the W&B project that the run was sent to; raises WrongUse unless there is exactly one."""
    names = Cursors(Path(run_dir)).names()
    projects = {name.removeprefix(SINK) for name in names if name.startswith(SINK) and not name.startswith(JOINED_RUN)}
    if len(projects) == 1:
        return projects.pop()
    several = f"has gone to several projects of W&B, {', '.join(sorted(projects))}"
    state = several if projects else "has not gone to any project of W&B"
    raise WrongUse(f"{run_dir} {state}: say with --project which one the workspace is for")
