"""Runs in which nothing is wrong, some of which look as if something were: who raises an alarm there cries wolf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from esper_telemetry.events import UpdateEnd
from esper_telemetry.lab.faults.boundary import Altered
from esper_telemetry.lab.faults.changes import environment
from esper_telemetry.lab.faults.environments import Bed
from esper_telemetry.ppo.environments.protocol import Array, Step
from esper_telemetry.ppo.trainer import PPO

PLAIN = "plain"


def nothing(trainer: PPO) -> None:
    """Leaves the trainer alone."""


def threefold(step: Step, _: Mapping[str, Array]) -> Step:
    """A step with three times the reward."""
    return step._replace(rewards=3 * step.rewards)


def rewards_x3(trainer: PPO) -> None:
    """Gives three times the reward from update 31 on, as a curriculum would."""

    def change(event: UpdateEnd) -> None:
        if event.update == CHANGE - 1:
            environment(trainer, partial(Altered, threefold))

    trainer.hooks.on(UpdateEnd, change, last=True)


CHANGE = 31
"""The first update with changed rewards."""


@dataclass(frozen=True, slots=True)
class Healthy:
    """A kind of healthy run.

    Attributes:
        what: in words.
        updates: how many.
        beds: where it is tried.
        settings: where they differ from the bed's.
        prepare: what is done to the trainer before training.
        whole: schedules come to their end within the run.
        interventions: updates whose changes the user announces.
    """

    what: str
    updates: int
    beds: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[PPO], None] = nothing
    whole: bool = False
    interventions: tuple[int, ...] = ()

    def trainer(self, bed: Bed, seed: int) -> PPO:
        """A trainer for it."""
        return bed.trainer(seed, **self.settings)


EVERYWHERE = ("cue-recall", "cartpole", "cartpole-lstm", "acrobot", "pendulum")

HEALTHY: Mapping[str, Healthy] = {
    PLAIN: Healthy("as the preset says", 150, EVERYWHERE),
    "annealed": Healthy(
        "learning rate and entropy bonus fall to 0 within the run",
        80,
        EVERYWHERE,
        {"anneal_learning_rate": True, "entropy_coef": 0.02, "final_entropy_coef": 0.0},
        whole=True,
    ),
    "plateau": Healthy("a solved task is trained on", 250, ("cue-recall", "cartpole")),
    "slow": Healthy(
        "the learning rate is a hundredth", 100, ("cue-recall", "acrobot", "pendulum"), {"learning_rate": 2.5e-5}
    ),
    "rewards_x3": Healthy(
        "rewards grow threefold, and the user says so",
        80,
        ("cue-recall", "pendulum", "cartpole-lstm"),
        prepare=rewards_x3,
        interventions=(CHANGE,),
    ),
}
