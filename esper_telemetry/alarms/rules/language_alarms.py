"""Alarms about language models trained on completions: tokens, groups, rewards and the sampling engine.

No alarm detects reward hacking early: in published runs, the logged numbers did not separate it from learning before the reward did
(volcengine/verl#7004). `lm/length_reward` detects one measurable cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from statistics import fmean, variance

from esper_telemetry.alarms.alarm_bounds import above, below, count, hard
from esper_telemetry.alarms.judges import AboveBound, StateJudge, reading
from esper_telemetry.alarms.rule import Finding, View, alarm
from esper_telemetry.core.facts import Facts

MASK_ERRORS = above("lm_mask_errors", 0.0, "share of completions with a wrong mask")
ROUNDED = above("lm_rounded", 0.9, "share of log-probabilities that are bfloat16 numbers")
MIXED = above("lm_mixed", 0.0, "share of groups with several prompts")
SINGLE = above("lm_single", 0.5, "share of prompts with one completion")
SIGNS = below("lm_sign_agreement", 0.99, "share of advantages with the sign of the reward")
SIGNS_TURNED = 0.02
"""Share of advantages with the sign of the reward below which nearly all signs are flipped; wrong groups leave about half correct."""

ENGINE_ERROR = above("lm_engine_error", 1.05, "multiplicative error of the sampling engine")
SURPRISE = above("lm_surprise", 6.0, "standard errors between surprise and entropy, pooled over the last updates")
SURPRISE_GAP = above("lm_surprise_gap", 0.02, "nats per token between surprise and entropy")
DEAD = above("lm_dead_groups", 0.95, "share of groups without advantages")
LENGTH = above("lm_length_correlation", 0.9, "correlation of reward and length within groups, mean over the last updates")
TRUNCATED = above("lm_truncated", 0.5, "share of completions without an end")
TRUNCATED_BEFORE = below("lm_truncated_before", 0.2, "the same in the first updates")
FALLEN_FACTOR = 4.0  # multiple of the entropy's bound that its first value must exceed, without statistics of groups
FEW_NATS = below("lm_entropy", 0.05, "entropy per token in nats")
TOGETHER = "updates over which the correlation and the rewards are pooled, and first updates of the truncation"
UPDATES = count("lm_updates", 5, TOGETHER)
EQUAL = count("lm_equal_updates", 10, "updates with the same mean reward after which groups are dead, for logs without group statistics")
SURPRISE_UPDATES = count("lm_surprise_updates", 30, "updates over which surprise is pooled: barely trained models differ little")


def signs(view: View) -> Iterator[Finding]:
    """Advantages with the opposite sign of their rewards: nearly all of them."""
    key = "lm/groups/sign_agreement"
    value = view.get(key)
    if value is not None:
        words = (
            "only {:%} of the advantages have had the sign of the reward minus the mean reward of the same prompt, so "
            "the model learns to do worse"
        )
        yield Finding(hard(value < SIGNS_TURNED), key, value, SIGNS_TURNED).says(words, value)
    elif "lm/groups/mixed" in view.values:
        yield Finding(0.0, key)


def grouping(view: View) -> Iterator[Finding]:
    """Groups with several prompts, groups of one completion, or advantages that are not relative to the group."""
    mixed, agreement, bound = view.get("lm/groups/mixed"), view.get("lm/groups/sign_agreement"), view.limits[MIXED]
    single = view.get("lm/groups/single")
    if single is not None and single > view.limits[SINGLE]:
        words = "{:%} of the prompts have had only one completion, so there is no other to compare it with, and it is made more likely "
        words += "by as much as its reward (sample several completions per prompt: rollout.n, num_generations)"
        yield Finding(1.0, "lm/groups/single", single, view.limits[SINGLE]).says(words, single)
    elif mixed is not None and mixed > bound:
        words = "{:%} of the groups have contained completions of several prompts, so rewards of different prompts are compared"
        yield Finding(1.0, "lm/groups/mixed", mixed, bound).says(words, mixed)
    elif agreement is not None:
        wrong, bound = SIGNS_TURNED <= agreement < view.limits[SIGNS], view.limits[SIGNS]
        words = "only {:%} of the advantages have had the sign of the reward minus the mean reward of the same prompt, so completions of "
        words += "different prompts are compared"
        yield Finding(hard(wrong), "lm/groups/sign_agreement", agreement, bound).says(words, agreement)


@dataclass(slots=True)
class FadingMean:
    """A weighted mean in which earlier values count less."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float, *, updates: float) -> float:
        """Return the mean after adding a value; the earlier ones fade over this number of updates."""
        fade = 1 - 1 / updates
        self.total, self.weight = fade * self.total + weight * value, fade * self.weight + weight
        return self.total / self.weight if self.weight else 0.0


