"""Results of steps of environments, in the forms in which scripts return them, and the steps of a rollout as columns.

Shapes: T steps, B environments.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.core.event_parts import Transitions
from esper_telemetry.core.metric import Array
from esper_telemetry.equations.transitions import MAX_CHECKSUM_ENTRIES, checksums, informative

MAX_STEP_PARTS = 6
"""Parts of what an environment's `step` returns, at most."""

MAX_END_STEPS = 1 << 14
"""Steps of an environment whose ends are recorded: more than a rollout has."""

MIN_REPEATS, MIN_DECISIONS = 1.5, 4
"""Steps for each call of the network from which the program repeats actions, and number of such calls."""


@dataclass
class EnvCall:
    """A step of b environments together.

    Attributes:
        env: index of the environment that was called.
        flags: [2, b], bool: terminated, truncated.
        rewards: [b].
        returned, received: observations and actions [b, n], in the entries of which checksums are taken; None for anything but numbers.
        finals: last observations [n] of episodes by place, if the environment shows them.
        reset_to: [1, n], what a single environment returned when it was reset afterwards: the observation to be acted on next.
        cut: the script has ended the episode.
        cast: see `Transitions`.
        raw: [b], rewards of the environments within, before wrappers changed them; None if they are not known.
        decision: number of calls of the network before it.
    """

    env: int
    flags: Any
    rewards: Any
    returned: Any
    received: Any
    finals: dict[int, Any]
    reset_to: Any = None
    cut: bool = False
    cast: float = 0.0
    raw: Any = None
    decision: int = 0


def without_repeats(calls: Sequence[EnvCall]) -> list[EnvCall]:
    """Return one call for each decision if the program repeats each action for several steps, with the sum of their rewards."""
    groups: dict[tuple[int, int], list[EnvCall]] = {}
    for call in calls:
        groups.setdefault((call.env, call.decision), []).append(call)
    repeats = (
        np.array_equal(one.received, own[0].received) and not last.flags.any()
        for own in groups.values()
        for last, one in itertools.pairwise(own)
    )
    few = len({call.decision for call in calls}) < MIN_DECISIONS or len(calls) < MIN_REPEATS * len(groups)
    if few or any(call.received is None for call in calls) or not all(repeats):
        return [*calls]
    return [
        replace(
            own[-1],
            flags=np.any([one.flags for one in own], 0),
            rewards=np.sum([one.rewards for one in own], 0),
            raw=None if any(one.raw is None for one in own) else np.sum([one.raw for one in own], 0),
            finals={place: final for one in own for place, final in one.finals.items()},
            cast=max(one.cast for one in own),
        )
        for own in groups.values()
    ]


