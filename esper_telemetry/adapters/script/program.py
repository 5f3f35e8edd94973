"""Runs a script as `python SCRIPT ARGS...` would, in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType


def compiled(script: str) -> CodeType:
    """The script's code; raises OSError where it cannot be read. A SyntaxError is left to who runs it."""
    path = Path(script)
    with io.open_code(str(path.absolute())) as file:
        source = file.read()
    return compile(source, str(path.absolute()), "exec", dont_inherit=True)


def run_as_main(code: CodeType, script: str, arguments: Sequence[str]) -> None:
    """Executes the code as the module `__main__`, with the script's arguments and its directory first on the path.

    What the script raises is raised, SystemExit and KeyboardInterrupt too. The module stays `__main__` afterwards: what was pickled in
    it, started from it or registered for the interpreter's exit still finds it.
    """
    path = str(Path(script).absolute())
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path), __builtins__=__builtins__
    )
    sys.modules["__main__"] = main
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    exec(code, main.__dict__)


def hide_own_frames(path: str) -> None:
    """Tracebacks that nobody catches begin in the script, as without us."""
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        own = since(path, trace)
        shown(kind, error.with_traceback(own), own)

    sys.excepthook = show


def since(path: str, trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback from the first frame in that file on; all of it where there is none."""
    step = trace
    while step is not None and step.tb_frame.f_code.co_filename != path:
        step = step.tb_next
    return step or trace
