"""A trace of some updates by torch's profiler: every operation, on a line for each thread.

    profiler = UpdateProfiler("runs/a/profile")
    with profiler.around(trainer.hooks, lambda: attach(telemetry, trainer)):
        trainer.learn(total_steps)

The file opens in Perfetto (https://ui.perfetto.dev), in chrome://tracing, and in TensorBoard with the plugin torch-tb-profiler.
Ranges named `rollout`, `update`, `minibatch` and `telemetry` stand above the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

from esper_telemetry.events import Hooks, MinibatchEnd, RolloutEnd, UpdateEnd

WAIT, WARM_UP, ACTIVE = 3, 1, 2


class Range:
    """A named range of time in the trace, one at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: record_function | None = None

    def begin(self, _: object = None) -> None:
        """End the open range and begin a new one."""
        self.end()
        self._open = record_function(self._name)
        self._open.__enter__()

    def end(self, _: object = None) -> None:
        """End the open range, if there is one."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


class UpdateProfiler:
    """Traces `active` updates into `directory`, after `wait` that it ignores and `warm_up` that it discards.

    Raises:
        ValueError: for numbers of updates that are negative, or none to trace.
    """

    def __init__(
        self, directory: str | Path, *, wait: int = WAIT, warm_up: int = WARM_UP, active: int = ACTIVE
    ) -> None:
        if min(wait, warm_up) < 0 or active < 1:
            raise ValueError(
                "a profile waits 0 or more updates, warms up 0 or more and traces 1 or more, "
                f"got {wait}, {warm_up} and {active}"
            )
        self.directory = Path(directory)
        self.updates = wait + warm_up + active
        self._schedule = schedule(wait=wait, warmup=warm_up, active=active, repeat=1)

    @property
    def traces(self) -> list[Path]:
        """The files written so far."""
        return sorted(self.directory.glob("*.pt.trace.json.gz"))

    @contextmanager
    def around(self, hooks: Hooks, attach: Callable[[], object]) -> Iterator[None]:
        """Trace what happens inside.

        Args:
            hooks: of the trainer.
            attach: registers telemetry; its hooks then run between those of the profiler, as a range of their own.
        """
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        ranges = {name: Range(name) for name in ("rollout", "update", "minibatch", "telemetry")}
        handler = tensorboard_trace_handler(str(self.directory), use_gzip=True)
        with profile(
            activities=activities, schedule=self._schedule, on_trace_ready=handler, record_shapes=True
        ) as profiler:
            removers = [
                hooks.on(RolloutEnd, ranges["rollout"].end),
                hooks.on(RolloutEnd, ranges["telemetry"].begin),
                hooks.on(MinibatchEnd, ranges["minibatch"].end),
                hooks.on(UpdateEnd, ranges["minibatch"].end),
                hooks.on(UpdateEnd, ranges["update"].end),
                hooks.on(UpdateEnd, ranges["telemetry"].begin),
            ]
            attach()
            removers += [
                hooks.on(RolloutEnd, ranges["telemetry"].end),
                hooks.on(RolloutEnd, ranges["update"].begin),
                hooks.on(RolloutEnd, ranges["minibatch"].begin),
                hooks.on(MinibatchEnd, ranges["minibatch"].begin),
                hooks.on(UpdateEnd, ranges["telemetry"].end),
                hooks.on(UpdateEnd, lambda _: profiler.step()),
                hooks.on(UpdateEnd, ranges["rollout"].begin),
            ]
            ranges["rollout"].begin()
            try:
                yield
            finally:
                for remove in removers:
                    remove()
                for named_range in reversed(ranges.values()):
                    named_range.end()