@reading("lm/surprise/gap", "lm/surprise/z")
def surprise(view: View, gap: float, z: float, last: FadingMean) -> Iterator[Finding]:
    """Difference of surprise and entropy, pooled over the last updates by the inverse of its variance."""
    error = abs(gap / z) if z else 0.0
    mean = last.add(gap, 1 / error**2 if error else 0.0, updates=view.limits[SURPRISE_UPDATES])
    together = mean * last.weight**0.5
    wrong = abs(together) > view.limits[SURPRISE] and abs(mean) > view.limits[SURPRISE_GAP]
    words = "sampled tokens have been {} likely than the entropy predicts, by {} nats per token ({} standard errors): they come from "
    words += "another distribution"
    yield Finding(hard(wrong), "lm/surprise/gap", gap, z=together).says(words, "less" if mean > 0 else "more", abs(mean), abs(together))


@dataclass(slots=True)
class MeanRewards:
    """Mean rewards so far.

    Attributes:
        lowest, highest: over all updates.
        last: rewards of the last updates, because prompts may differ in difficulty.
        first, later: rewards of the first updates, and of the latest ones after them, four times as many.
        updates: number of updates.
    """

    lowest: float = float("inf")
    highest: float = float("-inf")
    last: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    updates: int = 0

    def add(self, reward: float, window: int) -> None:
        """Add an update."""
        if self.updates < window:
            self.first.append(reward)
        else:
            self.later = [*self.later, reward][-4 * window :]
        self.lowest, self.highest = min(self.lowest, reward), max(self.highest, reward)
        self.last = [*self.last, reward][-window:]
        self.updates += 1

    @property
    def is_best(self) -> bool:
        """Whether the last rewards are the best so far, and earlier ones were worse."""
        width = self.highest - self.lowest
        return width > 0 and sum(self.last) / len(self.last) >= self.highest - 0.1 * width

    @property
    def has_risen(self) -> bool:
        """Whether the later rewards exceed the first ones by three standard errors."""
        if len(self.first) < 2 or len(self.later) < 2:
            return False
        error = sqrt(variance(self.first) / len(self.first) + variance(self.later) / len(self.later))
        return fmean(self.later) > fmean(self.first) + 3 * error


@reading("lm/reward/mean")
def dead_groups(view: View, reward: float, rewards: MeanRewards) -> Iterator[Finding]:
    """Groups without advantages, except in a solved task or at almost zero entropy; or mean rewards that are all equal."""
    key, limits = "lm/groups/zero_advantage", view.limits
    value, entropy = view.get(key), view.get("lm/entropy")
    rewards.add(reward, int(limits[UPDATES]))
    deterministic = entropy is not None and entropy < limits[FEW_NATS]
    if value is None:
        equal = rewards.lowest == rewards.highest and rewards.updates >= limits[EQUAL]
        words = f"the mean reward has been {{}} in each of {rewards.updates} updates"
        yield Finding(hard(equal and not deterministic), "lm/reward/mean", reward).says(words, reward)
        return
    dead = value > limits[DEAD] and not (rewards.is_best or deterministic)
    words = "in {:%} of the groups all completions have had the same reward, so the model learns nothing from them"
    yield Finding(hard(dead), key, value, limits[DEAD]).says(words, value)


@reading("lm/reward/length_correlation")
def length_reward(view: View, value: float, correlation: FadingMean) -> Iterator[Finding]:
    """Correlation of reward and length within groups, as a fading mean."""
    mean, bound = correlation.add(value, 1.0, updates=view.limits[UPDATES]), view.limits[LENGTH]
    words = "{} completions of a prompt have had higher rewards (correlation {}), so the model may learn length instead of quality"
    yield Finding(hard(abs(mean) > bound), "lm/reward/length_correlation", value, bound).says(
        words, "longer" if mean > 0 else "shorter", mean
    )


