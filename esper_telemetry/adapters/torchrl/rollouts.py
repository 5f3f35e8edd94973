"""Batches of TorchRL's collectors as the event of a rollout.

Shapes: T steps, B environments, N rows, D action dimensions, A actions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from esper_telemetry.adapters.columns import HeadColumns, head_columns
from esper_telemetry.events import RolloutEnd

HEAD = "action"
"""Name of the one head of a policy."""

TANH_BOUND = 1 - 1e-6
"""Largest action of a squashed policy that is taken through the inverse of the squash, relative to the end of its range."""


def rollout_event(batch: Any, loss: Any, estimator: Any, *, gamma: float, update: int, env_step: int) -> RolloutEnd:
    """Return the event of a batch with its advantages.

    Batches have environments before time; one without environments has one. Actions of a squashed policy are those before the squash, and
    log-probabilities those of actions from -1 to 1. Advantages that the estimator has normalised are taken back to the targets minus the
    values that they were computed from.
    """
    keys = loss.tensor_keys
    rewards, values = _grid(batch, in_key(keys.reward, "next")), _grid(batch, keys.value)
    next_values = _grid(batch, in_key(keys.value, "next"))
    advantages, returns = _grid(batch, keys.advantage), _grid(batch, keys.value_target)
    if getattr(estimator, "average_gae", False):
        advantages = returns - values
    ended = _grid(batch, in_key(keys.done, "next")).bool()
    terminated = _grid(batch, in_key(keys.terminated, "next")).bool() & ended
    with torch.no_grad():
        distribution = acting_distribution(batch, loss)
    return RolloutEnd(
        update=update,
        env_step=env_step,
        rewards=rewards,
        values=values,
        advantages=advantages,
        returns=returns,
        log_probs=_grid(batch, keys.sample_log_prob) + log_range(distribution),
        ended=ended,
        terminated=terminated,
        next_values=torch.where(terminated, 0.0, next_values),
        actions={HEAD: _actions(batch, loss, distribution)},
        gamma=gamma,
        observations=_observations(batch, loss),
        last_values=next_values[-1:],
        **columns_of(distribution).map(lambda column: time_major(batch, column))._asdict(),
    )


def columns_of(distribution: Any) -> HeadColumns:
    """Return the columns of a categorical or a Gaussian distribution, before its squash; none of others."""
    if hasattr(distribution, "logits") and not hasattr(distribution, "dists"):
        return head_columns({HEAD: distribution})
    means, stds = getattr(distribution, "loc", None), getattr(distribution, "scale", None)
    if isinstance(means, Tensor) and isinstance(stds, Tensor):
        return HeadColumns(means={HEAD: means.detach()}, log_std={HEAD: stds.detach().log()})
    return HeadColumns()


def is_squashed(distribution: Any) -> bool:
    """Return True for a Gaussian whose actions go through a tanh."""
    return any(kind.__name__ == "TanhNormal" for kind in type(distribution).__mro__)


def log_range(distribution: Any) -> float | Tensor:
    """What a squashed policy's log-probabilities gain where actions are counted from -1 to 1, as `RolloutEnd` counts them."""
    if not is_squashed(distribution):
        return 0.0
    half = (torch.as_tensor(distribution.high) - torch.as_tensor(distribution.low)) / 2
    return half.expand_as(distribution.loc[..., :1, :].reshape(-1, distribution.loc.shape[-1])[0]).log().sum()


def acting_distribution(batch: Any, loss: Any) -> Any:
    """Return the distribution that the actions of a batch were drawn from, by its parameters in the batch; None without them."""
    actor = loss.actor_network
    if not hasattr(actor, "build_dist_from_params"):
        return None
    try:
        return actor.build_dist_from_params(batch)
    except KeyError:  # the collector has left the parameters out
        return None


def in_key(key: Any, *before: str) -> tuple[str, ...]:
    """Return the nested key of an entry, within others."""
    return (*before, *((key,) if isinstance(key, str) else key))


def time_major(batch: Any, column: Tensor) -> Tensor:
    """Return a column [B, T, ...], or [T, ...] of one environment, as [T, B, ...]; several dimensions of environments are one."""
    dims = batch.batch_dims
    if dims == 1:
        return column.unsqueeze(1)
    return column.flatten(0, dims - 2).transpose(0, 1)


def _grid(batch: Any, key: Any) -> Tensor:
    """A column of numbers as [T, B]."""
    column: Tensor = batch.get(key).detach()
    return time_major(batch, column.reshape(batch.batch_size))


def _actions(batch: Any, loss: Any, distribution: Any) -> Tensor:
    """Actions [T, B] that are choices, [T, B, D] before a squash."""
    actions = time_major(batch, batch.get(loss.tensor_keys.action).detach())
    if hasattr(distribution, "logits"):
        chosen = (
            actions.argmax(-1) if actions.dim() > 2 and actions.shape[-1] > 1 else actions.reshape(actions.shape[:2])
        )
        return chosen.long()
    actions = actions.unsqueeze(-1) if actions.dim() == 2 else actions
    if is_squashed(distribution):
        low, high = (torch.as_tensor(getattr(distribution, name), device=actions.device) for name in ("low", "high"))
        return torch.atanh((2 * (actions - low) / (high - low) - 1).clamp(-TANH_BOUND, TANH_BOUND))
    return actions


def _observations(batch: Any, loss: Any) -> Tensor | None:
    """Inputs [T, B, I] of the actor that are vectors, side by side; None where there are others."""
    present = [batch.get(key, None) for key in loss.actor_network.in_keys]
    parts = [column for column in present if isinstance(column, Tensor) and column.is_floating_point()]
    if not parts or any(part.dim() != batch.batch_dims + 1 for part in parts):
        return None
    columns = [time_major(batch, part.detach()) for part in parts]
    return columns[0] if len(columns) == 1 else torch.cat(columns, -1)
