"""Steps and episodes of the environments that a script steps, and the returns and scalars that it reports itself."""

from __future__ import annotations

import math
import re
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from esper_telemetry.adapters.columns import FinishedEpisode, cast_change
from esper_telemetry.adapters.environment_facts import environment_facts
from esper_telemetry.adapters.script.observed_steps import MAX_END_STEPS, EnvCall, ObservedSteps, as_numbers, step_parts, without_repeats
from esper_telemetry.core.metric import segment
from esper_telemetry.equations.transitions import MAX_CHECKSUM_ENTRIES

REPORTED_RETURN = re.compile(
    r"(?P<label>return|rewards?|scores?|(?:\b|_|ep|avg|mean)ret)\b(?:[^\n;,|:=]{0,40}[:=]\s*|\s+)[\[(]?(?P<number>[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?)",
    re.IGNORECASE,
)
"""A word for the return of episodes in a printed line, and the number after it."""

MAX_REPORTED = 4
"""Such words of one line."""

MAX_RECENT_RETURNS = 100
"""Returns of episodes with which reported ones are compared."""

SAME_RETURN = 0.02
"""Largest difference between a reported return and an environment's, as a share of the largest return."""

MAX_TAGS = 256
"""Different tags of a script's scalars that are copied."""

EPISODE_TAGS = {"charts/episodic_return", "episodic_return", "charts/episode_reward"}
"""Tags of single episodes' returns."""

MAX_STEP_ENTRIES = 1 << 22
"""Entries of the observations of one rollout that are copied: 32 megabytes in double precision."""


