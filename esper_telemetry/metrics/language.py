"""Reinforcement learning of language models: tokens, completions, groups of completions of one prompt, and the engine that samples them.

An action is one token of a completion. There are B completions of at most T tokens; masks [B, T] mark the tokens that are learned from.
Every function merges all its completions into one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.metric import Metric, MetricFamily, label, reports, segment
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Ess, Max, Mean, Min, Moments, Sum
from esper_telemetry.metrics.ratio import EXP_LIMIT, effective_sample_size
from esper_telemetry.metrics.statistics import Quantiles, as_quantiles, ascending, defined, levels_for, quantiles, sample, spread, where_any

ENGINE = "NVIDIA-NeMo/RL docs/guides/grpo.md (1.05); huggingface/trl#3867, #4772 and #6789"
DEAD_GROUPS = "huggingface/trl#3857; volcengine/verl#5770; DAPO, arXiv 2503.14476, section 3.2"
NO_COMPLETION = "no completion was generated for this update"
ALL_OWN = "the model wrote all tokens of the completions"

SMALLEST_SURPRISE = 1e-3
"""Magnitude of log-probabilities below which the float32 steps of 1 - p are so coarse that bfloat16 can represent them by chance."""

LANGUAGE_FAMILY = MetricFamily(
    "lm",
    "Language models",
    "A language model learns from completions: each token is an action, the reward is given for the whole completion, and "
    "advantages compare the completions of one prompt, a group, with each other. An engine that samples with other "
    "numerics than the trainer makes data off-policy before the first step. `policy/*` is measured per token if the "
    "trainer keeps the log-probabilities of collection.",
    place=250,
    question="Does the language model learn from the right tokens?",
    first=("lm/reward/mean", "lm/groups/zero_advantage", "lm/mismatch/mult_error", "lm/entropy", "lm/length/mean"),
)


@dataclass(frozen=True, slots=True)
class TokenStats(MetricGroup, absent="no token is learned from"):
    """The tokens that are learned from, in all minibatches of the update."""

    entropy: Moments | None = reports(
        Metric.nats("lm/entropy", 1101, "entropy per token", level=Level.MINIMAL)
        .asks("How undecided is the model about the next token?")
        .bounds(
            healthy="falls slowly, stays above 0.05",
            source="huggingface/trl docs/source/grpo_trainer.md; arXiv 2505.22617 (entropy collapse)",
        )
        .absent("the trainer does not compute it")
    )
    log_prob: Mean = reports(
        Metric.nats("lm/logprob/mean", 1102, "mean log-probability of tokens", low=None).asks(
            "How likely are the sampled tokens under the model?"
        )
    )
    log_prob_min: Min = reports(
        Metric.nats("lm/logprob/min", 1103, "smallest log-probability of a token", low=None).asks(
            "How unlikely is the least likely token that is learned from?"
        )
    )
    bf16: Mean = reports(
        Metric.fraction("lm/logprob/bf16_frac", 1104, "log-probabilities that bfloat16 can hold")
        .asks("Were the log-probabilities rounded to bfloat16? By chance 1 in 65,536 float32 numbers is representable.")
        .bounds(healthy="about 0", warn="> 0.5", source="arXiv 2510.26788 (precision of training and inference)")
    )
    mask_errors: Mean | None = reports(
        Metric.fraction("lm/mask_errors", 1105, "completions with a wrong mask", level=Level.MINIMAL)
        .asks("What share of the completions is not learned from its first token to its end token?")
        .bounds(healthy="0", critical="> 0", source="identity: the mask is 1 up to and with the first end token, then 0")
        .absent("end tokens are not known, or the completions hold tokens that others wrote, such as results of tools")
    )
    tokens: Sum = reports(
        Metric.count("lm/tokens", 1106, "tokens learned from").asks("How many tokens does an update learn from?").absent("")
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("lm/logprob/mean_nonfinite", 1107, "non-finite log-probabilities of tokens").asks(
            "How many log-probabilities of tokens were NaN or infinite?"
        )
    )


@inference_mode
def token_stats(log_probs: Tensor, mask: Tensor, *, entropy: Tensor | None = None, ends: Tensor | None = None) -> TokenStats:
    """Return entropy, log-probabilities and mask errors of tokens.

    Args:
        log_probs: [B, T] of the sampled tokens now.
        mask: [B, T], True for tokens that are learned from.
        entropy: [B, T] of the distribution of each token.
        ends: [B, T], True for end tokens; None if the mask does not follow from them. A completion with an empty mask was left out on
            purpose and is not an error.
    """
    s = sample(log_probs, mask)
    rounded = s.values == s.values.to(torch.bfloat16).double()
    counted = s.mask & (s.values < -SMALLEST_SURPRISE)
    mask_errors = None
    if ends is not None:  # a mask is empty, or a prefix that stops with the first end token
        inside, last = mask.bool(), ends.bool()
        learned = inside.sum(-1)
        prefix = (inside[:, 1:] <= inside[:, :-1]).all(-1) & inside[:, 0]
        expected = ((last.cumsum(-1) - last.long()) == 0).sum(-1)
        wrong = ~prefix | (last.any(-1) & (learned != expected))
        mask_errors = Mean((wrong & (learned > 0)).sum(), learned.numel())
    return TokenStats(
        entropy=None if entropy is None else spread(sample(entropy, mask)),
        log_prob=s.mean(s.values),
        log_prob_min=Min(where_any(s.where(torch.inf).amin(-1), s.count)),
        bf16=Mean((rounded & counted).sum(-1), counted.sum(-1)),
        mask_errors=mask_errors,
        tokens=Sum(mask.sum()),
        nonfinite=Sum(s.nonfinite),
    )


@dataclass(frozen=True, slots=True)
class Calibration(MetricGroup, absent="the trainer does not compute the entropy"):
    """Surprise of the sampled tokens minus the entropy of their distributions, before the first step of the update.

    If tokens are sampled from the distribution that is evaluated, surprise equals entropy on average, token by token: the sum of the
    differences is a martingale. Another temperature, other tokens, a shift or older weights cause a drift.
    """

    gap: Mean = reports(
        Metric.nats("lm/surprise/gap", 1111, "surprise over entropy", low=None)
        .asks("Were the tokens sampled from the distribution that the trainer evaluates? Then it is 0 up to noise.")
        .bounds(healthy="within 5 standard errors of 0", source="identity: E[-ln p(token)] is the entropy; huggingface/trl#3867")
    )
    z: Max = reports(
        Metric.quantity("lm/surprise/z", 1112, "surprise over entropy, in standard errors", unit="sigma")
        .asks("By how many standard errors does the mean surprise differ from the entropy?")
        .bounds(healthy="-4 to 4", warn="beyond 6", source="central limit theorem for martingales")
    )


@inference_mode
def calibration(log_probs: Tensor, entropy: Tensor, mask: Tensor) -> Calibration:
    """Return the mean of -log p - H over the tokens of the mask and its distance from 0 in standard errors; all [B, T]."""
    s = sample(-log_probs.double() - entropy.double(), mask)
    error = torch.linalg.vecdot(s.values, s.values).sqrt()
    total = s.values.sum(-1)
    return Calibration(Mean(total, s.count), Max(where_any(torch.where(error > 0, total / error, 0.0), s.count)))


@dataclass(frozen=True, slots=True)
class SamplingMismatch(MetricGroup, absent="the engine does not report log-probabilities"):
    """Ratio of a token's probability under the trainer to its probability under the sampling engine, with equal weights."""

    error: Mean = reports(
        Metric.ratio("lm/mismatch/mult_error", 1121, "multiplicative error of the sampling engine")
        .asks("By what factor do engine and trainer disagree about a token's probability? Mean of e^|difference|.")
        .bounds(healthy="1 to 1.02", warn="> 1.05", critical="> 1.2", source=ENGINE)
    )
    ratio: Moments = reports(
        Metric.ratio("lm/mismatch/ratio_mean", 1122, "trainer over engine, mean")
        .asks("Is the mean ratio of the trainer's to the engine's probability 1, as it is for tokens of the engine?")
        .bounds(healthy="0.99 to 1.01", warn="outside 0.95 to 1.05", source=ENGINE)
    )
    quantiles: Quantiles = reports(
        Metric.ratio("lm/mismatch/ratio_p01", 1123, "trainer over engine, 1 % quantile", of="p01")
        .asks("How much less likely are the engine's worst tokens for the trainer? The low tail destabilises training.")
        .bounds(healthy="> 0.9", warn="< 0.5", source=ENGINE),
        Metric.ratio("lm/mismatch/ratio_p99", 1124, "trainer over engine, 99 % quantile", of="p99")
        .asks("How much more likely is 1 % of the engine's tokens for the trainer?")
        .bounds(healthy="< 1.1", warn="> 2", source=ENGINE),
    )
    smallest: Min = reports(
        Metric.ratio("lm/mismatch/ratio_min", 1125, "trainer over engine, smallest")
        .asks("How much less likely is the engine's worst token for the trainer?")
        .bounds(healthy="> 0.5", source=ENGINE)
    )
    outside: Mean = reports(
        Metric.fraction("lm/mismatch/outside_frac", 1126, "tokens on which engine and trainer disagree")
        .asks("For what share of the tokens is the ratio of the trainer's to the engine's probability outside 0.9 to 1.1?")
        .bounds(healthy="< 0.02", warn="> 0.1", source=ENGINE)
    )
    kl: Mean = reports(
        Metric.nats("lm/mismatch/kl", 1127, "KL divergence of the trainer from the engine")
        .asks("How far is the trainer's policy from the sampling policy? KL(engine‖trainer), estimator k3.")
        .bounds(healthy="< 0.001", warn="> 0.01", source=ENGINE)
    )
    later_error: Mean = reports(
        Metric.ratio("lm/mismatch/later_turns_error", 1128, "multiplicative error of the sampling engine after the first turn")
        .asks("By what factor do engine and trainer disagree about a token's probability in later turns?")
        .bounds(healthy="1 to 1.02", warn="> 1.05", critical="> 1.2", source=f"{ENGINE}; volcengine/verl#5229")
        .advises("If the first turn agrees, check that earlier turns and texts of tools are not tokenized again.")
        .absent("no completion has a second turn")
    )


