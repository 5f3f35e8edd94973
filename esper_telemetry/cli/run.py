"""`esper-telemetry run`: somebody's training script as it is, with telemetry.

The script must not notice: neither torch nor NumPy is imported before it does so itself, nothing is printed to stdout, exceptions, exit
codes and signals take the way that they would take without us.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from esper_telemetry.adapters.script.models import ScriptModels
from esper_telemetry.adapters.script.program import (
    compiled,
    findings_line,
    hide_own_frames,
    last_line,
    log_to_stderr,
    run_as_main,
    say,
)
from esper_telemetry.adapters.script.taps import Taps
from esper_telemetry.cli.mistakes import WrongUse, wrong_use

if TYPE_CHECKING:
    from esper_telemetry.adapters.script.listener import ScriptListener
    from esper_telemetry.telemetry import Telemetry

LEVELS = ("minimal", "normal", "debug")
DESCRIPTION = """Runs a training script as `python SCRIPT ARGS...` would, with telemetry of its PPO updates. The script is not changed.

Example: esper-telemetry run --sink tensorboard ppo.py --env-id CartPole-v1
"""


@dataclass(frozen=True)
class ScriptRun:
    """What the command line said: our options come before the script, the rest is the script's."""

    script: str
    arguments: tuple[str, ...] = ()
    run_dir: str | None = None
    sink: tuple[str, ...] = ()
    level: str = "normal"


class Parser(argparse.ArgumentParser):
    """Says what is wrong by `WrongUse`."""

    def error(self, message: str) -> NoReturn:
        """Raises it."""
        raise WrongUse(f"{message}; see {self.prog} --help")


def parse(arguments: Sequence[str]) -> ScriptRun:
    """The command line as a form; raises WrongUse, and SystemExit after showing help."""
    parser = Parser(
        "esper-telemetry run",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--run-dir", metavar="DIR", help="where the journal and the local backends go; runs/<script>-<time> by default"
    )
    parser.add_argument(
        "--sink", metavar="URI", action="append", default=[], help="as for train; only the journal by default"
    )
    parser.add_argument("--level", choices=LEVELS, default="normal", help="how much is measured")
    parser.add_argument("script", metavar="SCRIPT", help="the script, as you would give it to python")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments")
    found = parser.parse_args(list(arguments))
    return ScriptRun(found.script, tuple(found.arguments), found.run_dir, tuple(found.sink), found.level)


def run(options: ScriptRun) -> int:
    """Runs the script; returns where it comes to its end, and raises what it raises otherwise."""
    _check(options)
    try:
        code = compiled(options.script)
    except OSError as error:
        raise WrongUse(f"cannot read the script {options.script}: {error.strerror}") from None
    except (SyntaxError, ValueError):
        return _as_python(options)
    watched = ScriptTelemetry(options)
    watched.begin()
    try:
        run_as_main(code, options.script, options.arguments)
    except BaseException as error:
        watched.end(error)
        hide_own_frames(str(Path(options.script).absolute()))
        raise
    watched.end(None)
    return 0


def _check(options: ScriptRun) -> None:
    """Refuses what telemetry would refuse later, when the script is under way."""
    if options.run_dir is not None:
        if not options.run_dir.strip():
            raise WrongUse(f"run_dir must name a directory, got {options.run_dir!r}")
        if (Path(options.run_dir) / "journal.jsonl").exists():
            raise WrongUse(f"{options.run_dir} holds a run already: give another directory")
    if options.sink:
        from esper_telemetry.sinks.registry import as_sink

        with wrong_use():
            for uri in options.sink:
                as_sink(uri)


def _as_python(options: ScriptRun) -> NoReturn:
    """Lets Python itself say what is wrong with the script."""
    os.execv(sys.executable, [sys.executable, options.script, *options.arguments])


