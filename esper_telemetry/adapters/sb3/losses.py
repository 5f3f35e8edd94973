"""The losses of Stable-Baselines3's algorithms as functions, for what their `train` keeps to itself. Source: its 2.9 release.

Shapes: N rows of a minibatch, padding included; `valid` tells it apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def policy_loss(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, clip: float | None) -> Tensor:
    """0-d, of valid rows."""
    if clip is None:
        return -(advantages * log_probs).mean()
    ratio = log_ratio.exp()
    return -torch.min(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Half the mean squared error, 0-d, of valid rows."""
    if clip is not None:
        values = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * (returns - values).square().mean()


def losses(
    model: Any,
    samples: Any,
    found: tuple[Tensor, Tensor, Tensor | None],
    advantages: Tensor,
    valid: Tensor | None,
) -> dict[str, Tensor]:
    """`policy`, `value` (half the mean squared error) and `entropy` (its negative mean), 0-d each.

    Args:
        model: of Stable-Baselines3.
        samples: a minibatch of its buffer.
        found: what `evaluate_actions` returned for it.
        advantages: [N], as they are used.
        valid: [N], bool; None where every row is.
    """
    values, log_probs, entropy = found
    rows = [values.flatten(), log_probs, samples.old_log_prob, samples.old_values, samples.returns, advantages]
    entropy = -log_probs if entropy is None else entropy
    if valid is not None:
        rows, entropy = [row[valid] for row in rows], entropy[valid]
    now, new, old, before, returns, used = rows
    schedule = getattr(model, "clip_range_vf", None)
    clip_value = None if schedule is None else float(schedule(model._current_progress_remaining))
    return {
        "policy": policy_loss(new - old, new, used, clip_of(model)),
        "value": value_loss(now, before, returns, clip_value),
        "entropy": -entropy.mean(),
    }


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
