"""Runs that an exception or the interpreter's exit ends: their status, and the first tensor that is not finite."""

from __future__ import annotations

import atexit
import dis
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.core.record import RunStatus
from esper_telemetry.core.redaction import error_line, error_text
from esper_telemetry.events import BackwardEnd, RolloutEnd
from esper_telemetry.updates.update import JoinedMinibatches

logger = logging.getLogger("esper_telemetry")

ARITHMETIC = (ValueError, ArithmeticError, RuntimeError, AssertionError)
"""Exceptions that a non-finite number may raise; others are unrelated to the tensors of their frames."""
DATA = re.compile(r"(?i)(^|_)(obs|observations?|rewards?|rews?)(\b|_|\d)")
"""Names of data of the environment, which come before everything that is computed from them."""
MASK = re.compile(r"(?i)mask|logit|log_?p|prob|score|best|low")
"""Names of tensors that may hold negative infinity on purpose: masks, sums with masks, and lower bounds."""
LIBRARIES = ("torch", "esper_telemetry")
"""Packages whose frames are not the user's."""
MAX_FRAMES = 8
MAX_LINES = 4
"""Assignments to a variable that are named; any of them may have given it its number."""
MAX_PARTS = 64
"""Entries of a tuple, list or dictionary among local variables that are searched."""
MAX_MESSAGE_CHARACTERS = 1000
"""Length of an exception's message; secrets are masked before it is cut, as half a secret is not recognised."""
MAX_ENVIRONMENTS = 64
"""Environments that are named."""


class SupportsClose(Protocol):
    """Anything that can end like a context manager."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End it; a second call does nothing."""


class Candidate(NamedTuple):
    """A tensor whose NaN or infinity would explain an exception.

    Attributes:
        name: of the tensor.
        tensor: its numbers.
        environments: its dimension of environments, if it has one.
        place: file and lines of the assignments to a variable; empty if they are unknown.
        made: what it was computed from, if it is the result of an operation.
    """

    name: str
    tensor: Tensor
    environments: int | None = None
    place: str = ""
    made: str = ""

    @property
    def named(self) -> str:
        """Its name, with where it was assigned or what it was computed from."""
        return f"{self.name}, assigned in {self.place}" if self.place else f"{self.name}, {self.made}" if self.made else self.name

    @property
    def words(self) -> str:
        """The same, with the number of entries that are not finite."""
        count = int((~torch.isfinite(self.tensor)).sum())
        return f"{self.named}, in {count:,} of {self.tensor.numel():,} entries"


Candidates = Callable[[], Iterable[Candidate]]


def status_of(error: BaseException | None) -> RunStatus:
    """Return the status of a run that ended with this exception."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return RunStatus.FINISHED
    return RunStatus.INTERRUPTED if isinstance(error, KeyboardInterrupt) else RunStatus.FAILED


def failure_data(error: BaseException, *sources: Candidates) -> dict[str, Any]:
    """Return the data of a run's `failure` event: the exception and the first non-finite tensor, which is also logged.

    Args:
        error: raised by training.
        sources: yield tensors in forward order; the first one that is not finite counts. After them come the local variables of the
            frames that the exception left.
    """
    data: dict[str, Any] = {"exception": type(error).__name__, "message": error_text(error, MAX_MESSAGE_CHARACTERS), "first_nonfinite": ""}
    last: Candidates = partial(local_tensors, error)
    nonfinite = first_nonfinite(chain.from_iterable(map(_contained, (*sources, last))))
    if nonfinite is None:
        return data
    _, comma, place = nonfinite["nonfinite"]["tensor"].partition(", ")
    found = nonfinite["first_nonfinite"] + comma + place
    logger.warning("training raised %s; first non-finite tensor: %s", data["exception"], found)
    return data | nonfinite


def _contained(source: Candidates) -> Iterator[Candidate]:
    """Yield a source's candidates up to the first that raises: after an exception their state is undefined."""
    try:
        yield from source()
    except Exception as error:  # training's own exception matters more
        logger.warning("a search for non-finite tensors ended early: %s", error_line(error))


def first_nonfinite(candidates: Iterable[Candidate]) -> dict[str, Any] | None:
    """Return name, index and number of the non-finite entries of the first tensor that has some; None if all are finite.

    `first_nonfinite` is its first entry, such as `rewards[3, 2] = nan`.
    """
    for candidate in candidates:
        name, tensor, environments, _, made = candidate
        if tensor.is_meta or tensor.layout is not torch.strided or not len(bad := (~torch.isfinite(tensor)).nonzero()):
            continue
        index = bad[0].tolist()
        counts: dict[str, Any] = {"tensor": candidate.named, "count": len(bad), "size": tensor.numel()}
        if environments is not None:
            counts["environments"] = bad[:, environments].unique().tolist()[:MAX_ENVIRONMENTS]
        entry = f" at {index}" if made and index else index or ""
        return {"first_nonfinite": f"{name}{entry} = {tensor[tuple(index)].item()}", "nonfinite": counts}
    return None


