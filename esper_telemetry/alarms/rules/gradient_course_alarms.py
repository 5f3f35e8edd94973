"""Alarms about gradients over many updates: oscillation, drift, noise, concentration in a few parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log10
from statistics import stdev

from esper_telemetry.alarms.alarm_bounds import above, below, hard
from esper_telemetry.alarms.baselines import power
from esper_telemetry.alarms.judges import RATE_GROWN, Recent, StateJudge, Z, reading
from esper_telemetry.alarms.rule import Finding, View
from esper_telemetry.alarms.rules.gradient_alarms import gradient_alarm

MAX_PERIOD = 20
"""Longest period in updates that counts: longer ones are trends in the hundred updates that are tested."""
MIN_SWINGS = 3  # swings of the learning rate that are not a schedule: warm restarts are rarer
SWING_UPDATES = 16  # updates in which swings are counted
MAX_REJECTED = 50  # outliers in a row that are left out of the average, which then begins to follow them
MIN_FALL = 0.7  # decades by which the norm must have fallen in addition to what the critic's error explains
MIN_RISES = 5  # updates in a row in which a creeping learning rate must rise
OSCILLATION = above("oscillation", 0.3, "negative average cosine of successive gradients")
OPPOSED_ERRORS = above("opposed_errors", 6.0, "the same in standard errors: a false alarm rate of 1e-4 per test")
RATE_SWING = above("rate_swing", 4.0, "factor between turning points of a learning rate that does not follow the KL")
PERIOD_P = below("period_p", 1e-6, "p-value of an oscillation of the KL")


@dataclass(slots=True)
class Oscillations:
    """Cosines of successive gradients, severities by the cosines and by the KL, and the latest learning rates."""

    cosines: Recent = field(default_factory=partial(Recent, 10))
    episode_steps: float = 0.0
    opposed: float = 0.0
    mean: float = 0.0
    periodic: float = 0.0
    period: float | None = None
    rates: list[float] = field(default_factory=list)


def oscillation(view: View, past: Oscillations) -> Iterator[Finding]:
    """Successive gradients in opposite directions, a KL divergence that oscillates with a period, or a learning rate that oscillates.

    If an episode spans several updates, a period up to the length of the episode is the rhythm of the task and does not count.
    """
    past.episode_steps = view.values.get("episode/length_mean", past.episode_steps)
    cosine = view.get("grad/align/successive_cos")
    mean = None if cosine is None else past.cosines.mean(cosine)
    if mean is not None:
        error = stdev(past.cosines.values) / len(past.cosines.values) ** 0.5
        against = mean < -view.limits[OSCILLATION] and mean < -view.limits[OPPOSED_ERRORS] * error
        past.opposed, past.mean = hard(against and not within_episode(view, 2, past.episode_steps)), mean
    chance, length = view.get("policy/kl/period/p"), view.get("policy/kl/period/length")
    if chance is not None and length is not None:
        clear = chance < view.limits[PERIOD_P] and length <= MAX_PERIOD
        clear = clear and not within_episode(view, length, past.episode_steps)
        again = clear and past.period is not None and abs(past.period - length) <= 0.1 * length
        past.periodic, past.period = hard(again), length if clear else None
    yield from swinging_rate(view, past.rates)
    if mean is None and chance is None:
        return
    shown = ("policy/kl/period/p", chance) if mean is None else ("grad/align/successive_cos", mean)
    words = "successive gradients have pointed in opposite directions, so updates undo each other: their cosine averages {}"
    if past.periodic:
        words = "the KL divergence has oscillated with a period of {} updates, so updates undo each other"
    yield Finding(max(past.opposed, past.periodic), *shown).says(words, (length or 0.0) if past.periodic else past.mean)


def within_episode(view: View, updates: float, episode_steps: float) -> bool:
    """True if these updates take no more steps per environment than an episode; False if either is not known."""
    environments, steps = view.facts.num_envs, view.rollout_steps
    if not environments or environments < 0 or steps <= 0:
        return False
    return updates * steps / environments <= (episode_steps or view.facts.horizon or 0)


def swinging_rate(view: View, rates: list[float]) -> Iterator[Finding]:
    """A learning rate that goes up and down without following the KL, as adaptive schedules do in healthy runs."""
    rate = view.get("opt/lr")
    if not rate or view.facts.rate_follows_kl:
        return
    rates.append(rate)
    del rates[:-SWING_UPDATES]
    factor = view.limits[RATE_SWING]
    swings = rate_swings(rates, factor)
    words = f"the learning rate has oscillated: {swings} times by a factor of {{}} or more within {len(rates)} updates"
    advice = "Correct the schedule of the learning rate: it should change in small steps, or follow the KL divergence."
    finding = Finding(hard(swings >= MIN_SWINGS), "opt/lr", rate, instance="rate", claim=True)
    yield finding.with_advice(lambda: advice).says(words, factor)


def rate_swings(rates: Sequence[float], factor: float) -> int:
    """Number of rises and falls of a series by at least that factor, from turning point to turning point."""
    swings, turn, way = 0, rates[0], 0
    for rate in rates:
        if (rate - turn) * way > 0:
            turn = rate
        elif max(rate / turn, turn / rate) >= factor:
            swings, way, turn = swings + 1, 1 if rate > turn else -1, rate
    return swings


@reading("opt/snr_share")
def noise_dominated(view: View, value: float) -> Iterator[Finding]:
    """A gradient without signal."""
    yield Finding(hard(value <= 0), "opt/snr_share", value, 0.0).says(
        "gradients have been noise, so updates follow chance: the estimated share of signal in their squared norm is {} (0 or less: none)",
        value,
    )


DRIFT_SIGMAS = above("drift_sigmas", 6.0, "log drift of the gradient norm, in its own standard deviations")
DRIFT_MIN = above("drift_min", 1.6, "log drift of the gradient norm, nats")


@dataclass(slots=True)
class DriftJudge:
    """Gradient norms that move away from their average, up or down; or a learning rate that creeps up beyond the setting.

    The average is an exponential moving average of log10 with β = 0.95, and an arithmetic mean at first.
    """

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    rejected: int = 0
    rises: int = 0

    def __call__(self, view: View) -> Iterator[Finding]:
        yield from self.creeping_rate(view)
        key, limits = "grad/global/norm_preclip", view.limits
        value = view.get(key)
        if value is None or value <= 0:
            return
        x = log10(value)
        if self.count >= 20:
            off = x - self.mean
            sigma = max(self.variance**0.5, 0.05)
            new = abs(view.z(key) or 0.0) > limits.low(Z)
            wrong = new and abs(off) > limits[DRIFT_SIGMAS] * sigma and abs(off) > limits[DRIFT_MIN] / 2.302585
            wrong = wrong and (off > 0 or self.unexplained_fall(view, -off))
            words = "the gradient's norm has been {}, far from its average of {}, so the scale of the loss or of the weights has changed"
            yield Finding(hard(wrong), key, value, adaptive=True).says(words, value, power(self.mean))
            if wrong and self.rejected < MAX_REJECTED:
                self.rejected += 1
                return
        self.rejected = 0
        self.count += 1
        weight = max(0.05, 1.0 / self.count)
        off = x - self.mean if self.count > 1 else 0.0
        self.mean = (self.mean if self.count > 1 else x) + weight * off
        self.variance = (1 - weight) * (self.variance + weight * off * off)

    def unexplained_fall(self, view: View, decades: float) -> bool:
        """True if the norm has fallen by more than the critic's error explains while the return has not risen.

        Gradients of a solved task fall because there is little left to learn, and are almost 0 while all advantages are.
        """
        if view.get("adv/norm/std") == 0:
            return False
        return view.course.risen is not True and decades - 0.5 * view.baselines.fallen("loss/value") > MIN_FALL

    def creeping_rate(self, view: View) -> Iterator[Finding]:
        """A learning rate that has risen for a long time beyond the setting without following the KL."""
        rate, was = view.get("opt/lr"), view.previous.get("opt/lr")
        asked = view.facts.learning_rate
        if rate is None or was is None or not asked or view.facts.rate_follows_kl:
            return
        self.rises = self.rises + 1 if rate > was else 0
        limit = view.limits[RATE_GROWN] * asked
        words = "the learning rate has crept up to {}, {:x} the setting of {}"
        finding = Finding(hard(self.rises >= MIN_RISES and rate > limit), "opt/lr", rate, limit, instance="rate")
        yield finding.says(words, rate, rate / asked, asked)


CONCENTRATION = below("concentration", 0.2, "normalised entropy of the gradient over parameters")
CONCENTRATION_FALL = above("concentration_fall", 0.5, "share of that entropy lost relative to its median")


@reading("grad/concentration/entropy")
def concentration(view: View, value: float) -> Iterator[Finding]:
    """A gradient that has become concentrated in a few parameters."""
    key, limits = "grad/concentration/entropy", view.limits
    median = view.baselines.median(key)
    if median is not None:
        wrong = value < limits[CONCENTRATION] and 1 - value / median > limits[CONCENTRATION_FALL]
        finding = Finding(hard(wrong), key, value, limits[CONCENTRATION], z=view.z(key))
        yield finding.says(
            "the gradient is concentrated in a few parameters, so the others hardly learn: its normalised entropy is {}{}",
            *(value, partial(view.usual, key)),
        )


RULES = (
    gradient_alarm("grad/oscillation", effect=True, sampled=True, warmup=20, n_on=2, n_off=2, debug_updates=3)
    .reads("grad/align/successive_cos", "{key}/period/p", "opt/lr")
    .needs(("grad/align/successive_cos", "policy/kl/period/p"), ("grad/align/successive_cos", "policy/kl/period/length"))
    .says(
        "Updates undo each other.",
        "Lower the learning rate, use larger batches or fewer epochs.",
        "The same period in two tests ten updates apart: a single test at p < 0.001 raises false alarms on autocorrelated series. Cosines "
        "of noise vary by 0.5 if few steps contribute to a gradient, so a few of a hundred means of ten are below -0.3.",
    )
    .shows("grad/align/*", "policy/kl/period/*", "opt/lr")
    .judged(StateJudge(oscillation, Oscillations()), OSCILLATION, OPPOSED_ERRORS, RATE_SWING, PERIOD_P),
    gradient_alarm("grad/noise_dominated", effect=True, sampled=True, default_off=True, warmup=50, n_on=20, n_off=10, debug_updates=2)
    .reads("opt/snr_share", "grad/gns/noise_dominated", "grad/gns/b_simple")
    .says(
        "The gradient is mostly noise.",
        "Use larger batches: more environments or more steps per update.",
        "biased with several epochs per rollout, therefore off by default; McCandlish 2018",
    )
    .shows("grad/gns/*", "opt/snr_share")
    .judged(noise_dominated),
    gradient_alarm("grad/drift", effect=True, relative=True, warmup=20, n_on=5, debug_updates=2)
    .reads("grad/global/norm_preclip", "opt/lr")
    .follows("grad/global/norm_preclip", "loss/value")
    .says(
        "Gradient norms have moved far from their average.",
        "Look at the learning-rate schedule, at weight growth and at the scale of returns.",
        "A norm that falls to a fifth is usual near the end of a run; five updates beyond a factor of five are not.",
    )
    .shows("grad/*/norm_preclip", "opt/lr", "opt/weight_growth", "ret/std")
    .judged(DriftJudge(), DRIFT_SIGMAS, DRIFT_MIN, RATE_GROWN),
    gradient_alarm("grad/concentration", effect=True, relative=True, sampled=True, warmup=10, n_on=3, debug_updates=2)
    .reads("grad/concentration/entropy", "grad/concentration/layer_entropy", "grad/concentration/participation")
    .follows("grad/concentration/entropy")
    .says(
        "The gradient is concentrated in a few parameters.",
        "Look at the largest layer in the alarm's evidence; check the scale of inputs and the initialisation of the heads.",
        "An entropy of 0.1 over layers is usual if one head dominates, so half of the usual entropy must be lost.",
    )
    .shows("grad/concentration/*", "grad/layer/*/norm")
    .judged(concentration, CONCENTRATION, CONCENTRATION_FALL),
)
