"""Movement of the policy away from the policy that collected the data, from the log-ratios of the minibatches.

`l` is the log-probability of the chosen action now minus at collection, `r = e^l`, `A` the advantages that multiply the ratio. One pass
covers all minibatches of an update: log-ratios [M, N] with `dim=-1` give one row per optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.facts import precision_of
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, no_grad, torch
from esper_telemetry.core.metric import Metric, MetricFamily, Rows, label, reports, segment
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Counts, Ess, Max, Mean, Min, Moments, Sum
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.metrics.statistics import (
    LOG_RATIOS,
    Quantiles,
    Sample,
    Share,
    as_quantiles,
    ascending,
    histogram,
    keep,
    levels_for,
    neighbours,
    per_row,
    rows_of,
    same_shape,
    sample,
    spread,
    where_any,
)

EXP_LIMIT = 20.0
"""Limit of log-ratios that are passed to exp or expm1."""

MAX_GRAPH_NODES = 64
"""Operations that are searched for the precision; the last layer of a policy is among the 20 nearest."""

SCHULMAN = "Schulman 2020, joschu.net/blog/kl-approx.html"

MOVED_TOO_FAR = (
    "Lower the learning rate or the number of epochs; set target_kl. The head with the largest `policy/head/{head}/blame` moved most."
)
RARE_ACTIONS = "Rare actions make extreme ratios: check `policy/ess_frac` too, and keep action probabilities away from 0 (entropy_coef)."
"""Advice that several metrics share."""

POLICY_FAMILY = MetricFamily(
    "policy",
    "Policy",
    "PPO collects a rollout with one policy and then takes many small steps away from it. The probability ratio of "
    "an action is its probability now divided by its probability when it was taken; its logarithm is the log-ratio. As "
    "long as ratios stay near 1 the data still describe the policy; clipping stops samples whose ratio leaves 1 ± "
    "clip. KL divergence sums up how far the policy moved, entropy how undecided it still is.",
    place=40,
    question="Is the policy moving too far?",
    first=("policy/kl", "policy/clip_frac", "policy/ess_frac_min", "policy/entropy_norm", "policy/surrogate_gain"),
)


@dataclass(frozen=True, slots=True)
class RatioDiagnostics(MetricGroup, absent="no valid, finite row"):
    """The log-ratio family of the joint policy.

    Attributes:
        precision: of the arithmetic that made the log-ratios, as the fact of that name; None if unknown.
    """

    kl: Mean = reports(
        Metric.nats("policy/kl", 101, "KL divergence of the update", level=Level.MINIMAL)
        .asks(
            "How far did this update move the policy away from the policy that collected the data? KL(old‖new) by the "
            "k3 estimator, mean of expm1(l) - l."
        )
        .bounds(
            healthy="0.002 to 0.02",
            warn="> 0.03",
            critical="> 0.1",
            source=f"{SCHULMAN}; stop rules of SB3, Spinning Up, CleanRL, rsl_rl; healthy runs p05-p95 .002-.013",
        ),
        Metric.nats("policy/kl_max", 102, "KL divergence of the worst minibatch", over="max", rows=Rows.AFTER_STEP, level=Level.MINIMAL)
        .asks("How far from the data policy was the worst minibatch?")
        .bounds(healthy="0.002 to 0.03", warn="> 0.095; below 1e-7 the policy does not move", critical="> 0.3", source="as policy/kl")
        .absent("no minibatch follows an optimizer step of this update"),
        Metric.nats("policy/kl_first", 103, "KL divergence before the first step", rows=Rows.FIRST)
        .asks("Do stored and recomputed log-probabilities agree before anything was learned? It must be about 0.")
        .bounds(healthy="about 0", warn="> 1e-6", source="identity: the policy has not changed yet"),
        Metric.nats("policy/kl_last", 104, "KL divergence in the last epoch", rows=Rows.LAST_EPOCH)
        .asks("How far did the policy move in the end, over the last epoch?")
        .bounds(healthy="0.002 to 0.02", warn="> 0.03", critical="> 0.1", source="as policy/kl")
        .advises(MOVED_TOO_FAR),
        Metric.quantity("policy/kl_epoch_slope", 105, "growth of the KL divergence per epoch", unit="nats/epoch", over="slope")
        .asks("How much further does each epoch push the policy? Steep and bending up: too many epochs.")
        .bounds(healthy="< 0.01", source="heuristic")
        .absent("one epoch"),
    )
    kl_k1: Mean = reports(
        Metric.nats("policy/kl_k1", 106, "KL divergence, estimator k1", low=None)
        .asks(
            "What is the value of the unbiased but noisy estimator mean(-l)? Strongly negative with a small policy/kl "
            "means wrong log-probabilities."
        )
        .bounds(healthy="within 4 standard errors of policy/kl", source=f"{SCHULMAN}; CleanRL old_approx_kl")
    )
    kl_k2: Mean = reports(
        Metric.nats("policy/kl_k2", 107, "KL divergence, estimator k2")
        .asks("What is the value of the estimator mean(l²/2)? Far from policy/kl, a few ratios are very large or small.")
        .bounds(healthy="0.7 to 1.4 times policy/kl", source=SCHULMAN)
    )
    kl_rev: Mean = reports(
        Metric.nats("policy/kl_rev", 108, "reverse KL divergence")
        .asks(
            "How far is the new policy from the old one in the reverse direction, KL(new‖old)? Well above policy/kl: "
            "mass moved to actions that the old policy seldom took."
        )
        .bounds(healthy="close to policy/kl", source=SCHULMAN)
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("policy/kl_nonfinite", 109, "non-finite inputs of KL divergence of the update").asks(
            "How many valid log-ratios were NaN or infinite?"
        )
    )
    logratio: Moments = reports(
        Metric.nats("policy/logratio/mean", 110, "mean of log-ratios", low=None).asks(
            "Did the chosen actions become more (above 0) or less likely?"
        ),
        Metric.nats("policy/logratio/std", 111, "standard deviation of log-ratios", of="std")
        .asks("How differently did the probabilities of the chosen actions change?")
        .bounds(healthy="< 0.15", warn="> 0.3", critical="> 0.7", source="heuristic")
        .advises(MOVED_TOO_FAR),
    )
    logratio_absmax: Max = reports(
        Metric.nats("policy/logratio/absmax", 112, "largest magnitude of log-ratios")
        .asks("By how much did the probability of any single chosen action change at most?")
        .bounds(healthy="< 1", warn="> 1.6 (a factor of 5)", source="ratio bounds 5 and 0.1 of esper-lite")
        .advises(RARE_ACTIONS),
        Metric.nats("integrity/ratio_init", 801, "log-ratio before the first step", rows=Rows.FIRST, level=Level.MINIMAL)
        .asks(
            "Does the trainer recompute the log-probabilities it stored, before the first optimizer step? Any difference "
            "means other observations, hidden states, masks or weights than at collection."
        )
        .bounds(
            healthy="about 0",
            warn="> 1e-5 (fp32), 1e-3 (tf32), 2e-2 (bf16, fp16); for Gaussian heads times max(1, 1/σ_min)",
            critical="> 1e-3 (fp32), 1e-2 (tf32), 5e-2 (bf16, fp16)",
            source="huggingface/trl#454; sb3-contrib#75; Huang 2022",
        ),
    )
    ratio: Moments = reports(
        Metric.ratio("policy/ratio/mean", 113, "mean of probability ratios")
        .asks("Is the mean probability ratio 1, as it must be up to sampling noise?")
        .bounds(healthy="within 4 std/√N of 1", source="E_old[r] = 1"),
        Metric.ratio("policy/ratio/std", 114, "standard deviation of probability ratios", of="std")
        .asks("How widely do the probability ratios scatter?")
        .bounds(healthy="< 0.15", warn="> 0.3", critical="> 0.7", source="heuristic")
        .advises(RARE_ACTIONS),
    )
    ratio_min: Min = reports(
        Metric.ratio("policy/ratio/min", 115, "smallest of probability ratios")
        .asks("How much less likely did any chosen action become?")
        .bounds(healthy="> 0.3", warn="< 0.2", critical="< 0.1", source="heuristic")
    )
    ratio_max: Max = reports(
        Metric.ratio("policy/ratio/max", 116, "largest of probability ratios", level=Level.MINIMAL)
        .asks("How much more likely did any chosen action become? It grows with batch size: compare policy/ess_frac.")
        .bounds(healthy="< 2", warn="> 5", critical="> 10 with policy/ess_frac < 0.8", source="ratio bounds 5 and 0.1 of esper-lite")
    )
    ratio_quantiles: Quantiles = reports(
        Metric.ratio("policy/ratio/p01", 117, "1 % quantile of probability ratios", of="p01")
        .asks("What is the ratio of the 1 % of actions that lost the most probability, at most?")
        .bounds(healthy="> 0.5", source="heuristic"),
        Metric.ratio("policy/ratio/p99", 118, "99 % quantile of probability ratios", of="p99")
        .asks("What is the ratio of the 1 % of actions that gained the most probability, at least?")
        .bounds(healthy="< 1.5", source="heuristic"),
    )
    histogram: Counts = reports(
        Metric.nats("policy/logratio/hist", 196, "hist of log-ratios", low=None).asks(
            "How are the changes in probability of the chosen actions distributed?"
        )
    )
    clip_frac: Mean | None = reports(
        Metric.fraction("policy/clip_frac", 119, "clip fraction", rows=Rows.AFTER_STEP, level=Level.MINIMAL)
        .asks("What share of the samples left the trust region, |r - 1| > clip?")
        .bounds(
            healthy="0.02 to 0.2", warn="> 0.3", critical="> 0.5", source="common practice (SB3, CleanRL); healthy runs p05-p95 .02-.17"
        )
        .absent("no minibatch follows an optimizer step of this update")
    )
    clip_frac_pos: Mean | None = reports(
        Metric.fraction("policy/clip_frac_pos", 120, "clip fraction of good actions", rows=Rows.AFTER_STEP)
        .asks("What share of the better-than-expected samples (A > 0) left the trust region?")
        .bounds(healthy="within 0.3 of policy/clip_frac_neg", source="heuristic")
        .absent("no A > 0, or no minibatch follows an optimizer step of this update")
    )
    clip_frac_neg: Mean | None = reports(
        Metric.fraction("policy/clip_frac_neg", 121, "clip fraction of bad actions", rows=Rows.AFTER_STEP)
        .asks("What share of the worse-than-expected samples (A < 0) left the trust region?")
        .bounds(healthy="within 0.3 of policy/clip_frac_pos", source="heuristic")
        .absent("no A < 0, or no minibatch follows an optimizer step of this update")
    )
    clip_frac_active: Mean | None = reports(
        Metric.fraction("policy/clip_frac_active", 122, "fraction without gradient", rows=Rows.AFTER_STEP)
        .asks("What share of the samples teaches nothing, because clipping zeroes its gradient?")
        .bounds(healthy="0.01 to 0.2", warn="> 0.3", critical="> 0.5", source="PPO 1707.06347, eq. 7")
        .absent("no minibatch follows an optimizer step of this update")
    )
    ess: Ess = reports(
        Metric.fraction("policy/ess_frac", 123, "effective sample size", level=Level.MINIMAL)
        .asks("What share of the samples still counts after importance weighting? Low: a few samples decide the update.")
        .bounds(healthy="> 0.9", warn="< 0.8", critical="< 0.5", source="Kong 1992; healthy runs p05 .94, worst minibatch .69"),
        Metric.fraction("policy/ess_frac_min", 124, "effective sample size of the worst minibatch", over="min", level=Level.MINIMAL)
        .asks("What share of the samples still counts in the worst minibatch?")
        .bounds(healthy="> 0.7", warn="< 0.6", critical="< 0.4", source="as policy/ess_frac"),
    )
    surrogate_gain: Mean | None = reports(
        Metric.quantity(
            "policy/surrogate_gain",
            125,
            "surrogate gain",
            unit="normalised advantage",
            rows=Rows.LAST_EPOCH_AFTER_STEP,
            level=Level.MINIMAL,
        )
        .asks("Did the update make good actions more likely and bad ones less likely? Mean of A (r - 1) over the last epoch.")
        .bounds(
            healthy="> 0, typically 0.025 to 0.043",
            warn="<= 0 once",
            critical="<= 0 three times in a row",
            source="positive in 170 of 170 healthy updates, negative in 70 of 70 with a flipped loss",
        )
        .absent("no minibatch follows an optimizer step of this update")
    )
    advantages_nonfinite: Sum | None = reports(
        Metric.nonfinite("policy/surrogate_gain_nonfinite", 126, "non-finite inputs of surrogate gain").asks(
            "How many valid advantages in the minibatches were NaN or infinite?"
        )
    )
    precision: str | None = None


@checked_arguments(clip=0)
@inference_mode
def ratio_diagnostics(
    log_ratio: ArrayLike,
    advantages: ArrayLike | None = None,
    *,
    clip: float | None = None,
    valid: ArrayLike | None = None,
    dim: int | None = None,
) -> RatioDiagnostics:
    """Return KL estimates, ratio moments and quantiles, clip fractions, effective sample size and surrogate gain.

    Clip fractions need `clip`; their sides and the surrogate gain also need `advantages`. Quantiles are taken over all rows together.

    Args:
        log_ratio: log-probability of the chosen actions now minus at collection, summed over heads, [N] or [M, N].
        advantages: the values that multiply the ratio, same shape.
        clip: ε of the ratio's clip range.
        valid: bool, same shape; None if every entry is valid.
        dim: axis to reduce; None reduces all axes to one row, -1 keeps the leading axis as optimizer steps.
    """
    log_ratio = as_tensor(log_ratio)
    precision = arithmetic_precision(log_ratio)
    advantages = None if advantages is None else as_tensor(advantages, log_ratio)
    valid = as_mask(valid, log_ratio)
    same_shape(log_ratio=log_ratio, advantages=advantages, valid=valid)
    s = sample(log_ratio, valid, dim=dim)
    e = s.values.clamp(-EXP_LIMIT, EXP_LIMIT).expm1_()
    a = None if advantages is None else keep(rows_of(advantages, dim).double(), s.mask)
    gain = None if a is None else a.values * e
    both = torch.stack([s.values, e])
    sums = both.sum(-1)
    k3 = (e - s.values).sum(-1)
    squares = torch.linalg.vecdot(both, s.values)  # of l² and e l, since the reverse k3 is e l - k3
    means = sums / s.count.clamp(min=1)
    d = (both - means.unsqueeze(-1)) * s.weight
    m2 = torch.linalg.vecdot(d, d)
    ends, fraction = neighbours(ascending(s), s.count.sum(), levels_for(s.values))
    ratio_ends = ends.clamp(-EXP_LIMIT, EXP_LIMIT).exp()
    at_levels = torch.lerp(ratio_ends[0], ratio_ends[1], fraction)
    smallest, largest = per_row(at_levels[:: len(at_levels) - 1], s.count)
    clip_frac, clip_frac_pos, clip_frac_neg, clip_frac_active = _clip_fractions(s, e, a, gain, clip)
    return RatioDiagnostics(
        kl=Mean(k3, s.count),
        kl_k1=Mean(-sums[0], s.count),
        kl_k2=Mean(squares[0] / 2, s.count),
        kl_rev=Mean(squares[1] - k3, s.count),
        nonfinite=Sum(s.nonfinite),
        logratio=Moments(s.count, means[0], m2[0], math.nan, math.nan),
        logratio_absmax=Max(where_any(s.values.abs().amax(-1), s.count)),
        ratio=Moments(s.count, means[1] + 1, m2[1], math.nan, math.nan),
        ratio_min=Min(smallest),
        ratio_max=Max(largest),
        ratio_quantiles=as_quantiles(at_levels, s.count),
        histogram=histogram(s, LOG_RATIOS),
        clip_frac=clip_frac,
        clip_frac_pos=clip_frac_pos,
        clip_frac_neg=clip_frac_neg,
        clip_frac_active=clip_frac_active,
        ess=effective_sample_size(s),
        surrogate_gain=None if a is None or gain is None else Mean(gain.sum(-1), a.count),
        advantages_nonfinite=None if a is None else Sum(a.nonfinite),
        precision=precision,
    )


def arithmetic_precision(result: Tensor) -> str | None:
    """Return the lowest precision of a result and of the operations that made it: autocast rounds in them, and may cast the result back."""
    nodes, dtypes = [result.grad_fn], {result.dtype}
    for node in nodes:
        if node is not None and len(nodes) < MAX_GRAPH_NODES:
            dtypes.update(entry.dtype for entry in getattr(node, "_input_metadata", ()))
            nodes.extend([source for source, _ in node.next_functions])
    known = {precision_of(dtype) for dtype in dtypes}
    if result.is_cuda and _allows_tf32(" ".join([node.name() for node in nodes if node is not None])):
        known.add("tf32")
    return next((name for name in ("fp16", "bf16", "tf32", "fp32") if name in known), None)


def _allows_tf32(operations: str) -> bool:
    """Return whether torch may use TF32 on a GPU: in cuDNN's convolutions and recurrent layers it does so by default."""
    backends = torch.backends
    try:
        in_cudnn = backends.cudnn.allow_tf32 and any(name in operations for name in ("Convolution", "Cudnn"))
        return bool(backends.cuda.matmul.allow_tf32 or in_cudnn)
    except RuntimeError:  # set for single operations, for which these attributes raise
        return True


