"""Rollouts of Stable-Baselines3: their steps as they are taken, and the events of a record's rollouts.

What the buffer holds when the rollout is complete, rewards among it, is read there; between two steps only the rest is recorded. To
record distributions, observations and actions on their way took 4 % of the trainer's time: a rollout whose update is not sampled goes
without them, and the policy is listened to in every sixteenth step, for the time that environments take.

Shapes: T steps, B environments, D action dimensions, I inputs and H width of an LSTM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.adapters.columns import (
    Array,
    FinishedEpisode,
    HeadColumns,
    episodes_event,
    join_columns,
    next_values,
)
from esper_telemetry.adapters.sb3.collection import CollectedSteps, End, Memory, ResetCounter, StepRecorder
from esper_telemetry.adapters.sb3.distributions import MAX_CAPTURES, ActionHeads, DistributionRecorder
from esper_telemetry.adapters.taps import Listener, without_trace
from esper_telemetry.core.clock import Clock
from esper_telemetry.core.event_parts import Scale, Transitions
from esper_telemetry.events import EpisodeEnd, RecurrentForward, Remover, RolloutEnd
from esper_telemetry.updates.pickles import policy_copy

NORMALIZER_EPS = 1e-8
"""Added to the variances of a VecNormalize, whatever its own setting is."""

MAX_JOINED_ENTRIES = 1 << 20
"""Entries of the observations of several rollouts up to which they are joined."""

TIMED_STEPS = 16
"""Steps from one that is timed to the next: its environments where the rollout is not sampled, its recording where it is."""

NOT_TIMED = nullcontext()

ZERO_BYTE = b"\0"


class RecurrentStep(NamedTuple):
    """One step of the actor's LSTM.

    Attributes:
        inputs: [B, I].
        before, after: h and c, [layers, B, H] each; zero before a step that begins an episode.
    """

    inputs: Tensor
    before: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]


class CollectedRollout(NamedTuple):
    """A rollout before minibatches are taken from the buffer; its arrays are the buffer's own, which the next rollout replaces.

    Attributes:
        values, advantages, returns, log_probs: [T, B].
        actions: [T, B, D].
        bootstrapped: [T, B], rewards with the value after a time limit in them.
        rewards: [T, B] without it.
        raw_rewards: [B] of each step; empty where rewards are not scaled.
        ended, time_limits: [T, B], bool.
        final_values: [T, B], estimates of the states after time limits, where the trainer added nothing, or the value of another state; 0
            elsewhere; None where there are no such steps.
        last_values: [B], the critic's estimates of the states after the last step.
        heads: columns of the distributions that were sampled from, some steps after the others.
        observations: [T, B, ...], as the policy received them; None where they have several parts.
        episodes: that finished.
        steps: as they were taken.
        ends_known: the collecting loop has shown in every step which episodes ended, and why.
    """

    values: Array
    advantages: Array
    returns: Array
    log_probs: Array
    actions: Array
    bootstrapped: Array
    rewards: Array
    raw_rewards: list[Array]
    ended: Array
    time_limits: Array
    final_values: Array | None
    last_values: Tensor
    heads: list[HeadColumns]
    observations: Array | None
    episodes: list[FinishedEpisode]
    steps: CollectedSteps
    ends_known: bool


class RolloutRecorder:
    """Records the T steps of B environments of one rollout after another.

    Args:
        listen_to_policy: calls a listener after each of the policy's passes from now on; returns the function that ends this.
        clock: of telemetry, which times one step in `TIMED_STEPS` that is recorded in full, for all of them.

    Attributes:
        recurrent_steps: of this rollout; empty for a feed-forward policy.
        first_memory: states that the policy received with the first of them.
        needs_steps: every rollout has to be recorded whole, as far as those that were have shown.
    """

    def __init__(
        self, model: Any, recorder: DistributionRecorder, listen_to_policy: Callable[[Listener], Remover], clock: Clock
    ) -> None:
        self._model, self._policy = model, model.policy
        self._capture, self._join, self._summary = recorder.capture, recorder.join, recorder.summary
        self._listen_to_policy, self._clock = listen_to_policy, clock
        self._stop_listening: Remover | None = None
        self.needs_steps = True
        scaled = model.get_vec_normalize_env()
        self._scaled = scaled if scaled is not None and scaled.norm_reward else None
        self._recurrent = hasattr(model.policy, "lstm_actor")
        self._sums = np.zeros(model.n_envs)
        self._lengths = np.zeros(model.n_envs, np.int64)
        self._complete = np.asarray(model._last_episode_starts, bool).copy()
        self._lstm_step: RecurrentStep | None = None
        self._acted_at = 0.0
        self._steps = StepRecorder(model.get_env())
        self._resets = ResetCounter(model, self._steps.innermost)
        self._answer: tuple[Array, Array, Any] | None = None
        self.begin(whole=True)

    def begin(self, *, whole: bool) -> None:
        """Forget all steps: a rollout begins; `whole`: all of its steps are recorded, and not only where episodes end."""
        self._whole = whole or self.needs_steps
        self._raw_rewards: list[Array] = []
        self._ends: list[End] = []
        self._step_count = self._shown_steps = self._timed_steps = 0
        self._steps.begin()
        self._heads: list[HeadColumns] = []
        self._captures: list[Any] = []
        self.recurrent_steps: list[RecurrentStep] = []
        self.first_memory: Memory | None = None
        self._timed_seconds = 0.0
        if self._stop_listening is None:
            self._stop_listening = self._listen_to_policy(self.after_action)

    def environment_taps(self, listen: Callable[[object, str, Listener], Remover]) -> list[Remover]:
        """Return taps on the resets of the environments, and on their answers."""
        resets = [listen(owner, "reset", self._resets.after_reset) for owner in self._resets.owners]
        return [*resets, listen(self._model.get_env(), "step_wait", self.after_answer)]

    def stop(self) -> None:
        """Listen to the policy no more."""
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None

    @property
    def environment_seconds(self) -> float:
        """Wall time between actions and their outcomes in this rollout, by that of the steps that were timed."""
        return self._timed_seconds * self._step_count / max(1, self._timed_steps)

    def after_lstm(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The actor's LSTM was called."""
        inputs, states = args
        self._lstm_step = RecurrentStep(inputs[0].detach(), states, result[1])

    def after_action(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The policy chose actions."""
        if self._whole:
            with self._timing():
                captures = self._captures
                captures.append(self._capture(self._policy))
                if len(captures) == MAX_CAPTURES:
                    self._join_captures()
                if self._recurrent and self._lstm_step is not None:
                    if not self.recurrent_steps:
                        self.first_memory = Memory.received(args, kwargs, self._lstm_step.before)
                    self.recurrent_steps.append(self._lstm_step)
                self._steps.after_action(args)
        self._acted_at = perf_counter()

    def after_answer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The environments returned this."""
        if self._whole:
            self._steps.after_answer(result[0], result[1])

    def after_step(self, variables: Mapping[str, Any]) -> None:
        """The environments answered; `variables` are the local ones of the collecting loop."""
        if self._stop_listening is not None:
            self._timed_seconds += perf_counter() - self._acted_at
            self._timed_steps += 1
            if not self._whole:
                self.stop()
        elif self._step_count % TIMED_STEPS == TIMED_STEPS - 1:
            self._stop_listening = self._listen_to_policy(self.after_action)
        self._record_outcomes(variables)
        self._step_count += 1

    def _record_outcomes(self, variables: Mapping[str, Any]) -> None:
        """Keep what the environments returned, where the loop shows it and it is new."""
        dones, rewards = variables.get("dones"), variables.get("rewards")
        if not (isinstance(dones, np.ndarray) and isinstance(rewards, np.ndarray) and "infos" in variables):
            return  # a loop of the user's own, with names of its own
        before, self._answer = self._answer, (rewards, dones, variables["infos"])
        if before is not None and rewards is before[0] and dones is before[1] and variables["infos"] is before[2]:
            return  # of an earlier step: the loop does not show its variables in each
        if dones.tobytes().strip(ZERO_BYTE):  # takes a sixth of the time of `dones.any()`
            copied = rewards.copy()  # bootstraps are added in place
            self._ends.append((self._step_count, dones.copy(), copied, variables["infos"]))
        if self._scaled is not None:
            self._raw_rewards.append(self._scaled.get_original_reward())
        if self._whole:
            with self._timing():
                self._steps.after_step(variables)
        self._resets.after_step(variables)
        self._shown_steps += 1

    def _timing(self) -> AbstractContextManager[None]:
        """Return the context in which a step is recorded in full."""
        return NOT_TIMED if self._step_count % TIMED_STEPS else self._clock.weighing(TIMED_STEPS)

    def finish(self, last_values: Tensor) -> CollectedRollout:
        """Return the rollout, which is complete in the buffer; `last_values` [B] of the states after it."""
        if self._captures:
            self._join_captures()
        buffer = self._model.rollout_buffer
        rewards = paid = buffer.rewards.copy()
        ends_known = self._shown_steps == self._step_count == len(rewards)
        if ends_known:
            ended = np.zeros(rewards.shape, bool)
            paid = self._paid_rewards(rewards)
        else:  # what the buffer has, which does not tell time limits
            self._raw_rewards, self._ends = [], []
            ended = np.concatenate([buffer.episode_starts[1:], self._model._last_episode_starts[None]]).astype(bool)
        for step, dones, _, _ in self._ends:
            ended[step] = dones
        time_limits = np.zeros_like(ended)
        episodes = self._episodes(paid, time_limits)
        if self._stores_raw(rewards, ended):
            paid = np.stack(self._raw_rewards).astype(rewards.dtype)
        stores_paid = np.array_equal(paid[~ended], rewards[~ended], equal_nan=True)
        heads, summary = self._heads, self._summary(self._policy, ended.shape)
        if self._whole:
            sufficient = summary is not None and _agrees(summary, heads)
            self.needs_steps = self._recurrent or not (stores_paid and ends_known and sufficient)
        else:
            heads = [] if summary is None else [summary]
        changed = None
        if stores_paid:
            rewards[ended] = paid[ended]
        elif self._recurrent or (final_values := self._values_after(time_limits)) is None:
            ends_known = False
        else:  # the buffer has other rewards, and what was added after time limits has to be asked for
            bootstraps = buffer.gamma * final_values
            changed = _changed_rewards(rewards, paid, bootstraps)
            rewards = rewards - _added(rewards, paid, bootstraps) if changed is None else changed
        last_values = self._asked_last_values(last_values)
        return CollectedRollout(
            values=buffer.values,
            advantages=buffer.advantages,
            returns=buffer.returns,
            log_probs=buffer.log_probs,
            actions=buffer.actions,
            bootstrapped=buffer.rewards,
            rewards=rewards,
            raw_rewards=self._raw_rewards,
            ended=ended,
            episodes=episodes,
            time_limits=time_limits,
            final_values=None if changed is not None else self._final_values(rewards, time_limits, last_values),
            last_values=last_values,
            heads=heads,
            observations=buffer.observations if isinstance(buffer.observations, np.ndarray) else None,
            steps=self._steps.finish(buffer.observations, self._ends, self._resets)
            if self._whole
            else CollectedSteps(None, None),
            ends_known=ends_known,
        )

    def states(self, *, after: bool = False) -> Tensor | None:
        """States in which each step began, or ended, [T, layers, 2, B, H]; None for a feed-forward policy."""
        if not self.recurrent_steps:
            return None
        pairs = [step.after if after else step.before for step in self.recurrent_steps]
        hidden, cell = (torch.stack([pair[part] for pair in pairs]).detach() for part in (0, 1))
        return torch.stack([hidden, cell], 2)

    def _paid_rewards(self, stored: Array) -> Array:
        """Return the rewards [T, B] as the collecting loop received them, from those in the buffer where not all steps were recorded."""
        if self._whole:
            return self._steps.rewards().astype(stored.dtype)
        paid = stored.copy()
        for step, dones, rewards, _ in self._ends:
            paid[step] = np.where(dones, rewards, paid[step])
        return paid

    def _stores_raw(self, stored: Array, ended: Array) -> bool:
        """Return True where the buffer has the rewards from before the environments normalised them, as far as nothing is added to them."""
        raw = [*self._raw_rewards]
        return len(raw) == len(stored) and np.array_equal(np.stack(raw).astype(stored.dtype)[~ended], stored[~ended])

    def _final_values(self, rewards: Array, time_limits: Array, last_values: Tensor) -> Array | None:
        """Return the critic's estimates after time limits, [T, B], where rewards [T, B] had nothing added, or the value of another state.

        A right trainer adds these estimates, so that nothing is left to ask the critic for.
        """
        buffer = self._model.rollout_buffer
        added = buffer.rewards - rewards
        following = np.concatenate([buffer.values[1:], last_values.detach().cpu().numpy().reshape(1, -1)])
        others = (0.0, buffer.gamma * following, buffer.gamma * buffer.values)
        rows = time_limits & np.logical_or.reduce([np.isclose(added, other, rtol=1e-4, atol=0.0) for other in others])
        return None if self._recurrent or not rows.any() else self._values_after(rows)

    def _values_after(self, rows: Array) -> Array | None:
        """Return the critic's estimates of the last observations of episodes that ended in these rows [T, B]; 0 elsewhere.

        None if the policy cannot be copied.
        """
        values = np.zeros(rows.shape, np.float32)
        try:
            policy = policy_copy(self._policy)
        except TypeError:
            return None
        with torch.no_grad(), without_trace(policy):
            for step, _, _, infos in self._ends:
                for index in map(int, np.flatnonzero(rows[step])):
                    last = policy.obs_to_tensor(infos[index]["terminal_observation"])[0]
                    values[step, index] = float(policy.predict_values(last).flatten()[0])
        return values

    def _asked_last_values(self, given: Tensor) -> Tensor:
        """Return the critic's estimates [B] after the last step, asked for where those that were given are of the step before, or 0."""
        before = torch.from_numpy(self._model.rollout_buffer.values[-1])
        claimed = given.detach().cpu().flatten()
        if self._recurrent or not (torch.equal(claimed, before) or not claimed.any()):
            return given
        try:
            policy = policy_copy(self._policy)
        except TypeError:
            return given
        with torch.no_grad(), without_trace(policy):
            values: Tensor = policy.predict_values(policy.obs_to_tensor(self._model._last_obs)[0]).flatten()
        return given if torch.allclose(values.cpu(), claimed, rtol=1e-4) else values

    def _join_captures(self) -> None:
        captures, self._captures = self._captures, []
        self._heads.append(self._join(captures, torch.stack))

    def _episodes(self, rewards: Array, time_limits: Array) -> list[FinishedEpisode]:
        """Return the episodes that finished, and mark in `time_limits` those that a time limit ended."""
        episodes: list[FinishedEpisode] = []
        raw = (np.stack(self._raw_rewards) if self._raw_rewards else rewards).astype(np.float64)
        since = np.zeros(len(self._sums), np.int64)
        for step, dones, _, infos in self._ends:
            for index in map(int, np.flatnonzero(dones)):
                info, monitored = infos[index], infos[index].get("episode")  # a Monitor's numbers win over our own
                if monitored is not None or self._complete[index]:
                    total = self._sums[index] + raw[since[index] : step + 1, index].sum()
                    length = self._lengths[index] + step + 1 - since[index]
                    own = (monitored["r"], monitored["l"]) if monitored else (total, length)
                    episodes.append(FinishedEpisode(float(own[0]), int(own[1]), step))
                self._sums[index], self._lengths[index], self._complete[index] = 0.0, 0, True
                limited = info.get("TimeLimit.truncated", False) and info.get("terminal_observation") is not None
                time_limits[step, index] = bool(limited)
                since[index] = step + 1
        self._sums += [raw[first:, index].sum() for index, first in enumerate(since)]
        self._lengths += len(raw) - since
        return episodes


def _changed_rewards(stored: Array, paid: Array, bootstraps: Array) -> Array | None:
    """Return the rewards [T, B] scaled or clipped, where what is stored is their sum with the bootstraps, changed so; else None."""
    plain = bootstraps == 0.0
    size = float(np.square(paid[plain]).sum())
    factor = float((stored * paid)[plain].sum()) / size if size else 1.0
    low, high = stored.min(), stored.max()
    scaled = np.multiply(factor, (paid, paid + bootstraps), dtype=stored.dtype)
    for rewards, sums in (scaled, np.clip((paid, paid + bootstraps), low, high)):
        if np.allclose(stored, sums, rtol=1e-4, atol=1e-6):
            return np.asarray(rewards, stored.dtype)
    return None


def _added(stored: Array, paid: Array, bootstraps: Array) -> Array:
    """Return what was added to the rewards after time limits [T, B], in the rows in which it is stored: one step late if they are."""
    late = np.concatenate([np.zeros_like(bootstraps[:1]), bootstraps[:-1]])
    is_late = len(stored) > 1 and np.allclose((stored - late)[1:], paid[:-1], rtol=1e-4, atol=1e-6)
    return late if is_late else bootstraps


def _agrees(summary: HeadColumns, heads: Sequence[HeadColumns]) -> bool:
    """Return whether captured heads have the spread of the summary in every row."""
    captured = join_columns(heads, torch.cat).log_std
    return captured.keys() == summary.log_std.keys() and all(
        captured[name].shape == column.shape and torch.allclose(captured[name], column, atol=1e-5)
        for name, column in summary.log_std.items()
    )


def rollout_event(
    model: Any,
    rollouts: Sequence[CollectedRollout],
    heads: ActionHeads,
    states: Tensor | None,
    *,
    update: int,
    env_step: int,
) -> RolloutEnd:
    """Return the event of rollouts that follow one another.

    Rewards are those before a time limit's bootstrap was added; its share comes back as the value of the state that followed.
    """
    device = model.device
    fields: Any = CollectedRollout._make(zip(*rollouts, strict=True))  # each field of all rollouts
    columns = join_columns(list(chain.from_iterable(fields.heads)), torch.cat)
    actions = heads.actions(_joined(fields.actions, device))
    rewards, ended = _joined(fields.rewards, device), _joined(fields.ended, device)
    raw = list(chain.from_iterable(fields.raw_rewards))
    return RolloutEnd(
        update=update,
        env_step=env_step,
        rewards=rewards,
        values=_joined(fields.values, device),
        advantages=_joined(fields.advantages, device),
        returns=_joined(fields.returns, device),
        log_probs=_joined(fields.log_probs, device),
        ended=ended,
        terminated=ended & ~_joined(fields.time_limits, device),
        next_values=torch.cat([_next_values(rollout, model.gamma) for rollout in rollouts]).to(device),
        actions=actions,
        gamma=model.gamma,
        raw_rewards=_on_device(np.stack(raw).astype(np.float32), device) if raw else None,
        head_log_probs=heads.log_probs(columns, actions),
        bounds=heads.bounds(device),
        states=states,
        scales=_scales(model, rewards, fields.observations),
        observations=_observations(fields.observations),
        transitions=_transitions([steps.transitions for steps in fields.steps]),
        last_values=torch.stack([rollout.last_values.detach().flatten() for rollout in rollouts]).to(device),
        ends_known=all(fields.ends_known),
        **columns._asdict(),
    )


def rollout_episodes(rollouts: Sequence[CollectedRollout], env_step: int) -> EpisodeEnd | None:
    """Return the event of the episodes that finished in rollouts that follow one another; None where none did."""
    episodes = [
        episode._replace(time=episode.time + place * len(rollout.rewards))
        for place, rollout in enumerate(rollouts)
        for episode in rollout.episodes
    ]
    return episodes_event(episodes, env_step)


def recurrent_event(policy: Any, recorder: RolloutRecorder, envs: int) -> RecurrentForward | None:
    """Return the event of the actor's LSTM in the first `envs` environments; None without one."""
    before, after = recorder.states(), recorder.states(after=True)
    if before is None or after is None:
        return None
    lstm: nn.LSTM = policy.lstm_actor
    cells = [lstm]
    if lstm.num_layers > 1:
        cells = [_single_layer(lstm, layer) for layer in range(lstm.num_layers)]
    first = torch.stack([step.inputs[:envs] for step in recorder.recurrent_steps])
    above = [after[:, layer, 0, :envs] for layer in range(lstm.num_layers - 1)]
    return RecurrentForward(cells, [first, *above], before[:, :, :, :envs].unbind(1))


def _single_layer(lstm: nn.LSTM, layer: int) -> nn.LSTM:
    """An LSTM of one layer with the weights of that layer."""
    width = lstm.input_size if layer == 0 else lstm.hidden_size
    device = lstm.get_parameter("weight_ih_l0").device
    # begun on no device, because random weights would be drawn from the generator of the run
    single = nn.LSTM(width, lstm.hidden_size, bias=lstm.bias, device="meta").to_empty(device=device)
    with torch.no_grad():
        for name, parameter in single.named_parameters():
            parameter.copy_(lstm.get_parameter(name.replace("_l0", f"_l{layer}")))
    return single


def _next_values(rollout: CollectedRollout, gamma: float) -> Tensor:
    """The critic's estimate [T, B] of the state that follows each step, 0 after termination."""
    added = (rollout.bootstrapped - rollout.rewards) / gamma if gamma else np.zeros_like(rollout.rewards)
    if rollout.final_values is not None:
        added = np.where(rollout.final_values != 0.0, rollout.final_values, added)
    bootstrap = torch.from_numpy(np.where(rollout.time_limits, added, 0.0).astype(np.float32))
    last = rollout.last_values.detach().cpu()
    return next_values(torch.from_numpy(rollout.values), last, torch.from_numpy(rollout.ended), bootstrap)


def _transitions(parts: Sequence[Transitions | None]) -> Transitions | None:
    """Transitions of rollouts that follow one another; None where one of them has none."""
    present = [part for part in parts if part is not None]
    if len(present) < len(parts) or len(parts) == 1:
        return present[0] if len(parts) == len(present) == 1 else None
    joined: Any = Transitions._make(zip(*present, strict=True))  # each field of all rollouts
    columns: dict[str, Any] = {
        name: None if any(x is None for x in column) else torch.cat(column)
        for name, column in joined._asdict().items()
        if name not in ("informative", "resets")
    }
    return Transitions(informative=all(joined.informative), resets=sum(joined.resets), **columns)


def _observations(arrays: Sequence[Array | None]) -> Tensor | None:
    """Observations in place, on the host; None of several rollouts whose observations would be much to copy."""
    present = [array for array in arrays if array is not None]
    if not present or (len(present) > 1 and sum(array.size for array in present) > MAX_JOINED_ENTRIES):
        return None
    return torch.from_numpy(present[0] if len(present) == 1 else np.concatenate(present))


def _scales(model: Any, rewards: Tensor, observations: Sequence[Array | None]) -> dict[str, Scale]:
    """State of a VecNormalize after the rollouts, and its outputs."""
    scaled = model.get_vec_normalize_env()
    scales: dict[str, Scale] = {}
    if scaled is None:
        return scales
    present = [part for part in observations if part is not None and scaled.norm_obs]
    if present:
        scales["obs"] = _scale(scaled.obs_rms, scaled.clip_obs, _joined(present, model.device))
    if scaled.norm_reward:
        scales["ret"] = _scale(scaled.ret_rms, scaled.clip_reward, rewards)
    return scales


def _scale(moments: Any, limit: float, normalized: Tensor) -> Scale:
    mean, std = np.asarray(moments.mean, np.float64), np.sqrt(np.asarray(moments.var, np.float64) + NORMALIZER_EPS)
    device = normalized.device
    return Scale(_on_device(np.atleast_1d(mean), device), _on_device(np.atleast_1d(std), device), limit, normalized)


def _joined(arrays: Sequence[Array], device: torch.device) -> Tensor:
    """Arrays [T, ...] one after the other."""
    return _on_device(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), device)


def _on_device(array: Array, device: torch.device) -> Tensor:
    """Return the numbers on the model's device; in place where that is the host."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
