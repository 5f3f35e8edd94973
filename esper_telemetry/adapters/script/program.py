"""Runs a script as `python SCRIPT ARGS...` would, in this process, and writes telemetry's lines on stderr. Nothing here needs torch."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Final

from esper_telemetry.core.messages import printable
from esper_telemetry.core.redaction import masked

if TYPE_CHECKING:
    from esper_telemetry.adapters.script.listener import ScriptListener

PREFIX: Final = "esper-telemetry: "

MIN_CHILD_SECONDS: Final = 1.0
"""Processor time of child processes above which a script may have trained in them."""


def compiled(script: str) -> CodeType:
    """The script's code; raises OSError if it cannot be read. A SyntaxError is left to the caller."""
    path = Path(script)
    with io.open_code(str(path.absolute())) as file:
        source = file.read()
    return compile(source, str(path.absolute()), "exec", dont_inherit=True)


def run_as_main(code: CodeType, script: str, arguments: Sequence[str]) -> None:
    """Execute the code as the module `__main__`, with the script's arguments and its directory first on the path.

    The script's exceptions are raised, including SystemExit and KeyboardInterrupt. The module stays `__main__` afterwards, for
    pickles, threads and exit handlers that it has made.
    """
    path = str(Path(script).absolute())
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path), __builtins__=__builtins__)
    sys.modules["__main__"] = main
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    exec(code, main.__dict__)


def hide_own_frames(path: str) -> None:
    """Let uncaught tracebacks begin in the script, as without telemetry."""
    previous = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        step = trace
        while step is not None and step.tb_frame.f_code.co_filename != path:
            step = step.tb_next
        previous(kind, error.with_traceback(step or trace), step or trace)

    sys.excepthook = show


def findings_line(script: ScriptListener, name: str, run_dir: Path | None) -> str:
    """The line after the first update, with measured parts, missing parts, and the path of the journal."""
    labels = {"memory": "recurrent states", "episodes": "episodes"}
    if script.hides_episodes:
        labels["episodes"] += " (the script itself misses them: Gymnasium 1.x reports them elsewhere)"
    measured = [labels.get(what, what) for what in script.findings]
    missing = [labels.get(what, what) if what != "episodes" else what for what in script.missing]
    lacking = f"; not found: {', '.join(missing)}" if missing else ""
    unseen = script.unseen and f"; {script.unseen}"
    return f"{name}: found {', '.join(measured)}{lacking}{unseen}; journal in {run_dir}"


def last_line(
    script: ScriptListener | None, name: str, run_dir: Path | None, error: BaseException | None, updates: int | None = None
) -> str:
    """The last line of a run; `updates` are a model's updates if the script itself was not observed."""
    if error is not None:
        return f"{name}: telemetry stopped and the script continued: {type(error).__name__}: {error}"
    if run_dir is None:
        reason = "torch was not imported" if script is None else f"no optimizer step with a loss of a policy was seen{script.seen}"
        seconds = os.times().children_user + os.times().children_system
        elsewhere = f"; its child processes have worked for {seconds:.0f} s: optimizer steps in them are not seen"
        return f"{name}: found nothing to measure: {reason}{elsewhere if seconds >= MIN_CHILD_SECONDS else ''}"
    count = updates if updates is not None else script.updates if script else 0
    counted = 0 if script is None else script.traced_updates.counted
    only = f", {counted} of which were only counted to save time" if counted else ""
    return f"{name}: {count} update{'' if count == 1 else 's'}{only}; the verdict on them: esper-telemetry diagnose {run_dir}"


class PrefixFormatter(logging.Formatter):
    """Begins each line with the prefix, which most messages have already."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message."""
        return PREFIX + super().format(record).removeprefix(PREFIX)


def log_to_stderr(*, tracebacks: bool) -> None:
    """Send telemetry's log to stderr, with a prefix, separately from the script's own log."""
    logger = logging.getLogger("esper_telemetry")
    if tracebacks:
        logger.setLevel(logging.DEBUG)
    handler = logging.StreamHandler()
    handler.setFormatter(PrefixFormatter())
    logger.addHandler(handler)
    logger.propagate = False


def say(sentence: str) -> None:
    """Write a line on stderr; a closed or missing stream is ignored."""
    try:
        sys.stderr.write(f"{PREFIX}{printable(masked(sentence))}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return