class EpisodeLog:
    """Records the steps of environments, and counts episodes there: scripts written for Gymnasium 0.29 see none under 1.x.

    It records the environments that the script has stepped before its first optimizer step. A later one replaces one that is gone: a
    script may make an environment for each episode.

    Attributes:
        steps: environment steps so far.
        hidden: episodes ended, and the environments report them in a way that scripts for Gymnasium 0.29 do not read.
        closed: no further environments join.
        inside, resetting: a step, or a reset, of an environment is in progress.
        inner_rewards: rewards in the current step of the innermost environments within the stepped one, by `id`.
        inner_steps: of such environments so far.
        sums_inner: record these rewards; else they are assumed to be those that the stepped environment returns.
        inner_differ: they have differed from those.
        stepped: object of a class of the script whose `step` is in progress: it may reset itself.
        resets: of the environments so far.
        seconds: spent in environments since the rollout began.
        decisions: calls of the network so far, by which actions may have been chosen.
    """

    def __init__(self) -> None:
        self.steps = self.decisions = 0
        self.inside = self.resetting = False
        self.stepped: Any = None
        self.resets = 0
        self.inner_rewards: dict[int, float] = {}
        self.inner_steps = 0
        self.sums_inner, self.inner_differ = True, False
        self.hidden = False
        self.closed = False
        self.seconds = 0.0
        self._running: dict[int, _Running] = {}  # by `id`: environments may be without a hash
        self._finished: list[FinishedEpisode] = []
        self._calls: list[EnvCall] = []
        self._count = self._entries = 0  # calls in the rollout, and entries of their observations
        self._last_count = 0  # calls in the rollout before
        self._cut_lengths: set[int] = set()  # of episodes that the script has ended within rollouts
        self._reported = False
        self._training_lines, self._other_lines, self._trained = set[tuple[Any, int]](), set[tuple[Any, int]](), False

    @property
    def kinds(self) -> str:
        """Names of the classes of the environments, without wrappers."""
        known = ((one.kind, one.env()) for one in self._running.values())
        return ", ".join(sorted({(kind if env is None else type(getattr(env, "unwrapped", env))).__name__ for kind, env in known}))

    @property
    def busy(self) -> bool:
        """True if steps are taken by environments, not by the script."""
        return self.inside or self.resetting

    def trains_at(self, line: tuple[Any, int]) -> bool:
        """Return True for a step from a line of the script that has stepped before training began.

        Any other line evaluates the policy, with an environment of training too, unless a rollout has no other steps.
        """
        if not self.closed:
            self._training_lines.add(line)
        is_known = line in self._training_lines
        self._other_lines |= set() if is_known else {line}
        self._trained |= is_known
        return is_known

    def includes(self, env: Any) -> bool:
        """Return True for an environment of training; one that is stepped before training begins becomes one."""
        if self._of(env) is None and not self.closed:
            index = 1 + max((one.index for one in self._running.values()), default=-1)
            self._running[id(env)] = _Running(env, getattr(env, "num_envs", 1), index)
        return self._of(env) is not None

    def _of(self, env: Any) -> _Running | None:
        """Return the entry of an environment: a new one takes the place of the first of its class that no longer exists."""
        running = self._running.get(id(env))
        if running is not None and running.env() is env:
            return running
        gone = (one for one in self._running.values() if one.kind is type(env) and one.env() is None)
        first = min(gone, key=lambda one: one.index, default=None)
        if first is not None:
            first.env = _reference(env)
            others = [one for one in self._running.values() if one is not first]
            self._running = {-1 - one.index if (own := one.env()) is None else id(own): one for one in others} | {id(env): first}
        return first

    def counts(self, env: Any, result: Any) -> bool:
        """Count a step of an environment of Gymnasium within its episodes, as most steps are; return False for any other step."""
        running = self._running.get(id(env))
        if running is None or running.env() is not env or self.sums_inner or type(result) is not tuple or len(result) != 5:
            return False
        _, rewards, terminated, truncated, infos = result
        is_plain = type(infos) is dict and infos.keys().isdisjoint(("episode", "final_info"))
        if is_plain and running.adds(rewards, terminated, truncated):
            self.steps += len(running.returns)
            self._count += 1
            return True
        return False

    def after_step(self, env: Any, result: Any, action: Any = None, *, foreign: bool = False, traced: bool = True) -> None:
        """Record a step. Its result has observations, rewards, terminations, truncations and infos, or `done` instead of both flags.

        Args:
            foreign: the environment is not of a class of Gymnasium, whose reports of episodes scripts may miss.
            traced: keep the step itself; else only its episodes are counted.
        """
        if len(result) == 4:
            result = _with_two_flags(result)
        observations, rewards, *both, infos = result
        running = self._running[id(env)]
        flags = np.stack([np.asarray(one, dtype=bool).reshape(-1) for one in both])
        size, ended = flags.shape[1], flags[0] | flags[1]
        if len(running.returns) != size:  # several environments of a class that does not say so
            running = self._running[id(env)] = _Running(env, size, running.index)
        paid = np.array(rewards, dtype=np.float64).reshape(size)
        raw = self._raw_rewards(running, size) if self.sums_inner else None
        self.inner_differ = self.inner_differ or (raw is not None and not np.array_equal(raw, paid))
        if running.last_call is not None and running.last_call.cut:
            running.last_call.flags[1] = True
        if running.goes_on(flags):
            flags[1], ended = False, flags[0]
        if traced and len(self._calls) < MAX_END_STEPS:
            rows = _rows_of(observations, size) if self._entries <= MAX_STEP_ENTRIES else None
            self._entries += 0 if rows is None else rows.size
            finals: Any = infos.get("final_obs", infos.get("final_observation", ())) if isinstance(infos, Mapping) else ()
            places = () if rows is None or len(finals) != size else np.flatnonzero(ended)
            last = {int(place): final for place in places if (final := _rows_of(finals[place], 1)) is not None}
            width = running.width = 0 if rows is None else rows.shape[1]
            last = {place: final[0] for place, final in last.items() if final.shape[1] == width}
            received = None if rows is None else _rows_of(action, size)
            running.last_call = EnvCall(running.index, flags, paid, rows, received, last, None, False, _cast_by(env), raw, self.decisions)
            self._calls.append(running.last_call)
        self.steps += size
        self._count += 1
        counted = running.count(paid if raw is None else raw, ended)
        reported = _reported_episodes(infos)
        self._reported = self._reported or reported is not None
        self.hidden = self.hidden or (bool(counted) and not foreign and "final_info" not in infos)
        episodes = (reported or []) if self._reported else counted
        self._finished += [FinishedEpisode(*episode, self._count - 1) for episode in episodes]

    def add_inner_step(self, env: Any, result: Any) -> None:
        """Record the step of an environment within the stepped one, which steps no other one itself."""
        self.inner_steps += 1
        reward = result[1] if isinstance(result, tuple) and len(result) > 3 else None
        if isinstance(reward, int | float | np.number):
            self.inner_rewards[id(env)] = self.inner_rewards.get(id(env), 0.0) + float(reward)

    def _raw_rewards(self, running: _Running, size: int) -> Any:
        """Return the rewards [size] of the environments in the stepped one; None without any, or if all have been 0 so far."""
        rewards, self.inner_rewards = self.inner_rewards, {}
        if len(rewards) == size and not running.inner and any(rewards.values()):
            running.inner = [*rewards]
        known = running.inner and rewards.keys() <= {*running.inner}
        return np.array([rewards.get(one, 0.0) for one in running.inner]) if known else None

    def reset(self, env: Any, result: Any = None) -> None:
        """Restart all episodes of an environment, which returned that. The script itself has ended the current episode."""
        running = self._of(env)
        if running is None:
            return
        call, self.resets = running.last_call, self.resets + 1
        # an episode that a rollout's end cuts has a partial return, unless it is the whole rollout
        for total, length in zip(running.returns.tolist(), running.lengths.tolist(), strict=True):
            if length and (call is not None or length >= self._last_count):
                self._finished.append(FinishedEpisode(total, length, max(0, self._count - 1)))
        if call is not None and running.lengths.any():
            call.cut = True
            self._cut_lengths |= {*running.lengths.tolist()}
        running.restart()
        if call is not None and call.returned is not None and len(running.returns) == 1 and not hasattr(env, "num_envs"):
            rows = _rows_of(result[0] if isinstance(result, tuple) else result, 1)
            call.reset_to = rows if rows is not None and rows.shape == call.returned.shape else call.reset_to

    @property
    def recorded(self) -> int:
        """Number of steps in the rollout that have been recorded."""
        return len(self._calls)

    def show(self, result: Any, *, reset: bool = False) -> None:
        """Replace the last recorded observation by that in the result of a wrapper, of the same step or of the `reset` after it."""
        call = self._calls[-1] if self._calls else None
        parts = (result[0] if isinstance(result, tuple) else result,) if reset else step_parts(result)
        rows = None if call is None or call.returned is None or parts is None else _rows_of(parts[0], len(call.rewards))
        if call is None or rows is None:
            return
        if not reset:
            call.returned = rows
        elif rows.shape == call.returned.shape:
            call.reset_to = rows

    def begins(self, env: Any, result: Any, steps: int) -> bool:
        """Record the result of a method that may be the reset of an environment; return False if it is not one.

        A reset returns an observation. A method that is called again within an episode after a single step only shows the state.

        Args:
            steps: number of steps when the method was called last.
        """
        running = self._of(env)
        if running is None:  # an environment that does not train
            return True
        size = len(running.returns)
        rows = _rows_of(result[0] if isinstance(result, tuple) and result else result, size)
        width = 0 if rows is None else rows.shape[1]
        is_observation = width == running.width or (running.width == 0 and width > 0)
        if not is_observation or (running.lengths.any() and self.steps - steps <= size):
            return False
        self.reset(env, result)
        return True

    def collected(self) -> ObservedSteps | None:
        """Return the steps since the last `take`; None unless all environments took the same number of steps."""
        envs = [running.env() for running in self._running.values()]
        spaces = [getattr(env, "single_action_space", getattr(env, "action_space", None)) for env in envs]
        observed = ObservedSteps.of(without_repeats(self._calls), spaces[0] if spaces else None)
        if observed is not None:  # a script that always ends episodes at one length has ended the last one there, too
            lengths = {length for running in self._running.values() for length in running.lengths.tolist()}
            observed.cut |= lengths == self._cut_lengths and len(lengths) == 1
        return observed

    def facts(self) -> dict[str, Any]:
        """Return the facts of the environment that the script stepped first."""
        first = min(self._running.values(), key=lambda one: one.index, default=None)
        found: dict[str, Any] = {} if first is None else environment_facts(first.env())
        return {**found, "normalize_observations": True} if "NormalizeObs" in found.get("env_wrappers", "") else found

    def take(self) -> tuple[list[FinishedEpisode], float]:
        """Return the episodes that ended since the last call, and the seconds that were spent in environments."""
        episodes, seconds = self._finished, self.seconds
        self._last_count = self._count
        self._training_lines |= set() if self._trained else self._other_lines
        self._other_lines, self._trained = set(), False
        self._finished, self.seconds, self._count, self._calls, self._entries = [], 0.0, 0, [], 0
        for running in self._running.values():
            running.last_call = None
        return episodes, seconds


