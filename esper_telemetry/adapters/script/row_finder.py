"""Columns of equal numbers, and the transitions of a rollout that the rows of a minibatch are.

Shapes: T steps, B environments, R = T B transitions, N rows of a minibatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper_telemetry.metrics.statistics import are_among

SAME_NUMBER = 4e-6
"""Largest difference between equal numbers that were recomputed from sums in single precision, relative to the largest number."""

SAME_LINE = 1e-5
"""Largest difference of two columns that are the same up to a factor and an offset, next to the largest entry."""

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


def line_error(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two arrays up to a positive factor and an offset, next to the largest entry of `other`.

    Correlations do not distinguish arrays whose difference is small.
    """
    first, second = (part.double().reshape(-1) for part in (one, other))
    first, second = first - first.mean(), second - second.mean()
    slope = (first @ second) / first.square().sum()
    error = (second - slope * first).abs().max() / second.abs().max()
    return float(torch.where((slope > 0) & error.isfinite(), error, torch.inf))


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
