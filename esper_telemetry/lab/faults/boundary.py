"""Faults at the boundary of the environments: what they give is altered before the trainer sees it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from esper_telemetry.lab.faults import changes, needs
from esper_telemetry.lab.faults.fault import Fault, Undo
from esper_telemetry.ppo.environments.protocol import Array, Step
from esper_telemetry.ppo.normalizer import ObservationNormalizer
from esper_telemetry.ppo.trainer import PPO

Change = Callable[[Step, Mapping[str, Array]], Step]


class Altered:
    """Environments whose steps are changed on their way to the trainer; everything else is theirs."""

    def __init__(self, change: Change, env: Any) -> None:
        self._env, self._change = env, change

    def step(self, actions: Mapping[str, Array]) -> Step:
        """A step, changed."""
        return self._change(self._env.step(actions), actions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class Stuck(nn.Module):
    """A normaliser with the moments of another one, except that it believes in a smaller spread, and learns nothing."""

    def __init__(self, other: ObservationNormalizer, spread: float) -> None:
        super().__init__()
        self.inner = copy.deepcopy(other)
        self.inner.variance.mul_(spread**2)
        self.mean, self.vectors, self.scale = self.inner.mean, self.inner.vectors, self.inner.scale
        self.as_numpy = self.inner.as_numpy

    def forward(self, observations: Tensor) -> Tensor:
        """Normalised observations [..., *shape]."""
        normalized: Tensor = self.inner(observations)
        return normalized

    def update(self, rows: Tensor) -> None:
        """Learns nothing."""


def favoured_action(trainer: PPO, dose: float) -> Undo:
    """Rewards the second choice of the first categorical head and nothing else; the entropy bonus is off."""
    name = next(name for name, spec in trainer.env.action_specs.items() if spec.kind == "categorical")

    def change(step: Step, actions: Mapping[str, Array]) -> Step:
        return step._replace(rewards=(dose * (np.asarray(actions[name]) == 1)).astype(np.float32))

    return changes.together(
        changes.environment(trainer, partial(Altered, change)),
        changes.config(trainer, entropy_coef=0.0, final_entropy_coef=None),
    )


def constant_observations(trainer: PPO, dose: float) -> Undo:
    """Gives ones for the observations of the first `dose` environments."""
    count = round(dose)

    def change(step: Step, _: Mapping[str, Array]) -> Step:
        observations = np.array(step.observations)
        observations[:count] = 1
        return step._replace(observations=observations)

    return changes.environment(trainer, partial(Altered, change))


def swapped_ends(trainer: PPO, dose: float) -> Undo:
    """Takes termination for a time limit, and a time limit for termination."""

    def change(step: Step, _: Mapping[str, Array]) -> Step:
        return step._replace(terminated=step.truncated & ~step.terminated, truncated=step.terminated)

    return changes.environment(trainer, partial(Altered, change))


def stuck_normalizer(trainer: PPO, dose: float) -> Undo:
    """Puts in a normaliser that stands still, at `dose` times the spread that observations have."""
    current = trainer.normalizers.observations
    assert current is not None
    return changes.observation_normalizer(trainer, Stuck(current, dose))


BOUNDARY = (
    Fault(
        "ent0_strong",
        "No entropy bonus, and 5 for one fixed action instead of the task's rewards.",
        favoured_action,
        ("value/loss_jump", "policy/entropy_collapse"),
        bound=5,
        dose=5,
        doses=(0.01, 1e4),
        needs=(needs.choices, needs.on_the_host),
    ),
    Fault(
        "constant_observations",
        "One environment gives the same observation for ever.",
        constant_observations,
        ("lstm/cell_drift", "obs/constant"),
        bound=20,
        dose=1,
        doses=(1, 1e6),
        needs=(needs.on_the_host, needs.several_environments),
        core=False,
    ),
    Fault(
        "swapped_ends",
        "Termination is taken for a time limit, and a time limit for termination.",
        swapped_ends,
        ("value/bias",),
        bound=20,
        needs=(needs.on_the_host,),
        core=False,
    ),
    Fault(
        "stuck_normalizer",
        "The normaliser of observations stands still since they had a twentieth of their spread.",
        stuck_normalizer,
        ("norm/drift",),
        bound=5,
        dose=0.05,
        doses=(1e-4, 0.9),
        needs=(needs.normalized_observations,),
        core=False,
    ),
)
