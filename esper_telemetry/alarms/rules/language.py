"""Language models that learn from completions: tokens, groups, rewards and the engine that samples.

No alarm promises to see reward hacking early: in published runs no logged number separated it from learning before the reward did
(volcengine/verl#7004). `lm/length_reward` names one cause that can be measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from statistics import fmean, variance

from esper_telemetry.alarms.judges import AboveBound
from esper_telemetry.alarms.rule import AlarmRule, Finding, View, above, below, count, hard, number, percent
from esper_telemetry.core.facts import Facts

MASK_ERRORS = above("lm_mask_errors", 0.0, "share of completions with a wrong mask")
ROUNDED = above("lm_rounded", 0.9, "share of log-probabilities that bfloat16 can hold")
MIXED = above("lm_mixed", 0.0, "share of groups with several prompts")
SIGNS = below("lm_sign_agreement", 0.99, "share of advantages with the sign of the reward")
SIGNS_TURNED = 0.02
"""Share of advantages with the sign of the reward below which nearly all are turned; wrong groups leave about half as they were."""

ENGINE_ERROR = above("lm_engine_error", 1.05, "multiplicative error of the sampling engine")
SURPRISE = above("lm_surprise", 6.0, "standard errors between surprise and entropy, over the last updates together")
SURPRISE_GAP = above("lm_surprise_gap", 0.02, "nats per token between surprise and entropy")
DEAD = above("lm_dead_groups", 0.95, "share of groups without advantages")
LENGTH = above(
    "lm_length_correlation", 0.9, "correlation of reward and length within groups, mean over the last updates"
)
TRUNCATED = above("lm_truncated", 0.5, "share of completions without an end")
TRUNCATED_BEFORE = below("lm_truncated_before", 0.2, "the same in the first updates")
FALLEN_FACTOR = 4.0
"""Multiple of the entropy's bound that its first value must exceed, without statistics of groups."""

FEW_NATS = below("lm_entropy", 0.05, "entropy per token in nats")
UPDATES = count(
    "lm_updates",
    5,
    "updates over which the correlation and the rewards are taken together, and first updates of the truncation",
)
EQUAL_UPDATES = count(
    "lm_equal_updates", 10, "updates with one mean reward from which on groups are dead, if no log says more"
)
SURPRISE_UPDATES = count(
    "lm_surprise_updates", 30, "updates over which surprise is taken together: hardly trained models differ little"
)


def signs(view: View) -> Iterator[Finding]:
    """Advantages against the rewards: nearly all of them turned, or some, as wrong groups make them."""
    key, mixed = "lm/groups/sign_agreement", view.get("lm/groups/mixed")
    value = view.get(key)
    if value is not None:
        turned = value < SIGNS_TURNED
        yield Finding(hard(turned), key, value, SIGNS_TURNED).with_text(
            lambda: f"advantages have had the sign of the reward in only {percent(value)} of the completions"
        )
    elif mixed is not None:
        yield Finding(0.0, key)


def grouping(view: View) -> Iterator[Finding]:
    """Groups that hold several prompts, or advantages that are not relative to the group."""
    mixed, agreement = view.get("lm/groups/mixed"), view.get("lm/groups/sign_agreement")
    if mixed is not None and mixed > view.limits[MIXED]:
        yield Finding(1.0, "lm/groups/mixed", mixed, view.limits[MIXED]).with_text(
            lambda: f"{percent(mixed)} of the groups have held completions of several prompts"
        )
    elif agreement is not None:
        wrong = SIGNS_TURNED <= agreement < view.limits[SIGNS]
        yield Finding(hard(wrong), "lm/groups/sign_agreement", agreement, view.limits[SIGNS]).with_text(
            lambda: (
                f"only {percent(agreement)} of the advantages have had the sign of the reward over the mean of the "
                "completions of the same prompt"
            )
        )


