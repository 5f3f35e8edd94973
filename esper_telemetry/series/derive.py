"""From a record's measured values to the values that need other values or history."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from esper_telemetry.metric import segment
from esper_telemetry.record import Level
from esper_telemetry.series.advantages import advantage_scale
from esper_telemetry.series.critic import CriticMoments, VarianceAverage, critic_fit
from esper_telemetry.series.gradients import GradientHistory
from esper_telemetry.series.pairs import PairHistories
from esper_telemetry.series.policy import ENTROPY_WINDOW, entropy_rate, largest_shift
from esper_telemetry.series.temporal import Temporal

HEADS, SHIFT = "policy/head/", "/action_shift_js"
"""How the keys of single heads' shifts begin and end."""


class Series:
    """The history of one run; give it every record in order.

    It reads the run's facts and the values by key and nothing else, so that a journal yields the same derived values
    again.

    Attributes:
        gradients: what is known of the gradients.
        pairs: what is known of modules and their hosts, where any are watched.
    """

    def __init__(self, facts: Mapping[str, Any] | None = None) -> None:
        known = facts or {}
        self._variance = VarianceAverage()
        self._entropies: deque[float] = deque(maxlen=ENTROPY_WINDOW)
        self.pairs = PairHistories()
        self.gradients = GradientHistory(
            [segment(name) for name in known.get("groups", ())], known.get("max_grad_norm")
        )
        self._temporal = Temporal(known)

    def derive(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        """The derived values of a record with these measured ones, as far as they belong to `level`."""
        return {
            **self._critic(values, level),
            **self._advantages(values, level),
            **self._entropy(values, level),
            **self._shifts(values, level),
            **self.gradients.derive(values, level),
            **self.pairs.derive(values, level),
            **self._temporal.derive(values, level),
        }

    def _critic(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        moments = CriticMoments(
            bias=values.get("value/bias"),
            error_std=values.get("value/err/std"),
            value_std=values.get("value/std"),
            return_std=values.get("value/target/std"),
        )
        fit, self._variance = critic_fit(moments, self._variance)
        return fit.values(level)

    def _advantages(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        names = ("mean", "std", "min", "max")
        return advantage_scale(*(values.get(f"adv/raw/{name}") for name in names)).values(level)

    def _entropy(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        if "policy/entropy" not in values:
            return {}
        self._entropies.append(values["policy/entropy"])
        return entropy_rate(np.array(self._entropies)).values(level)

    def _shifts(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        heads = [value for key, value in values.items() if key.startswith(HEADS) and key.endswith(SHIFT)]
        return largest_shift(heads).values(level)
