"""The rollout that a script learns from: its own arrays, recognised by where their numbers come from and go to.

Taps record rewards, ends of episodes, the network's outputs in acting, and the rows by which the script indexed its arrays. The
loss of the first minibatch, before any step, shows its log-probabilities, values, returns and advantages. The arrays with these
numbers are the script's columns, independent of their names. A name decides only between arrays with the same numbers.

Shapes: T steps, B environments, R = T B transitions, N rows of a minibatch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.adapters.columns import next_values
from esper_telemetry.adapters.script.autograd_graph import SAME_LINE, line_error
from esper_telemetry.adapters.script.loss_reading import LossReading
from esper_telemetry.adapters.script.network_logs import Asked, LastEstimate
from esper_telemetry.adapters.script.observed_steps import ObservedSteps
from esper_telemetry.adapters.script.variables import Variables, as_number, stacked
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

MAX_ARRAYS = 128
"""Arrays of a rollout's size that are compared."""

SAME_NUMBER = 4e-6
"""Largest difference between equal numbers that were recomputed from sums in single precision, relative to the largest number."""

MIN_SUMMED, LEAST_DISCOUNT = 8, 0.5
"""Steps within episodes, and the discount, from which an array of discounted sums is recognised."""

MIN_SHARE = 0.99
"""Share of a minibatch's numbers that its source array must hold."""

MAX_SHARED_NUMBERS = 1 << 14
"""Largest number of a minibatch's rows with several possible transitions that are resolved one by one."""

MAX_CANDIDATES = 1 << 20
"""Largest number of possible transitions that are compared at once."""

MIN_SAME_ROWS = 0.75
"""Share of a minibatch's rows in which two columns must agree if they identify the same transitions."""

MAX_LONG_ARRAY = 1 << 18
"""Numbers of an array in which the advantages are sought, if no array of the rollout's size has them."""

MIN_DISTINCT = 8
"""Number of distinct numbers above which finding them in an array is not a coincidence."""

NEARLY_CONSTANT = 0.01
"""Standard deviation of values, relative to that of the returns, up to which returns and advantages differ by an offset."""

COLUMNS = ("inputs", "log_probs", "values", "returns", "advantages")
"""Columns of a rollout that its minibatches have too; `inputs` are checksums of observations."""

LOG_PROB_FORMS: tuple[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], ...] = (
    (lambda numbers: numbers, lambda numbers: numbers),
    (torch.exp, torch.log),
    (torch.neg, torch.neg),
)
"""Forms in which scripts store log-probabilities, and the way back: themselves, probabilities, and negative ones."""


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
        return stored.to(targets) if any(_is_same(own, targets) for own in others) else targets