@dataclass
class ScriptTelemetry:
    """A script that is watched: makes telemetry when there is something to measure, and ends it with the script.

    Attributes:
        options: of the command.
        telemetry: None before the first update, and in ranks but the first.
    """

    options: ScriptRun
    telemetry: Telemetry | None = None
    _told: bool = False
    _pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        self._models = ScriptModels(self._made, self._say, self._leave_script)
        self._taps = Taps(self._listener, self._joined)
        self._directory = None if self.options.run_dir is None else Path(self.options.run_dir).absolute()
        self._errors = 0

    def begin(self) -> None:
        """Listens from now on; only in the first of several ranks, which would have to wait for each other."""
        if os.environ.get("RANK", "0") == "0":
            log_to_stderr()
            self._taps.install()

    def end(self, error: BaseException | None) -> None:
        """The script is over, by that exception or without one. A copy of the process that has left the script's end says nothing."""
        if os.getpid() != self._pid:
            return
        whole = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        if whole:  # an update that the script left by an exception is not complete
            self._taps.call(lambda script: script.end_update())
        script = self._taps.script
        self._taps.remove()
        try:
            self._models.close(error)
            if self.telemetry is not None:
                self.telemetry.__exit__(type(error) if error else None, error, None)
        except Exception as failure:  # the script's own end must come through
            self._taps.error = self._taps.error or failure
        self._tell_end(script)

    def _listener(self) -> ScriptListener:
        from esper_telemetry.adapters.script.listener import ScriptListener
        from esper_telemetry.events import UpdateEnd

        script = ScriptListener(self._found, self._log)
        script.hooks.on(UpdateEnd, lambda _: self._tell_found(script), last=True)
        return script

    def _found(self, script: ScriptListener) -> None:
        """The first step of PPO: now there is something to measure."""
        from esper_telemetry.adapters.attach import attach
        from esper_telemetry.telemetry import session_of

        self.telemetry = self._made()
        attach(self.telemetry, script)
        self._taps.clock = session_of(self.telemetry).clock

    def _made(self, number: int = 1) -> Telemetry:
        """The telemetry of the script, or of the model with that number, which has a directory of its own."""
        from esper_telemetry.telemetry import Telemetry

        directory = self._directory
        if directory is not None and number > 1:
            directory = directory.with_name(f"{directory.name}-{number}")
        return Telemetry(
            list(self.options.sink),
            run_dir=directory or "auto",
            name=Path(self.options.script).stem,
            level=self.options.level,
            ranks="alone",
        )

    def _joined(self, model: Any, callback: Any) -> Any:
        """The callback with which a model of Stable-Baselines3 learns; the script's own where the script itself trains by PPO."""
        return callback if self.telemetry is not None else self._models.joined(model, callback)

    def _leave_script(self) -> None:
        self._taps.leave_script()

    def _say(self, sentence: str) -> None:
        say(f"{Path(self.options.script).name}: {sentence}")

    def _log(self, values: Mapping[str, float]) -> None:
        if self.telemetry is not None:
            self.telemetry.log(values)

    def _tell_found(self, script: ScriptListener) -> None:
        if not self._told:
            self._told = True
            say(
                findings_line(
                    script, Path(self.options.script).name, self.telemetry.run_dir if self.telemetry else None
                )
            )

    def _tell_end(self, script: ScriptListener | None) -> None:
        """What went wrong in telemetry itself, or that there was nothing to find."""
        name, model = Path(self.options.script).name, self._models.last
        if model is not None:
            say(last_line(None, name, model.telemetry.run_dir, self._taps.error, model.updates))
        elif self._models.own and self._taps.error is None:
            self._say("the script has a TelemetryCallback of its own; nothing was added")
        else:
            run_dir = None if self.telemetry is None else self.telemetry.run_dir
            say(last_line(script, name, run_dir, self._taps.error))


def main(arguments: Sequence[str]) -> None:
    """The command as a process: exits, or raises what the script raises."""
    try:
        options = parse(arguments)
        code: Any = run(options)
    except WrongUse as mistake:
        sys.stderr.write(f"esper-telemetry: {mistake}\n")
        raise SystemExit(2) from None
    raise SystemExit(code)