@inference_mode
def sampling_mismatch(trainer: Tensor, engine: Tensor, mask: Tensor) -> SamplingMismatch:
    """Return how far the trainer's log-probabilities [B, T] at collection are from the engine's, which are NaN for unknown tokens."""
    s = sample(trainer.double() - engine.double(), mask)
    e = s.values.clamp(-EXP_LIMIT, EXP_LIMIT).expm1()
    ratio = s._replace(values=e)
    moments = spread(ratio)
    at_levels = quantiles(ascending(ratio), s.count.sum(), levels_for(e)) + 1
    error = s.values.abs().clamp(max=EXP_LIMIT).exp() * s.weight
    later = s.mask & (turn_starts(mask).cumsum(-1) > 1).flatten()
    return SamplingMismatch(
        error=Mean(error.sum(-1), s.count),
        ratio=Moments(moments.n, moments.mean + 1, moments.m2, moments.m3, moments.m4),
        quantiles=as_quantiles(at_levels, s.count),
        smallest=Min(where_any(ratio.where(torch.inf).amin(-1) + 1, s.count)),
        outside=s.share((e < -0.1) | (e > 0.1)),
        kl=Mean((e - s.values).sum(-1), s.count),
        later_error=Mean((error * later).sum(-1), later.sum(-1)),
    )


