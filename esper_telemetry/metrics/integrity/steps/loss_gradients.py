"""Terms of the PPO loss, losses that known mistakes and published variants compute in place of a term, and the gradients of all of them.

Each loss takes the rows of a minibatch and returns the mean loss, 0-d; None where it does not apply to the minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, TypeAlias

from esper_telemetry.core.equations.objective import LossRows
from esper_telemetry.core.lazy import Tensor, torch
from esper_telemetry.metrics.ratio import EXP_LIMIT

Loss: TypeAlias = Callable[[LossRows], "Tensor | None"]

ADVANTAGE_EPS: Final = 1e-8
"""Added to the standard deviation of advantages, as in Stable-Baselines3 and CleanRL."""

DUAL_CLIP: Final = 3.0
"""Bound of the surrogate at negative advantages, times the advantage (1912.09729)."""

MAX_BROADCAST_ROWS: Final = 4096
"""Rows up to which a loss over all pairs of rows is computed: 16 million pairs."""


def surrogate(ratio: Tensor, advantages: Tensor, clip: float, choose: str = "minimum") -> Tensor:
    """Return the clipped surrogate loss of each row."""
    smaller_or_larger: Callable[[Tensor, Tensor], Tensor] = getattr(torch, choose)
    return -smaller_or_larger(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip))


def policy_loss(rows: LossRows, advantages: Tensor | None = None, choose: str = "minimum") -> Tensor:
    """Return the clipped surrogate loss, or -A log π where there is no ratio."""
    used = rows.advantages if advantages is None else advantages
    if rows.clip is None:
        return -(used * rows.log_probs).mean()
    return surrogate(rows.log_ratio.exp(), used, rows.clip, choose).mean()


def clipped_errors(rows: LossRows, clip: float) -> tuple[Tensor, Tensor]:
    """Return the squared errors [N] of the values and of the values clipped to the old ones ± clip."""
    near = rows.old_values + (rows.values - rows.old_values).clamp(-clip, clip)
    return (rows.values - rows.returns).square(), (near - rows.returns).square()


def value_loss(rows: LossRows) -> Tensor:
    """Return half the mean squared error, of clipped values where they are clipped."""
    if rows.clip_value is None:
        return 0.5 * (rows.values - rows.returns).square().mean()
    error, near = clipped_errors(rows, rows.clip_value)
    return 0.5 * (torch.maximum(error, near) if rows.clip_maximum else near).mean()


TERM_LOSSES: Final[Mapping[str, Callable[[LossRows], Tensor]]] = {
    "policy": policy_loss,
    "value": value_loss,
    "entropy": lambda rows: -rows.entropy.mean(),
}
"""Terms of the loss by name: value loss with the factor ½, entropy with a minus."""


def _of_ratio(rows: LossRows, loss: Callable[[Tensor, float], Tensor]) -> Tensor | None:
    return None if rows.clip is None else loss(rows.log_ratio, rows.clip)


def _no_clip(rows: LossRows) -> Tensor | None:
    return _of_ratio(rows, lambda log_ratio, clip: -(rows.advantages * log_ratio.exp()).mean())


def _no_minimum(rows: LossRows) -> Tensor | None:
    return _of_ratio(
        rows, lambda log_ratio, clip: -(rows.advantages * log_ratio.exp().clamp(1 - clip, 1 + clip)).mean()
    )


def _ratio_inverted(rows: LossRows) -> Tensor | None:
    return _of_ratio(rows, lambda log_ratio, clip: surrogate((-log_ratio).exp(), rows.advantages, clip).mean())


def _no_ratio(rows: LossRows) -> Tensor | None:
    return _of_ratio(rows, lambda log_ratio, clip: -(rows.advantages * rows.log_probs).mean())


def _log_ratio(rows: LossRows) -> Tensor | None:
    return _of_ratio(rows, lambda log_ratio, clip: surrogate(log_ratio, rows.advantages, clip).mean())


def _normalized(rows: LossRows) -> bool:
    """Return True where the advantages were normalised over the minibatch."""
    return rows.raw_advantages is not None and not torch.equal(rows.raw_advantages, rows.advantages)


def standardized(advantages: Tensor) -> Tensor | None:
    """Return advantages less their mean, over their standard deviation; None for a single one."""
    if len(advantages) < 2:
        return None
    return (advantages - advantages.mean()) / (advantages.std() + ADVANTAGE_EPS)


def _advantages_raw(rows: LossRows) -> Tensor | None:
    return policy_loss(rows, rows.raw_advantages) if _normalized(rows) else None


def _advantages_centred(rows: LossRows) -> Tensor | None:
    raw = rows.raw_advantages
    return None if raw is None or not _normalized(rows) else policy_loss(rows, raw - raw.mean())


def _advantages_std_alone(rows: LossRows) -> Tensor | None:
    raw = rows.raw_advantages
    if raw is None or len(raw) < 2 or not _normalized(rows):
        return None
    return policy_loss(rows, raw / (raw.std() + ADVANTAGE_EPS))


def _advantages_normalized(rows: LossRows) -> Tensor | None:
    raw = rows.raw_advantages
    used = None if raw is None or _normalized(rows) else standardized(raw)
    return None if used is None else policy_loss(rows, used)


def _advantages_broadcast(rows: LossRows) -> Tensor | None:
    if not 1 < len(rows.advantages) <= MAX_BROADCAST_ROWS:
        return None
    if rows.clip is None:
        return -(rows.advantages.mean() * rows.log_probs.mean())
    return surrogate(rows.log_ratio.exp().unsqueeze(0), rows.advantages.unsqueeze(1), rows.clip).mean()


def _dual_clip(rows: LossRows) -> Tensor | None:
    def loss(log_ratio: Tensor, clip: float) -> Tensor:
        single = surrogate(log_ratio.exp(), rows.advantages, clip)
        bounded = torch.minimum(single, -DUAL_CLIP * rows.advantages)
        return torch.where(rows.advantages < 0, bounded, single).mean()

    return _of_ratio(rows, loss)


def _target(rows: LossRows, target: Tensor | None) -> Tensor | None:
    return None if target is None else 0.5 * (rows.values - target).square().mean()


def _target_normalized(rows: LossRows) -> Tensor | None:
    return _target(rows, None if rows.raw_advantages is None else standardized(rows.raw_advantages))


def _values_broadcast(rows: LossRows) -> Tensor | None:
    if not 1 < len(rows.values) <= MAX_BROADCAST_ROWS:
        return None
    return 0.5 * (rows.values.unsqueeze(1) - rows.returns.unsqueeze(0)).square().mean()


def _value_unclipped(rows: LossRows) -> Tensor | None:
    return None if rows.clip_value is None else 0.5 * (rows.values - rows.returns).square().mean()


def _value_clipped(rows: LossRows) -> Tensor | None:
    if rows.clip_value is not None or rows.clip is None:
        return None
    return 0.5 * torch.maximum(*clipped_errors(rows, rows.clip)).mean()


def _value_clip(rows: LossRows, choose: str) -> Tensor | None:
    if rows.clip_value is None:
        return None
    error, near = clipped_errors(rows, rows.clip_value)
    return 0.5 * {"maximum": torch.maximum, "minimum": torch.minimum}[choose](error, near).mean()


def _value_clip_no_maximum(rows: LossRows) -> Tensor | None:
    return None if rows.clip_value is None else 0.5 * clipped_errors(rows, rows.clip_value)[1].mean()


def _kl_expectation(rows: LossRows) -> Tensor:
    log_ratio = rows.log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT)
    return (log_ratio.expm1() - log_ratio).mean()


ALTERNATIVE_LOSSES: Final[Mapping[str, tuple[str, Loss]]] = {
    "no_clip": ("policy", _no_clip),
    "no_minimum": ("policy", _no_minimum),
    "maximum": ("policy", lambda rows: None if rows.clip is None else policy_loss(rows, choose="maximum")),
    "ratio_inverted": ("policy", _ratio_inverted),
    "no_ratio": ("policy", _no_ratio),
    "probability_difference": ("policy", _log_ratio),
    "advantages_raw": ("policy", _advantages_raw),
    "advantages_normalized": ("policy", _advantages_normalized),
    "advantages_centred": ("policy", _advantages_centred),
    "advantages_std_alone": ("policy", _advantages_std_alone),
    "advantages_broadcast": ("policy", _advantages_broadcast),
    "advantages_reversed": ("policy", lambda rows: policy_loss(rows, rows.advantages.flip(0))),
    "advantages_shifted": ("policy", lambda rows: policy_loss(rows, rows.advantages.roll(1))),
    "returns_for_advantages": ("policy", lambda rows: policy_loss(rows, rows.returns)),
    "dual_clip": ("policy", _dual_clip),
    "target_advantages": ("value", lambda rows: _target(rows, rows.raw_advantages)),
    "target_normalized": ("value", _target_normalized),
    "target_old_values": ("value", lambda rows: _target(rows, rows.old_values)),
    "values_broadcast": ("value", _values_broadcast),
    "value_unclipped": ("value", _value_unclipped),
    "value_clipped": ("value", _value_clipped),
    "value_clip_maximum": ("value", partial(_value_clip, choose="maximum")),
    "value_clip_no_maximum": ("value", _value_clip_no_maximum),
    "value_clip_minimum": ("value", partial(_value_clip, choose="minimum")),
    "value_huber": (
        "value",
        lambda rows: torch.nn.functional.smooth_l1_loss(rows.values, rows.returns),
    ),
    "entropy_of_sample": ("entropy", lambda rows: rows.log_probs.mean()),
    "entropy_of_sample_sign": ("entropy", lambda rows: -rows.log_probs.mean()),
    "kl_difference": ("penalty", lambda rows: -rows.log_ratio.mean()),
    "kl_square": ("penalty", lambda rows: 0.5 * rows.log_ratio.square().mean()),
    "kl_expectation": ("penalty", _kl_expectation),
}
"""Losses by name, each with the term that it takes the place of; a penalty is added to the loss."""


def flat64(tensors: Iterable[Tensor]) -> Tensor:
    """Return the tensors one after the other, [d] float64."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).double()


