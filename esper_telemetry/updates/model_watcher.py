"""The models that a loop of one's own has asked to be watched, as one update's gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from esper_telemetry.core.clock import Clock
from esper_telemetry.metrics.optimizer import LearningRate
from esper_telemetry.updates.containment import Measurement
from esper_telemetry.updates.data import BackwardGradients, Snapshot
from esper_telemetry.updates.failure import Candidate
from esper_telemetry.updates.gradient_tap import GradientTap, Stepped


class WatchedModels:
    """Taps, one per optimizer, whose steps are put side by side where there are equally many."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._taps: list[tuple[GradientTap, Optimizer]] = []

    def __bool__(self) -> bool:
        """Whether anything is watched."""
        return bool(self._taps)

    def add(self, model: nn.Module, optimizer: Optimizer) -> Callable[[], None]:
        """One more; returns the function that ends this. An optimizer that is watched already with this model is not watched twice.

        Raises:
            ValueError: where it is watched with another model.
        """
        for known, of in self._taps:
            if of is optimizer:
                if known.model is not model:
                    raise ValueError(
                        "this optimizer is watched already: watch it once, with a module that holds all its parameters"
                    )
                return partial(self._remove, (known, of))
        tap = GradientTap(model, optimizer, self._clock)
        entry = (tap, optimizer)
        self._taps.append(entry)
        return partial(self._remove, entry)

    def _remove(self, entry: tuple[GradientTap, Optimizer]) -> None:
        entry[0].remove()
        if entry in self._taps:
            self._taps.remove(entry)

    def stop(self) -> None:
        """Ends all."""
        for tap, _ in self._taps:
            tap.remove()
        self._taps = []

    def take(self, *, whole: bool) -> Snapshot:
        """The gradients of all steps since the last call, which are those of a whole update or of what there is of it."""
        return Snapshot(gradients=tuple(stacked([tap.take(whole=whole) for tap, _ in self._taps])))

    def nonfinite_candidates(self) -> Iterator[Candidate]:
        """The parameters that optimizers train, as they are, then their gradients."""
        trained = [item for tap, _ in self._taps for item in tap.trained().items()]
        yield from (Candidate(name, parameter.detach()) for name, parameter in trained)
        yield from (Candidate(f"gradient of {name}", p.grad) for name, p in trained if p.grad is not None)

    def rates(self) -> list[Measurement]:
        """The learning rate, of the first optimizer."""
        rates = [
            group["lr"] for _, optimizer in self._taps[:1] for group in optimizer.param_groups[:1] if "lr" in group
        ]
        return [
            partial(LearningRate, lr=rate.detach().clone() if isinstance(rate, torch.Tensor) else rate)
            for rate in rates
        ]


def stacked(taps: Iterable[Sequence[Stepped]]) -> list[BackwardGradients]:
    """Steps with gradients in the same parameters together; those of several optimizers that step alike as one."""
    parts = [steps for steps in taps if steps]
    if len({len(steps) for steps in parts}) == 1:
        parts = [[joined(at_once) for at_once in zip(*parts, strict=True)]]
    found: dict[tuple[str, ...], list[Stepped]] = {}
    for step in (step for steps in parts for step in steps):
        found.setdefault(step.names, []).append(step)
    return [_gradients(steps) for steps in found.values()]


def joined(steps: Sequence[Stepped]) -> Stepped:
    """Steps of several optimizers as one."""
    device = steps[0].before.device
    return Stepped(
        names=tuple(name for step in steps for name in step.names),
        numels=tuple(count for step in steps for count in step.numels),
        before=torch.cat([step.before.double().to(device) for step in steps]),
        after=torch.cat([step.after.double().to(device) for step in steps]),
        found_inf=None,
    )


def _gradients(steps: Sequence[Stepped]) -> BackwardGradients:
    first = steps[0]
    return BackwardGradients(
        epochs=(0,) * len(steps),
        names=first.names,
        numels=first.numels,
        norms=torch.stack([step.before.double() for step in steps]),
        max_norm=None,
        leaves=None,
        applied=torch.stack([step.after.double() for step in steps]),
    )
