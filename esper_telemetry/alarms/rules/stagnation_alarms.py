"""Alarms about parts of training that never work, or that change so slowly that consecutive updates hardly differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import hypot, log10
from statistics import median

from esper_telemetry.alarms.alarm_bounds import SMALLEST_DIVISOR, Ramp, above, below, count, decade_ramp, hard
from esper_telemetry.alarms.judges import StateJudge, reading
from esper_telemetry.alarms.rule import WARNING, Finding, View, alarm
from esper_telemetry.alarms.rules.value_alarms import CONSTANT_FIT, EXPLAINED, LOSS, LOSS_OVER_VARIANCE, expected_fit
from esper_telemetry.core.messages import number, percent

BLOCK_UPDATES = 20  # updates whose median is one point of a slow course
MIN_BLOCKS = 4  # points in a row that must rise
SLOW_GROWTH = above("slow_growth", 2.5, "decades by which a group's gradient has grown steadily, beyond the growth of returns")
HEALTHY_GRADIENTS = 0.75  # health of the gradients that a run must have had before it can be lost
SICK_GRADIENTS = below("sick_gradients", 0.25, "health of the gradients, median of twenty updates")


@dataclass(slots=True)
class SlowCourse:
    """Medians of a value over blocks of updates.

    Attributes:
        medians: one for each complete block.
        values: values of the current block.
    """

    medians: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, value: float, patience: int = 1) -> None:
        """Add the value of an update; blocks are `patience` times as long if updates are small."""
        self.values.append(value)
        if len(self.values) >= BLOCK_UPDATES * patience:
            self.medians.append(median(self.values))
            self.values.clear()

    def rise(self) -> float:
        """Difference between the last median and the lowest one if the last few medians rise steadily; otherwise 0."""
        last = self.medians[-MIN_BLOCKS:]
        if len(last) < MIN_BLOCKS or any(after <= before for before, after in pairwise(last)):
            return 0.0
        return last[-1] - min(self.medians)


@dataclass(slots=True)
class SlowCourses:
    """Log10 of each group's gradient norm, log10 of the size of returns, which drives a critic's gradient, and health of the gradients."""

    norms: dict[str, SlowCourse] = field(default_factory=dict)
    errors: SlowCourse = field(default_factory=SlowCourse)
    health: SlowCourse = field(default_factory=SlowCourse)


def slow_growth(view: View, courses: SlowCourses) -> Iterator[Finding]:
    """Gradients that grow by a few per cent in every update, beyond the growth of returns; or that lose their health."""
    mean, std, health = view.get("ret/mean"), view.get("ret/std"), view.get("grad/health")
    if mean is not None and std is not None and (mean or std):
        courses.errors.add(log10(hypot(mean, std)), view.patience)
    excused = max(0.0, courses.errors.rise())
    for group, key, severity in view.labelled("grad/", "/severity_explode"):
        norm = view.get(f"grad/{group}/norm_preclip")
        if norm is None or norm <= 0:
            continue
        course = courses.norms.setdefault(group, SlowCourse())
        course.add(log10(norm), view.patience)
        grown = hard(course.rise() - excused > view.limits[SLOW_GROWTH])
        words = f"the gradient of the group {group} has grown steadily to a norm of {{}}, {{:x}} its lowest level, and is still growing"
        yield Finding(max(WARNING, severity) * grown, key, severity, instance=group).says(words, norm, 10 ** min(course.rise(), 300.0))
    if health is None:
        return
    courses.health.add(health, view.patience)
    medians, bound = courses.health.medians, view.limits[SICK_GRADIENTS]
    lost = bool(medians) and max(medians) > HEALTHY_GRADIENTS and medians[-1] < bound and view.course.risen is False
    yield Finding(WARNING * hard(lost), "grad/health", health, bound, instance="health").with_text(
        lambda: f"the health of the gradients has fallen from {percent(max(medians))} to {percent(medians[-1])} (healthy: above 75 %)"
    )


NEVER_FIT_UPDATES = count("never_fit_updates", 30, "updates in a row in which the critic is worse than a constant")
NEVER_FIT = below("never_fit", -0.5, "R² of the critic, median of these updates")
NEVER_FIT_BEST = below("never_fit_best", 0.0, "best R² of the critic in these updates")
LEARNING_STEPS, UNTRAINED_ERROR = 300, 1.5
"""A critic is not judged in its first optimizer steps while its error is below this multiple of the size of returns: it may only be slow.
A critic that always gives 0 has an error of 1. Runs that do not count steps are always judged."""
FIT_RISING = below("never_fit_rising", -2.0, "the same if the return rises, which a bad critic need not prevent")
USUAL_LOSS = 0.1
"""Value loss over the variance of all returns so far, below which the current returns vary too little for a fit to be meaningful."""
MAX_FALLEN_LOSS = 1.0
"""Decades below its highest usual level at which the loss indicates the same, if the variance is not known."""
SMALL_ERROR = 0.1
"""Error of the critic over the size of returns up to which the critic is good, even if it explains little of nearly constant returns."""
SHORT_SHARE = 0.9
SHORT_MARGIN = 0.1  # in this share of the updates, the explained variance must exceed the expected one by less than this margin
BETTER_FIT = 0.05
"""Gain of explained variance from the earlier to the later half of the updates, above which a critic still learns."""
LEARNING_CRITIC = 0.7
CLOSER_CRITIC = 0.93
"""Ratio of the later half's error to the earlier half's, relative to the variance and to the size of returns, below which a critic still
learns."""


@dataclass(slots=True)
class UnexplainedReturns:
    """A critic's latest explained variances, losses over the variance of returns, and explained minus expected variances."""

    fits: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    short: list[float] = field(default_factory=list)

    def __call__(self, view: View) -> Iterator[Finding]:
        """A critic that explains less of the returns than expected in this phase of the run, for a long time, without improving."""
        value, loss, expected = view.get(EXPLAINED), view.get(LOSS_OVER_VARIANCE), expected_fit(view)
        varied = loss is not None and loss >= USUAL_LOSS
        if loss is None:  # logs of other trainers
            loss = view.get(LOSS)
            varied = loss is not None and view.baselines.fallen(LOSS) < MAX_FALLEN_LOSS
        if value is None or loss is None:
            return
        needed = int(view.limits[NEVER_FIT_UPDATES]) * view.patience
        fits, losses, short = self.fits, self.losses, self.short
        if varied:
            for values, new in ((fits, value), (losses, loss), (short, value - expected - CONSTANT_FIT)):
                values.append(new)
                del values[:-needed]
        half = len(fits) // 2
        lacks = len(fits) == needed and varied and median(short) < 0 and relative_error(view) > SMALL_ERROR
        lacks = lacks and sorted(short)[int(SHORT_SHARE * needed)] < SHORT_MARGIN
        lacks = lacks and median(fits[half:]) < median(fits[:half]) + BETTER_FIT
        # otherwise it follows rising returns
        lacks = lacks and median(losses[half:]) > CLOSER_CRITIC * median(losses[:half])
        lacks = lacks and not view.course.risen  # a policy can learn without a critic
        least = "more than" if expected <= 0 else "at least"
        yield Finding(WARNING * hard(lacks), EXPLAINED, value, expected, instance="explained", held=len(fits)).with_text(
            lambda: (
                f"the critic has explained almost none of the returns in {len(fits)} updates: its explained variance is "
                f"{number(median(fits))}, and {least} {number(expected)} is expected by now"
            )
        )


