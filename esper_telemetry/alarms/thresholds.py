"""All bounds of the detectors in one frozen dataclass: data with a name, overridable one by one, scalable all together.

Sources stand with the rules that read them. A bound is of one of three kinds: values `above` it speak for an alarm, values `below` it do,
or it is no bound but a number of updates and the like, which no multiplier changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from esper_telemetry.alarms.kinds import ALARMS
from esper_telemetry.core.suggestion import did_you_mean

TYPES = frozenset(alarm.type for alarm in ALARMS)
ON, OFF = "on", "off"


def above(default: float, meaning: str) -> Any:
    """A bound that values have to exceed."""
    return field(default=default, metadata={"direction": 1, "meaning": meaning})


def below(default: float, meaning: str) -> Any:
    """A bound that values have to fall below."""
    return field(default=default, metadata={"direction": -1, "meaning": meaning})


def count(default: float, meaning: str) -> Any:
    """A number that is no bound."""
    return field(default=default, metadata={"direction": 0, "meaning": meaning})


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Bounds of all rules; `low` and `high` are the ends of ramps of severity, of which half raises an alarm.

    Attributes:
        off: types of alarm that are not raised.
    """

    off: frozenset[str] = frozenset({"grad/noise_dominated"})

    z_low: float = above(4.0, "robust standard scores where the severity of an outlier begins")
    z_high: float = above(12.0, "robust standard scores where it ends")
    z_sudden_low: float = above(6.0, "the same for a single update, nothing before it being unusual")
    z_sudden_high: float = above(18.0, "end of that ramp")

    beyond_low: float = above(0.5, "decades above all values before, where the severity of an outlier begins")
    beyond_high: float = above(2.5, "end of that ramp")

    ratio_init_factor: float = above(1.0, "times the bounds of the compute precision, for integrity/ratio_init")
    gae_identity: float = above(1e-4, "relative error of advantages + values = returns")
    adv_norm: float = above(0.05, "distance of normalised advantages from mean 0 and standard deviation 1")
    adv_norm_lasting: float = above(0.01, "the same on average over five updates, where whole rollouts are normalised")
    rows_repeated: float = above(0.45, "share of a pass's rows that come again: drawing with replacement gives 0.37")
    buffer_age: float = count(0, "updates that data may be old")

    reward_constant_transitions: float = count(1000, "transitions with the same reward, at least")
    reward_never_transitions: float = count(30_000, "transitions without any reward from the start, at least")
    scale_low: float = above(0.6, "decades by which rewards change their scale, where the severity begins")
    scale_high: float = above(1.0, "end of that ramp")
    return_scale_low: float = above(1.0, "decades by which returns change theirs, mean and spread, at once")
    return_scale_high: float = above(2.0, "end of that ramp")
    normalizer_clip_low: float = above(0.02, "share of entries that a normaliser cuts off")
    normalizer_clip_high: float = above(0.1, "end of that ramp")
    normalizer_drift_low: float = above(0.3, "drift of a normaliser over ten updates, in standard deviations")
    normalizer_drift_high: float = above(1.0, "end of that ramp")
    participation: float = below(0.02, "share of the transitions that carry the learning signal")
    advantage_outlier: float = above(40.0, "largest advantage, in standard deviations")

    vanish_low: float = above(3.0, "decades by which a layer's gradient falls below its median")
    vanish_high: float = above(7.0, "end of that ramp")
    vanish_share: float = below(1e-5, "gradient of a layer in clip limits, with that")
    starved_z: float = above(6.0, "robust z of the critic's gradient over the actor's")
    starved_share: float = above(0.95, "critic's share of the squared gradient, with that")
    starved_effective_z: float = above(8.0, "robust z by which the actor's clipped gradient falls")
    starved_floor: float = below(1e-5, "actor's clipped gradient, which Adam's epsilon swallows, with that share")
    interference_low: float = above(0.2, "negative average cosine of the two losses' gradients")
    interference_high: float = above(0.7, "end of that ramp")
    clip_coef: float = below(0.01, "what clipping leaves of the gradient")
    clip_fall: float = above(1.0, "decades by which that fell below its median")
    oscillation: float = above(0.3, "negative average cosine of successive gradients")
    rate_swing: float = above(4.0, "factor between turning points of the learning rate")
    period_p: float = below(1e-6, "chance of an oscillation of the KL as strong as the one seen")
    drift_sigmas: float = above(6.0, "log drift of the gradient norm, in its own standard deviations")
    drift_min: float = above(1.6, "log drift of the gradient norm, nats")
    rate_jump: float = above(4.0, "learning rate over that of the update before, where it exceeds what was set")
    rate_grown: float = above(1.15, "learning rate over the one that was set, after rising for long")
    concentration: float = below(0.2, "entropy of the gradient over parameters, of its largest")
    concentration_fall: float = above(0.5, "share of that entropy which is lost against the median")
    update_to_weight_low: float = above(0.03, "size of one optimizer step relative to the weights")
    update_to_weight_high: float = above(0.3, "end of that ramp")
    memory_updates: float = below(1.0, "updates that Adam's memory of squared gradients lasts, where rewards are rare")
    stable_rms_low: float = above(5.0, "gradient over Adam's memory of it, root mean square")
    stable_rms_high: float = above(20.0, "end of that ramp")
    stable_rms_sudden_low: float = above(10.0, "the same at a single look, the one before it being smaller")
    stable_rms_sudden_high: float = above(40.0, "end of that ramp")

    dormant_low: float = above(0.35, "share of units that respond to nothing")
    dormant_high: float = above(0.75, "end of that ramp")
    rank_fall: float = below(0.33, "effective rank relative to its median")
    norm_growth_low: float = above(4.0, "norm of the features relative to what it was")
    norm_growth_high: float = above(16.0, "end of that ramp")

    forget_closed_low: float = above(0.5, "share of forget gates below 0.1")
    forget_closed_high: float = above(0.9, "end of that ramp")
    forget_open_low: float = above(0.8, "share of forget gates above 0.9")
    forget_open_high: float = above(1.0, "end of that ramp")
    adds_up_growth: float = above(1.3, "growth of the cell state over an episode, where nothing is forgotten")
    adds_up_jump: float = above(1.5, "size of the cell state relative to the update before, with that")
    timescale: float = below(1.2, "median memory of a unit, steps")
    cell_absmax: float = above(50.0, "largest cell state, the middle of a ramp from half to twice of it")
    cell_of_age: float = above(0.5, "the same relative to the longest age, which it cannot exceed, with that")
    cell_growth_low: float = above(4.0, "growth of the cell state over an episode")
    cell_growth_high: float = above(12.0, "end of that ramp")
    stale_low: float = above(1.0, "relative distance of stored from recomputed states after the update")
    stale_high: float = above(3.0, "end of that ramp")
    stale_first: float = above(1e-3, "the same before the first step, where it must be nothing")

    kl_spike_low: float = above(0.03, "KL divergence of an update, nats")
    kl_spike_high: float = above(0.3, "end of that ramp")
    kl_sudden_low: float = above(0.1, "the same for a single update, the one before it being smaller")
    kl_sudden_high: float = above(1.0, "end of that ramp")
    kl_moved: float = above(
        0.25, "share of the samples outside of the trust region, from which on the KL counts in full"
    )
    kl_few: float = count(1 / 3, "what it counts below that, where a few samples make it up")
    passes: float = above(1.5, "optimizer steps of an update over the most of any before")
    kl_passes_low: float = above(1.0, "the KL over its median, where updates make many more steps than before")
    kl_passes_high: float = above(4.0, "end of that ramp")
    ess_low: float = above(0.4, "share of the effective samples that is lost in the worst minibatch")
    ess_high: float = above(0.9, "end of that ramp")
    ess_sudden_low: float = above(0.8, "the same for a single update")
    ess_sudden_high: float = above(1.0, "end of that ramp")
    ratio_spread_low: float = above(1.5, "99th percentile of the probability ratios, with either")
    ratio_spread_high: float = above(6.0, "end of that ramp")
    ratio_collapse_low: float = below(0.1, "first percentile of the probability ratios")
    ratio_collapse_high: float = below(0.02, "end of that ramp")
    clip_frac_low: float = above(0.2, "share of the samples outside of the trust region")
    clip_frac_high: float = above(0.5, "end of that ramp")
    kl_stall: float = below(1e-10, "largest KL of a minibatch in an update that did not move the policy")
    entropy_collapse: float = below(0.1, "normalised entropy of the policy")
    entropy_clear: float = below(0.15, "from which on it has recovered")
    entropy_marginal: float = below(0.5, "normalised entropy of its actions over all states")
    entropy_crash_low: float = above(0.1, "share of the entropy that is lost per update, early in the run")
    entropy_crash_high: float = above(0.3, "end of that ramp")
    entropy_plunge_low: float = above(
        0.3, "fall of the logarithm of the entropy per update, over the last three, early in the run"
    )
    entropy_plunge_high: float = above(0.9, "end of that ramp")
    entropy_explosion: float = below(0.02, "distance of the normalised entropy from 1, late in the run")
    entropy_was: float = below(0.9, "normalised entropy that it must have had before, to have risen")
    entropy_starved: float = below(0.01, "what clipping leaves of the gradient, where it stays random from the start")
    action_shift_low: float = above(0.05, "change of the mix of actions between rollouts, Jensen-Shannon")
    action_shift_high: float = above(0.25, "end of that ramp")
    wrong_direction: float = below(0.0, "gain of the update's own objective")
    wrong_direction_least: float = above(0.06, "the same correlation on average over two updates")
    wrong_direction_correlation: float = above(
        0.2, "negative correlation of advantages and ratios that needs no second update"
    )

    fit_was: float = above(0.3, "R² that the critic once had")
    fit_now: float = below(0.0, "R² from which on it has lost it")
    loss_recent_low: float = above(
        1.5, "critic's loss over the largest of the last five updates, where rewards are larger than ever"
    )
    loss_recent_high: float = above(6.0, "end of that ramp")
    loss_norm_low: float = above(1.0, "critic's error over the variance of returns")
    loss_norm_high: float = above(25.0, "end of that ramp")
    bias_low: float = above(0.5, "critic's mean error, in standard deviations of the returns")
    bias_high: float = above(1.5, "end of that ramp")
    bias_share: float = above(0.3, "critic's mean error relative to the size of returns, with that")

    seed_exploding: float = above(0.75, "severity of the largest gradient of a seed; 0.75 is 32 times its clip limit")
    seed_exploding_frac: float = above(0.05, "share of the seeds that learn whose gradients are beyond ten clip limits")
    seed_vanishing: float = above(0.5, "severity of the vanishing of seeds' gradients, on average")
    seed_dormant: float = above(0.6, "share of the seeds that learn which the loss hardly reaches")
    seed_score_drop: float = above(0.05, "accuracy by which hosts are worth less in the end than they were")

    episodes_updates: float = count(20, "updates without the end of an episode, at least")
    episodes_factor: float = count(5, "times the longest such gap so far, at least")
    return_drop: float = above(0.6, "share of what was learned that is lost")
    overhead: float = above(0.1, "telemetry's share of the training time")
    storm: float = count(20, "alarms in a hundred updates")

    @classmethod
    def parse(cls, assignments: Iterable[str], before: Self | None = None) -> Self:
        """Bounds with those changed that `NAME=VALUE` say; a type of alarm is a name too, its value `on` or `off`.

        Args:
            assignments: what to change.
            before: bounds to begin with; the usual ones by default.

        Raises ValueError, in a sentence with the offending text.
        """
        changes: dict[str, str] = {}
        for text in assignments:
            name, found, value = text.partition("=")
            if not found:
                raise ValueError(f"a threshold is given as NAME=VALUE, got {text!r}")
            changes[name.strip()] = value.strip()
        return (before or cls()).with_changes(changes)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """Those by which a run with these facts is judged: what it says of its own, as far as it makes sense here."""
        told = facts.get("thresholds")
        found = cls()
        for name, value in told.items() if isinstance(told, Mapping) else ():
            with suppress(ValueError):  # a journal of another version, or one that somebody has edited
                found = found.with_changes({name: value})
        return found

    def changes(self) -> dict[str, float | str]:
        """What differs from the usual bounds, as plain data that `with_changes` takes."""
        usual = type(self)()
        bounds = {name: getattr(self, name) for name in NAMES if getattr(self, name) != getattr(usual, name)}
        switched = {name: OFF if name in self.off else ON for name in sorted(self.off ^ usual.off)}
        return {**bounds, **switched}

    def with_changes(self, changes: Mapping[str, float | str | bool]) -> Self:
        """The same with other values by name; raises ValueError for an unknown name or a value that is no number."""
        off, numbers = set(self.off), {}
        for name, value in changes.items():
            if name in TYPES:
                (off.discard if _switch(name, value) else off.add)(name)
            elif name in NAMES:
                numbers[name] = _number(name, value)
            else:
                raise ValueError(f"there is no threshold {name!r}{did_you_mean(name, [*NAMES, *TYPES])}")
        return replace(self, off=frozenset(off), **numbers)

    def scaled(self, kappa: float) -> Self:
        """All bounds `kappa` times as lenient, for curves of recall over false alarms; raises ValueError unless it is positive."""
        if not 0 < kappa < math.inf:
            raise ValueError(f"kappa must be positive and finite, got {kappa}")
        changes = {name: getattr(self, name) * kappa**direction for name, direction in NAMES.items() if direction}
        return replace(self, **changes)


NAMES: Mapping[str, int] = {
    item.name: item.metadata["direction"] for item in fields(Thresholds) if "direction" in item.metadata
}
"""Every bound, and which way it points: 1 above, -1 below, 0 neither."""

MEANINGS: Mapping[str, str] = {item.name: item.metadata["meaning"] for item in fields(Thresholds) if item.metadata}
"""Every bound in words."""


def _number(name: str, value: float | str | bool) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"threshold {name} must be a finite number, got {value!r}")
    return number


def _switch(name: str, value: float | str | bool) -> bool:
    """Whether an alarm is on."""
    if isinstance(value, bool):
        return value
    if value not in (ON, OFF):
        raise ValueError(f"alarm {name} can be set to on or off, got {value!r}")
    return value == ON
