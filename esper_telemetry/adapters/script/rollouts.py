"""The rollout that a script learns from, found among its variables by what they hold.

The environments say which rewards were paid and which episodes ended. The loss of the first minibatch, before any step, says which
log-probabilities, values, returns and advantages it was computed from: the arrays with these numbers are the script's columns, whatever
their names. Names decide where numbers do not.

Shapes: T steps, B environments, R = T B transitions, N rows of a minibatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.adapters.columns import next_values
from esper_telemetry.adapters.script.loss_graph import LossReading
from esper_telemetry.adapters.script.recorders import NOTHING_ACTED, ActedSteps, LastEstimate
from esper_telemetry.adapters.script.variables import Aliases, Variables, as_column, stacked
from esper_telemetry.metrics.integrity.rollouts.transitions import checksums

REWARDS: Aliases = (
    *("rewards", "rews", "rewards_buf", "reward_buf", "rew_buf", "r_hoder", "b_rewards", "batch_rewards", "reward"),
    *("rs", "r"),
)
VALUES: Aliases = (
    *("values", "vals", "values_buf", "val_buf", "value_buf", "vs", "state_values", "old_values", "value_preds"),
    *("b_values", "batch_values", "flat_values", "value_estimates"),
)
ADVANTAGES: Aliases = ("advantages", "b_advantages", "b_adv", "advs", "adv_buf", "advantages_buf", "batch_advantages")
RETURNS: Aliases = ("returns", "rets", "ret_buf", "returns_buf", "b_returns", "batch_returns", "value_targets")
LOG_PROBS: Aliases = (
    *("logprobs", "log_probs", "logprobs_buf", "logp_buf", "old_logprobs", "old_log_probs", "logprob_a_hoder"),
    *("b_logprobs", "b_log_probs", "batch_log_probs", "action_log_probs", "logps"),
)
DONES: Aliases = ("dones", "terminations", "dones_buf", "done_buf", "terminateds")
NEXT_DONE: Aliases = ("next_done", "next_termination", "last_done")
NEXT_VALUE: Aliases = ("next_value", "last_value", "next_values", "last_values", "bootstrap_value", "last_val")
NEXT_VALUES: Aliases = ("next_values", "vs_", "values_next", "next_vals")
ACTIONS: Aliases = ("actions", "acts", "actions_buf", "act_buf", "a_hoder", "b_actions")
OBSERVATIONS: Aliases = (
    *("obs", "observations", "states", "obs_buf", "observations_buf", "obs_buffer", "state_buf", "s_hoder", "b_obs"),
)

MAX_ARRAYS = 128
"""Arrays of a rollout's size that are compared."""

SAME_NUMBER = 4e-6
"""Difference up to which numbers of single precision are the same that were recomputed from sums, next to the largest of them."""

MIN_SHARE = 0.99
"""Share of a minibatch's numbers that an array must hold to be the one that they are from."""

MAX_SHARED_NUMBERS = 1 << 14
"""Rows of a minibatch whose number several transitions have that are looked at one by one."""

MIN_SAME_ROWS = 0.75
"""Share of a minibatch's rows in which two columns agree that name the same transitions."""

MIN_DISTINCT = 8
"""Different numbers from which on finding them in an array is no chance."""

SAME_SHAPE = 1 - 1e-6
"""Correlation from which on two columns are the same up to a factor and an offset."""

ROUNDED_LINE = 1e-5
"""Largest difference of two columns that are the same up to a factor and an offset, next to the largest entry."""

MIN_CORRELATION = 0.9
"""Correlation with the rewards that were paid from which on an array holds rewards, perhaps scaled or cut."""


class ScriptRollout(NamedTuple):
    """A rollout, [T, B] each; copies, because scripts reuse the memory.

    Attributes:
        next_values: estimates of the state after each step, 0 where the script does not show that of an episode's last one.
        last_values: [1, B], estimates of the states after the last step.
        bootstraps: estimates of the last states of episodes that a time limit ended are among `next_values`.
        returns_stored: the script has an array with the returns.
    """

    rewards: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    log_probs: Tensor
    ended: Tensor
    next_values: Tensor
    last_values: Tensor
    bootstraps: bool = False
    returns_stored: bool = True

    def targets(self, targets: Tensor | None, rows: Tensor, in_use: Tensor | None = None) -> Tensor | None:
        """Return the critic's targets [N] in these transitions: those of its loss, as stored where both are the same up to rounding.

        A loss that has another column of the rollout for targets, or the advantages in use [N], is compared with the stored returns.
        """
        stored = self.returns.reshape(-1)[rows]
        if targets is None or len(targets) != len(stored):
            return stored if targets is None and self.returns_stored else targets
        values = self.values[: len(self.returns)]
        differences = (values, self.advantages, self.returns - values) if self.returns_stored else ()
        columns = (self.returns, *differences)
        others = [column.reshape(-1)[rows].to(targets) for column in columns]
        if in_use is not None and self.returns_stored and len(in_use) == len(targets):
            others.append(in_use.to(targets))
        for own in others:
            if float((targets - own).abs().max()) <= SAME_NUMBER * float(own.abs().max()):
                return stored.to(targets)
        return targets


