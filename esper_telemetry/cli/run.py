"""`esper-telemetry run`: run an unchanged training script with telemetry.

The script runs as before: torch and NumPy are not imported before it imports them itself, nothing is printed to stdout, and
exceptions, exit codes and signals come only from the script.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from esper_telemetry.adapters.script.models import ScriptModels
from esper_telemetry.adapters.script.program import compiled, findings_line, hide_own_frames, last_line, log_to_stderr, run_as_main, say
from esper_telemetry.adapters.script.script_taps import Taps
from esper_telemetry.cli.arguments import WrongUse, is_first_rank, wrong_use
from esper_telemetry.core.messages import one_line
from esper_telemetry.core.requirements import require_path

if TYPE_CHECKING:
    from esper_telemetry.adapters.script.listener import ScriptListener
    from esper_telemetry.events import Hooks
    from esper_telemetry.telemetry import Telemetry

LEVELS = ("minimal", "normal", "debug")
DESCRIPTION = """Run a training script as `python SCRIPT ARGS...` would, with telemetry of its PPO updates. The script is not changed.

Example: esper-telemetry run --sink tensorboard ppo.py --env-id CartPole-v1
"""


@dataclass(frozen=True)
class ScriptRun:
    """The command line: options before the script, the script, and its own arguments."""

    script: str
    arguments: tuple[str, ...] = ()
    run_dir: str | None = None
    sink: tuple[str, ...] = ()
    level: str = "normal"
    escalation: int | None = None
    notify: tuple[str, ...] = ()


class Parser(argparse.ArgumentParser):
    """A parser that raises `WrongUse`."""

    def error(self, message: str) -> NoReturn:
        """Raise the message."""
        raise WrongUse(f"{message}; see {self.prog} --help")


def parser() -> Parser:
    """Return the parser of the command line, which docs/cli.md also describes."""
    parser = Parser(
        "esper-telemetry run", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--run-dir", metavar="DIR", help="directory for the journal and the local backends; runs/<script>-<time> by default"
    )
    parser.add_argument("--sink", metavar="URI", action="append", default=[], help="as for train; only the journal by default")
    parser.add_argument("--notify", metavar="URL", action="append", default=[], help="as for train")
    parser.add_argument("--level", choices=LEVELS, default="normal", help="how much is measured")
    parser.add_argument(
        "--escalation",
        metavar="N",
        type=int,
        help="number of updates at DEBUG after a critical alarm, 0 for none; by default each alarm asks for 2 to 10",
    )
    parser.add_argument("script", metavar="SCRIPT", help="the script, as you would give it to python")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


def parse(arguments: Sequence[str]) -> ScriptRun:
    """Return the parsed command line; raises WrongUse, and SystemExit after showing help."""
    given = parser().parse_args(list(arguments))
    return ScriptRun(
        *(given.script, tuple(given.arguments), given.run_dir, tuple(given.sink), given.level, given.escalation), notify=tuple(given.notify)
    )


def run(options: ScriptRun) -> int:
    """Run the script; returns 0 at its end, and raises its exceptions."""
    _check(options)
    try:
        code = compiled(options.script)
    except OSError as error:
        raise WrongUse(f"cannot read the script {options.script}: {error.strerror}") from None
    except (SyntaxError, ValueError):
        # Python itself reports an error in the script.
        os.execv(sys.executable, [sys.executable, options.script, *options.arguments])
    script_telemetry = ScriptTelemetry(options)
    script_telemetry.begin()
    try:
        run_as_main(code, options.script, options.arguments)
    except BaseException as error:
        script_telemetry.end(error)
        hide_own_frames(str(Path(options.script).absolute()))
        raise
    script_telemetry.end(None)
    return 0


def _check(options: ScriptRun) -> None:
    """Refuse arguments that telemetry would refuse later, when the script is running."""
    if options.escalation is not None and options.escalation < 0:
        raise WrongUse(f"--escalation is a number of updates from 0, got {options.escalation}")
    if options.run_dir is not None:
        check_run_dir(options.run_dir)
    if options.sink or options.notify:
        from esper_telemetry.sinks.notify import NotifySink
        from esper_telemetry.sinks.sink_registry import as_sink

        with wrong_use():
            for uri in options.sink:
                as_sink(uri)
            for address in options.notify:
                NotifySink(address)


def check_run_dir(run_dir: str) -> None:
    """Refuse a directory that cannot belong to a new run."""
    if not run_dir.strip():
        raise WrongUse(f"run_dir must name a directory, got {run_dir!r}")
    with wrong_use():
        path = require_path("run_dir", run_dir)
    if path.exists() and not path.is_dir():
        raise WrongUse(f"run_dir {run_dir!r} is a file: pass the path of a directory")
    if (path / "journal.jsonl").exists():
        raise WrongUse(f"{run_dir} holds a run already: give another directory")


class ScriptTelemetry:
    """The telemetry of a script: created at its first update, and closed when the script ends.

    Attributes:
        options: options of the command.
        on_update: called when an update has ended; may raise to stop the script.
        last_words: print a line at the end of a script that has a run and no failure of telemetry.
        telemetry: None before the first update, and on all ranks except rank 0.
        run_dirs: directories of the runs so far.
    """

    def __init__(self, options: ScriptRun, *, on_update: Callable[[], None] | None = None, last_words: bool = True) -> None:
        self.options, self.on_update, self.last_words = options, on_update, last_words
        self.telemetry: Telemetry | None = None
        self.run_dirs: list[Path] = []
        self._announced = False
        self._failure: BaseException | None = None
        self._recorded: Telemetry | None = None
        self._pid, self._is_first_rank = os.getpid(), is_first_rank()
        self._models = ScriptModels(self._make_telemetry, self._say, lambda: self._taps.leave_script())
        self._taps = Taps(self._make_listener, self._with_callback, self._models.watch)
        self._directory = None if options.run_dir is None else require_path("run_dir", options.run_dir).absolute()
        self._early_failures: list[tuple[Callable[..., object], Exception]] = []

    def begin(self) -> None:
        """Install the taps; only on rank 0 of several ranks, which would otherwise have to wait for each other."""
        if self._is_first_rank:
            log_to_stderr(tracebacks=self.options.level == "debug")
            self._taps.install()

    def end(self, error: BaseException | None) -> None:
        """End telemetry with the script, which ended with that exception or without one.

        Does nothing in a forked process, and on all ranks except rank 0.
        """
        if os.getpid() != self._pid or not self._is_first_rank:
            return
        whole = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        if whole:  # an update that an exception interrupted is not complete
            self._taps.call(lambda script: script.end_update())
        script = self._taps.script
        self._taps.remove()
        try:
            self._models.close(error)
            if self.telemetry is not None:
                self.telemetry.__exit__(type(error) if error else None, error, None)
        except Exception as failure:  # the script's own exception or exit code must reach the caller
            self._failure = self._failure or failure
        if self.telemetry is None and isinstance(error, Exception):
            self._report_nonfinite(error)
        if self.telemetry is None and self._early_failures:
            self._report_early_failures()
        if self.last_words:
            self._print_end_block(error)
        if self.last_words or self._failure is not None or not self.run_dirs:
            self._report_end(script)

    def _report_nonfinite(self, error: Exception) -> None:
        """Name the first non-finite tensor of a script that has failed before its first update; no run has begun that could hold it."""
        try:
            from esper_telemetry.updates.failure import failure_data

            failure_data(error)
        except Exception as failure:  # the script's own exception must reach the caller
            self._failure = self._failure or failure

    def _make_listener(self) -> ScriptListener:
        from esper_telemetry.adapters.script.listener import ScriptListener
        from esper_telemetry.events import UpdateEnd

        script = ScriptListener(self._attach, self._log, self._failed)

        def announce(_: UpdateEnd) -> None:
            if not self._announced:
                self._announced = True
                run_dir = self.telemetry.run_dir if self.telemetry else None
                say(findings_line(script, Path(self.options.script).name, run_dir))

        script.hooks.on(UpdateEnd, announce, last=True)
        self._count_updates(script.hooks)
        return script

    def _count_updates(self, hooks: Hooks) -> None:
        from esper_telemetry.events import UpdateEnd

        on_update = self.on_update
        if on_update is not None:
            hooks.on(UpdateEnd, lambda _: on_update(), last=True)

    def _attach(self, script: ScriptListener) -> None:
        """Attach telemetry at the first step of PPO."""
        from esper_telemetry.adapters.script.traced_updates import TracedUpdates
        from esper_telemetry.telemetry import attach, session_of

        self.telemetry = self._make_telemetry()
        session = session_of(self.telemetry)
        attach(self.telemetry, script)
        self._taps.clock = session.clock
        script.traced_updates = TracedUpdates(every_one=self.on_update is not None or self.options.level == "debug")
        script.asks_for_traces = lambda: session.escalated
        for function, error in self._early_failures:
            session.failed(function, error)

    def _make_telemetry(self, number: int = 1) -> Telemetry:
        """Return the telemetry of the script, or of the model with that number, which has its own directory."""
        from esper_telemetry.telemetry import Telemetry, session_of

        directory = self._directory
        if directory is not None and number > 1:
            directory = directory.with_name(f"{directory.name}-{number}")
        telemetry = Telemetry(
            list(self.options.sink),
            run_dir=directory or "auto",
            name=None if directory else Path(self.options.script).stem,
            level=self.options.level,
            escalation=self.options.escalation,
            notify=self.options.notify,
            ranks="alone",
        )
        if telemetry.run_dir is not None:
            session_of(telemetry).prints_end = False  # the summary goes to stderr when the script ends
            self.run_dirs.append(telemetry.run_dir)
            self._recorded = telemetry
        return telemetry

    def _with_callback(self, model: Any, callback: Any) -> Any:
        """Return the callback for a Stable-Baselines3 model; the script's own callback if the script itself trains by PPO."""
        if self.telemetry is not None:
            return callback
        before = self._models.last
        joined = self._models.joined(model, callback)
        if self._models.last is not None and self._models.last is not before:
            self._count_updates(self._models.last.hooks)
        return joined

    def _say(self, sentence: str) -> None:
        say(f"{Path(self.options.script).name}: {sentence}")

    def _log(self, values: Mapping[str, float]) -> None:
        if self.telemetry is not None:
            self.telemetry.log(values)

    def _failed(self, function: Callable[..., object], error: Exception) -> None:
        """Count and report an error of telemetry's own function; before telemetry has begun, it goes into the first record."""
        from esper_telemetry.telemetry import session_of

        if self.telemetry is None:
            self._early_failures.append((function, error))
        else:
            session_of(self.telemetry).failed(function, error)

    def _report_early_failures(self) -> None:
        from esper_telemetry.core.containment import Containment

        containment = Containment()
        for function, error in self._early_failures:
            containment.note(function, error)

    def _print_end_block(self, error: BaseException | None) -> None:
        """Print the summary of the run, or of the last of several runs, on stderr."""
        if self._recorded is None:
            return
        from esper_telemetry.sinks.end_block import block_lines
        from esper_telemetry.telemetry import session_of
        from esper_telemetry.updates.failure import status_of

        try:
            end = session_of(self._recorded).run_end(status_of(error), resume="")
            for line in block_lines(end, self.run_dirs):
                say(line)
        except Exception as failure:  # the script's own exception or exit code must reach the caller
            self._say(f"the end of the run cannot be shown: {type(failure).__name__}: {failure}")

    def _report_end(self, script: ScriptListener | None) -> None:
        """Print what went wrong in telemetry itself, or that no update was found."""
        name, model = Path(self.options.script).name, self._models.last
        if model is not None:
            say(last_line(None, name, model.telemetry.run_dir, self._failure, model.updates))
        elif self._models.own and self._failure is None:
            self._say("the script has its own TelemetryCallback; nothing was added")
        else:
            run_dir = None if self.telemetry is None else self.telemetry.run_dir
            say(last_line(script, name, run_dir, self._failure))


def main(arguments: Sequence[str]) -> None:
    """Run the command as a process: exit, or raise the script's exception."""
    try:
        options = parse(arguments)
        code: Any = run(options)
    except WrongUse as mistake:
        sys.stderr.write(f"esper-telemetry: {one_line(str(mistake))}\n")
        raise SystemExit(2) from None
    raise SystemExit(code)