@dataclass(frozen=True, slots=True)
class ReferenceKl(MetricGroup, absent="training has no reference model (beta is 0)"):
    """Distance from the reference model."""

    kl: Mean = reports(
        Metric.nats("lm/kl_reference", 1131, "KL divergence from the reference model")
        .asks("How far is the model from the reference model, with which training began? Estimator k3 per token.")
        .bounds(healthy="< 0.1", warn="> 0.5", critical="> 1", source="medians of public GRPO runs: 0.002 to 0.02 if they learn; heuristic")
        .advises("Lower the learning rate, or raise the weight of the penalty (beta); check that the reference is the initial model.")
    )
    largest: Max = reports(
        Metric.nats("lm/kl_reference_max", 1132, "largest KL divergence from the reference model of a token").asks(
            "How far is the model from the reference at the worst token? One such token can make the loss explode."
        )
    )


@inference_mode
def reference_kl(log_probs: Tensor, reference: Tensor, mask: Tensor) -> ReferenceKl:
    """Return KL(model‖reference) by k3, as GRPO penalises it, from the log-probabilities [B, T] of both."""
    s = sample(reference.double() - log_probs.double(), mask)
    k3 = s.values.clamp(-EXP_LIMIT, EXP_LIMIT).expm1() - s.values
    return ReferenceKl(Mean(k3.sum(-1), s.count), Max(where_any(k3.amax(-1), s.count)))