def _clip_fractions(
    s: Sample, e: Tensor, a: Sample | None, gain: Tensor | None, clip: float | None
) -> tuple[Mean | None, Mean | None, Mean | None, Mean | None]:
    """Return the shares of clipped samples: of all, with A > 0, with A < 0, and with zero gradient, A (r - 1) > 0."""
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
    """Return the sums of e^(l - max l) and its square per row."""
    log_weights = s.where(-math.inf)
    top = log_weights.amax(-1)
    shifted = (log_weights - top.clamp(min=torch.finfo(top.dtype).min).unsqueeze(-1)).exp_()
    return Ess(s.count, top, shifted.sum(-1), torch.linalg.vecdot(shifted, shifted))


@dataclass(frozen=True, slots=True)
class HeadRatio(MetricGroup, absent="no valid row in which the head takes part"):
    """The log-ratio family per head."""

    head: tuple[str, ...] = label()
    kl: Mean = reports(
        Metric.nats("policy/head/{head}/kl", 151, "KL divergence of a head")
        .asks("How far did the update move this head, in the rows in which it takes part?")
        .bounds(healthy="0.002 to 0.02", warn="> 0.03", critical="> 0.1", source="as policy/kl")
        .advises(MOVED_TOO_FAR)
    )
    logratio: Moments = reports(
        Metric.nats("policy/head/{head}/logratio/std", 152, "standard deviation of a head's log-ratios", of="std")
        .asks("How differently did the probabilities of this head's actions change?")
        .bounds(healthy="< 0.15", warn="> 0.3", critical="> 0.7", source="heuristic")
        .advises(MOVED_TOO_FAR)
    )
    ratio_min: Min = reports(
        Metric.ratio("policy/head/{head}/ratio/min", 153, "smallest of a head's probability ratios")
        .asks("How much less likely did any action of this head become?")
        .bounds(healthy="> 0.3", warn="< 0.2", critical="< 0.1", source="heuristic")
        .advises(RARE_ACTIONS)
    )
    ratio_max: Max = reports(
        Metric.ratio("policy/head/{head}/ratio/max", 154, "largest of a head's probability ratios")
        .asks("How much more likely did any action of this head become?")
        .bounds(healthy="< 2", warn="> 5", critical="> 10", source="as policy/ratio/max")
    )
    clip_frac: Mean | None = reports(
        Metric.fraction("policy/head/{head}/clip_frac", 155, "clip fraction of a head", rows=Rows.AFTER_STEP)
        .asks("In what share of its rows did this head alone leave the trust region?")
        .bounds(healthy="0.02 to 0.2", warn="> 0.3", critical="> 0.5", source="as policy/clip_frac")
        .absent("no valid row in which the head takes part, or no minibatch follows an optimizer step of this update")
    )
    blame: Share = reports(
        Metric.fraction("policy/head/{head}/blame", 156, "a head's share of the policy's movement")
        .asks("What share of the policy's movement comes from this head? The shares of all heads add up to 1.")
        .bounds(warn="> 0.8 while ratios explode: look at this head", source="share of the squared log-ratio; heuristic")
        .absent("no valid row in which the head takes part, or nothing moved")
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("policy/head/{head}/kl_nonfinite", 157, "non-finite inputs of KL divergence of a head").asks(
            "How many of this head's valid log-ratios were NaN or infinite?"
        )
    )


