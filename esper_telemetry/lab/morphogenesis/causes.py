"""Why a seed's gradient is weak beside its host's: each seed's last epochs, judged by those before them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CAUSES = ("ok", "disconnected", "dormant", "saturated", "host_fast", "indeterminate")
"""Not weak; the loss does not reach the seed; little reaches it; what reaches it is lost inside; the host is quick; nobody knows."""

LOW = 0.01
"""Intensity ratio from which on nothing is weak."""

FAR, MIN_SPREAD, ENOUGH, DECAY = 2.0, 0.15, 4, 0.8
"""Standard scores that count, the least spread in decades, epochs it takes to know, and how fast old ones fade."""


class CauseHistory(NamedTuple):
    """Running mean and mean square [4, N, S] in decades, of seed, host, upstream and gain; and epochs counted [N, S]."""

    mean: Tensor
    square: Tensor
    epochs: Tensor

    @staticmethod
    def fresh(envs: int, slots: int, device: torch.device) -> CauseHistory:
        """Nothing is known."""
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
    """The history with this epoch, and each seed's cause [N, S], an index into `CAUSES`; -1 where it is not counted.

    Args:
        history: of the epochs before.
        ratio: [N, S], intensity ratio.
        seed, host, upstream: [N, S], gradient per root of parameter of seed and host, and the norm at the seed's effect.
        counted: [N, S], bool: seeds that train; the history of others begins anew.
        alpha: [N, S], weight of the effect.
    """
    now = torch.stack([seed, host, upstream, seed / upstream.clamp(min=1e-30)]).clamp(1e-30, 1e30).nan_to_num().log10()
    spread = (history.square - history.mean.square()).clamp(min=0).sqrt().clamp(min=MIN_SPREAD)
    z_seed, z_host, z_upstream, z_gain = (now - history.mean) / spread
    conditions = [
        (ratio >= LOW, "ok"),
        ((upstream == 0) & (alpha > 0), "disconnected"),
        (upstream == 0, "dormant"),
        (history.epochs < ENOUGH, "indeterminate"),
        (z_upstream <= -FAR, "dormant"),
        (z_gain <= -FAR, "saturated"),
        ((z_seed > -FAR) & (z_host >= FAR), "host_fast"),
    ]
    cause = torch.full_like(ratio, CAUSES.index("indeterminate"), dtype=torch.int64)
    for condition, name in reversed(conditions):
        cause = torch.where(condition, CAUSES.index(name), cause)
    return _counting(history, now, counted), torch.where(counted, cause, -1)


def _counting(history: CauseHistory, now: Tensor, counted: Tensor) -> CauseHistory:
    """One epoch more, in a mean over all epochs at first and over the last few later."""
    count = torch.where(counted, history.epochs + 1, 0.0)
    share = torch.maximum(1 / count.clamp(min=1), torch.tensor(1 - DECAY, device=count.device))
    mean = torch.where(counted, torch.lerp(history.mean, now, share.expand_as(now)), 0.0)
    square = torch.where(counted, torch.lerp(history.square, now.square(), share.expand_as(now)), 0.0)
    return CauseHistory(mean, square, count)
