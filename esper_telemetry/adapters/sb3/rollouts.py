"""Rollouts of Stable-Baselines3 as an event."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.adapters.sb3.drawn import described
from esper_telemetry.adapters.sb3.heads import Description, Heads
from esper_telemetry.adapters.sb3.steps import Steps
from esper_telemetry.adapters.sb3.untouched import untouched
from esper_telemetry.events import EpisodeEnd, RecurrentForward, RolloutEnd, Scale
from esper_telemetry.ppo.environments.protocol import Array

EPS = 1e-8
"""Under the standard deviations of a VecNormalize, whatever its own is."""

MOST_JOINED = 1 << 20
"""Entries of the observations of several rollouts up to which they are put together."""


class CollectedRollout(NamedTuple):
    """A rollout as it was collected, before anything takes minibatches from the buffer: its own arrays, which the next one replaces.

    Attributes:
        values, advantages, returns, log_probs: [T, B].
        actions: [T, B, D].
        bootstrapped: [T, B], rewards with the value after a time limit in them.
        rewards: [T, B] without it.
        raw_rewards: [B] of each step; empty where rewards are not scaled.
        ended, time_limits: [T, B], bool.
        following: [B], the critic's estimates of the state after the last step.
        described: what was drawn from.
        observations: [T, B, ...], as the policy was given them; None where they have several parts.
        episodes: returns, lengths and times of those that finished.
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
    following: Tensor
    described: list[Description]
    observations: Array | None
    episodes: tuple[list[float], list[int], list[int]]


def collected(model: Any, steps: Steps, following: Tensor) -> CollectedRollout:
    """The rollout that the buffer holds."""
    buffer = model.rollout_buffer
    return CollectedRollout(
        values=buffer.values,
        advantages=buffer.advantages,
        returns=buffer.returns,
        log_probs=buffer.log_probs,
        actions=buffer.actions,
        bootstrapped=buffer.rewards,
        rewards=steps.rewards,
        raw_rewards=steps.raw_rewards,
        ended=steps.ended,
        time_limits=steps.time_limits,
        following=following,
        described=steps.described,
        observations=buffer.observations if isinstance(buffer.observations, np.ndarray) else None,
        episodes=(steps.returns, steps.lengths, steps.times),
    )


def episodes_event(parts: Sequence[CollectedRollout], env_step: int) -> EpisodeEnd | None:
    """The event of the episodes that finished in rollouts that follow one another; None of none."""
    found = [
        (gained, length, time + place * len(part.rewards))
        for place, part in enumerate(parts)
        for gained, length, time in zip(*part.episodes, strict=True)
    ]
    return EpisodeEnd(env_step, *map(list, zip(*found, strict=True))) if found else None


def rollout_event(
    model: Any, parts: Sequence[CollectedRollout], heads: Heads, states: Tensor | None, *, update: int, env_step: int
) -> RolloutEnd:
    """The event of rollouts that follow one another.

    Rewards are those before a time limit's bootstrap was added; its share comes back as the value of the state that followed.
    """
    device = model.device
    each: Any = CollectedRollout._make(zip(*parts, strict=True))  # each field of all of them
    known = described(list(chain.from_iterable(each.described)))
    actions = heads.actions(_joined(each.actions, device))
    rewards, ended = _joined(each.rewards, device), _joined(each.ended, device)
    raw = list(chain.from_iterable(each.raw_rewards))
    return RolloutEnd(
        update=update,
        env_step=env_step,
        rewards=rewards,
        values=_joined(each.values, device),
        advantages=_joined(each.advantages, device),
        returns=_joined(each.returns, device),
        log_probs=_joined(each.log_probs, device),
        ended=ended,
        terminated=ended & ~_joined(each.time_limits, device),
        next_values=_joined([next_values(part, model.gamma) for part in parts], device),
        actions=actions,
        gamma=model.gamma,
        raw_rewards=on(np.stack(raw).astype(np.float32), device) if raw else None,
        head_log_probs=heads.log_probs(known.logits, actions),
        action_masks=known.masks,
        logits=known.logits,
        means=known.means,
        log_std=known.log_std,
        bounds=heads.bounds(device),
        states=states,
        scales=scales_of(model, rewards, each.observations),
        observations=_observed(each.observations),
    )


def _observed(arrays: Sequence[Array | None]) -> Tensor | None:
    """Observations in place, on the host; None of several rollouts whose observations would be much to copy."""
    known = [array for array in arrays if array is not None]
    if not known or (len(known) > 1 and sum(array.size for array in known) > MOST_JOINED):
        return None
    return torch.from_numpy(known[0] if len(known) == 1 else np.concatenate(known))


def _joined(arrays: Sequence[Array], device: torch.device) -> Tensor:
    """Arrays [T, ...] one after the other."""
    return on(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), device)


def on(array: Array, device: torch.device) -> Tensor:
    """The same numbers on the model's device; in place where that is the host."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def next_values(part: CollectedRollout, gamma: float) -> Array:
    """The critic's estimate [T, B] of the state that follows each step, 0 after termination."""
    following = np.concatenate([part.values[1:], part.following.detach().cpu().numpy().reshape(1, -1)])
    added = (part.bootstrapped - part.rewards) / gamma if gamma else np.zeros_like(part.rewards)
    found: Array = np.where(part.ended, np.where(part.time_limits, added, 0.0), following).astype(np.float32)
    return found


def scales_of(model: Any, rewards: Tensor, observations: Sequence[Array | None]) -> dict[str, Scale]:
    """Where a VecNormalize stands after rollouts, and what it gave."""
    scaled = model.get_vec_normalize_env()
    found: dict[str, Scale] = {}
    if scaled is None:
        return found
    known = [part for part in observations if part is not None and scaled.norm_obs]
    if known:
        found["obs"] = _scale(scaled.obs_rms, scaled.clip_obs, _joined(known, model.device))
    if scaled.norm_reward:
        found["ret"] = _scale(scaled.ret_rms, scaled.clip_reward, rewards)
    return found


def _scale(moments: Any, limit: float, normalized: Tensor) -> Scale:
    mean, std = np.asarray(moments.mean, np.float64), np.sqrt(np.asarray(moments.var, np.float64) + EPS)
    device = normalized.device
    return Scale(on(np.atleast_1d(mean), device), on(np.atleast_1d(std), device), limit, normalized)


def recurrent_event(policy: Any, steps: Steps, envs: int) -> RecurrentForward | None:
    """What went through the actor's LSTM in the first `envs` environments; None without one."""
    before, after = steps.states(), steps.states_after()
    if before is None or after is None:
        return None
    first = torch.stack([step.inputs[:envs] for step in steps.recurrence])
    above = [after[:, layer, 0, :envs] for layer in range(policy.lstm_actor.num_layers - 1)]
    cells = layers_of(policy)
    return RecurrentForward(cells, [first, *above], before[:, :, :, :envs].unbind(1))


def layers_of(policy: Any) -> Sequence[nn.LSTM]:
    """The layers of the actor's LSTM, one by one, with its weights."""
    lstm: nn.LSTM = policy.lstm_actor
    if lstm.num_layers == 1:
        return [lstm]
    with untouched(policy):
        return [_layer(lstm, layer) for layer in range(lstm.num_layers)]


def _layer(lstm: nn.LSTM, layer: int) -> nn.LSTM:
    width = lstm.input_size if layer == 0 else lstm.hidden_size
    found = nn.LSTM(width, lstm.hidden_size, bias=lstm.bias).to(lstm.get_parameter("weight_ih_l0").device)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            parameter.copy_(lstm.get_parameter(name.replace("_l0", f"_l{layer}")))
    return found