@no_grad
def joint_log_ratio(log_ratios: Mapping[str, Tensor], relevant: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the log-ratio [..] of the whole action: the sum over the relevant heads.

    Args:
        log_ratios: per head [..].
        relevant: per head [..] bool; other heads always take part.
    """
    relevant = relevant or {}
    parts = [torch.where(relevant[h].bool(), x, 0.0) if h in relevant else x for h, x in log_ratios.items()]
    return torch.stack(parts).sum(0)


@inference_mode
def head_ratio_diagnostics(
    log_ratios: Mapping[str, Tensor],
    *,
    relevant: Mapping[str, Tensor] | None = None,
    clip: float | None = None,
    valid: Tensor | None = None,
    dim: int | None = None,
) -> HeadRatio:
    """Return KL, ratio extremes, clip fraction and blame of every head.

    Args:
        log_ratios: per head [N] or [M, N], log-probability now minus at collection.
        relevant: per head, bool, same shape: rows on which it takes part; other heads always take part.
        clip: ε of the ratio's clip range.
        valid: bool, same shape; None if every row is valid.
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


def _stacked(log_ratios: Mapping[str, Tensor], relevant: Mapping[str, Tensor], valid: Tensor | None, dim: int | None) -> Sample:
    """Return all heads as one sample [.., H, N]."""
    rows = {head: rows_of(x, dim).double() for head, x in log_ratios.items()}
    every = None if valid is None else rows_of(valid, dim).bool()
    masks = [rows_of(relevant[head], dim).bool() if head in relevant else every for head in rows]
    if every is not None:
        masks = [every if mask is None else mask & every for mask in masks]
    full = [torch.ones_like(x, dtype=torch.bool) if m is None else m for x, m in zip(rows.values(), masks, strict=True)]
    return keep(torch.stack(list(rows.values()), -2), torch.stack(full, -2))