class RolloutFinder:
    """Finds the parts of a script's current rollout.

    Args:
        variables: of the script.
        collected: steps since the previous rollout, as the environments returned them; None if they are not known.
        reading: of the loss of the first minibatch, before any step.
        indices: whole numbers [N] by which the script took the rows of that minibatch, if they are known.
        indexed: addresses of the tensors from which it took rows.
        estimates: outputs of the critic that may be in no variable any more.
        critic: those that are surely the critic's, if the loss is of the policy only.
        acting_values: outputs [T, B] of the only layer with one unit in acting.
        last_estimates: outputs after the last step of the environments.
        acted: log-probabilities and actions of the steps in the order in which they were taken, if they are known.
        targets: names of the variable with the targets of the critic's own loss.
        has_critic: a layer of the script may be a critic.

    Attributes:
        has_critic: False if neither the script's layers nor the loss have one: all values are 0, and advantages are sums of rewards.
        in_longer_array: the advantages of the loss, of the whole rollout, are the first numbers of an array with more of them.
    """

    def __init__(
        self,
        variables: Variables,
        collected: ObservedSteps | None = None,
        *,
        reading: LossReading | None = None,
        indices: Sequence[Tensor] = (),
        indexed: Collection[int] = (),
        estimates: Sequence[Tensor] = (),
        critic: Sequence[Tensor] = (),
        acting_values: Tensor | None = None,
        last_estimates: Sequence[LastEstimate] = (),
        acted: Sequence[Asked] = (),
        targets: tuple[str, ...] = (),
        has_critic: bool = True,
    ) -> None:
        self._variables, self._indices, self._targets = variables, indices, targets
        self._indexed = indexed
        self._device = None if reading is None else reading.total.device  # all is compared there, where minibatches are
        self._estimates, self._last_estimates, self._critic, self._acting_values = estimates, last_estimates, critic, acting_values
        self._shown: Mapping[str, Tensor | None] = {} if reading is None else reading.columns()
        by_dimension = None if reading is None or reading.policy is None else reading.policy.log_ratios
        self._dimensions = 1 if by_dimension is None else by_dimension.shape[1]  # log-probabilities of each are summed
        self._env_major = False
        self._order: Tensor | None = None  # [R], transitions of the entries of arrays that the script has shuffled
        self._entries: Tensor | None = None  # [N], of these arrays that are the rows of the first minibatch
        self._mixed = False  # columns are shuffled in a way that the numbers do not show
        self._grids: list[Tensor] = []
        self._names: dict[int, str] = {}
        self._with_graph: set[int] = set()
        self.has_critic = has_critic or reading is None or reading.value is not None
        self._has_ratio = reading is None or reading.policy is None or reading.policy.log_ratio is not None
        self._columns: dict[str, Tensor] = {}
        self.steps = self.envs = 0
        self.in_longer_array = False
        self._cut, self._received = False, None
        self.ended = self._paid = self._limits = self._reset = None
        if collected is not None:
            self.steps, self.envs, self._cut, self._received = collected.steps, collected.envs, collected.cut, collected.received
            columns = (collected.ended, collected.rewards, collected.time_limits, collected.reset)
            self.ended, self._paid, self._limits, self._reset = (column.to(self._device) for column in columns)
            acted = acted if collected.in_turns else ()
        else:
            self._find_ends()
        numbers = torch.cat([one.log_probs.reshape(-1) for one in acted]).to(self._device) if acted else torch.empty(0)
        whole = len(numbers) and self.steps and not len(numbers) % (self.steps * self.envs)
        self._acted = numbers.reshape(self.steps, self.envs, -1).sum(-1) if whole else None
        self._taken = [one.actions for one in acted if one.actions is not None]
        if self.ended is not None:
            arrays = list(self._arrays()) if reading is not None else []
            self._env_major = self._is_env_major([array for _, array in arrays])
            named = [(name, array, grid) for name, array in arrays if (grid := self._as_grid(array)) is not None]
            pairs = [(array, grid) for _, array, grid in named]
            self._grids = [grid for _, grid in pairs]
            self._names = {grid.data_ptr(): name for name, _, grid in reversed(named)}
            self._identify(pairs)
        self.rewards, self.log_probs = self._columns.get("rewards"), self.find("log_probs")
        self.log_probs = self._acted if self.log_probs is None else self.log_probs

    def _find_ends(self) -> None:
        """Take the shape of a rollout whose environments are hidden, and its ends, from arrays with such names."""
        rewards = self._variables.find(NAMES["rewards"], _as_table)
        if rewards is None:
            return
        self.steps, self.envs = int(rewards.shape[0]), int(rewards.shape[1])
        dones = self._variables.find(NAMES["dones"], self._in_grid)
        next_done = self._variables.find(NAMES["next_done"], partial(self._in_grid, steps=1))
        if dones is not None:  # with a flag of the step after the last, `dones[t]` says that step t begins an episode
            self.ended = (dones if next_done is None else torch.cat([dones[1:], next_done])).bool()

    # arrays by what they hold

    def _arrays(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the arrays of a rollout's size with their names, in the script's shapes."""
        size, visited = self.steps * self.envs, set[tuple[int, torch.Size]]()
        sizes = {count * dims for count in (size, size + self.envs) for dims in (1, self._dimensions)}
        for name, value in chain(self._variables.named_values(), (("", one) for one in self._estimates)):
            if isinstance(value, list | tuple | deque) and _entries(value) not in sizes:
                continue  # without stacking what a script logs
            array = stacked(value)
            if array is not None and self._dimensions > 1 and array.shape[-1:] == (self._dimensions,):
                array = array.sum(-1)
            if array is None or array.numel() not in (size, size + self.envs) or array.numel() < 2:
                continue
            if isinstance(value, Tensor) and value.requires_grad:
                self._with_graph.add(array.data_ptr())
            key = (array.data_ptr(), array.shape)
            if key not in visited:
                visited.add(key)
                yield name, array.to(self._device)
            if len(visited) >= MAX_ARRAYS:
                return

    def _free(self) -> list[Tensor]:
        """Arrays [T, B] that are not yet assigned to a column."""
        whole = (grid for grid in self._grids if len(grid) == self.steps)
        return [grid for grid in whole if not self._is_taken(grid) and not self._is_product(grid)]

    def _is_product(self, array: Tensor) -> bool:
        """Return True for an array with a graph if there is a ratio: advantages times a ratio of 1 equal the advantages."""
        return array.data_ptr() in self._with_graph and self._has_ratio

    def _is_taken(self, grid: Tensor) -> bool:
        """Return True for an array in the memory of a column."""
        return any(grid.data_ptr() == one.data_ptr() for one in self._columns.values())

    def _identify(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Find the columns from the inputs of the first minibatch's loss."""
        columns, grids = self._columns, [grid[: self.steps].reshape(-1).double() for grid in self._grids]
        tables = torch.stack(grids).sort().values if grids else torch.empty(0, 1, dtype=torch.float64, device=self._device)
        is_permuted = self._identify_shown(pairs, tables, ("log_probs", "values", "advantages"))
        self._restore_order(tables)
        self._identify_advantages()
        # last: a loss may have another of these columns for its targets
        is_permuted |= self._identify_shown(pairs, tables, ("returns",))
        self._put_in_time("returns")
        self._identify_acting_values()
        values = columns.get("values")
        if values is not None and len(values) == self.steps:
            longer = (grid for grid in self._grids if len(grid) == self.steps + 1 and torch.equal(grid[:-1], values))
            columns["values"] = next(longer, values)
        for role in () if is_permuted else ("values", "log_probs")[: 1 if self._has_ratio else 2]:
            column = self._shown.get(role)  # the script stores none: use its only minibatch
            if role not in columns and column is not None and column.numel() == self.steps * self.envs:
                whole = self._as_grid(column)
                columns |= {} if whole is None else {role: whole}
        if "advantages" not in columns and not is_permuted:
            columns |= self._advantages_of_loss(pairs)
            self.in_longer_array = self._are_in_longer_array()
        if "returns" not in columns:  # the loss has another column for targets, or the critic has a separate loss
            known = self._variables.find(self._targets, self._free_grid)  # before others: a list of all returns may have this length once
            named = self._variables.find(NAMES["returns"], self._free_grid) if known is None else known
            columns |= {} if named is None else {"returns": self._nearer_in_time(named)}
        self._identify_implied_values()
        self._identify_rewards()
        if "returns" not in columns and self._paid is not None and self.ended is not None:  # sums that a later loss reads
            sums = next((grid for grid in self._free() if _summands(grid, self._paid, self.ended) is not None), None)
            columns |= {} if sums is None else {"returns": sums}
        self._identify_next_values()
        if "log_probs" not in columns and self._has_ratio and self._acted is None:
            # the loss does not show them: the only other numbers of which it takes rows
            free = [grid for grid in self._free() if grid.data_ptr() in self._indexed]
            free = [grid for grid in free if not torch.equal(grid, grid.round()) and not self._is_executed(grid)]
            columns |= {"log_probs": free[0]} if len(free) == 1 else {}

    def _identify_shown(self, pairs: Sequence[tuple[Tensor, Tensor]], tables: Tensor, roles: Sequence[str]) -> bool:
        """Find the arrays, with [T, B] of them, and sorted in `tables`, that hold the numbers of the first minibatch.

        Returns True if that is the whole rollout in another order.
        """
        columns, in_order, is_permuted = self._columns, set[str](), False
        for role in roles:
            column = self._shown.get(role)
            for form, way_back in LOG_PROB_FORMS[: 3 if role == "log_probs" else 1]:
                if column is None or role in columns:
                    continue
                numbers = form(column).reshape(-1).double()
                if len(numbers.unique()) < min(MIN_DISTINCT, len(numbers)):
                    continue
                shares = _held(numbers, tables)
                ordered = _sorted(numbers)
                best = min(
                    (
                        # few different numbers may all be in other arrays, too, but not as often
                        (share >= MIN_SHARE and _is_same(form(column), array), -share, place, not _is_same(ordered, table))
                        for place, ((array, grid), table, share) in enumerate(zip(pairs, tables, shares, strict=True))
                        if not self._is_taken(grid)
                        and not (role == "advantages" and self._is_product(array))
                        and (len(grid) == self.steps or role == "values")  # which may have those after the rollout
                    ),
                    default=(False, 0.0, 0, False),
                    key=lambda one: (one[1] > -MIN_SHARE, one[3], *one),
                )
                if -best[1] >= MIN_SHARE:
                    columns[role] = way_back(pairs[best[2]][1])
                    if role == "values":  # a minibatch may have no state without the value of the state before it
                        held = (grid for (_, grid), share in zip(pairs, shares, strict=True) if share >= MIN_SHARE)
                        columns[role] = next((grid for grid in held if self._follows(columns[role], grid)), columns[role])
                    in_order |= {role} if best[0] else set()
                    is_permuted |= not best[0] and column.numel() == self.steps * self.envs
        in_time = "log_probs" in in_order and self._acted is not None and _is_same(self._acted, columns["log_probs"])
        is_permuted = is_permuted and not in_time  # else only this column has the order of others
        if is_permuted:  # a minibatch of the whole rollout: arrays in its order are its own
            for role in in_order:
                del columns[role]
        return is_permuted

    def _restore_order(self, tables: Tensor) -> None:
        """Put columns that the script has shuffled together back into the order in which actions were taken.

        A shuffled array has all log-probabilities in another order, and its rows match the minibatch in other columns too.
        """
        own, acted, columns = self._shown.get("log_probs"), self._acted, self._columns
        if own is None or acted is None:
            return
        numbers = _sorted(acted)
        mixed = (
            way_back(grid)
            for form, way_back in LOG_PROB_FORMS
            for stored in (_sorted(form(acted)),)
            for grid, table in zip(self._grids, tables, strict=True)
            if len(grid) == self.steps and _is_same(stored, table)
        )
        shuffled = next((grid for grid in mixed if not _is_same(acted, grid)), None)
        if shuffled is None:
            return
        columns["log_probs"] = acted
        self._order = RowFinder({"log_probs": acted}).rows_of({"log_probs": shuffled})
        self._entries = RowFinder({"log_probs": shuffled}).rows_of({"log_probs": own})
        self._mixed = self._order is None or self._entries is None or not bool(numbers.diff().all())
        for role in ("values", "advantages"):
            self._put_in_time(role)

    def _put_in_time(self, role: str) -> None:
        """Put a column that the script has shuffled with its log-probabilities back into the order of time."""
        column = self._columns.get(role)
        if column is not None and len(column) == self.steps and not self._mixed:
            self._columns[role] = self._in_time(column.reshape(-1), self._shown.get(role)).reshape(column.shape)

    def _nearer_in_time(self, returns: Tensor) -> Tensor:
        """Return the returns [T, B] of a critic whose minibatches come later, in the order that is nearer to values plus advantages:
        as they are, or without the shuffle of the other columns.
        """
        values, advantages = self._columns.get("values"), self._columns.get("advantages")
        if self._order is None or self._mixed or values is None or advantages is None or len(returns) != self.steps:
            return returns
        expected = advantages.to(returns) + values[: self.steps].to(returns)
        in_time = torch.empty_like(returns.reshape(-1)).index_copy_(0, self._order, returns.reshape(-1))
        orders = (returns, in_time.reshape(returns.shape))
        return min(orders, key=lambda one: float((one - expected).square().sum()))

    def _in_time(self, array: Tensor, rows: Tensor | None) -> Tensor:
        """Return an array [R, ...] in the order of time: itself unless it has the minibatch's rows [N, ...] where a shuffle puts them."""
        if self._order is None or self._entries is None or rows is None:
            return array
        if rows.numel() != len(self._entries) * array[0].numel():
            return array
        rows = rows.reshape(-1, *array.shape[1:]).to(array)
        limit = SAME_NUMBER * float(array.abs().max())
        in_time, mixed = (
            float(((array[places] - rows).abs() <= limit).double().mean()) for places in (self._order[self._entries], self._entries)
        )
        if mixed < MIN_SHARE or in_time >= MIN_SHARE:
            return array
        return torch.empty_like(array).index_copy_(0, self._order, array)

    def _identify_advantages(self) -> None:
        """Find the advantages before normalisation, which differ from the advantages in use by a factor and an offset."""
        columns, own = self._columns, self._shown.get("advantages")
        used = columns.get("advantages")
        if used is not None:  # normalised before the passes: the array from before may be there too
            raw = [grid for grid in self._free() if not torch.equal(grid, used) and line_error(grid, used) <= SAME_LINE]
            columns["advantages"] = raw[0] if len(raw) == 1 and not self._are_returns(raw[0]) else used
            return
        known: dict[str, Tensor] = {role: columns[role][: self.steps] for role in ("log_probs", "values", "returns") if role in columns}
        rows = RowFinder(known).rows_of({role: self._shown[role] for role in known}) if known else None
        size = self.steps * self.envs
        for taken in (rows, *self._indices):
            if taken is not None and own is not None and len(taken) == own.numel() and int(taken.max()) < size:
                grids = [grid for grid in self._free() if line_error(grid.reshape(-1)[taken], own) <= SAME_LINE]
                targets = self._shown.get("returns")
                if grids and targets is not None and _is_less_a_number(own, targets):  # their baseline is one number
                    whole = torch.empty_like(own.reshape(-1)).index_copy(0, taken.to(own.device), own.reshape(-1))
                    columns |= {"advantages": whole.reshape(self.steps, self.envs)} if own.numel() == size else {}
                    return
                if grids:
                    columns["advantages"] = grids[0]
                    return

    def _are_returns(self, raw: Tensor) -> bool:
        """Return True for the targets of a loss whose values hardly vary: its advantages are the targets up to an offset."""
        targets, values = self._shown.get("returns"), self._columns.get("values")
        if targets is None or values is None or float(values.std()) > NEARLY_CONSTANT * float(raw.std()):
            return False
        return _held(targets.reshape(-1).double(), _sorted(raw)[None])[0] >= MIN_SHARE

    def _advantages_of_loss(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """Return the advantages of a loss over the whole rollout, if the script keeps none, in the order of its log-probabilities."""
        own, log_probs = self._shown.get("advantages"), self._columns.get("log_probs")
        if own is None or log_probs is None or own.numel() != self.steps * self.envs:
            return {}
        arrays = (array for array, grid in pairs if grid.data_ptr() == log_probs.data_ptr() and array.numel() == own.numel())
        array = next(arrays, log_probs)
        shown = self._shown.get("log_probs")
        if shown is None or not _is_same(shown, array):
            return {}
        grid = self._as_grid(own.reshape(array.shape))
        return {} if grid is None else {"advantages": grid}

    def _are_in_longer_array(self) -> bool:
        """Return True for advantages of the whole rollout that are the first numbers of an array with different numbers after them."""
        own, size = self._shown.get("advantages"), self.steps * self.envs
        if own is None or own.numel() != size or len(own.unique()) < MIN_DISTINCT:
            return False
        for _, value in self._variables.named_values():
            if isinstance(value, list | tuple | deque) and not size < _entries(value) <= MAX_LONG_ARRAY:
                continue  # without stacking what a script logs
            array = stacked(value)
            if array is None or not size + self.envs < array.numel() <= MAX_LONG_ARRAY:
                continue
            numbers = array.reshape(-1).to(own)
            if _is_same(numbers[:size], own.reshape(-1)) and len(numbers[size:].unique()) > 1:
                return True
        return False

    def _identify_acting_values(self) -> None:
        """Find the values of acting if training uses another critic: their last row is its output before the last step."""
        outputs = [one.before for one in self._last_estimates if one.before is not None]
        held = [grid for grid in self._grids if any(_is_same(output, grid[self.steps - 1]) for output in outputs)]
        free = [grid for grid in held if any(grid is one for one in self._free())]
        is_acting = any(grid is self._columns.get("values") for grid in held)
        self._columns |= {"values": free[0]} if len(free) == 1 and not is_acting else {}
        if "values" not in self._columns and self._shown.get("values") is None:
            own = [grid for grid in self._free() if any(_is_same(one.to(grid), grid) for one in self._critic)]
            following = (grid for grid in own if any(self._follows(other, grid) for other in own))
            self._columns |= {"values": next(following, own[-1])} if own else {}  # earlier ones may be of the previous rollout
        acted = self._acting_values
        if "values" not in self._columns and acted is not None:  # the loss has other ones, such as of other inputs
            unused = (grid for grid in self._grids if not self._is_taken(grid))
            stored = next((grid for grid in unused if _is_same(acted.to(grid), grid[: self.steps])), None)
            self._columns |= {} if stored is None else {"values": stored}

    def _is_executed(self, grid: Tensor) -> bool:
        """Return True for the actions that the environments received, perhaps clipped."""
        received = None if self._received is None else self._received.squeeze(-1).to(grid)
        return received is not None and received.shape == grid.shape and _is_same(grid.clamp(received.min(), received.max()), received)

    def _identify_implied_values(self) -> None:
        """Take returns minus advantages for values that the script does not keep, if the critic gives them in the first minibatch.

        Advantages may be normalised: the minibatch shows by which mean and scale.
        """
        returns, advantages, shown = self._columns.get("returns"), self._columns.get("advantages"), self._shown.get("values")
        if "values" in self._columns or returns is None or advantages is None or shown is None:
            return
        rows = self.first_rows()
        if rows is None or len(rows) != shown.numel():
            return
        rows, own = rows.to(returns.device), advantages.to(returns).double()
        targets, known = (returns.reshape(-1)[rows] - shown.reshape(-1).to(returns)).double(), own.reshape(-1)[rows]
        scale, centred = torch.ones((), dtype=torch.float64), known - known.mean()
        if line_error(known, targets) <= SAME_LINE and len(rows) > MIN_DISTINCT:
            scale = (centred * targets).sum() / centred.square().sum()
        raw = scale * own + (targets - scale * known).mean() * bool(scale != 1)
        if float((raw.reshape(-1)[rows] - targets).abs().max()) <= SAME_NUMBER * float(returns.abs().max()):
            self._columns["values"] = (returns - raw).to(returns)

    def _free_grid(self, value: object) -> Tensor | None:
        """Accept an array [T, B] that is not yet assigned to a column: a script may call its returns rewards."""
        grid = self._in_grid(value)
        taken = grid is None or any(torch.equal(grid, one[: self.steps]) for one in self._columns.values())
        return None if taken else grid

    def _identify_rewards(self) -> None:
        """Find the array with the environments' rewards, perhaps scaled; else one with such a name, else the environments' rewards."""
        named, paid = self._variables.find(NAMES["rewards"], self._free_grid), self._paid
        if paid is not None:
            if named is not None and not _varies(named) and (_varies(paid) or not bool(named.any())):
                named = None  # a buffer that is empty again, or a mistake, which the advantages show
            free = self._free()
            same = [grid for grid in free if torch.equal(grid.float(), paid.float())]
            scaled = [grid for grid in free if line_error(grid, paid) <= SAME_LINE]
            exact = self._variables.find(
                NAMES["rewards"], lambda value: grid if (grid := self._free_grid(value)) is not None and _is_same(paid, grid) else None
            )
            if exact is not None:
                named = exact
            elif same and (named is None or _varies(paid)):  # flags may have the numbers of constant rewards
                named = same[0]
            elif named is None:
                named = scaled[0] if scaled else paid.float()
        if named is not None and paid is not None and self.ended is not None:
            summands = _summands(named, paid, self.ended)
            named = named if summands is None else summands
        self._columns |= {} if named is None else {"rewards": named}

    def _identify_next_values(self) -> None:
        """Find the values of the next states: equal to the next step's values within episodes, or 0 except at time limits."""
        values, limits = self._columns.get("values"), self._limits
        if values is None or self.ended is None or self.steps < 2:
            return
        if limits is not None and bool(limits.any()):
            at_limits = (grid for grid in self._free() if torch.equal(grid != 0, limits))
            numbers = [grid for grid in at_limits if not torch.equal(grid, limits.to(grid))]  # no flags
            self._columns |= {"limit_values": numbers[-1]} if numbers else {}
        for grid in self._grids:
            if self._follows(grid, values):
                self._columns["next_values"] = grid
        self._separate_bootstraps()

    def _separate_bootstraps(self) -> None:
        """Take the environments' rewards instead of stored ones that differ by a multiple of the next values, after ends only."""
        stored, following, paid = self._columns.get("rewards"), self._columns.get("next_values"), self._paid
        if stored is None or following is None or paid is None or self.ended is None or len(stored) != len(following):
            return
        added = stored.double() - paid
        rows = added.abs() > SAME_NUMBER * added.abs().max()
        factors = (added / following)[rows]
        if bool(rows.any()) and not bool((rows & ~self.ended).any()):
            spread = float(factors.amax() - factors.amin())
            self._columns["rewards"] = paid.float() if spread <= SAME_LINE * float(factors.abs().amax()) else stored

    def _follows(self, grid: Tensor, values: Tensor) -> bool:
        """Return True for another array [T, B] that has the values of the next step within episodes."""
        if self.ended is None or not len(grid) == len(values) == self.steps or torch.equal(grid, values):
            return False
        difference = (grid[:-1] - values[1:]).abs()[~self.ended[:-1].to(values.device)]
        limit = SAME_NUMBER * max(1.0, float(values.abs().max()))
        return bool(difference.numel()) and float(difference.max()) <= limit

    def _shows_next_episodes(self, following: Tensor, values: Tensor) -> bool:
        """Return True if the estimates after time limits are of the first states of the next episodes, not of the last states."""
        if self._limits is None or self._reset is None or not len(following) == len(values) == self.steps:
            return False
        limits = (self._limits & self._reset)[:-1]
        return bool(limits.any()) and torch.equal(following[:-1][limits].to(values), values[1:][limits])

    def _is_env_major(self, arrays: Sequence[Tensor]) -> bool:
        """Return True if flat arrays hold one environment after the other: those known as [T, B] too show it.

        A first minibatch of the whole rollout may be such an array.
        """
        size = self.steps * self.envs
        if 1 in (self.steps, self.envs):
            return False
        shown = [column for column in self._shown.values() if column is not None]
        flat = [array.float().reshape(-1) for array in (*arrays, *shown) if array.numel() == size in array.shape]
        shapes = [[one for one in array.shape if one != 1] for array in arrays]
        grids = [array for array, shape in zip(arrays, shapes, strict=True) if shape == [self.steps, self.envs]]
        if self.steps != self.envs:
            columns = (array for array, shape in zip(arrays, shapes, strict=True) if shape == [self.envs, self.steps])
            grids += [array.reshape(self.envs, self.steps).T for array in columns]
        grids += [one for one in (self._paid, self._acted, self.ended) if one is not None]
        grids += [] if self._acted is None else [-self._acted]
        votes = 0
        for grid in grids:
            by_time, by_env = (one.reshape(-1).float() for one in (grid, grid.reshape(self.steps, self.envs).T))
            if not torch.equal(by_time, by_env):
                votes += sum(torch.equal(one, by_env) - torch.equal(one, by_time) for one in flat)
        return votes > 0

    def _as_grid(self, array: Tensor) -> Tensor | None:
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
        return array.reshape(envs, steps).T if self._env_major else array.reshape(steps, envs)

    def _in_grid(self, value: object, steps: int | None = None) -> Tensor | None:
        """Accept an array of R numbers, as [T, B]; of another number of steps, as [T + 1, B] or [1, B]."""
        array, steps = stacked(value), self.steps if steps is None else steps
        if array is None or array.dim() == 0 or not self.steps or array.numel() != steps * self.envs:
            return None
        array = array.to(self._device)
        return array.reshape(1, self.envs) if steps == 1 else self._as_grid(array)

    def _as_last_row(self, value: object) -> Tensor | None:
        """Accept values [1, B] of one step, or a number for a single environment."""
        number = as_number(value) if self.envs == 1 else None
        return self._in_grid(value, steps=1) if number is None else torch.tensor([[number]], device=self._device)

    def find(self, role: str) -> Tensor | None:
        """Return a column [T, B] of the rollout: the loss's column, or an array with such a name."""
        column = self._columns.get(role)
        return self._variables.find(NAMES[role], self._in_grid) if column is None else column[: self.steps]

    def names(self) -> dict[str, str]:
        """Return the names of the variables with the columns that were found, by role; empty for a column without a variable."""
        found = {"log_probs": self.log_probs, **self._columns}
        return {role: self._names.get(one.data_ptr(), "") for role, one in found.items() if one is not None}

    # actions and observations

    def actions(self, chosen: Tensor | None) -> Tensor | None:
        """Return a copy of the actions [T, B, D]: an array with such a name or with the minibatch's actions [N, ...], or executed ones."""

        def accept(value: object) -> Tensor | None:
            array = self._by_step(value)
            return None if array is None or array.dim() > 3 else array.reshape(self.steps, self.envs, -1)

        array = self._stored("actions", chosen, accept)
        if array is not None:
            return array.clone()
        return self.acted_actions

    @property
    def acted_actions(self) -> Tensor | None:
        """The actions [T, B, D] whose log-probabilities distributions were asked for in acting, if that was one for each step."""
        whole = len(self._taken) == self.steps > 0 and all(one.numel() % self.envs == 0 for one in self._taken)
        same = len({one.shape for one in self._taken}) == 1
        return torch.stack([one.reshape(self.envs, -1) for one in self._taken]) if whole and same else None

    def observations(self, inputs: Tensor | None) -> Tensor | None:
        """Return the script's observations [T, B, ...]: an array with such a name, or with the inputs [N, ...] of the minibatch."""

        def accept(value: object) -> Tensor | None:
            array = self._by_step(value)
            return array if array is not None and array.dim() > 2 and array[0, 0].numel() > 1 else None

        return self._stored("observations", inputs, accept)

    def _stored(self, role: str, own: Tensor | None, accept: Callable[[object], Tensor | None]) -> Tensor | None:
        """Return the array [T, B, ...] with such a name, else one with the rows [N, ...] of the minibatch, in the order of time."""
        array = self._variables.find(NAMES[role], accept)
        if array is None and own is not None:
            places = [one for one in (self.first_rows(), self._entries) if one is not None]
            values = (value for _, value in self._variables.named_values()) if places else ()
            candidates = (one for value in values if (one := accept(value)) is not None)
            fitting = (one for one in candidates if any(_is_same(own, one.flatten(0, 1)[rows.to(one.device)]) for rows in places))
            array = next(fitting, None)
        return None if array is None else self._in_time(array.flatten(0, 1), own).reshape(array.shape)

    def first_rows(self) -> Tensor | None:
        """Transitions [N] of the first minibatch."""
        if self._order is not None and self._entries is not None:
            return self._order[self._entries]
        known = {role: self._columns[role][: self.steps] for role in COLUMNS if role in self._columns}
        shown = {role: self._shown.get(role) for role in known}
        return RowFinder(known).rows_of(shown, self._indices) if known else None

    def _by_step(self, value: object) -> Tensor | None:
        """Accept an array [T, B, ...] or [R, ...]."""
        array = None if self._mixed else stacked(value)
        if array is None or not self.steps or array.dim() == 0:
            return None
        steps, envs = self.steps, self.envs
        if tuple(array.shape[:2]) in ((steps, envs), (envs, steps)):
            return array if len(array) == steps else array.transpose(0, 1)
        if len(array) != steps * envs:
            return None
        if envs > 1 and self._env_major:
            return array.reshape(envs, steps, *array.shape[1:]).transpose(0, 1)
        return array.reshape(steps, envs, *array.shape[1:])

    # the whole

    def rollout(self, gamma: float | None = None) -> ScriptRollout | None:
        """Return all parts; None if one is missing.

        The discount factor gives the values after the last step if the script does not keep them.
        """
        values, advantages, returns = (self.find(role) for role in ("values", "advantages", "returns"))
        log_probs, ended, rewards = self.log_probs, self.ended, self.rewards
        limits = None if rewards is None or self._pays_at_limits(rewards) else self._limits
        if not self.has_critic and rewards is not None:
            values, returns, gamma = torch.zeros_like(rewards), None, None
        if advantages is None and returns is not None and values is not None:
            advantages = returns - values
        if self._mixed or rewards is None or values is None or advantages is None or log_probs is None or ended is None:
            return None
        values = values if self.has_critic else values.to(advantages)
        rewards, advantages = rewards.to(values), advantages.to(values)
        ended, limits = ended.to(values.device), None if limits is None else limits.to(values.device)
        stored = returns is not None
        returns = advantages + values if returns is None else returns.to(values)
        is_mistaken = torch.equal(returns, advantages) or torch.equal(returns, values)
        implied = None if not gamma else ((advantages + values if is_mistaken else returns) - rewards)[-1] / gamma
        if implied is not None and bool(advantages.any()) and not bool(advantages[-1].any()):
            implied = torch.zeros_like(implied)  # a script that leaves the last row out is to differ from its equation, too
        estimates = bool(self._last_estimates) or "next_values" in self._columns
        if self._cut and implied is not None and not (estimates and float(implied.abs().max()) > SAME_NUMBER):
            ended = ended.clone()
            ended[-1] = True  # the episode ends for the script, too
        last = self._last_values(values, ended, implied)
        if last is None:
            return None
        after = next_values(values, last, ended)
        following = self._columns.get("next_values")
        if following is not None and self._shows_next_episodes(following, values):
            following = None
        final = self._columns.get("limit_values") if following is None else following
        if following is None and final is not None and limits is not None:
            # the rewards may include γ times the values, or values without γ: the numbers do not show which
            added = (returns - rewards - final.to(values))[limits].abs()
            final = None if float(added.max()) <= SAME_NUMBER * float(returns.abs().max()) else final
        if limits is not None and final is not None:
            after = torch.where(limits, final.to(values), after)
        bootstraps = limits is not None and final is not None and bool(limits.any())
        return ScriptRollout(
            rewards=rewards.clone(),
            values=values.clone(),
            advantages=advantages.clone(),
            returns=returns.clone(),
            log_probs=log_probs.clone(),
            ended=ended,
            terminated=ended & ~limits if limits is not None and bootstraps else ended,
            next_values=after,
            last_values=last.clone().reshape(1, self.envs),
            time_limits=None if bootstraps else limits,
            returns_known=stored,
        )

    def _pays_at_limits(self, rewards: Tensor) -> bool:
        """Return True for rewards [T, B] that are those of the environments times a factor, with values added at time limits only."""
        paid, limits = self._paid, self._limits
        if paid is None or limits is None or not bool(limits.any()) or not bool((paid != 0)[~limits].any()):
            return False
        apart = (rewards - (rewards / paid)[(paid != 0) & ~limits].median() * paid).abs() > SAME_LINE * rewards.abs().max()
        return bool(apart[limits].any()) and not bool(apart[~limits].any())

    def _last_values(self, values: Tensor, ended: Tensor, implied: Tensor | None) -> Tensor | None:
        """Values [B] after the last step: from the script's arrays, from the network's outputs, or implied by the last returns."""
        if bool(ended[-1].all()) or not self.has_critic:
            return values[-1]
        whole = self._columns.get("values")
        if whole is not None and len(whole) == self.steps + 1:
            return whole[-1].to(values)
        # of the layer with the earlier values, or of the only layer
        sized = [one for one in self._last_estimates if one.output.numel() == self.envs]
        acting = [one for one in sized if one.before is not None and _is_same(values[-1], one.before)]
        fresh = [one for one in sized if one.before is None]
        certain = acting or (fresh if len(fresh) == 1 else [])
        shown = self._columns.get("next_values")
        if certain:  # a script may also have asked for the value of the state before the step
            agreed = (one for one in certain if shown is not None and _is_same(shown[-1], one.output))
            return next(agreed, certain[0]).output.to(values)
        if shown is not None:
            return torch.where(ended[-1], values[-1], shown[-1].to(values))
        last = self._variables.find(NAMES["last_values"], self._as_last_row)
        # a loop from the last step to the first one keeps the value of one of the first steps under this name
        first = values[: min(2, self.steps - 1)]
        if last is not None and not bool((last.to(values) == first).all(-1).any()):
            return last[0].to(values)
        if implied is None:
            return None
        # R = r + γ V; no critic gives 0: a script that leaves the values out is to differ from its equation
        alive = ~ended[-1]
        is_left_out = bool(alive.any()) and float(implied[alive].abs().max()) <= SAME_NUMBER
        return values[-1] if is_left_out else torch.where(alive, implied, values[-1])


def name_of(column: Tensor, size: int, variables: Variables) -> str:
    """Return the name of the first array of so many numbers that holds a column's numbers, preferably as often; empty without any."""
    numbers, held = _sorted(column), list[str]()
    for name, value in variables.named_values():
        array = stacked(value)
        if array is None or not array.numel() == size > 1:
            continue
        table = _sorted(array.to(column.device))
        if _is_same(numbers, table):
            return name
        held += [name] if _held(numbers, table[None])[0] >= MIN_SHARE else []
    return held[0] if held else ""


def _as_table(value: object) -> Tensor | None:
    """Accept [T, B], also as [T, B, 1]."""
    array = stacked(value)
    array = array.squeeze(-1) if array is not None and array.dim() == 3 and array.shape[-1] == 1 else array
    return array if array is not None and array.dim() == 2 else None


def _varies(array: Tensor) -> bool:
    return bool((array != array.reshape(-1)[0]).any())


def _is_same(column: Tensor, array: Tensor) -> bool:
    """Return True if an array has the numbers of a column in its order."""
    if array.numel() != column.numel():
        return False
    limit = SAME_NUMBER * float(column.abs().max())
    return bool(((array.reshape(-1).to(column) - column.reshape(-1)).abs() <= limit).all())


def _is_less_a_number(column: Tensor, array: Tensor) -> bool:
    """Return True if a column equals an array minus one number that is not 0."""
    if array.numel() != column.numel():
        return False
    less, limit = array.reshape(-1).to(column) - column.reshape(-1), SAME_NUMBER * float(array.abs().max())
    return float(less.amax() - less.amin()) <= 2 * limit < float(less.abs().amax())


def _sorted(array: Tensor) -> Tensor:
    return array.reshape(-1).double().sort().values


def _held(numbers: Tensor, tables: Tensor) -> list[float]:
    """Shares of these numbers [N] that sorted tables [K, R] hold, up to rounding; 0 if a table is not finite, which its ends show."""
    among = are_among(numbers, tables, SAME_NUMBER).double().mean(1)
    shares: list[float] = (among * tables[:, [0, -1]].isfinite().all(1)).tolist()
    return shares


def _entries(rows: list[Any] | tuple[Any, ...] | deque[Any]) -> int:
    """Number of entries of a list of numbers, arrays or tensors as large as the first one; 0 of other lists."""
    first = rows[0] if rows else None
    if isinstance(first, Tensor):
        return len(rows) * first.numel()
    return len(rows) * int(np.size(first)) if isinstance(first, int | float | np.generic | np.ndarray) else 0


def _summands(sums: Tensor, paid: Tensor, ended: Tensor) -> Tensor | None:
    """Return the rewards [T, B] whose discounted sums an array holds, scaled as the script scales them; None for another array.

    Scripts turn their rewards into returns in place.
    """
    inside = ~ended[: len(sums) - 1]
    if not _varies(sums) or sums.shape != paid.shape or int(inside.sum()) < MIN_SUMMED:
        return None
    now, later, own = (column[inside].double() for column in (sums[:-1], sums[1:], paid[:-1]))
    factors = torch.stack([later, own, torch.ones_like(own)], 1)
    if not bool(torch.isfinite(factors).all() & torch.isfinite(now).all()):
        return None
    gamma, scale, offset = solution = torch.linalg.lstsq(factors, now.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    error = (factors @ solution - now).abs().amax() / now.abs().amax()
    is_sum = LEAST_DISCOUNT < float(gamma) <= 1 + SAME_LINE and float(scale) >= 0 and float(error) <= SAME_LINE
    return (scale * paid.double() + offset).to(sums) if is_sum else None


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
