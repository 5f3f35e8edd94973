"""Families of metrics, by the first segment of their keys: what each is for, its x-axis, and who goes first."""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """One family: the question it answers in a dashboard, and the axis its charts are drawn over."""

    question: str
    axis: str = "axis/update"


FAMILIES = {
    "alarm": Family("Is anything wrong?"),
    "episode": Family("Is it learning?", axis="axis/env_step"),
    "eval": Family("How good is it without exploring?", axis="axis/env_step"),
    "policy": Family("Is the policy moving too far?"),
    "value": Family("Is the critic useful?"),
    "grad": Family("Who owns the gradient?"),
    "integrity": Family("Does the update compute what it should?"),
    "adv": Family("Do the advantages carry a signal?"),
    "loss": Family("What is being minimised?"),
    "numerics": Family("Are all numbers finite?"),
    "lstm": Family("Does memory work?"),
    "opt": Family("Are the optimizer's steps the right size?"),
    "ret": Family("What must the critic predict?"),
    "reward": Family("What does the environment pay?", axis="axis/env_step"),
    "obs": Family("Does the policy see anything change?"),
    "repr": Family("Can the network still learn?"),
    "env": Family("What are the grown networks worth?", axis="axis/env_step"),
    "seed": Family("Do seeds take root?"),
    "host": Family("How well do the hosts learn?"),
    "norm": Family("Do the normalisers keep up?"),
    "buffer": Family("How old is the data?"),
    "task": Family("How does the task go?", axis="axis/env_step"),
    "train": Family("How fast is it?", axis="axis/env_step"),
    "perf": Family("Where does the time go?", axis="axis/env_step"),
    "telemetry": Family("How is telemetry itself?"),
}
"""The bundled families, most important first."""


def family_name(key: str) -> str:
    """The first segment of a key."""
    return key.partition("/")[0]


def family_of(key: str) -> Family:
    """The family of a key; one made for it where the name is not ours."""
    name = family_name(key)
    return FAMILIES.get(name) or Family(f"Your own: {name}")


def importance(key: str) -> int:
    """Rank of the key's family, 0 first; a family that is not ours was added on purpose, so it leads."""
    return RANKS.get(family_name(key), 0)


RANKS = {name: rank for rank, name in enumerate(FAMILIES, start=1)}
