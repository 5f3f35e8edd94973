"""Published tuned settings of PPO, as ranges with quantiles, and sentences about settings outside these ranges.

The ranges pool 107 configurations, each counted once, in the units of this package: rl-baselines3-zoo `hyperparams/ppo.yml` and
`ppo_lstm.yml` (76, at 22e3ff2, April 2026), the twelve PPO scripts of CleanRL with different settings (fe8d8a0), the PPO examples of Sample
Factory (10, 1894bd1), three RSL-RL configurations of Isaac Lab (ANYmal C, Franka lift, cartpole) and five of skrl (c29ced6). Settings that
a configuration leaves out are the defaults of its trainer. The coefficient of a value loss without the factor 1/2 counts twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from esper_telemetry.core.facts import Facts
from esper_telemetry.core.messages import number


@dataclass(frozen=True, slots=True)
class PublishedRange:
    """Values of one setting in published configurations.

    Attributes:
        name: name of the setting in `PPOConfig` and in the facts of a run.
        lowest, p10, median, p90, highest: quantiles of the published values.
        example: published configurations at both ends.
    """

    name: str
    lowest: float
    p10: float
    median: float
    p90: float
    highest: float
    example: str = ""


SMALL_FEATURES: Final = 0.05
"""Size of the largest entry of observations below which networks hardly react: half of the least healthy `obs/rms_max`."""

ZOO, CAR = "rl-baselines3-zoo", "rl-baselines3-zoo MountainCarContinuous-v0"
PUBLISHED: Final[Mapping[str, PublishedRange]] = {
    name: PublishedRange(name, low, p10, p50, p90, high, example)
    for name, (low, p10, p50, p90, high), example in (
        ("learning_rate", (2e-5, 4.5e-5, 2.5e-4, 5.4e-4, 3e-3), f"{ZOO} HalfCheetah-v3; Sample Factory MuJoCo"),
        ("gamma", (0.8, 0.98, 0.99, 0.999, 0.9999), f"skrl ManiSkill; {ZOO} Swimmer"),
        ("gae_lambda", (0.8, 0.9, 0.95, 0.98, 1.0), f"{ZOO} CartPole-v1, Reacher-v2"),
        ("clip", (0.1, 0.1, 0.2, 0.4, 0.4), f"CleanRL Atari; {ZOO} PyBullet"),
        ("num_epochs", (1, 4, 10, 20, 20), f"Sample Factory; {ZOO} CartPole-v1"),
        ("minibatch_size", (8, 32, 64, 2048, 25_000), f"{CAR}; RSL-RL ANYmal C"),
        ("rollout_size", (8, 512, 4096, 16_000, 98_000), f"{CAR}; RSL-RL ANYmal C"),
        ("entropy_coef", (0.0, 0.0, 0.0, 0.01, 0.01), f"{ZOO} MuJoCo; CleanRL Atari"),
        ("value_coef", (0.38, 0.5, 1.0, 2.0, 5.0), f"{CAR}; skrl"),
        ("max_grad_norm", (0.3, 0.5, 0.5, 1.0, 5.0), f"{ZOO} InvertedPendulum-v3, MountainCarContinuous-v0"),
    )
}

INITIAL_STD: Final = PublishedRange(*("initial standard deviation", 0.037, 0.14, 1.0, 1.0, 1.0), example=f"{CAR}; CleanRL, RSL-RL")
"""Of 67 configurations with continuous actions, in the units of the network's actions; bounds of the actions change it."""

POLICY_GRADIENT_RATE: Final = 0.01
"""Learning rate of REINFORCE in PyTorch's own examples, where each row is used once."""

TOLERANCE: Final = 0.02  # relative distance beyond the end of a range that counts as rounding

MIN_SEEN_SHARE: Final = 0.01
"""Steps that a discount factor looks ahead, 1 / (1 - gamma), over the length of episodes; the lowest published one is 0.015 (Atari)."""


class OutsideSetting(NamedTuple):
    """A setting outside all published values.

    Attributes:
        name: name of the setting in this package.
        value: value in the run.
        limit: end of the published range that it exceeds.
        text: sentence about it.
    """

    name: str
    value: float
    limit: float
    text: str


def settings_of(facts: Facts) -> dict[str, float]:
    """Return the run's values of settings with a published range, by name; empty for a language model, which needs other settings."""
    if facts.model == "language":
        return {}
    settings = {name: float(value) for name in PUBLISHED if (value := getattr(facts, name, None)) is not None}
    steps, envs, minibatches = facts.num_steps or 0, facts.num_envs or 0, facts.num_minibatches or 0
    if steps > 0 and envs > 0:
        settings["rollout_size"] = float(steps * envs)
        if minibatches > 0:
            settings["minibatch_size"] = max(1.0, steps * envs / minibatches)
    if facts.clip is None and facts.num_epochs in (None, 1):  # as A2C, whose rollouts are smaller than those of PPO
        sizes = ["rollout_size", "minibatch_size"] if facts.num_epochs else []
        rate = ["learning_rate"] if PUBLISHED["learning_rate"].highest < settings.get("learning_rate", 0.0) <= POLICY_GRADIENT_RATE else []
        settings = {name: value for name, value in settings.items() if name not in (*sizes, *rate)}
    return settings


