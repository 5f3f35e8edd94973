"""Checks that need no history: data and settings that are wrong from the first update on.

A rule that compares a run with its own past finds a bug usual that was there from the first line. The bounds here are absolute, and so
wide that no published setting on a public environment reaches them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from esper_telemetry.alarms.alarm_bounds import above, below, count, hard
from esper_telemetry.alarms.judges import Before, StateJudge, Total, reading
from esper_telemetry.alarms.rule import WARNING, Finding, View, alarm
from esper_telemetry.core.messages import number, percent, times

COPIES, STILL = "obs/identical_frac", "obs/still_frac"
RMS, MEDIAN_RMS, RMS_RATIO, OFFSET = "obs/rms_max", "obs/rms_median", "obs/rms_ratio", "obs/offset"
MIN_STEPS = count("startup_steps", 100, "steps of each environment that checks from the first update on must have seen")
RANDOM_ENOUGH = 0.5
"""Normalised entropy from which on environments with the same observations cannot have taken the same actions."""


@reading(COPIES)
def copies(view: View, share: float, steps: Total) -> Iterator[Finding]:
    """Environments that all repeat another one, though their actions differ, with the steps of each since then."""
    entropy, still = view.get("policy/entropy_norm"), view.get(STILL)
    if still == 1 or (entropy is not None and entropy < RANDOM_ENOUGH):
        return
    taken = steps.add(view.rollout_steps / (view.facts.num_envs or 1), share == 1)
    yield Finding(hard(taken >= view.limits[MIN_STEPS]), COPIES, share, 1.0).says(
        "all {} environments have given the same observations as another one, step by step, for {} steps: their data count as one "
        "environment's",
        *(view.facts.num_envs or 0, taken),
    )


FEATURE_SIZE = above("feature_size", 100.0, "root mean square of the largest feature of an observation")
FEATURE_OFFSET = above("feature_offset", 100.0, "distance of a large feature from 0, in its standard deviations")
FEATURE_RATIO = above(
    "feature_ratio", 1000.0, "largest over smallest feature of an observation, where the largest is large"
)
LARGE_FEATURE = 10.0
"""Root mean square of the largest feature from which on its ratio to the smallest counts: a network cannot hear the small one."""


@reading(RMS)
def unscaled_observations(view: View, size: float) -> Iterator[Finding]:
    """Features of which one is large, far from 0, or a thousand times another one."""
    limits, ratio, offset = view.limits, view.get(RMS_RATIO), view.get(OFFSET)
    if view.facts.normalize_observations:
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
    bound, size = view.limits[MOSTLY_CUT], view.get(MEDIAN_RMS)
    other = "its statistics are not those of this data"
    for label, key, cut in view.labelled("norm/", "/clip_frac"):
        words = f"the normaliser of {label} cuts off {{:%}} of what it is given (usually nothing): {other}"
        yield Finding(hard(cut > bound), key, cut, bound, instance=label).says(words, cut)
    if size is not None and view.facts.normalize_observations:
        low, high = view.limits[NORMALIZED_LOW], view.limits[NORMALIZED_HIGH]
        wrong, bound = hard(not low <= size <= high), low if size < low else high
        words = f"normalised observations have a size of {{}}, where a normaliser makes it about 1: {other}"
        yield Finding(wrong, MEDIAN_RMS, size, bound, instance="size").says(words, size)


REWARD_SIZE = above("reward_size", 1000.0, "root mean square of the rewards per step, where nothing scales them")


@reading("reward/mean", "reward/std", "reward/absmax")
def unscaled_rewards(view: View, mean: float, std: float, largest: float) -> Iterator[Finding]:
    """Rewards of thousands per step, where nothing scales them."""
    if view.facts.normalize_rewards:
        return
    size, bound = (mean * mean + std * std) ** 0.5, view.limits[REWARD_SIZE]
    advice = "Scale rewards to about 1: divide them by {}, or normalise them by the spread of returns."
    finding = Finding(WARNING * hard(size > bound), "reward/absmax", largest, bound)
    words = "rewards are {} per step, at most {}, and nothing scales them"
    yield finding.with_advice(lambda: advice.format(number(size))).says(words, size, largest)


EARLY_UPDATES = 5  # updates in which actions at their bounds cannot have been learned: a policy may well learn to use the bounds alone
ACTIONS_CUT = above("actions_cut", 0.9, "share of the action components at their bounds, in the first updates")
SPREAD_OUTSIDE = above("spread_outside", 10.0, "standard deviation of a head over half the range of its actions")


def actions_cut(view: View, from_start: dict[str, bool]) -> Iterator[Finding]:
    """Actions at their bounds in every update so far, by head; or a standard deviation far outside of them."""
    limits = view.limits
    spreads = {head: (key, value) for head, key, value in view.labelled("policy/head/", "/std_of_range")}
    for head, key, share in view.labelled("policy/head/", "/bound_frac"):
        start = from_start[head] = from_start.get(head, view.update <= EARLY_UPDATES) and share > limits[ACTIONS_CUT]
        spread_key, spread = spreads.get(head, ("", 0.0))
        wide = spread > limits[SPREAD_OUTSIDE]
        key, value, bound = (spread_key, spread, SPREAD_OUTSIDE) if wide else (key, share, ACTIONS_CUT)
        text = partial(actions_cut_text, head, share, spread if wide else None)
        yield Finding(hard(start or wide), key, value, limits[bound], instance=head).with_text(text)


def actions_cut_text(head: str, share: float, spread: float | None) -> str:
    """The clause on actions at their bounds."""
    wide = (
        "" if spread is None else f": the standard deviation is {times(spread)} half their range (usually below 2.5x)"
    )
    of_head = "" if head == "action" else f" of {head}"
    return (
        f"{percent(share)} of the actions{of_head} lie at or beyond their bounds{wide or ', from the first update on'}"
    )


LEAST_DISCOUNT = below("least_discount", 0.5, "discount factor that looks at most two steps ahead")
MIN_LENGTH = count("discounted_length", 5, "steps of an episode from which on such a discount is a mistake")


def short_sighted(view: View, length: Before) -> Iterator[Finding]:
    """A discount factor with which nothing but the next rewards counts, in the latest episodes."""
    gamma, bound = view.facts.gamma, view.limits[MIN_LENGTH]
    if gamma is None:
        return
    steps = length.value = view.get("episode/length_mean") or length.value
    seen = "only the reward of the next step counts" if gamma <= 0 else "rewards two steps ahead hardly count"
    wrong = gamma < view.limits[LEAST_DISCOUNT] and steps > bound
    yield Finding(hard(wrong), "episode/length_mean", steps, bound).with_text(
        lambda: (
            f"gamma is {number(gamma)} (published settings: 0.8 to 0.9999): {seen}, in episodes of {number(steps)} steps"
        )
    )


OVERRUN_SHARE = 0.05
"""Share of its largest value by which a linear schedule may fall below 0 in the last update, which overruns the planned steps."""


@reading("opt/lr")
def negative_rate(view: View, rate: float, highest: Before) -> Iterator[Finding]:
    """A learning rate below 0, with which every step makes the loss larger."""
    highest.value = max(highest.value, rate)
    yield Finding(hard(rate < -OVERRUN_SHARE * highest.value), "opt/lr", rate, 0.0).with_text(
        lambda: (
            f"the learning rate has been {number(rate)}, below 0: every optimizer step goes up the loss instead of down"
        )
    )


SIGN_ROWS = below("sign_rows", 4.0, "rows of a minibatch, below which normalised advantages are little more than signs")


@reading("adv/minibatch_rows")
def advantages_as_signs(view: View, rows: float) -> Iterator[Finding]:
    """Minibatches so small that their normalised advantages are signs."""
    bound = view.limits[SIGN_ROWS]
    if not view.facts.normalize_advantages or view.facts.normalize_minibatches is False:
        return
    words = "minibatches have {} rows: advantages that are normalised over so few are little more than signs (published settings: 8 to "
    yield Finding(hard(1 < rows < bound), "adv/minibatch_rows", rows, bound).says(words + "25,000 rows)", rows)


RULES = (
    alarm("obs/copies", COPIES, rank=106, claim=True, optional=True, n_on=2, n_off=1, debug_updates=2)
    .says(
        "All environments give the same observations, so they are worth one.",
        "Give every environment a seed of its own and an object of its own; check that a wrapper does not share or repeat state.",
        "Exact comparison. A policy that has made up its mind may do the same everywhere in a deterministic task, so the policy "
        "must be undecided; episodes that begin alike part within a few steps.",
    )
    .shows(COPIES, STILL, "policy/entropy_norm")
    .judged(StateJudge(copies, Total()), MIN_STEPS),
    alarm("obs/unscaled", RMS, RMS_RATIO, OFFSET, rank=134, optional=True, n_on=2)
    .says(
        "Observations are large, far from 0, or a thousand times as large in one entry as in another.",
        "Normalise observations by running statistics (VecNormalize, normalize_observations), or scale them by their known range.",
        "Public environments that are trained without a normaliser stay below 30; Andrychowicz 2021, 37 details of PPO",
    )
    .shows("obs/*")
    .judged(unscaled_observations, FEATURE_SIZE, FEATURE_OFFSET, FEATURE_RATIO),
    alarm("norm/off", rank=136, claim=True, optional=True, warmup=1, n_on=2, debug_updates=2)
    .reads("norm/{normalizer}/clip_frac", MEDIAN_RMS)
    .needs(("norm/{normalizer}/clip_frac", MEDIAN_RMS))
    .says(
        "A normaliser has statistics of other data.",
        "Save and load its statistics with the policy; check that it is not frozen before it has seen this environment.",
        "behind a normaliser the entries that vary have a size of 0.3 to 3 from the second update on",
    )
    .shows("norm/*/clip_frac", "norm/*/drift", "obs/*")
    .judged(wrong_normalizer, NORMALIZED_LOW, NORMALIZED_HIGH, MOSTLY_CUT),
    alarm("reward/unscaled", "reward/absmax", "reward/mean", "reward/std", rank=152, n_on=2)
    .needs("reward/absmax", "reward/mean", "reward/std")
    .says(
        "Rewards are thousands per step, and nothing scales them.",
        "Scale rewards to about 1, or normalise them by the spread of returns.",
        "Public tasks pay up to 20 per step, and 100 now and then; the critic's loss grows with the square",
    )
    .shows("reward/*", "ret/*", "loss/value", "grad/interference/critic_share")
    .judged(unscaled_rewards, REWARD_SIZE),
    alarm("policy/actions_cut", rank=138, optional=True, n_on=2, debug_updates=2)
    .reads("policy/head/{head}/bound_frac", "policy/head/{head}/std_of_range")
    .needs("policy/head/{head}/bound_frac", "policy/head/{head}/std_of_range")
    .says(
        "Nearly all actions lie at their bounds, so that the policy cannot choose between them.",
        "Scale actions to the bounds of the action space, lower the initial standard deviation (log_std_init, log_std), or squash actions.",
        "A standard deviation of 1 between bounds of ±0.4, as in Humanoid, cuts off 69 % and learns. Policies may learn to use "
        "nothing but the bounds, so actions count in the first updates alone.",
    )
    .shows("policy/head/*/bound_frac", "policy/head/*/std*")
    .judged(StateJudge(actions_cut, dict[str, bool]()), ACTIONS_CUT, SPREAD_OUTSIDE),
    alarm("ret/short_sighted", "episode/length_mean", rank=85, claim=True, optional=True, n_off=1)
    .says(
        "The discount factor is so small that nothing but the next rewards counts.",
        "Set gamma so that 1 / (1 - gamma) is the number of steps over which actions have consequences: 0.99 as a rule.",
        "published settings lie between 0.8 and 0.9999",
    )
    .shows("episode/length_mean", "ret/std", "td/std")
    .judged(StateJudge(short_sighted, Before()), LEAST_DISCOUNT, MIN_LENGTH),
    alarm("opt/negative_rate", "opt/lr", rank=84, hard=True, claim=True, certain=True, n_off=1, debug_updates=2)
    .says(
        "The learning rate is below 0.",
        "Correct the sign of the learning rate or of its schedule, which may run past the end of the run.",
        "always a mistake",
    )
    .shows("opt/lr", "policy/kl", "loss/*")
    .judged(StateJudge(negative_rate, Before())),
    alarm("adv/signs", "adv/minibatch_rows", rank=168, claim=True, optional=True, n_on=2)
    .needs(facts=("normalize_advantages",))
    .says(
        "Minibatches have so few rows that normalised advantages are little more than signs.",
        "Use larger minibatches (batch_size 32 and more), or normalise advantages over the whole rollout.",
        "two rows are normalised to plus and minus the same number, whatever their advantages are",
    )
    .shows("adv/minibatch_rows", "adv/participation")
    .judged(advantages_as_signs, SIGN_ROWS),
)
