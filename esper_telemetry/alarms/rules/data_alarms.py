"""Advantages, observations, rewards and normalisers: what the update is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from esper_telemetry.alarms.alarm_bounds import Ramp, above, below, count, hard
from esper_telemetry.alarms.judges import StateJudge, Streaks, reading
from esper_telemetry.alarms.rule import Finding, View, alarm
from esper_telemetry.core.messages import number

PARTICIPATION = below("participation", 0.02, "share of the transitions that carry the learning signal")
ADVANTAGE_OUTLIER = above("advantage_outlier", 40.0, "largest advantage, in standard deviations")


def degenerate_advantages(view: View) -> Iterator[Finding]:
    """A learning signal that is next to nothing, or a handful of steps."""
    bound, floored, share = view.limits[PARTICIPATION], view.get("adv/std_floored"), view.get("adv/participation")
    outlier = view.get("adv/raw/absmax_over_std") or 0.0
    if share is None and floored is None:
        return
    few = share is not None and share < bound and outlier > view.limits[ADVANTAGE_OUTLIER]
    finding = Finding(hard(bool(floored) or few), "adv/participation", share, bound)
    if floored:
        yield finding.says("all advantages are equal but for rounding, which normalisation blows up")
        return
    yield finding.says(
        "{:%} of the steps carry the learning signal (usually 40 % or more); the largest advantage is {} standard deviations",
        *(share or 0.0, outlier),
    )


CONSTANT_OBS, STILL_OBS = "obs/constant_frac", "obs/still_frac"
MIN_CHANGING_UPDATES = 10  # updates in which all environments changed, after which standing still is news
STILL_UPDATES = 3  # updates in a row that an environment must stand still, after it has changed before
NEVER_CHANGED_UPDATES = 10  # the same where some have never changed, while others do
MIN_STILL_STEPS = 100
"""Steps of each environment that these updates must have together: short rollouts may catch an agent that waits."""

MIN_EPISODE_STEPS = 1.5
"""Mean length of episodes from which on an observation that never changes hides something: a task of one step may have one state."""


@dataclass(slots=True)
class UnchangedObservations:
    """Environments whose observations do not change.

    Attributes:
        changing: updates in which all environments changed.
        still, steps: updates, and steps of each environment, since some do not.
        blind_steps: steps of each environment, since none changes within an episode.
        length: of the latest episodes.
    """

    changing: int = 0
    still: int = 0
    steps: float = 0
    blind_steps: float = 0
    length: float = float("inf")


@reading(CONSTANT_OBS)
def constant_observation(view: View, share: float, past: UnchangedObservations) -> Iterator[Finding]:
    """Environments that give one and the same observation all the time; or all of them, always or but for the starts of episodes."""
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
            "{:%} of the environments have given one and the same observation in every step, for {} steps",
            *(share, max(past.steps, past.blind_steps)),
        )
    else:
        words = "observations have changed only where episodes begin, for {} steps"
        yield Finding(wrong, STILL_OBS, repeated or 0.0, 0.0).says(words, past.blind_steps)


MIN_VARIED_UPDATES = 10
"""Updates in which a reward must have varied, before its absence means anything: chance gives an untrained policy one now and then."""

GAP_FACTOR = 3.0  # A reward that came and went before may stay away for so many times the longest time that it did
MIN_EQUAL_EPISODES = 10
"""Episodes of one and the same length, from which on an equal reward per step carries no information."""
MIN_UPDATES_WITH_ENDS = 3  # updates in which these must have ended, where only the mean length of each update is known

EPISODE_LENGTHS = (
    "episode/length_mean",
    *(f"episode/{kind}_length_{end}" for kind in ("terminated", "truncated") for end in ("min", "max")),
)
CONSTANT_STEPS = count("reward_constant_transitions", 1000, "transitions with the same reward, at least")
NEVER_STEPS = count("reward_never_transitions", 30_000, "transitions without any reward from the start, at least")


@dataclass(slots=True)
class ConstantRewardJudge:
    """A reward that is always the same, and was not before; none from the start; one that cannot tell any two policies apart; or a penalty
    for every step of a task that pays its threshold, so that ending early is best.

    An equal reward for every step is no fault where the length of an episode is the task, and a rare one may stay away for long. So from
    the start it counts where all episodes are as long as each other: no policy can be better than another one then, as far as the run has
    shown. Returns say nothing of it: wrappers may change rewards behind the place where they are summed. A cost per step is no such
    reward: it is paid for a goal that nobody may have reached yet.

    Attributes:
        varied: updates with rewards that differ.
        longest: updates of the longest gap between two of them.
        updates, transitions: since the last one.
        paid: the rewards of such updates, two at most.
        episodes: that have ended since the start.
        lengths: their smallest and largest length.
        updates_with_ends: updates in which any ended.
        terminated: episodes that have ended by themselves.
        most: largest magnitude so far.
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
        # Who is paid for every step and lives to the time limit gets the best reward there is in each of them.
        survives = view.course.risen is True and value >= self.most and value > 0
        gone = gone and long and not (survives and self._survives(view))
        never = not self.varied and largest == 0 and self.updates >= 10 and transitions >= view.limits[NEVER_STEPS]
        useless = always and self._equal_lengths() and value > 0 and long
        penalty = always and value < 0 < threshold and self.terminated >= MIN_EQUAL_EPISODES and long
        held, wrong = max(1, self.updates), hard(gone or never or useless or penalty)
        finding, words = Finding(wrong, "reward/std", spread, 0.0, held=held), ""
        if useless:
            words = f", and all {number(self.episodes)} episodes have been as long as each other: nothing tells good from bad"
        elif penalty:
            finding = finding.with_advice(lambda: "Turn the sign of the reward, or look for the wrapper that does.")
            words = (
                f", in {number(self.terminated)} episodes that ended by themselves, where the environment is solved at a return of "
                f"{number(threshold)}: its sign is wrong, and to end early is best"
            )
        yield finding.says(f"every one of {transitions:,} steps has been paid the same reward, {{}}{{}}", value, words)

    def _add_episodes(self, view: View) -> None:
        lengths = [length for key in EPISODE_LENGTHS if (length := view.get(key)) is not None]
        if lengths:
            self.lengths = min([*lengths, *(self.lengths or ())]), max([*lengths, *(self.lengths or ())])
            ended = view.get("episode/count") or 0.0
            self.episodes += ended
            self.terminated += ended * (1 - (view.get("episode/truncated_frac") or 0.0))
            self.updates_with_ends += 1

    def _survives(self, view: View) -> bool:
        """True where no episode has terminated in this update, and any that has ended is the longest so far."""
        length = view.get("episode/length_mean")
        cut = view.get("episode/truncated_frac")
        return length is None or (cut == 1.0 and self.lengths is not None and length >= 0.99 * self.lengths[1])

    def _equal_lengths(self) -> bool:
        if self.lengths is None or self.episodes < MIN_EQUAL_EPISODES or self.updates_with_ends < MIN_UPDATES_WITH_ENDS:
            return False
        low, high = self.lengths
        return high - low <= 1e-9 * high


