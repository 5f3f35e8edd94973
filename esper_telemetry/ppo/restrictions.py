"""What a choice may be, and whether it matters, as the choices it depends on become known.

The functions take NumPy arrays on the host and tensors on a device alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from esper_telemetry.ppo.environments.protocol import ActionSpec

Array = npt.NDArray[Any]


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