class LossGradients:
    """Gradients of the terms of a loss and of alternatives to them, each computed when it is first asked for.

    Args:
        rows: forward pass, as a context in which its graph is valid.
        parameters: K tensors.
    """

    def __init__(self, rows: Callable[[], AbstractContextManager[LossRows]], parameters: Sequence[Tensor]) -> None:
        self._rows, self._parameters = rows, list(parameters)
        self._cache: dict[str, Tensor | None] = {}

    def __call__(self, name: str) -> Tensor | None:
        """Return the gradient [d], float64; None where this minibatch has no such loss.

        The first call takes a forward pass for all losses, and each loss a backward pass.
        """
        if not self._cache:
            losses: dict[str, Loss] = {**TERM_LOSSES, **{name: loss for name, (_, loss) in ALTERNATIVE_LOSSES.items()}}
            with torch.enable_grad(), self._rows() as rows:
                self._cache = {name: self._gradient(loss(rows)) for name, loss in losses.items()}
        return self._cache.get(name)

    def total(self, coefficients: Mapping[str, float]) -> tuple[Tensor, int]:
        """Return the gradient [d] of the weighted sum, in one backward pass, and the number of rows."""
        with torch.enable_grad(), self._rows() as rows:
            losses = [weight * TERM_LOSSES[name](rows) for name, weight in coefficients.items() if weight]
            gradient = self._gradient(torch.stack(losses).sum())
        assert gradient is not None
        return gradient, len(rows.log_ratio)

    def _gradient(self, loss: Tensor | None) -> Tensor | None:
        if loss is None:
            return None
        if not loss.requires_grad:
            return torch.cat([torch.zeros_like(p).flatten() for p in self._parameters]).double()
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return flat64(torch.autograd.grad(loss, self._parameters, **options))
