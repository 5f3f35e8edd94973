"""Facts of a run that rules, equations and views read, and the types that they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from esper_telemetry.core.messages import shown
from esper_telemetry.core.requirements import require_text, require_truth

COUNTS: Final = frozenset({"total_steps", "num_envs", "num_steps", "num_epochs", "num_minibatches", "horizon", "ranks"})
SETTINGS: Final = frozenset(
    [
        *("clip", "clip_value", "gamma", "gae_lambda", "learning_rate", "entropy_coef", "value_coef", "max_grad_norm"),
        *("target_kl", "desired_kl", "reward_threshold", "advantage_std_floor", "advantage_correction", "lstm_size"),
        *("temperature", "beta"),
    ]
)
TEXTS: Final = frozenset(["precision", "policy", "env", "trainer", "optimizer", "activation", "model", "level"])
FLAGS: Final = frozenset(
    ["normalize_advantages", "normalize_minibatches", "normalize_observations", "normalize_rewards", "squashed"]
)
MAPPINGS: Final = frozenset(["groups", "heads", "thresholds", "unchecked_equations"])
"""Facts by the type of their value, for users' arguments here and for lines of a journal in `journal.schema`."""


def checked_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that a user gives, numbers of NumPy and torch as Python's; other facts are free.

    Raises:
        TypeError: for one of another type.
    """
    checked: dict[str, Any] = {}
    for key, value in facts.items():
        name = require_text("the name of a fact", key)
        if value is not None:
            checked[name] = _checked_fact(name, value)
        elif name not in MAPPINGS:  # nothing, as of a limit that there is not
            checked[name] = None
    return checked


def _checked_fact(name: str, value: Any) -> Any:
    if name in COUNTS | SETTINGS:
        from esper_telemetry.core.arrays import (
            as_number,  # here, because it imports NumPy, which readers of journals do without
        )

        number = as_number(value, f"fact {name}")
        return int(number) if number.is_integer() else number
    if name in TEXTS:
        return require_text(f"fact {name}", value, may_be_empty=True)
    if name in FLAGS:
        return require_truth(f"fact {name}", value)
    if name in MAPPINGS and not isinstance(value, Mapping):
        raise TypeError(f"fact {name} must be a mapping, got {shown(value)}")
    if name == "groups" and not all(isinstance(part, list | tuple) for part in value.values()):
        raise TypeError(f"fact groups must have lists of parameters' names, got {shown(value)}")
    return value
