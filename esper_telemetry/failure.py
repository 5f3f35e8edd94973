"""How runs end that nobody ends: in an exception, or with the interpreter."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from esper_telemetry.record import RunStatus

logger = logging.getLogger("esper_telemetry")


class Closes(Protocol):
    """What can be closed."""

    def close(self, status: RunStatus) -> object:
        """Ends it; once more does nothing."""


Suspects = Callable[[], Iterable[tuple[str, Tensor]]]


def status_of(error: BaseException | None) -> RunStatus:
    """How a run ended that was left with this exception."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return RunStatus.FINISHED
    return RunStatus.INTERRUPTED if isinstance(error, KeyboardInterrupt) else RunStatus.FAILED


def diagnose(error: BaseException, suspects: Suspects) -> dict[str, str]:
    """The exception, and the first non-finite tensor in forward order, which is also said aloud."""
    name = first_nonfinite(suspects())
    if name:
        logger.warning("training raised %s; first non-finite tensor: %s", type(error).__name__, name)
    return {"exception": type(error).__name__, "message": str(error)[:1000], "first_nonfinite": name}


def first_nonfinite(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Name and index of the first non-finite entry, such as `rewards[3, 2] = nan`; empty if all are finite."""
    for name, tensor in tensors:
        bad = (~torch.isfinite(tensor)).nonzero()
        if len(bad):
            index = bad[0].tolist()
            return f"{name}{index or ''} = {tensor[tuple(index)].item()}"
    return ""


def at_exit(telemetry: Closes) -> Callable[[], None]:
    """Close a telemetry that nobody closed, at interpreter exit; unregister what is returned when it is closed.

    It is kept alive until then: a function that makes one and returns has not ended the run. A script that an exception ended has left it
    in `sys.last_value`.
    """

    def close() -> None:
        telemetry.close(status_of(getattr(sys, "last_value", None)))

    atexit.register(close)
    return close