COLUMNS = ("inputs", "log_probs", "values", "returns", "advantages")
"""Columns of a rollout that its minibatches have too; `inputs` are checksums of observations."""


class RolloutFinder:
    """Finds the parts of the rollout that a script learns from now.

    Args:
        variables: of the script.
        ends: [T, B], bool: steps since the rollout before that ended an episode, as the environments returned them; None where they do
            not say. Then there is no rollout without rewards [T, B].
        paid: [T, B], rewards that the environments returned in these steps.
        limits: [T, B], bool: of the ends those by a time limit.
        reading: of the loss of the first minibatch, before any step.
        estimates: outputs of the critic that need be in no variable any more.
        last_estimates: outputs after the last step of the environments.
        acted: log-probabilities and actions of the steps in the order in which they were taken; nothing where that is not known.
    """

    def __init__(
        self,
        variables: Variables,
        ends: Tensor | None = None,
        *,
        paid: Tensor | None = None,
        limits: Tensor | None = None,
        reading: LossReading | None = None,
        estimates: Sequence[Tensor] = (),
        last_estimates: Sequence[LastEstimate] = (),
        acted: ActedSteps = NOTHING_ACTED,
    ) -> None:
        self._variables = variables
        self._device = None if reading is None else reading.total.device  # all is compared there, where minibatches are
        ends, self._paid, self._limits = (
            None if column is None else column.to(self._device) for column in (ends, paid, limits)
        )
        self._estimates, self._last_estimates = estimates, last_estimates
        asked = acted.of(0 if ends is None else len(ends))
        self._acted = torch.cat([one.log_probs.reshape(-1) for one in asked]) if asked else None
        self._taken = [one.actions for one in asked if one.actions is not None]
        self._shuffle: Shuffle | None = None
        self._mixed = False  # columns are shuffled in a way that numbers do not tell
        rewards = None if ends is None else variables.find(REWARDS, _grid(*ends.shape))
        if (
            rewards is None
            and (ends is None or reading is None)
            and (other := variables.find(REWARDS, _grid())) is not None
        ):
            rewards, ends = other, None
        self._ends = ends
        shape = ends.shape if ends is not None else (0, 0) if rewards is None else rewards.shape
        self.steps, self.envs = int(shape[0]), int(shape[1])
        self._env_major = False
        self._found: dict[str, Tensor] = {}
        if ends is not None and reading is not None:
            self._identify(list(self._arrays()), reading)
        self.rewards = self._found.get("rewards", rewards)

    # arrays by what they hold

    def _arrays(self) -> Iterable[Tensor]:
        """Yield the arrays of a rollout's size, as their owner has shaped them."""
        size, visited = self.steps * self.envs, set[tuple[int, torch.Size]]()
        count = 0
        outputs = chain((one.output for one in self._last_estimates), self._estimates)
        for value in chain((value for _, value in self._variables.named_values()), outputs):
            array = stacked(value)
            if array is None or array.numel() not in (size, size + self.envs) or array.numel() < MIN_DISTINCT:
                continue
            key = (array.data_ptr(), array.shape)
            if key in visited:
                continue
            visited.add(key)
            count += 1
            if count > MAX_ARRAYS:
                return
            yield array.to(self._device)

    def _identify(self, arrays: list[Tensor], reading: LossReading) -> None:
        """Find the columns that the first minibatch was computed from."""
        self._env_major = self._is_env_major(arrays)
        pairs = [(array, grid) for array in arrays if (grid := self._as_grid(array)) is not None]
        grids = [grid for _, grid in pairs]
        policy, value = reading.policy, reading.value or reading.left_out
        wanted: dict[str, Tensor | None] = {
            "log_probs": None if policy is None else policy.old_log_probs,
            "returns": None if value is None else value.returns,
            "values": None if value is None else value.values,
            "advantages": None if policy is None else policy.advantages,
        }
        tables = [_sorted(grid[: self.steps]) for grid in grids]
        shuffled = self._identify_columns(pairs, tables, wanted)
        if wanted["log_probs"] is not None and "log_probs" not in self._found:
            for table in (torch.exp, torch.neg):  # probabilities, or negative log-probabilities
                numbers = table(wanted["log_probs"])
                held = [grid for grid in grids if len(grid) == self.steps and _share(numbers, grid) >= MIN_SHARE]
                if held and "log_probs" not in self._found:
                    self._found["log_probs"] = held[0].log() if table is torch.exp else -held[0]
        self._restore_order(grids, tables, wanted)
        self._identify_advantages(grids, wanted)
        self._identify_sum(grids)
        self._identify_returns()
        self._identify_difference(grids)
        self._identify_acting_values(grids)
        values = self._found.get("values")
        if values is not None and len(values) == self.steps:
            longer = [grid for grid in grids if len(grid) == self.steps + 1 and torch.equal(grid[:-1], values)]
            self._found["values"] = longer[0] if longer else values
        if "values" not in self._found and value is not None and value.values is not None and not shuffled:
            whole = self._as_grid(value.values)
            if whole is not None and whole.numel() == self.steps * self.envs:
                self._found["values"] = whole
        if "log_probs" not in self._found and policy is not None and policy.log_ratio is None:
            # a policy gradient without a ratio stores none: those of its only pass are those that were acted on
            log_probs = None if policy.log_probs is None else self._as_grid(policy.log_probs)
            if log_probs is not None and log_probs.numel() == self.steps * self.envs:
                self._found["log_probs"] = log_probs
        self._identify_by_acting(grids)
        self._identify_rewards(grids)
        self._identify_next_values(grids)

    def _identify_columns(
        self, pairs: Sequence[tuple[Tensor, Tensor]], tables: Sequence[Tensor], wanted: Mapping[str, Tensor | None]
    ) -> bool:
        """Find the arrays, as [T, B] beside them, and sorted in `tables`, with the numbers of the first minibatch.

        Returns True where that is the whole rollout in another order.
        """
        in_order, shuffled = set[str](), False
        for role, column in wanted.items():
            if column is None or not _tells(numbers := column.reshape(-1).double()):
                continue
            holding = [
                (_is_same(column, array), -_held(numbers, tables[place]), place)
                for place, (array, grid) in enumerate(pairs)
                if all(grid is not found for found in self._found.values())
            ]
            best = min((one for one in holding if -one[1] >= MIN_SHARE), default=None)
            if best is not None:
                self._found[role] = pairs[best[2]][1]
                in_order |= {role} if best[0] else set()
                shuffled = shuffled or (not best[0] and column.numel() == self.steps * self.envs)
        if shuffled:  # a minibatch of the whole rollout: arrays in its order are its own
            self._found = {role: grid for role, grid in self._found.items() if role not in in_order}
        return shuffled

    def _restore_order(
        self, grids: list[Tensor], tables: Sequence[Tensor], wanted: Mapping[str, Tensor | None]
    ) -> None:
        """Put columns that the script has shuffled together back into the order in which actions were taken.

        A shuffled array has all log-probabilities in another order, and its rows are those of the minibatch in other columns too.
        """
        own, size = wanted["log_probs"], self.steps * self.envs
        if own is None or self._acted is None or self._acted.numel() % size:
            return
        acted = self._acted.reshape(size, -1).sum(1).reshape(self.steps, self.envs).to(own.device)
        ordered = _sorted(acted)
        for grid, table in zip(grids, tables, strict=True):
            if len(grid) == self.steps and not _is_same(acted, grid) and Shuffle.mixes(table, ordered):
                self._shuffle, self._found["log_probs"] = Shuffle.between(grid, acted, own), acted
                self._mixed = self._shuffle is None
                break
        if self._shuffle is None:
            return
        restored = {
            role: self._shuffle.undone(column.reshape(-1), numbers).reshape(column.shape)
            for role in ("returns", "values", "advantages")
            if (column := self._found.get(role)) is not None
            and (numbers := wanted[role]) is not None
            and len(column) == self.steps
        }
        found = self._found | restored
        if restored.keys() >= {"advantages"} and found.keys() >= {"returns", "values"}:  # they may have been left out
            difference = found["returns"] - found["values"][: self.steps]
            if correlation(difference, self._found["advantages"]) > correlation(difference, restored["advantages"]):
                del restored["advantages"]
        self._found |= restored

    def _identify_advantages(self, grids: list[Tensor], wanted: Mapping[str, Tensor | None]) -> None:
        """Find the advantages that the loss has normalised: in the minibatch's rows they differ from its own by a factor and an offset."""
        known: dict[str, Tensor] = {
            role: self._found[role][: self.steps] for role in ("log_probs", "returns") if role in self._found
        }
        own = wanted["advantages"]
        used = self._found.get("advantages")
        if used is not None:  # normalised before the passes: the array from before that may be there too
            free = [
                grid for grid in grids if len(grid) == self.steps and all(grid is not x for x in self._found.values())
            ]
            raw = [grid for grid in free if not torch.equal(grid, used) and _is_line(grid, used)]
            self._found["advantages"] = raw[0] if len(raw) == 1 else used
        if own is None or not known or used is not None:
            return
        rows = RowFinder(known).rows_of(None, {role: wanted[role] for role in known})
        if rows is None or len(rows) != own.numel():
            return
        for grid in grids:
            is_free = len(grid) == self.steps and all(grid is not found for found in self._found.values())
            if is_free and correlation(grid.reshape(-1)[rows.to(grid.device)], own) > SAME_SHAPE:
                self._found["advantages"] = grid
                return

    def _identify_sum(self, grids: list[Tensor]) -> None:
        """Find the returns and the advantages by their difference, the values of the first minibatch, whatever its loss makes of them."""
        found = self._found.get("values")
        if found is None or not _varies(found):
            return
        values = found[: self.steps].double()
        arrays = [grid for grid in grids if len(grid) == self.steps and grid is not found and _varies(grid)]
        sums = [float(array.double().sum()) for array in arrays]
        limit, total = SAME_NUMBER * float(values.abs().max()), float(values.sum())
        for returns, own in zip(arrays, sums, strict=True):
            most = max(limit, SAME_NUMBER * float(returns.abs().max()))
            for advantages, other in zip(arrays, sums, strict=True):
                near = advantages is not returns and abs(own - other - total) <= most * values.numel()
                if near and float((returns.double() - advantages.double() - values).abs().max()) <= most:
                    self._found["returns"] = returns
                    self._found.setdefault("advantages", advantages)
                    return

    def _identify_returns(self) -> None:
        """Take the array that is named so for the returns where the loss has the values or the advantages for targets."""
        targets, named = self._found.get("returns"), self._variables.find(RETURNS, self._in_grid)
        if targets is None or named is None or torch.equal(targets, named):
            return
        others = (self._variables.find(names, self._in_grid) for names in (VALUES, ADVANTAGES))
        if any(other is not None and torch.equal(targets, other) for other in others):
            self._found["returns"] = named

    def _identify_difference(self, grids: list[Tensor]) -> None:
        """Find the returns and the values whose difference the advantages are, perhaps normalised."""
        advantages = self._found.get("advantages")
        if advantages is None or ("returns" in self._found and "values" in self._found):
            return
        taken = list(self._found.values())
        free = [grid for grid in grids if all(grid is not one for one in taken)]
        parts: list[list[Tensor]] = []
        for role in ("returns", "values"):
            own = [self._found[role]] if role in self._found else free
            parts.append([grid for grid in own if _varies(grid)])
        alone = {id(grid): correlation(grid[: self.steps], advantages) for part in parts for grid in part}
        best, pair = SAME_SHAPE, None
        for returns in parts[0]:
            for values in parts[1]:
                difference = returns[: self.steps].double() - values[: self.steps].double()
                same = correlation(difference, advantages)
                if same > max(best, alone[id(returns)], alone[id(values)]):
                    best, pair = same, (returns, values)
        if pair is not None:
            self._found["returns"], self._found["values"] = pair

    def _identify_acting_values(self, grids: list[Tensor]) -> None:
        """Find the values of acting where the critic of training is another one: their last row is its output before the last step."""
        outputs = [
            one.before for one in self._last_estimates if one.before is not None and one.before.numel() == self.envs
        ]
        held = [grid for grid in grids if any(_is_same(output, grid[self.steps - 1]) for output in outputs)]
        free = [grid for grid in held if all(grid is not found for found in self._found.values())]
        is_acting = any(grid is self._found.get("values") for grid in held)
        self._found |= {"values": free[0]} if len(free) == 1 and not is_acting else {}

    def _identify_by_acting(self, grids: list[Tensor]) -> None:
        """Find what the loss does not tell: log-probabilities with few different numbers."""
        if "log_probs" not in self._found and self._acted is not None and self._acted.numel() == self.steps * self.envs:
            acted = self._acted.reshape(self.steps, self.envs)
            held = [grid for grid in grids if len(grid) == self.steps and torch.equal(grid.to(acted), acted)]
            self._found |= {"log_probs": held[0]} if held else {}

    def _identify_rewards(self, grids: list[Tensor]) -> None:
        """Find the array with the rewards that were paid, or with numbers that follow them."""
        if self._paid is None:
            return
        others = [
            grid for grid in grids if len(grid) == self.steps and all(grid is not x for x in self._found.values())
        ]
        paid = self._paid.to(torch.float32)

        def accept(value: object) -> Tensor | None:
            grid = self._in_grid(value)  # a script may call its returns rewards
            known = grid is None or any(torch.equal(grid, found[: self.steps]) for found in self._found.values())
            return None if known else grid

        named = self._variables.find(REWARDS, accept)
        same = [grid for grid in others if torch.equal(grid.to(torch.float32), paid)]
        if same and (named is None or _varies(paid)):  # flags may have the numbers of constant rewards
            self._found["rewards"] = same[0]
        elif named is not None:
            self._found["rewards"] = named
        else:
            close = [(correlation(grid, paid), -place) for place, grid in enumerate(others)]
            best = max(close, default=(0.0, 0))
            self._found["rewards"] = others[-best[1]] if best[0] > MIN_CORRELATION else paid.clone()

    def _identify_next_values(self, grids: list[Tensor]) -> None:
        """Find the array with the values of the next states: within episodes they are those of the next step, or 0 but at time limits."""
        values, ends, limits = self._found.get("values"), self._ends, self._limits
        if values is None or ends is None or self.steps < 2:
            return
        if limits is not None and bool(limits.any()):
            for grid in grids:
                free = len(grid) == self.steps and all(grid is not found for found in self._found.values())
                if (
                    free
                    and torch.equal(grid != 0, limits.to(grid.device))
                    and not torch.equal(grid, (grid != 0).to(grid))
                ):
                    self._found["limit_values"] = grid  # flags have the same zeros
        if len(values) != self.steps:
            return
        within = ~ends[:-1].to(values.device)
        for grid in grids:
            if len(grid) == self.steps and bool(within.any()) and not torch.equal(grid, values):
                difference = (grid[:-1] - values[1:]).abs()[within]
                if float(difference.max()) <= SAME_NUMBER * max(1.0, float(values.abs().max())):
                    self._found["next_values"] = grid

    def _is_env_major(self, arrays: list[Tensor]) -> bool:
        """Return True where flat arrays hold one environment after the other: most of those that are also there as [T, B], or as paid."""
        if 1 in (self.steps, self.envs):
            return False
        whole = [array.reshape(-1).float() for array in arrays if array.numel() == self.steps * self.envs]
        flat = [one for one, array in zip(whole, arrays, strict=False) if array.dim() == 1]
        grids = [
            array.reshape(self.steps, self.envs).float() for array in arrays if _is_shaped(array, self.steps, self.envs)
        ]
        grids += [] if self._paid is None else [self._paid.float()]
        if self._acted is not None and self._acted.numel() == self.steps * self.envs:
            acted = self._acted.reshape(self.steps, self.envs).float()
            grids += [acted, -acted]
        votes = 0
        for grid in grids:
            by_time, by_env = grid.reshape(-1), grid.T.reshape(-1)
            if not torch.equal(by_time, by_env):
                votes += sum(torch.equal(one, by_env) for one in flat) - sum(torch.equal(one, by_time) for one in flat)
        return votes > 0

    def _as_grid(self, array: Tensor) -> Tensor | None:
        """Return an array as [T, B], or as [T + 1, B]; None where it does not fit."""
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

    def _in_grid(self, value: object) -> Tensor | None:
        """Accept an array of R numbers, as [T, B]."""
        array = stacked(value)
        fits = array is not None and array.numel() == self.steps * self.envs
        return self._as_grid(array.to(self._device)) if array is not None and fits else None

    def find(self, role: str, names: Aliases) -> Tensor | None:
        """Return a column [T, B] of the rollout: that of the loss, or one with such a name."""
        column = self._found.get(role)
        if column is not None:
            return column[: self.steps]
        return self._variables.find(names, self._in_grid) if self.steps else None

    # columns

    @property
    def log_probs(self) -> Tensor | None:
        """Log-probabilities at collection."""
        return self.find("log_probs", LOG_PROBS)

    def actions(self, chosen: Tensor | None) -> Tensor | None:
        """Return actions [T, B, D], copied: under such a name, or those of a minibatch [N, D]."""

        def accept(value: object) -> Tensor | None:
            array = self._by_step(value)
            return None if array is None or array.dim() > 3 else array.reshape(self.steps, self.envs, -1)

        named = self._variables.find(ACTIONS, accept)
        array = self._holding(chosen, accept) if named is None else named
        return self._taken_actions() if array is None else self._in_time(array, chosen).clone()

    def _taken_actions(self) -> Tensor | None:
        """Actions [T, B, D] that distributions were asked for in acting; None unless that was one for each step."""
        whole = len(self._taken) == self.steps > 0 and all(one.numel() % self.envs == 0 for one in self._taken)
        same = len({one.shape for one in self._taken}) == 1
        return torch.stack([one.reshape(self.envs, -1) for one in self._taken]) if whole and same else None

    def observations(self, inputs: Tensor | None) -> Tensor | None:
        """Return observations [T, B, ...], the script's own: under such a name, or those with the inputs [N, ...] of a minibatch."""

        def accept(value: object) -> Tensor | None:
            array = self._by_step(value)
            return array if array is not None and array.dim() > 2 and array[0, 0].numel() > 1 else None

        named = self._variables.find(OBSERVATIONS, accept)
        array = self._holding(inputs, accept) if named is None else named
        return None if array is None else self._in_time(array, inputs)

    def _in_time(self, array: Tensor, rows: Tensor | None) -> Tensor:
        """Return an array [T, B, ...] in the order of time, by rows [N, ...] of a minibatch."""
        if self._shuffle is None or rows is None or rows.numel() != len(self._shuffle.entries) * array[0, 0].numel():
            return array
        return self._shuffle.undone(array.flatten(0, 1), rows).reshape(array.shape)

    def _holding(self, rows: Tensor | None, accept: Callable[[object], Tensor | None]) -> Tensor | None:
        """Return the array [T, B, ...] with all of these rows [N, ...]."""
        if rows is None or not self.steps or not len(rows):
            return None
        width, sums = rows[0].numel(), checksums(rows.reshape(1, len(rows), -1).float())[0]
        for _, value in self._variables.named_values():
            array = accept(value) if isinstance(value, list | deque | Tensor | np.ndarray) else None
            fits = array is not None and array[0, 0].numel() == width and array.is_floating_point()
            if array is not None and fits and bool(torch.isin(sums, checksums(array.float())).all()):
                return array
        return None

    def _by_step(self, value: object) -> Tensor | None:
        """Accept an array [T, B, ...] or [R, ...]."""
        array = None if self._mixed else stacked(value)
        if array is None or not self.steps or array.dim() == 0:
            return None
        steps, envs = self.steps, self.envs
        if tuple(array.shape[:2]) == (steps, envs):
            return array
        if len(array) != steps * envs or (envs > 1 and array.dim() < 2):
            return None
        if envs > 1 and self._env_major:
            return array.reshape(envs, steps, *array.shape[1:]).transpose(0, 1)
        return array.reshape(steps, envs, *array.shape[1:])

    @property
    def ended(self) -> Tensor | None:
        """Steps that ended an episode, bool: where there is a flag of the step after the last, `dones[t]` says that step t begins one."""
        if self._ends is not None:
            return self._ends
        dones, next_done = self.find("dones", DONES), self._variables.find(NEXT_DONE, as_column(self.envs))
        if dones is None:
            return None
        return (dones if next_done is None else torch.cat([dones[1:], next_done.reshape(1, self.envs)])).bool()

    def rollout(self, gamma: float | None = None) -> ScriptRollout | None:
        """Return all parts; None where one is missing.

        The discount factor gives the values after the last step where the script does not keep them.
        """
        values, last = self._values()
        returns, advantages = self.find("returns", RETURNS), self.find("advantages", ADVANTAGES)
        log_probs, ended, rewards = self.log_probs, self.ended, self.rewards
        if self._mixed:
            return None
        if advantages is None and returns is not None and values is not None:
            advantages = returns - values
        if rewards is None or values is None or advantages is None or log_probs is None or ended is None:
            return None
        ended, returns_stored = ended.to(values.device), returns is not None
        rewards, advantages = rewards.to(values), advantages.to(values)
        returns = advantages + values if returns is None else returns.to(values)
        following = self._found.get("next_values")
        shown = self._variables.find(NEXT_VALUES, self._in_grid) if following is None else following
        mistaken = torch.equal(returns, advantages) or torch.equal(returns, values)
        implied = None if not gamma else ((advantages + values if mistaken else returns) - rewards) / gamma
        limits = None if self._limits is None else self._limits.to(values.device)
        if last is None and shown is not None:
            last = torch.where(ended[-1], values[-1], shown[-1].to(values))
        if last is None:
            last = self._estimated_last(values[-1])
        if last is None:
            last = None if implied is None else _last_values(implied[-1], values[-1], ended[-1])
        if last is None:
            return None
        after = next_values(values, last, ended)
        final = self._found.get("limit_values") if following is None else following
        if following is None and final is not None and limits is not None:
            # what is added to the rewards may be γ times the values, or values that lack γ: numbers do not tell
            added = (returns - rewards - final.to(values))[limits].abs()
            final = None if float(added.max()) <= SAME_NUMBER * float(returns.abs().max()) else final
        bootstraps = limits is not None and final is not None and bool(limits.any())
        if limits is not None and final is not None:
            after = torch.where(limits, final.to(values), after)
        return ScriptRollout(
            rewards=rewards.clone(),
            values=values.clone(),
            advantages=advantages.clone(),
            returns=returns.clone(),
            log_probs=log_probs.clone(),
            ended=ended,
            next_values=after,
            last_values=last.clone().reshape(1, self.envs),
            bootstraps=bootstraps,
            returns_stored=returns_stored,
        )

    def _estimated_last(self, values: Tensor) -> Tensor | None:
        """The critic's outputs [B] after the last step: of the layer that gave the values [B] before it; None where that is not certain."""
        sized = [one for one in self._last_estimates if one.output.numel() == self.envs]
        acting = [one for one in sized if one.before is not None and _is_same(values, one.before)]
        fresh = [one for one in sized if one.before is None]
        certain = acting or (fresh if len(fresh) == 1 else [])
        return certain[0].output.reshape(-1).to(values) if certain else None

    def _values(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the values of the rollout, and those after its last step, if they are known."""
        found = self._found.get("values")
        if found is None:
            found = self._variables.find(VALUES, _grid(self.steps + 1, self.envs)) if self.steps else None
        if found is None:
            found = self._variables.find(VALUES, self._in_grid) if self.steps else None
        if found is not None and len(found) == self.steps + 1:
            return found[:-1], found[-1]
        last = self._variables.find(NEXT_VALUE, as_column(self.envs))
        if last is not None and found is not None and self.steps > 1 and torch.equal(last.to(found), found[0]):
            last = None  # a loop from the last step to the first one keeps the value of the step after under this name
        return found, last


def _last_values(implied: Tensor, values: Tensor, ended: Tensor) -> Tensor:
    """Values [B] after the last step, as the last returns imply them: R = r + gamma V; those of the last states acted in where all are 0.

    No critic gives 0: a script that leaves them out is to differ from its equation.
    """
    left_out = bool((~ended).any()) and float(implied[~ended].abs().max()) <= SAME_NUMBER
    return values if left_out else torch.where(ended, values, implied)


def _same_rows(one: Tensor, other: Tensor) -> bool:
    """Return True for the same transitions, up to some that are equal."""
    return len(one) == len(other) and float((one == other).double().mean()) >= MIN_SAME_ROWS


def _varies(array: Tensor) -> bool:
    return bool((array != array.reshape(-1)[0]).any())


def _is_shaped(array: Tensor, steps: int, envs: int) -> bool:
    return [size for size in array.shape if size != 1] == [steps, envs]


def _is_same(column: Tensor, array: Tensor) -> bool:
    """Return True where an array has the numbers of a column in its order."""
    if array.numel() != column.numel():
        return False
    limit = SAME_NUMBER * float(column.abs().max())
    return bool(((array.reshape(-1).to(column) - column.reshape(-1)).abs() <= limit).all())


def _share(column: Tensor, array: Tensor) -> float:
    """Share of the numbers of a column that an array holds, up to rounding; 0 where they hardly differ."""
    numbers = column.reshape(-1).double()
    return _held(numbers, _sorted(array)) if _tells(numbers) else 0.0


def _tells(numbers: Tensor) -> bool:
    """Return True for numbers of which enough differ to tell an array that holds them."""
    return len(numbers.unique()) >= min(MIN_DISTINCT, len(numbers))


def _sorted(array: Tensor) -> Tensor:
    return array.reshape(-1).double().sort().values


def _held(numbers: Tensor, table: Tensor) -> float:
    """Share of these numbers that a sorted table holds, up to rounding; 0 where it is not finite: NaN and infinity come first or last."""
    if not bool(table[[0, -1]].isfinite().all()):
        return 0.0
    limit = SAME_NUMBER * float(table[[0, -1]].abs().max())
    return float((nearest(numbers, table)[1] <= limit).double().mean())


def nearest(numbers: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places in a sorted table of the entries next to these numbers, and their distances."""
    right = torch.searchsorted(table, numbers.contiguous()).clamp(max=len(table) - 1)
    left = (right - 1).clamp(min=0)
    is_left = (numbers - table[left]).abs() <= (table[right] - numbers).abs()
    places = torch.where(is_left, left, right)
    return places, (table[places] - numbers).abs()


def _is_line(one: Tensor, other: Tensor) -> bool:
    """Return True where the second array is the first times a number, plus another one, up to rounding: correlations do not tell arrays
    whose difference is small.
    """
    first, second = (x.double().reshape(-1) - x.double().mean() for x in (one, other))
    size = float(first @ first)
    difference = second - (float(first @ second) / size if size > 0 else 0.0) * first
    return size > 0 and float(difference.abs().max()) <= ROUNDED_LINE * float(second.abs().max())


def correlation(one: Tensor, other: Tensor) -> float:
    """Correlation of the entries of two arrays; 0 where one of them does not vary."""
    first, second = (x.double().reshape(-1) - x.double().mean() for x in (one, other))
    size = float(first.norm() * second.norm())
    return float(first @ second) / size if size > 0 else 0.0


class Candidates(NamedTuple):
    """Transitions [N] of a minibatch, and by place all those that are equal to the one there."""

    rows: Tensor
    equal: Mapping[int, Tensor]


class Shuffle(NamedTuple):
    """The order of arrays that a script has shuffled together.

    Attributes:
        steps: [R], transitions, counted time by time, of the entries of a shuffled array.
        entries: [N], of a shuffled array that the rows of a minibatch are.
    """

    steps: Tensor
    entries: Tensor

    @staticmethod
    def mixes(shuffled: Tensor, ordered: Tensor) -> bool:
        """Return True where both have the same numbers, which are sorted."""
        return float((shuffled - ordered).abs().max()) <= SAME_NUMBER * float(ordered.abs().max())

    @classmethod
    def between(cls, shuffled: Tensor, ordered: Tensor, rows: Tensor) -> Shuffle | None:
        """Return the shuffle of one column, in rows [N] of a minibatch; None where equal numbers do not tell."""
        mixed, (numbers, order) = shuffled.reshape(-1).double(), ordered.reshape(-1).double().sort()
        places = nearest(mixed, numbers)[0]
        if len(places.unique()) < len(places):
            return None
        table, entries = mixed.sort()
        return cls(order[places], entries[nearest(rows.reshape(-1).double(), table)[0]])

    def undone(self, column: Tensor, rows: Tensor) -> Tensor:
        """Return a column [R, ...] in the order of time: itself unless the minibatch's rows [N, ...] are where a shuffle has them."""
        rows = rows.reshape(-1, *column.shape[1:]).to(column)
        if len(rows) != len(self.entries):
            return column
        limit = SAME_NUMBER * float(column.abs().max())
        in_time, mixed = (
            float(((column[places] - rows).abs() <= limit).double().mean())
            for places in (self.steps[self.entries], self.entries)
        )
        if mixed < MIN_SHARE or in_time >= MIN_SHARE:
            return column
        return torch.empty_like(column).index_copy_(0, self.steps, column)


class RowFinder:
    """Finds the transitions of a rollout that the rows of minibatches are, by numbers that both have.

    Args:
        columns: of the rollout [T, B], by role.
    """

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self._columns = {name: column.reshape(-1).double() for name, column in columns.items()}
        self._limits = {name: SAME_NUMBER * float(column.abs().max()) for name, column in self._columns.items()}
        self._apart = {  # how many numbers of a column are not the same as the next larger one
            name: int((column.sort().values.diff() > self._limits[name]).sum())
            for name, column in self._columns.items()
        }
        self._shape = next(iter(columns.values())).shape
        self._turns: dict[int, int] = {}

    def rows_of(self, named: Tensor | None, columns: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return the transitions [N] of a minibatch, counted time by time; None where they are not certain.

        Args:
            named: [N], rows by a variable of the script's; None without one. Scripts may count one environment after the other.
            columns: [N] each, numbers of the minibatch by role; None for those that are not known.
        """
        own = {
            name: column.reshape(-1).double()
            for name, column in columns.items()
            if column is not None and name in self._columns
        }
        if named is None:
            return self._rows_with(own) if own else None
        steps, envs = self._shape
        if not own or int(named.max()) >= steps * envs:
            return named
        by_env = named % steps * envs + named.div(steps, rounding_mode="floor")
        fitting = next((rows for rows in (named, by_env) if self._agree(rows, own)), None)
        return self._rows_with(own) if fitting is None else fitting

    def _agree(self, rows: Tensor, own: Mapping[str, Tensor]) -> bool:
        """Return True where these transitions have the numbers of a minibatch in one of its columns."""
        for name, column in own.items():
            table = self._columns[name]
            if len(rows) == len(column):
                distances = (column - table[rows.to(table.device)]).abs()
                if float((distances <= self._limits[name]).double().mean()) >= MIN_SHARE:
                    return True
        return False

    def _rows_with(self, own: Mapping[str, Tensor]) -> Tensor | None:
        """The transitions with these numbers, by the columns that tell most transitions apart.

        A script may mix up one of its columns: then the transitions are those of most others.
        """
        enough = self._shape.numel() // 2
        distinct = [name for name in COLUMNS if name in own and self._apart[name] > enough]
        found: list[Candidates] = []
        for name in distinct:
            candidates = self._candidates(name, own)
            if candidates is not None:
                if any(_same_rows(candidates.rows, other.rows) for other in found):
                    return self._in_turns(candidates)
                found.append(candidates)
        if found:
            return self._in_turns(found[0]) if len(found) == 1 else None
        for name in sorted(own, key=lambda name: -self._apart[name]):
            candidates = self._candidates(name, own)
            if candidates is not None:
                return self._in_turns(candidates)
        return None

    def _candidates(self, first: str, own: Mapping[str, Tensor]) -> Candidates | None:
        """The transitions with these numbers in one column; where several have a number, those that are nearest in all columns."""
        table, order = self._columns[first].sort(stable=True)
        limit = self._limits[first]
        low = torch.searchsorted(table, (own[first] - limit).contiguous())
        high = torch.searchsorted(table, (own[first] + limit).contiguous(), right=True)
        if bool((low == high).any()):
            return None
        rows = order[low]
        several = (high - low > 1).nonzero().reshape(-1).tolist()
        if len(several) > MAX_SHARED_NUMBERS:
            return None
        equal: dict[int, Tensor] = {}
        for place in several:
            candidates = order[low[place] : high[place]]
            distances = torch.zeros_like(candidates, dtype=torch.float64)
            for name, column in own.items():
                apart = (self._columns[name][candidates] - column[place]).abs()
                # A column counts once, however far off: in one that a script has permuted, another row's number may be the nearest.
                distances += (apart / max(self._limits[name], torch.finfo(apart.dtype).tiny)).clamp(max=1.0)
            equal[place] = candidates[distances == distances.min()]
            rows[place] = equal[place][0]
        return Candidates(rows, equal)

    def _in_turns(self, candidates: Candidates) -> Tensor:
        """Return the transitions, of equal ones one after the other: a pass has each of them once."""
        for place, equal in candidates.equal.items():
            key = int(equal[0])
            turn = self._turns.get(key, 0)
            candidates.rows[place] = equal[turn % len(equal)]
            self._turns[key] = turn + 1
        return candidates.rows


def _grid(steps: int | None = None, envs: int | None = None) -> Callable[[object], Tensor | None]:
    """Accept [T, B], also as [T, B, 1]; of that shape where one is given, and then also [T] of one environment, as a list too."""

    def accept(value: object) -> Tensor | None:
        if steps is None or envs != 1:
            tensor = stacked(value)
            if tensor is not None and tensor.dim() == 3 and tensor.shape[-1] == 1:
                tensor = tensor.squeeze(-1)
            fits = tensor is not None and tensor.dim() == 2 and (steps is None or tuple(tensor.shape) == (steps, envs))
            return tensor if fits else None
        tensor = stacked(value)
        fits = tensor is not None and tensor.numel() == steps and steps in (*tensor.shape, 1)
        return tensor.reshape(steps, 1) if tensor is not None and fits else None

    return accept
