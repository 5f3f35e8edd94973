"""Actions of a rollout: sampled part by part under the restrictions of earlier parts, and stored with their scores.

Restrictions are NumPy arrays on the host and tensors on a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.ppo.action_distributions import Sampler
from esper_telemetry.ppo.environments.environment_protocol import ActionSpec, Array, ObservationLayout, Task
from esper_telemetry.ppo.policy import ActorCritic, Tensors, add

FORBIDDEN_SCORE: Final = np.finfo(np.float32).min


class Restriction(NamedTuple):
    """The allowed choices of one part of an action [B, size], and whether the part matters [B]; None without restrictions."""

    mask: Any = None
    relevance: Any = None


class Restrictor:
    """Computes the restriction of one part of an action.

    Args:
        spec: specification of the part.
        relevant_choices: [size of `given`], bool: the choices for which the part matters; None if it always does.
        forced: [size], bool: only choice 0, which an irrelevant part must take.
        rows: [B] indices of the environments.
    """

    def __init__(self, spec: ActionSpec, relevant_choices: Any, forced: Any, rows: Any) -> None:
        self.spec, self.relevant_choices, self.forced, self.rows = spec, relevant_choices, forced, rows

    def __call__(self, mask: Any, actions: Mapping[str, Any], relevance: Mapping[str, Any]) -> Restriction:
        """Return the restriction, from the environment's mask and the earlier parts with their relevance."""
        given = self.spec.given
        if given is None:
            return Restriction(mask)
        if mask is not None and mask.ndim == 3:
            mask = mask[self.rows, actions[given]]
        relevant = relevance.get(given)
        if self.relevant_choices is not None:
            here = self.relevant_choices[actions[given]]
            relevant = here if relevant is None else relevant & here
        if relevant is None:
            return Restriction(mask)
        if self.spec.kind == "continuous":
            return Restriction(None, relevant)
        matters = relevant[:, None]
        return Restriction((matters if mask is None else mask & matters) | (self.forced & ~matters), relevant)

    def to(self, device: torch.device) -> Restrictor:
        """Return the restrictor for tensors on a device."""
        arrays = (self.relevant_choices, self.forced, self.rows)
        return Restrictor(
            self.spec, *(None if array is None else torch.from_numpy(array).to(device) for array in arrays)
        )


def restrictors(specs: Mapping[str, ActionSpec], num_envs: int) -> dict[str, Restrictor]:
    """Return a restrictor for every part, in NumPy; raise ValueError if a part depends on a part that is not chosen before it."""
    restrictors_of_parts: dict[str, Restrictor] = {}
    for name, spec in specs.items():
        relevant_choices = None
        if spec.given is not None:
            if spec.given not in restrictors_of_parts or specs[spec.given].kind != "categorical":
                raise ValueError(f"part {name!r} must be given an earlier categorical part, got {spec.given!r}")
            if spec.relevant_for is not None:
                relevant_choices = np.isin(np.arange(specs[spec.given].size), spec.relevant_for)
        elif spec.relevant_for is not None:
            raise ValueError(f"part {name!r} has relevant_for={spec.relevant_for} without a part that it is given")
        restrictors_of_parts[name] = Restrictor(spec, relevant_choices, np.arange(spec.size) == 0, np.arange(num_envs))
    return restrictors_of_parts


