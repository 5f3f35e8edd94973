"""Advantages, observations, rewards and normalisers: what the update is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from esper_telemetry.alarms.rule import AlarmRule, Finding, Ramp, View, above, below, count, hard, number, percent

PARTICIPATION = below("participation", 0.02, "share of the transitions that carry the learning signal")
ADVANTAGE_OUTLIER = above("advantage_outlier", 40.0, "largest advantage, in standard deviations")


def degenerate_advantages(view: View) -> Iterator[Finding]:
    """A learning signal that is next to nothing, or a handful of steps."""
    limits = view.limits
    share, outlier = view.get("adv/participation"), view.get("adv/raw/absmax_over_std")
    floored = view.get("adv/std_floored")
    if share is None and floored is None:
        return
    few = share is not None and share < limits[PARTICIPATION] and (outlier or 0.0) > limits[ADVANTAGE_OUTLIER]
    yield Finding(hard(bool(floored) or few), "adv/participation", share, limits[PARTICIPATION]).with_text(
        lambda: (
            "all advantages are equal but for rounding, which normalisation blows up"
            if floored
            else f"{percent(share or 0.0)} of the steps carry the learning signal (usually 40 % or more); "
            f"the largest advantage is {number(outlier or 0.0)} standard deviations"
        )
    )


CONSTANT_OBS, STILL_OBS = "obs/constant_frac", "obs/still_frac"

MIN_CHANGING_UPDATES = 10
"""Updates in which all environments changed, after which standing still is news."""

STILL_UPDATES = 3
"""Updates in a row that an environment must stand still, after it has changed before."""

NEVER_CHANGED_UPDATES = 10
"""The same where some have never changed, while others do."""

MIN_STILL_STEPS = 100
"""Steps of each environment that these updates must have together: short rollouts may catch an agent that waits."""

MIN_EPISODE_STEPS = 1.5
"""Mean length of episodes from which on an observation that never changes hides something: a task of one step may have one state."""


@dataclass(slots=True)
class ConstantObservationJudge:
    """Environments that give one and the same observation all the time; or all of them, always or but for the starts of episodes.

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

    def __call__(self, view: View) -> Iterator[Finding]:
        share, repeated = view.get(CONSTANT_OBS), view.get(STILL_OBS)
        if share is None:
            return
        taken = view.rollout_steps / (view.facts.num_envs or 1)
        self.length = view.get("episode/length_mean") or self.length
        if share == 0:
            self.changing, self.still, self.steps = self.changing + 1, 0, 0
        else:
            self.still += 1
            self.steps += taken
        self.blind_steps = self.blind_steps + taken if share == 1 or repeated == 1 else 0.0
        blind = self.blind_steps >= MIN_STILL_STEPS and self.length >= MIN_EPISODE_STEPS
        changed, steps = self.changing >= MIN_CHANGING_UPDATES, self.steps
        lasts = self.still >= (STILL_UPDATES if changed else NEVER_CHANGED_UPDATES) and steps >= MIN_STILL_STEPS
        partly = share > 0 and lasts and (changed or share < 1)
        if not blind or share == 1:
            key, value, seen = CONSTANT_OBS, share, max(steps, self.blind_steps)
            words = f"{percent(share)} of the environments have given one and the same observation in every step, for {number(seen)} steps"
        else:
            key, value = STILL_OBS, repeated or 0.0
            words = f"observations have changed only where episodes begin, for {number(self.blind_steps)} steps"
        yield Finding(hard(partly or blind), key, value, 0.0).with_text(words.__str__)


MIN_VARIED_UPDATES = 10
"""Updates in which a reward must have varied, before its absence means anything: chance gives an untrained policy one now and then."""

GAP_FACTOR = 3.0
"""A reward that came and went before may stay away for so many times the longest time that it did."""

MIN_EQUAL_EPISODES = 10
"""Episodes of one and the same length, from which on an equal reward per step carries no information."""

MIN_UPDATES_WITH_ENDS = 3
"""Updates in which these must have ended, where only the mean length of each update is known."""

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
            if self.varied:
                self.longest = max(self.longest, self.updates)
            self.varied, self.updates, self.transitions = self.varied + 1, 0, 0
        else:
            self.updates += 1
            self.transitions += view.rollout_steps
            if len(self.paid) < 2:
                self.paid.add(value)
        transitions, limits = self.transitions, view.limits
        gone = self.varied >= MIN_VARIED_UPDATES and self.updates >= 10 and self.updates > GAP_FACTOR * self.longest
        # Who is paid for every step and lives to the time limit gets the best reward there is in each of them.
        survives = view.course.risen is True and value >= self.most and value > 0
        gone = gone and transitions >= limits[CONSTANT_STEPS] and not (survives and self._survives(view))
        never = not self.varied and largest == 0 and self.updates >= 10 and transitions >= limits[NEVER_STEPS]
        equal = not self.varied and self._equal_lengths() and len(self.paid) == 1 and value > 0
        useless = equal and transitions >= limits[CONSTANT_STEPS]
        threshold = view.facts.reward_threshold or 0.0
        penalty = not self.varied and len(self.paid) == 1 and value < 0 < threshold
        penalty = penalty and self.terminated >= MIN_EQUAL_EPISODES and transitions >= limits[CONSTANT_STEPS]
        episodes, ended = number(self.episodes), number(self.terminated)
        finding = Finding(
            hard(gone or never or useless or penalty), "reward/std", spread, 0.0, held=max(1, self.updates)
        )
        finding = finding.with_advice(
            (lambda: "Turn the sign of the reward, or look for the wrapper that does.") if penalty else None
        )
        yield finding.with_text(
            lambda: (
                f"every one of {transitions:,} steps has been paid the same reward, {number(value)}"
                + (
                    f", and all {episodes} episodes have been as long as each other: nothing tells good from bad"
                    if useless
                    else f", in {ended} episodes that ended by themselves, where the environment is solved at a return of "
                    f"{number(threshold)}: its sign is wrong, and to end early is best"
                    if penalty
                    else ""
                )
            )
        )

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