@dataclass(frozen=True, slots=True)
class SequenceRatio(MetricGroup, absent="no stored log-probabilities, or no earlier step"):
    """Ratio of the probability of whole completions now to their probability at collection."""

    log_ratio: Moments = reports(
        Metric.nats("lm/sequence/logratio_std", 1141, "standard deviation of completions' log-ratios", of="std").asks(
            "How differently did the probabilities of whole completions change?"
        )
    )
    largest: Max = reports(
        Metric.nats("lm/sequence/logratio_absmax", 1142, "largest log-ratio of a completion").asks(
            "What is the largest change in the log-probability of any completion?"
        )
    )
    mean_largest: Max = reports(
        Metric.nats("lm/sequence/mean_logratio_absmax", 1143, "largest log-ratio of a completion per token")
        .asks("How far is the worst completion, as GSPO measures it: the mean over its tokens?")
        .bounds(source="GSPO, arXiv 2507.18071, equation 7")
    )
    ess: Ess = reports(
        Metric.fraction("lm/sequence/ess_frac", 1144, "effective number of completions").asks(
            "What share of the completions would count if they were weighted by their ratio?"
        )
    )


@inference_mode
def sequence_ratio(log_ratio: Tensor, mask: Tensor) -> SequenceRatio:
    """Return the moments of the sums of log-ratios [B, T] over the tokens of each completion."""
    weight = mask.double()
    totals = torch.where(mask.bool(), log_ratio.double(), 0.0).sum(-1)
    tokens = weight.sum(-1)
    s, per_token = sample(totals, tokens > 0), sample(totals / tokens.clamp(min=1), tokens > 0)
    return SequenceRatio(
        log_ratio=spread(s),
        largest=Max(where_any(s.values.abs().amax(-1), s.count)),
        mean_largest=Max(where_any(per_token.values.abs().amax(-1), s.count)),
        ess=effective_sample_size(s),
    )


@dataclass(frozen=True, slots=True)
class RatioOrigin(MetricGroup):
    """Origin of the old log-probabilities."""

    constructed: Mean = reports(
        Metric.fraction("lm/ratio_constructed", 1145, "steps whose ratio is 1 by construction")
        .asks("In what share of the optimizer steps do the old log-probabilities come from the same forward pass?")
        .bounds(healthy="0 or 1; at 1, clip fractions are always 0 and carry no information", source="huggingface/trl#3120")
        .absent("no optimizer step")
    )


@dataclass(frozen=True, slots=True)
class CompletionStats(MetricGroup, absent=NO_COMPLETION):
    """The completions of an update."""

    length: Moments = reports(
        Metric.magnitude("lm/length/mean", 1151, "length of completions", unit="tokens", level=Level.MINIMAL).asks(
            "How long are completions? A length that runs away or collapses is the first sign of many faults."
        ),
        Metric.std("lm/length/std", 1152, "spread of the length of completions", unit="tokens").asks(
            "How much do the lengths of completions vary?"
        ),
    )
    longest: Max = reports(
        Metric.magnitude("lm/length/max", 1153, "length of the longest completion", unit="tokens").asks(
            "How long is the longest completion?"
        )
    )
    truncated: Mean | None = reports(
        Metric.fraction("lm/truncated_frac", 1154, "completions without an end")
        .asks("What share of the completions was cut at the length limit? Their reward judges half an answer.")
        .bounds(healthy="< 0.1", warn="> 0.5", source="DAPO, arXiv 2503.14476, section 3.4; huggingface/trl docs")
        .absent("end tokens are not known")
    )
    completions: Sum = reports(
        Metric.count("lm/completions", 1155, "completions").asks("How many completions does an update learn from?").absent("")
    )
    turns: Mean | None = reports(
        Metric.quantity("lm/turns/mean", 1156, "turns of the model", unit="turns", low=0.0)
        .asks("How often does the model write in a completion, before and after text of others such as results of tools?")
        .absent(ALL_OWN)
    )
    most_turns: Max | None = reports(
        Metric.quantity("lm/turns/max", 1157, "most turns of a completion", unit="turns", low=0.0)
        .asks("How many turns has the longest exchange? At the limit of turns it was probably cut.")
        .absent(ALL_OWN)
    )


