"""`TelemetryWriter`, telemetry as the class path of RSL-RL's logger: one entry of the configuration, and no line of code."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import FrameType
from typing import Any

try:
    from rsl_rl.utils import LogWriter
    from rsl_rl.utils.utils import resolve_class
except ImportError as missing:
    raise ModuleNotFoundError(
        "TelemetryWriter needs RSL-RL 5.4 or newer: pip install 'esper-telemetry[rsl-rl]'", name="rsl_rl"
    ) from missing

from esper_telemetry.adapters.rsl_rl.runner import check_runner, new_listener
from esper_telemetry.core.record import Level
from esper_telemetry.telemetry import Telemetry, session_of

log = logging.getLogger("esper_telemetry")

RUN_DIR = "telemetry"
"""Name of the run directory within RSL-RL's log directory."""


class TelemetryWriter(LogWriter):  # type: ignore[misc] # the package has no type information
    """A log writer of RSL-RL that records every update of the runner that makes it, and passes everything on to the usual writer.

        config["logger"] = {"class_name": "esper_telemetry.adapters.rsl_rl:TelemetryWriter", "sinks": ["tensorboard"]}

    RSL-RL tells a writer its log directory only, so the runner is looked for among the calls that are under way. The run ends with
    `learn`; a runner that learns again in the same directory continues it.

    Args:
        log_dir: of RSL-RL. The run directory is `telemetry` in it, unless `run_dir` names another one.
        writer: the writer that RSL-RL would have: `tensorboard`, or a dictionary with its `class_name`; None for no other writer.
        settings: those of `Telemetry`.

    Attributes:
        telemetry: receives the records.

    Raises as `Telemetry` for settings that cannot be.
    """

    def __init__(self, log_dir: str, *, writer: str | dict[str, Any] | None = "tensorboard", **settings: Any) -> None:
        directory = Path(settings.pop("run_dir", None) or Path(log_dir) / RUN_DIR)
        self._writer = _other_writer(log_dir, writer)
        settings = {"resume": (directory / "journal.jsonl").exists(), "ranks": "alone", **settings}
        self.telemetry = Telemetry(settings.pop("sinks", ()), run_dir=directory, **settings)
        self._listener: Any = None
        if self.telemetry.level > Level.OFF:
            session_of(self.telemetry).attempt(lambda one: one._attach(), self)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """See RSL-RL's `LogWriter`."""
        if self._writer is not None:
            self._writer.add_scalar(tag, scalar_value, global_step)
        if self._listener is not None and not tag.endswith("/time"):
            session_of(self.telemetry).attempt(lambda value: self._listener.add_scalar(tag, value), scalar_value)

    def store_config(self, env_cfg: Any, train_cfg: dict[str, Any]) -> None:
        """See RSL-RL's `LogWriter`."""
        self._pass_on("store_config", env_cfg, train_cfg)

    def save_model(self, model_path: str, it: int) -> None:
        """See RSL-RL's `LogWriter`."""
        self._pass_on("save_model", model_path, it)

    def save_file(self, path: str) -> None:
        """See RSL-RL's `LogWriter`."""
        self._pass_on("save_file", path)

    def save_video(self, video: Path, it: int) -> None:
        """See RSL-RL's `LogWriter`."""
        self._pass_on("save_video", video, it)

    def stop(self) -> None:
        """See RSL-RL's `LogWriter`."""
        if self._listener is not None:
            session_of(self.telemetry).attempt(lambda listener: listener.stop(), self._listener)
            self._listener = None
        self.telemetry.close()
        self._pass_on("stop")

    def _attach(self) -> None:
        """Listen to the runner whose `learn` makes this writer."""
        runner, iterations = _learning_runner()
        if runner is None:
            log.warning("TelemetryWriter was not made by a runner's learn(): only what RSL-RL logs is recorded")
            return
        check_runner(runner)
        self._listener = new_listener(self.telemetry, runner)
        self._listener.start(iterations)
        session_of(self.telemetry).on_close(self._listener.stop)

    def _pass_on(self, name: str, *args: Any) -> None:
        method = getattr(self._writer, name, None)  # a SummaryWriter has none of RSL-RL's methods
        if method is not None:
            method(*args)


def _other_writer(log_dir: str, writer: str | dict[str, Any] | None) -> Any:
    if writer is None:
        return None
    if writer == "tensorboard":
        from torch.utils import tensorboard

        make: Any = tensorboard.SummaryWriter  # untyped where TensorBoard is installed
        return make(log_dir=log_dir, flush_secs=10)  # as RSL-RL makes it
    if not isinstance(writer, dict) or "class_name" not in writer:
        raise ValueError(f"writer must be 'tensorboard', None or a dictionary with a class_name, got {writer!r}")
    kind, settings = resolve_class(writer)
    return kind(log_dir=log_dir, **settings)


def _learning_runner() -> tuple[Any, int | None]:
    """Return the runner whose `learn` is under way, and its number of iterations; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        runner = frame.f_locals.get("self")
        if all(hasattr(runner, name) for name in ("alg", "logger", "learn")):
            return runner, frame.f_locals.get("num_learning_iterations")
        frame = frame.f_back
    return None, None
