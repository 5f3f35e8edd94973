"""Rollouts of a script, and how it lays out their columns in its arrays.

Shapes: T steps, B environments, R = T B transitions, N rows of a minibatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.adapters.columns import HeadColumns
from esper_telemetry.adapters.script.network_logs import Asked, LastEstimate
from esper_telemetry.adapters.script.observed_steps import ObservedSteps
from esper_telemetry.adapters.script.row_finder import MIN_DISTINCT, MIN_SHARE, in_size_order, is_same, shares_held
from esper_telemetry.adapters.script.variables import Variables, as_number, stacked

NAMES = {
    "rewards": ("rewards", "rews", "reward", "rs", "r"),
    "values": ("values", "vals", "state_values", "old_values", "value_preds"),
    "advantages": ("advantages", "advs"),
    "returns": ("returns", "rets", "value_targets"),
    "log_probs": ("logprobs", "logp", "old_logprobs", "action_log_probs"),
    "last_values": ("next_value", "last_value", "bootstrap_value", "last_val"),
    "dones": ("dones", "terminations", "terminateds"),
    "next_done": ("next_done", "next_termination", "last_done"),
    "actions": ("actions", "acts"),
    "observations": ("obs", "observations", "states"),
}
"""Names that decide between arrays that cannot be distinguished otherwise. `Variables.find` also accepts a prefix, as in `b_rewards`."""

LOG_PROB_FORMS: tuple[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], ...] = (
    (lambda numbers: numbers, lambda numbers: numbers),
    (torch.exp, torch.log),
    (torch.neg, torch.neg),
)
"""Forms in which scripts store log-probabilities, and the way back: themselves, probabilities, and negative ones."""

MAX_LONG_ARRAY = 1 << 18
"""Numbers of an array in which the advantages are sought, if no array of the rollout's size has them."""


class RecordedRollout(NamedTuple):
    """What was recorded of a rollout before the first optimizer step of its update.

    Attributes:
        steps: as the environments returned them; None if they are not known.
        acted: log-probabilities and actions of the steps in the order in which they were taken, if they are known.
        heads: distributions in acting.
        draws: choices [T, B, 1] that were drawn before the steps; None if they are not known.
        critic: outputs that are surely the critic's, if the loss is of the policy only.
        acting_values: outputs [T, B] of the only layer with one unit in acting.
        estimates: outputs of the critic that may be in no variable any more.
        last_estimates: outputs after the last step of the environments.
        has_critic: a layer of the script may be a critic.
        announced: the update has begun before its rollout is found.
    """

    steps: ObservedSteps | None = None
    acted: Sequence[Asked] = ()
    heads: HeadColumns = HeadColumns()
    draws: Tensor | None = None
    critic: Sequence[Tensor] = ()
    acting_values: Tensor | None = None
    estimates: Sequence[Tensor] = ()
    last_estimates: Sequence[LastEstimate] = ()
    has_critic: bool = True
    announced: bool = False

    @property
    def actions_drawn(self) -> Tensor | None:
        """The actions [T, B, 1] that the environments received, if the policy drew them: a loss may have others by mistake."""
        received = None if self.steps is None else self.steps.received
        return self.draws if received is not None and self.draws is not None and torch.equal(received.to(self.draws), self.draws) else None


class ScriptRollout(NamedTuple):
    """A rollout, [T, B] each; copies, because scripts reuse the memory.

    Attributes:
        terminated: bool: ends of episodes, without time limits if the script estimates the states there.
        time_limits: bool: ends by a time limit otherwise; None if they are not known, or estimated.
        next_values: estimates of the state after each step, 0 if the script does not show the estimate after an episode.
        last_values: [1, B], estimates of the states after the last step.
        returns_known: the script has an array with the returns.
    """

    rewards: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    log_probs: Tensor
    ended: Tensor
    terminated: Tensor
    next_values: Tensor
    last_values: Tensor
    time_limits: Tensor | None = None
    returns_known: bool = True

    def targets(self, targets: Tensor | None, rows: Tensor, in_use: Tensor | None = None) -> Tensor | None:
        """Return the critic's targets [N] in these transitions: the loss's targets, as stored if both are the same up to rounding.

        If the loss uses another column of the rollout or the advantages in use [N] as targets, return the stored returns.
        """
        stored = self.returns.reshape(-1)[rows]
        if targets is None or len(targets) != len(stored):
            return stored if targets is None and self.returns_known else targets
        others = [stored.to(targets)]
        if self.returns_known:
            columns = (self.values, self.advantages, self.returns - self.values)
            others += [column.reshape(-1)[rows].to(targets) for column in columns]
            others += [in_use.to(targets)] if in_use is not None and len(in_use) == len(targets) else []
        return stored.to(targets) if any(is_same(own, targets) for own in others) else targets


