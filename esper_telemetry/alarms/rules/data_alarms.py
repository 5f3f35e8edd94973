"""Alarms about the data of an update: advantages, observations, rewards and normalisers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from esper_telemetry.alarms.alarm_bounds import Ramp, above, below, count, hard
from esper_telemetry.alarms.judges import Before, StateJudge, Streaks, reading
from esper_telemetry.alarms.rule import Finding, View, alarm
from esper_telemetry.core.messages import number

PARTICIPATION = below("participation", 0.02, "share of the transitions that carry the learning signal")
ADVANTAGE_OUTLIER = above("advantage_outlier", 40.0, "largest advantage, in standard deviations")


USED_STD = "adv/norm/std"
SOLVED_SHARE = 0.1  # share of steps with advantages below which a task is nearly solved

NO_SPREAD = (
    "Check the axis over which the advantages are normalised (over one entry each becomes 0), whether something overwrites them, and "
    "whether rewards differ."
)


def degenerate_advantages(view: View, last: Before) -> Iterator[Finding]:
    """Advantages that are all equal, or that come from a handful of steps; `last` is the last share of steps with advantages.

    Advantages of groups are all 0 in a solved task, after ever fewer steps have had any.
    """
    bound, floored, share = view.limits[PARTICIPATION], view.get("adv/std_floored"), view.get("adv/participation")
    outlier = view.get("adv/raw/absmax_over_std") or 0.0
    if view.get(USED_STD) == 0:
        finding = Finding(hard(last.value > SOLVED_SHARE), USED_STD, 0.0, 0.0).with_advice(lambda: NO_SPREAD)
        yield finding.says("the advantages in the loss have all been equal, so the policy has had no gradient from them")
        return
    if share is None and floored is None:
        return
    last.value = last.value if share is None else share
    few = share is not None and share < bound and outlier > view.limits[ADVANTAGE_OUTLIER]
    finding = Finding(hard(bool(floored) or few), "adv/participation", share, bound)
    if floored:
        yield finding.says("all advantages are equal up to rounding, so normalisation only amplifies rounding errors")
        return
    yield finding.says(
        "the learning signal comes from {:%} of the steps (usually 40 % or more), so a few steps decide the update; the largest "
        "advantage is {} standard deviations",
        *(share or 0.0, outlier),
    )


CONSTANT_OBS, STILL_OBS = "obs/constant_frac", "obs/still_frac"
MIN_CHANGING_UPDATES = 10  # updates in which all environments changed, after which a constant one is unusual
STILL_UPDATES = 3  # updates in a row in which an environment must stay constant after it has changed before
NEVER_CHANGED_UPDATES = 10  # the same if some have never changed while others do
MIN_STILL_STEPS = 100
"""Steps of each environment that these updates must have in total: in a short rollout an agent may just be waiting."""

MIN_EPISODE_STEPS = 1.5
"""Mean episode length above which a constant observation is a mistake: a task of one step may have only one state."""


@dataclass(slots=True)
class UnchangedObservations:
    """Environments whose observations do not change.

    Attributes:
        changing: updates in which all environments changed.
        still, steps: updates and steps of each environment since some stopped changing.
        blind_steps: steps of each environment since all stopped changing within episodes.
        length: of the latest episodes.
    """

    changing: int = 0
    still: int = 0
    steps: float = 0
    blind_steps: float = 0
    length: float = float("inf")


@reading(CONSTANT_OBS)
def constant_observation(view: View, share: float, past: UnchangedObservations) -> Iterator[Finding]:
    """Environments that always return the same observation; or all of them, always or except at the starts of episodes."""
    repeated, taken = view.get(STILL_OBS), view.rollout_steps / (view.facts.num_envs or 1)
    past.length = view.get("episode/length_mean") or past.length
    if share == 0:
        past.changing, past.still, past.steps = past.changing + 1, 0, 0
    else:
        past.still, past.steps = past.still + 1, past.steps + taken
    past.blind_steps = past.blind_steps + taken if share == 1 or repeated == 1 else 0.0
    blind = past.blind_steps >= MIN_STILL_STEPS and past.length >= MIN_EPISODE_STEPS
    changed = past.changing >= MIN_CHANGING_UPDATES
    lasts = past.still >= (STILL_UPDATES if changed else NEVER_CHANGED_UPDATES) and past.steps >= MIN_STILL_STEPS
    wrong = hard((share > 0 and lasts and (changed or share < 1)) or blind)
    if not blind or share == 1:
        yield Finding(wrong, CONSTANT_OBS, share, 0.0).says(
            "{:%} of the environments have returned the same observation in every step, for {} steps: the policy cannot see their state",
            *(share, max(past.steps, past.blind_steps)),
        )
    else:
        words = "observations have changed only at the starts of episodes, for {} steps: the policy cannot see its actions' effects"
        yield Finding(wrong, STILL_OBS, repeated or 0.0, 0.0).says(words, past.blind_steps)


MIN_VARIED_UPDATES = 10
"""Updates in which rewards must have varied before a constant reward counts: an untrained policy is rewarded now and then by chance."""

GAP_FACTOR = 3.0  # multiple of the longest gap between varying rewards that a new gap must exceed
MIN_EQUAL_EPISODES = 10
"""Episodes of equal length above which a constant reward per step carries no information."""
MIN_UPDATES_WITH_ENDS = 3  # updates in which these episodes must have ended, as only the mean length per update may be known

EPISODE_LENGTHS = (
    "episode/length_mean",
    *(f"episode/{kind}_length_{end}" for kind in ("terminated", "truncated") for end in ("min", "max")),
)
CONSTANT_STEPS = count("reward_constant_transitions", 1000, "transitions with the same reward, at least")
NEVER_STEPS = count("reward_never_transitions", 30_000, "transitions without any reward from the start, at least")


@dataclass(slots=True)
class ConstantRewardJudge:
    """A constant reward: one that varied before, is 0 from the start, is the same for every policy, or is a penalty per step in a task with
    a positive threshold, so that ending early is best.

    The same reward in every step is correct if the length of an episode is the task, and a rare reward may not occur for a long time. So
    from the start a constant reward counts only if all episodes have the same length: then all policies have had the same return. Logged
    returns do not decide, because wrappers may change rewards after they are summed. A cost per step is excluded: the goal that ends it
    may not have been reached yet.

    Attributes:
        varied: updates with varying rewards.
        longest: length of the longest gap between two such updates.
        updates, transitions: since the last such update.
        paid: rewards of the other updates, at most two.
        episodes: number that have ended since the start.
        lengths: smallest and largest length of an episode.
        updates_with_ends: updates in which episodes ended.
        terminated: episodes that have terminated.
        most: largest magnitude of a reward so far.
    """

    varied: int = 0
    longest: int = 0
    updates: int = 0
    transitions: int = 0
    paid: set[float] = field(default_factory=set)
    episodes: float = 0.0
    lengths: tuple[float, float] | None = None
    updates_with_ends: int = 0
    terminated: float = 0.0
    most: float = 0.0

    def __call__(self, view: View) -> Iterator[Finding]:
        spread, largest = view.get("reward/std"), view.get("reward/absmax")
        if spread is None or largest is None:
            return
        value = view.get("reward/mean") or 0.0
        self._add_episodes(view)
        self.most = max(self.most, largest)
        if spread > 0:
            self.longest = max(self.longest, self.updates) if self.varied else self.longest
            self.varied, self.updates, self.transitions = self.varied + 1, 0, 0
        else:
            self.updates += 1
            self.transitions += view.rollout_steps
            if len(self.paid) < 2:
                self.paid.add(value)
        transitions, threshold = self.transitions, view.facts.reward_threshold or 0.0
        long, always = transitions >= view.limits[CONSTANT_STEPS], not self.varied and len(self.paid) == 1
        gone = self.varied >= MIN_VARIED_UPDATES and self.updates >= 10 and self.updates > GAP_FACTOR * self.longest
        # a policy that survives to the time limit of a survival task gets the best reward in every step
        survives = view.course.risen is True and value >= self.most and value > 0
        gone = gone and long and not (survives and self._survives(view))
        never = not self.varied and largest == 0 and self.updates >= 10 and transitions >= view.limits[NEVER_STEPS]
        useless = always and self._equal_lengths() and value > 0 and long
        penalty = always and value < 0 < threshold and self.terminated >= MIN_EQUAL_EPISODES and long
        held, wrong = max(1, self.updates), hard(gone or never or useless or penalty)
        finding, words = Finding(wrong, "reward/std", spread, 0.0, held=held), ", from which the policy cannot learn"
        if useless:
            words = f", and all {number(self.episodes)} episodes have had the same length, so every policy has had the same return"
        elif penalty:
            finding = finding.with_advice(lambda: "Flip the sign of the reward, or find the wrapper that changes it.")
            words = (
                f", in {number(self.terminated)} terminated episodes, but the environment counts as solved at a return of "
                f"{number(threshold)}: the sign of the reward is wrong, so the policy learns to end episodes early"
            )
        yield finding.says(f"each of the last {transitions:,} steps has had the same reward, {{}}{{}}", value, words)

    def _add_episodes(self, view: View) -> None:
        lengths = [length for key in EPISODE_LENGTHS if (length := view.get(key)) is not None]
        if lengths:
            self.lengths = min([*lengths, *(self.lengths or ())]), max([*lengths, *(self.lengths or ())])
            ended = view.get("episode/count") or 0.0
            self.episodes += ended
            self.terminated += ended * (1 - (view.get("episode/truncated_frac") or 0.0))
            self.updates_with_ends += 1

    def _survives(self, view: View) -> bool:
        """True if no episode has terminated in this update and the truncated ones are the longest so far."""
        length, cut = view.get("episode/length_mean"), view.get("episode/truncated_frac")
        return length is None or (cut == 1.0 and self.lengths is not None and length >= 0.99 * self.lengths[1])

    def _equal_lengths(self) -> bool:
        if self.lengths is None or self.episodes < MIN_EQUAL_EPISODES or self.updates_with_ends < MIN_UPDATES_WITH_ENDS:
            return False
        low, high = self.lengths
        return high - low <= 1e-9 * high


DRIFT_UPDATES = 10  # updates in a row in which a normaliser must drift
SETTLE_UPDATES = 40  # updates in which a normaliser may settle, from the start or from an intervention
SETTLE_STEPS = 10_000  # environment steps in which it may settle: forty rollouts of 8 steps are too little data
NORMALIZER_CLIP = Ramp("normalizer_clip", 0.02, 0.1, "share of entries that a normaliser clips")
NORMALIZER_DRIFT = Ramp("normalizer_drift", 0.3, 1.0, "drift of a normaliser over ten updates, in standard deviations")


@dataclass(slots=True)
class NormalizerDrifts:
    """Updates and environment steps so far, and updates in a row in which each normaliser has drifted."""

    age: int = 0
    steps: int = 0
    drifting: Streaks = field(default_factory=Streaks)


def normalizer_drift(view: View, past: NormalizerDrifts) -> Iterator[Finding]:
    """A normaliser that still moves late in the run, or whose input is far outside its statistics."""
    limits = view.limits
    past.age, past.steps = past.age + 1, past.steps + view.rollout_steps
    settled = past.age > SETTLE_UPDATES and (not past.steps or past.steps > SETTLE_STEPS)
    for label, key, value in view.labelled("norm/", "/drift"):
        cut_key = f"norm/{label}/clip_frac"
        cut = view.get(cut_key) or 0.0
        drift, cuts = limits.severity(NORMALIZER_DRIFT, value), limits.severity(NORMALIZER_CLIP, cut)
        lasts = past.drifting.add(label, drift >= 0.5) >= DRIFT_UPDATES
        moved = drift if lasts and settled else 0.0
        by_cuts = (cut_key, cut, limits.middle(NORMALIZER_CLIP))
        shown = by_cuts if cuts > moved else (key, value, limits.middle(NORMALIZER_DRIFT))
        yield Finding(max(moved, cuts), *shown, instance=label).says(
            "the normaliser of {} does not fit its data: it has moved by {} standard deviations within ten updates (settled: below 0.1), "
            "and clips {:%} of its inputs (usually none)",
            *(label, value, cut),
        )


RULES = (
    alarm("adv/degenerate", rank=170, warmup=3, n_on=5, debug_updates=3)
    .reads("adv/participation", "adv/raw/absmax_over_std", "adv/std_floored", USED_STD)
    .needs("adv/participation", "adv/raw/absmax_over_std")
    .says(
        "The learning signal comes from a handful of steps, or all advantages are equal.",
        "Clip or normalise rewards, use more steps per update; if all rewards are equal, check the reward function.",
        "A rare success is a large outlier for an update or two, not for five in a row.",
    )
    .shows("adv/participation", "adv/raw/*", "reward/zero_frac", pieces=("transitions",))
    .judged(StateJudge(degenerate_advantages, Before(1.0)), PARTICIPATION, ADVANTAGE_OUTLIER),
    alarm("obs/constant", CONSTANT_OBS, STILL_OBS, rank=104, claim=True, optional=True, n_off=1, debug_updates=3)
    .says(
        "Some environments return the same observation in every step, or all of them do within an episode.",
        "Look for an environment that hangs or was not reset, a disconnected sensor, or a normaliser that clips every value.",
        "Exact comparison. Tasks of one step may have a single state, and some agents wait for a whole short rollout.",
    )
    .shows(CONSTANT_OBS, STILL_OBS, "norm/obs/*", "lstm/c/env_rms/max", "episode/length_mean")
    .judged(StateJudge(constant_observation, UnchangedObservations())),
    alarm("reward/constant", "reward/std", rank=140, hard=True, n_off=1, debug_updates=3)
    .needs("reward/std", "reward/absmax")
    .says(
        "The reward has been the same in every step for a long time.",
        "Check the reward function and its wrappers: the reward may be clipped, overwritten or never computed.",
        "A constant reward per step is normal in tasks of survival or of reaching a goal. So the reward must have varied before, or all "
        "episodes must have the same length, or it must be a penalty in a task with a positive threshold.",
    )
    .shows("reward/*", "norm/*/drift", "episode/count")
    .judged(ConstantRewardJudge(), CONSTANT_STEPS, NEVER_STEPS),
    alarm("norm/drift", rank=160, relative=True, optional=True, warmup=20, n_off=5, debug_updates=2)
    .reads("norm/{normalizer}/drift", "norm/{normalizer}/clip_frac")
    .needs("norm/obs/drift", applies=lambda facts: bool(facts.normalize_observations))
    .says(
        "A normaliser still moves, so the inputs of the networks shift.",
        "Warm it up before training, freeze it later, or clip outliers.",
        "A policy that explores new states also moves its normalisers, so drift must last for ten updates. Clipped entries count at once, "
        "because healthy runs have none.",
    )
    .shows("norm/*/drift", "norm/*/clip_frac")
    .judged(StateJudge(normalizer_drift, NormalizerDrifts()), NORMALIZER_CLIP, NORMALIZER_DRIFT),
)
