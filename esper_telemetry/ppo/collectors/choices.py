"""The choices of a rollout on the host: drawn step by step, kept with the scores and restrictions they were drawn under.

What a choice may be, and whether it matters, as the choices it depends on become known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.ppo.collectors.inference import tensors
from esper_telemetry.ppo.distributions import Sampler
from esper_telemetry.ppo.environments.protocol import ActionSpec, Array, ObservationLayout, Task
from esper_telemetry.ppo.policy import ActorCritic, Tensors, add


class Restriction(NamedTuple):
    """Of one part of an action: the choices allowed [B, size] and where it matters [B]; None where nothing is said."""

    mask: Any = None
    relevance: Any = None


UNRESTRICTED = Restriction()


class Restrictor:
    """Tells, part by part, what one part of an action may be.

    Args:
        spec: of the part.
        table: [size of `given`], bool: the choices it matters for; None where it always does.
        first: [size], bool: choice 0 alone, what an irrelevant part is forced to.
        rows: [B] indices of the environments.
    """

    def __init__(self, spec: ActionSpec, table: Any, first: Any, rows: Any) -> None:
        self.spec, self.table, self.first, self.rows = spec, table, first, rows

    def __call__(self, mask: Any, chosen: Mapping[str, Any], relevance: Mapping[str, Any]) -> Restriction:
        """The restriction, from the environment's mask and the parts chosen already, with their relevance."""
        given = self.spec.given
        if given is None:
            return Restriction(mask)
        if mask is not None and mask.ndim == 3:
            mask = mask[self.rows, chosen[given]]
        relevant = relevance.get(given)
        if self.table is not None:
            here = self.table[chosen[given]]
            relevant = here if relevant is None else relevant & here
        if relevant is None:
            return Restriction(mask)
        return Restriction(self._force(mask, relevant[:, None]), relevant)

    def _force(self, mask: Any, relevant: Any) -> Any:
        if self.spec.kind == "continuous":
            return None
        return (relevant if mask is None else mask & relevant) | (self.first & ~relevant)


def restrictors(specs: Mapping[str, ActionSpec], num_envs: int) -> dict[str, Restrictor]:
    """A restrictor for every part, in NumPy; raises ValueError where a part is given one that is not chosen before it."""
    return {name: restrictor(name, specs, num_envs) for name in specs}


def restrictor(name: str, specs: Mapping[str, ActionSpec], num_envs: int) -> Restrictor:
    """The restrictor of one part."""
    spec, table = specs[name], None
    if spec.given is not None:
        before = list(specs)[: list(specs).index(name)]
        if spec.given not in before or specs[spec.given].kind != "categorical":
            raise ValueError(f"part {name!r} must be given an earlier categorical part, got {spec.given!r}")
        if spec.relevant_for is not None:
            table = np.isin(np.arange(specs[spec.given].size), spec.relevant_for)
    elif spec.relevant_for is not None:
        raise ValueError(f"part {name!r} has relevant_for={spec.relevant_for} without a part that it is given")
    return Restrictor(spec, table, np.arange(spec.size) == 0, np.arange(num_envs))


def on_device(restrictor: Restrictor, device: Any) -> Restrictor:
    """The same restrictor for tensors on a device."""
    import torch

    table, first, rows = (
        None if array is None else torch.from_numpy(array).to(device)
        for array in (restrictor.table, restrictor.first, restrictor.rows)
    )
    return Restrictor(restrictor.spec, table, first, rows)


def require_choice(masks: Mapping[str, Array]) -> None:
    """Raises ValueError where a mask [..., size] allows nothing."""
    for name, mask in masks.items():
        empty = np.argwhere(~mask.any(-1))
        if len(empty):
            raise ValueError(
                f"the action mask of {name!r} allows no choice at (step, environment) {tuple(empty[0].tolist())}"
            )


def restricted(specs: Mapping[str, ActionSpec], masked: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names of the parts that have masks and of those that have a relevance."""
    relevant: list[str] = []
    for name, spec in specs.items():
        if spec.relevant_for is not None or spec.given in relevant:
            relevant.append(name)
    known = set(masked) | set(relevant)
    return [name for name, spec in specs.items() if name in known and spec.kind == "categorical"], relevant


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
