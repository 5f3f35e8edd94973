"""Rollouts of a script: how their columns are in its arrays, and which transitions the rows of a minibatch are.

Shapes: T steps, B environments, R = T B transitions, N rows of a minibatch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.adapters.columns import HeadColumns, head_actions, head_names
from esper_telemetry.adapters.script.autograd_graph import SAME_LINE, line_error
from esper_telemetry.adapters.script.network_logs import Asked, LastEstimate
from esper_telemetry.adapters.script.observed_steps import ObservedSteps
from esper_telemetry.adapters.script.variables import Variables, as_number, stacked
from esper_telemetry.core.event_parts import RolloutActions
from esper_telemetry.metrics.statistics import are_among

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

SAME_NUMBER = 4e-6
"""Largest difference between equal numbers that were recomputed from sums in single precision, relative to the largest number."""

MIN_SHARE = 0.99
"""Share of a minibatch's numbers that its source array must hold."""

MIN_DISTINCT = 8
"""Number of distinct numbers above which finding them in an array is not a coincidence."""

MIN_SUMMED, LEAST_DISCOUNT = 8, 0.5
"""Steps within episodes, and the discount, from which an array of discounted sums is recognised."""

MAX_SHARED_NUMBERS = 1 << 14
"""Largest number of a minibatch's rows with several possible transitions that are resolved one by one."""

MAX_CANDIDATES = 1 << 20
"""Largest number of possible transitions that are compared at once."""

MIN_SAME_ROWS = 0.75
"""Share of a minibatch's rows in which two columns must agree if they identify the same transitions."""

COLUMNS = ("inputs", "log_probs", "values", "returns", "advantages")
"""Columns of a rollout that its minibatches have too; `inputs` are checksums of observations."""

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

    def with_distributions(
        self, log_probs: Tensor, ended: Tensor, rewards: Tensor | None, *, actions: Tensor | None, observations: Tensor | None
    ) -> RolloutActions:
        """Return the columns [T, B] that were found, and actions [T, B, D], with their distributions and the environments' results."""
        heads, count, by_head = self.heads, len(self.heads.logits) + len(self.heads.means), dict[str, Tensor]()
        if actions is not None and (count < 2 or actions.shape[-1] >= count):
            # without distributions in acting, a single distribution in training is of the same head
            names = head_names(max(1, count))
            whole = not actions.is_floating_point() or bool((actions == actions.round()).all())
            by_head = head_actions(actions, names, heads.means if count or whole else names, log_probs.shape)
        bounds = transitions = None
        if self.steps is not None:
            bounds = self.steps.bounds(actions) if count < 2 and actions is not None else None
            transitions = None if observations is None else self.steps.transitions(observations, actions)
        return RolloutActions(
            log_probs=log_probs.clone(),
            actions=by_head,
            ended=ended,
            rewards=None if rewards is None else rewards.clone(),
            bounds={} if bounds is None else {name: bounds.to(by_head[name]) for name in by_head if name in heads.means or not count},
            observations=observations,
            transitions=transitions,
            range_use=None if self.steps is None or bounds is not None else self.steps.range_use,
            **{name: column for name, column in heads._asdict().items() if name != "action_masks"},
        )


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