class _Running:
    """Return and length of the current episodes in one environment, or in several that step together.

    Attributes:
        env: weak reference to it, which is of class `kind`.
        index: number of the environment, in the order in which they were stepped first.
        last_call: its last step since the rollout began; None without one.
        inner: `id` of the environments in it, in the order of their rows.
    """

    def __init__(self, env: Any, size: int, index: int) -> None:
        self.env, self.kind = _reference(env), type(env)
        self.width = 0  # entries of an observation that are recorded
        self.index = index
        self.last_call: EnvCall | None = None
        self.inner: list[int] = []
        self.returns = np.zeros(size)
        self.lengths = np.zeros(size, dtype=int)
        self._over: Any = None  # [size], bool: of the last step, if any was
        self._limited = False  # the last step was at a time limit, and no reset came after it
        mode = str(getattr(env, "metadata", {}).get("autoreset_mode", "")).upper()
        self._resets_next = "NEXT_STEP" in mode or "NEXTSTEP" in mode

    def count(self, rewards: Any, ended: Any) -> list[tuple[float, int]]:
        """Add a step, [size] each, and return the episodes that ended; the step after an end may be a reset, which does not count."""
        over, self._over = np.zeros(len(ended), dtype=bool) if self._over is None else self._over, None
        self.returns += np.where(over, 0.0, rewards)
        self.lengths += ~over
        ended = ended & ~over
        finished = [(float(self.returns[i]), int(self.lengths[i])) for i in np.flatnonzero(ended)]
        self.returns[ended], self.lengths[ended] = 0.0, 0
        self._over = ended if self._resets_next and ended.any() else None
        return finished

    def goes_on(self, flags: Any) -> bool:
        """Return True for a step [2, 1] that repeats a time limit: the script ignores limits, and has not reset the environment."""
        repeated, self._limited = self._limited, flags.shape[1] == 1 and bool(flags[1, 0])
        return repeated and self._limited

    def adds(self, rewards: Any, *flags: Any) -> bool:
        """Add a step at which no episode ends, and that is like the steps before; return False, without adding it, for any other step."""
        if self.last_call is not None or self._over is not None or self._limited:
            return False
        one = isinstance(rewards, int | float | np.number)
        if one:
            fits = len(self.returns) == 1 and all(isinstance(flag, bool | np.bool_) and not flag for flag in flags)
        else:
            fits = all(isinstance(part, np.ndarray) and part.shape == self.returns.shape for part in (rewards, *flags))
            fits = fits and not any(flag.dtype != bool or flag.any() for flag in flags)
        if fits:
            self.returns += rewards
            self.lengths += 1
        return fits

    def restart(self) -> None:
        """Restart all of them."""
        self.returns[:], self.lengths[:], self._over, self._limited = 0.0, 0, None, False


