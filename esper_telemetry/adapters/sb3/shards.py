"""Gradients of parts of a minibatch of Stable-Baselines3; see `events.MinibatchStart`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from esper_telemetry.adapters.sb3.losses import (
    clip_of,
    clip_value_of,
    evaluated,
    losses,
    rows_of,
    total,
    used_advantages,
    valid_rows,
)
from esper_telemetry.adapters.sb3.untouched import untouched
from esper_telemetry.events import Shard


def shard_gradients(model: Any, samples: Any, count: int) -> list[Shard]:
    """Gradient of the loss of each of `count` parts; fewer where the minibatch has fewer samples. Leaves no trace."""
    whole = used_advantages(model, samples.advantages, valid_rows(samples))
    parameters = list(model.policy.parameters())
    with untouched(model.policy):
        return [Shard(size, _gradient(model, part, parameters)) for size, part in _parts(samples, whole, count)]


def _parts(samples: Any, advantages: Tensor, count: int) -> Iterator[tuple[int, tuple[Any, Tensor]]]:
    """Parts with the number of independent samples in each: rows, or whole sequences."""
    recurrent = "lstm_states" in samples._fields
    total_count = samples.lstm_states.pi[0].shape[1] if recurrent else len(advantages)
    length = len(advantages) // total_count
    count = max(1, min(count, total_count))
    for start, stop in pairwise([total_count * part // count for part in range(count + 1)]):
        rows = slice(start * length, stop * length)
        part = type(samples)(
            *(
                _states(value, slice(start, stop)) if name == "lstm_states" else _rows(value, rows)
                for name, value in zip(samples._fields, samples, strict=True)
            )
        )
        yield stop - start, (part, advantages[rows])


def _rows(value: Any, rows: slice) -> Any:
    return {name: entry[rows] for name, entry in value.items()} if isinstance(value, dict) else value[rows]


def _states(states: Any, sequences: slice) -> Any:
    """RNNStates of these sequences; each tensor is [layers, sequences, H]."""
    return type(states)(*(tuple(state[:, sequences].contiguous() for state in pair) for pair in states))


def _gradient(model: Any, part: tuple[Any, Tensor], parameters: list[Tensor]) -> Tensor:
    """[d]: all gradients one after the other, zero of what is frozen or not reached."""
    samples, advantages = part
    rows, clips = rows_of(samples, evaluated(model, samples), advantages), (clip_of(model), clip_value_of(model))
    loss = total(model, losses(rows, valid_rows(samples), clip=clips[0], clip_value=clips[1]))
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    found = iter(torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True))
    return torch.cat([next(found).flatten() if p.requires_grad else torch.zeros_like(p).flatten() for p in parameters])