@dataclass
class Layout:
    """The shape of a rollout, and how the flat arrays of a script are in it.

    Attributes:
        device: where arrays are compared.
        steps, envs: T, B; 0 if they are not known.
        env_major: flat arrays hold one environment after the other.
    """

    device: torch.device | None
    steps: int = 0
    envs: int = 0
    env_major: bool = False

    def find(self, variables: Variables) -> Tensor | None:
        """Take the shape of a rollout whose environments are hidden from arrays with such names; return its ends, None without any."""
        rewards = variables.find(NAMES["rewards"], _as_table)
        if rewards is None:
            return None
        self.steps, self.envs = map(int, rewards.shape)
        dones = variables.find(NAMES["dones"], self.accept)
        next_done = variables.find(NAMES["next_done"], partial(self.accept, steps=1))
        if dones is None:
            return None
        # with a flag of the step after the last, `dones[t]` says that step t begins an episode
        return (dones if next_done is None else torch.cat([dones[1:], next_done])).bool()

    def find_order(self, arrays: Sequence[Tensor], shown: Iterable[Tensor], grids: Iterable[Tensor]) -> None:
        """Find the order of flat arrays by those that are known as [T, B] too, such as `grids`.

        A first minibatch of the whole rollout, with the columns `shown`, may be such an array.
        """
        size = self.steps * self.envs
        if 1 in (self.steps, self.envs):
            return
        flat = [array.float().reshape(-1) for array in (*arrays, *shown) if array.numel() == size in array.shape]
        shapes = [[one for one in array.shape if one != 1] for array in arrays]
        known = [array for array, shape in zip(arrays, shapes, strict=True) if shape == [self.steps, self.envs]]
        if self.steps != self.envs:
            columns = (array for array, shape in zip(arrays, shapes, strict=True) if shape == [self.envs, self.steps])
            known += [array.reshape(self.envs, self.steps).T for array in columns]
        votes = 0
        for grid in (*known, *grids):
            by_time, by_env = (one.reshape(-1).float() for one in (grid, grid.reshape(self.steps, self.envs).T))
            if not torch.equal(by_time, by_env):
                votes += sum(torch.equal(one, by_env) - torch.equal(one, by_time) for one in flat)
        self.env_major = votes > 0

    def as_grid(self, array: Tensor) -> Tensor | None:
        """Return an array as [T, B], or as [T + 1, B]; None if it does not fit."""
        steps, envs = self.steps, self.envs
        rows = array.numel() // envs
        if array.numel() not in (steps * envs, (steps + 1) * envs):
            return None
        shape = [size for size in array.shape if size != 1]
        if envs == 1 or shape == [rows, envs]:
            return array.reshape(rows, envs)
        if shape == [envs, rows] and steps != envs:
            return array.reshape(envs, rows).T
        if len(shape) != 1 or rows != steps:
            return None
        return array.reshape(envs, steps).T if self.env_major else array.reshape(steps, envs)

    def accept(self, value: object, steps: int | None = None) -> Tensor | None:
        """Accept an array of R numbers, as [T, B]; of another number of steps, as [T + 1, B] or [1, B]."""
        array, steps = stacked(value), self.steps if steps is None else steps
        if array is None or array.dim() == 0 or not self.steps or array.numel() != steps * self.envs:
            return None
        array = array.to(self.device)
        return array.reshape(1, self.envs) if steps == 1 else self.as_grid(array)

    def accept_last(self, value: object) -> Tensor | None:
        """Accept values [1, B] of one step, or a number for a single environment."""
        number = as_number(value) if self.envs == 1 else None
        return self.accept(value, steps=1) if number is None else torch.tensor([[number]], device=self.device)

    def accept_rows(self, value: object) -> Tensor | None:
        """Accept an array [T, B, ...] or [R, ...], as [T, B, ...]."""
        array, steps, envs = stacked(value), self.steps, self.envs
        if array is None or not steps or array.dim() == 0:
            return None
        if tuple(array.shape[:2]) in ((steps, envs), (envs, steps)):
            return array if len(array) == steps else array.transpose(0, 1)
        if len(array) != steps * envs:
            return None
        if envs > 1 and self.env_major:
            return array.reshape(envs, steps, *array.shape[1:]).transpose(0, 1)
        return array.reshape(steps, envs, *array.shape[1:])


def _as_table(value: object) -> Tensor | None:
    """Accept [T, B], also as [T, B, 1]."""
    array = stacked(value)
    array = array.squeeze(-1) if array is not None and array.dim() == 3 and array.shape[-1] == 1 else array
    return array if array is not None and array.dim() == 2 else None


def name_of(column: Tensor, size: int, variables: Variables) -> str:
    """Return the name of the first array of so many numbers that holds a column's numbers, preferably as often; empty without any."""
    numbers, held = in_size_order(column), list[str]()
    for name, value in variables.named_values():
        array = stacked(value)
        if array is None or not array.numel() == size > 1:
            continue
        table = in_size_order(array.to(column.device))
        if is_same(numbers, table):
            return name
        held += [name] if shares_held(numbers, table[None])[0] >= MIN_SHARE else []
    return held[0] if held else ""


def is_in_longer_array(own: Tensor | None, layout: Layout, variables: Variables) -> bool:
    """Return True for advantages of the whole rollout that are the first numbers of an array with different numbers after them."""
    size = layout.steps * layout.envs
    if own is None or own.numel() != size or len(own.unique()) < MIN_DISTINCT:
        return False
    for _, value in variables.named_values():
        if isinstance(value, list | tuple | deque) and not size < entries_of(value) <= MAX_LONG_ARRAY:
            continue  # without stacking what a script logs
        array = stacked(value)
        if array is None or not size + layout.envs < array.numel() <= MAX_LONG_ARRAY:
            continue
        numbers = array.reshape(-1).to(own)
        if is_same(numbers[:size], own.reshape(-1)) and len(numbers[size:].unique()) > 1:
            return True
    return False


def entries_of(rows: list[Any] | tuple[Any, ...] | deque[Any]) -> int:
    """Number of entries of a list of numbers, arrays or tensors as large as the first one; 0 of other lists."""
    first = rows[0] if rows else None
    if isinstance(first, Tensor):
        return len(rows) * first.numel()
    return len(rows) * int(np.size(first)) if isinstance(first, int | float | np.generic | np.ndarray) else 0
