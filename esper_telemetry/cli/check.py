"""`esper-telemetry check`: compare a script's equations with the equations of PPO.

The script runs for a limited time under the taps of `run`, and every update is sampled. The table comes from the journal of that run;
`check RUN` prints the table of an existing run. Modules that the script may want to set up are not imported before it.
"""

from __future__ import annotations

import _thread
import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from esper_telemetry.adapters.script.program import compiled, hide_own_frames, run_as_main, say
from esper_telemetry.cli.arguments import WrongUse, without_warnings, wrong_use
from esper_telemetry.cli.run import Parser, ScriptRun, ScriptTelemetry, check_run_dir
from esper_telemetry.core.messages import one_line

DIFFERS: Final = 1
NOTHING_CHECKED: Final = 2
DEFAULT_SECONDS: Final = 120.0
UNLIMITED_SECONDS: Final = 1e8
"""The time limit if only a number of updates is given: three years."""
REPEAT_SECONDS: Final = 10.0
"""A script that catches the exception that stops it gets another one after this time."""

DESCRIPTION: Final = """Compare the numbers of a PPO program with the equations that they should follow, and print the table.

SCRIPT runs as `python SCRIPT ARGS...` would, and is stopped as by Ctrl-C after --seconds or --updates.
RUN is the directory of a run with telemetry; its table is read from the journal.

Example: esper-telemetry check --seconds 60 ppo.py --env-id CartPole-v1
"""
EPILOG: Final = """exit codes: 0 every equation that was checked matches or is a published variant,
1 an equation differs or the script failed, 2 wrong use, nothing could be checked, or a measurement failed
"""


@dataclass(frozen=True)
class CheckOptions:
    """The command line.

    Attributes:
        target: a script, or the directory of a run.
        arguments: arguments of the script.
        seconds: time after which the script is stopped.
        updates: number of updates after which the script is stopped; None for no such limit.
        run_dir: directory of the script's run.
        json: print JSON and redirect the script's own output to stderr.
    """

    target: str
    arguments: tuple[str, ...] = ()
    seconds: float = DEFAULT_SECONDS
    updates: int | None = None
    run_dir: str | None = None
    json: bool = False


METRIC_ERRORS: Final = "telemetry/metric_errors"


class TimeIsUp(KeyboardInterrupt):
    """Stops the script."""


def parser() -> Parser:
    """Return the parser of the command line, which docs/cli.md also describes."""
    parser = Parser(
        "esper-telemetry check",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seconds", type=float, help=f"stop the script after this time; {DEFAULT_SECONDS:g} by default, without --updates")
    parser.add_argument("--updates", type=int, metavar="N", help="stop the script after this number of updates")
    parser.add_argument("--run-dir", metavar="DIR", help="directory for the journal; runs/<script>-<time> by default")
    parser.add_argument("--json", action="store_true", help="print JSON; the script's own output goes to stderr")
    parser.add_argument("target", metavar="SCRIPT|RUN", help="a script, as you would give it to python, or a run directory")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


def parse(arguments: Sequence[str]) -> CheckOptions:
    """Return the parsed command line; raises WrongUse, and SystemExit after showing help."""
    given = parser().parse_args(list(arguments))
    seconds = DEFAULT_SECONDS if given.updates is None else UNLIMITED_SECONDS
    if given.seconds is not None:
        seconds = given.seconds
    options = CheckOptions(given.target, tuple(given.arguments), seconds, given.updates, given.run_dir, given.json)
    if not options.seconds > 0:
        raise WrongUse(f"--seconds must be positive, got {options.seconds:g}")
    if options.updates is not None and options.updates < 1:
        raise WrongUse(f"--updates must be 1 or more, got {options.updates}")
    return options


def check(options: CheckOptions) -> int:
    """Print the table of a run, or run a script and print its table; returns the exit code."""
    with wrong_use():  # the name may be too long
        is_directory = Path(options.target).is_dir()
    if not is_directory:
        return check_script(options)
    if [*options.arguments] not in ([], ["--json"]):
        raise WrongUse(f"{options.target} is the directory of a run and cannot take arguments, got {options.arguments[0]!r}")
    return show([Path(options.target)], as_json=options.json or bool(options.arguments))


def show(run_dirs: Sequence[Path], *, as_json: bool) -> int:
    """Print the tables of runs and return the exit code."""
    from esper_telemetry.core.lazy import collection_paused

    with collection_paused():
        from esper_telemetry.journal.read import read_run
        from esper_telemetry.views.document import print_document
        from esper_telemetry.views.equation_table import equation_document, equation_rows
    states: set[str] = set()
    tables, failed = [], 0
    for run_dir in run_dirs:
        with wrong_use(), without_warnings():
            run = read_run(run_dir)
        rows = equation_rows(run.info, run.records)
        states.update(row.state for row in rows)
        failed += int(sum(record.values.get(METRIC_ERRORS, 0.0) for record in run.records))
        head = f"{run.info.name}: {len(run.records)} updates, {run.status or 'not ended'}"
        if as_json:
            equations = [row.values() for row in rows]
            tables.append({"run": run.info.name, "run_dir": str(run_dir), "updates": len(run.records), "equations": equations})
        else:
            print_document(equation_document(head, rows))
    if as_json:
        print(json.dumps(tables[0] if len(tables) == 1 else {"runs": tables}, indent=1))
    if failed:
        sys.stderr.write(
            f"esper-telemetry: {failed} measurement{'s' * (failed > 1)} failed with an error of telemetry's own, so equations without a "
            "result may differ; the warnings of the run name the error\n"
        )
    if "differs" in states:
        return DIFFERS
    return 0 if not failed and states & {"matches", "variant"} else NOTHING_CHECKED


class Limit:
    """Stops the script by an exception in the main thread, after a time or a number of updates.

    Attributes:
        reached: the limit that was reached, in words; empty while the script runs.
    """

    def __init__(self, options: CheckOptions) -> None:
        self.reached = ""
        self._options = options
        self._updates = 0
        self._over = False
        self._timer = threading.Timer(options.seconds, self._interrupt)
        self._timer.daemon = True

    def begin(self) -> None:
        """Start the clock."""

        def ring(*_: object) -> None:
            if not self._over:
                self.reached = self.reached or f"{self._options.seconds:g} seconds"
                raise TimeIsUp

        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, self._options.seconds, REPEAT_SECONDS)
        else:
            self._timer.start()

    def end(self) -> None:
        """Stop the clock."""
        self._over = True
        self._timer.cancel()
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def count_update(self) -> None:
        """Count an update that has ended; raises TimeIsUp after the last one."""
        self._updates += 1
        if not self._over and self._options.updates is not None and self._updates >= self._options.updates:
            self.reached = self.reached or f"{self._options.updates} update{'s' * (self._options.updates > 1)}"
            raise TimeIsUp

    def _interrupt(self) -> None:
        self.reached = self.reached or f"{self._options.seconds:g} seconds"
        _thread.interrupt_main()


