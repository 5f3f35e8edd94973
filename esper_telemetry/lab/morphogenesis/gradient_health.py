"""Health of the gradients of seeds: severities from 0 to 1, and the cause of a gradient that is weak relative to the host's.

Severities are continuous, so that the controller observes a trend before a limit is reached; 0.5 is the limit of a flag. The controller
observes the gradient of the whole seed. Telemetry measures each parameter, so that diverging layers show both signs at once. Causes
compare each seed's last epoch with its own history.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from esper_telemetry.lab.morphogenesis.training import MAX_GRADIENT_NORM

EXPLODING_DECADES = (0.0, 2.0)
VANISHING_DECADES = (-3.0, -7.0)
"""Decades of the norm, relative to the clip limit, between which the severity rises: half at ten times and at a 100,000th of the limit."""

SUSTAINED_EPOCHS = 3
"""Epochs in a row that a gradient must exceed its limit. The gradient of a healthy seed exceeds ten clip limits in one or two."""

INTENSITY_DECAY = 0.7
"""Decay per epoch of the running mean of the intensity ratio."""


def _ramp(norm: Tensor, ends: tuple[float, float]) -> Tensor:
    decades = (norm.clamp(min=1e-30) / MAX_GRADIENT_NORM).log10()
    return ((decades - ends[0]) / (ends[1] - ends[0])).clamp(0, 1)


def exploding(peak: Tensor) -> Tensor:
    """Severity of the largest norm before clipping; 1 if it is not finite."""
    return torch.where(peak.isfinite(), _ramp(peak, EXPLODING_DECADES), 1.0)


def vanishing(norm: Tensor) -> Tensor:
    """Severity of the mean norm; 0 if it is not finite."""
    return torch.where(norm.isfinite(), _ramp(norm, VANISHING_DECADES), 0.0)


class TensorHealth(NamedTuple):
    """Health of single parameters of the seeds, [N, S] each; for a seed that does not learn, severities are NaN and indices -1.

    Attributes:
        exploding, strongest: largest severity, and the index of its parameter.
        vanishing, weakest: the same for the parameter with the smallest gradient.
    """

    exploding: Tensor
    vanishing: Tensor
    strongest: Tensor
    weakest: Tensor


def tensor_health(norm: Tensor, peak: Tensor, present: Tensor) -> TensorHealth:
    """Return the health of the parameters that seeds have.

    Args:
        norm, peak: [N, S, parameters], mean and largest norm of an epoch.
        present: [N, S, parameters], bool: the seed learns and has this parameter.
    """
    up, strongest = exploding(peak).masked_fill(~present, -1.0).max(-1)
    down, weakest = vanishing(norm).masked_fill(~present, -1.0).max(-1)
    learns = present.any(-1)
    severities = (torch.where(learns, severity, torch.nan) for severity in (up, down))
    return TensorHealth(*severities, *(torch.where(learns, index, -1) for index in (strongest, weakest)))


def intensity_ratio(seed: Tensor, seed_entries: Tensor, host: Tensor, host_entries: int) -> Tensor:
    """Ratio of the gradient per root of the parameter count of each seed [N, S] to its host's [N]; -1 if either lacks a gradient."""
    of_seed = seed / seed_entries.clamp(min=1).sqrt()
    of_host = (host / host_entries**0.5).unsqueeze(1)
    return torch.where((seed_entries > 0) & (of_host > 0), of_seed / of_host.clamp(min=1e-30), -1.0)


CAUSES = ("ok", "disconnected", "dormant", "saturated", "host_fast", "indeterminate", "nonfinite")
"""Not weak; no gradient reaches the seed; little reaches it; it is lost inside the seed; the host's is unusually large; unknown; a
gradient of the seed or its host is NaN or infinite."""

LOW_INTENSITY_RATIO = 0.01
"""Intensity ratio below which a gradient is weak."""

UNUSUAL_Z, MIN_SPREAD_DECADES, MIN_HISTORY_EPOCHS, HISTORY_DECAY = 2.0, 0.15, 4, 0.8
"""Z-score that is unusual, smallest standard deviation in decades, epochs before causes are given, and decay of the history per epoch."""


class CauseHistory(NamedTuple):
    """Running mean and mean square [4, N, S] in decades, of seed, host, upstream and gain; and epochs counted [N, S]."""

    mean: Tensor
    square: Tensor
    epochs: Tensor

    @staticmethod
    def fresh(envs: int, slots: int, device: torch.device) -> CauseHistory:
        """Return an empty history."""
        empty = torch.zeros(4, envs, slots, device=device)
        return CauseHistory(empty, empty, empty[0])


def diagnose(
    history: CauseHistory,
    ratio: Tensor,
    seed: Tensor,
    host: Tensor,
    upstream: Tensor,
    *,
    counted: Tensor,
    alpha: Tensor,
) -> tuple[CauseHistory, Tensor]:
    """Return the history with this epoch, and each seed's cause [N, S], an index into `CAUSES`; -1 if it is not counted.

    Args:
        history: history of earlier epochs.
        ratio: [N, S], intensity ratio.
        seed, host, upstream: [N, S], gradient per root of the parameter count of seed and host, and the norm at the seed's effect.
        counted: [N, S], bool: seeds that train; the history of others, and of seeds without finite gradients, restarts.
        alpha: [N, S], weight of the effect.
    """
    finite = (seed + host + upstream).isfinite()
    now = torch.stack([seed, host, upstream, seed / upstream.clamp(min=1e-30)]).nan_to_num().clamp(1e-30, 1e30).log10()
    spread = (history.square - history.mean.square()).clamp(min=0).sqrt().clamp(min=MIN_SPREAD_DECADES)
    z_seed, z_host, z_upstream, z_gain = (now - history.mean) / spread
    conditions = [
        (~finite, "nonfinite"),
        (ratio >= LOW_INTENSITY_RATIO, "ok"),
        ((upstream == 0) & (alpha > 0), "disconnected"),
        (upstream == 0, "dormant"),
        (seed == 0, "saturated"),
        (history.epochs < MIN_HISTORY_EPOCHS, "indeterminate"),
        (z_upstream <= -UNUSUAL_Z, "dormant"),
        (z_gain <= -UNUSUAL_Z, "saturated"),
        ((z_seed > -UNUSUAL_Z) & (z_host >= UNUSUAL_Z), "host_fast"),
    ]
    cause = torch.full_like(ratio, CAUSES.index("indeterminate"), dtype=torch.int64)
    for condition, name in reversed(conditions):
        cause = torch.where(condition, CAUSES.index(name), cause)
    # a mean over all epochs at first, and over the last few later
    remembered = counted & finite
    count = torch.where(remembered, history.epochs + 1, 0.0)
    weight = torch.maximum(1 / count.clamp(min=1), torch.tensor(1 - HISTORY_DECAY, device=count.device)).expand_as(now)
    mean = torch.where(remembered, torch.lerp(history.mean, now, weight), 0.0)
    square = torch.where(remembered, torch.lerp(history.square, now.square(), weight), 0.0)
    return CauseHistory(mean, square, count), torch.where(counted, cause, -1)
