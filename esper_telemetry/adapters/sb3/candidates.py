"""Candidates for the first non-finite tensor when a model of Stable-Baselines3 raises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from esper_telemetry.adapters.sb3.facts import trainable
from esper_telemetry.updates.failure import Candidate

COLLECTED = ("observations", "values", "log_probs", "advantages", "returns")
"""Arrays of the buffer, [T, B, ...], in the order in which they are computed."""


def nonfinite_candidates(model: Any) -> Iterator[Candidate]:
    """The model's tensors in forward order: the latest observations, what the buffer holds of the rollout, parameters and gradients."""
    yield from _arrays("observations", model._last_obs, environments=0)
    buffer = model.rollout_buffer
    steps = buffer.buffer_size if buffer.full else buffer.pos
    yield from _arrays("rewards", buffer.rewards[:steps], environments=1)
    for name in COLLECTED:
        flat = buffer.generator_ready  # then rows of all environments follow one another
        yield from _arrays(name, getattr(buffer, name), environments=None if flat else 1, steps=None if flat else steps)
    parameters = trainable(model.policy)
    yield from (Candidate(name, parameter.detach()) for name, parameter in parameters.items())
    yield from (Candidate(f"gradient of {name}", p.grad) for name, p in parameters.items() if p.grad is not None)


def _arrays(name: str, value: Any, *, environments: int | None, steps: int | None = None) -> Iterator[Candidate]:
    """One array, or those of observations with several parts."""
    parts = {f"{name}[{key!r}]": part for key, part in value.items()} if isinstance(value, Mapping) else {name: value}
    for part_name, part in parts.items():
        if part is not None:
            yield Candidate(part_name, torch.as_tensor(part[:steps]), environments)