def is_outside(published: PublishedRange, value: float) -> bool:
    """True if a value is beyond all published values."""
    return (value < published.lowest * (1 - TOLERANCE) or value > published.highest + TOLERANCE * abs(published.highest)) and not (
        published.name == "gamma" and published.highest < value < 1
    )


def range_sentence(name: str, value: float, facts: Facts) -> str:
    """Return `learning_rate is 0.1; published settings range from 2.0e-5 to 0.003`, with the setting's name in the run's trainer."""
    published = PUBLISHED[name]
    factor = facts.value_coef_scale if name == "value_coef" else 1.0
    mine, low, high = (
        f"{x:.4g}" if 0.9 < x < 1 else number(x)  # 0.9999 is not 1
        for x in (value * factor, published.lowest * factor, published.highest * factor)
    )
    return f"{facts.setting_names.get(name, name)} is {mine}; published settings range from {low} to {high}"


def in_trainers_names(advice: str, facts: Facts) -> str:
    """Return advice with the names that settings have in the run's trainer, such as `vf_coef` for `value_coef`."""
    names = {name: theirs for name, theirs in facts.setting_names.items() if "_" in name}  # "clip" is also a verb
    if not names:
        return advice
    return re.sub(rf"\b({'|'.join(map(re.escape, names))})\b", lambda match: names[match[1]], advice)


def with_logged_rate(facts: Facts, rate: float | None) -> Facts:
    """Return facts with the logged learning rate if they lack one, as in imported logs; small rates may be a warm-up, others adaptive."""
    known = facts.learning_rate is not None or facts.adaptive_rate
    small = rate is None or rate <= PUBLISHED["learning_rate"].highest
    return facts if known or small else replace(facts, learning_rate=rate)


def outside_settings(facts: Facts) -> Iterator[OutsideSetting]:
    """Yield the settings of a run that are outside all published ranges."""
    for name, value in settings_of(facts).items():
        published = PUBLISHED[name]
        if is_outside(published, value):
            limit = published.lowest if value < published.lowest else published.highest
            yield OutsideSetting(name, value, limit, range_sentence(name, value, facts))


class SettingChange(NamedTuple):
    """A setting, in the words of the run's trainer, the value that it should have, and its present value if known."""

    setting: str
    value: float | str
    now: float | None = None


def setting_change(
    names: Iterable[str], changes: Iterable[tuple[str, float | str]], facts: Facts, rate: float | None = None
) -> SettingChange | None:
    """Return the change to a usual value of the first setting outside all published values, otherwise the first possible change, if any.

    Args:
        names: settings, as in `AlarmRule.settings`.
        changes: pairs, as in `AlarmRule.changes`.
        facts: of the run.
        rate: learning rate at the alarm; it counts if it is above the setting.
    """
    values = settings_of(facts)
    if rate is not None and rate > values.get("learning_rate", 0.0):
        values["learning_rate"] = rate
    for name in names:
        if name in values and is_outside(PUBLISHED[name], values[name]):
            published = PUBLISHED[name]
            usual = published.p10 if values[name] < published.lowest else published.p90
            return _named(name, usual, values[name], facts)
    for name, change in changes:
        if isinstance(change, str):
            return SettingChange(name, change)
        if name in values:
            published, now = PUBLISHED[name], values[name]
            value = min(max(now * change, published.lowest), published.highest)
            value = published.highest if now == 0 and change > 1 else value
            if not math.isclose(value, now):
                return _named(name, value, now, facts)
    return None


def _named(name: str, value: float, now: float, facts: Facts) -> SettingChange:
    """Return a change with the name and in the units of the run's trainer; sizes without a name are counts of steps and minibatches."""
    theirs, rollout = facts.setting_names.get(name), (facts.num_steps or 1) * (facts.num_envs or 1)
    if name == "learning_rate" and facts.learning_rate is None:  # it was read from the optimizer
        theirs = theirs or "lr"
    if theirs is None and name == "minibatch_size":
        theirs, value, now = "num_minibatches", rollout / value, rollout / now
    elif name == "rollout_size":
        theirs = (theirs or "num_steps").partition(" x ")[0]  # Stable-Baselines3 has n_steps x n_envs
        value, now = value / (facts.num_envs or 1), now / (facts.num_envs or 1)
    if name in ("num_epochs", "minibatch_size", "rollout_size"):
        return SettingChange(theirs or name, max(1, round(value)), round(now))
    scale = facts.value_coef_scale if name == "value_coef" else 1.0
    return SettingChange(theirs or name, float(f"{value * scale:.3g}"), now * scale)


def outside_sentences(names: Iterable[str], facts: Facts, rate: float | None) -> list[str]:
    """Return sentences about the named settings that are outside all published ranges; `rate` is the logged learning rate."""
    values = settings_of(with_logged_rate(facts, rate)) if names else {}
    outside = [name for name in names if name in values and is_outside(PUBLISHED[name], values[name])]
    return [f"{range_sentence(name, values[name], facts)}." for name in outside]
