"""Checks that need no history: data and settings that are wrong from the first update on.

A rule that compares a run with its own history cannot see a bug that was there from the start. The bounds here are absolute, and wide
enough that published settings on public environments never reach them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import log

from esper_telemetry.alarms.alarm_bounds import above, below, count, hard
from esper_telemetry.alarms.judges import Before, StateJudge, reading
from esper_telemetry.alarms.rule import WARNING, Finding, View, alarm
from esper_telemetry.core.messages import number, percent, times

COPIES, STILL = "obs/identical_frac", "obs/still_frac"
RMS, MEDIAN_RMS, RMS_RATIO, OFFSET = "obs/rms_max", "obs/rms_median", "obs/rms_ratio", "obs/offset"
MIN_STEPS = count("startup_steps", 100, "smallest number of steps of each environment for checks without a history")
RANDOM_ENOUGH = 0.5
"""Normalised entropy above which environments with the same observations cannot have taken the same actions."""


@reading(COPIES)
def copies(view: View, share: float, steps: Before) -> Iterator[Finding]:
    """Environments that all return the same observations as another one, although their actions differ; `steps` counts since when."""
    entropy, still = view.get("policy/entropy_norm"), view.get(STILL)
    if still == 1 or (entropy is not None and entropy < RANDOM_ENOUGH):
        return
    taken = steps.value = steps.value + view.rollout_steps / (view.facts.num_envs or 1) if share == 1 else 0.0
    yield Finding(hard(taken >= view.limits[MIN_STEPS]), COPIES, share, 1.0).says(
        "each of the {} environments has returned the same observations as another environment, in {} steps: the duplicates add no data",
        *(view.facts.num_envs or 0, taken),
    )


FEATURE_SIZE = above("feature_size", 100.0, "root mean square of the largest feature of an observation")
FEATURE_OFFSET = above("feature_offset", 100.0, "distance of a large feature from 0, in its standard deviations")
FEATURE_RATIO = above("feature_ratio", 1000.0, "largest over smallest feature of an observation, if the largest is large")
LARGE_FEATURE = 10.0
"""Root mean square of the largest feature above which its ratio to the smallest counts: the small one hardly affects the network."""


@reading(RMS)
def unscaled_observations(view: View, size: float) -> Iterator[Finding]:
    """A feature that is large, far from 0, or a thousand times as large as another one."""
    limits, ratio, offset = view.limits, view.get(RMS_RATIO), view.get(OFFSET)
    if view.facts.normalize_observations:
        return
    key, value, bound = RMS, size, limits[FEATURE_SIZE]
    words = f"the largest entry of the observations has a root mean square of {number(size)} (usually about 1), so it dominates the "
    words += "network's input"
    if size <= bound and offset is not None and offset > limits[FEATURE_OFFSET]:
        key, value, bound = OFFSET, offset, limits[FEATURE_OFFSET]
        words = f"an entry of the observations is {number(offset)} of its standard deviations from 0, so its variation is hard to see"
    elif size <= bound and ratio is not None and ratio > limits[FEATURE_RATIO] and size > LARGE_FEATURE:
        key, value, bound = RMS_RATIO, ratio, limits[FEATURE_RATIO]
        words = (
            f"one entry of the observations is {times(ratio)} as large as another one, with a root mean square of {number(size)}: the "
            "small entry hardly affects the network"
        )
    yield Finding(WARNING * hard(value > bound), key, value, bound).with_text(words.__str__)


EARLY_UPDATES = 5  # updates in which actions at their bounds cannot have been learned yet: later a policy may use only the bounds
NORMALIZED_LOW = below("normalized_low", 0.01, "size of the median feature after a normaliser")
NORMALIZED_HIGH = above("normalized_high", 5.0, "the same at its upper end")
MOSTLY_CUT = above("mostly_cut", 0.5, "share of entries that a normaliser clips, from the first update on")


def wrong_normalizer(view: View) -> Iterator[Finding]:
    """Normalised observations with a size far from 1, or a normaliser that clips most of them."""
    bound, size = view.limits[MOSTLY_CUT], view.get(MEDIAN_RMS)
    if view.facts.fresh_normalizer and size is not None:
        advice = "Load its statistics with the policy (`VecNormalize.load(path, env)`), or let it see data before training continues."
        finding = Finding(hard(view.update <= EARLY_UPDATES), MEDIAN_RMS, size, instance="fresh").with_advice(advice.__str__)
        yield finding.says("the policy has been trained before, and the normaliser of its observations begins without any data")
    other = "its statistics come from other data"
    for label, key, cut in view.labelled("norm/", "/clip_frac"):
        words = f"the normaliser of {label} clips {{:%}} of its inputs (usually none): {other}"
        yield Finding(hard(cut > bound), key, cut, bound, instance=label).says(words, cut)
    if size is not None and view.facts.normalize_observations:
        low, high = view.limits[NORMALIZED_LOW], view.limits[NORMALIZED_HIGH]
        wrong, bound = hard(not low <= size <= high), low if size < low else high
        words = "normalised observations have a root mean square of {} instead of about 1: the normaliser's statistics come from other data"
        yield Finding(wrong, MEDIAN_RMS, size, bound, instance="size").says(words, size)


REWARD_SIZE = above("reward_size", 1000.0, "root mean square of the rewards per step, if nothing scales them")


@reading("reward/mean", "reward/std", "reward/absmax")
def unscaled_rewards(view: View, mean: float, std: float, largest: float) -> Iterator[Finding]:
    """Rewards of thousands per step that nothing scales."""
    if view.facts.normalize_rewards:
        return
    size, bound = (mean * mean + std * std) ** 0.5, view.limits[REWARD_SIZE]
    advice = "Scale rewards to about 1: divide them by {}, or normalise them by the spread of returns (NormalizeReward)."
    finding = Finding(WARNING * hard(size > bound), "reward/absmax", largest, bound)
    words = "rewards have a root mean square of {} per step, at most {}, and nothing scales them, so the critic's loss is very large"
    yield finding.with_advice(lambda: advice.format(number(size))).says(words, size, largest)


ACTIONS_CUT = above("actions_cut", 0.9, "share of the action components at their bounds, in the first updates")
SPREAD_OUTSIDE = above("spread_outside", 10.0, "standard deviation of a head over half the range of its actions")


def actions_cut(view: View, from_start: dict[str, bool]) -> Iterator[Finding]:
    """Actions at their bounds in every update so far, by head; or a standard deviation far beyond the bounds."""
    limits = view.limits
    spreads = {head: (key, value) for head, key, value in view.labelled("policy/head/", "/std_of_range")}
    for head, key, share in view.labelled("policy/head/", "/bound_frac"):
        if view.get(f"policy/head/{head}/empty_range_frac"):
            continue
        start = from_start[head] = from_start.get(head, view.update <= EARLY_UPDATES) and share > limits[ACTIONS_CUT]
        spread_key, spread = spreads.get(head, ("", 0.0))
        wide = spread > limits[SPREAD_OUTSIDE]
        key, value, bound = (spread_key, spread, SPREAD_OUTSIDE) if wide else (key, share, ACTIONS_CUT)
        text = partial(actions_cut_text, head, share, spread if wide else None)
        yield Finding(hard(start or wide), key, value, limits[bound], instance=head).with_text(text)


def actions_cut_text(head: str, share: float, spread: float | None) -> str:
    """The clause about actions at their bounds."""
    wide = "" if spread is None else f": the standard deviation is {times(spread)} half their range (usually below 2.5x)"
    of_head = "" if head == "action" else f" of {head}"
    return (
        f"{percent(share)} of the actions{of_head} are at or beyond their bounds{wide or ' from the first update on'}, so the policy "
        "cannot choose between them"
    )


RANGE_USED = below("range_used", 0.03, "standard deviation of the actions over half their range, in the first updates")
RESCALE = "Rescale actions to [-1, 1]: `gymnasium.wrappers.RescaleAction(env, -1, 1)`. If the bounds are right, raise log_std_init"
WIDE_ENOUGH = 0.5  # standard deviation over half the range that the advice aims at


def action_range(view: View, from_start: dict[str, bool]) -> Iterator[Finding]:
    """An action space without a choice, or of which the policy has used only a small part in every update so far, by head."""
    bound = view.limits[RANGE_USED]
    for head, key, share in view.labelled("policy/head/", "/empty_range_frac"):
        of_head = "" if head == "action" else f" of {head}"
        finding = Finding(hard(share == 1) or WARNING * hard(share > 0), key, share, 0.0, instance=head)
        words = f"the action space{of_head} has low = high in {{:%}} of its dimensions, so all actions are the same there"
        used_key = f"policy/head/{head}/range_used"
        used = view.get(used_key)
        if share == 0 and used is not None:
            small = from_start[head] = from_start.get(head, view.update <= EARLY_UPDATES) and used < bound
            finding = Finding(hard(small), used_key, used, bound, instance=head).with_advice(partial(rescale_advice, view, head))
            words = f"the policy uses {{:%}} of the range of its actions{of_head}, so it takes very long to reach the rest"
        yield finding.says(words, share if share else used or 0.0)


def rescale_advice(view: View, head: str) -> str:
    """What to do about actions in a small part of their range, with a standard deviation of a quarter of it."""
    std, share = (view.get(f"policy/head/{head}/{name}") for name in ("std/mean", "std_of_range"))
    if not std or not share:
        return f"{RESCALE}."
    return f"{RESCALE} to {log(WIDE_ENOUGH * std / share):.1f}, which is a standard deviation of a quarter of the range."


LEAST_DISCOUNT = below("least_discount", 0.5, "discount factor that looks at most two steps ahead")
MIN_LENGTH = count("discounted_length", 5, "episode length above which such a discount factor is a mistake")


def short_sighted(view: View, length: Before) -> Iterator[Finding]:
    """A discount factor so small that only the next rewards count, in a task that is not learned with it."""
    gamma, bound = view.facts.gamma, view.limits[MIN_LENGTH]
    if gamma is None:
        return
    steps = length.value = view.get("episode/length_mean") or length.value
    seen = "only the reward of the next step counts" if gamma <= 0 else "rewards two steps ahead hardly count"
    wrong = gamma < view.limits[LEAST_DISCOUNT] and steps > bound and view.course.risen is False
    yield Finding(hard(wrong), "episode/length_mean", steps, bound).with_text(
        lambda: f"gamma is {number(gamma)} (published settings: 0.8 to 0.9999): {seen}, although episodes last {number(steps)} steps"
    )


OVERRUN_SHARE = 0.05
"""Share of its largest value by which a linear schedule may fall below 0 in the last update, which exceeds the planned steps."""


@reading("opt/lr")
def negative_rate(view: View, rate: float, highest: Before) -> Iterator[Finding]:
    """A learning rate below 0, with which every step makes the loss larger."""
    highest.value = max(highest.value, rate)
    yield Finding(hard(rate < -OVERRUN_SHARE * highest.value), "opt/lr", rate, 0.0).with_text(
        lambda: f"the learning rate has been {number(rate)}: every optimizer step increases the loss"
    )


SIGN_ROWS = below("sign_rows", 4.0, "rows of a minibatch below which normalised advantages keep little but their sign")


@reading("adv/minibatch_rows")
def advantages_as_signs(view: View, rows: float) -> Iterator[Finding]:
    """Minibatches so small that normalised advantages keep little but their sign."""
    bound = view.limits[SIGN_ROWS]
    if not view.facts.normalize_advantages or view.facts.normalize_minibatches is False:
        return
    words = "minibatches have {} rows (published settings: 8 to 25,000): normalised over so few rows, advantages keep little but their sign"
    yield Finding(hard(1 < rows < bound), "adv/minibatch_rows", rows, bound).says(words, rows)


RULES = (
    alarm("obs/copies", COPIES, rank=106, claim=True, optional=True, n_on=2, n_off=1, debug_updates=2)
    .says(
        "All environments return the same observations, so they add no data.",
        "Create a separate object with a separate seed for each environment; check that no wrapper shares or repeats state.",
        "Exact comparison. In a deterministic task a deterministic policy may act the same in all environments, so the policy must be "
        "stochastic; episodes that start alike then diverge within a few steps.",
    )
    .shows(COPIES, STILL, "policy/entropy_norm")
    .judged(StateJudge(copies, Before()), MIN_STEPS),
    alarm("obs/unscaled", RMS, RMS_RATIO, OFFSET, rank=134, optional=True, n_on=2)
    .changes(env="gymnasium.wrappers.NormalizeObservation(env)")
    .says(
        "Observations are large, far from 0, or a thousand times as large in one entry as in another.",
        "Normalise observations by running statistics (NormalizeObservation, VecNormalize, normalize_observations), or scale them by their "
        "known range.",
        "Public environments without a normaliser stay below 30; Andrychowicz 2021, 37 details of PPO",
    )
    .shows("obs/*")
    .judged(unscaled_observations, FEATURE_SIZE, FEATURE_OFFSET, FEATURE_RATIO),
    alarm("norm/off", rank=136, claim=True, optional=True, warmup=1, n_on=2, debug_updates=2)
    .reads("norm/{normalizer}/clip_frac", MEDIAN_RMS)
    .needs(("norm/{normalizer}/clip_frac", MEDIAN_RMS))
    .says(
        "The statistics of a normaliser come from other data.",
        "Save and load its statistics with the policy; check that it is not frozen before it has seen this environment.",
        "after a normaliser, varying entries have a size of 0.3 to 3 from the second update on",
    )
    .shows("norm/*/clip_frac", "norm/*/drift", "obs/*")
    .judged(wrong_normalizer, NORMALIZED_LOW, NORMALIZED_HIGH, MOSTLY_CUT),
    alarm("reward/unscaled", "reward/absmax", "reward/mean", "reward/std", rank=152, n_on=2)
    .needs("reward/absmax", "reward/mean", "reward/std")
    .changes(env="gymnasium.wrappers.NormalizeReward(env)")
    .says(
        "Rewards are thousands per step and nothing scales them.",
        "Scale rewards to about 1, or normalise them by the spread of returns (NormalizeReward).",
        "Rewards of public tasks are up to 20 per step and rarely 100; the critic's loss grows with their square",
    )
    .shows("reward/*", "ret/*", "loss/value", "grad/interference/critic_share")
    .judged(unscaled_rewards, REWARD_SIZE),
    alarm("policy/actions_cut", rank=138, optional=True, n_on=2, debug_updates=2)
    .reads("policy/head/{head}/bound_frac", "policy/head/{head}/std_of_range")
    .needs("policy/head/{head}/bound_frac", "policy/head/{head}/std_of_range")
    .changes(env="gymnasium.wrappers.RescaleAction(env, -1, 1)")
    .says(
        "Nearly all actions are at their bounds, so the policy cannot choose between them.",
        "Rescale the actions to the bounds of the action space (gymnasium.wrappers.RescaleAction), lower the initial standard deviation "
        "(log_std_init, log_std), or squash the actions.",
        "With a standard deviation of 1 and bounds of ±0.4, as in Humanoid, 69 % are clipped and the policy still learns. A policy may "
        "learn to use only the bounds, so actions count only in the first updates.",
    )
    .shows("policy/head/*/bound_frac", "policy/head/*/std*")
    .judged(StateJudge(actions_cut, dict[str, bool]()), ACTIONS_CUT, SPREAD_OUTSIDE),
    alarm("policy/action_range", rank=137, optional=True, n_on=2)
    .reads("policy/head/{head}/range_used", "policy/head/{head}/empty_range_frac")
    .needs(("policy/head/{head}/range_used", "policy/head/{head}/empty_range_frac"))
    .changes(env="gymnasium.wrappers.RescaleAction(env, -1, 1)")
    .says(
        "The bounds of the actions leave no choice, or are far wider than the policy's actions.",
        "Correct `low` and `high` of the action space.",
        "rl-baselines3-zoo MountainCarContinuous-v0: the smallest published deviation is 0.037 of half the range. A policy may learn to "
        "act in a narrow part of the range, so actions count from the first update on.",
    )
    .shows("policy/head/*/range_used", "policy/head/*/std*")
    .judged(StateJudge(action_range, dict[str, bool]()), RANGE_USED),
    alarm("ret/short_sighted", "episode/length_mean", rank=85, claim=True, optional=True, n_off=1)
    .needs("episode/length_mean", "episode/return_mean")
    .says(
        "The discount factor is so small that only the next rewards count.",
        "Set gamma so that 1 / (1 - gamma) is the number of steps over which actions have consequences; 0.99 is usual.",
        "published settings are 0.8 to 0.9999; a task whose steps are independent is learned with any, so the return must not have risen",
    )
    .shows("episode/length_mean", "ret/std", "td/std")
    .judged(StateJudge(short_sighted, Before()), LEAST_DISCOUNT, MIN_LENGTH),
    alarm("opt/negative_rate", "opt/lr", rank=84, hard=True, claim=True, certain=True, n_off=1, debug_updates=2)
    .says(
        "The learning rate is below 0.",
        "Correct the sign of the learning rate, or its schedule, which may continue past the end of the run.",
        "always a mistake",
    )
    .shows("opt/lr", "policy/kl", "loss/*")
    .judged(StateJudge(negative_rate, Before())),
    alarm("adv/signs", "adv/minibatch_rows", rank=168, claim=True, optional=True, n_on=2)
    .needs(facts=("normalize_advantages",))
    .says(
        "Minibatches have so few rows that normalised advantages keep little but their sign.",
        "Use larger minibatches (32 rows or more), or normalise advantages over the whole rollout.",
        "any two advantages are normalised to plus and minus the same number",
    )
    .shows("adv/minibatch_rows", "adv/participation")
    .judged(advantages_as_signs, SIGN_ROWS),
)
