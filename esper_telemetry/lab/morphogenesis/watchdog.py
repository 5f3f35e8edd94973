"""A watchdog for every host: what has broken gets the weights back that it had when it was well."""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch
from torch import Tensor

WINDOW, ENOUGH = 20, 10
"""Losses that are remembered, and how many it takes to judge by them."""

SIGMAS, TIMES, ABSOLUTE, PATIENCE = 6.0, 3.0, 12.0, 3
"""A loss diverges beyond so many standard deviations, so many times the mean and this much, so often in a row."""

LEARNED, NEAR_CHANCE = 0.6, 0.065
"""A lobotomy: a host that was below this share of the loss of guessing is back within this share of it."""

EVERY = 5
"""Epochs between snapshots."""


class TrainingWatchdog(NamedTuple):
    """What is remembered of the losses: [N, WINDOW] with NaN where there is none yet, and divergences in a row [N]."""

    losses: Tensor
    strikes: Tensor

    @staticmethod
    def fresh(envs: int, device: torch.device) -> TrainingWatchdog:
        """Nothing is known."""
        return TrainingWatchdog(torch.full((envs, WINDOW), torch.nan, device=device), torch.zeros(envs, device=device))

    def cleared(self, where: Tensor) -> TrainingWatchdog:
        """Nothing is known where [N] is set."""
        return TrainingWatchdog(
            self.losses.masked_fill(where.unsqueeze(1), torch.nan), self.strikes.masked_fill(where, 0.0)
        )


class WatchdogVerdict(NamedTuple):
    """Where [N] something is wrong, by reason."""

    nonfinite: Tensor
    lobotomy: Tensor
    divergence: Tensor

    @property
    def panic(self) -> Tensor:
        """Where anything is."""
        return self.nonfinite | self.lobotomy | self.divergence


def look(watch: TrainingWatchdog, loss: Tensor, classes: int) -> tuple[TrainingWatchdog, WatchdogVerdict]:
    """Judges the losses [N] of an epoch by those before it; what is out of line is not remembered."""
    known = watch.losses.isfinite()
    count = known.sum(1)
    mean = watch.losses.nan_to_num().sum(1) / count.clamp(min=1)
    spread = ((watch.losses - mean.unsqueeze(1)).nan_to_num().square().sum(1) / count.clamp(min=1)).sqrt()
    nonfinite, enough, chance = ~loss.isfinite(), count >= ENOUGH, log(classes)
    lobotomy = enough & (mean < LEARNED * chance) & ((loss - chance).abs() < NEAR_CHANCE * chance)
    far = enough & (loss > ABSOLUTE) & (loss > mean + SIGMAS * spread) & (loss > TIMES * mean)
    strikes = torch.where(far, watch.strikes + 1, 0.0)
    odd = nonfinite | lobotomy | far
    losses = torch.where(odd.unsqueeze(1), watch.losses, torch.cat([watch.losses[:, 1:], loss.unsqueeze(1)], 1))
    return TrainingWatchdog(losses, strikes), WatchdogVerdict(nonfinite, lobotomy, strikes >= PATIENCE)
