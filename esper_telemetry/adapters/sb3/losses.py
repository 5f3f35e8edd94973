"""The losses of Stable-Baselines3's algorithms as functions, for what their `train` keeps to itself. Source: its 2.9 release.

Shapes: N rows of a minibatch, padding included; `valid` tells it apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

NORMALIZER_EPS = 1e-8


def used_advantages(model: Any, advantages: Tensor, valid: Tensor | None) -> Tensor:
    """The values [N] that multiply the ratio: normalised over the minibatch where the model does so."""
    alone = len(advantages) < 2 and hasattr(model, "clip_range") and valid is None
    if not model.normalize_advantage or alone:
        return advantages
    counted = advantages if valid is None else advantages[valid]
    normalized: Tensor = (advantages - counted.mean()) / (counted.std() + NORMALIZER_EPS)
    return normalized


def clip_of(model: Any) -> float | None:
    """Range of the ratio at this point of training; None for A2C, which has none."""
    schedule = getattr(model, "clip_range", None)
    return None if schedule is None else float(schedule(model._current_progress_remaining))


def clip_value_of(model: Any) -> float | None:
    """Range of the critic's estimates at this point of training; None where they are not clipped."""
    schedule = getattr(model, "clip_range_vf", None)
    return None if schedule is None else float(schedule(model._current_progress_remaining))


class LossRows(NamedTuple):
    """What losses are made of, [N] each, or [M, N] of M minibatches at once.

    Attributes:
        log_ratio, log_probs, advantages: now; advantages as they are used.
        values, old_values, returns: the critic's estimates now and at collection, and its targets.
        entropy: of the policy.
    """

    log_ratio: Tensor
    log_probs: Tensor
    advantages: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    entropy: Tensor


def policy_loss(rows: LossRows, clip: float | None) -> Tensor:
    """Of each row."""
    if clip is None:
        return -rows.advantages * rows.log_probs
    ratio = rows.log_ratio.exp()
    return -torch.min(rows.advantages * ratio, rows.advantages * ratio.clamp(1 - clip, 1 + clip))


def value_loss(rows: LossRows, clip: float | None) -> Tensor:
    """Half the squared error of each row."""
    values = rows.values
    if clip is not None:
        values = rows.old_values + (values - rows.old_values).clamp(-clip, clip)
    return 0.5 * (rows.returns - values).square()


def losses(rows: LossRows, valid: Tensor | None, *, clip: float | None, clip_value: float | None) -> dict[str, Tensor]:
    """`policy`, `value` (half the mean squared error) and `entropy` (its negative mean): means over the last dimension.

    Args:
        rows: of one minibatch or of several.
        valid: bool, of their shape; None where every row is.
        clip, clip_value: ranges of the ratio and of the critic's estimates; None where there is none.
    """
    found = {
        "policy": policy_loss(rows, clip),
        "value": value_loss(rows, clip_value),
        "entropy": -rows.entropy,
    }
    return {name: _mean(column, valid) for name, column in found.items()}


def rows_of(samples: Any, found: tuple[Tensor, Tensor, Tensor | None], advantages: Tensor) -> LossRows:
    """Of a minibatch of a buffer and what `evaluate_actions` returned for it."""
    values, log_probs, entropy = found
    return LossRows(
        log_ratio=log_probs - samples.old_log_prob,
        log_probs=log_probs,
        advantages=advantages,
        values=values.flatten(),
        old_values=samples.old_values,
        returns=samples.returns,
        entropy=-log_probs if entropy is None else entropy,
    )


def _mean(column: Tensor, valid: Tensor | None) -> Tensor:
    """Over the last dimension, of valid rows; whatever the others hold has no part in it, nor in its gradient."""
    if valid is None:
        return column.mean(-1)
    return torch.where(valid, column, 0.0).sum(-1) / valid.sum(-1)


def total(model: Any, parts: Mapping[str, Tensor]) -> Tensor:
    """What is minimised, 0-d."""
    loss: Tensor = parts["policy"] + 2 * model.vf_coef * parts["value"] + model.ent_coef * parts["entropy"]
    return loss


def evaluated(model: Any, samples: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values [N, 1], log-probabilities [N] and entropies [N] of a minibatch, as `train` asks for them."""
    actions = samples.actions
    if isinstance(model.action_space, spaces.Discrete):
        actions = actions.long().flatten()
    fields = samples._fields
    further = [samples.lstm_states, samples.episode_starts] if "lstm_states" in fields else []
    named = {"action_masks": samples.action_masks} if "action_masks" in fields else {}
    found: tuple[Tensor, Tensor, Tensor | None] = model.policy.evaluate_actions(
        samples.observations, actions, *further, **named
    )
    return found


def valid_rows(samples: Any) -> Tensor | None:
    """[N], bool; None where there is no padding."""
    mask = getattr(samples, "mask", None)
    if mask is None:
        return None
    valid: Tensor = mask > 1e-8
    return valid
