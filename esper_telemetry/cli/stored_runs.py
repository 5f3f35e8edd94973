"""Commands on the directory of a run: `replay` and `doctor` for its backends, `compress` for its journal, `workspace` for its dashboard."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from esper_telemetry.alarms.rules.task_alarms import Failure, bad_ending
from esper_telemetry.cli.arguments import WrongUse, agrees, echo, output_path, without_warnings, wrong_use
from esper_telemetry.core.files import replace_file, write_output
from esper_telemetry.core.messages import printable
from esper_telemetry.core.record import Axes, Record
from esper_telemetry.core.redaction import masked, redacted
from esper_telemetry.delivery import catch_up
from esper_telemetry.delivery.status import Cursors
from esper_telemetry.journal import file as journal_file
from esper_telemetry.journal.lock import HELPER_ROLES, Role, is_held
from esper_telemetry.journal.read import Run, damaged_lines, read_contents, read_run
from esper_telemetry.sinks.console import is_live, make_console
from esper_telemetry.sinks.sink_protocol import Sink, SupportsChildPreparation, sink_name
from esper_telemetry.sinks.sink_registry import as_sink, leads_outside
from esper_telemetry.sinks.wandb import workspace as wandb_workspace
from esper_telemetry.sinks.wandb.wandb_sink import WandbSink

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Compress, Doctor, Replay, Workspace

FAILED: Final = 1
WORKSPACE_NAME: Final = "wandb_workspace.json"
WANDB_SINK, JOINED_RUN = "wandb:", "wandb:run/"


def replay(options: Replay) -> int:
    """Send the records that each backend does not have yet, and print how many."""
    if not options.to:
        raise WrongUse("replay needs --to SINK, such as --to mlflow")
    complete = True
    sys.argv = redacted(sys.argv)  # backends record the program that sent the run
    with wrong_use():
        for sink in [prepared_sink(uri) for uri in options.to]:
            with _replay_progress(options, sink) as progress:
                report = catch_up.replay(options.run_dir, sink, follow=options.follow, missing=options.missing, progress=progress)
            echo(str(report))
            complete &= report.complete
    return 0 if complete else FAILED


def prepared_sink(uri: str) -> Sink:
    """Return a sink whose client is set up for this process, as in the child process of a run; a command's process does nothing else."""
    sink = as_sink(uri)
    if isinstance(sink, SupportsChildPreparation):
        sink.prepare_child()
    return sink