@inference_mode
def completion_stats(lengths: Tensor, truncated: Tensor | None = None, *, turns: Tensor | None = None) -> CompletionStats:
    """Return lengths [B] in tokens, the share of completions that the limit cut [B], and the number of turns [B]."""
    s = sample(lengths)
    return CompletionStats(
        length=spread(s),
        longest=Max(where_any(s.values.amax(-1), s.count)),
        truncated=None if truncated is None else Mean(truncated.sum(), truncated.numel()),
        completions=Sum(s.count),
        turns=None if turns is None else Mean(turns.double().sum(), turns.numel()),
        most_turns=None if turns is None else Max(turns.double().amax()),
    )


def turn_starts(mask: Tensor) -> Tensor:
    """Return where turns begin [B, T]: passages of tokens of the model, where the mask [B, T] is True."""
    own = mask.bool()
    return torch.cat([own[:, :1], own[:, 1:] & ~own[:, :-1]], -1)


def turns_of(mask: Tensor) -> Tensor:
    """Return the number of turns [B] of completions by the mask [B, T] of the model's tokens."""
    return turn_starts(mask).sum(-1)


@dataclass(frozen=True, slots=True)
class GroupStats(MetricGroup, absent=NO_COMPLETION):
    """Rewards and advantages by group: the completions of one prompt."""

    reward: Moments = reports(
        Metric.quantity("lm/reward/mean", 1161, "reward of completions", unit="reward", level=Level.MINIMAL).asks("Does the reward grow?"),
        Metric.std("lm/reward/std", 1162, "spread of the reward of completions", unit="reward").asks(
            "How much do the rewards of completions vary?"
        ),
    )
    length_correlation: Mean = reports(
        Metric.correlation("lm/reward/length_correlation", 1163, "correlation of reward and length", unit="correlation")
        .asks("Are longer completions of the same prompt rewarded more?")
        .bounds(healthy="-0.8 to 0.8", source="arXiv 2503.20783 (length bias of GRPO); heuristic")
        .absent("no group differs in reward and in length")
    )
    zero_advantage: Mean = reports(
        Metric.fraction("lm/groups/zero_advantage", 1164, "groups without advantages")
        .asks("In what share of the groups do all completions have the same reward, so that nothing is learned?")
        .bounds(healthy="< 0.5", warn="> 0.8", critical="1", source=DEAD_GROUPS)
    )
    all_best: Mean = reports(
        Metric.fraction("lm/groups/all_best", 1165, "groups that are solved")
        .asks("What share of the groups has only completions with the best reward of the update? They are too easy.")
        .bounds(source=DEAD_GROUPS)
        .absent("all completions have the same reward")
    )
    all_worst: Mean = reports(
        Metric.fraction("lm/groups/all_worst", 1166, "groups that are hopeless")
        .asks("What share of the groups has only completions with the worst reward of the update? They are too hard.")
        .bounds(source=DEAD_GROUPS)
        .absent("all completions have the same reward")
    )
    sign_agreement: Mean | None = reports(
        Metric.fraction("lm/groups/sign_agreement", 1167, "advantages with the sign of the reward", level=Level.MINIMAL)
        .asks("Do completions that are better than their group get a positive advantage, and the others a negative one?")
        .bounds(healthy="1", critical="< 0.99", source="identity: advantages are rewards minus the mean of their group")
        .absent("no group has any advantage, or rewards are normalised before they are added up")
    )
    mixed: Mean | None = reports(
        Metric.fraction("lm/groups/mixed", 1168, "groups of several prompts", level=Level.MINIMAL)
        .asks("What share of the groups mixes completions of several prompts? These are wrongly compared with each other.")
        .bounds(healthy="0", critical="> 0", source="identity: a group holds the completions of one prompt")
        .absent("the prompts are not known")
    )
    single: Mean | None = reports(
        Metric.fraction("lm/groups/single", 1169, "groups of one completion", level=Level.MINIMAL)
        .asks("What share of the prompts has only one completion, so that there is no other to compare it with?")
        .bounds(healthy="0", critical="> 0.5", source="identity: the mean of one reward is the reward")
        .absent("advantages are not relative to a group")
    )