@reading("lm/truncated_frac")
def truncation(view: View, value: float, first: list[float]) -> Iterator[Finding]:
    """Truncation that was rare in the first updates, or that leaves no token to learn from."""
    tokens, bound = view.get("lm/tokens"), view.limits[TRUNCATED]
    if len(first) < view.limits[UPDATES]:
        first.append(first[-1] + (value - first[-1]) / (len(first) + 1) if first else value)
    if tokens is not None:
        words = "{:%} of the completions have been truncated, and the loss excludes truncated ones, so not a single token is trained on"
        none = tokens == 0 and value > bound
        yield Finding(hard(none), "lm/tokens", tokens, 0.0, instance="tokens").says(words, value)
    at_first = first[-1] if first else 0.0
    wrong = at_first < view.limits[TRUNCATED_BEFORE] and value > bound
    words = "{:%} of the completions have been truncated at the length limit ({:%} at first)"
    yield Finding(hard(wrong), "lm/truncated_frac", value, bound).says(words, value, at_first)


@dataclass(slots=True)
class FirstEntropy:
    """Mean rewards so far, and the entropy of the first update."""

    rewards: MeanRewards = field(default_factory=MeanRewards)
    first: float | None = None


def lost_entropy(view: View, before: FirstEntropy) -> Iterator[Finding]:
    """A model with almost zero entropy whose groups are not solved; without group statistics, a model that has lost its entropy while its
    reward has not risen.
    """
    dead, solved, limit = view.get("lm/groups/zero_advantage"), view.get("lm/groups/all_best"), view.limits[FEW_NATS]
    value, reward = view.get("lm/entropy"), view.get("lm/reward/mean")
    if reward is not None:
        before.rewards.add(reward, int(view.limits[UPDATES]))
    if value is None:
        return
    first = before.first = value if before.first is None else before.first
    if dead is not None and solved is not None:
        stuck = dead > 0.5 > solved
    else:
        learned = before.rewards.is_best or before.rewards.has_risen
        stuck = reward is not None and first > FALLEN_FACTOR * limit and not learned
    why = "its reward has not risen" if solved is None else "most groups are not solved"
    yield Finding(hard(value < limit and stuck), "lm/entropy", value, limit).says(
        f"the entropy has been only {{}} nats per token, so the model hardly explores, although {why}", value
    )


def is_language_model(facts: Facts) -> bool:
    """Return whether the facts of the run name a language model, or name no model."""
    return facts.model in (None, "language")


language_rule = partial(alarm, optional=True, applies=is_language_model)


