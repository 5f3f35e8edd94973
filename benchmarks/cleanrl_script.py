"""CleanRL's untouched script in this process, with its environments watched from outside.

Its clock starts at the first reset. It looks for returns where Gymnasium has not put them since version 1; the recorder that it wraps its
environments in still counts them, and is read here.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import gymnasium
from native import NativeCartPole


class Watch:
    """CPU and wall time at the first reset, and the returns of the last hundred episodes."""

    def __init__(self) -> None:
        self.returns: deque[float] = deque(maxlen=100)
        self.started: tuple[float, float] | None = None

    def start(self) -> None:
        """The clock starts, once."""
        self.started = self.started or (time.process_time(), time.perf_counter())

    def elapsed(self) -> tuple[float, float]:
        """CPU and wall time since then."""
        assert self.started is not None, "the script has made no environment"
        return time.process_time() - self.started[0], time.perf_counter() - self.started[1]


class Native:
    """As much of a vector environment as the script uses, on Gymnasium's own implementation."""

    def __init__(self, num_envs: int, watch: Watch) -> None:
        self._watch, self._num_envs = watch, num_envs
        self._env = NativeCartPole(num_envs, 0)
        self.single_observation_space = self._env.env.single_observation_space
        self.single_action_space = self._env.env.single_action_space

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        """Observations [B, 4], and nothing else."""
        self._watch.start()
        self._env = NativeCartPole(self._num_envs, seed)
        self._env.returns = self._watch.returns
        return self._env.reset(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Takes one action everywhere."""
        return *self._env.step(actions)[:4], {}

    def close(self) -> None:
        """Nothing is open."""


def run(script: str, options: dict[str, object], *, native: bool) -> Watch:
    """Runs the script to its end in a directory of its own; what it prints goes to stderr."""
    path = str(Path(script).resolve())
    sys.argv = [path, *(text for name, value in options.items() for text in (f"--{name}", str(value)))]
    sys.argv += ["--no-anneal-lr", "--no-cuda"]
    watch = Watch()
    with tempfile.TemporaryDirectory() as directory, redirect_stdout(sys.stderr), watched(watch, native=native):
        os.chdir(directory)
        runpy.run_path(path, run_name="__main__")
    return watch


@contextmanager
def watched(watch: Watch, *, native: bool) -> Iterator[None]:
    """Vector environments that are made within are watched, or are the native one instead."""
    plain = gymnasium.vector.SyncVectorEnv

    class Watched(plain):  # type: ignore[misc, valid-type] # a class held in a variable
        def reset(self, **options: Any) -> Any:
            watch.start()
            return super().reset(**options)

        def step(self, actions: Any) -> Any:
            result = super().step(actions)
            infos = result[-1]
            if "episode" in infos:
                watch.returns.extend(infos["episode"]["r"][infos["_episode"]].tolist())
            return result

    vector: Any = gymnasium.vector
    vector.SyncVectorEnv = (lambda makers: Native(len(makers), watch)) if native else Watched
    try:
        yield
    finally:
        vector.SyncVectorEnv = plain
