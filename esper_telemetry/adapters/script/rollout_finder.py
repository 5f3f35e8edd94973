"""The rollout that a script learns from: its own arrays, recognised by where their numbers come from and go to.

Taps record rewards, ends of episodes, the network's outputs in acting, and the rows by which the script indexed its arrays. The
loss of the first minibatch, before any step, shows its log-probabilities, values, returns and advantages. The arrays with these
numbers are the script's columns, independent of their names. A name decides only between arrays with the same numbers.

Shapes: T steps, B environments, R = T B transitions, N rows of a minibatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from esper_telemetry.adapters.columns import next_values
from esper_telemetry.adapters.script.autograd_graph import SAME_LINE, line_error
from esper_telemetry.adapters.script.loss_reading import LossReading
from esper_telemetry.adapters.script.observed_steps import ObservedSteps
from esper_telemetry.adapters.script.script_rollouts import (
    COLUMNS,
    LOG_PROB_FORMS,
    MIN_DISTINCT,
    MIN_SHARE,
    NAMES,
    SAME_NUMBER,
    Layout,
    RecordedRollout,
    RowFinder,
    ScriptRollout,
    entries_of,
    in_size_order,
    is_in_longer_array,
    is_less_a_number,
    is_same,
    shares_held,
    summands,
    varies,
)
from esper_telemetry.adapters.script.variables import Variables, stacked

MAX_ARRAYS = 128
"""Arrays of a rollout's size that are compared."""

NEARLY_CONSTANT = 0.01
"""Standard deviation of values, relative to that of the returns, up to which returns and advantages differ by an offset."""


