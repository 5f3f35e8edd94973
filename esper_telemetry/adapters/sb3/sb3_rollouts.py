"""Rollouts of Stable-Baselines3: their steps as they are taken, and the events of a record's rollouts.

The buffer of a complete rollout has most of the data, including rewards; only other data are recorded between steps. Recording
distributions, observations and executed actions took 4 % of the trainer's time. Therefore they are only recorded if the update is sampled.
Otherwise the policy is observed in every sixteenth step, to time the environments.

Shapes: T steps, B environments, I inputs and H width of an LSTM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.adapters.columns import Array, FinishedEpisode, HeadColumns, cat, join_columns, next_values
from esper_telemetry.adapters.sb3.collection import ResetCounter, StepEnds, StepRecorder, ended_rows
from esper_telemetry.adapters.sb3.sb3_facts import MAX_CAPTURES, ActionHeads
from esper_telemetry.adapters.sb3.sb3_replay import Memory
from esper_telemetry.adapters.taps import Listener, without_trace
from esper_telemetry.core.clock import Clock
from esper_telemetry.core.event_parts import Scale, Transitions
from esper_telemetry.events import RecurrentForward, Remover, RolloutEnd
from esper_telemetry.updates.pickles import policy_copy

NORMALIZER_EPS = 1e-8
"""Added to the variances of a VecNormalize; its setting does not matter."""

MAX_JOINED_ENTRIES = 1 << 20
"""Largest number of entries in the observations of several rollouts that are joined."""

TIMED_STEPS = 16
"""Steps from one timed step to the next. The environments are timed if the rollout is not sampled, else the recording."""

NOT_TIMED = nullcontext()

TARGETS = ("rewards", "values", "advantages", "returns", "log_probs")
ROLLOUT_COLUMNS = (*TARGETS, "ended", "terminated", "next_values", "last_values", "raw_rewards")
"""Columns of the adapter's `RolloutEnd`, [T, B] or [1, B]."""


class RecurrentStep(NamedTuple):
    """One step of the actor's LSTM: inputs [B, I], and h and c, [layers, B, H] each, zero before a step that begins an episode."""

    inputs: Tensor
    before: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]


