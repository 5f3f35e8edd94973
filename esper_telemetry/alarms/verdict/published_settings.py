"""Tuned settings of PPO that were published, as ranges with quantiles, and sentences on settings outside of them.

The ranges pool 107 configurations, each counted once, in the units of this package: rl-baselines3-zoo `hyperparams/ppo.yml` and
`ppo_lstm.yml` (76, at 22e3ff2, April 2026), the twelve PPO scripts of CleanRL that have settings of their own (fe8d8a0), the PPO examples
of Sample Factory (10, 1894bd1), three RSL-RL configurations of Isaac Lab (ANYmal C, Franka lift, cartpole) and five of skrl (c29ced6).
Settings that a configuration leaves out are the defaults of its trainer. A value loss without its factor of 1/2 counts twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from esper_telemetry.core.facts import Facts
from esper_telemetry.core.messages import number, span


@dataclass(frozen=True, slots=True)
class PublishedRange:
    """Values that one setting has in published configurations.

    Attributes:
        name: of the setting, as `PPOConfig` and the facts of a run have it.
        lowest, p10, median, p90, highest: of the published values.
        sb3: its name in Stable-Baselines3, if that is another one.
        sb3_factor: value there over value here.
        example: the published configurations at both ends.
    """

    name: str
    lowest: float
    p10: float
    median: float
    p90: float
    highest: float
    sb3: str = ""
    sb3_factor: float = 1.0
    example: str = ""


ZOO, CAR = "rl-baselines3-zoo", "rl-baselines3-zoo MountainCarContinuous-v0"
PUBLISHED: Final[Mapping[str, PublishedRange]] = {
    name: PublishedRange(name, low, p10, p50, p90, high, sb3, 0.5 if name == "value_coef" else 1.0, example)
    for name, (low, p10, p50, p90, high), sb3, example in (
        ("learning_rate", (2e-5, 4.5e-5, 2.5e-4, 5.4e-4, 3e-3), "", f"{ZOO} HalfCheetah-v3; Sample Factory MuJoCo"),
        ("gamma", (0.8, 0.98, 0.99, 0.999, 0.9999), "", f"skrl ManiSkill; {ZOO} Swimmer"),
        ("gae_lambda", (0.8, 0.9, 0.95, 0.98, 1.0), "", f"{ZOO} CartPole-v1, Reacher-v2"),
        ("clip", (0.1, 0.1, 0.2, 0.4, 0.4), "clip_range", f"CleanRL Atari; {ZOO} PyBullet"),
        ("num_epochs", (1, 4, 10, 20, 20), "n_epochs", f"Sample Factory; {ZOO} CartPole-v1"),
        ("minibatch_size", (8, 32, 64, 2048, 25_000), "batch_size", f"{CAR}; RSL-RL ANYmal C"),
        ("rollout_size", (8, 512, 4096, 16_000, 98_000), "n_steps x n_envs", f"{CAR}; RSL-RL ANYmal C"),
        ("entropy_coef", (0.0, 0.0, 0.0, 0.01, 0.01), "ent_coef", f"{ZOO} MuJoCo; CleanRL Atari"),
        ("value_coef", (0.38, 0.5, 1.0, 2.0, 5.0), "vf_coef", f"{CAR}; skrl"),
        ("max_grad_norm", (0.3, 0.5, 0.5, 1.0, 5.0), "", f"{ZOO} InvertedPendulum-v3, MountainCarContinuous-v0"),
    )
}

INITIAL_STD: Final = PublishedRange(
    *("initial standard deviation", 0.037, 0.14, 1.0, 1.0, 1.0), example=f"{CAR}; CleanRL, RSL-RL"
)
"""In the units of the network's actions, of 67 configurations with continuous actions; actions with other bounds move it."""

TOLERANCE: Final = 0.02  # relative distance beyond the end of a range that is rounding

MIN_SEEN_SHARE: Final = 0.01
"""Steps that a discount looks ahead, 1 / (1 - gamma), relative to the length of episodes: the least published is 0.015, of Atari games."""


class OutsideSetting(NamedTuple):
    """A setting outside of all published values.

    Attributes:
        name: of the setting, here.
        value: that the run has.
        limit: the end of the range that it is beyond.
        text: the sentence.
    """

    name: str
    value: float
    limit: float
    text: str


def settings_of(facts: Facts) -> dict[str, float]:
    """Return the run's values of the settings that have a published range, by name: none for a language model, which needs others."""
    if facts.model == "language":
        return {}
    settings = {name: float(value) for name in PUBLISHED if (value := getattr(facts, name, None)) is not None}
    steps, envs, minibatches = facts.num_steps or 0, facts.num_envs or 0, facts.num_minibatches or 0
    if steps > 0 and envs > 0:
        settings["rollout_size"] = float(steps * envs)
        if minibatches > 0:
            settings["minibatch_size"] = max(1.0, steps * envs / minibatches)
    return settings


def is_outside(published: PublishedRange, value: float) -> bool:
    """True for a value beyond all published ones."""
    return (
        value < published.lowest * (1 - TOLERANCE) or value > published.highest + TOLERANCE * abs(published.highest)
    ) and not (published.name == "gamma" and published.highest < value < 1)


def range_sentence(name: str, value: float, facts: Facts) -> str:
    """`learning_rate is 0.1; published settings lie between 2.0e-5 and 0.003`, under the name that the run's trainer has for it."""
    published = PUBLISHED[name]
    theirs = published.sb3 if facts.of_sb3 else ""
    factor = published.sb3_factor if theirs else 1.0
    mine, low, high = (
        f"{x:.4g}" if 0.9 < x < 1 else number(x)  # 0.9999 is not 1
        for x in (value * factor, published.lowest * factor, published.highest * factor)
    )
    return f"{theirs or name} is {mine}; published settings lie between {low} and {high}"


def with_logged_rate(facts: Facts, rate: float | None) -> Facts:
    """Return facts with the learning rate that was logged, where they have none and it is no warm-up: logs of others have no settings."""
    known = facts.learning_rate is not None or rate is None or rate <= PUBLISHED["learning_rate"].highest
    return facts if known else replace(facts, learning_rate=rate)


def outside_settings(facts: Facts) -> Iterator[OutsideSetting]:
    """Yield the settings of a run that no published configuration has."""
    for name, value in settings_of(facts).items():
        published = PUBLISHED[name]
        if is_outside(published, value):
            limit = published.lowest if value < published.lowest else published.highest
            yield OutsideSetting(name, value, limit, range_sentence(name, value, facts))


def outside_sentences(names: Iterable[str], facts: Facts, rate: float | None) -> list[str]:
    """Return sentences on those of these settings that are outside of all published values; `rate` is the learning rate that was logged."""
    values = settings_of(with_logged_rate(facts, rate)) if names else {}
    outside = [name for name in names if name in values and is_outside(PUBLISHED[name], values[name])]
    return [f"{range_sentence(name, values[name], facts)}." for name in outside]


def spread_sentence(value: float) -> str:
    """The sentence on an initial standard deviation."""
    return f"the initial standard deviation is {number(value)} (published settings: {span(INITIAL_STD.lowest, INITIAL_STD.highest)})"
