"""How far gradients are from what is normal: severities from 0 to 1 instead of flags, half where the flag would be raised."""

from __future__ import annotations

import torch
from torch import Tensor

from esper_telemetry.lab.morphogenesis.learning import MAX_NORM

EXPLODING = (0.0, 2.0)
VANISHING = (-3.0, -7.0)
"""Decades of the norm over the clip limit between which the severity rises: half at ten times the limit, and at a 100,000th of it."""

INTENSITY_DECAY = 0.7
"""Of the running mean of the intensity ratio, per epoch."""


def _ramp(norm: Tensor, ends: tuple[float, float]) -> Tensor:
    decades = (norm.clamp(min=1e-30) / MAX_NORM).log10()
    return ((decades - ends[0]) / (ends[1] - ends[0])).clamp(0, 1)


def exploding(peak: Tensor) -> Tensor:
    """Severity of the largest norm before clipping; 1 where it is not finite."""
    return torch.where(peak.isfinite(), _ramp(peak, EXPLODING), 1.0)


def vanishing(norm: Tensor) -> Tensor:
    """Severity of the mean norm; 0 where it is not finite."""
    return torch.where(norm.isfinite(), _ramp(norm, VANISHING), 0.0)


def intensity_ratio(seed: Tensor, seed_entries: Tensor, host: Tensor, host_entries: int) -> Tensor:
    """Gradient per root of parameter of each seed [N, S] over that of its host [N]; -1 where either has none."""
    of_seed = seed / seed_entries.clamp(min=1).sqrt()
    of_host = (host / host_entries**0.5).unsqueeze(1)
    return torch.where((seed_entries > 0) & (of_host > 0), of_seed / of_host.clamp(min=1e-30), -1.0)
