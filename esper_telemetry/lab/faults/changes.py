"""The changes that faults are made of; each is done at once and returns the function that takes it back.

What is taken back is what was changed and nothing else, so several changes may be taken back in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from esper_telemetry.lab.faults.fault import Undo
from esper_telemetry.ppo.trainer import PPO


def together(*undos: Undo) -> Undo:
    """Takes all back, the last one first."""

    def undo() -> None:
        for one in reversed(undos):
            one()

    return undo


def steps(trainer: PPO, **functions: Callable[..., Any]) -> Undo:
    """Replaces steps of the update."""
    before = {name: getattr(trainer.steps, name) for name in functions}
    trainer.steps = replace(trainer.steps, **cast("Any", functions))

    def undo() -> None:
        trainer.steps = replace(trainer.steps, **before)

    return undo


def config(trainer: PPO, **settings: Any) -> Undo:
    """Replaces settings of the trainer."""
    before = {name: getattr(trainer.config, name) for name in settings}
    trainer.config = replace(trainer.config, **settings)

    def undo() -> None:
        trainer.config = replace(trainer.config, **before)

    return undo


def optimizer(trainer: PPO, **settings: Any) -> Undo:
    """Replaces settings of the optimizer, in all groups of parameters."""
    before = [{name: group[name] for name in settings} for group in trainer.optimizer.param_groups]
    for group in trainer.optimizer.param_groups:
        group.update(settings)

    def undo() -> None:
        for group, old in zip(trainer.optimizer.param_groups, before, strict=True):
            group.update(old)

    return undo


def parameter(tensor: Tensor, value: float, rows: slice = slice(None)) -> Undo:
    """Overwrites rows of a parameter."""
    part = tensor.detach()[rows]
    before = part.clone()
    part.fill_(value)

    def undo() -> None:
        tensor.detach()[rows].copy_(before)

    return undo


def frozen(parameters: Iterable[torch.nn.Parameter]) -> Undo:
    """Takes parameters out of training, as far as they were in it."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for one in trained:
        one.requires_grad_(False)

    def undo() -> None:
        for one in trained:
            one.requires_grad_(True)

    return undo


def environment(trainer: PPO, wrap: Callable[[Any], Any]) -> Undo:
    """Puts a wrapper between the trainer and its environments."""
    collector: Any = trainer.collector
    before = collector.env
    collector.env = wrap(before)

    def undo() -> None:
        collector.env = before

    return undo


def observation_normalizer(trainer: PPO, other: torch.nn.Module) -> Undo:
    """Puts another normaliser in the place of that of observations."""
    normalizers: Any = trainer.normalizers
    before = normalizers.observations
    normalizers.observations = other

    def undo() -> None:
        normalizers.observations = before

    return undo
