"""Records of a healthy run, and functions that spoil them."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from esper_telemetry.alarms import Detectors, Thresholds, Verdict
from esper_telemetry.core.record import Alarm, AlarmEvent, Axes, Record

STEPS, BATCH = 16, 512
Values = dict[str, float]

FACTS: Mapping[str, Any] = {
    "level": "normal",
    "total_steps": 100 * BATCH,
    "num_envs": 16,
    "num_steps": 32,
    "horizon": 10,
    "precision": "fp32",
    "policy": "lstm",
    "heads": {"op": "categorical", "arg": "categorical"},
    "groups": {"actor": ["heads.op.weight"], "shared": ["encoder.weight", "core.weight"], "critic": ["value.weight"]},
    "max_grad_norm": 0.5,
    "gamma": 0.99,
    "normalize_advantages": True,
    "normalize_observations": True,
}

NOISY: Mapping[str, float] = {
    "policy/kl": 0.008,
    "policy/kl_max": 0.02,
    "policy/clip_frac": 0.08,
    "policy/surrogate_gain": 0.03,
    "policy/entropy_norm": 0.6,
    "policy/entropy": 0.8,
    "loss/value": 0.5,
    "ret/std": 2.0,
    "ret/mean": 5.0,
    "reward/std": 0.4,
    "reward/mean": 0.5,
    "adv/raw/std": 0.5,
    "grad/global/norm_preclip": 0.6,
    "grad/global/norm_preclip_max": 1.0,
    "grad/actor/norm_preclip": 0.3,
    "grad/shared/norm_preclip": 0.4,
    "grad/critic/norm_preclip": 0.3,
    "grad/layer/heads_op_weight/norm": 0.2,
    "grad/layer/encoder_weight/norm": 0.2,
    "grad/layer/core_weight/norm": 0.3,
    "grad/layer/value_weight/norm": 0.3,
    "grad/head/op/norm": 0.2,
    "grad/interference/log_ratio": 0.1,
    "grad/interference/actor_effective": 0.2,
    "grad/interference/critic_share": 0.6,
    "grad/clip/coef": 0.6,
    "lstm/c/rms": 2.0,
    "lstm/c/absmax": 6.0,
    "value/loss_norm": 0.2,
    "value/r2": 0.8,
    "value/explained_variance": 0.8,
    "episode/return_mean": 5.0,
    "episode/return_mean_100": 5.0,
    "obs/rms_max": 1.5,
    "obs/rms_median": 0.9,
    "policy/head/op/std/mean": 0.8,
    "lstm/h/rms": 0.2,
}
"""Varied by a few per cent from update to update."""

FIXED: Mapping[str, float] = {
    "numerics/nonfinite": 0.0,
    "integrity/ratio_init": 2e-7,
    "integrity/gae_identity": 5e-8,
    "integrity/adv_norm": 2e-4,
    "integrity/mask_violation": 0.0,
    "buffer/age_updates": 0.0,
    "integrity/rows_repeated": 0.0,
    "adv/norm/mean": 0.0,
    "adv/norm/std": 1.0,
    "adv/participation": 0.6,
    "adv/raw/absmax_over_std": 4.0,
    "adv/std_floored": 0.0,
    "reward/absmax": 1.3,
    "norm/obs/drift": 0.02,
    "policy/ess_frac_min": 0.95,
    "policy/ratio/p01": 0.7,
    "policy/ratio/max": 1.6,
    "policy/ratio/std": 0.1,
    "policy/entropy_marginal_norm": 0.95,
    "policy/entropy_rate": -0.01,
    "policy/action_shift_js": 0.004,
    "policy/head/op/decision_frac": 1.0,
    "value/bias": 0.05,
    "value/bias_over_std": 0.03,
    "episode/count": 50.0,
    "episode/truncated_frac": 0.0,
    "episode/terminated_length_min": 10.0,
    "episode/terminated_length_max": 10.0,
    "value/terminal_err": 0.3,
    "obs/constant_frac": 0.0,
    "obs/identical_frac": 0.0,
    "obs/still_frac": 0.1,
    "obs/rms_ratio": 4.0,
    "obs/offset": 0.0,
    "norm/obs/clip_frac": 0.001,
    "policy/head/op/bound_frac": 0.1,
    "policy/head/op/std_of_range": 0.8,
    "policy/head/op/range_used": 0.7,
    "policy/head/op/empty_range_frac": 0.0,
    "policy/head/op/entropy_norm": 0.6,
    "policy/head/op/entropy_marginal_norm": 0.95,
    "adv/minibatch_rows": 128.0,
    "grad/actor/severity_explode": 0.0,
    "grad/health": 0.9,
    "episode/length_mean": 10.0,
    "episode/return_std": 1.0,
    "reward/zero_frac": 0.4,
    "opt/beta2": 0.999,
    "loss/entropy_coef": 0.01,
    "loss/entropy": -0.8,
    "opt/lr": 2.5e-3,
    "lstm/reset_rate": 0.1,
    "lstm/c_growth": 0.5,
    "perf/telemetry_frac": 0.01,
    "perf/telemetry_ms": 1.0,
    "telemetry/errors": 0.0,
    "env/rollbacks": 0.0,
    "telemetry/dropped": 0.0,
    "telemetry/sample_every": 1.0,
    "grad/interference/cos": 0.1,
    "grad/align/successive_cos": 0.5,
    "grad/concentration/entropy": 0.8,
    "opt/update_to_weight": 4e-3,
    "opt/update_to_weight/encoder_weight": 4e-3,
    "opt/stable_rms": 1.2,
    "opt/state_reset": 0.0,
    "opt/snr_share": 0.1,
    "repr/dormant_frac": 0.02,
    "repr/effective_rank": 8.0,
    "repr/feature_norm": 3.0,
    "lstm/gate/f/mean": 0.6,
    "lstm/gate/f/sat_lo": 0.02,
    "lstm/gate/f/sat_hi": 0.2,
    "lstm/gate/i/sat_lo": 0.01,
    "lstm/gate/o/sat_lo": 0.01,
    "lstm/timescale/median": 4.0,
    "lstm/staleness": 0.15,
    "lstm/staleness_first": 1e-7,
    "seed/exploding": 0.2,
    "seed/exploding_sustained": 0.1,
    "seed/exploding_frac": 0.001,
    "seed/vanishing": 0.0,
    "seed/cause/dormant": 0.1,
    "seed/germinated": 30.0,
    "seed/gate/g2/pass_frac": 0.4,
    "env/score": 0.8,
}


def values(update: int) -> Values:
    """Values of one update; they are the same in every run."""
    noise = random.Random(update)
    return {**{key: middle * noise.uniform(0.93, 1.07) for key, middle in NOISY.items()}, **FIXED}


def record(update: int, metrics: Values, *, partial: bool = False) -> Record:
    return Record(update, Axes(update, update * BATCH, update * STEPS, 1e9 + update), metrics, partial=partial)


Spoil = Callable[[Values, int], None]
"""Changes the values of an update, given the number of updates since the first spoiled one."""


def run(updates: int, spoil: Spoil | None = None, *, since: int = 30) -> list[Record]:
    """Records of a healthy run that `spoil` changes from update `since` on."""
    made = []
    for update in range(1, updates + 1):
        metrics = values(update)
        if spoil is not None and update >= since:
            spoil(metrics, update - since)
        made.append(record(update, metrics))
    return made


def judged(records: Iterable[Record], facts: Mapping[str, Any] = FACTS, thresholds: Thresholds | None = None) -> list[Verdict]:
    detectors = Detectors(facts, thresholds or Thresholds())
    return [detectors.step(entry) for entry in records]


def alarms(verdicts: Iterable[Verdict], event: AlarmEvent | None = None) -> list[Alarm]:
    """Return the alarms of the verdicts, for one event or for all."""
    return [alarm for verdict in verdicts for alarm in verdict.alarms if event in (None, alarm.event)]


def raised(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Types of alarm with the update in which each was first raised."""
    updates: dict[str, int] = {}
    for alarm in alarms(verdicts, AlarmEvent.RAISE):
        updates.setdefault(alarm.type, alarm.axes.update)
    return updates