class ObservedSteps:
    """What the environments returned in a rollout of T steps of B environments.

    Args:
        calls: the same number of each environment, several ones of one row each.
        space: of the actions.

    Attributes:
        steps, envs: T, B.
        in_turns: the environments took their steps together, or in turns.
        ended: [T, B], bool: steps that ended an episode.
        time_limits: [T, B], bool: those by truncation.
        reset: [T, B], bool: steps after which the script acted on the first observation of another episode.
        rewards: [T, B], float64.
        raw_rewards: [T, B], float64, before wrappers changed them; None if they have not, or these are not known.
        received: [T, B, n], float64, actions that the environments received; None for anything but numbers.
        cut: the script has ended the episode of the last step, perhaps only the rollout's part of it.
    """

    def __init__(self, calls: Sequence[EnvCall], space: Any) -> None:
        self.cut = calls[-1].cut
        column = {env: place for place, env in enumerate(sorted({call.env for call in calls}))}
        counts = Counter[int]()
        self._calls, self._space = calls, space
        self._places: list[tuple[int, int]] = []  # step and first environment of each call
        for call in calls:
            self._places.append((counts[call.env], column[call.env]))
            counts[call.env] += 1
        self.steps, self.envs = max(counts.values()), len(calls[0].rewards) if len(column) == 1 else len(column)
        self.in_turns = self._places == sorted(self._places)
        terminated, truncated = (self._grid([call.flags[place] for call in calls]) for place in (0, 1))
        self.ended, self.time_limits = (torch.from_numpy(terminated | truncated), torch.from_numpy(truncated & ~terminated))
        self.reset = torch.zeros_like(self.ended)
        for (step, env), call in zip(self._places, calls, strict=True):
            self.reset[step, [env] if call.reset_to is not None else [env + place for place in call.finals]] = True
        self.rewards = torch.from_numpy(self._grid([call.rewards for call in calls]))
        raw, received = (self._grid([getattr(call, name) for call in calls]) for name in ("raw", "received"))
        self.received = None if received is None else torch.from_numpy(received)
        self.raw_rewards = None if raw is None or (raw == self.rewards.numpy()).all() else torch.from_numpy(raw)

    @classmethod
    def of(cls, calls: Sequence[EnvCall], space: Any) -> ObservedSteps | None:
        """Return the steps of these calls; None unless all environments took the same number of steps."""
        sizes = {(call.env, len(call.rewards)) for call in calls}
        whole = len({env for env, _ in sizes}) == len(sizes) and (len(sizes) == 1 or {size for _, size in sizes} == {1})
        counts = Counter(call.env for call in calls)
        return cls(calls, space) if 0 < len(calls) < MAX_END_STEPS and whole and len({*counts.values()}) == 1 else None

    def _grid(self, rows: Sequence[Any]) -> Any:
        """Return the rows of each call, [b, ...], as [T, B, ...]; None if they differ in shape."""
        if any(one is None or one.shape[1:] != rows[0].shape[1:] for one in rows):
            return None
        table = np.zeros((self.steps, self.envs, *rows[0].shape[1:]), dtype=rows[0].dtype)
        for (step, env), one in zip(self._places, rows, strict=True):
            table[step, env : env + len(one)] = one
        return table

    def log_probs(self, logits: Tensor) -> list[Tensor] | None:
        """Return the log-probabilities [B] of the choices that the environments received in each step; None if they are no choices."""
        if self.received is None or self.received.shape != (*logits.shape[:2], 1):
            return None
        chosen = self.received.to(logits.device).long()
        if int(chosen.min()) < 0 or int(chosen.max()) >= logits.shape[-1]:
            return None
        return list(logits.log_softmax(-1).gather(-1, chosen).squeeze(-1))

    def bounds(self, actions: Tensor) -> Tensor | None:
        """Return the bounds [2, D] of the actions; None unless the environments received the stored ones [T, B, D], perhaps cut there."""
        limits, sent, received = self._limits, actions.detach().cpu().double().numpy(), self.received
        if limits is None or received is None or received.shape != sent.shape or len(limits[0]) != sent.shape[-1]:
            return None
        (low, high), arrived = limits, received.numpy()
        pairs = ((sent, arrived), (sent.clip(low, high), arrived), (sent, arrived.clip(low, high)))
        same = any(np.allclose(*pair, atol=1e-6) for pair in pairs)
        return torch.from_numpy(limits) if same else None

    @property
    def _limits(self) -> Array | None:
        """The bounds [2, D] of the action space; None if there are none."""
        if getattr(self._space, "low", None) is None or not np.isfinite([self._space.low, self._space.high]).all():
            return None
        return np.stack([np.asarray(bound, dtype=np.float64).reshape(-1) for bound in (self._space.low, self._space.high)])

    @property
    def range_use(self) -> tuple[float, float] | None:
        """How the actions that arrived use their range; None if they are not real numbers with bounds."""
        limits, arrived = self._limits, self.received
        if limits is None or arrived is None or len(limits[0]) != arrived.shape[-1]:
            return None
        size, rows = limits[1] - limits[0], arrived.numpy().reshape(-1, arrived.shape[-1])
        if not (size > 0).all() or not np.isfinite(rows).all():
            return None
        return float((2 * rows.std(0) / size).mean()), float((2 * np.abs(rows - limits.mean(0)) / size).max())

    def transitions(self, stored: Tensor, actions: Tensor | None) -> Transitions | None:
        """Return the steps with the stored observations [T, B, ...] and actions [T, B, D]; None if these are of another shape."""
        calls, observations = self._calls, stored.detach().cpu()
        size = observations[0, 0].numel()
        table = self._grid([call.returned if call.reset_to is None else call.reset_to for call in calls])
        width = len(range(0, size, -(-size // MAX_CHECKSUM_ENTRIES)))
        if table is None or table.shape != (*stored.shape[:2], width):
            return None
        outcomes = torch.from_numpy(table).to(observations.dtype if observations.is_floating_point() else torch.float64)
        whole = outcomes.trunc()
        ends = torch.full(outcomes.shape[:2], torch.nan, dtype=torch.float64)
        for (step, env), call in zip(self._places, calls, strict=True):
            for place, final in (call.finals if call.reset_to is None else {0: call.returned[0]}).items():
                ends[step, env + place] = checksums(torch.from_numpy(final).to(outcomes).reshape(1, 1, -1))[0, 0]
        sent = None if actions is None else actions.detach().cpu().double().reshape(*ends.shape, -1)
        received = self.received
        if sent is None or received is None or received.shape != sent.shape:
            sent = received = None
        return Transitions(
            inputs=checksums(observations),
            outcomes=checksums(outcomes),
            finals=ends,
            rewards=self.rewards,
            informative=informative(observations),
            sent=None if sent is None else checksums(sent),
            received=None if received is None else checksums(received),
            cast=max(call.cast for call in calls),
            whole=None if torch.equal(whole, outcomes) else checksums(whole),
        )


def step_parts(result: Any) -> tuple[Any, ...] | None:
    """Return observations, rewards, one or two flags and information of what an environment's `step` returned; None of other results.

    Flags are logical, or only zeros and ones. Other numbers are rewards, usually the second part, and what is left are observations.
    A dictionary or an instance of a dataclass has logical flags.
    """
    named = named_parts(result)
    result = result if named is None or not any(map(is_flag, named)) else named
    if not isinstance(result, tuple | list) or not 3 <= len(result) <= MAX_STEP_PARTS:
        return None
    if len(result) == 5 and isinstance(result[4], dict):  # the usual case: environments of Gymnasium
        first, amount, *ends, information = result
        if isinstance(amount, int | float | np.number) and all(isinstance(one, bool | np.bool_) for one in ends):
            return first, np.asarray([amount]), *(np.asarray([one], dtype=bool) for one in ends), information
        arrays = isinstance(amount, np.ndarray) and all(isinstance(one, np.ndarray) and one.dtype == bool for one in ends)
        if arrays and amount.ndim == 1 and amount.dtype.kind in "fiu" and ends[0].shape == ends[1].shape == amount.shape:
            return first, amount, *ends, information
    columns = {place: column for place, one in enumerate(result) if place and (column := as_numbers(one)) is not None}
    each = ((one, one if isinstance(one, list | tuple) else [one]) for one in result)
    infos = next((one for one, parts in each if parts and all(isinstance(part, Mapping) for part in parts)), None)
    # without information, numbers may be an agent's: actions, log-probabilities, values
    kinds = "fiub" if infos is not None else "fb" if len(result) == 3 else "b"
    binary = [one for one in columns if columns[one].dtype.kind in kinds and _is_binary(columns[one])]
    logical = [place for place in binary if columns[place].dtype.kind == "b"]
    flags = [one for one in logical if one > 1] or logical or [one for one in binary if one > 1]
    sizes = {columns[place].size for place in flags}
    if len(sizes) != 1 or len(flags) > 2:
        return None
    first = as_numbers(result[0])
    paid = [place for place, column in columns.items() if place not in flags and column.size in sizes]
    if flags[0] == 1 and first is not None and first.ndim <= 1 and first.size in sizes:  # what follows a flag is no reward
        paid = []
    elif not paid and sizes == {1}:  # environments of a batch may share a flag
        rows = len(first) if first is not None and first.ndim > 1 else 0
        paid = [place for place, column in columns.items() if place not in flags and column.shape == (rows,)]
    columns[0] = None if paid else first
    if not paid and (columns[0] is None or columns[0].size not in sizes):
        return None
    # whole numbers may be of the state
    real = (place for place in paid if columns[place].dtype.kind == "f" and place < flags[0])
    reward = next(real, paid[0]) if paid else 0
    seen = next((place for place in range(len(result)) if place not in (reward, *flags)), reward)
    return (
        result[seen],
        columns[reward].reshape(-1),
        *(np.broadcast_to(columns[one].reshape(-1).astype(bool), columns[reward].size) for one in flags),
        {} if infos is None else infos,
    )


def step_result(result: object) -> tuple[Any, ...] | list[Any] | None:
    """Return the result of a step in the form that `step_parts` reads; None of others.

    It may have names, be a reward and a flag, or an observation and a reward without a logical flag, which gives a list.
    """
    result = result if (named := named_parts(result)) is None else named
    pair = [as_numbers(one) for one in result] if isinstance(result, tuple | list) and len(result) == 2 else []
    if all(one is not None and one.ndim == 1 and one.dtype.kind == "f" for one in pair) and len({one.size for one in pair}) == 1:
        rewards, ended = pair
        if ended.size > 1 and bool(((ended == 0) | (ended == 1)).all()):  # the flags of several environments as numbers
            return None, rewards, ended.astype(bool), {}
    if not isinstance(result, tuple | list) or not any(map(is_flag, result)):
        return unflagged_step(result)
    parts = (None, *result, {}) if len(result) == 2 else tuple(result)
    return parts if step_parts(parts) is not None else None


def unflagged_step(result: object) -> list[Any] | None:
    """Return observations, rewards, flags and information of a step that returned an observation and a reward, perhaps with information.

    An observation of None is the end of the episode. A third part that is 0 or 1 is the flag. Returns None of other results.
    """
    parts = [one for one in result if not isinstance(one, Mapping)] if isinstance(result, tuple | list) and len(result) <= 4 else []
    if not 2 <= len(parts) <= 3:
        return None
    for seen, reward, kinds in ((parts[0], parts[1], "fiu"), (parts[1], parts[0], "f")):
        paid, shown = as_numbers(reward), as_numbers(seen)
        if paid is None or paid.ndim > 1 or paid.dtype.kind not in kinds or getattr(reward, "requires_grad", False):
            continue
        over = np.full(paid.size, seen is None) if len(parts) == 2 else as_numbers(parts[2])
        if over is None or over.shape not in (paid.shape, (paid.size,)) or not _is_binary(over):
            continue
        if seen is None or (shown is not None and shown.ndim and (not paid.ndim or len(shown) == len(paid))):
            return [seen, paid.reshape(-1), over.reshape(-1).astype(bool), {}]
    return None


def named_parts(result: object) -> tuple[Any, ...] | None:
    """Return the values of a dictionary, or of an instance of a dataclass; None of others."""
    if isinstance(result, Mapping):
        return tuple(result.values())
    if is_dataclass(result) and not isinstance(result, type):
        return tuple(getattr(result, field.name) for field in fields(result))
    return None


def is_flag(part: object) -> bool:
    """Return True for a logical part, not only a number that is 0 or 1."""
    return isinstance(part, bool | np.bool_) or str(getattr(part, "dtype", "")) in ("bool", "torch.bool")


def _is_binary(column: np.ndarray[Any, Any]) -> bool:
    return column.dtype.kind == "b" or bool(((column == 0) | (column == 1)).all())


def as_numbers(value: Any) -> Any:
    """Return an array on the host; None for anything but numbers."""
    try:
        array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    except ValueError:  # parts of different shapes
        return None
    return array if array.dtype.kind in "fiub" and array.size else None
