"""Alarms about the critic: a lost fit, a jump of the loss, a change in the scale of returns, a bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf

from esper_telemetry.alarms.alarm_bounds import Ramp, above, below, hard, ramp
from esper_telemetry.alarms.baselines import History, power
from esper_telemetry.alarms.judges import OUTLIER_BOUNDS, Outlier, Recent, StateJudge, Z, reading
from esper_telemetry.alarms.rule import Finding, View, alarm
from esper_telemetry.core.messages import number, times

LOSS, R2, EXPLAINED, SPREAD = "loss/value", "value/r2", "value/explained_variance", "value/target/std"
LOSS_OVER_VARIANCE = "value/loss_norm"
EXPECTED_FIT = ((0.10, -0.5), (0.25, -0.2), (0.75, 0.0), (1.0, 0.1))
"""Explained variance to expect up to that share of the run: an untrained critic explains nothing, a trained one should."""

BEST_FIT_UPDATES = 20  # latest R² values from which the best one is taken
FIT_STEPS = 512
"""Environment steps for which the fit must be lost: in a small batch one episode that ends decides over R²."""
RECENT_UPDATES = 10  # latest losses that a jump is compared with
FOLLOWS = 0.5
"""Rise of the returns within these updates, relative to the critic's error, that explains an error below 0."""
BIAS_UPDATES = 10  # updates for which a critic must be wrong in one direction
MIN_LOSS_GROWTH = 0.5  # decades by which the loss must have grown too: the fit also falls when returns vary less
UNKNOWN_EARLY_UPDATES = 25  # updates that count as early in a run of unknown length
CONSTANT_FIT = 0.02  # fit up to which a critic is as bad as a constant, whose fit differs from 0 by chance


def expected_fit(view: View) -> float:
    """Return the explained variance below which a critic is useless in this phase of the run."""
    if view.progress is None:
        return EXPECTED_FIT[1 if view.update <= UNKNOWN_EARLY_UPDATES * view.patience else 2][1]
    return next((bound for end, bound in EXPECTED_FIT if view.progress < end), EXPECTED_FIT[-1][1])


FIT_WAS = above("fit_was", 0.3, "R² that the critic has had before")
FIT_NOW = below("fit_now", CONSTANT_FIT, "R² below which the critic has lost its fit")
LOSS_NORM = Ramp("loss_norm", 1.0, 25.0, "critic's error over the variance of returns")


