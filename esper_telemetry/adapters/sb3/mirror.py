"""What Stable-Baselines3 logs, under `sb3/`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

from stable_baselines3.common.logger import KVWriter, Logger

PREFIX = "sb3"


class Mirror(KVWriter):
    """One more output of a model's logger, which keeps what passes; the other outputs notice nothing."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._seen: dict[str, float] = {}
        logger.output_formats.append(self)

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """Keeps the numbers of a dump."""
        self._seen.update(numbers(key_values))

    def take(self) -> dict[str, float]:
        """Numbers that were dumped since the last time, and those that wait for the next dump: the newer ones win."""
        found = {**self._seen, **numbers(self._logger.name_to_value)}
        self._seen = {}
        return found

    def leave(self) -> None:
        """Is no output any more."""
        if self in self._logger.output_formats:
            self._logger.output_formats.remove(self)

    def close(self) -> None:
        """Nothing is open."""


def numbers(key_values: Mapping[str, Any]) -> dict[str, float]:
    """What is a single number, under keys that every backend takes."""
    return {key_of(name): float(value) for name, value in key_values.items() if isinstance(value, Real)}


def key_of(name: str) -> str:
    """`rollout/ep_rew_mean` becomes `sb3/rollout/ep_rew_mean`."""
    segments = [re.sub(r"[^a-z0-9_]+", "_", part) for part in str(name).lower().split("/") if part]
    return "/".join([PREFIX, *segments])