class RolloutRecorder:
    """Records the T steps of B environments of one rollout after another.

    Args:
        listen: calls a listener after every call of a method of an object; returns the function that ends this.
        clock: of telemetry, which times one step in `TIMED_STEPS` that is recorded in full, for all of them.

    Attributes:
        rollouts: that are complete and not joined yet; their columns are the arrays of the buffer.
        episodes: that finished in these.
        steps: of this rollout.
        recurrent_steps: likewise; empty for a feed-forward policy.
        first_memory: states that the policy received with the first of them.
        needs_steps: every rollout must be recorded completely, because a partial record of an earlier one was not enough.
    """

    def __init__(self, model: Any, heads: ActionHeads, listen: Callable[[object, str, Listener], Remover], clock: Clock) -> None:
        self._model, self._policy, self._action_heads = model, model.policy, heads
        self._listen, self._clock = listen, clock
        self._stop_listening: Remover | None = None
        self.needs_steps = True
        self.rollouts: list[RolloutEnd] = []
        self.episodes: list[FinishedEpisode] = []
        scaled = model.get_vec_normalize_env()
        self._scaled = scaled if scaled is not None and scaled.norm_reward else None
        self._recurrent = hasattr(model.policy, "lstm_actor")
        self._sums = np.zeros(model.n_envs)
        self._lengths = np.zeros(model.n_envs, np.int64)
        self._complete = np.asarray(model._last_episode_starts, bool).copy()
        self._lstm_step: RecurrentStep | None = None
        self._acted_at = 0.0
        self.steps = StepRecorder(model.get_env())
        self._resets = ResetCounter(model, self.steps.innermost)
        self._answer: tuple[Array, Array, Any] | None = None
        self.begin(whole=True)

    def begin(self, *, whole: bool) -> None:
        """Forget all steps: a rollout begins. With `whole`, all of its steps are recorded, not only the ends of episodes."""
        self._whole = whole or self.needs_steps
        self._rewards: list[Array] = []
        self._raw_rewards: list[Array] = []
        self._ends: list[StepEnds] = []
        self._step_count = self._timed_steps = 0
        self.steps.begin(whole=self._whole)
        self._heads: list[HeadColumns] = []
        self._captures: list[Any] = []
        self.recurrent_steps: list[RecurrentStep] = []
        self.first_memory: Memory | None = None
        self._timed_seconds = 0.0
        if self._stop_listening is None:
            self._stop_listening = self._listen(self._policy, "forward", self.after_action)

    def taps(self) -> list[Remover]:
        """Return taps on the memory, on the resets of the environments, and on their results."""
        owners: list[object] = [self._policy.lstm_actor] if self._recurrent else []
        memory = [self._listen(owner, "forward", self.after_lstm) for owner in owners]
        resets = [self._listen(owner, "reset", self._resets.after_reset) for owner in self._resets.owners]
        alone = [] if self.steps.shown_env is None else [self.steps.shown_env]
        steps = [self._listen(env, "step", self.steps.after_env_step) for env in alone]
        return [*memory, *resets, *steps, self._listen(self._model.get_env(), "step_wait", self.steps.after_answer)]

    def stop(self) -> None:
        """Stop listening to the policy."""
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None

    @property
    def environment_seconds(self) -> float:
        """Wall time between actions and their outcomes in this rollout, estimated from the steps that were timed."""
        return self._timed_seconds * self._step_count / max(1, self._timed_steps)

    def after_lstm(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The actor's LSTM was called."""
        inputs, states = args
        self._lstm_step = RecurrentStep(inputs[0].detach(), states, result[1])

    def after_action(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The policy chose actions."""
        if self._whole:
            with self._timing():
                self._captures.append(self._action_heads.capture(self._policy))
                if len(self._captures) == MAX_CAPTURES:
                    self._join_captures()
                if self._recurrent and self._lstm_step is not None:
                    if not self.recurrent_steps:
                        self.first_memory = Memory.received(args, kwargs, self._lstm_step.before)
                    self.recurrent_steps.append(self._lstm_step)
                self.steps.after_action(args)
        self._acted_at = perf_counter()

    def after_step(self, variables: Mapping[str, Any]) -> None:
        """The environments answered; `variables` are the local ones of the collecting loop."""
        if self._stop_listening is not None:
            self._timed_seconds += perf_counter() - self._acted_at
            self._timed_steps += 1
            if not self._whole:
                self.stop()
        elif self._step_count % TIMED_STEPS == TIMED_STEPS - 1:
            self._stop_listening = self._listen(self._policy, "forward", self.after_action)
        self._record_outcomes(variables)
        self._step_count += 1

    def _record_outcomes(self, variables: Mapping[str, Any]) -> None:
        """Keep what the environments returned, if the loop shows it and it is new."""
        dones, rewards = variables.get("dones"), variables.get("rewards")
        if not (isinstance(dones, np.ndarray) and isinstance(rewards, np.ndarray) and "infos" in variables):
            return  # a loop of the user's own, with other names
        before, self._answer = self._answer, (rewards, dones, variables["infos"])
        if before is not None and rewards is before[0] and dones is before[1] and variables["infos"] is before[2]:
            return  # of an earlier step: the loop does not show its variables in each
        self._rewards.append(rewards.copy())  # bootstraps are added in place
        if dones.tobytes().strip(b"\0"):  # takes a sixth of the time of `dones.any()`
            self._ends.append(StepEnds(self._step_count, dones.copy(), variables["infos"]))
        if self._scaled is not None:
            self._raw_rewards.append(self._scaled.get_original_reward())
        if self._whole:
            with self._timing():
                self.steps.after_step(variables, self._rewards[-1])
        self._resets.after_step(variables)

    def _timing(self) -> AbstractContextManager[None]:
        """Return the context in which a step is recorded in full."""
        return NOT_TIMED if self._step_count % TIMED_STEPS else self._clock.weighing(TIMED_STEPS)

    def finish(self, last_values: Tensor, *, update: int, env_step: int) -> None:
        """Add the rollout, which is complete in the buffer; `last_values` [B] are the critic's of the states after it.

        Its rewards do not include the bootstraps after time limits, which are the values of the next states.
        """
        if self._captures:
            self._join_captures()
        buffer = self._model.rollout_buffer
        stored = paid = buffer.rewards
        ended = np.zeros(stored.shape, bool)
        ends_known = len(self._rewards) == self._step_count == len(stored)
        if ends_known:
            for end in self._ends:
                ended[end.step] = end.dones
            paid = np.stack(self._rewards).astype(stored.dtype)
        else:  # the buffer's flags, which do not distinguish time limits
            self._raw_rewards, self._ends = [], []
            ended = np.concatenate([buffer.episode_starts[1:], self._model._last_episode_starts[None]]).astype(bool)
        raw = np.stack(self._raw_rewards) if self._raw_rewards else None
        time_limits = self._finish_episodes(paid if raw is None else raw)
        stores_paid = np.array_equal(paid[~ended], stored[~ended], equal_nan=True)
        if raw is not None and not stores_paid and np.array_equal(raw.astype(stored.dtype)[~ended], stored[~ended]):
            paid, stores_paid = raw.astype(stored.dtype), True  # the buffer has the rewards before normalisation
        heads = self._head_columns(stored.shape, can_be_partial=stores_paid and ends_known)
        last = self._asked_last_values(last_values.detach().cpu().flatten())  # the buffer has just waited for them
        rewards = np.where(ended, paid, stored) if stores_paid else None
        rewards, bootstraps, are_known = self._learned_rewards(rewards, paid, time_limits, last)
        values, at_ends, seen = torch.from_numpy(buffer.values), torch.from_numpy(ended), buffer.observations
        event = RolloutEnd(
            update=update,
            env_step=env_step,
            rewards=torch.from_numpy(rewards),
            values=values,
            advantages=torch.from_numpy(buffer.advantages),
            returns=torch.from_numpy(buffer.returns),
            log_probs=torch.from_numpy(buffer.log_probs),
            ended=at_ends,
            terminated=torch.from_numpy(ended & ~time_limits),
            next_values=next_values(values, last, at_ends, torch.from_numpy(bootstraps)),
            actions=self._action_heads.actions(torch.from_numpy(buffer.actions)),
            gamma=self._model.gamma,
            raw_rewards=None if raw is None else torch.from_numpy(raw.astype(np.float32)),
            observations=torch.from_numpy(seen) if isinstance(seen, np.ndarray) else None,
            transitions=self.steps.transitions(seen, self._ends, self._resets) if self._whole else None,
            last_values=last.reshape(1, -1),
            ends_known=ends_known and are_known,
            **heads._asdict(),
        )
        self.rollouts.append(event)

    def states(self, *, after: bool = False) -> Tensor | None:
        """States in which each step began, or ended, [T, layers, 2, B, H]; None for a feed-forward policy."""
        if not self.recurrent_steps:
            return None
        pairs = [step.after if after else step.before for step in self.recurrent_steps]
        hidden, cell = (torch.stack([pair[part] for pair in pairs]).detach() for part in (0, 1))
        return torch.stack([hidden, cell], 2)

    def recurrent_forward(self, envs: int) -> RecurrentForward | None:
        """Return the event of the actor's LSTM in the first `envs` environments; None without one."""
        before, after = self.states(), self.states(after=True)
        if before is None or after is None:
            return None
        lstm: nn.LSTM = self._policy.lstm_actor
        layers = range(lstm.num_layers)
        cells = [lstm] if len(layers) == 1 else [_single_layer(lstm, layer) for layer in layers]
        first = torch.stack([step.inputs[:envs] for step in self.recurrent_steps])
        above = [after[:, layer, 0, :envs] for layer in layers[:-1]]
        return RecurrentForward(cells, [first, *above], before[:, :, :, :envs].unbind(1))

    def _join_captures(self) -> None:
        captures, self._captures = self._captures, []
        self._heads.append(self._action_heads.joined(captures, torch.stack))

    def _head_columns(self, shape: tuple[int, int], *, can_be_partial: bool) -> HeadColumns:
        """Columns of the distributions that were sampled from; learn from a whole rollout whether their summary has the same spread."""
        summary = self._action_heads.summary(self._policy, shape)
        if not self._whole:
            return HeadColumns() if summary is None else summary
        columns = join_columns(self._heads, torch.cat)
        captured, expected = columns.log_std, {} if summary is None else summary.log_std
        agrees = captured.keys() == expected.keys() and all(
            captured[name].shape == column.shape and torch.allclose(captured[name], column, atol=1e-5) for name, column in expected.items()
        )
        self.needs_steps = self._recurrent or summary is None or not (can_be_partial and agrees)
        return columns

    def _learned_rewards(self, rewards: Array | None, paid: Array, time_limits: Array, last: Tensor) -> tuple[Array, Array, bool]:
        """Return rewards before bootstraps were added, the critic's estimates after time limits, [T, B] each, and whether both are known.

        None as `rewards` means that the buffer's rewards differ from the environments'. A correct trainer adds the critic's
        estimates, so the critic need not be called.
        """
        buffer, gamma = self._model.rollout_buffer, self._model.gamma
        stored, known, is_changed = buffer.rewards, rewards is not None, False
        if rewards is None and not self._recurrent and (values := self._values_after(time_limits)) is not None:
            known = True
            rewards, is_changed = _without_bootstraps(stored, paid, buffer.gamma * values)
        rewards = stored if rewards is None else rewards
        added = stored - rewards
        bootstraps = added / gamma if gamma else np.zeros_like(added)
        if not (is_changed or self._recurrent):
            # nothing is added, or the value of another state
            following = np.concatenate([buffer.values[1:], last.numpy()[None]])
            others = (0.0, buffer.gamma * following, buffer.gamma * buffer.values)
            wrong = np.logical_or.reduce([np.isclose(added, other, rtol=1e-4, atol=0.0) for other in others])
            asked = self._values_after(time_limits & wrong) if (time_limits & wrong).any() else None
            bootstraps = bootstraps if asked is None else np.where(asked != 0.0, asked, bootstraps)
        return rewards, np.where(time_limits, bootstraps, 0.0).astype(np.float32), known

    def _values_after(self, rows: Array) -> Array | None:
        """Return the critic's estimates of the last observations of episodes that ended in these rows [T, B]; 0 elsewhere.

        None if the policy cannot be copied.
        """
        values = np.zeros(rows.shape, np.float32)
        asked = [info["terminal_observation"] for step, index, info in ended_rows(self._ends) if rows[step, index]]
        estimates = self._estimates(asked)
        if estimates is not None:
            values[rows] = [float(one[0]) for one in estimates]
        return None if estimates is None else values

    def _asked_last_values(self, given: Tensor) -> Tensor:
        """Return the critic's estimates [B] after the last step, recomputed if the trainer used the previous step's estimates, or 0."""
        before = torch.from_numpy(self._model.rollout_buffer.values[-1])
        if self._recurrent or not (torch.equal(given, before) or not given.any()):
            return given
        estimates = self._estimates([self._model._last_obs])
        asked = given if estimates is None else estimates[0].cpu()
        return given if torch.allclose(asked, given, rtol=1e-4) else asked

    @torch.no_grad()
    def _estimates(self, observations: Sequence[Any]) -> list[Tensor] | None:
        """Estimates of a copy of the critic, each flat; None if the policy cannot be copied."""
        try:
            policy = policy_copy(self._policy)
        except TypeError:
            return None
        with without_trace(policy):
            return [policy.predict_values(policy.obs_to_tensor(one)[0]).flatten() for one in observations]

    def _finish_episodes(self, rewards: Array) -> Array:
        """Add the episodes that finished with these rewards [T, B]; return which of their last steps a time limit ended, [T, B]."""
        rewards = rewards.astype(np.float64)
        time_limits = np.zeros(rewards.shape, bool)
        since = np.zeros(len(self._sums), np.int64)
        for step, index, info in ended_rows(self._ends):
            monitored = info.get("episode")  # a Monitor's numbers win over our own
            if monitored is not None or self._complete[index]:
                total = self._sums[index] + rewards[since[index] : step + 1, index].sum()
                length = self._lengths[index] + step + 1 - since[index]
                own = (monitored["r"], monitored["l"]) if monitored else (total, length)
                time = step + len(self.rollouts) * len(rewards)
                self.episodes.append(FinishedEpisode(float(own[0]), int(own[1]), time))
            self._sums[index], self._lengths[index], self._complete[index] = 0.0, 0, True
            limited = info.get("TimeLimit.truncated", False) and info.get("terminal_observation") is not None
            time_limits[step, index] = bool(limited)
            since[index] = step + 1
        self._sums += [rewards[first:, index].sum() for index, first in enumerate(since)]
        self._lengths += len(rewards) - since
        return time_limits


def _without_bootstraps(stored: Array, paid: Array, bootstraps: Array) -> tuple[Array, bool]:
    """Return the original rewards [T, B] if the buffer's differ; True if the buffer's are scaled or clipped with their bootstraps.

    Otherwise the bootstraps are subtracted in the rows in which they are stored, even if that is one step late.
    """
    plain = bootstraps == 0.0
    size = float(np.square(paid[plain]).sum())
    factor = float((stored * paid)[plain].sum()) / size if size else 1.0
    scaled = np.multiply(factor, (paid, paid + bootstraps), dtype=stored.dtype)
    for rewards, sums in (scaled, np.clip((paid, paid + bootstraps), stored.min(), stored.max())):
        if np.allclose(stored, sums, rtol=1e-4, atol=1e-6):
            return np.asarray(rewards, stored.dtype), True
    late = np.concatenate([np.zeros_like(bootstraps[:1]), bootstraps[:-1]])
    is_late = len(stored) > 1 and np.allclose((stored - late)[1:], paid[:-1], rtol=1e-4, atol=1e-6)
    return stored - (late if is_late else bootstraps), False


def joined_rollouts(model: Any, heads: ActionHeads, rollouts: Sequence[RolloutEnd], states: Tensor | None) -> RolloutEnd:
    """Return the event of rollouts that follow one another, on the model's device; `states` belong to the last one."""
    device = model.device

    def joined(columns: Sequence[Any]) -> Any:
        """The columns one after the other; None if one of them is missing."""
        return None if any(column is None for column in columns) else cat(columns).to(device)

    named = {name: joined([getattr(rollout, name) for rollout in rollouts]) for name in ROLLOUT_COLUMNS}
    parts = [HeadColumns(one.logits, one.means, one.log_std, one.action_masks) for one in rollouts]
    distributions = join_columns(parts, torch.cat)
    actions = {name: joined([one.actions[name] for one in rollouts]) for name in rollouts[0].actions}
    observations = [one.observations for one in rollouts if one.observations is not None]
    large = len(rollouts) > 1 and sum(map(torch.Tensor.numel, observations)) > MAX_JOINED_ENTRIES
    scales: dict[str, Scale] = {}
    scaled = model.get_vec_normalize_env()
    if scaled is not None and scaled.norm_obs and observations:
        scales["obs"] = _scale(scaled.obs_rms, scaled.clip_obs, joined(observations))
    if scaled is not None and scaled.norm_reward:
        scales["ret"] = _scale(scaled.ret_rms, scaled.clip_reward, named["rewards"])
    return replace(
        rollouts[-1],
        **named,
        actions=actions,
        head_log_probs=heads.log_probs(distributions, actions),
        bounds=heads.bounds(device),
        states=states,
        scales=scales,
        observations=None if large or not observations else cat(observations),
        transitions=_joined_transitions([one.transitions for one in rollouts]),
        ends_known=all(one.ends_known for one in rollouts),
        **distributions._asdict(),
    )


def _single_layer(lstm: nn.LSTM, layer: int) -> nn.LSTM:
    """An LSTM of one layer with the weights of that layer."""
    width = lstm.input_size if layer == 0 else lstm.hidden_size
    device = lstm.get_parameter("weight_ih_l0").device
    # created on the meta device, because random weights would be drawn from the run's generator
    single = nn.LSTM(width, lstm.hidden_size, bias=lstm.bias, device="meta").to_empty(device=device)
    with torch.no_grad():
        for name, parameter in single.named_parameters():
            parameter.copy_(lstm.get_parameter(name.replace("_l0", f"_l{layer}")))
    return single


def _joined_transitions(parts: Sequence[Transitions | None]) -> Transitions | None:
    """Transitions of rollouts that follow one another; None if one of them lacks them."""
    if any(part is None for part in parts):
        return None
    joined: Any = Transitions._make(zip(*parts, strict=True))  # each field of all rollouts
    columns: dict[str, Any] = {
        name: None if any(x is None for x in column) else cat(column)
        for name, column in joined._asdict().items()
        if name not in ("informative", "resets", "cast")
    }
    plain = {"informative": all(joined.informative), "resets": sum(joined.resets), "cast": max(joined.cast)}
    return Transitions(**plain, **columns)


def _scale(moments: Any, limit: float, normalized: Tensor) -> Scale:
    """State of a part of a VecNormalize after the rollouts, and its outputs."""
    numbers = np.asarray(moments.mean, np.float64), np.sqrt(np.asarray(moments.var, np.float64) + NORMALIZER_EPS)
    mean, std = (torch.from_numpy(np.atleast_1d(one)).to(normalized.device) for one in numbers)
    return Scale(mean, std, limit, normalized)