class RowFinder:
    """Finds the rollout's transitions for the rows of minibatches, by numbers that both have.

    Args:
        columns: of the rollout [T, B], by role.
    """

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self._columns = {name: column.reshape(-1).double() for name, column in columns.items()}
        self._limits = {name: SAME_NUMBER * float(column.abs().max()) for name, column in self._columns.items()}
        self._apart = {  # how many numbers of a column are not the same as the next larger one
            name: int((column.sort().values.diff() > self._limits[name]).sum()) for name, column in self._columns.items()
        }
        self._shape = next(iter(columns.values())).shape
        self._turns = Counter[int]()

    def rows_of(self, columns: Mapping[str, Tensor | None], indices: Sequence[Tensor] = ()) -> Tensor | None:
        """Return the transitions [N] of a minibatch, counted time by time; None if they are not certain.

        A script may mix up one of its columns: then most other columns decide.

        Args:
            columns: [N] each, numbers of the minibatch by role; None for unknown columns.
            indices: [N] each, whole numbers of the script that may be its rows, perhaps counted one environment after the other.
        """
        known = {name: column for name, column in columns.items() if column is not None and name in self._columns}
        own = {name: column.reshape(-1).double().to(self._columns[name].device) for name, column in known.items()}
        steps, envs = self._shape
        if any(len(column) == steps * envs for column in own.values()):  # the whole rollout, perhaps in order
            indices = [*indices, torch.arange(steps * envs)]
        by_env = (index % steps * envs + index.div(steps, rounding_mode="floor") for index in indices)
        best, agreement, candidates = None, 0, list[Tensor]()
        for rows in (rows for pair in zip(indices, by_env, strict=True) for rows in pair):
            if agreement < len(own) and not any(rows.device == other.device and torch.equal(rows, other) for other in candidates):
                candidates.append(rows)
                count = self._agreement(rows, own)
                best, agreement = (rows, count) if count > agreement else (best, agreement)
        if agreement > 1 or (agreement and len(own) < 3):
            return best
        by_numbers = self._rows_by_numbers(own)  # the rows of a single column may be the mistake
        return best if by_numbers is None and agreement else by_numbers

    def _rows_by_numbers(self, own: Mapping[str, Tensor]) -> Tensor | None:
        """Return the transitions [N] with the numbers of a minibatch's columns; None if they are not certain."""
        enough = self._shape.numel() // 2
        matches: list[tuple[Tensor, dict[int, list[int]]]] = []
        for name in COLUMNS:  # that distinguish most transitions
            match = self._matches(name, own) if name in own and self._apart[name] > enough else None
            if match is not None:
                shares = [float((match[0] == other).double().mean()) for other, _ in matches if len(other) == len(match[0])]
                if any(share >= MIN_SAME_ROWS for share in shares):  # the same, up to some that are equal
                    return self._in_turns(*match)
                matches.append(match)
        if matches:
            return self._in_turns(*matches[0]) if len(matches) == 1 else None
        for name in sorted(own, key=lambda name: -self._apart[name]):
            match = self._matches(name, own)
            if match is not None:
                return self._in_turns(*match)
        return None

    def _agreement(self, rows: Tensor, own: Mapping[str, Tensor]) -> int:
        """Return the number of columns of a minibatch whose numbers these transitions have."""
        names = [name for name, column in own.items() if len(column) == len(rows)]
        if not names or int(rows.min()) < 0 or int(rows.max()) >= self._shape.numel():
            return 0
        apart = torch.stack([own[name] - self._columns[name][rows.to(own[name].device)] for name in names]).abs()
        limits = apart.new_tensor([self._limits[name] for name in names]).unsqueeze(1)
        return int(((apart <= limits).double().mean(1) >= MIN_SHARE).sum())

    def rows_of_advantages(self, used: Tensor, rows: Tensor, indices: Sequence[Tensor]) -> Tensor | None:
        """Return the transitions [N] that the advantages in use are of, perhaps normalised, if they are others than `rows`."""
        column = self._columns["advantages"]
        own = used.reshape(-1).double().to(column.device)
        if line_error(column[rows.to(column.device)], own) <= SAME_LINE:
            return None
        within = (one for one in indices if len(one) == len(own) and int(one.max()) < len(column))
        known = next((one for one in within if line_error(column[one.to(column.device)], own) <= SAME_LINE), None)
        other = self.rows_of({"advantages": own}) if known is None else known
        return None if other is None or torch.equal(other.to(rows), rows) else other

    def _matches(self, first: str, own: Mapping[str, Tensor]) -> tuple[Tensor, dict[int, list[int]]] | None:
        """Return the transitions with these numbers in one column, and by place all equal transitions.

        If several have a number, the nearest in all columns are returned.
        """
        table, order = self._columns[first].sort(stable=True)
        limit = self._limits[first]
        low = torch.searchsorted(table, (own[first] - limit).contiguous())
        high = torch.searchsorted(table, (own[first] + limit).contiguous(), right=True)
        counts = high - low
        several = (counts > 1).nonzero().reshape(-1)
        if bool((counts == 0).any()) or len(several) > MAX_SHARED_NUMBERS:
            return None
        equal = dict[int, list[int]]()
        if len(several):
            for places in several.split(max(1, MAX_CANDIDATES // int(counts.amax()))):
                self._add_nearest(equal, own, places, low[places], counts[places], order)
        return order[low], equal

    def _add_nearest(
        self, equal: dict[int, list[int]], own: Mapping[str, Tensor], places: Tensor, low: Tensor, counts: Tensor, order: Tensor
    ) -> None:
        """Add the nearest transitions of some places, whose candidates are `counts` entries of `order` from `low` on."""
        owner = torch.arange(len(places), device=places.device).repeat_interleave(counts)
        first = counts.cumsum(0) - counts
        candidates = order[(low - first)[owner] + torch.arange(len(owner), device=owner.device)]
        distances = torch.zeros_like(candidates, dtype=torch.float64)
        for name, column in own.items():
            apart = (self._columns[name][candidates] - column[places][owner]).abs()
            # A column counts once, however large the difference: in a permuted column, another row's number may be the nearest.
            distances += (apart / max(self._limits[name], torch.finfo(apart.dtype).tiny)).clamp(max=1.0)
        nearest = torch.full_like(places, torch.inf, dtype=torch.float64).scatter_reduce(0, owner, distances, "amin")
        kept = distances == nearest[owner]
        for place, candidate in zip(places[owner[kept]].tolist(), candidates[kept].tolist(), strict=True):
            equal.setdefault(place, []).append(candidate)

    def _in_turns(self, rows: Tensor, equal: Mapping[int, list[int]]) -> Tensor:
        """Return the transitions. Equal ones are used in turn, because a pass has each of them once."""
        used = []
        for candidates in equal.values():
            used.append(candidates[self._turns[candidates[0]] % len(candidates)])
            self._turns[candidates[0]] += 1
        rows[rows.new_tensor([*equal])] = rows.new_tensor(used)
        return rows


def is_same(column: Tensor, array: Tensor) -> bool:
    """Return True if an array has the numbers of a column in its order."""
    if array.numel() != column.numel():
        return False
    limit = SAME_NUMBER * float(column.abs().max())
    return bool(((array.reshape(-1).to(column) - column.reshape(-1)).abs() <= limit).all())


def is_less_a_number(column: Tensor, array: Tensor) -> bool:
    """Return True if a column equals an array minus one number that is not 0."""
    if array.numel() != column.numel():
        return False
    less, limit = array.reshape(-1).to(column) - column.reshape(-1), SAME_NUMBER * float(array.abs().max())
    return float(less.amax() - less.amin()) <= 2 * limit < float(less.abs().amax())


def in_size_order(array: Tensor) -> Tensor:
    """Return all numbers [R], float64, the smallest first."""
    return array.reshape(-1).double().sort().values


def shares_held(numbers: Tensor, tables: Tensor) -> list[float]:
    """Shares of these numbers [N] that sorted tables [K, R] hold, up to rounding; 0 if a table is not finite, which its ends show."""
    among = are_among(numbers, tables, SAME_NUMBER).double().mean(1)
    shares: list[float] = (among * tables[:, [0, -1]].isfinite().all(1)).tolist()
    return shares


def varies(array: Tensor) -> bool:
    """Return True unless all numbers are equal."""
    return bool((array != array.reshape(-1)[0]).any())


def summands(sums: Tensor, paid: Tensor, ended: Tensor) -> Tensor | None:
    """Return the rewards [T, B] whose discounted sums an array holds, scaled as the script scales them; None for another array.

    Scripts turn their rewards into returns in place.
    """
    inside = ~ended[: len(sums) - 1]
    if not varies(sums) or sums.shape != paid.shape or int(inside.sum()) < MIN_SUMMED:
        return None
    now, later, own = (column[inside].double() for column in (sums[:-1], sums[1:], paid[:-1]))
    factors = torch.stack([later, own, torch.ones_like(own)], 1)
    if not bool(torch.isfinite(factors).all() & torch.isfinite(now).all()):
        return None
    gamma, scale, offset = solution = torch.linalg.lstsq(factors, now.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    error = (factors @ solution - now).abs().amax() / now.abs().amax()
    is_sum = LEAST_DISCOUNT < float(gamma) <= 1 + SAME_LINE and float(scale) >= 0 and float(error) <= SAME_LINE
    return (scale * paid.double() + offset).to(sums) if is_sum else None
