"""The critic: it fitted and no longer does, its loss jumps, returns change their scale, it is wrong in one direction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from esper_telemetry.alarms.baselines import History, power
from esper_telemetry.alarms.judges import OUTLIER_BOUNDS, Outlier, Z
from esper_telemetry.alarms.rule import AlarmRule, Finding, Ramp, View, above, below, hard, number, percent, ramp, times

LOSS, R2, EXPLAINED, SPREAD = "loss/value", "value/r2", "value/explained_variance", "value/target/std"
LOSS_OVER_VARIANCE = "value/loss_norm"
EXPECTED_FIT = ((0.10, -0.5), (0.25, -0.2), (0.75, 0.0), (1.0, 0.1))
"""Explained variance that may be expected up to that share of the run: early a critic knows nothing yet, late it should."""

BEST_FIT_UPDATES = 20
"""Latest R² values among which the best one is looked for."""

RECENT_UPDATES = 5
"""Latest losses that a jump is compared with."""

BIAS_UPDATES = 10
"""Updates for which a critic must be wrong in one direction."""

MIN_LOSS_GROWTH = 0.5
"""Decades by which the loss must have grown too: the fit also falls where returns only vary less."""


UNKNOWN_EARLY_UPDATES = 25
"""Updates that count as early in a run whose length is not known."""

CONSTANT_FIT = 0.02
"""Fit below which a critic is no better than a constant, whose fit differs from 0 by chance."""


def expected_fit(view: View) -> float:
    """Return the explained variance below which a critic is useless in this phase of the run."""
    if view.progress is None:
        return EXPECTED_FIT[1 if view.update <= UNKNOWN_EARLY_UPDATES * view.patience else 2][1]
    return next((bound for end, bound in EXPECTED_FIT if view.progress < end), EXPECTED_FIT[-1][1])


FIT_WAS = above("fit_was", 0.3, "R² that the critic once had")
FIT_NOW = below("fit_now", CONSTANT_FIT, "R² below which it has lost it")
LOSS_NORM = Ramp("loss_norm", 1.0, 25.0, "critic's error over the variance of returns")


@dataclass(slots=True)
class FitCollapseJudge:
    """A critic that has lost a fit that it had, and whose error has grown."""

    fits: list[float] = field(default_factory=list)

    def __call__(self, view: View) -> Iterator[Finding]:
        limits = view.limits
        r2, explained, loss_norm = view.get(R2), view.get(EXPLAINED), view.get(LOSS_OVER_VARIANCE)
        if loss_norm is None:
            return
        best = max(self.fits, default=None)
        if r2 is not None:
            self.fits.append(r2)
            del self.fits[:-BEST_FIT_UPDATES]
        usual_returns = view.baselines.off_median(SPREAD) < MIN_LOSS_GROWTH
        error = LOSS if LOSS in view.values else LOSS_OVER_VARIANCE  # own loops need not report their losses
        grown = view.baselines.shift.get(error, 0.0) > MIN_LOSS_GROWTH and usual_returns
        useless = explained is not None and explained < expected_fit(view) + CONSTANT_FIT
        lost = r2 is not None and best is not None and best > limits[FIT_WAS] and r2 < limits[FIT_NOW]
        by_fit = lost and (useless or best is None) and grown
        yield Finding(
            max(hard(by_fit), limits.log_severity(LOSS_NORM, loss_norm) if grown else 0.0),
            R2 if by_fit else LOSS_OVER_VARIANCE,
            r2 if by_fit else loss_norm,
            limits[FIT_NOW] if by_fit else limits.log_middle(LOSS_NORM),
            z=view.z(error),
        ).with_text(
            lambda: (
                f"the critic no longer predicts returns: R² has fallen from {number(best or 0.0)} to {number(r2 or 0.0)}, "
                f"{'its loss' if error == LOSS else 'half its squared error over their variance'} is "
                f"{number(view.values[error])}{view.usual(error)}"
                if by_fit
                else f"the critic's squared error has been {times(2 * loss_norm)} the variance of returns"
            )
        )


LOSS_RECENT = Ramp(
    "loss_recent",
    1.5,
    6.0,
    "critic's loss over the largest of the last five updates, where rewards are larger than ever",
)


@dataclass(slots=True)
class RecentPeak:
    """The largest of the last five values of a key."""

    values: list[float] = field(default_factory=list)

    def severity(self, view: View, key: str) -> float:
        """Severity of a value far above all of the last five."""
        value = view.get(key)
        if value is None:
            return 0.0
        highest, enough = max(self.values, default=0.0), len(self.values) == RECENT_UPDATES
        self.values.append(value)
        del self.values[:-RECENT_UPDATES]
        return view.limits.log_severity(LOSS_RECENT, value / highest) if enough and highest > 0 else 0.0


@dataclass(slots=True)
class LossJumpJudge:
    """A critic's error that jumped.

    Where the history spans decades, the last five losses together with new rewards show it; relative to the variance of returns also where
    rewards are scaled.
    """

    outlier: Outlier = field(default_factory=Outlier)
    losses: RecentPeak = field(default_factory=RecentPeak)
    relative_losses: RecentPeak = field(default_factory=RecentPeak)

    def __call__(self, view: View) -> Iterator[Finding]:
        severity, value = self.outlier.severity(view, LOSS), view.get(LOSS)
        if value is None:
            return
        recently = max(self.losses.severity(view, LOSS), self.relative_losses.severity(view, LOSS_OVER_VARIANCE))
        if severity is None:
            return
        median = view.baselines.median(LOSS) or value
        paid_more = (view.z("reward/absmax") or 0.0) >= view.limits.high(Z)
        yield Finding(
            max(severity, recently if paid_more else 0.0), LOSS, value, adaptive=True, z=view.z(LOSS)
        ).with_text(
            lambda: (
                f"the critic's loss has jumped to {number(value)}, {times(value / median)} its median{view.usual(LOSS)}"
            )
        )


RETURNS = ("ret/std", "ret/mean")
REWARDS = ("reward/absmax", "reward/mean")
REWARD_HISTORIES = tuple(History(key, scale_min=0.05) for key in (*REWARDS, "reward/std"))  # they hardly vary

MIN_JUMP = 0.5
"""Decades from which on a move lasts as long as the keys are away from their medians."""

FALL_FACTOR = 2.5
"""Rewards shrink by themselves where a policy learns to avoid the worst of them: a fall must be so many times larger, in decades."""

SCALE = Ramp("scale", 0.6, 1.0, "decades by which rewards change their scale, where the severity begins")
RETURN_SCALE = Ramp("return_scale", 1.0, 2.0, "decades by which returns change theirs, mean and spread, at once")


@dataclass(slots=True)
class JointMove:
    """Moves of two keys together, in decades.

    A move begins between two updates, and lasts as long as they are away from their medians.

    Attributes:
        negative, positive: updates in which the signed key was below or above 0.
    """

    negative: int = 0
    positive: int = 0
    before: float = 0.0
    moved: bool = False

    def step(self, view: View, keys: tuple[str, str]) -> tuple[float, bool, float] | None:
        """Decades of the move, whether it is upwards, and the smaller robust score; None without a history. The second key has a sign."""
        shifts = [view.baselines.shift.get(key) for key in keys]
        scores = [view.z(key) for key in keys]
        signed = view.get(keys[1])
        if None in shifts or None in scores or signed is None:
            return None
        first, second = (shift or 0.0 for shift in shifts)
        if signed > 0:
            self.positive += 1
        else:
            self.negative += 1
        same_sign = self.positive > self.negative if signed > 0 else self.negative > self.positive
        size = min(abs(first), abs(second)) if same_sign and first * second > 0 else 0.0
        begun = self.moved or abs(first - self.before) > 0.5 * abs(first)
        self.before, self.moved = first, begun and size > MIN_JUMP
        return (size if begun else 0.0), first > 0, min(abs(score or 0.0) for score in scores)


@dataclass(slots=True)
class EpisodePeaks:
    """Largest reward of each update since the last but one in which episodes ended, so that those of a whole episode are among them.

    Where environments begin together and an update holds a part of an episode, rewards repeat with the period of the episodes.
    """

    course: list[float] = field(default_factory=list)
    open: list[float] = field(default_factory=list)

    def add(self, view: View, largest: float) -> None:
        """Add an update."""
        self.open.append(largest)
        if view.get("episode/count"):
            self.course, self.open = self.open, []

    @property
    def largest(self) -> float:
        """The largest of them; 0 without any."""
        return max((*self.course, *self.open), default=0.0)


@dataclass(slots=True)
class ScaleShiftJudge:
    """Rewards on another scale from one update to the next, or returns, by much.

    Attributes:
        fallen: severity of the fall in the last update.
        spans: whether episodes have ended since rewards fell, in an update before this one.
    """

    rewards: JointMove = field(default_factory=JointMove)
    returns: JointMove = field(default_factory=JointMove)
    peaks: EpisodePeaks = field(default_factory=EpisodePeaks)
    risen: bool = False
    fallen: float = 0.0
    spans: bool = False

    def __call__(self, view: View) -> Iterator[Finding]:
        yield from self.rewards_shift(view)
        yield from self.returns_shift(view)

    def rewards_shift(self, view: View) -> Iterator[Finding]:
        """The largest reward and the mean one moved by decades, sign included.

        A fall must last for two updates, and from one episode into the next; a rise must be above what each episode pays once.
        """
        limits = view.limits
        move = self.rewards.step(view, REWARDS)
        largest, usual = view.get("reward/absmax"), view.baselines.median("reward/absmax")
        if largest is None:
            return
        new = largest > self.peaks.largest * power(limits.low(SCALE))
        self.peaks.add(view, largest)
        if move is None or usual is None:
            return
        size, risen, z = move
        outlier = min(limits.severity(SCALE, size if risen else size / FALL_FACTOR), limits.severity(Z, z))
        self.risen = risen and outlier > 0 and (self.risen or new)
        fallen, self.fallen = self.fallen, 0.0 if risen else outlier
        spans, ends = self.spans, view.get("episode/count")
        self.spans = self.fallen > 0 and (spans or ends is None or ends > 0)
        yield Finding(
            outlier if self.risen else min(outlier, fallen) if spans and not risen else 0.0,
            "reward/absmax",
            largest,
            usual * power(limits.middle(SCALE)),
            adaptive=True,
            z=z,
            instance="rewards",
        ).with_text(
            lambda: (
                f"rewards have been {times(max(largest / usual, usual / max(largest, 1e-300)))} as {'large' if risen else 'small'} as "
                f"before: up to {number(largest)}{view.usual('reward/absmax')}, returns spread by {number(view.get('ret/std') or 0.0)}"
                f"{view.usual('ret/std')}"
            )
        )

    def returns_shift(self, view: View) -> Iterator[Finding]:
        """Mean and spread of returns grown by decades at once: what scales rewards may stand behind the point where they are measured."""
        limits = view.limits
        move = self.returns.step(view, RETURNS)
        mean, usual = view.get("ret/mean"), view.baselines.median("ret/mean")
        if move is None or mean is None or usual is None:
            return
        size, risen, z = move
        yield Finding(
            limits.severity(RETURN_SCALE, size if risen else 0.0),
            "ret/mean",
            mean,
            usual * power(limits.middle(RETURN_SCALE)),
            adaptive=True,
            z=z,
            instance="returns",
        ).with_text(
            lambda: (
                f"returns have been {times(abs(mean) / usual)} as large as before: {number(mean)} on average{view.usual('ret/mean')}, "
                f"spread by {number(view.get('ret/std') or 0.0)}{view.usual('ret/std')}"
            )
        )


CUT_AT, CUT_BEFORE, OVER_AT, OVER_BEFORE = "cut at", "cut before", "over at", "over before"
"""Ends of episodes: cut off or over by themselves, at the time limit or before it."""

TERMINAL_ERROR, TRUNCATED = "value/terminal_err", "episode/truncated_frac"
END_LENGTHS = {
    "episode/truncated_length_max": (CUT_AT, None),
    "episode/truncated_length_min": (None, CUT_BEFORE),
    "episode/terminated_length_max": (OVER_AT, None),
    "episode/terminated_length_min": (None, OVER_BEFORE),
}
"""Kinds of the end at the limit, and of the end before it, of the episode with that length."""

SETTLE_UPDATES = 5
"""Updates with ends after which the ends of a task are typical."""

MIN_AT_LIMIT = 2
"""Updates in which episodes must have reached the limit, for their usual end there to be clear."""

MIN_STRANGE = 2
"""Updates with ends that the task does not have, which raise the alarm."""

FORGET_UPDATES = 5
"""Updates in a row without such an end, after which an earlier one was an accident."""


@dataclass(slots=True)
class TimeLimitEnds:
    """Terminations that are time limits, and time limits that are terminations.

    Attributes:
        counts: updates by kind of end.
        updates: updates with usual ends.
        strange: the latest end that contradicts the others.
        strange_updates: updates with such ends.
        since: updates since the last one.
    """

    counts: dict[str, int] = field(default_factory=dict)
    updates: int = 0
    strange: str = ""
    strange_updates: int = 0
    since: int = 0

    def confusion(self, view: View) -> Iterator[Finding]:
        """Episodes that end in a way that this task has not had so far, and that contradicts its time limit."""
        horizon, cut = view.facts.horizon, view.get(TRUNCATED)
        if horizon is None or cut is None:
            return
        limit = float(horizon)
        ends = ends_of(view, limit)
        if not ends:
            return
        strange = self.contradiction(ends) if self.updates >= SETTLE_UPDATES else None
        if strange is not None:
            self.strange_updates, self.since, self.strange = self.strange_updates + 1, 0, strange
        else:
            self.since += 1
            if self.since >= FORGET_UPDATES:
                self.strange_updates = 0
            self.updates += 1
            for end in ends & self.counts.keys() if self.strange_updates else ends:
                self.counts[end] = self.counts.get(end, 0) + 1
        error, latest = view.get(TERMINAL_ERROR), self.strange
        yield Finding(
            hard(self.strange_updates >= MIN_STRANGE),
            TRUNCATED if error is None else TERMINAL_ERROR,
            cut if error is None else error,
            instance="ends",
        ).with_text(lambda: confusion_text(latest, limit, error))

    def contradiction(self, ends: set[str]) -> str | None:
        """The end that contradicts those that the task has had; None where there is no such end.

        A limit cuts nothing off before it, and what lasts as long as the limit ends in one of the two ways, always.
        """
        counts = self.counts
        if CUT_BEFORE in ends and CUT_BEFORE not in counts:
            return CUT_BEFORE
        if OVER_AT in ends and OVER_AT not in counts and counts.get(CUT_AT, 0) >= MIN_AT_LIMIT and CUT_AT not in ends:
            return OVER_AT
        if CUT_AT in ends and CUT_AT not in counts and counts.get(OVER_AT, 0) >= SETTLE_UPDATES and OVER_AT not in ends:
            return CUT_AT
        return None


def ends_of(view: View, limit: float) -> set[str]:
    """The kinds of ends of one update."""
    ends = set()
    for key, (at, before) in END_LENGTHS.items():
        length = view.get(key)
        end = None if length is None else at if length >= limit else before
        if end is not None:
            ends.add(end)
    return ends


def confusion_text(strange: str, limit: float, error: float | None) -> str:
    """The clause on ends that are confused."""
    steps = number(limit)
    if strange == OVER_AT:
        off = "" if error is None else f", which misleads the critic: it is off by {number(error)} there"
        return f"episodes that reach their time limit of {steps} steps have been taken for terminated{off}"
    what = (
        f"before their time limit of {steps} steps"
        if strange == CUT_BEFORE
        else f"after {steps} steps, where they used to end"
    )
    return f"episodes have been cut off {what}: a termination is taken for a time limit, and the critic goes on counting behind it"


BIAS = Ramp("bias", 0.5, 1.5, "critic's mean error, in standard deviations of the returns")
BIAS_SHARE = above("bias_share", 0.3, "critic's mean error relative to the size of returns, with that")


@dataclass(slots=True)
class BiasJudge:
    """A critic that is wrong in one direction, by much of the spread of returns and of their size, for long; or that must become so,
    because terminations and time limits are confused.
    """

    ends: TimeLimitEnds = field(default_factory=TimeLimitEnds)
    best: float | None = None
    severities: list[float] = field(default_factory=list)

    def __call__(self, view: View) -> Iterator[Finding]:
        yield from self.ends.confusion(view)
        key, limits = "value/bias_over_std", view.limits
        value, off, mean, spread = (view.get(name) for name in (key, "value/bias", "ret/mean", "ret/std"))
        if value is None or off is None or mean is None or spread is None:
            return
        best = self.best = abs(value) if self.best is None else min(self.best, abs(value))
        size = abs(mean) + spread
        share = abs(off) / size if size > 0 else 0.0
        learned = best < limits.low(BIAS)
        severity = min(limits.severity(BIAS, abs(value)), ramp(share, 0.0, 2 * limits[BIAS_SHARE])) if learned else 0.0
        self.severities.append(severity)
        del self.severities[:-BIAS_UPDATES]
        yield Finding(
            min(self.severities) if len(self.severities) == BIAS_UPDATES else 0.0, key, value, limits.middle(BIAS)
        ).with_text(
            lambda: (
                f"the critic has been {'over' if off > 0 else 'under'}estimating returns by {number(abs(off))} on average, "
                f"{percent(share)} of their size, which explained variance cannot see"
            )
        )


critic_alarm = partial(AlarmRule, pieces=("transitions",), histograms=("value/", "ret/"), relative=True)
"""Declare an alarm of the critic, which is judged by its own history."""

RULES = (
    critic_alarm(
        type="value/fit_collapse",
        effect=True,
        inputs=(R2, EXPLAINED, LOSS_OVER_VARIANCE),
        meaning="The critic predicted returns and no longer does.",
        action="Normalise returns, lower the learning rate or value_coef, give the critic its own network; check for a change of rewards.",
        judge=FitCollapseJudge(),
        bounds=(FIT_WAS, FIT_NOW, LOSS_NORM),
        source="baselines#454, ray#10159: the fit alone is noise where returns hardly vary, so the loss must have grown. Bounds by phase. "
        "A critic of a solved task cannot foresee the next failure: where returns vary more than ever, the fit says nothing.",
        required=(R2, EXPLAINED, LOSS_OVER_VARIANCE),
        histories=(LOSS, LOSS_OVER_VARIANCE, SPREAD),
        warmup=10,
        n_on=2,
        debug_updates=5,
        evidence=("value/*", "ret/std", "loss/value"),
    ),
    critic_alarm(
        type="value/loss_jump",
        effect=True,
        inputs=(LOSS,),
        meaning="The critic's error jumped.",
        action="Compare with ret/std: if that jumped too the rewards changed; otherwise lower the learning rate.",
        judge=LossJumpJudge(),
        bounds=(*OUTLIER_BOUNDS, LOSS_RECENT),
        source="Far out at once, or out of line twice; or far above the last five while rewards are larger than ever: a critic that "
        "learned fast has a history of many decades.",
        rank=270,
        histories=(LOSS, REWARD_HISTORIES[0]),
        debug_updates=5,
        evidence=("loss/*", "ret/*", "reward/*", "value/r2", "opt/lr"),
    ),
    critic_alarm(
        type="value/scale_shift",
        inputs=("reward/absmax", "ret/mean", "ret/std"),
        meaning="Returns are on another scale than before.",
        action="Normalise rewards, clip outliers, look for a bug or a new phase in the environment.",
        judge=ScaleShiftJudge(),
        bounds=(SCALE, RETURN_SCALE),
        source="The spread of returns changes by decades in healthy runs: a policy that survives to the time limit earns the "
        "same everywhere, "
        "a first success spreads them. Rewards themselves tell a change of scale from that: the largest and the mean move together. "
        "SB3#2240, cleanrl#441",
        rank=150,
        required=REWARDS,
        histories=(*RETURNS, *REWARD_HISTORIES),
        debug_updates=5,
        evidence=("reward/*", "ret/mean", "ret/std", "norm/*/drift", "loss/value"),
    ),
    critic_alarm(
        type="value/bias",
        inputs=("value/bias_over_std", "value/bias", "value/terminal_err", "episode/truncated_frac"),
        meaning="The critic is wrong by much in one direction, which explained variance cannot see.",
        action="Check the treatment of time limits (bootstrap) and of the last value; train the critic for more epochs.",
        judge=BiasJudge(),
        bounds=(BIAS, BIAS_SHARE),
        source="A critic lags behind returns that rise: it must be wrong for ten updates, by much of their size, and have been right "
        "before: one that learns slowly is wrong from the start. Ends of episodes that contradict the time limit show it at once.",
        required=("value/bias_over_std", "value/bias", "ret/mean", "ret/std"),
        warmup=10,
        debug_updates=3,
        evidence=("value/bias", "value/bias_over_std", "value/terminal_err", "ret/mean", "ret/std", "episode/*"),
    ),
)
