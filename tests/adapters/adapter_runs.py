"""What the tests of several adapters share: recorded runs, weights, taps, and equations that do not hold."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_telemetry import Alarm, Telemetry, read_run
from esper_telemetry.adapters.taps import Tap
from esper_telemetry.alarms import Thresholds
from esper_telemetry.core.facts import Facts
from esper_telemetry.equations.equation import equation_results
from esper_telemetry.journal.read import Run

QUIET = Thresholds(off=frozenset({"telemetry/overhead"}))
"""Tests share their cores, so only the benchmark judges the cost of telemetry."""


def recorded(
    train: Callable[..., Any], model: Any, run_dir: Path, *, updates: int = 3, sinks: Any = (), **settings: Any
) -> tuple[Run, Any]:
    """Return the journal of a model that has learned with telemetry, in process by default, and what `train` returns."""
    with Telemetry(sinks, run_dir=run_dir, **{"offload": False, **settings}) as telemetry:
        trained = train(model, updates, telemetry)
    return read_run(run_dir), trained


def raised_alarms(train: Callable[[Telemetry], object]) -> list[Alarm]:
    """Return the alarms that `on_alarm` receives during training."""
    received: list[Alarm] = []
    with Telemetry([], run_dir=None, detect=QUIET) as telemetry:
        telemetry.on_alarm(received.append)
        train(telemetry)
        live = list(received)
    return [alarm for alarm in live if alarm.event == "raise"]


def assert_identical(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert the same names, and tensors that are equal bit for bit."""
    assert actual.keys() == expected.keys()
    assert [key for key in actual if not torch.equal(actual[key], expected[key])] == []


@contextmanager
def recorded_norms(owner: Any = nn.utils, name: str = "clip_grad_norm_") -> Iterator[list[float]]:
    """Collect the norms that a clipping function returns, of a module or of the `ClipFunction` that replaces it."""
    norms: list[float] = []
    clip = getattr(owner, name)

    def recording_clip(*args: Any) -> Tensor:
        norm: Tensor = clip(*args)
        norms.append(float(norm))
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, recording_clip)
        yield norms


def moments(optimizer: Any) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": torch.as_tensor(moment).clone()
        for index, state in optimizer.state_dict()["state"].items()
        for name, moment in state.items()
    }


def taps_in(owners: Iterable[object], optimizer: Any = None) -> list[str]:
    taps = [f"{type(owner).__name__}.{name}" for owner in owners for name, x in vars(owner).items() if isinstance(x, Tap)]
    hooks = [] if optimizer is None else [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
    return taps + ["optimizer"] * len(hooks)


def checked_equations(run: Run) -> set[str]:
    return {one.equation.name for record in run.records for one in equation_results(record.values, Facts.of(run.info.facts))}


def differing_equations(run: Run) -> dict[str, list[str]]:
    """Names of the hypotheses about each equation that some record does not match."""
    results = [one for record in run.records for one in equation_results(record.values, Facts.of(run.info.facts))]
    return {one.equation.name: [each.name for each in one.hypotheses] for one in results if not one.matches}
