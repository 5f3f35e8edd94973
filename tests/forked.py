"""Run Python programs in processes forked from one that has imported torch, which takes a fresh interpreter two seconds of a core.

`tests/cli/test_command_processes.py` and `tests/end_to_end` test starting a fresh interpreter.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

TIMEOUT_SECONDS = 300.0


def run_python(
    *words: str | Path, cwd: str | Path | None = None, env: Mapping[str, str] | None = None, one_core: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` to its end and return its exit code and its output.

    Args:
        words: `-c CODE`, `-m MODULE` or a file, and the program's arguments.
        cwd: working directory; the current one if None.
        env: environment variables; the current ones if None.
        one_core: whether the program sees a machine with one core, where telemetry starts no worker.
    """
    with tempfile.TemporaryDirectory() as place:
        outputs = [Path(place) / "stdout", Path(place) / "stderr"]
        arguments = [str(word) for word in words]
        request = {
            "words": arguments,
            "cwd": str(Path.cwd() if cwd is None else cwd),
            "env": dict(os.environ if env is None else env),
            "outputs": [str(path) for path in outputs],
            "one_core": one_core,
        }
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request).encode() + b"\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], TIMEOUT_SECONDS)[0]:
            os.killpg(server.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(arguments, TIMEOUT_SECONDS)
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, *(path.read_text() for path in outputs))


@cache
def _server() -> subprocess.Popen[bytes]:
    """The process that forks; it ends when this process closes its standard input."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    atexit.register(server.communicate)
    return server


def serve() -> None:
    """Fork once for each line of standard input and reply with the exit code of the forked process."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch._dynamo  # noqa: F401  # takes a second of a core; torch's optimizers import it at their first step

    import esper_telemetry.cli.run
    import esper_telemetry.cli.train
    import esper_telemetry.ppo.environments.gymnasium  # noqa: F401

    gc.collect()
    gc.freeze()  # a process that ends then does not visit these imported objects, which would copy their memory pages
    requests, answers = os.fdopen(os.dup(0)), os.dup(1)
    while line := requests.readline():
        pid = os.fork()
        if not pid:
            os.close(answers)
            become(json.loads(line))
            return
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def become(request: dict[str, Any]) -> None:
    for descriptor, path in enumerate((os.devnull, *request["outputs"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if request["one_core"]:
        os.sched_getaffinity = lambda pid: {0}
    words = request["words"]
    sys.path[:0] = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part not in sys.path]
    sys.path[0:0] = [""] if words[0] in ("-c", "-m") else [str(Path(words[0]).parent)]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    elif words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    serve()