@inference_mode
def group_stats(
    rewards: Tensor, prompts: Tensor, lengths: Tensor, *, advantages: Tensor | None = None, size: int | None = None
) -> GroupStats:
    """Return statistics of rewards and advantages within groups.

    Args:
        rewards: [B], the weighted sum over reward functions; NaN if a completion could not be scored.
        prompts: [B], numbers that are equal for equal prompts.
        lengths: [B] in tokens.
        advantages: [B]; None unless they are these rewards minus their group's mean, up to a positive scale.
        size: number of consecutive completions in the batch that the trainer compares with each other.
    """
    s = sample(rewards)
    _, index = prompts.unique(return_inverse=True)
    groups = int(index.max()) + 1 if len(index) else 0
    counts = _by_group(s.weight, index, groups)
    means = _by_group(s.values, index, groups) / counts.clamp(min=1)
    centred = (s.values - means[index]) * s.weight
    scale = s.values.abs().amax().clamp(min=1e-12)
    differs = centred.abs() > 1e-5 * scale
    dead = _by_group(differs.double(), index, groups) == 0
    counted = counts > 1
    best, worst = s.where(-torch.inf).amax(), s.where(torch.inf).amin()
    varied = (best > worst).double()
    compared = dead & counted
    length = lengths.double()
    length = (length - (_by_group(length * s.weight, index, groups) / counts.clamp(min=1))[index]) * s.weight
    correlation = defined((centred * length).sum() / (centred.square().sum() * length.square().sum()).sqrt())
    agreement = mixed = single = None
    if advantages is not None:
        single = Mean((counts == 1).sum(), (counts > 0).sum())
        agreement = Mean(((advantages.sign() == centred.sign()) & differs).sum(), differs.sum())
    if size is not None and size > 0 and len(prompts) % size == 0:
        parts = prompts.view(-1, size)
        mixed = Mean((parts != parts[:, :1]).any(-1).sum(), len(parts))
    return GroupStats(
        reward=spread(s),
        length_correlation=correlation,
        zero_advantage=Mean(compared.sum(), counted.sum()),
        all_best=Mean((compared & ((means - best).abs() <= 1e-5 * scale)).sum() * varied, counted.sum() * varied),
        all_worst=Mean((compared & ((means - worst).abs() <= 1e-5 * scale)).sum() * varied, counted.sum() * varied),
        sign_agreement=agreement,
        mixed=mixed,
        single=single,
    )


def _by_group(values: Tensor, index: Tensor, groups: int) -> Tensor:
    """Return the sums [G] of float64 values [B] by the number of their group [B]."""
    return values.new_zeros(groups).index_add_(0, index, values)


@dataclass(frozen=True, slots=True)
class RewardComponents(MetricGroup, absent="it did not score any completion"):
    """Each reward function separately."""

    function: tuple[str, ...] = label()
    reward: Moments = reports(
        Metric.quantity("lm/reward/{function}/mean", 1171, "mean of a reward function", unit="reward").asks(
            "Which of the reward functions grows?"
        ),
        Metric.std("lm/reward/{function}/std", 1172, "spread of a reward function", unit="reward")
        .asks("Does this reward function distinguish completions?")
        .bounds(healthy="> 0", source=DEAD_GROUPS),
    )
    length_correlation: Mean = reports(
        Metric.correlation(
            "lm/reward/{function}/length_correlation", 1173, "correlation of a reward function and length", unit="correlation"
        )
        .asks("Does this reward function favour longer completions?")
        .bounds(healthy="-0.8 to 0.8", source="as lm/reward/length_correlation")
        .absent("reward or length is constant")
    )


@inference_mode
def reward_components(rewards: Mapping[str, Tensor], lengths: Tensor) -> RewardComponents:
    """Return mean, spread and correlation with the length [B] of each reward function's rewards [B], which are NaN if not scored."""
    s = sample(torch.stack(tuple(rewards.values())), dim=-1)
    mean = s.values.sum(-1, keepdim=True) / s.count.clamp(min=1).unsqueeze(-1)
    d = (s.values - mean) * s.weight
    length = lengths.double() * s.weight
    length = (length - length.sum(-1, keepdim=True) / s.count.clamp(min=1).unsqueeze(-1)) * s.weight
    correlation = torch.linalg.vecdot(d, length) / (d.square().sum(-1) * length.square().sum(-1)).sqrt()
    return RewardComponents(tuple(map(segment, rewards)), spread(s), defined(correlation))