def local_data(error: BaseException) -> Iterator[Candidate]:
    """Return the observations and rewards among the `local_tensors`, by their names."""
    return (candidate for candidate in local_tensors(error) if DATA.search(candidate.name))


def local_tensors(error: BaseException) -> Iterator[Candidate]:
    """Yield floating tensors and arrays among the local variables of the frames that an arithmetic exception left, outermost first.

    Tuples, lists and dictionaries are searched too.
    """
    if not isinstance(error, ARITHMETIC):
        return
    for frame, _ in walk_tb(error.__traceback__):
        for name, value in list(frame.f_locals.items()):
            yield from (one._replace(place=place_of(name, [frame])) for one in named_tensors(name, value))


def nonfinite_local(scopes: Iterable[Mapping[str, Any]]) -> Candidate | None:
    """Return a copy of the first tensor that is not finite among variables, scope by scope; None if there is none.

    Parameters are left out, because the search begins when a loss or a gradient is no longer finite, before the optimizer's step.
    """
    for scope in scopes:
        for name, value in list(scope.items()):
            for candidate in named_tensors(name, value):
                if not isinstance(value, nn.Parameter) and not bool(candidate.tensor.isfinite().all()):
                    return candidate._replace(tensor=candidate.tensor.clone(), place=place_of(name, user_frames()))
    return None


def user_frames() -> list[FrameType]:
    """Return the frames that called into torch, outermost first."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < MAX_FRAMES:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in LIBRARIES:
            frames.insert(0, frame)
        frame = frame.f_back
    return frames


def place_of(name: str, frames: Iterable[FrameType]) -> str:
    """Return the file and the lines of the assignments to a variable or an attribute of that name in the first frame that has any; empty
    without one.
    """
    for code in (frame.f_code for frame in frames):
        stores = [one for one in dis.get_instructions(code) if one.opname.startswith("STORE_") and one.argval == name]
        lines = sorted({one.positions.lineno for one in stores if one.positions is not None and one.positions.lineno})
        if lines:
            return f"{Path(code.co_filename).name}:{', '.join(map(str, lines[:MAX_LINES]))}"
    return ""


def named_tensors(name: str, value: object) -> Iterator[Candidate]:
    """Yield a variable's floating tensors, each with the expression that gives it; negative infinity counts unless it is a mask's."""
    if isinstance(value, dict):
        parts = {f"{name}[{key!r}]": part for key, part in list(value.items())[:MAX_PARTS]}
    elif isinstance(value, list | tuple):
        parts = {f"{name}[{place}]": part for place, part in enumerate(value[:MAX_PARTS])}
    else:
        parts = {name: value}
    for part_name, part in parts.items():
        if isinstance(part, np.ndarray) and part.dtype.kind == "f":
            part = torch.as_tensor(part)
        if isinstance(part, Tensor) and part.is_floating_point() and part.layout is torch.strided:
            numbers = part.detach()
            finite = numbers[numbers != -torch.inf]
            if MASK.search(name) or not bool(finite.any()):  # a mask: 0 for an allowed choice
                numbers = numbers.clamp(min=torch.finfo(part.dtype).min)
            yield Candidate(part_name, numbers)


def at_exit(telemetry: SupportsClose) -> Callable[[], None]:
    """Close `telemetry` at interpreter exit; unregister the returned function if it is closed earlier.

    The registration keeps it alive after the function that made it returns. An exception that ended the script is in `sys.last_value`.
    """

    def close() -> None:
        error = getattr(sys, "last_value", None)
        telemetry.__exit__(type(error) if error else None, error, None)

    atexit.register(close)
    return close


def of_rollout(event: RolloutEnd) -> Iterator[Candidate]:
    """Yield the tensors of a rollout."""
    if event.observations is not None:
        yield Candidate("observations", event.observations, environments=1)
    for name in ("rewards", "values", "log_probs", "next_values", "advantages", "returns"):
        yield Candidate(name, getattr(event, name), environments=1)
    if event.states is not None:
        yield Candidate("states", event.states)


def of_parameters(named: Collection[tuple[str, Tensor]]) -> Iterator[Candidate]:
    """Yield parameters as they are, then their gradients."""
    yield from (Candidate(name, parameter.detach()) for name, parameter in named)
    yield from (Candidate(f"gradient of {name}", p.grad) for name, p in named if p.grad is not None)


def of_minibatches(event: JoinedMinibatches) -> Iterator[Candidate]:
    """Yield the results of the forward passes, and the losses."""
    for name, scores in event.logits.items():
        yield Candidate(f"logits of {name}", scores)
    yield Candidate("log_ratio", event.log_ratio)
    yield from (Candidate(f"loss/{name}", loss) for name, loss in event.losses.items())


def of_backward(event: BackwardEnd) -> Iterator[Candidate]:
    """Yield the norms of a pass's gradients, and the parameters as they are now."""
    yield from (Candidate(f"gradient of {name}", norm) for name, norm in zip(event.names, event.norms, strict=True))
    yield from (Candidate(name, parameter) for name, parameter in event.parameters.items())