@dataclass(slots=True)
class NeverFitJudge:
    """A critic that is worse than a constant for a long time without improving; or that explains less than expected.

    Attributes:
        unexplained: judge of the explained variance.
        fits: latest R².
        errors: latest errors over the size of returns.
        medians: running medians of R² in the latest updates.
        taken: optimizer steps so far.
        first, best: first and best median of the updates before the latest ones; None if there are none.
    """

    unexplained: UnexplainedReturns = field(default_factory=UnexplainedReturns)
    fits: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    taken: int = 0
    first: float | None = None
    best: float | None = None

    def __call__(self, view: View) -> Iterator[Finding]:
        self.taken += view.steps or 0
        findings = [*self.unexplained(view), *self.never_fits(view)]
        if not (0 < self.taken < LEARNING_STEPS and relative_error(view) < UNTRAINED_ERROR):
            yield from findings

    def never_fits(self, view: View) -> Iterator[Finding]:
        """A critic that is worse than a constant for a long time without improving."""
        key, limits = "value/r2", view.limits
        value = view.get(key)
        if value is None:
            return
        fits, needed = self.fits, int(limits[NEVER_FIT_UPDATES]) * view.patience
        fits.append(value)
        self.errors.append(relative_error(view))
        del fits[:-needed], self.errors[:-needed]
        middle, half = median(fits), max(1, len(fits) // 2)
        learning = median(fits[half:] or fits) - 1 > LEARNING_CRITIC * (median(fits[:half]) - 1)
        learning = learning or median(self.errors[half:] or self.errors) < CLOSER_CRITIC * median(self.errors[:half])
        if len(fits) == needed:
            self.medians.append(middle)
        if len(self.medians) > needed:
            earlier = self.medians.pop(0)
            self.first = earlier if self.first is None else self.first
            self.best = earlier if self.best is None else max(self.best, earlier)
        if self.first is not None and self.best is not None:  # progress over the whole run
            learning = learning or (middle >= self.best and middle - 1 > LEARNING_CRITIC * (self.first - 1))
        bad = max(fits) < limits[NEVER_FIT_BEST] and middle < limits[NEVER_FIT] and self.errors[-1] > LARGE_ERROR
        never = len(fits) == needed and bad and not learning
        never = never and (view.course.risen is False or max(fits) < limits[FIT_RISING])
        words = f"the critic has been worse than a constant in each of the last {len(fits)} updates and does not improve: its R² is {{}} "
        yield Finding(hard(never), key, value, limits[NEVER_FIT], held=len(fits)).says(words + "(0 for a constant)", middle)


LIMIT_BIAS = above("limit_bias", 0.5, "critic's error at time limits beyond its error elsewhere, relative to the size of returns")
SMALL_BIAS = 0.3  # mean error of the critic relative to the size of returns up to which it is right elsewhere


@reading("value/bias_truncated", "value/bias", "ret/mean", "ret/std")
def limit_bias(view: View, ends: float, bias: float, mean: float, std: float) -> Iterator[Finding]:
    """A critic that is right except at the steps at which a time limit truncated an episode."""
    size, bound = hypot(mean, std), view.limits[LIMIT_BIAS]
    beyond = abs(ends - bias) / size if size > 0 else 0.0
    wrong = beyond > bound and abs(bias) < SMALL_BIAS * size
    words = (
        "the critic's error has been {} at time limits and {} on average (the size of returns is {}): returns leave out what follows a "
        "time limit, or bootstrap from the wrong state"
    )
    yield Finding(hard(wrong), "value/bias_truncated", ends, bias + bound * size).says(words, ends, bias, size)


LARGE_ERROR = 0.3
"""Error of the critic over the size of returns above which it is wrong; if all returns are equal, R² alone is far below 0 without one."""


def relative_error(view: View) -> float:
    """Root mean square error of the critic over the size of returns; infinite if the record does not have it."""
    bias, scatter, mean, std = (view.get(key) for key in ("value/bias", "value/err/std", "ret/mean", "ret/std"))
    if bias is None or scatter is None or mean is None or std is None:
        return float("inf")
    size = hypot(mean, std)
    return hypot(bias, scatter) / size if size > 0 else 0.0


STD_LOST = Ramp("std_lost", 0.25, 0.01, "standard deviation of a head relative to its first value, if the return does not rise")
STD_LOST_ANYWAY = Ramp("std_lost_anyway", 0.05, 0.001, "the same if the return rises")


def std_collapse(view: View, first_values: dict[str, float]) -> Iterator[Finding]:
    """A Gaussian head whose standard deviation is a small fraction of its first value."""
    for head, key, value in view.labelled("policy/head/", "/std/mean"):
        first = first_values.setdefault(head, value)
        if first <= 0 or value < 0:
            continue
        ends = view.limits.ends(STD_LOST_ANYWAY if view.course.risen is not False else STD_LOST)
        low, high = (max(end, SMALLEST_DIVISOR) for end in ends)
        severity = decade_ramp(first / max(value, 1e-300), 1 / low, 1 / high)
        words = f"the standard deviation of the head {head} has shrunk from {{}} to {{}}, so the policy no longer explores"
        yield Finding(severity, key, value, first * (low * high) ** 0.5, instance=head).says(words, first, value)


EMPTY_STATE = below("empty_state", 1e-3, "typical size of an empty recurrent state")
EMPTIED_SHARE = below("emptied_share", 0.01, "typical size of a recurrent state relative to its largest median")
ALWAYS_RESET = above("always_reset", 0.99, "share of the steps that begin with an empty memory")
REMEMBERED_STEPS = 3.0  # mean episode length above which a memory that is reset in every step is a mistake
OFTEN_RESET = (0.5, 3.0)  # share of the steps, and resets per episode, above which resets do not follow the ends of episodes


def empty_state(view: View, sizes: SlowCourse) -> Iterator[Finding]:
    """A memory that is reset in every step or far more often than episodes end, is almost empty, or fades."""
    limits, key = view.limits, "lstm/h/rms"
    rate, length, size = view.get("lstm/reset_rate"), view.get("episode/length_mean"), view.get(key)
    if rate is not None and length is not None:
        often = rate > OFTEN_RESET[0] and rate * length > OFTEN_RESET[1]
        always = (rate > limits[ALWAYS_RESET] and length > REMEMBERED_STEPS) or often
        words = "the memory has been reset in {:%} of the steps, although episodes last {} steps: the policy remembers nothing"
        yield Finding(hard(always), "lstm/reset_rate", rate, limits[ALWAYS_RESET], instance="resets").says(words, rate, length)
    if size is None or (rate is not None and rate > limits[ALWAYS_RESET]):
        return
    sizes.add(size, view.patience)
    largest = max(sizes.medians, default=0.0)
    empty, least = size < limits[EMPTY_STATE], limits[EMPTIED_SHARE] * largest
    usual = f", down from {number(largest)}" if largest > size else " (usually 0.05 to 0.8)"
    yield Finding(hard(empty or size < least), key, size, limits[EMPTY_STATE] if empty else least).says(
        "the memory is almost empty: its typical size is {}{}", size, usual
    )


RULES = (
    alarm("grad/slow_growth", rank=282, relative=True, optional=True, n_on=2, debug_updates=3)
    .reads("grad/{group}/severity_explode", "grad/{group}/norm_preclip", "grad/health")
    .needs(("grad/health", "grad/{group}/severity_explode"), ("grad/health", "grad/{group}/norm_preclip"))
    .changes(learning_rate=1 / 3, max_grad_norm=1 / 2)
    .says(
        "Gradients have grown steadily, by a little in each update.",
        "Look at the growth of the weights (opt/weight_growth) and of the rewards; lower the learning rate, or use weight decay.",
        "A history of a hundred updates adapts to growth of 4 % per update, so medians of twenty updates are compared with the lowest of "
        "the run. The growth of returns, which drives a critic's gradient, is subtracted.",
    )
    .shows("grad/*/norm_preclip", "grad/*/severity_explode", "grad/health", "opt/weight_growth", "ret/std")
    .shows(pieces=("layers",))
    .judged(StateJudge(slow_growth, SlowCourses()), SLOW_GROWTH, SICK_GRADIENTS),
    alarm("value/never_fits", rank=256, relative=True, debug_updates=3)
    .reads("value/r2", "value/explained_variance", "value/bias_over_std")
    .needs(("value/r2", EXPLAINED), ("value/r2", LOSS_OVER_VARIANCE, LOSS))
    .follows(LOSS)
    .changes("learning_rate", value_coef=2)
    .says(
        "The critic has been as bad as a constant for a long time.",
        "Check that the critic's parameters are trained; check the sign and the targets of the critic's loss; check the order in which "
        "returns are computed; normalise returns if they are large. A critic cannot predict returns that are pure noise.",
        "With unscaled returns R² begins far below 0 and rises; a rising R² raises nothing, and neither does a task that is being solved, "
        "whose returns become equal. Bounds on the explained variance depend on the phase, as in esper-lite: -0.5 in the first tenth of a "
        "run, -0.2 in the first quarter, 0 until three quarters, then 0.1.",
    )
    .shows("value/*", "ret/*", "loss/value", pieces=("transitions",))
    .judged(NeverFitJudge(), NEVER_FIT_UPDATES, NEVER_FIT, NEVER_FIT_BEST, FIT_RISING),
    alarm("value/limit_bias", rank=157, optional=True, warmup=3, n_on=5, debug_updates=2)
    .reads("value/bias_truncated", "value/bias")
    .needs("value/bias_truncated", "value/bias", "ret/mean", "ret/std")
    .says(
        "The critic's error is large at time limits and small elsewhere.",
        "Bootstrap from the final observation of the episode (not from the observation after the reset), reset the advantage's trace "
        "there, and report time limits as truncated.",
        "the difference is up to a tenth of the size of returns in correct runs, and all of it in wrong ones",
    )
    .shows("value/bias*", "value/terminal_err", "ret/mean", "ret/std", "episode/truncated*", pieces=("transitions",))
    .judged(limit_bias, LIMIT_BIAS),
    alarm("policy/std_collapse", rank=292, optional=True, n_on=3, debug_updates=3)
    .reads("policy/head/{head}/std/mean", "policy/head/{head}/std/min")
    .changes(learning_rate=1 / 3, entropy_coef=2)
    .says(
        "The standard deviation of continuous actions has shrunk to almost 0.",
        "Set a lower bound for log standard deviations, lower the learning rate, check whether small or uniform actions are rewarded.",
        "5 % of the first value while the return does not rise, otherwise 0.7 %: long runs that learn end at 10 % and more",
    )
    .shows("policy/head/*/std/*", "policy/entropy", "policy/kl", pieces=("transitions",))
    .judged(StateJudge(std_collapse, dict[str, float]()), STD_LOST, STD_LOST_ANYWAY),
    alarm("lstm/empty", "lstm/{part}/rms", "lstm/reset_rate", rank=205, optional=True, n_on=5, debug_updates=3)
    .needs("lstm/h/rms", applies=lambda facts: facts.policy != "mlp")
    .says(
        "The memory is almost empty.",
        "Check that states are passed from step to step and reset only after an episode has ended (multiply them by 1 - done, not by "
        "done); initialise the forget bias at 1.",
        "fresh LSTMs have states of 0.02 and more",
    )
    .shows("lstm/*/rms", "lstm/*/absmax", "lstm/reset_rate", "episode/length_mean", pieces=("transitions",))
    .judged(StateJudge(empty_state, SlowCourse()), EMPTY_STATE, EMPTIED_SHARE, ALWAYS_RESET),
)