@dataclass(slots=True)
class SurpriseJudge:
    """Drift of surprise over entropy, over the last updates together; `total` and `variance` fade with them."""

    total: float = 0.0
    variance: float = 0.0

    def __call__(self, view: View) -> Iterator[Finding]:
        key = "lm/surprise/gap"
        gap, z = view.get(key), view.get("lm/surprise/z")
        if gap is None or z is None:
            return
        fade = 1 - 1 / view.limits[SURPRISE_UPDATES]
        error = abs(gap / z) if z else 0.0
        weight = 1 / error**2 if error else 0.0
        self.total, self.variance = fade * self.total + weight * gap, fade * self.variance + weight
        mean = self.total / self.variance if self.variance else 0.0
        together = mean * self.variance**0.5
        wrong = abs(together) > view.limits[SURPRISE] and abs(mean) > view.limits[SURPRISE_GAP]
        yield Finding(hard(wrong), key, gap, z=together).with_text(
            lambda: (
                f"sampled tokens have been {'less' if mean > 0 else 'more'} likely than the entropy says, by "
                f"{number(abs(mean))} nats per token ({number(abs(together))} standard errors)"
            )
        )


@dataclass(slots=True)
class MeanRewards:
    """Mean rewards so far.

    Attributes:
        lowest, highest: of all.
        last: of the last updates, whose prompts may differ in difficulty.
        first, later: as many of the first ones, and four times as many of the latest ones behind these.
        updates: number of them.
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
        """Whether the last rewards are as good as they have ever been, and once were worse."""
        width = self.highest - self.lowest
        return width > 0 and sum(self.last) / len(self.last) >= self.highest - 0.1 * width

    @property
    def has_risen(self) -> bool:
        """Whether the later rewards are clearly above the first ones, by three standard errors."""
        if len(self.first) < 2 or len(self.later) < 2:
            return False
        error = sqrt(variance(self.first) / len(self.first) + variance(self.later) / len(self.later))
        return fmean(self.later) > fmean(self.first) + 3 * error


@dataclass(slots=True)
class DeadGroupsJudge:
    """Groups without advantages, except in a solved task or with almost no entropy; or mean rewards that are all equal."""

    rewards: MeanRewards = field(default_factory=MeanRewards)

    def __call__(self, view: View) -> Iterator[Finding]:
        key, reward = "lm/groups/zero_advantage", view.get("lm/reward/mean")
        value, entropy = view.get(key), view.get("lm/entropy")
        if reward is None:
            return
        rewards, limits = self.rewards, view.limits
        rewards.add(reward, int(limits[UPDATES]))
        deterministic = entropy is not None and entropy < limits[FEW_NATS]
        if value is None:
            equal = rewards.lowest == rewards.highest and rewards.updates >= limits[EQUAL_UPDATES]
            yield Finding(hard(equal and not deterministic), "lm/reward/mean", reward).with_text(
                lambda: f"the mean reward has been {number(reward)} in each of {rewards.updates} updates"
            )
            return
        dead = value > limits[DEAD] and not (rewards.is_best or deterministic)
        yield Finding(hard(dead), key, value, limits[DEAD]).with_text(
            lambda: (
                f"in {percent(value)} of the groups all completions have had the same reward, so that they teach nothing"
            )
        )


@dataclass(slots=True)
class LengthJudge:
    """Correlation of reward and length within groups: a fading mean over the updates that have one."""

    mean: float = 0.0
    weight: float = 0.0

    def __call__(self, view: View) -> Iterator[Finding]:
        key = "lm/reward/length_correlation"
        value = view.get(key)
        if value is None:
            return
        share = 1 / view.limits[UPDATES]
        self.mean += share * (value - self.mean)
        self.weight += share * (1 - self.weight)
        mean = self.mean / self.weight
        yield Finding(hard(abs(mean) > view.limits[LENGTH]), key, value, view.limits[LENGTH]).with_text(
            lambda: (
                f"{'longer' if mean > 0 else 'shorter'} completions of a prompt have had the higher reward "
                f"(correlation {number(mean)})"
            )
        )


@dataclass(slots=True)
class TruncationJudge:
    """Truncation that was rare in the first updates, or that leaves no token to learn from."""

    first: float = 0.0
    updates: int = 0

    def __call__(self, view: View) -> Iterator[Finding]:
        key = "lm/truncated_frac"
        value = view.get(key)
        if value is None:
            return
        if self.updates < view.limits[UPDATES]:
            self.updates += 1
            self.first += (value - self.first) / self.updates
        tokens = view.get("lm/tokens")
        if tokens is not None:
            yield Finding(
                hard(tokens == 0 and value > view.limits[TRUNCATED]), "lm/tokens", tokens, 0.0, instance="tokens"
            ).with_text(
                lambda: (
                    f"no token has counted: {percent(value)} of the completions have been cut, and cut ones are left out"
                )
            )
        rare = self.first < view.limits[TRUNCATED_BEFORE]
        yield Finding(hard(rare and value > view.limits[TRUNCATED]), key, value, view.limits[TRUNCATED]).with_text(
            lambda: (
                f"{percent(value)} of the completions have been cut at the length limit ({percent(self.first)} at first)"
            )
        )


@dataclass(slots=True)
class CollapseJudge:
    """A model with almost no entropy whose groups are not solved; without statistics of groups, one that has lost its entropy and whose
    reward has not risen.

    Attributes:
        first: entropy in the first update.
    """

    rewards: MeanRewards = field(default_factory=MeanRewards)
    first: float | None = None

    def __call__(self, view: View) -> Iterator[Finding]:
        key, dead, solved = "lm/entropy", view.get("lm/groups/zero_advantage"), view.get("lm/groups/all_best")
        value, reward = view.get(key), view.get("lm/reward/mean")
        if reward is not None:
            self.rewards.add(reward, int(view.limits[UPDATES]))
        if value is None:
            return
        limit = view.limits[FEW_NATS]
        self.first = value if self.first is None else self.first
        if dead is not None and solved is not None:
            stuck = dead > 0.5 > solved
        else:
            learned = self.rewards.is_best or self.rewards.has_risen
            stuck = reward is not None and self.first > FALLEN_FACTOR * limit and not learned
        yield Finding(hard(value < limit and stuck), key, value, limit).with_text(
            lambda: (
                f"the entropy has been {number(value)} nats per token, though "
                + ("its reward has not risen" if solved is None else "most groups are not solved")
            )
        )


def is_language_model(facts: Facts) -> bool:
    """Return whether the run says that it trains a language model, or does not say what it trains."""
    return facts.model in (None, "language")


language_rule = partial(AlarmRule, optional=True, applies=is_language_model)


RULES = (
    language_rule(
        type="lm/mask",
        inputs=("lm/mask_errors",),
        meaning="Tokens are learned from that are no part of the completion, or parts of it are left out.",
        action="Check the completion mask: it is 1 from the first token up to and with the first end token.",
        judge=AboveBound(
            "lm/mask_errors",
            MASK_ERRORS,
            "{percent} of the completions have had a mask that does not end with their end token",
        ),
        bounds=(MASK_ERRORS,),
        source="identity",
        rank=60,
        n_on=2,
        hard=True,
        claim=True,
    ),
    language_rule(
        type="lm/advantage_sign",
        inputs=("lm/groups/sign_agreement", "lm/groups/mixed"),
        meaning="Better completions get negative advantages: the model learns to be worse.",
        action="Check the sign of the rewards, of the weights of the reward functions and of the advantages.",
        judge=signs,
        source="identity: an advantage is a reward less the mean of its group",
        rank=61,
        n_on=2,
        hard=True,
        claim=True,
    ),
    language_rule(
        type="lm/grouping",
        inputs=("lm/groups/mixed", "lm/groups/sign_agreement"),
        meaning="Completions of different prompts are compared with each other.",
        action="Check the size of a group, and that completions of a prompt are next to each other when rewards are reshaped.",
        judge=grouping,
        bounds=(MIXED, SIGNS),
        required=(("lm/groups/mixed", "lm/groups/sign_agreement"),),
        source="identity: an advantage is a reward less the mean of its group",
        rank=62,
        n_on=2,
        hard=True,
        claim=True,
    ),
    language_rule(
        type="lm/rounded",
        inputs=("lm/logprob/bf16_frac",),
        meaning="Log-probabilities are rounded to bfloat16, so that ratios near 1 are mostly rounding.",
        action="Compute log-probabilities from float32 logits: cast the logits, or the head of the model (cast_lm_head_to_fp32).",
        judge=AboveBound(
            "lm/logprob/bf16_frac", ROUNDED, "{percent} of the log-probabilities have been bfloat16 numbers"
        ),
        bounds=(ROUNDED,),
        source="arXiv 2510.26788 (mismatch of training and inference by bfloat16); chance is 1 in 65,536",
        rank=63,
        n_on=2,
        claim=True,
    ),
    language_rule(
        type="lm/engine_mismatch",
        inputs=(
            "lm/mismatch/mult_error",
            "lm/mismatch/ratio_mean",
            "lm/mismatch/ratio_p01",
            "lm/mismatch/ratio_p99",
            "lm/mismatch/outside_frac",
            "lm/mismatch/kl",
        ),
        meaning="The sampling engine and the trainer disagree about the probabilities of the same tokens.",
        action=(
            "Check that the engine has the newest weights, the same precision and the same temperature; truncate importance weights; "
            "float16 or a float32 head make both agree better."
        ),
        judge=AboveBound(
            "lm/mismatch/mult_error",
            ENGINE_ERROR,
            "engine and trainer have disagreed about a token's probability by a factor of {number} on average{usual}",
        ),
        bounds=(ENGINE_ERROR,),
        source="NVIDIA-NeMo/RL docs/guides/grpo.md (1.05); huggingface/trl#3867, #4772 and #6789",
        rank=64,
        n_on=3,
        claim=True,
        evidence=("lm/mismatch/*", "lm/surprise/*"),
    ),
    language_rule(
        type="lm/other_distribution",
        inputs=("lm/surprise/gap", "lm/surprise/z"),
        meaning="Tokens were sampled from another distribution than the one that is learned from.",
        action=(
            "Check the temperature of sampling and of the loss, settings that leave out unlikely tokens (top_p, top_k, min_p), "
            "the weights of the sampling engine, and that log-probabilities belong to the tokens beside them."
        ),
        judge=SurpriseJudge(),
        bounds=(SURPRISE, SURPRISE_GAP, SURPRISE_UPDATES),
        required=("lm/surprise/gap", "lm/surprise/z"),
        source="identity: the mean surprise of sampled tokens is the entropy; 6 standard errors are chance once in 5e8 updates",
        rank=66,
        n_on=2,
        applies=lambda facts: is_language_model(facts) and not facts.truncated_sampling,
    ),
    language_rule(
        type="lm/dead_groups",
        inputs=("lm/groups/zero_advantage", "lm/reward/mean"),
        meaning="Nearly all groups of completions have equal rewards, so that nothing is learned.",
        action=(
            "Check the reward function on a few completions; use prompts of fitting difficulty, more completions per prompt, "
            "or sampling that skips groups without advantages."
        ),
        judge=DeadGroupsJudge(),
        bounds=(DEAD, UPDATES, EQUAL_UPDATES),
        required=("lm/reward/mean",),
        source="huggingface/trl#3857; volcengine/verl#5770; DAPO, arXiv 2503.14476, section 3.2",
        rank=70,
        n_on=3,
        evidence=("lm/groups/*", "lm/reward/*"),
    ),
    language_rule(
        type="lm/length_reward",
        inputs=("lm/reward/length_correlation",),
        meaning="Within groups the reward follows the length of the completion and little else.",
        action="Check whether the reward pays for length, by itself or through its conditions; score some completions by hand.",
        judge=LengthJudge(),
        bounds=(LENGTH, UPDATES),
        source="arXiv 2503.20783 (length bias); healthy runs of a small task stay below 0.7",
        rank=72,
        warmup=4,
        n_on=3,
        evidence=("lm/length/*", "lm/reward/*"),
    ),
    language_rule(
        type="lm/truncation",
        inputs=("lm/truncated_frac", "lm/tokens"),
        meaning="Most completions are cut at the length limit, and were not at first; or all are, and cut ones are left out of the loss.",
        action="Raise max_completion_length, punish length softly, or leave cut completions out of the loss.",
        judge=TruncationJudge(),
        bounds=(TRUNCATED, TRUNCATED_BEFORE),
        source="DAPO, arXiv 2503.14476, section 3.4",
        rank=190,
        n_on=3,
        evidence=("lm/length/*",),
    ),
    language_rule(
        type="lm/entropy_collapse",
        inputs=("lm/entropy", "lm/groups/zero_advantage", "lm/groups/all_best"),
        meaning="The model has stopped exploring before its task is solved.",
        action="Raise epsilon_high or the entropy coefficient, lower the learning rate, raise the temperature of sampling.",
        judge=CollapseJudge(),
        bounds=(FEW_NATS,),
        required=(
            "lm/entropy",
            ("lm/groups/zero_advantage", "lm/reward/mean"),
            ("lm/groups/all_best", "lm/reward/mean"),
        ),
        source="arXiv 2505.22617; DAPO, arXiv 2503.14476, section 3.1",
        rank=192,
        n_on=3,
    ),
)
