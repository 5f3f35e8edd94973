"""The choices of a rollout on the host: drawn step by step, kept with the scores and restrictions they were drawn under."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esper_telemetry.ppo.environments.observations import ObservationLayout
from esper_telemetry.ppo.environments.protocol import Task
from esper_telemetry.ppo.heads import Sampler
from esper_telemetry.ppo.inference import tensors
from esper_telemetry.ppo.policy import ActorCritic, Tensors, add
from esper_telemetry.ppo.restrictions import require_choice, restricted, restrictors

Array = npt.NDArray[Any]

FORBIDDEN = np.finfo(np.float32).min


class Chosen(NamedTuple):
    """The choices of a rollout as tensors; see `Rollout` for their shapes."""

    actions: Tensors
    log_probs: Tensor
    head_log_probs: Tensors
    action_masks: Tensors
    relevance: Tensors
    scores: Tensors


class Choices:
    """Room for the choices of T steps in B environments.

    Args:
        masked: names of the parts for which the environment has action masks.
        greedy: takes the likeliest choices instead of drawing them.
    """

    def __init__(
        self, env: Task, policy: ActorCritic, num_steps: int, masked: tuple[str, ...], *, greedy: bool = False
    ) -> None:
        shape = (num_steps, env.num_envs)
        heads = {name: policy.head(name) for name in env.action_specs}
        with_masks, with_relevance = restricted(env.action_specs, masked)
        self._policy, self._shape, self._greedy = policy, shape, greedy
        self._restrictors = restrictors(env.action_specs, env.num_envs)
        self._scores = {name: np.zeros((*shape, head.width), np.float32) for name, head in heads.items()}
        self._actions = {name: head.action_buffer(shape) for name, head in heads.items()}
        self._masks = {name: np.ones((*shape, heads[name].size), bool) for name in with_masks}
        self._relevance = {name: np.ones(shape, bool) for name in with_relevance}
        self._squashes = {name: head.squash for name, head in heads.items() if head.squash is not None}
        self._special = bool(self._masks or self._relevance or self._squashes)
        self._noise: dict[str, Array] = {}
        self._samplers: dict[str, Sampler] = {}

    def begin(self, generator: torch.Generator) -> None:
        """A rollout begins: draws its noise, at once."""
        heads = {name: self._policy.head(name) for name in self._actions}
        if not (self._greedy and self._noise):
            self._noise = {name: head.noise(self._shape, generator).numpy() for name, head in heads.items()}
        if self._greedy:
            for noise in self._noise.values():
                noise.fill(0)
        self._samplers = {name: head.sampler() for name, head in heads.items()}

    def choose(self, t: int, scores: Mapping[str, Array], masks: Mapping[str, Array]) -> dict[str, Array]:
        """What the environment gets at step t, drawn from the scores [B, width] by head under its masks."""
        if self._special:
            return self._squashed(self._choose_restricted(t, scores, masks))
        for name, score in scores.items():
            self._scores[name][t] = score
            self._actions[name][t] = self._samplers[name](score, self._noise[name][t])
        return {name: actions[t] for name, actions in self._actions.items()}

    def _choose_restricted(self, t: int, scores: Mapping[str, Array], masks: Mapping[str, Array]) -> dict[str, Array]:
        taken: dict[str, Array] = {}
        relevance: dict[str, Array] = {}
        for name, score in scores.items():
            mask, relevant = self._restrictors[name](masks.get(name), taken, relevance)
            self._scores[name][t] = score
            if mask is not None:
                self._masks[name][t] = mask
                score = np.where(mask, score, FORBIDDEN)
            action = self._samplers[name](score, self._noise[name][t])
            if relevant is not None:
                self._relevance[name][t] = relevance[name] = relevant
                action = action * relevant.reshape(-1, *[1] * (action.ndim - 1))
            self._actions[name][t] = action
            taken[name] = self._actions[name][t]
        return taken

    def _squashed(self, actions: dict[str, Array]) -> dict[str, Array]:
        return actions | {name: squash.as_numpy(actions[name]) for name, squash in self._squashes.items()}

    def check_finite(self, observations: Array, layout: ObservationLayout) -> None:
        """Raises FloatingPointError, naming the first, where an observation [T, B, ...] left no finite scores."""
        for name, scores in self._scores.items():
            if not np.isfinite(scores).all():
                t, row = np.argwhere(~np.isfinite(scores).all(-1))[0]
                seen = observations[t, row] if layout.alone else layout.numbers_of(observations[t, row])
                raise FloatingPointError(
                    f"environment {row} gave at step {t} of the rollout an observation for which the policy's scores "
                    f"for {name} are not finite: {np.array2string(seen, threshold=8)}"
                )

    def finish(self, device: torch.device) -> Chosen:
        """What was chosen; raises ValueError where a mask allowed nothing."""
        require_choice(self._masks)
        actions, masks, relevance = (
            tensors(arrays, device) for arrays in (self._actions, self._masks, self._relevance)
        )
        return chosen(self._policy, tensors(self._scores, device), actions, masks=masks, relevance=relevance)


@torch.no_grad()
def chosen(policy: ActorCritic, scores: Tensors, actions: Tensors, *, masks: Tensors, relevance: Tensors) -> Chosen:
    """The choices with their log-probabilities under the scores they were drawn from. Shapes: [T, B, ...] all."""
    shape = next(iter(scores.values())).shape[:2]
    flat_scores, flat_actions, flat_masks, flat_relevance = (
        {name: column.flatten(0, 1) for name, column in columns.items()}
        for columns in (scores, actions, masks, relevance)
    )
    parts = policy.log_probs(policy.normalize(flat_scores, flat_masks), flat_actions, flat_relevance)
    parts = {name: part.view(shape) for name, part in parts.items()}
    return Chosen(actions, add(list(parts.values())), parts if len(parts) > 1 else {}, masks, relevance, scores)
