"""A rollout of Stable-Baselines3 as an event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.adapters.sb3.drawn import Drawn
from esper_telemetry.adapters.sb3.heads import Heads
from esper_telemetry.adapters.sb3.steps import Steps
from esper_telemetry.adapters.sb3.untouched import untouched
from esper_telemetry.environments.protocol import Array
from esper_telemetry.events import RecurrentForward, RolloutEnd, Scale

EPS = 1e-8
"""Under the standard deviations of a VecNormalize, whatever its own is."""


def rollout_event(
    model: Any, steps: Steps, heads: Heads, drawn: Drawn, last_values: Tensor, *, update: int, env_step: int
) -> RolloutEnd:
    """The event of a full buffer, before anything takes minibatches from it.

    Rewards are those before a time limit's bootstrap was added; its share comes back as the value of the state that followed.
    """
    buffer, device = model.rollout_buffer, model.device
    rewards, ended, limits = steps.rewards, steps.ended, steps.time_limits
    described = drawn.joined(steps.drawn, torch.stack)
    actions = heads.actions(on(buffer.actions, device))
    return RolloutEnd(
        update=update,
        env_step=env_step,
        rewards=on(rewards, device),
        values=on(buffer.values, device),
        advantages=on(buffer.advantages, device),
        returns=on(buffer.returns, device),
        log_probs=on(buffer.log_probs, device),
        ended=on(ended, device),
        terminated=on(ended & ~limits, device),
        next_values=on(next_values(buffer, rewards, ended, limits, last_values.detach().cpu().numpy()), device),
        actions=actions,
        gamma=model.gamma,
        raw_rewards=on(np.stack(steps.raw_rewards).astype(np.float32), device) if steps.raw_rewards else None,
        head_log_probs=heads.log_probs(described.logits, actions),
        action_masks=described.masks,
        logits=described.logits,
        means=described.means,
        log_std=described.log_std,
        bounds=heads.bounds(device),
        states=steps.states(),
        scales=scales_of(model, rewards),
    )


def on(array: Array, device: torch.device) -> Tensor:
    """The same numbers on the model's device; in place where that is the host."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def next_values(buffer: Any, rewards: Array, ended: Array, limits: Array, last: Array) -> Array:
    """The critic's estimate [T, B] of the state that follows each step, 0 after termination."""
    following = np.concatenate([buffer.values[1:], last.reshape(1, -1)])
    added = (buffer.rewards - rewards) / buffer.gamma if buffer.gamma else np.zeros_like(rewards)
    found: Array = np.where(ended, np.where(limits, added, 0.0), following).astype(np.float32)
    return found


def scales_of(model: Any, rewards: Array) -> dict[str, Scale]:
    """Where a VecNormalize stands after a rollout, and what it gave."""
    scaled = model.get_vec_normalize_env()
    found: dict[str, Scale] = {}
    if scaled is None:
        return found
    observations = model.rollout_buffer.observations
    if scaled.norm_obs and isinstance(observations, np.ndarray):
        found["obs"] = _scale(scaled.obs_rms, scaled.clip_obs, observations, model.device)
    if scaled.norm_reward:
        found["ret"] = _scale(scaled.ret_rms, scaled.clip_reward, rewards, model.device)
    return found


def _scale(moments: Any, limit: float, normalized: Array, device: torch.device) -> Scale:
    mean, std = np.asarray(moments.mean, np.float64), np.sqrt(np.asarray(moments.var, np.float64) + EPS)
    return Scale(on(np.atleast_1d(mean), device), on(np.atleast_1d(std), device), limit, on(normalized, device))


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
