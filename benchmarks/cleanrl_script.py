"""Run CleanRL's unedited script in this process, timed and scored at its environments.

The clock starts at the first reset. Gymnasium 1.x no longer puts returns where the script reads them, so they are read from its
`RecordEpisodeStatistics` wrappers.
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


class EnvironmentLog:
    """CPU and wall time at the first reset, and the returns of the last hundred episodes."""

    def __init__(self) -> None:
        self.returns: deque[float] = deque(maxlen=100)
        self.started: tuple[float, float] | None = None

    def start(self) -> None:
        """Start the clock, once."""
        self.started = self.started or (time.process_time(), time.perf_counter())

    def elapsed(self) -> tuple[float, float]:
        """Return CPU and wall time since the start."""
        assert self.started is not None, "the script has made no environment"
        return time.process_time() - self.started[0], time.perf_counter() - self.started[1]


class Native:
    """The part of a vector environment that the script uses, with Gymnasium's vector implementation."""

    def __init__(self, num_envs: int, log: EnvironmentLog) -> None:
        self._log, self._num_envs = log, num_envs
        self._env = NativeCartPole(num_envs, 0)
        self.single_observation_space = self._env.env.single_observation_space
        self.single_action_space = self._env.env.single_action_space

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        """Return observations [B, 4], and an empty dict."""
        self._log.start()
        self._env = NativeCartPole(self._num_envs, seed)
        self._env.returns = self._log.returns
        return self._env.reset(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments."""
        return *self._env.step(actions)[:4], {}

    def close(self) -> None:
        """Close nothing."""


def run(script: str, options: dict[str, object], *, native: bool) -> EnvironmentLog:
    """Run the script to its end in its own directory; its output goes to stderr."""
    path = str(Path(script).resolve())
    sys.argv = [path, *(text for name, value in options.items() for text in (f"--{name}", str(value)))]
    sys.argv += ["--no-anneal-lr", "--no-cuda"]
    log = EnvironmentLog()
    with tempfile.TemporaryDirectory() as directory, redirect_stdout(sys.stderr), logged_environments(log, native=native):
        os.chdir(directory)
        runpy.run_path(path, run_name="__main__")
    return log


@contextmanager
def logged_environments(log: EnvironmentLog, *, native: bool) -> Iterator[None]:
    """Log vector environments, or replace them by the native one."""
    plain = gymnasium.vector.SyncVectorEnv

    class Logged(plain):  # type: ignore[misc, valid-type] # a class held in a variable
        def reset(self, **options: Any) -> Any:
            log.start()
            return super().reset(**options)

        def step(self, actions: Any) -> Any:
            result = super().step(actions)
            infos = result[-1]
            if "episode" in infos:
                log.returns.extend(infos["episode"]["r"][infos["_episode"]].tolist())
            return result

    vector: Any = gymnasium.vector
    vector.SyncVectorEnv = (lambda makers: Native(len(makers), log)) if native else Logged
    try:
        yield
    finally:
        vector.SyncVectorEnv = plain