def interrupt_workers() -> None:
    """Send the script's worker processes the signal that Ctrl-C sends to all: otherwise Python waits for them when it exits."""
    module = sys.modules.get("multiprocessing")
    for child in module.active_children() if module is not None and os.name != "nt" else ():
        with suppress(OSError):
            os.kill(child.pid, signal.SIGINT)


def check_script(options: CheckOptions) -> int:
    """Run the script until it ends or the limit is reached, print the tables of its runs and return the exit code."""
    if options.run_dir is not None:
        check_run_dir(options.run_dir)
    try:
        code = compiled(options.target)
    except OSError as error:
        raise WrongUse(f"cannot read the script {options.target}: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise WrongUse(f"{options.target} is not a Python script: {error}") from None
    limit, pid, name = Limit(options), os.getpid(), Path(options.target).name
    script_run = ScriptRun(options.target, options.arguments, options.run_dir, level="debug")
    script_telemetry = ScriptTelemetry(script_run, on_update=limit.count_update, last_words=False)
    script_telemetry.begin()
    failure: BaseException | None = None
    limit.begin()
    try:
        with redirect_stdout(sys.stderr) if options.json else nullcontext():
            run_as_main(code, options.target, options.arguments)
    except BaseException as error:
        failure = error
    limit.end()
    if limit.reached:
        interrupt_workers()
    stopped = limit.reached or isinstance(failure, KeyboardInterrupt)
    script_telemetry.end(KeyboardInterrupt() if stopped else failure)
    if os.getpid() != pid:  # a forked copy of the process, made by the script
        raise failure or SystemExit(0)
    failed = not stopped and not (failure is None or (isinstance(failure, SystemExit) and failure.code in (None, 0)))
    if limit.reached:
        say(f"{name}: stopped after {limit.reached}")
    elif failed and failure is not None:
        hide_own_frames(str(Path(options.target).absolute()))
        sys.excepthook(type(failure), failure, failure.__traceback__)
    if not script_telemetry.run_dirs:
        return DIFFERS if failed else NOTHING_CHECKED
    code_of_tables = show(script_telemetry.run_dirs, as_json=options.json)
    return DIFFERS if failed else code_of_tables


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the command as a process, and exit."""
    try:
        raise SystemExit(check(parse(arguments)))
    except WrongUse as mistake:
        sys.stderr.write(f"esper-telemetry: {one_line(str(mistake))}\n")
        raise SystemExit(2) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter's last flush must not fail
        raise SystemExit(DIFFERS) from None