def _reference(env: Any) -> Callable[[], Any]:
    """Return a weak reference, or a strong one to an object of a class that allows no other."""
    try:
        return weakref.ref(env)
    except TypeError:
        return lambda: env


def _rows_of(value: Any, envs: int) -> Any:
    """A copy [B, n] of some entries of each of B rows, float64; None for anything but numbers."""
    numbers = as_numbers(value)
    if numbers is None or numbers.size % envs:
        return None
    rows = numbers.reshape(envs, -1)
    return rows[:, :: -(-rows.shape[1] // MAX_CHECKSUM_ENTRIES)].astype(np.float64)


def _cast_by(env: Any) -> float:
    """Largest change of an observation by the dtype in which Gymnasium's `SyncVectorEnv` joins those of its environments."""
    returned = getattr(getattr(env, "unwrapped", env), "_env_obs", ())
    dtype = getattr(getattr(env, "single_observation_space", None), "dtype", None)
    return max((cast_change(one, dtype) for one in returned), default=0.0)


def _with_two_flags(result: Any) -> tuple[Any, Any, Any, Any, Any]:
    """The result of a step of an environment of Gym before 0.26, with the flags of Gymnasium."""
    observations, rewards, done, infos = result
    each = (infos,) if isinstance(infos, Mapping) else infos if isinstance(infos, Sequence) else ()
    marks = [one.get("TimeLimit.truncated", False) for one in each if isinstance(one, Mapping)]
    ended, cut = (np.asarray(flags, dtype=bool).reshape(-1) for flags in (done, marks))
    cut = cut if cut.size in (1, ended.size) else np.zeros_like(ended)
    return observations, rewards, ended & ~cut, ended & cut, infos


def _reported_episodes(infos: Any) -> list[tuple[float, int]] | None:
    """Episodes that `RecordEpisodeStatistics` reports, with rewards from before other wrappers; None without it."""
    if not isinstance(infos, Mapping):
        return None
    if "episode" not in infos and isinstance(infos.get("final_info"), Mapping):
        infos = infos["final_info"]
    episode = infos.get("episode")
    if not isinstance(episode, Mapping) or "r" not in episode or "l" not in episode:
        return None
    returns, lengths = np.atleast_1d(episode["r"]), np.atleast_1d(episode["l"])
    which = np.atleast_1d(infos.get("_episode", np.ones(len(returns), dtype=bool)))
    return [(float(returns[i]), int(lengths[i])) for i in np.flatnonzero(which)]


class ReturnLog:
    """Returns of episodes that a script prints or writes itself. They are used if they differ from the environments' returns."""

    def __init__(self) -> None:
        self._reported: dict[str, list[float]] = {}
        self._own: deque[float] = deque(maxlen=MAX_RECENT_RETURNS)

    def add_text(self, text: str) -> None:
        """Record the first number after each word for a return in a printed line."""
        for match in islice(REPORTED_RETURN.finditer(text), MAX_REPORTED):
            self.add(match["label"], float(match["number"]))

    def add(self, label: str, value: Any) -> None:
        """Record a number whose name shows that it is a return."""
        number = plain_number(value)
        if math.isfinite(number) and len(self._reported.setdefault(label.lower(), [])) < MAX_RECENT_RETURNS:
            self._reported[label.lower()].append(number)

    def take(self, episodes: Sequence[FinishedEpisode]) -> list[FinishedEpisode]:
        """Return the episodes that ended in a rollout: these, unless the script reports other returns since the last call."""
        self._own += [one.returned for one in episodes]
        reported, self._reported = self._reported, {}
        sure = {label: numbers for label, numbers in reported.items() if "reward" not in label}
        numbers = max((sure if self._own else reported).values(), key=len, default=[])
        low, high = (min(self._own), max(self._own)) if self._own else (math.inf, -math.inf)
        margin = SAME_RETURN * max(abs(low), abs(high)) if self._own else 0.0
        if not numbers or all(low - margin <= one <= high + margin for one in numbers):
            return [*episodes]
        length = round(sum(one.length for one in episodes) / len(episodes)) if episodes else 1
        return [FinishedEpisode(one, length, 0) for one in numbers]


class ScalarLog:
    """Means of the values of each tag that a script has written to its SummaryWriter since the last record.

    Attributes:
        tags: that the script has written.
    """

    def __init__(self) -> None:
        self.tags: set[str] = set()
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, tag: Any, value: Any) -> None:
        """Record a scalar; anything except a finite number is ignored."""
        if not isinstance(tag, str) or (tag not in self.tags and len(self.tags) >= MAX_TAGS):
            return
        self.tags.add(tag)
        number = plain_number(value)
        if math.isfinite(number):
            total, count = self._sums.get(tag, (0.0, 0))
            self._sums[tag] = (total + number, count + 1)

    def take(self) -> dict[str, float]:
        """Return means by key, `script/losses/value_loss` for `losses/value_loss`, and reset them."""
        sums, self._sums = self._sums, {}
        return {
            "/".join(["script", *(segment(part) for part in tag.split("/") if part)]): total / count for tag, (total, count) in sums.items()
        }


def plain_number(value: Any) -> float:
    """Return a number, perhaps of an array or a tensor with one entry."""
    return float(value.item() if hasattr(value, "item") else value)