Number = float | None | Callable[[int], float | None]
"""A value, or a function of the number of updates since the first spoiled one; None removes the key."""


def set_to(changes: Mapping[str, Number]) -> Spoil:
    def spoil(metrics: Values, ago: int) -> None:
        for key, value in changes.items():
            now = value(ago) if callable(value) else value
            if now is None:
                metrics.pop(key, None)
            else:
                metrics[key] = now

    return spoil


def multiplied(factors: Mapping[str, float | Callable[[int], float]]) -> Spoil:
    def spoil(metrics: Values, ago: int) -> None:
        for key, factor in factors.items():
            metrics[key] *= factor(ago) if callable(factor) else factor

    return spoil


def both(*spoils: Spoil) -> Spoil:
    def spoil(metrics: Values, ago: int) -> None:
        for one in spoils:
            one(metrics, ago)

    return spoil


def later(delay: int, spoil: Spoil) -> Spoil:
    """The same changes, begun that many updates later."""
    return lambda metrics, ago: spoil(metrics, ago - delay) if ago >= delay else None


def returns(first: float, last: float, updates: int = 30) -> Spoil:
    """The return moves from one level to another within that many updates."""
    return set_to({"episode/return_mean": lambda ago: first + (last - first) * min(1.0, ago / updates)})


def with_steps(records: Iterable[Record], *, env: int | None = None, gradient: int | None = None) -> list[Record]:
    """The same records with that many steps of the environments or of the optimizer per update."""
    counts = {name: count for name, count in (("env_step", env), ("gradient_step", gradient)) if count is not None}
    return [replace(one, axes=replace(one.axes, **{name: count * one.seq for name, count in counts.items()})) for one in records]