DRIFT_UPDATES = 10  # updates in a row that a normaliser has to drift
SETTLE_UPDATES = 40  # updates that it is given to settle, from the start or from an intervention
SETTLE_STEPS = 10_000  # environment steps that it is given besides: forty rollouts of 8 steps are next to no data
NORMALIZER_CLIP = Ramp("normalizer_clip", 0.02, 0.1, "share of entries that a normaliser cuts off")
NORMALIZER_DRIFT = Ramp("normalizer_drift", 0.3, 1.0, "drift of a normaliser over ten updates, in standard deviations")


@dataclass(slots=True)
class NormalizerDrifts:
    """Updates and environment steps so far, and updates in a row that each normaliser has drifted."""

    age: int = 0
    steps: int = 0
    drifting: Streaks = field(default_factory=Streaks)


def normalizer_drift(view: View, past: NormalizerDrifts) -> Iterator[Finding]:
    """A normaliser that still moves late in the run, or whose input lies far outside of what it has seen."""
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
            "the normaliser of {} is off: it has moved by {} standard deviations within ten updates (settled: below 0.1), and cuts off "
            "{:%} of what it is given (usually nothing)",
            *(label, value, cut),
        )


RULES = (
    alarm("adv/degenerate", rank=170, warmup=3, n_on=5, debug_updates=3)
    .reads("adv/participation", "adv/raw/absmax_over_std", "adv/std_floored")
    .needs("adv/participation", "adv/raw/absmax_over_std")
    .says(
        "The learning signal comes from a handful of steps, or there is none.",
        "Clip or normalise rewards, use more steps per update; if all rewards are equal, check that they are wired.",
        "A rare success is a large outlier for an update or two; five in a row are no rare success.",
    )
    .shows("adv/participation", "adv/raw/*", "reward/zero_frac", pieces=("transitions",))
    .judged(degenerate_advantages, PARTICIPATION, ADVANTAGE_OUTLIER),
    alarm("obs/constant", CONSTANT_OBS, STILL_OBS, rank=104, claim=True, optional=True, n_off=1, debug_updates=3)
    .says(
        "Some environments give the same observation in every step, or all of them within an episode.",
        "Look for an environment that hangs or was not reset, a sensor that is not wired, a normaliser that cuts everything off.",
        "Exact comparison. Tasks of one step may have one state for all time, and some agents wait for a whole short rollout.",
    )
    .shows(CONSTANT_OBS, STILL_OBS, "norm/obs/*", "lstm/c/env_rms/max", "episode/length_mean")
    .judged(StateJudge(constant_observation, UnchangedObservations())),
    alarm("reward/constant", "reward/std", rank=140, hard=True, n_off=1, debug_updates=3)
    .needs("reward/std", "reward/absmax")
    .says(
        "The reward has been the same in every step for long.",
        "Check the reward function and its wrappers: clipped away, or not wired.",
        "A constant reward per step is the rule in tasks that are about surviving or arriving, so it must have varied before, or "
        "come with episodes that are all as long as each other; or be a penalty in a task whose threshold is above 0.",
    )
    .shows("reward/*", "norm/*/drift", "episode/count")
    .judged(ConstantRewardJudge(), CONSTANT_STEPS, NEVER_STEPS),
    alarm("norm/drift", rank=160, relative=True, optional=True, warmup=20, n_off=5, debug_updates=2)
    .reads("norm/{normalizer}/drift", "norm/{normalizer}/clip_frac")
    .needs("norm/obs/drift", applies=lambda facts: bool(facts.normalize_observations))
    .says(
        "A normaliser still moves, so that the networks see shifting inputs.",
        "Warm it up before training, freeze it later, or bound outliers.",
        "A policy that learns to go elsewhere moves its normalisers too: drift must last for ten updates. Entries "
        "that are cut off count at once: healthy runs have none.",
    )
    .shows("norm/*/drift", "norm/*/clip_frac")
    .judged(StateJudge(normalizer_drift, NormalizerDrifts()), NORMALIZER_CLIP, NORMALIZER_DRIFT),
)
