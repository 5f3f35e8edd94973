"""A trace of a few updates, operation by operation, by torch's profiler: where the time goes, on a line for each thread.

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

from esper_telemetry.events import Hooks, MinibatchEnd, Remover, RolloutEnd, UpdateEnd

WAIT, WARM_UP, ACTIVE = 3, 1, 2


class Range:
    """A named stretch of time in the trace, one at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: record_function | None = None

    def begin(self, _: object = None) -> None:
        """Begins a new stretch; the one before ends."""
        self.end()
        self._open = record_function(self._name)
        self._open.__enter__()

    def end(self, _: object = None) -> None:
        """Ends the stretch, if there is one."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


class UpdateProfiler:
    """Traces `active` updates into `directory`, after `wait` that it ignores and `warm_up` that it throws away.

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
        """The files that were written."""
        return sorted(self.directory.glob("*.pt.trace.json.gz"))

    @contextmanager
    def around(self, hooks: Hooks, attach: Callable[[], object]) -> Iterator[None]:
        """Traces what happens inside.

        Args:
            hooks: of the trainer.
            attach: what registers telemetry, so that its hooks stand between ours and can be told from the trainer's work.
        """
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        ranges = {name: Range(name) for name in ("rollout", "update", "minibatch", "telemetry")}
        handler = tensorboard_trace_handler(str(self.directory), use_gzip=True)
        with profile(
            activities=activities, schedule=self._schedule, on_trace_ready=handler, record_shapes=True
        ) as profiler:
            removers = _before(hooks, ranges)
            attach()
            removers += _after(hooks, ranges, profiler)
            ranges["rollout"].begin()
            try:
                yield
            finally:
                for remove in removers:
                    remove()
                for stretch in reversed(ranges.values()):
                    stretch.end()


def _before(hooks: Hooks, ranges: dict[str, Range]) -> list[Remover]:
    """What happens before telemetry hears of an event."""
    return [
        hooks.on(RolloutEnd, ranges["rollout"].end),
        hooks.on(RolloutEnd, ranges["telemetry"].begin),
        hooks.on(MinibatchEnd, ranges["minibatch"].end),
        hooks.on(UpdateEnd, ranges["minibatch"].end),
        hooks.on(UpdateEnd, ranges["update"].end),
        hooks.on(UpdateEnd, ranges["telemetry"].begin),
    ]


def _after(hooks: Hooks, ranges: dict[str, Range], profiler: profile) -> list[Remover]:
    """What happens after it."""
    return [
        hooks.on(RolloutEnd, ranges["telemetry"].end),
        hooks.on(RolloutEnd, ranges["update"].begin),
        hooks.on(RolloutEnd, ranges["minibatch"].begin),
        hooks.on(MinibatchEnd, ranges["minibatch"].begin),
        hooks.on(UpdateEnd, ranges["telemetry"].end),
        hooks.on(UpdateEnd, lambda _: profiler.step()),
        hooks.on(UpdateEnd, ranges["rollout"].begin),
    ]