DRIFT_UPDATES = 10
"""Updates in a row that a normaliser has to drift."""

SETTLE_UPDATES = 40
"""Updates that it is given to settle, from the start or from an intervention."""

SETTLE_STEPS = 10_000
"""Environment steps that it is given besides: forty rollouts of 8 steps are next to no data."""

NORMALIZER_CLIP = Ramp("normalizer_clip", 0.02, 0.1, "share of entries that a normaliser cuts off")
NORMALIZER_DRIFT = Ramp("normalizer_drift", 0.3, 1.0, "drift of a normaliser over ten updates, in standard deviations")


@dataclass(slots=True)
class NormalizerJudge:
    """A normaliser that still moves late in the run, or whose input lies far outside of what it has seen.

    Attributes:
        age, steps: updates and environment steps so far.
        drifting: updates in a row that each normaliser has drifted.
    """

    age: int = 0
    steps: int = 0
    drifting: dict[str, int] = field(default_factory=dict)

    def __call__(self, view: View) -> Iterator[Finding]:
        limits = view.limits
        self.age += 1
        self.steps += view.rollout_steps
        for label, key, value in view.labelled("norm/", "/drift"):
            cut_key = f"norm/{label}/clip_frac"
            cut = view.get(cut_key) or 0.0
            drift, cuts = limits.severity(NORMALIZER_DRIFT, value), limits.severity(NORMALIZER_CLIP, cut)
            lasts = self.drifting[label] = self.drifting.get(label, 0) + 1 if drift >= 0.5 else 0
            settled = self.age > SETTLE_UPDATES and (not self.steps or self.steps > SETTLE_STEPS)
            moved = drift if lasts >= DRIFT_UPDATES and settled else 0.0
            by_cuts = cuts > moved
            yield Finding(
                max(moved, cuts),
                cut_key if by_cuts else key,
                cut if by_cuts else value,
                limits.middle(NORMALIZER_CLIP if by_cuts else NORMALIZER_DRIFT),
                instance=label,
            ).with_text(
                lambda label=label, value=value, cut=cut: (  # type: ignore[misc]  # the loop's values at this time
                    f"the normaliser of {label} is off: it has moved by {number(value)} standard deviations within ten updates (settled: "
                    f"below 0.1), and cuts off {percent(cut)} of what it is given (usually nothing)"
                )
            )


RULES = (
    AlarmRule(
        type="adv/degenerate",
        inputs=("adv/participation", "adv/raw/absmax_over_std", "adv/std_floored"),
        meaning="The learning signal comes from a handful of steps, or there is none.",
        action="Clip or normalise rewards, use more steps per update; if all rewards are equal, check that they are wired.",
        judge=degenerate_advantages,
        bounds=(PARTICIPATION, ADVANTAGE_OUTLIER),
        required=("adv/participation", "adv/raw/absmax_over_std"),
        source="A rare success is a large outlier for an update or two; five in a row are no rare success.",
        rank=170,
        warmup=3,
        n_on=5,
        debug_updates=3,
        evidence=("adv/participation", "adv/raw/*", "reward/zero_frac"),
        pieces=("transitions",),
    ),
    AlarmRule(
        type="obs/constant",
        inputs=(CONSTANT_OBS, STILL_OBS),
        meaning="Some environments give the same observation in every step, or all of them within an episode.",
        action="Look for an environment that hangs or was not reset, a sensor that is not wired, a normaliser that cuts everything off.",
        judge=ConstantObservationJudge(),
        required=(CONSTANT_OBS,),
        source="Exact comparison. Tasks of one step may have one state for all time, and some agents wait for a whole short rollout.",
        rank=104,
        claim=True,
        n_off=1,
        debug_updates=3,
        evidence=(CONSTANT_OBS, STILL_OBS, "norm/obs/*", "lstm/c/env_rms/max", "episode/length_mean"),
        optional=True,
    ),
    AlarmRule(
        type="reward/constant",
        inputs=("reward/std",),
        meaning="The reward has been the same in every step for long.",
        action="Check the reward function and its wrappers: clipped away, or not wired.",
        judge=ConstantRewardJudge(),
        bounds=(CONSTANT_STEPS, NEVER_STEPS),
        required=("reward/std", "reward/absmax"),
        source="A constant reward per step is the rule in tasks that are about surviving or arriving, so it must have varied before, or "
        "come with episodes that are all as long as each other; or be a penalty in a task whose threshold is above 0.",
        rank=140,
        hard=True,
        n_off=1,
        debug_updates=3,
        evidence=("reward/*", "norm/*/drift", "episode/count"),
    ),
    AlarmRule(
        type="norm/drift",
        inputs=("norm/{normalizer}/drift", "norm/{normalizer}/clip_frac"),
        meaning="A normaliser still moves, so that the networks see shifting inputs.",
        action="Warm it up before training, freeze it later, or bound outliers.",
        judge=NormalizerJudge(),
        bounds=(NORMALIZER_CLIP, NORMALIZER_DRIFT),
        source="A policy that learns to go elsewhere moves its normalisers too: drift must last for ten updates. Entries "
        "that are cut off count at once: healthy runs have none.",
        rank=160,
        required=("norm/obs/drift",),
        applies=lambda facts: bool(facts.normalize_observations),
        warmup=20,
        n_off=5,
        debug_updates=2,
        evidence=("norm/*/drift", "norm/*/clip_frac"),
        relative=True,
        optional=True,
    ),
)
