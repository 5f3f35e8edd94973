"""Checks that need no history: data and settings that are wrong from the first update on.

A rule that compares a run with its own past finds a bug usual that was there from the first line. The bounds here are absolute, and so
wide that no published setting on a public environment reaches them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from esper_telemetry.alarms.rule import AlarmRule, Finding, View, above, below, count, hard, number, percent, times

COPIES, STILL = "obs/identical_frac", "obs/still_frac"
RMS, MEDIAN_RMS, RMS_RATIO, OFFSET = "obs/rms_max", "obs/rms_median", "obs/rms_ratio", "obs/offset"

EVIDENCE_STEPS = count(
    "startup_steps", 100, "steps of each environment that checks from the first update on must have seen"
)
RANDOM_ENOUGH = 0.5
"""Normalised entropy from which on environments with the same observations cannot have taken the same actions."""


@dataclass(slots=True)
class CopiesJudge:
    """Environments that all repeat another one, though their actions differ.

    Attributes:
        steps: of each environment, since they have done so.
    """

    steps: float = 0.0

    def __call__(self, view: View) -> Iterator[Finding]:
        share, entropy, still = view.get(COPIES), view.get("policy/entropy_norm"), view.get(STILL)
        if share is None or still == 1 or (entropy is not None and entropy < RANDOM_ENOUGH):
            return
        self.steps = self.steps + view.rollout_steps / (view.facts.num_envs or 1) if share == 1 else 0.0
        envs, steps = number(view.facts.num_envs or 0), self.steps
        yield Finding(hard(steps >= view.limits[EVIDENCE_STEPS]), COPIES, share, 1.0).with_text(
            lambda: (
                f"all {envs} environments have given the same observations as another one, step by step, for {number(steps)} steps: "
                "their data count as one environment's"
            )
        )


FEATURE_SIZE = above("feature_size", 100.0, "root mean square of the largest feature of an observation")
FEATURE_OFFSET = above("feature_offset", 100.0, "distance of a large feature from 0, in its standard deviations")
FEATURE_RATIO = above(
    "feature_ratio", 1000.0, "largest over smallest feature of an observation, where the largest is large"
)
LARGE_FEATURE = 10.0
"""Root mean square of the largest feature from which on its ratio to the smallest counts: a network cannot hear the small one."""

WARNING = 0.5
"""Severity of what slows learning and need not end it."""


def unscaled_observations(view: View) -> Iterator[Finding]:
    """Features of which one is large, far from 0, or a thousand times another one."""
    limits = view.limits
    size, ratio, offset = view.get(RMS), view.get(RMS_RATIO), view.get(OFFSET)
    if size is None or view.facts.normalize_observations:
        return
    key, value, bound = RMS, size, limits[FEATURE_SIZE]
    words = f"the largest entry of the observations has a size of {number(size)} (usually about 1)"
    if size <= bound and offset is not None and offset > limits[FEATURE_OFFSET]:
        key, value, bound = OFFSET, offset, limits[FEATURE_OFFSET]
        words = f"an entry of the observations lies {number(offset)} of its standard deviations from 0"
    elif size <= bound and ratio is not None and ratio > limits[FEATURE_RATIO] and size > LARGE_FEATURE:
        key, value, bound = RMS_RATIO, ratio, limits[FEATURE_RATIO]
        words = (
            f"one entry of the observations is {times(ratio)} as large as another one, and has a size of {number(size)}"
        )
    yield Finding(WARNING * hard(value > bound), key, value, bound).with_text(words.__str__)


NORMALIZED_LOW = below("normalized_low", 0.01, "size of the middle feature behind a normaliser")
NORMALIZED_HIGH = above("normalized_high", 5.0, "the same at its upper end")
MOSTLY_CUT = above("mostly_cut", 0.5, "share of entries that a normaliser cuts off, from the first update on")


def wrong_normalizer(view: View) -> Iterator[Finding]:
    """Normalised observations that are nowhere near 1, or a normaliser that cuts most of them off."""
    limits = view.limits
    for label, key, cut in view.labelled("norm/", "/clip_frac"):
        yield Finding(hard(cut > limits[MOSTLY_CUT]), key, cut, limits[MOSTLY_CUT], instance=label).with_text(
            lambda label=label, cut=cut: (  # type: ignore[misc]  # the loop's values at this time
                f"the normaliser of {label} cuts off {percent(cut)} of what it is given (usually nothing): its statistics are not "
                "those of this data"
            )
        )
    size = view.get(MEDIAN_RMS)
    if size is not None and view.facts.normalize_observations:
        low, high = limits[NORMALIZED_LOW], limits[NORMALIZED_HIGH]
        yield Finding(
            hard(not low <= size <= high), MEDIAN_RMS, size, low if size < low else high, instance="size"
        ).with_text(
            lambda: (
                f"normalised observations have a size of {number(size)}, where a normaliser makes it about 1: its statistics are "
                "not those of this data"
            )
        )


REWARD_SIZE = above("reward_size", 1000.0, "root mean square of the rewards per step, where nothing scales them")


def unscaled_rewards(view: View) -> Iterator[Finding]:
    """Rewards of thousands per step, where nothing scales them."""
    mean, std, largest = (view.get(f"reward/{name}") for name in ("mean", "std", "absmax"))
    if mean is None or std is None or largest is None or view.facts.normalize_rewards:
        return
    size, bound = (mean * mean + std * std) ** 0.5, view.limits[REWARD_SIZE]
    yield (
        Finding(WARNING * hard(size > bound), "reward/absmax", largest, bound)
        .with_advice(
            lambda: (
                f"Scale rewards to about 1: divide them by {number(size)}, or normalise them by the spread of returns."
            )
        )
        .with_text(lambda: f"rewards are {number(size)} per step, at most {number(largest)}, and nothing scales them")
    )


EARLY_UPDATES = 5
"""Updates in which actions at their bounds cannot have been learned: a policy may well learn to use the bounds alone."""

ACTIONS_CUT = above("actions_cut", 0.9, "share of the action components at their bounds, in the first updates")
SPREAD_OUTSIDE = above("spread_outside", 10.0, "standard deviation of a head over half the range of its actions")


@dataclass(slots=True)
class ActionsCutJudge:
    """Actions at their bounds from the start, or a standard deviation far outside of them.

    Attributes:
        from_start: per head: it has been so in every update so far.
    """

    from_start: dict[str, bool] = field(default_factory=dict)

    def __call__(self, view: View) -> Iterator[Finding]:
        limits = view.limits
        spreads = {head: (key, value) for head, key, value in view.labelled("policy/head/", "/std_of_range")}
        for head, key, share in view.labelled("policy/head/", "/bound_frac"):
            cut = share > limits[ACTIONS_CUT]
            known = self.from_start.get(head, view.update <= EARLY_UPDATES)
            start = self.from_start[head] = known and cut
            spread_key, spread = spreads.get(head, ("", 0.0))
            wide = spread > limits[SPREAD_OUTSIDE]
            yield Finding(
                hard(start or wide),
                spread_key if wide else key,
                spread if wide else share,
                limits[SPREAD_OUTSIDE if wide else ACTIONS_CUT],
                instance=head,
            ).with_text(
                lambda head=head, share=share, spread=spread, wide=wide: (  # type: ignore[misc]  # the loop's values
                    f"{percent(share)} of the actions{'' if head == 'action' else f' of {head}'} lie at or beyond their bounds"
                    + (
                        f": the standard deviation is {times(spread)} half their range (usually below 2.5x)"
                        if wide
                        else ", from the first update on"
                    )
                )
            )


LEAST_DISCOUNT = below("least_discount", 0.5, "discount factor that looks at most two steps ahead")
MIN_LENGTH = count("discounted_length", 5, "steps of an episode from which on such a discount is a mistake")


@dataclass(slots=True)
class ShortSightJudge:
    """A discount factor with which nothing but the next rewards counts.

    Attributes:
        length: of the latest episodes; that of an unfinished rollout where none has ended.
    """

    length: float = 0.0

    def __call__(self, view: View) -> Iterator[Finding]:
        gamma = view.facts.gamma
        if gamma is None:
            return
        self.length = view.get("episode/length_mean") or self.length
        length, bound = self.length, view.limits[LEAST_DISCOUNT]
        wrong = gamma < bound and length > view.limits[MIN_LENGTH]
        yield Finding(hard(wrong), "episode/length_mean", length, view.limits[MIN_LENGTH]).with_text(
            lambda: (
                f"gamma is {number(gamma)} (published settings: 0.8 to 0.9999): "
                + ("only the reward of the next step counts" if gamma <= 0 else "rewards two steps ahead hardly count")
                + f", in episodes of {number(length)} steps"
            )
        )


OVERRUN_SHARE = 0.05
"""Share of its largest value by which a linear schedule may fall below 0 in the last update, which overruns the planned steps."""


@dataclass(slots=True)
class NegativeRateJudge:
    """A learning rate below 0, with which every step makes the loss larger.

    Attributes:
        highest: learning rate so far.
    """

    highest: float = 0.0

    def __call__(self, view: View) -> Iterator[Finding]:
        rate = view.get("opt/lr")
        if rate is None:
            return
        self.highest = max(self.highest, rate)
        yield Finding(hard(rate < -OVERRUN_SHARE * self.highest), "opt/lr", rate, 0.0).with_text(
            lambda: (
                f"the learning rate has been {number(rate)}, below 0: every optimizer step goes up the loss instead of down"
            )
        )


SIGN_ROWS = below("sign_rows", 4.0, "rows of a minibatch, below which normalised advantages are little more than signs")


def advantages_as_signs(view: View) -> Iterator[Finding]:
    """Minibatches so small that their normalised advantages are signs."""
    rows, bound = view.get("adv/minibatch_rows"), view.limits[SIGN_ROWS]
    if rows is None or not view.facts.normalize_advantages or view.facts.normalize_minibatches is False:
        return
    yield Finding(hard(1 < rows < bound), "adv/minibatch_rows", rows, bound).with_text(
        lambda: (
            f"minibatches have {number(rows)} rows: advantages that are normalised over so few are little more than signs "
            "(published settings: 8 to 25,000 rows)"
        )
    )


RULES = (
    AlarmRule(
        type="obs/copies",
        inputs=(COPIES,),
        meaning="All environments give the same observations, so they are worth one.",
        action="Give every environment a seed of its own and an object of its own; check that a wrapper does not share or repeat state.",
        judge=CopiesJudge(),
        bounds=(EVIDENCE_STEPS,),
        source="Exact comparison. A policy that has made up its mind may do the same everywhere in a deterministic task, so the policy "
        "must be undecided; episodes that begin alike part within a few steps.",
        rank=106,
        claim=True,
        n_on=2,
        n_off=1,
        debug_updates=2,
        evidence=(COPIES, STILL, "policy/entropy_norm"),
        optional=True,
    ),
    AlarmRule(
        type="obs/unscaled",
        inputs=(RMS, RMS_RATIO, OFFSET),
        meaning="Observations are large, far from 0, or a thousand times as large in one entry as in another.",
        action="Normalise observations by running statistics (VecNormalize, normalize_observations), or scale them by their known range.",
        judge=unscaled_observations,
        bounds=(FEATURE_SIZE, FEATURE_OFFSET, FEATURE_RATIO),
        source="Public environments that are trained without a normaliser stay below 30; Andrychowicz 2021, 37 details of PPO",
        rank=134,
        n_on=2,
        evidence=("obs/*",),
        optional=True,
    ),
    AlarmRule(
        type="norm/off",
        inputs=("norm/{normalizer}/clip_frac", MEDIAN_RMS),
        meaning="A normaliser has statistics of other data.",
        action="Save and load its statistics with the policy; check that it is not frozen before it has seen this environment.",
        judge=wrong_normalizer,
        bounds=(NORMALIZED_LOW, NORMALIZED_HIGH, MOSTLY_CUT),
        source="behind a normaliser the entries that vary have a size of 0.3 to 3 from the second update on",
        rank=136,
        claim=True,
        required=(("norm/{normalizer}/clip_frac", MEDIAN_RMS),),
        warmup=1,
        n_on=2,
        debug_updates=2,
        evidence=("norm/*/clip_frac", "norm/*/drift", "obs/*"),
        optional=True,
    ),
    AlarmRule(
        type="reward/unscaled",
        inputs=("reward/absmax", "reward/mean", "reward/std"),
        meaning="Rewards are thousands per step, and nothing scales them.",
        action="Scale rewards to about 1, or normalise them by the spread of returns.",
        judge=unscaled_rewards,
        bounds=(REWARD_SIZE,),
        required=("reward/absmax", "reward/mean", "reward/std"),
        source="Public tasks pay up to 20 per step, and 100 now and then; the critic's loss grows with the square",
        rank=152,
        n_on=2,
        evidence=("reward/*", "ret/*", "loss/value", "grad/interference/critic_share"),
    ),
    AlarmRule(
        type="policy/actions_cut",
        inputs=("policy/head/{head}/bound_frac", "policy/head/{head}/std_of_range"),
        meaning="Nearly all actions lie at their bounds, so that the policy cannot choose between them.",
        action="Scale actions to the bounds of the action space, lower the initial standard deviation (log_std_init, log_std), or squash "
        "actions.",
        judge=ActionsCutJudge(),
        bounds=(ACTIONS_CUT, SPREAD_OUTSIDE),
        source="A standard deviation of 1 between bounds of ±0.4, as in Humanoid, cuts off 69 % and learns. Policies may learn to use "
        "nothing but the bounds, so actions count in the first updates alone.",
        rank=138,
        required=("policy/head/{head}/bound_frac", "policy/head/{head}/std_of_range"),
        n_on=2,
        debug_updates=2,
        evidence=("policy/head/*/bound_frac", "policy/head/*/std*"),
        optional=True,
    ),
    AlarmRule(
        type="ret/short_sighted",
        inputs=("episode/length_mean",),
        meaning="The discount factor is so small that nothing but the next rewards counts.",
        action="Set gamma so that 1 / (1 - gamma) is the number of steps over which actions have consequences: 0.99 as a rule.",
        judge=ShortSightJudge(),
        bounds=(LEAST_DISCOUNT, MIN_LENGTH),
        source="published settings lie between 0.8 and 0.9999",
        rank=85,
        claim=True,
        n_off=1,
        evidence=("episode/length_mean", "ret/std", "td/std"),
        optional=True,
    ),
    AlarmRule(
        type="opt/negative_rate",
        inputs=("opt/lr",),
        meaning="The learning rate is below 0.",
        action="Correct the sign of the learning rate or of its schedule, which may run past the end of the run.",
        judge=NegativeRateJudge(),
        source="always a mistake",
        rank=84,
        hard=True,
        claim=True,
        n_off=1,
        certain=True,
        debug_updates=2,
        evidence=("opt/lr", "policy/kl", "loss/*"),
    ),
    AlarmRule(
        type="adv/signs",
        inputs=("adv/minibatch_rows",),
        meaning="Minibatches have so few rows that normalised advantages are little more than signs.",
        action="Use larger minibatches (batch_size 32 and more), or normalise advantages over the whole rollout.",
        judge=advantages_as_signs,
        bounds=(SIGN_ROWS,),
        source="two rows are normalised to plus and minus the same number, whatever their advantages are",
        rank=168,
        claim=True,
        facts=("normalize_advantages",),
        n_on=2,
        evidence=("adv/minibatch_rows", "adv/participation"),
        optional=True,
    ),
)
