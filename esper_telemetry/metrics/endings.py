"""How episodes ended: by themselves, or cut off by a time limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.group import Max, Mean, MetricGroup, Min, reports
from esper_telemetry.metric import Metric
from esper_telemetry.metrics.masking import same_shape

NO_CUT = "no episode was cut off"
NO_END = "no episode terminated"


@dataclass(frozen=True, slots=True)
class EpisodeEnds(MetricGroup):
    """Episodes that finished in a rollout, by the way in which they did."""

    truncated: Mean = reports(
        Metric(
            key="episode/truncated_frac",
            number=926,
            unit="fraction",
            question="What share of the episodes was cut off by a time limit? Behind these the critic's estimate goes on.",
            low=0.0,
            high=1.0,
            undefined="no episode finished",
        )
    )
    shortest_cut: Min | None = reports(
        Metric(
            key="episode/truncated_length_min",
            number=927,
            unit="steps",
            question="How short was the shortest episode that was cut off? A time limit cuts off nothing that is shorter than it.",
            low=0.0,
            undefined=NO_CUT,
        )
    )
    longest_cut: Max | None = reports(
        Metric(
            key="episode/truncated_length_max",
            number=928,
            unit="steps",
            question="How long was the longest episode that was cut off?",
            low=0.0,
            undefined=NO_CUT,
        )
    )
    shortest: Min | None = reports(
        Metric(
            key="episode/terminated_length_min",
            number=929,
            unit="steps",
            question="How short was the shortest episode that ended by itself?",
            low=0.0,
            undefined=NO_END,
        )
    )
    longest: Max | None = reports(
        Metric(
            key="episode/terminated_length_max",
            number=930,
            unit="steps",
            question="How long was the longest episode that ended by itself? As long as the time limit, it was probably cut off.",
            low=0.0,
            undefined=NO_END,
        )
    )


@torch.inference_mode()
def episode_ends(
    ended: Tensor, terminated: Tensor, lengths: Sequence[int], *, valid: Tensor | None = None
) -> EpisodeEnds:
    """How many episodes of a rollout were cut off, and how long those of either kind were.

    Args:
        ended, terminated: [T, B] bool.
        lengths: of the episodes in the order in which they ended, those of one step by environment. Where there are more or
            fewer than `ended` says, nobody knows which is which, and lengths are left out.
        valid: bool, same shape; None where every entry is.
    """
    same_shape(ended=ended, terminated=terminated, valid=valid)
    over = ended.bool() if valid is None else ended.bool() & valid.bool()
    cut = over & ~terminated.bool()
    share = Mean(cut.sum().double(), over.sum().double())
    if not lengths:
        return EpisodeEnds(share)
    place = over.flatten().cumsum(0) - 1
    known = torch.tensor(lengths, dtype=torch.float64, device=ended.device)
    steps = known[place.clamp(0, len(known) - 1)].view_as(over)
    told = over & (place[-1] + 1 == len(known))
    by_limit, by_itself = told & cut, told & ~cut
    return EpisodeEnds(
        share,
        shortest_cut=Min(torch.where(by_limit, steps, torch.inf).amin()),
        longest_cut=Max(torch.where(by_limit, steps, -torch.inf).amax()),
        shortest=Min(torch.where(by_itself, steps, torch.inf).amin()),
        longest=Max(torch.where(by_itself, steps, -torch.inf).amax()),
    )