def restricted_parts(specs: Mapping[str, ActionSpec], masked: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names of the parts with masks, and of the parts with a relevance."""
    relevant: list[str] = []
    for name, spec in specs.items():
        if spec.relevant_for is not None or spec.given in relevant:
            relevant.append(name)
    names = set(masked) | set(relevant)
    return [name for name, spec in specs.items() if name in names and spec.kind == "categorical"], relevant


class ActionColumns(NamedTuple):
    """The columns of a rollout about the chosen actions; see `Rollout` for their shapes."""

    actions: Tensors
    log_probs: Tensor
    head_log_probs: Tensors
    action_masks: Tensors
    relevance: Tensors
    scores: Tensors


@torch.no_grad()
def action_columns(
    policy: ActorCritic, scores: Tensors, actions: Tensors, *, masks: Tensors, relevance: Tensors
) -> ActionColumns:
    """Return the columns with the log-probabilities of actions under the scores they were sampled from. All shapes are [T, B, ...]."""
    shape = next(iter(scores.values())).shape[:2]
    flat_scores, flat_actions, flat_masks, flat_relevance = (
        {name: column.flatten(0, 1) for name, column in columns.items()}
        for columns in (scores, actions, masks, relevance)
    )
    parts = policy.log_probs(policy.normalize(flat_scores, flat_masks), flat_actions, flat_relevance)
    parts = {name: part.view(shape) for name, part in parts.items()}
    head_log_probs = parts if len(parts) > 1 else {}
    return ActionColumns(actions, add(list(parts.values())), head_log_probs, masks, relevance, scores)


class ActionBuffer:
    """The actions of T steps in B environments on the host.

    Args:
        masked: names of the parts for which the environment has action masks.
        greedy: take the most likely actions instead of sampling them.
    """

    def __init__(
        self, env: Task, policy: ActorCritic, num_steps: int, masked: tuple[str, ...], *, greedy: bool = False
    ) -> None:
        shape = (num_steps, env.num_envs)
        heads = {name: policy.head(name) for name in env.action_specs}
        with_masks, with_relevance = restricted_parts(env.action_specs, masked)
        self._policy, self._shape, self._greedy = policy, shape, greedy
        self._restrictors = restrictors(env.action_specs, env.num_envs)
        self._scores = {name: np.zeros((*shape, head.width), np.float32) for name, head in heads.items()}
        self._actions = {name: head.action_buffer(shape) for name, head in heads.items()}
        self._masks = {name: np.ones((*shape, heads[name].size), bool) for name in with_masks}
        self._relevance = {name: np.ones(shape, bool) for name in with_relevance}
        self._squashes = {name: head.squash for name, head in heads.items() if head.squash is not None}
        self._plain = not (self._masks or self._relevance or self._squashes)
        self._noise: dict[str, Array] = {}
        self._samplers: dict[str, Sampler] = {}

    def begin(self, generator: torch.Generator) -> None:
        """Begin a rollout: sample all of its noise."""
        heads = {name: self._policy.head(name) for name in self._actions}
        if not (self._greedy and self._noise):
            self._noise = {name: head.noise(self._shape, generator).numpy() for name, head in heads.items()}
        if self._greedy:
            for noise in self._noise.values():
                noise.fill(0)
        self._samplers = {name: head.sampler() for name, head in heads.items()}

    def choose(self, t: int, scores: Mapping[str, Array], masks: Mapping[str, Array]) -> dict[str, Array]:
        """Return the environment's actions at step t, sampled from the scores [B, width] by head under its masks."""
        if self._plain:
            for name, score in scores.items():
                self._scores[name][t] = score
                self._actions[name][t] = self._samplers[name](score, self._noise[name][t])
            return {name: actions[t] for name, actions in self._actions.items()}
        chosen_actions: dict[str, Array] = {}
        relevance: dict[str, Array] = {}
        for name, score in scores.items():
            mask, relevant = self._restrictors[name](masks.get(name), chosen_actions, relevance)
            self._scores[name][t] = score
            if mask is not None:
                self._masks[name][t] = mask
                score = np.where(mask, score, FORBIDDEN_SCORE)
            action = self._samplers[name](score, self._noise[name][t])
            if relevant is not None:
                self._relevance[name][t] = relevance[name] = relevant
                action = action * relevant.reshape(-1, *[1] * (action.ndim - 1))
            self._actions[name][t] = action
            chosen_actions[name] = self._actions[name][t]
        return chosen_actions | {name: squash.as_numpy(chosen_actions[name]) for name, squash in self._squashes.items()}

    def check_finite(self, observations: Array, layout: ObservationLayout) -> None:
        """Raise FloatingPointError for the first observation [T, B, ...] whose scores are not finite."""
        for name, scores in self._scores.items():
            if not np.isfinite(scores).all():
                t, row = np.argwhere(~np.isfinite(scores).all(-1))[0]
                observation = observations[t, row] if layout.alone else layout.numbers_of(observations[t, row])
                raise FloatingPointError(
                    f"environment {row} returned at step {t} of the rollout an observation for which the policy's scores "
                    f"for {name} are not finite: {np.array2string(observation, threshold=8)}"
                )

    def finish(self, device: torch.device) -> ActionColumns:
        """Return the columns of the rollout; raise ValueError if a mask allowed nothing."""
        for name, mask in self._masks.items():
            empty = np.argwhere(~mask.any(-1))
            if len(empty):
                raise ValueError(
                    f"the action mask of {name!r} allows no choice at (step, environment) {tuple(empty[0].tolist())}"
                )
        scores, actions, masks, relevance = (
            {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
            for arrays in (self._scores, self._actions, self._masks, self._relevance)
        )
        return action_columns(self._policy, scores, actions, masks=masks, relevance=relevance)
