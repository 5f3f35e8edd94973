"""Passes through a policy of Stable-Baselines3 over the rows of a rollout, in the order in which they were collected.

Shapes: T steps, B environments, N = T B transitions counted time by time, H width of a recurrent state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from stable_baselines3.common.utils import obs_as_tensor
from torch import Tensor

from esper_telemetry.ppo.environments.protocol import Array

CHUNK = 1024
"""Rows of a feed-forward pass at once."""

Observations: TypeAlias = "Tensor | dict[str, Tensor]"


class Latents(NamedTuple):
    """Of N rows.

    Attributes:
        actor: what the heads read, [N, F].
        memory: h of the actor's last layer after each step, [N, H]; None for a feed-forward policy.
    """

    actor: Tensor
    memory: Tensor | None


class StoredPass(NamedTuple):
    """What the buffer holds of a rollout, before its rows are put in another order.

    Attributes:
        observations: [T, B, ...], or several by name.
        actions: [T, B, D].
        starts: [T, B], 1 where a step began an episode.
        masks: of actions, [T, B, A]; None without any.
    """

    observations: Any
    actions: Array
    starts: Array
    masks: Array | None


def stored(buffer: Any) -> StoredPass:
    """Of a full buffer from which nothing has been taken yet."""
    observations = dict(buffer.observations) if isinstance(buffer.observations, dict) else buffer.observations
    return StoredPass(observations, buffer.actions, buffer.episode_starts, getattr(buffer, "action_masks", None))


def rows_of(kept: StoredPass, rows: Array, device: torch.device) -> Observations:
    """Observations [n, ...] of these transitions."""
    found: Observations = obs_as_tensor(_each(kept.observations, lambda part: _flat(part)[rows]), device)
    return found


def features(policy: Any, observations: Observations) -> Tensor:
    """What the actor's extractor makes of observations, [n, F]."""
    found = policy.extract_features(observations)
    actor: Tensor = found[0] if isinstance(found, tuple) else found
    return actor


def feed_forward(policy: Any, kept: StoredPass, rows: Array) -> Latents:
    """Latents of these transitions."""
    parts = [
        policy.mlp_extractor.forward_actor(features(policy, rows_of(kept, part, policy.device)))
        for part in _chunks(rows)
    ]
    return Latents(torch.cat(parts), None)


def recurrent(policy: Any, kept: StoredPass, first: Tensor) -> Latents:
    """Latents of all transitions; memory runs from the states `first` [layers, 2, B, H] through the whole rollout."""
    steps, envs = kept.starts.shape
    rows = np.arange(steps * envs)
    known = torch.cat([features(policy, rows_of(kept, part, policy.device)) for part in _chunks(rows)])
    outputs, state = [], (first[:, 0].contiguous(), first[:, 1].contiguous())
    starts = torch.as_tensor(kept.starts, dtype=torch.float32, device=policy.device)
    for given, begins in zip(known.unflatten(0, (steps, envs)), starts, strict=True):
        output, state = policy._process_sequence(given, state, begins, policy.lstm_actor)
        outputs.append(output)
    memory = torch.cat(outputs)
    return Latents(policy.mlp_extractor.forward_actor(memory), memory)


def alone(policy: Any, observations: Observations) -> Tensor:
    """Latents [n, F] of observations, each as the first of an episode."""
    found = features(policy, observations)
    if hasattr(policy, "lstm_actor"):
        lstm = policy.lstm_actor
        zero = torch.zeros(lstm.num_layers, len(found), lstm.hidden_size, device=found.device)
        found, _ = lstm(found.unsqueeze(0), (zero, zero))
        found = found.squeeze(0)
    latents: Tensor = policy.mlp_extractor.forward_actor(found)
    return latents


def distribution(policy: Any, latents: Tensor, kept: StoredPass, rows: Array) -> Any:
    """What would be drawn from after these transitions' latents [n, F]; sets the policy's `action_dist`."""
    found = policy._get_action_dist_from_latent(latents)
    if kept.masks is not None:
        found.apply_masking(_flat(kept.masks)[rows])
    return found


def _flat(array: Array) -> Array:
    """[N, ...] of [T, B, ...]."""
    return array.reshape(-1, *array.shape[2:])


def _each(value: Any, change: Any) -> Any:
    return {name: change(part) for name, part in value.items()} if isinstance(value, Mapping) else change(value)


def _chunks(rows: Array) -> Iterator[Array]:
    return (rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK))