RULES = (
    language_rule("lm/mask", "lm/mask_errors", rank=60, hard=True, claim=True, n_on=2)
    .says(
        "The completion mask is wrong: the loss includes tokens outside the completion, or leaves out part of it.",
        "Check the completion mask: it must be 1 from the first token to the first end token, inclusive.",
        "identity",
    )
    .judged(
        AboveBound(
            "lm/mask_errors",
            MASK_ERRORS,
            "in {percent} of the completions the mask has not ended at the end token, so the loss covers the wrong tokens",
        ),
        MASK_ERRORS,
    ),
    language_rule("lm/advantage_sign", rank=61, hard=True, claim=True, n_on=2)
    .reads("lm/groups/sign_agreement", "lm/groups/mixed")
    .says(
        "Better completions get negative advantages, so the model learns to do worse.",
        "Check the signs of the rewards, of the weights of the reward functions and of the advantages.",
        "identity: an advantage is a reward minus the mean of its group",
    )
    .judged(signs),
    language_rule("lm/grouping", "lm/groups/mixed", "lm/groups/sign_agreement", rank=62, hard=True, claim=True, n_on=2)
    .reads("lm/groups/single")
    .needs(("lm/groups/mixed", "lm/groups/sign_agreement", "lm/groups/single"))
    .says(
        "Completions are compared with completions of other prompts, or have no others to be compared with.",
        "Check the group size, and that completions of a prompt are adjacent when rewards are reshaped.",
        "identity: an advantage is a reward minus the mean of its group",
    )
    .judged(grouping, MIXED, SIGNS, SINGLE),
    language_rule("lm/rounded", "lm/logprob/bf16_frac", rank=63, claim=True, n_on=2)
    .says(
        "Log-probabilities are rounded to bfloat16, so ratios near 1 are mostly rounding errors.",
        "Compute log-probabilities from float32 logits: cast the logits, or the head of the model (cast_lm_head_to_fp32).",
        "arXiv 2510.26788 (mismatch of training and inference by bfloat16); chance is 1 in 65,536",
    )
    .judged(
        AboveBound(
            "lm/logprob/bf16_frac",
            ROUNDED,
            "{percent} of the log-probabilities have been rounded to bfloat16, so ratios near 1 are mostly rounding errors",
        ),
        ROUNDED,
    ),
    language_rule("lm/engine_mismatch", rank=64, claim=True, n_on=3)
    .reads("lm/mismatch/mult_error", "lm/mismatch/ratio_mean", "lm/mismatch/ratio_p01", "lm/mismatch/ratio_p99")
    .reads("lm/mismatch/outside_frac", "lm/mismatch/kl")
    .says(
        "The sampling engine and the trainer disagree about the probabilities of the same tokens.",
        "Check that the engine has the latest weights, the same precision and the same temperature; truncate importance weights; use "
        "float16 or a float32 head, which reduce the mismatch.",
        "NVIDIA-NeMo/RL docs/guides/grpo.md (1.05); huggingface/trl#3867, #4772 and #6789",
    )
    .shows("lm/mismatch/*", "lm/surprise/*")
    .judged(
        AboveBound(
            "lm/mismatch/mult_error",
            ENGINE_ERROR,
            "the sampling engine and the trainer have disagreed about a token's probability by a factor of {number} on average{usual}",
        ),
        ENGINE_ERROR,
    ),
    language_rule("lm/other_distribution", "lm/surprise/gap", "lm/surprise/z", rank=66, n_on=2)
    .needs("lm/surprise/gap", "lm/surprise/z", applies=lambda facts: is_language_model(facts) and not facts.truncated_sampling)
    .says(
        "Tokens were sampled from a different distribution than the trainer assumes.",
        "Check the temperatures of sampling and of the loss, settings that exclude unlikely tokens (top_p, top_k, min_p), the weights of "
        "the sampling engine, and that each log-probability belongs to its token.",
        "identity: the mean surprise of sampled tokens is the entropy; 6 standard errors are chance once in 5e8 updates",
    )
    .judged(StateJudge(surprise, FadingMean()), SURPRISE, SURPRISE_GAP, SURPRISE_UPDATES),
    language_rule("lm/dead_groups", "lm/groups/zero_advantage", "lm/reward/mean", rank=70, n_on=3)
    .needs("lm/reward/mean")
    .says(
        "Nearly all groups of completions have equal rewards, so the model learns nothing.",
        "Check the reward function on a few completions; use prompts of suitable difficulty, more completions per prompt, "
        "or sampling that skips groups without advantages.",
        "huggingface/trl#3857; volcengine/verl#5770; DAPO, arXiv 2503.14476, section 3.2",
    )
    .shows("lm/groups/*", "lm/reward/*")
    .judged(StateJudge(dead_groups, MeanRewards()), DEAD, UPDATES, EQUAL),
    language_rule("lm/length_reward", "lm/reward/length_correlation", rank=72, warmup=4, n_on=3)
    .says(
        "Within groups the reward depends mostly on the length of the completion.",
        "Check whether the reward function favours length, directly or indirectly; score some completions by hand.",
        "arXiv 2503.20783 (length bias); healthy runs of a small task stay below 0.7",
    )
    .shows("lm/length/*", "lm/reward/*")
    .judged(StateJudge(length_reward, FadingMean()), LENGTH, UPDATES),
    language_rule("lm/truncation", "lm/truncated_frac", "lm/tokens", rank=190, n_on=3)
    .says(
        "Most completions are truncated at the length limit and were not at first; or all are, and the loss excludes truncated ones.",
        "Raise max_completion_length, add a soft length penalty, or exclude truncated completions from the loss.",
        "DAPO, arXiv 2503.14476, section 3.4",
    )
    .shows("lm/length/*")
    .judged(StateJudge(truncation, list[float]()), TRUNCATED, TRUNCATED_BEFORE),
    language_rule("lm/entropy_collapse", rank=192, n_on=3)
    .reads("lm/entropy", "lm/groups/zero_advantage", "lm/groups/all_best")
    .needs("lm/entropy", ("lm/groups/zero_advantage", "lm/reward/mean"), ("lm/groups/all_best", "lm/reward/mean"))
    .says(
        "The model has stopped exploring before solving its task.",
        "Raise epsilon_high or the entropy coefficient, lower the learning rate, raise the sampling temperature.",
        "arXiv 2505.22617; DAPO, arXiv 2503.14476, section 3.1",
    )
    .judged(StateJudge(lost_entropy, FirstEntropy()), FEW_NATS),
)