@contextmanager
def _replay_progress(options: Replay, sink: Sink) -> Iterator[Callable[[int], object]]:
    """Show on a terminal how many records were sent, and of how many; yields a function that takes the number sent so far."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not is_live(console)) as bar:
        total = None
        if not (bar.disable or options.follow or options.missing):
            sent = Cursors(Path(options.run_dir)).load(sink_name(sink)).records
            total = max(0, read_contents(options.run_dir).records - sent)
        task = bar.add_task(f"sending records to {sink_name(sink)}", total=total)
        yield lambda count: bar.update(task, completed=count)


def doctor(options: Doctor) -> int:
    """Print the comparison of every backend with the journal; 1 if something is missing, damaged, different, stored twice or unreadable."""
    with wrong_use(), without_warnings():
        named_sinks = [prepared_sink(uri) for uri in options.sink]
        directory = Path(options.run_dir).absolute()
        uris = catch_up.sink_uris(directory)
        agreed = {uri for uri in uris.values() if not leads_outside(uri, directory) or _agrees_to_read(uri, options)}
        for uri in agreed:
            with suppress(ValueError, TypeError, ImportError):  # a sink that cannot be made from its name
                prepared_sink(uri)
        with _comparison_progress() as progress:
            names = {sink_name(sink): sink for sink in named_sinks}
            run = catch_up.doctor(options.run_dir, agreed=agreed, without=names, progress=progress)
        named = [catch_up.check_backend(directory, sink, name=name, ended=False) for name, sink in names.items()]
    sinks = [*run.sinks, *named]
    is_healthy = not run.lost and not run.damaged and all(sink.healthy for sink in sinks)
    event = run.failure
    failures = [] if event is None or event.axes is None else [Failure(event.seq, event.axes, event.data)]
    ending = bad_ending(run.status, run.last_update, failures)
    if options.json:
        values = {
            "records": run.records,
            "status": run.status,
            "ending": ending,
            "under_way": run.under_way,
            "closed_stale": run.closed_stale,
            "lost_lines": run.lost,
            "damaged_lines": list(run.damaged),
            "equal": is_healthy,
            "sinks": [sink.as_dict() for sink in sinks],
        }
        print(json.dumps(values, indent=1))
    else:
        echo(_health_page(options.run_dir, run, ending, sinks))
    return 0 if is_healthy else FAILED


def _agrees_to_read(uri: str, options: Doctor) -> bool:
    """Return whether the user accepts a connection to an address that someone else may have written into the run directory."""
    return uri in options.sink or agrees(f"{options.run_dir} names the backend {uri}: connect to it, with your token?")


@contextmanager
def _comparison_progress() -> Iterator[Callable[[str], object]]:
    """Show on a terminal which backend is being compared; yields a function that takes its name."""
    from rich.text import Text

    console = make_console(stderr=True)
    if not is_live(console):
        yield lambda name: None
        return
    with console.status("reading the journal") as status:
        yield lambda name: status.update(Text(f"comparing {name}"))


def _health_page(run_dir: str, run: catch_up.RunHealth, ending: str, sinks: list[catch_up.SinkCheck]) -> str:
    if run.status is None:
        state = "continues" if run.under_way else "has not ended"
    else:
        delivered = ", and a background process still delivers it" if run.under_way else ""
        state = f"ended as {run.status}{delivered}"
    lines = [f"{run_dir}: {run.records:,} records, the run {state}"]
    if ending:
        lines.append(ending)
    if run.closed_stale:
        lines.append("its trainer stopped without an end line: the run has been ended as killed now")
    if run.lost:
        lines.append(f"{run.lost:,} lines were lost, because the disk was full and they could not be written")
    if run.damaged:
        lines.append(journal_file.damage_sentence(journal_file.journal_path(run_dir), run.damaged))
    return "\n".join([*lines, *map(str, sinks)])


def compress(options: Compress) -> int:
    """Compress each journal and print how much that saves; all directories are checked before anything is changed."""
    if not options.run_dirs:
        raise WrongUse("compress needs a run directory; see esper-telemetry compress --help")
    for run_dir in options.run_dirs:
        with wrong_use():
            journal_file.journal_path(run_dir)
        if any(is_held(Path(run_dir), role) for role in (Role.TRAINER, *HELPER_ROLES)):
            raise WrongUse(f"{run_dir} is still being trained, or delivered")
    for run_dir in options.run_dirs:
        with wrong_use(), without_warnings():
            damaged = damaged_lines(run_dir)
            before, after = journal_file.compress(run_dir)
        saved = "is packed already" if before == after else f"{before / 1e6:.1f} MB are now {after / 1e6:.1f} MB"
        echo(f"{run_dir}: {saved}")
        if damaged:
            sentence = journal_file.damage_sentence(journal_file.journal_path(run_dir), damaged)
            echo(f"{sentence} wherever the journal is read, and packed as it is")
    return 0


def workspace(options: Workspace) -> int:
    """Write the run's dashboard as a W&B workspace and, with --push, save it there; 1 if the server does not accept it."""
    os.environ.setdefault("WANDB_SILENT", "true")
    output = output_path(options.output, default=WORKSPACE_NAME) if options.output is not None else None
    with wrong_use():
        wandb_workspace.require_workspaces()
        run = read_run(options.run_dir)
        sink = WandbSink(project=options.project or _wandb_project(options.run_dir))
        if options.push and not wandb_workspace.has_key():
            raise WrongUse("--push needs an API key of W&B: run wandb login, or set WANDB_API_KEY")
    try:
        entity = options.entity or (wandb_workspace.default_entity() if options.push else "")
        with wrong_use():
            dashboard = wandb_workspace.workspace(run.info, keys(run, sink), project=sink.project, entity=entity, name=options.name)
            path = output or Path(options.run_dir) / WORKSPACE_NAME
            content = json.dumps(wandb_workspace.specification(dashboard), indent=1) + "\n"
            (write_output if output else replace_file)(path, content)
        echo(f"the workspace {options.name!r} of project {sink.project} is in {path}")
        if options.push:
            echo(f"and at {wandb_workspace.push(dashboard)}")
    except wandb_workspace.PushError as error:
        sys.stderr.write(f"esper-telemetry: {printable(masked(str(error)))}\n")
        return FAILED
    return 0


def keys(run: Run, sink: WandbSink) -> set[str]:
    """Return the keys that the sink shows of a run, or the declared keys if the run has no records."""
    numbers = sink.shown(run.info)
    declared = {key: 0.0 for key in run.info.metrics if "{" not in key}
    axes = Axes(update=0, env_step=0, gradient_step=0, wall_time=run.info.started)
    records = run.records or [Record(0, axes, declared)]
    return {key for record in records for key in numbers(record) if not key.startswith("axis/")}


def _wandb_project(run_dir: str) -> str:
    """Return the W&B project that the run was sent to; raises WrongUse unless there is exactly one."""
    own = [name for name in Cursors(Path(run_dir)).names() if not name.startswith(JOINED_RUN)]
    projects = {name.removeprefix(WANDB_SINK) for name in own if name.startswith(WANDB_SINK)}
    if len(projects) == 1:
        return projects.pop()
    several = f"was sent to several W&B projects, {', '.join(sorted(projects))}"
    state = several if projects else "was not sent to any W&B project"
    raise WrongUse(f"{run_dir} {state}: choose the project of the workspace with --project")