class RolloutFinder:
    """Finds the parts of a script's current rollout.

    Args:
        variables: of the script.
        recorded: since the previous rollout.
        reading: of the loss of the first minibatch, before any step.
        indices: whole numbers [N] by which the script took the rows of that minibatch, if they are known.
        indexed: addresses of the tensors from which it took rows.
        targets: names of the variable with the targets of the critic's own loss.

    Attributes:
        has_critic: False if neither the script's layers nor the loss have one: all values are 0, and advantages are sums of rewards.
        in_longer_array: the advantages of the loss, of the whole rollout, are the first numbers of an array with more of them.
    """

    def __init__(
        self,
        variables: Variables,
        recorded: RecordedRollout,
        reading: LossReading | None = None,
        *,
        indices: Sequence[Tensor] = (),
        indexed: Collection[int] = (),
        targets: tuple[str, ...] = (),
    ) -> None:
        self._variables, self._recorded, self._indices, self._indexed, self._targets = variables, recorded, indices, indexed, targets
        self._layout = Layout(None if reading is None else reading.total.device)  # of minibatches
        self._shown: Mapping[str, Tensor | None] = {} if reading is None else reading.columns()
        by_dimension = None if reading is None or reading.policy is None else reading.policy.log_ratios
        self._dimensions = 1 if by_dimension is None else by_dimension.shape[1]  # log-probabilities of each are summed
        self._order: Tensor | None = None  # [R], transitions of the entries of arrays that the script has shuffled
        self._entries: Tensor | None = None  # [N], of these arrays that are the rows of the first minibatch
        self._mixed = False  # columns are shuffled in a way that the numbers do not show
        self._grids: list[Tensor] = []
        self._names: dict[int, str] = {}
        self._products: set[int] = set()  # arrays with a graph: advantages times a ratio of 1 equal the advantages
        self.has_critic = recorded.has_critic or reading is None or reading.value is not None
        self._has_ratio = reading is None or reading.policy is None or reading.policy.log_ratio is not None
        self._columns: dict[str, Tensor] = {}
        self.in_longer_array = False
        self.ended = self._paid = self._limits = self._reset = None
        acted, observed = recorded.acted, recorded.steps
        if observed is not None:
            self._layout.steps, self._layout.envs = observed.steps, observed.envs
            columns = (observed.ended, observed.rewards, observed.time_limits, observed.reset)
            self.ended, self._paid, self._limits, self._reset = (column.to(self._layout.device) for column in columns)
            acted = acted if observed.in_turns else ()
        else:
            self.ended = self._layout.find(variables)
        self.steps, self.envs = self._layout.steps, self._layout.envs
        numbers = torch.cat([one.log_probs.reshape(-1) for one in acted]).to(self._layout.device) if acted else torch.empty(0)
        whole = len(numbers) and self.steps and not len(numbers) % (self.steps * self.envs)
        self._acted = numbers.reshape(self.steps, self.envs, -1).sum(-1) if whole else None
        self._taken = [one.actions for one in acted if one.actions is not None]
        if self.ended is not None:
            arrays = list(self._arrays()) if reading is not None else []
            shown = [column for column in self._shown.values() if column is not None]
            negative = None if self._acted is None else -self._acted
            known = [one for one in (self._paid, self._acted, negative, self.ended) if one is not None]
            self._layout.find_order([array for _, array in arrays], shown, known)
            named = [(name, array, grid) for name, array in arrays if (grid := self._layout.as_grid(array)) is not None]
            self._grids = [grid for _, _, grid in named]
            self._names = {grid.data_ptr(): name for name, _, grid in reversed(named)}
            self._identify([(array, grid) for _, array, grid in named])
        self.rewards, self.log_probs = self._columns.get("rewards"), self.find("log_probs")
        self.log_probs = self._acted if self.log_probs is None else self.log_probs

    # arrays by what they hold

    def _arrays(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the arrays of a rollout's size with their names, in the script's shapes."""
        size, visited = self.steps * self.envs, set[tuple[int, torch.Size]]()
        sizes = {count * dims for count in (size, size + self.envs) for dims in (1, self._dimensions)}
        for name, value in chain(self._variables.named_values(), (("", one) for one in self._recorded.estimates)):
            if isinstance(value, list | tuple | deque) and entries_of(value) not in sizes:
                continue  # without stacking what a script logs
            array = stacked(value)
            if array is not None and self._dimensions > 1 and array.shape[-1:] == (self._dimensions,):
                array = array.sum(-1)
            if array is None or array.numel() not in (size, size + self.envs) or array.numel() < 2:
                continue
            if isinstance(value, Tensor) and value.requires_grad and self._has_ratio:
                self._products.add(array.data_ptr())
            key = (array.data_ptr(), array.shape)
            if key not in visited:
                visited.add(key)
                yield name, array.to(self._layout.device)
            if len(visited) >= MAX_ARRAYS:
                return

    def _free(self) -> list[Tensor]:
        """Arrays [T, B] that are not yet assigned to a column."""
        whole = (grid for grid in self._grids if len(grid) == self.steps)
        return [grid for grid in whole if not self._is_taken(grid) and grid.data_ptr() not in self._products]

    def _is_taken(self, grid: Tensor) -> bool:
        """Return True for an array in the memory of a column."""
        return any(grid.data_ptr() == one.data_ptr() for one in self._columns.values())

    def _identify(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Find the columns from the inputs of the first minibatch's loss."""
        columns, grids = self._columns, [grid[: self.steps].reshape(-1).double() for grid in self._grids]
        tables = torch.stack(grids).sort().values if grids else torch.empty(0, 1, dtype=torch.float64, device=self._layout.device)
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
                whole = self._layout.as_grid(column)
                columns |= {} if whole is None else {role: whole}
        if "advantages" not in columns and not is_permuted:
            columns |= self._advantages_of_loss(pairs)
            self.in_longer_array = is_in_longer_array(self._shown.get("advantages"), self._layout, self._variables)
        if "returns" not in columns:  # the loss has another column for targets, or the critic has a separate loss
            known = self._variables.find(self._targets, self._free_grid)  # before others: a list of all returns may have this length once
            named = self._variables.find(NAMES["returns"], self._free_grid) if known is None else known
            columns |= {} if named is None else {"returns": self._nearer_in_time(named)}
        self._identify_implied_values()
        self._identify_rewards()
        if "returns" not in columns and self._paid is not None and self.ended is not None:  # sums that a later loss reads
            sums = next((grid for grid in self._free() if summands(grid, self._paid, self.ended) is not None), None)
            columns |= {} if sums is None else {"returns": sums}
        self._identify_next_values()
        if "log_probs" not in columns and self._has_ratio and self._acted is None:
            # the loss does not show them: the only other numbers of which it takes rows
            free = [grid for grid in self._free() if grid.data_ptr() in self._indexed]
            free = [grid for grid in free if not torch.equal(grid, grid.round()) and not _are_executed(grid, self._recorded.steps)]
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
                shares = shares_held(numbers, tables)
                ordered = in_size_order(numbers)
                best = min(
                    (
                        # few different numbers may all be in other arrays, too, but not as often
                        (share >= MIN_SHARE and is_same(form(column), array), -share, place, not is_same(ordered, table))
                        for place, ((array, grid), table, share) in enumerate(zip(pairs, tables, shares, strict=True))
                        if not self._is_taken(grid)
                        and not (role == "advantages" and array.data_ptr() in self._products)
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
        in_time = "log_probs" in in_order and self._acted is not None and is_same(self._acted, columns["log_probs"])
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
        numbers = in_size_order(acted)
        mixed = (
            way_back(grid)
            for form, way_back in LOG_PROB_FORMS
            for stored in (in_size_order(form(acted)),)
            for grid, table in zip(self._grids, tables, strict=True)
            if len(grid) == self.steps and is_same(stored, table)
        )
        shuffled = next((grid for grid in mixed if not is_same(acted, grid)), None)
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
                uncentred = abs(float(own.mean())) > SAME_LINE * float(own.abs().amax())
                targets = grids[0].reshape(-1)[taken] if grids and targets is None and uncentred else targets
                if grids and targets is not None and is_less_a_number(own, targets):  # their baseline is one number
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
        return shares_held(targets.reshape(-1).double(), in_size_order(raw)[None])[0] >= MIN_SHARE

    def _advantages_of_loss(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """Return the advantages of a loss over the whole rollout, if the script keeps none, in the order of its log-probabilities."""
        own, log_probs = self._shown.get("advantages"), self._columns.get("log_probs")
        if own is None or log_probs is None or own.numel() != self.steps * self.envs:
            return {}
        arrays = (array for array, grid in pairs if grid.data_ptr() == log_probs.data_ptr() and array.numel() == own.numel())
        array = next(arrays, log_probs)
        shown = self._shown.get("log_probs")
        if shown is None or not is_same(shown, array):
            return {}
        grid = self._layout.as_grid(own.reshape(array.shape))
        return {} if grid is None else {"advantages": grid}

    def _identify_acting_values(self) -> None:
        """Find the values of acting if training uses another critic: their last row is its output before the last step."""
        outputs = [one.before for one in self._recorded.last_estimates if one.before is not None]
        held = [grid for grid in self._grids if any(is_same(output, grid[self.steps - 1]) for output in outputs)]
        free = [grid for grid in held if any(grid is one for one in self._free())]
        is_acting = any(grid is self._columns.get("values") for grid in held)
        self._columns |= {"values": free[0]} if len(free) == 1 and not is_acting else {}
        if "values" not in self._columns and self._shown.get("values") is None:
            own = [grid for grid in self._free() if any(is_same(one.to(grid), grid) for one in self._recorded.critic)]
            following = (grid for grid in own if any(self._follows(other, grid) for other in own))
            self._columns |= {"values": next(following, own[-1])} if own else {}  # earlier ones may be of the previous rollout
        acted = self._recorded.acting_values
        if "values" not in self._columns and acted is not None:  # the loss has other ones, such as of other inputs
            unused = (grid for grid in self._grids if not self._is_taken(grid))
            stored = next((grid for grid in unused if is_same(acted.to(grid), grid[: self.steps])), None)
            self._columns |= {} if stored is None else {"values": stored}

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
        grid = self._layout.accept(value)
        taken = grid is None or any(torch.equal(grid, one[: self.steps]) for one in self._columns.values())
        return None if taken else grid

    def _identify_rewards(self) -> None:
        """Find the array with the environments' rewards, perhaps scaled; else one with such a name, else the environments' rewards."""
        named, paid = self._variables.find(NAMES["rewards"], self._free_grid), self._paid
        if paid is not None:
            if named is not None and not varies(named) and (varies(paid) or not bool(named.any())):
                named = None  # a buffer that is empty again, or a mistake, which the advantages show
            free = self._free()
            same = [grid for grid in free if torch.equal(grid.float(), paid.float())]
            scaled = [grid for grid in free if line_error(grid, paid) <= SAME_LINE]
            exact = self._variables.find(
                NAMES["rewards"], lambda value: grid if (grid := self._free_grid(value)) is not None and is_same(paid, grid) else None
            )
            if exact is not None:
                named = exact
            elif same and (named is None or varies(paid)):  # flags may have the numbers of constant rewards
                named = same[0]
            elif named is None:
                named = scaled[0] if scaled else paid.float()
        if named is not None and paid is not None and self.ended is not None:
            sums = summands(named, paid, self.ended)
            named = named if sums is None else sums
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

    def find(self, role: str) -> Tensor | None:
        """Return a column [T, B] of the rollout: the loss's column, or an array with such a name."""
        column = self._columns.get(role)
        return self._variables.find(NAMES[role], self._layout.accept) if column is None else column[: self.steps]

    def names(self) -> dict[str, str]:
        """Return the names of the variables with the columns that were found, by role; empty for a column without a variable."""
        found = {"log_probs": self.log_probs, **self._columns}
        return {role: self._names.get(one.data_ptr(), "") for role, one in found.items() if one is not None}

    # actions and observations

    def actions(self, chosen: Tensor | None) -> Tensor | None:
        """Return a copy of the actions [T, B, D]: an array with such a name or with the minibatch's actions [N, ...], or executed ones."""

        def accept(value: object) -> Tensor | None:
            array = self._layout.accept_rows(value)
            return None if array is None or array.dim() > 3 else array.reshape(self.steps, self.envs, -1)

        array = self._stored("actions", chosen, accept)
        return self.acted_actions if array is None else array.clone()

    @property
    def acted_actions(self) -> Tensor | None:
        """The actions [T, B, D] whose log-probabilities distributions were asked for in acting, if that was one for each step."""
        whole = len(self._taken) == self.steps > 0 and all(one.numel() % self.envs == 0 for one in self._taken)
        same = len({one.shape for one in self._taken}) == 1
        return torch.stack([one.reshape(self.envs, -1) for one in self._taken]) if whole and same else None

    def observations(self, inputs: Tensor | None) -> Tensor | None:
        """Return the script's observations [T, B, ...]: an array with such a name, or with the inputs [N, ...] of the minibatch."""

        def accept(value: object) -> Tensor | None:
            array = self._layout.accept_rows(value)
            return array if array is not None and array.dim() > 2 and array[0, 0].numel() > 1 else None

        return self._stored("observations", inputs, accept)

    def _stored(self, role: str, own: Tensor | None, accept: Callable[[object], Tensor | None]) -> Tensor | None:
        """Return the array [T, B, ...] with such a name, else one with the rows [N, ...] of the minibatch, in the order of time."""
        array = None if self._mixed else self._variables.find(NAMES[role], accept)
        if array is None and own is not None and not self._mixed:
            places = [one for one in (self.first_rows(), self._entries) if one is not None]
            values = (value for _, value in self._variables.named_values()) if places else ()
            candidates = (one for value in values if (one := accept(value)) is not None)
            fitting = (one for one in candidates if any(is_same(own, one.flatten(0, 1)[rows.to(one.device)]) for rows in places))
            array = next(fitting, None)
        return None if array is None else self._in_time(array.flatten(0, 1), own).reshape(array.shape)

    def first_rows(self) -> Tensor | None:
        """Transitions [N] of the first minibatch."""
        if self._order is not None and self._entries is not None:
            return self._order[self._entries]
        known = {role: self._columns[role][: self.steps] for role in COLUMNS if role in self._columns}
        shown = {role: self._shown.get(role) for role in known}
        return RowFinder(known).rows_of(shown, self._indices) if known else None

    # the whole

    def rollout(self, gamma: float | None = None) -> ScriptRollout | None:
        """Return all parts; None if one is missing.

        The discount factor gives the values after the last step if the script does not keep them.
        """
        values, advantages, returns = (self.find(role) for role in ("values", "advantages", "returns"))
        log_probs, ended, rewards = self.log_probs, self.ended, self.rewards
        limits = None if rewards is None or _pays_at_limits(rewards, self._paid, self._limits) else self._limits
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
        estimates = bool(self._recorded.last_estimates) or "next_values" in self._columns
        is_cut = self._recorded.steps is not None and self._recorded.steps.cut
        if is_cut and implied is not None and not (estimates and float(implied.abs().max()) > SAME_NUMBER):
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
        columns = (rewards, values, advantages, returns, log_probs)
        rewards, values, advantages, returns, log_probs = (column.clone() for column in columns)
        return ScriptRollout(
            *(rewards, values, advantages, returns, log_probs, ended),
            terminated=ended & ~limits if limits is not None and bootstraps else ended,
            next_values=after,
            last_values=last.clone().reshape(1, self.envs),
            time_limits=None if bootstraps else limits,
            returns_known=stored,
        )

    def _last_values(self, values: Tensor, ended: Tensor, implied: Tensor | None) -> Tensor | None:
        """Values [B] after the last step: from the script's arrays, from the network's outputs, or implied by the last returns."""
        if bool(ended[-1].all()) or not self.has_critic:
            return values[-1]
        whole = self._columns.get("values")
        if whole is not None and len(whole) == self.steps + 1:
            return whole[-1].to(values)
        # of the layer with the earlier values, or of the only layer
        sized = [one for one in self._recorded.last_estimates if one.output.numel() == self.envs]
        acting = [one for one in sized if one.before is not None and is_same(values[-1], one.before)]
        fresh = [one for one in sized if one.before is None]
        certain = acting or (fresh if len(fresh) == 1 else [])
        shown = self._columns.get("next_values")
        if certain:  # a script may also have asked for the value of the state before the step
            agreed = (one for one in certain if shown is not None and is_same(shown[-1], one.output))
            return next(agreed, certain[0]).output.to(values)
        if shown is not None:
            return torch.where(ended[-1], values[-1], shown[-1].to(values))
        last = self._variables.find(NAMES["last_values"], self._layout.accept_last)
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


def _are_executed(grid: Tensor, observed: ObservedSteps | None) -> bool:
    """Return True for the actions that the environments received, perhaps clipped."""
    received = None if observed is None or observed.received is None else observed.received.squeeze(-1).to(grid)
    return received is not None and received.shape == grid.shape and is_same(grid.clamp(received.min(), received.max()), received)


def _pays_at_limits(rewards: Tensor, paid: Tensor | None, limits: Tensor | None) -> bool:
    """Return True for rewards [T, B] that are those of the environments times a factor, with values added at time limits only."""
    if paid is None or limits is None or not bool(limits.any()) or not bool((paid != 0)[~limits].any()):
        return False
    apart = (rewards - (rewards / paid)[(paid != 0) & ~limits].median() * paid).abs() > SAME_LINE * rewards.abs().max()
    return bool(apart[limits].any()) and not bool(apart[~limits].any())
