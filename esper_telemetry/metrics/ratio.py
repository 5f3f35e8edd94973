"""How far the policy moved from the one that collected the data: everything that the log-ratios of the minibatches say.

`l` is the log-probability of the chosen action now minus at collection, `r = e^l`, `A` the advantages that multiply the ratio. One pass
over all minibatches of an update: log-ratios [M, N] with `dim=-1` give one row per optimizer step.

How far each head of a factored policy moved, on the rows where it takes part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import Metric, Rows, label, reports, segment
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import (
    NAN,
    Array,
    Counts,
    Ess,
    Max,
    Mean,
    Min,
    Moments,
    Reduction,
    Slot,
    Statistic,
    Sum,
)
from esper_telemetry.metrics.actions import (
    Sample,
    ascending,
    keep,
    neighbours,
    per_row,
    rows_of,
    same_shape,
    sample,
    spread,
    where_any,
)
from esper_telemetry.metrics.statistics import LOG_RATIOS, Quantiles, as_quantiles, histogram, levels_for

EXP_LIMIT = 20.0
"""Log-ratios are clamped to this only where they are the argument of exp or expm1."""

SCHULMAN = "Schulman 2020, joschu.net/blog/kl-approx.html"
NO_STEP = "no minibatch follows an optimizer step of this update"
NO_ROWS = "no valid, finite row"


@dataclass(frozen=True, slots=True)
class RatioDiagnostics(MetricGroup):
    """The log-ratio family of the joint policy."""

    kl: Mean = reports(
        Metric(
            key="policy/kl",
            number=101,
            unit="nats",
            question="How far did this update move the policy away from the one that collected the data? KL(old‖new) by the k3"
            " estimator, mean of expm1(l) - l.",
            low=0.0,
            level=Level.MINIMAL,
            healthy="0.002 to 0.02",
            warn="> 0.03",
            critical="> 0.1",
            source=f"{SCHULMAN}; stop rules of SB3, Spinning Up, CleanRL, rsl_rl; healthy runs p05-p95 .002-.013",
            undefined=NO_ROWS,
        ),
        Metric(
            key="policy/kl_max",
            number=102,
            unit="nats",
            question="How far from the data policy was the worst minibatch?",
            over="max",
            rows=Rows.AFTER_STEP,
            low=0.0,
            level=Level.MINIMAL,
            healthy="0.002 to 0.03",
            warn="> 0.095; below 1e-7 the policy does not move at all",
            critical="> 0.3",
            source="as policy/kl",
            undefined=NO_STEP,
        ),
        Metric(
            key="policy/kl_first",
            number=103,
            unit="nats",
            question="Do stored and recomputed log-probabilities agree before anything was learned? It must be about 0.",
            rows=Rows.FIRST,
            low=0.0,
            healthy="about 0",
            warn="> 1e-6",
            source="identity: the policy has not changed yet",
            undefined=NO_ROWS,
        ),
        Metric(
            key="policy/kl_last",
            number=104,
            unit="nats",
            question="How far did the policy move in the end, over the last epoch?",
            rows=Rows.LAST_EPOCH,
            low=0.0,
            healthy="0.002 to 0.02",
            warn="> 0.03",
            critical="> 0.1",
            source="as policy/kl",
            undefined=NO_ROWS,
        ),
        Metric(
            key="policy/kl_epoch_slope",
            number=105,
            unit="nats/epoch",
            question="How much further does each epoch push the policy? Steep and bending up: too many epochs.",
            over="slope",
            healthy="< 0.01",
            source="heuristic",
            undefined="one epoch",
        ),
    )
    kl_k1: Mean = reports(
        Metric(
            key="policy/kl_k1",
            number=106,
            unit="nats",
            question="What does the unbiased but noisy estimator mean(-l) say? Strongly negative beside a small policy/kl means wrong"
            " log-probabilities.",
            healthy="within 4 standard errors of policy/kl",
            source=f"{SCHULMAN}; CleanRL old_approx_kl",
            undefined=NO_ROWS,
        )
    )
    kl_k2: Mean = reports(
        Metric(
            key="policy/kl_k2",
            number=107,
            unit="nats",
            question="What does the estimator mean(l²/2) say? Far from policy/kl means a few ratios are very large or small.",
            low=0.0,
            healthy="0.7 to 1.4 times policy/kl",
            source=SCHULMAN,
            undefined=NO_ROWS,
        )
    )
    kl_rev: Mean = reports(
        Metric(
            key="policy/kl_rev",
            number=108,
            unit="nats",
            question="How far is the new policy from the old one seen from the new one, KL(new‖old)? Well above policy/kl: mass went"
            " where the old policy had little.",
            low=0.0,
            healthy="close to policy/kl",
            source=SCHULMAN,
            undefined=NO_ROWS,
        )
    )
    nonfinite: Sum = reports(
        Metric(
            key="policy/kl_nonfinite",
            number=109,
            unit="count",
            question="How many valid log-ratios were NaN or infinite?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="absent",
            critical="> 0",
            undefined="none was",
            when_positive=True,
        )
    )
    logratio: Moments = reports(
        Metric(
            key="policy/logratio/mean",
            number=110,
            unit="nats",
            question="Did the chosen actions become more (above 0) or less likely?",
            undefined=NO_ROWS,
        ),
        Metric(
            key="policy/logratio/std",
            number=111,
            unit="nats",
            question="How differently did the probabilities of the chosen actions change?",
            of="std",
            low=0.0,
            healthy="< 0.15",
            warn="> 0.3",
            critical="> 0.7",
            source="heuristic",
            undefined=NO_ROWS,
        ),
    )
    logratio_absmax: Max = reports(
        Metric(
            key="policy/logratio/absmax",
            number=112,
            unit="nats",
            question="By how much did the probability of any single chosen action change at most?",
            low=0.0,
            healthy="< 1",
            warn="> 1.6 (a factor of 5)",
            source="ratio bounds 5 and 0.1 of esper-lite",
            undefined=NO_ROWS,
        ),
        Metric(
            key="integrity/ratio_init",
            number=801,
            unit="nats",
            question="Does the trainer recompute the log-probabilities it stored, before the first optimizer step? Anything else means"
            " other observations, hidden states, masks or weights than at collection.",
            rows=Rows.FIRST,
            low=0.0,
            level=Level.MINIMAL,
            healthy="about 0",
            warn="> 1e-5 (fp32), 1e-3 (tf32), 2e-2 (bf16, fp16); for Gaussian heads times max(1, 1/σ_min)",
            critical="> 1e-3 (fp32), 1e-2 (tf32), 5e-2 (bf16, fp16)",
            source="huggingface/trl#454; sb3-contrib#75; Huang 2022",
            undefined=NO_ROWS,
        ),
    )
    ratio: Moments = reports(
        Metric(
            key="policy/ratio/mean",
            number=113,
            unit="ratio",
            question="Is the mean probability ratio 1, as it must be up to sampling noise?",
            low=0.0,
            healthy="within 4 std/√N of 1",
            source="E_old[r] = 1",
            undefined=NO_ROWS,
        ),
        Metric(
            key="policy/ratio/std",
            number=114,
            unit="ratio",
            question="How widely do the probability ratios scatter?",
            of="std",
            low=0.0,
            healthy="< 0.15",
            warn="> 0.3",
            critical="> 0.7",
            source="heuristic",
            undefined=NO_ROWS,
        ),
    )
    ratio_min: Min = reports(
        Metric(
            key="policy/ratio/min",
            number=115,
            unit="ratio",
            question="How much less likely did any chosen action become?",
            low=0.0,
            healthy="> 0.3",
            warn="< 0.2",
            critical="< 0.1",
            source="heuristic",
            undefined=NO_ROWS,
        )
    )
    ratio_max: Max = reports(
        Metric(
            key="policy/ratio/max",
            number=116,
            unit="ratio",
            question="How much more likely did any chosen action become? Grows with batch size: judge it beside policy/ess_frac.",
            low=0.0,
            level=Level.MINIMAL,
            healthy="< 2",
            warn="> 5",
            critical="> 10 with policy/ess_frac < 0.8",
            source="ratio bounds 5 and 0.1 of esper-lite",
            undefined=NO_ROWS,
        )
    )
    ratio_quantiles: Quantiles = reports(
        Metric(
            key="policy/ratio/p01",
            number=117,
            unit="ratio",
            question="Below which ratio lie the 1 % of actions that lost the most probability?",
            of="p01",
            low=0.0,
            healthy="> 0.5",
            source="heuristic",
            undefined=NO_ROWS,
        ),
        Metric(
            key="policy/ratio/p99",
            number=118,
            unit="ratio",
            question="Above which ratio lie the 1 % of actions that gained the most probability?",
            of="p99",
            low=0.0,
            healthy="< 1.5",
            source="heuristic",
            undefined=NO_ROWS,
        ),
    )
    histogram: Counts = reports(
        Metric(
            key="policy/logratio/hist",
            number=196,
            unit="nats",
            question="How are the changes in probability of the chosen actions distributed?",
            undefined=NO_ROWS,
        )
    )
    clip_frac: Mean | None = reports(
        Metric(
            key="policy/clip_frac",
            number=119,
            unit="fraction",
            question="Which share of the samples left the trust region, |r - 1| > clip?",
            rows=Rows.AFTER_STEP,
            low=0.0,
            high=1.0,
            level=Level.MINIMAL,
            healthy="0.02 to 0.2",
            warn="> 0.3",
            critical="> 0.5",
            source="common practice (SB3, CleanRL); healthy runs p05-p95 .02-.17",
            undefined=NO_STEP,
        )
    )
    clip_frac_pos: Mean | None = reports(
        Metric(
            key="policy/clip_frac_pos",
            number=120,
            unit="fraction",
            question="Which share of the better-than-expected samples (A > 0) left the trust region?",
            rows=Rows.AFTER_STEP,
            low=0.0,
            high=1.0,
            healthy="within 0.3 of policy/clip_frac_neg",
            source="heuristic",
            undefined=f"no A > 0, or {NO_STEP}",
        )
    )
    clip_frac_neg: Mean | None = reports(
        Metric(
            key="policy/clip_frac_neg",
            number=121,
            unit="fraction",
            question="Which share of the worse-than-expected samples (A < 0) left the trust region?",
            rows=Rows.AFTER_STEP,
            low=0.0,
            high=1.0,
            healthy="within 0.3 of policy/clip_frac_pos",
            source="heuristic",
            undefined=f"no A < 0, or {NO_STEP}",
        )
    )
    clip_frac_active: Mean | None = reports(
        Metric(
            key="policy/clip_frac_active",
            number=122,
            unit="fraction",
            question="Which share of the samples teaches nothing, because clipping zeroes its gradient?",
            rows=Rows.AFTER_STEP,
            low=0.0,
            high=1.0,
            healthy="0.01 to 0.2",
            warn="> 0.3",
            critical="> 0.5",
            source="PPO 1707.06347, eq. 7",
            undefined=NO_STEP,
        )
    )
    ess: Ess = reports(
        Metric(
            key="policy/ess_frac",
            number=123,
            unit="fraction",
            question="Which share of the samples still counts after importance weighting? Low: a few samples decide the update.",
            low=0.0,
            high=1.0,
            level=Level.MINIMAL,
            healthy="> 0.9",
            warn="< 0.8",
            critical="< 0.5",
            source="Kong 1992; healthy runs p05 .94, worst minibatch .69",
            undefined=NO_ROWS,
        ),
        Metric(
            key="policy/ess_frac_min",
            number=124,
            unit="fraction",
            question="Which share of the samples still counts in the worst minibatch?",
            over="min",
            low=0.0,
            high=1.0,
            level=Level.MINIMAL,
            healthy="> 0.7",
            warn="< 0.6",
            critical="< 0.4",
            source="as policy/ess_frac",
            undefined=NO_ROWS,
        ),
    )
    surrogate_gain: Mean | None = reports(
        Metric(
            key="policy/surrogate_gain",
            number=125,
            unit="normalised advantage",
            question="Did the update do what it wanted, make good actions likelier and bad ones rarer? Mean of A (r - 1) over the last"
            " epoch.",
            rows=Rows.LAST_EPOCH_AFTER_STEP,
            level=Level.MINIMAL,
            healthy="> 0, typically 0.025 to 0.043",
            warn="<= 0 once",
            critical="<= 0 three times in a row",
            source="positive in 170 of 170 healthy updates, negative in 70 of 70 with a flipped loss",
            undefined=NO_STEP,
        )
    )
    advantages_nonfinite: Sum | None = reports(
        Metric(
            key="policy/surrogate_gain_nonfinite",
            number=126,
            unit="count",
            question="How many valid advantages in the minibatches were NaN or infinite?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="absent",
            critical="> 0",
            undefined="none was",
            when_positive=True,
        )
    )


@torch.inference_mode()
def ratio_diagnostics(
    log_ratio: ArrayLike,
    advantages: ArrayLike | None = None,
    *,
    clip: float | None = None,
    valid: ArrayLike | None = None,
    dim: int | None = None,
) -> RatioDiagnostics:
    """KL estimates, ratio moments and quantiles, clip fractions, effective sample size and surrogate gain.

    Args:
        log_ratio: log-probability of the chosen actions now minus at collection, summed over heads, [N] or [M, N].
        advantages: the values that multiply the ratio, same shape.
        clip: ε of the ratio's clip range.
        valid: bool, same shape; None where every entry is.
        dim: axis to reduce; None reduces all axes to one row, -1 keeps the leading axis as optimizer steps.

    Clip fractions need `clip`, their sides and the surrogate gain need `advantages`. Quantiles are those of all rows together.
    """
    if clip is not None and clip < 0:
        raise ValueError(f"clip must not be negative, got {clip}")
    log_ratio = as_tensor(log_ratio)
    advantages = None if advantages is None else as_tensor(advantages, log_ratio)
    valid = as_mask(valid, log_ratio)
    same_shape(log_ratio=log_ratio, advantages=advantages, valid=valid)
    s = sample(log_ratio, valid, dim=dim)
    e = s.values.clamp(-EXP_LIMIT, EXP_LIMIT).expm1_()
    a = None if advantages is None else keep(rows_of(advantages, dim).double(), s.kept)
    gain = None if a is None else a.values * e
    moved = _movement(s, e)
    ratio_min, ratio_quantiles, ratio_max = _ratio_quantiles(s)
    clip_frac, clip_frac_pos, clip_frac_neg, clip_frac_active = _clip_fractions(s, e, a, gain, clip)
    return RatioDiagnostics(
        kl=Mean(moved.k3, s.count),
        kl_k1=Mean(-moved.sums[0], s.count),
        kl_k2=Mean(moved.squares[0] / 2, s.count),
        kl_rev=Mean(moved.squares[1] - moved.k3, s.count),
        nonfinite=Sum(s.nonfinite),
        logratio=Moments(s.count, moved.means[0], moved.m2[0], math.nan, math.nan),
        logratio_absmax=Max(where_any(s.values.abs().amax(-1), s.count)),
        ratio=Moments(s.count, moved.means[1] + 1, moved.m2[1], math.nan, math.nan),
        ratio_min=ratio_min,
        ratio_max=ratio_max,
        ratio_quantiles=ratio_quantiles,
        histogram=histogram(s, LOG_RATIOS),
        clip_frac=clip_frac,
        clip_frac_pos=clip_frac_pos,
        clip_frac_neg=clip_frac_neg,
        clip_frac_active=clip_frac_active,
        ess=effective_sample_size(s),
        surrogate_gain=None if a is None or gain is None else Mean(gain.sum(-1), a.count),
        advantages_nonfinite=None if a is None else Sum(a.nonfinite),
    )


class _Movement(NamedTuple):
    """Sums over the last axis for l and e = r - 1, [2, ..] each, and of k3 = e - l, [..]."""

    sums: Tensor
    k3: Tensor
    squares: Tensor
    means: Tensor
    m2: Tensor


def _movement(s: Sample, e: Tensor) -> _Movement:
    """Sums of l and e, of k3, of l² and e l (the reverse k3 is e l - k3), their means and centred squares."""
    both = torch.stack([s.values, e])
    sums = both.sum(-1)
    means = sums / s.count.clamp(min=1)
    d = (both - means.unsqueeze(-1)) * s.weight
    dot = torch.linalg.vecdot
    return _Movement(sums, (e - s.values).sum(-1), dot(both, s.values), means, dot(d, d))


def _ratio_quantiles(s: Sample) -> tuple[Min, Quantiles, Max]:
    """Smallest ratio, quantiles and largest ratio of all rows together."""
    ends, fraction = neighbours(ascending(s), s.count.sum(), levels_for(s.values))
    ratios = ends.clamp(-EXP_LIMIT, EXP_LIMIT).exp()
    found = torch.lerp(ratios[0], ratios[1], fraction)
    smallest, largest = per_row(found[:: len(found) - 1], s.count)
    return Min(smallest), as_quantiles(found, s.count), Max(largest)


def _clip_fractions(
    s: Sample, e: Tensor, a: Sample | None, gain: Tensor | None, clip: float | None
) -> tuple[Mean | None, Mean | None, Mean | None, Mean | None]:
    """Share of clipped samples: all, with A > 0, with A < 0, and those whose gradient is zero, A (r - 1) > 0."""
    if clip is None:
        return None, None, None, None
    clipped = e.abs() > clip
    if a is None or gain is None:
        return Mean(clipped.sum(-1), s.count), None, None, None
    up, down = a.values > 0, a.values < 0
    flags = torch.stack([clipped, clipped & up, clipped & down, clipped & (gain > 0), up, down])
    total, total_up, total_down, active, count_up, count_down = flags.sum(-1).double().unbind()
    return Mean(total, s.count), Mean(total_up, count_up), Mean(total_down, count_down), Mean(active, s.count)


def effective_sample_size(s: Sample) -> Ess:
    """Sums of e^(l - max l) and its square per row."""
    log_weights = s.where(-math.inf)
    top = log_weights.amax(-1)
    shifted = (log_weights - top.clamp(min=torch.finfo(top.dtype).min).unsqueeze(-1)).exp_()
    return Ess(s.count, top, shifted.sum(-1), torch.linalg.vecdot(shifted, shifted))


NO_HEAD_ROWS = "no valid row on which the head takes part"


@dataclass(frozen=True, slots=True)
class Share(Reduction):
    """A part of a whole, where `count` is above zero."""

    part: Slot
    whole: Slot
    count: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"share": lambda s: s[0] / s[1] if s[1] and s[2] else NAN}

    @staticmethod
    def merge(rows: Array) -> Array:
        """Parts, wholes and counts add."""
        merged: Array = rows.sum(axis=0)
        return merged


@dataclass(frozen=True, slots=True)
class HeadRatio(MetricGroup):
    """The log-ratio family per head."""

    head: tuple[str, ...] = label()
    kl: Mean = reports(
        Metric(
            key="policy/head/{head}/kl",
            number=151,
            unit="nats",
            question="How far did the update move this head, where it takes part?",
            low=0.0,
            healthy="0.002 to 0.02",
            warn="> 0.03",
            critical="> 0.1",
            source="as policy/kl",
            undefined=NO_HEAD_ROWS,
        )
    )
    logratio: Moments = reports(
        Metric(
            key="policy/head/{head}/logratio/std",
            number=152,
            unit="nats",
            question="How differently did the probabilities of this head's actions change?",
            of="std",
            low=0.0,
            healthy="< 0.15",
            warn="> 0.3",
            critical="> 0.7",
            source="heuristic",
            undefined=NO_HEAD_ROWS,
        )
    )
    ratio_min: Min = reports(
        Metric(
            key="policy/head/{head}/ratio/min",
            number=153,
            unit="ratio",
            question="How much less likely did any action of this head become?",
            low=0.0,
            healthy="> 0.3",
            warn="< 0.2",
            critical="< 0.1",
            source="heuristic",
            undefined=NO_HEAD_ROWS,
        )
    )
    ratio_max: Max = reports(
        Metric(
            key="policy/head/{head}/ratio/max",
            number=154,
            unit="ratio",
            question="How much more likely did any action of this head become?",
            low=0.0,
            healthy="< 2",
            warn="> 5",
            critical="> 10",
            source="as policy/ratio/max",
            undefined=NO_HEAD_ROWS,
        )
    )
    clip_frac: Mean | None = reports(
        Metric(
            key="policy/head/{head}/clip_frac",
            number=155,
            unit="fraction",
            question="On which share of its rows did this head alone leave the trust region?",
            rows=Rows.AFTER_STEP,
            low=0.0,
            high=1.0,
            healthy="0.02 to 0.2",
            warn="> 0.3",
            critical="> 0.5",
            source="as policy/clip_frac",
            undefined=f"{NO_HEAD_ROWS}, or {NO_STEP}",
        )
    )
    blame: Share = reports(
        Metric(
            key="policy/head/{head}/blame",
            number=156,
            unit="fraction",
            question="Which share of the policy's movement is this head's? The shares of all heads add up to 1.",
            low=0.0,
            high=1.0,
            warn="> 0.8 while ratios explode: look at this head",
            source="share of the squared log-ratio; heuristic",
            undefined=f"{NO_HEAD_ROWS}, or nothing moved",
        )
    )
    nonfinite: Sum = reports(
        Metric(
            key="policy/head/{head}/kl_nonfinite",
            number=157,
            unit="count",
            question="How many of this head's valid log-ratios were NaN or infinite?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="absent",
            critical="> 0",
            undefined="none was",
            when_positive=True,
        )
    )


@torch.no_grad()
def joint_log_ratio(log_ratios: Mapping[str, Tensor], relevant: Mapping[str, Tensor] | None = None) -> Tensor:
    """Log-ratio [..] of the whole action: the sum over the heads that take part.

    Args:
        log_ratios: per head [..].
        relevant: per head [..] bool; heads left out always take part.
    """
    relevant = relevant or {}
    parts = [torch.where(relevant[h].bool(), x, 0.0) if h in relevant else x for h, x in log_ratios.items()]
    return torch.stack(parts).sum(0)


@torch.inference_mode()
def head_ratio_diagnostics(
    log_ratios: Mapping[str, Tensor],
    *,
    relevant: Mapping[str, Tensor] | None = None,
    clip: float | None = None,
    valid: Tensor | None = None,
    dim: int | None = None,
) -> HeadRatio:
    """KL, ratio extremes, clip fraction and blame of every head.

    Args:
        log_ratios: per head [N] or [M, N], log-probability now minus at collection.
        relevant: per head, bool, same shape: rows on which it takes part; heads left out always do.
        clip: ε of the ratio's clip range.
        valid: bool, same shape; None where every row is.
        dim: axis to reduce; None reduces all axes to one row, -1 keeps the leading axis as optimizer steps.
    """
    same_shape(**log_ratios, valid=valid)
    s = _stacked(log_ratios, relevant or {}, valid, dim)
    e = s.values.clamp(-EXP_LIMIT, EXP_LIMIT).expm1_()
    squared = torch.linalg.vecdot(s.values, s.values)
    low, high = (s.where(fill).clamp(-EXP_LIMIT, EXP_LIMIT).exp_() for fill in (math.inf, -math.inf))
    return HeadRatio(
        head=tuple(map(segment, log_ratios)),
        kl=Mean((e - s.values).sum(-1), s.count),
        logratio=spread(s),
        ratio_min=Min(torch.where(s.count > 0, low.amin(-1), math.inf)),
        ratio_max=Max(torch.where(s.count > 0, high.amax(-1), -math.inf)),
        clip_frac=None if clip is None else Mean((e.abs() > clip).sum(-1), s.count),
        blame=Share(squared, squared.sum(-1, keepdim=True), s.count),
        nonfinite=Sum(s.nonfinite),
    )


def _stacked(
    log_ratios: Mapping[str, Tensor], relevant: Mapping[str, Tensor], valid: Tensor | None, dim: int | None
) -> Sample:
    """All heads as one sample [.., H, N]."""
    rows = {head: rows_of(x, dim).double() for head, x in log_ratios.items()}
    every = None if valid is None else rows_of(valid, dim).bool()
    masks = [rows_of(relevant[head], dim).bool() if head in relevant else every for head in rows]
    if every is not None:
        masks = [every if mask is None else mask & every for mask in masks]
    full = [torch.ones_like(x, dtype=torch.bool) if m is None else m for x, m in zip(rows.values(), masks, strict=True)]
    return keep(torch.stack(list(rows.values()), -2), torch.stack(full, -2))
