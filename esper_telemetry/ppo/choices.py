"""The choices of a rollout on the host: drawn step by step, kept with the scores and restrictions they were drawn under."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esper_telemetry.environments.protocol import Task
from esper_telemetry.ppo.heads import Sampler
from esper_telemetry.ppo.inference import tensors
from esper_telemetry.ppo.policy import ActorCritic, add
from esper_telemetry.ppo.restrictions import require_choice, restricted, restrictors

Array = npt.NDArray[Any]

FORBIDDEN = np.finfo(np.float32).min


class Chosen(NamedTuple):
    """The choices of a rollout as tensors; see `Rollout` for their shapes."""

    actions: dict[str, Tensor]
    log_probs: Tensor
    head_log_probs: dict[str, Tensor]
    action_masks: dict[str, Tensor]
    relevance: dict[str, Tensor]


class Choices:
    """Room for the choices of T steps in B environments.

    Args:
        masked: names of the parts for which the environment has action masks.
    """

    def __init__(self, env: Task, policy: ActorCritic, num_steps: int, masked: tuple[str, ...]) -> None:
        shape = (num_steps, env.num_envs)
        heads = {name: policy.head(name) for name in env.action_specs}
        with_masks, with_relevance = restricted(env.action_specs, masked)
        self._policy, self._shape = policy, shape
        self._restrictors = restrictors(env.action_specs, env.num_envs)
        self._scores = {name: np.zeros((*shape, head.size), np.float32) for name, head in heads.items()}
        self._actions = {name: head.action_buffer(shape) for name, head in heads.items()}
        self._masks = {name: np.ones((*shape, heads[name].size), bool) for name in with_masks}
        self._relevance = {name: np.ones(shape, bool) for name in with_relevance}
        self._noise: dict[str, Array] = {}
        self._samplers: dict[str, Sampler] = {}

    def begin(self, generator: torch.Generator) -> None:
        """A rollout begins: draws its noise, at once."""
        heads = {name: self._policy.head(name) for name in self._actions}
        self._noise = {name: head.noise(self._shape, generator).numpy() for name, head in heads.items()}
        self._samplers = {name: head.sampler() for name, head in heads.items()}

    def choose(self, t: int, scores: Mapping[str, Array], masks: Mapping[str, Array]) -> dict[str, Array]:
        """The action of step t, drawn from the scores [B, size] by head under the environment's masks."""
        if self._masks or self._relevance:
            return self._choose_restricted(t, scores, masks)
        for name, score in scores.items():
            self._scores[name][t] = score
            self._actions[name][t] = self._samplers[name](score, self._noise[name][t])
        return {name: actions[t] for name, actions in self._actions.items()}

    def _choose_restricted(self, t: int, scores: Mapping[str, Array], masks: Mapping[str, Array]) -> dict[str, Array]:
        chosen: dict[str, Array] = {}
        relevance: dict[str, Array] = {}
        for name, score in scores.items():
            mask, relevant = self._restrictors[name](masks.get(name), chosen, relevance)
            self._scores[name][t] = score
            if mask is not None:
                self._masks[name][t] = mask
                score = np.where(mask, score, FORBIDDEN)
            action = self._samplers[name](score, self._noise[name][t])
            if relevant is not None:
                self._relevance[name][t] = relevance[name] = relevant
                action = action * relevant.reshape(-1, *[1] * (action.ndim - 1))
            self._actions[name][t] = action
            chosen[name] = self._actions[name][t]
        return chosen

    @torch.no_grad()
    def finish(self, device: torch.device) -> Chosen:
        """What was chosen; raises ValueError where a mask allowed nothing."""
        require_choice(self._masks)
        actions, masks, relevance = (
            tensors(arrays, device) for arrays in (self._actions, self._masks, self._relevance)
        )
        scores = {name: score.flatten(0, 1) for name, score in tensors(self._scores, device).items()}
        parts = self._policy.log_probs(
            self._policy.normalize(scores, {name: mask.flatten(0, 1) for name, mask in masks.items()}),
            {name: action.flatten(0, 1) for name, action in actions.items()},
            {name: flags.flatten() for name, flags in relevance.items()},
        )
        parts = {name: part.view(self._shape) for name, part in parts.items()}
        return Chosen(actions, add(list(parts.values())), parts if len(parts) > 1 else {}, masks, relevance)