@reading(LOSS_OVER_VARIANCE)
def fit_collapse(view: View, loss_norm: float, fits: list[tuple[float, float]]) -> Iterator[Finding]:
    """A critic that has lost its fit, with a larger error than before. A fit to returns that varied far less does not count."""
    limits, r2, explained, spread = view.limits, view.get(R2), view.get(EXPLAINED), view.get(SPREAD) or 0.0
    before = fits[-BEST_FIT_UPDATES:]
    best = max((fit for fit, usual in before if spread <= usual * 10**MIN_LOSS_GROWTH), default=None)
    if r2 is not None:
        fits[:] = [*before, (r2, spread)]
    updates = min(ceil(FIT_STEPS / (view.rollout_steps or FIT_STEPS)), BEST_FIT_UPDATES // 2)
    latest = max((fit for fit, _ in fits[-updates:]), default=-inf)
    usual_returns = view.baselines.off_median(SPREAD) < MIN_LOSS_GROWTH
    error = LOSS if LOSS in view.values else LOSS_OVER_VARIANCE  # own loops need not report their losses
    grown = view.baselines.shift.get(error, 0.0) > MIN_LOSS_GROWTH and usual_returns
    useless = explained is not None and explained < expected_fit(view) + CONSTANT_FIT
    lost = r2 is not None and best is not None and best > limits[FIT_WAS] and latest < limits[FIT_NOW]
    by_fit = lost and (useless or best is None) and grown
    had_fit = best > 0 if best is not None else not before  # episodes of other lengths have other variances
    severity = max(hard(by_fit), limits.log_severity(LOSS_NORM, loss_norm) if grown and had_fit and latest < limits[FIT_NOW] else 0.0)
    if not by_fit:
        yield Finding(severity, LOSS_OVER_VARIANCE, loss_norm, limits.log_middle(LOSS_NORM), z=view.z(error)).says(
            "the critic's squared error has been {:x} the variance of returns: it predicts worse than their mean", 2 * loss_norm
        )
        return
    name = "its loss" if error == LOSS else "half its squared error over their variance"
    yield Finding(severity, R2, r2, limits[FIT_NOW], z=view.z(error)).says(
        f"the critic no longer predicts returns: its R² has fallen from {{}} to {{}}, and {name} is {{}}{{}}",
        *(best or 0.0, r2 or 0.0, view.values[error], partial(view.usual, error)),
    )


LARGER = "critic's loss over the largest of the last ten updates, if rewards are larger than ever"
LOSS_RECENT = Ramp("loss_recent", 1.5, 6.0, LARGER)


def recent_severity(view: View, key: str, last: Recent) -> float:
    """Severity of a value far above the last ten values."""
    value = view.get(key)
    if value is None:
        return 0.0
    highest, enough = max(last.values, default=0.0), last.full
    last.add(value)
    return view.limits.log_severity(LOSS_RECENT, value / highest) if enough and highest > 0 else 0.0


@dataclass(slots=True)
class Losses:
    """Outliers of the critic's loss and its latest values, absolute and relative to the variance of returns, as rewards may be scaled.

    Attributes:
        updates, unpaid: number of updates, and of those whose rewards were all equal.
        largest_reward: largest magnitude of a reward so far.
    """

    outlier: Outlier = field(default_factory=Outlier)
    updates: int = 0
    unpaid: int = 0
    largest_reward: float = 0.0
    last: Recent = field(default_factory=partial(Recent, RECENT_UPDATES))
    last_relative: Recent = field(default_factory=partial(Recent, RECENT_UPDATES))


def loss_jump(view: View, losses: Losses) -> Iterator[Finding]:
    """A jump of the critic's error; in a history that spans decades, shown by the last ten losses together with larger rewards."""
    severity, value = losses.outlier.severity(view, LOSS), view.get(LOSS)
    reward, before = view.get("reward/absmax") or 0.0, losses.largest_reward
    losses.largest_reward = max(before, reward)
    if value is None:
        return
    recently = recent_severity(view, LOSS, losses.last)
    recently = max(recently, recent_severity(view, LOSS_OVER_VARIANCE, losses.last_relative))
    if severity is None:
        return
    median = view.baselines.median(LOSS) or value
    paid_more = reward > before and (view.z("reward/absmax") or 0.0) >= view.limits.high(Z)
    ends = view.baselines.usual(LOSS)
    if ends is not None and value < view.limits.low(LOSS_RECENT) * ends[1]:  # losses of rollouts with and without a fall differ
        severity = 0.0
    severity = max(severity, recently if paid_more else 0.0)
    spread = view.get("reward/std") or 0.0
    losses.updates, losses.unpaid = losses.updates + 1, losses.unpaid + (spread == 0)
    if spread > 0 and losses.unpaid > losses.updates / 2:  # a rollout with a rare reward has larger returns than most
        severity = 0.0
    yield Finding(severity, LOSS, value, adaptive=True, z=view.z(LOSS)).with_text(
        lambda: f"the critic's loss has jumped to {number(value)}, {times(value / median)} its median{view.usual(LOSS)}"
    )


RETURNS = ("ret/std", "ret/mean")
REWARDS = ("reward/absmax", "reward/mean")
REWARD_HISTORIES = tuple(History(key, scale_min=0.05) for key in (*REWARDS, "reward/std"))  # they hardly vary
MIN_JUMP = 0.5  # decades from which on a move lasts as long as the keys are away from their medians

FALL_FACTOR = 2.5
"""Rewards also shrink when a policy learns to avoid the worst of them, so a fall must be this many times larger, in decades."""

SCALE = Ramp("scale", 0.6, 1.0, "decades by which the scale of rewards changes")
RETURN_SCALE = Ramp("return_scale", 1.0, 2.0, "decades by which the mean and the spread of returns change together")


@dataclass(slots=True)
class JointMove:
    """Moves of two keys together, in decades.

    A move begins between two updates, and lasts while the keys are away from their medians.

    Attributes:
        negative, positive: updates in which the signed key was below or above 0.
    """

    negative: int = 0
    positive: int = 0
    before: float = 0.0
    moved: bool = False

    def step(self, view: View, keys: tuple[str, str]) -> tuple[float, bool, float] | None:
        """Decades of the move, whether it is upward, and the smaller robust score; None without a history. The second key has a sign."""
        shifts = [view.baselines.shift.get(key) for key in keys]
        scores = [view.z(key) for key in keys]
        signed = view.get(keys[1])
        if None in shifts or None in scores or signed is None:
            return None
        first, second = (shift or 0.0 for shift in shifts)
        self.positive, self.negative = self.positive + (signed > 0), self.negative + (not signed > 0)
        same_sign = self.positive > self.negative if signed > 0 else self.negative > self.positive
        size = min(abs(first), abs(second)) if same_sign and first * second > 0 else 0.0
        begun = self.moved or abs(first - self.before) > 0.5 * abs(first)
        self.before, self.moved = first, begun and size > MIN_JUMP
        return (size if begun else 0.0), first > 0, min(abs(score or 0.0) for score in scores)


@dataclass(slots=True)
class EpisodePeaks:
    """Largest reward of each update over the last whole episode.

    If environments start together and an update holds part of an episode, rewards repeat with the period of the episodes.
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
        """The largest reward; 0 without any."""
        return max((*self.course, *self.open), default=0.0)


@dataclass(slots=True)
class Scales:
    """Moves of rewards and of returns.

    Attributes:
        fallen: severity of the fall in the last update.
        spans: whether episodes have ended since rewards fell, in an earlier update.
    """

    rewards: JointMove = field(default_factory=JointMove)
    returns: JointMove = field(default_factory=JointMove)
    peaks: EpisodePeaks = field(default_factory=EpisodePeaks)
    risen: bool = False
    fallen: float = 0.0
    spans: bool = False


def scale_shift(view: View, scales: Scales) -> Iterator[Finding]:
    """Rewards change their scale from one update to the next, or returns do, by a large factor."""
    yield from rewards_shift(view, scales)
    yield from returns_shift(view, scales.returns.step(view, RETURNS))


def rewards_shift(view: View, scales: Scales) -> Iterator[Finding]:
    """The largest and the mean reward moved together by decades, sign included.

    A fall must last for two updates and into the next episode; a rise must exceed the rewards that every episode has once.
    """
    limits, key = view.limits, "reward/absmax"
    move = scales.rewards.step(view, REWARDS)
    largest, usual = view.get(key), view.baselines.median(key)
    if largest is None:
        return
    new = largest > scales.peaks.largest * power(limits.low(SCALE))
    scales.peaks.add(view, largest)
    if move is None or usual is None:
        return
    size, risen, z = move
    outlier = min(limits.severity(SCALE, size if risen else size / FALL_FACTOR), limits.severity(Z, z))
    scales.risen = risen and outlier > 0 and (scales.risen or new)
    fallen, scales.fallen = scales.fallen, 0.0 if risen else outlier
    spans, ends = scales.spans, view.get("episode/count")
    scales.spans = scales.fallen > 0 and (spans or ends is None or ends > 0)
    severity = outlier if scales.risen else min(outlier, fallen) if spans and not risen else 0.0
    bound = usual * power(limits.middle(SCALE))
    yield Finding(severity, key, largest, bound, adaptive=True, z=z, instance="rewards").with_text(
        lambda: (
            f"rewards are {times(max(largest / usual, usual / max(largest, 1e-300)))} as {'large' if risen else 'small'} as before: "
            f"up to {number(largest)}{view.usual(key)}, with returns {spread_text(view)}, so the critic has to learn a new scale"
        )
    )


def spread_text(view: View) -> str:
    """The standard deviation of returns in words."""
    return f"of standard deviation {number(view.get('ret/std') or 0.0)}{view.usual('ret/std')}"


def returns_shift(view: View, move: tuple[float, bool, float] | None) -> Iterator[Finding]:
    """Mean and spread of returns grew by decades together, as when rewards are scaled after they are measured."""
    key = "ret/mean"
    mean, usual = view.get(key), view.baselines.median(key)
    if move is None or mean is None or usual is None:
        return
    size, risen, z = move
    severity = view.limits.severity(RETURN_SCALE, size if risen else 0.0)
    bound = usual * power(view.limits.middle(RETURN_SCALE))
    yield Finding(severity, key, mean, bound, adaptive=True, z=z, instance="returns").with_text(
        lambda: (
            f"returns are {times(abs(mean) / usual)} as large as before: {number(mean)} on average{view.usual(key)}, "
            f"{spread_text(view)}, so the critic has to learn a new scale"
        )
    )


CUT_AT, CUT_BEFORE, OVER_AT, OVER_BEFORE = "cut at", "cut before", "over at", "over before"
"""Ends of episodes: truncated or terminated, at the time limit or before it."""

TERMINAL_ERROR, TRUNCATED = "value/terminal_err", "episode/truncated_frac"
SETTLE_UPDATES = 5  # updates with ends after which the usual ends of a task are known
MIN_AT_LIMIT = 2  # updates with episodes that reach the limit, after which their usual end there is known
REPORT_ENDS = "Report time limits as truncated and other ends as terminated; add the critic's estimate after truncations only."
MIN_STRANGE = 2  # updates with contradictory ends that raise the alarm
FORGET_UPDATES = 5  # updates in a row without such an end, after which an earlier one is forgotten


@dataclass(slots=True)
class TimeLimitEnds:
    """Time limits reported as terminations, and terminations reported as time limits.

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
        """Episodes that end in a way that is new for this task and contradicts its time limit."""
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
            self.since, self.updates = self.since + 1, self.updates + 1
            self.strange_updates = 0 if self.since >= FORGET_UPDATES else self.strange_updates
            for end in ends & self.counts.keys() if self.strange_updates else ends:
                self.counts[end] = self.counts.get(end, 0) + 1
        error, wrong = view.get(TERMINAL_ERROR), hard(self.strange_updates >= MIN_STRANGE)
        shown = (TRUNCATED, cut) if error is None else (TERMINAL_ERROR, error)
        finding = Finding(wrong, *shown, instance="ends").with_advice(lambda: REPORT_ENDS)
        yield finding.with_text(partial(confusion_text, self.strange, limit, error))

    def contradiction(self, ends: set[str]) -> str | None:
        """The end that contradicts the earlier ends of the task, if any.

        A time limit never truncates an episode early, and all episodes that reach it end in the same way.
        """
        counts, new = self.counts, ends - self.counts.keys()
        if CUT_BEFORE in new:
            return CUT_BEFORE
        if OVER_AT in new and counts.get(CUT_AT, 0) >= MIN_AT_LIMIT and CUT_AT not in ends:
            return OVER_AT
        return CUT_AT if CUT_AT in new and counts.get(OVER_AT, 0) >= SETTLE_UPDATES and OVER_AT not in ends else None


def ends_of(view: View, limit: float) -> set[str]:
    """The kinds of ends in an update, by the longest and the shortest episodes."""
    ends = set()
    for kind, at, before in (("truncated", CUT_AT, CUT_BEFORE), ("terminated", OVER_AT, OVER_BEFORE)):
        if view.values.get(f"episode/{kind}_length_max", -inf) >= limit:
            ends.add(at)
        if view.values.get(f"episode/{kind}_length_min", inf) < limit:
            ends.add(before)
    return ends


def confusion_text(strange: str, limit: float, error: float | None) -> str:
    """The clause about confused ends."""
    steps = number(limit)
    if strange == OVER_AT:
        off = "" if error is None else f"; the critic's error there is {number(error)}"
        return f"episodes that reach their time limit of {steps} steps have been reported as terminated, so returns stop there{off}"
    before, after = f"before their time limit of {steps} steps", f"after {steps} steps, when they used to terminate"
    what = before if strange == CUT_BEFORE else after
    return f"episodes have been truncated {what}: a termination is treated as a time limit, and the critic's estimate is added after it"


BIAS = Ramp("bias", 0.5, 1.5, "critic's mean error, in standard deviations of the returns")
BIAS_STEPS = 128  # optimizer steps in which a critic learns the mean of the returns
MIN_UPDATE_STEPS = 16  # of an update whose steps are not counted
BIAS_SHARE = above("bias_share", 0.3, "critic's mean error relative to the size of returns, in addition")


@dataclass(slots=True)
class Bias:
    """Ends of episodes, smallest mean error in standard deviations of the returns, optimizer steps, latest severities and mean returns."""

    ends: TimeLimitEnds = field(default_factory=TimeLimitEnds)
    best: float | None = None
    steps: int = 0
    severities: Recent = field(default_factory=partial(Recent, BIAS_UPDATES))
    means: Recent = field(default_factory=partial(Recent, BIAS_UPDATES))


def bias(view: View, past: Bias) -> Iterator[Finding]:
    """A critic that over- or underestimates for a long time, by much of the spread and the size of returns; or that will do so because
    terminations and time limits are confused.
    """
    yield from past.ends.confusion(view)
    key, limits = "value/bias_over_std", view.limits
    value, off, mean, spread = (view.get(name) for name in (key, "value/bias", "ret/mean", "ret/std"))
    if value is None or off is None or mean is None or spread is None:
        return
    best = past.best = abs(value) if past.best is None else min(past.best, abs(value))
    size = abs(mean) + spread
    share = abs(off) / size if size > 0 else 0.0
    severity = min(limits.severity(BIAS, abs(value)), ramp(share, 0.0, 2 * limits[BIAS_SHARE]))
    risen = mean - past.means.add(mean)[0]
    past.steps += MIN_UPDATE_STEPS if view.steps is None else view.steps
    if (off < 0 and risen > FOLLOWS * -off) or past.steps < BIAS_STEPS:  # a critic is behind returns that rise, and behind its start
        severity = 0.0
    last = past.severities.add(severity if best < limits.low(BIAS) else 0.0)
    yield Finding(min(last) if past.severities.full else 0.0, key, value, limits.middle(BIAS)).says(
        "the critic has been {}estimating returns by {} on average, {:%} of their size, which explained variance does not show",
        *("over" if off > 0 else "under", abs(off), share),
    )


critic_alarm = partial(alarm, pieces=("transitions",), histograms=("value/", "ret/"), relative=True)
"""Declares an alarm about the critic, which is compared with its own history."""

RULES = (
    critic_alarm("value/fit_collapse", effect=True, warmup=10, n_on=2, debug_updates=5)
    .changes("learning_rate", "value_coef")
    .reads(R2, EXPLAINED, LOSS_OVER_VARIANCE)
    .needs(R2, EXPLAINED, LOSS_OVER_VARIANCE)
    .follows(LOSS, LOSS_OVER_VARIANCE, SPREAD)
    .says(
        "The critic predicted returns and no longer does.",
        "Normalise returns, lower the learning rate or value_coef, give the critic its own network; check whether rewards have changed.",
        "baselines#454, ray#10159: the fit alone is noise if returns hardly vary, so the loss must have grown. Bounds by phase. "
        "The critic of a solved task cannot predict the next failure: if returns vary more than ever, the fit means nothing.",
    )
    .shows("value/*", "ret/std", "loss/value")
    .judged(StateJudge(fit_collapse, list[tuple[float, float]]()), FIT_WAS, FIT_NOW, LOSS_NORM),
    critic_alarm("value/loss_jump", LOSS, rank=270, effect=True, debug_updates=5)
    .follows(LOSS, REWARD_HISTORIES[0])
    .says(
        "The critic's error jumped.",
        "Compare with ret/std: if it jumped too, the rewards changed; otherwise lower the learning rate.",
        "An extreme value once or an unusual one twice; or a value far above the last five while rewards are larger than ever, because "
        "the history of a critic that learned fast spans many decades.",
    )
    .shows("loss/*", "ret/*", "reward/*", "value/r2", "opt/lr")
    .judged(StateJudge(loss_jump, Losses()), *OUTLIER_BOUNDS, LOSS_RECENT),
    critic_alarm("value/scale_shift", "reward/absmax", "ret/mean", "ret/std", rank=150, debug_updates=5)
    .needs(*REWARDS)
    .follows(*RETURNS, *REWARD_HISTORIES)
    .says(
        "The scale of returns has changed.",
        "Normalise rewards, clip outliers, look for a bug or a new phase in the environment.",
        "The spread of returns changes by decades in healthy runs: it shrinks if all episodes survive to the time limit and grows with the "
        "first success. In a change of scale, the largest and the mean reward move together. SB3#2240, cleanrl#441",
    )
    .shows("reward/*", "ret/mean", "ret/std", "norm/*/drift", "loss/value")
    .judged(StateJudge(scale_shift, Scales()), SCALE, RETURN_SCALE),
    critic_alarm("value/bias", warmup=10, debug_updates=3)
    .reads("value/bias_over_std", "value/bias", "value/terminal_err", "episode/truncated_frac")
    .needs("value/bias_over_std", "value/bias", "ret/mean", "ret/std")
    .says(
        "The critic over- or underestimates returns by a large amount, which explained variance does not show.",
        "Check how returns are bootstrapped at time limits and at the end of the rollout; train the critic for more epochs.",
        "A critic lags behind rising returns. So its error must be large for ten updates, after it was small: a critic that learns slowly "
        "is wrong from the start. Ends of episodes that contradict the time limit raise the alarm at once.",
    )
    .shows("value/bias", "value/bias_over_std", "value/terminal_err", "ret/mean", "ret/std", "episode/*")
    .judged(StateJudge(bias, Bias()), BIAS, BIAS_SHARE),
)
