"""Feedback of an epoch to the controller: its reward, a weighted sum of components, and its observation, a named and versioned row.

Both need the contributions of seeds, which are measured by switching subsets of them off. The event of a step has the same state.

Severities of a seed's gradient are from 0 to 1 and continuous, so that the controller observes a trend before a limit is reached; 0.5 is
the limit of a flag. The controller observes the gradient of the whole seed. Telemetry measures each parameter, so that diverging layers
show both signs at once. Causes of a weak gradient compare each seed's last epoch with its own history.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import factorial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_telemetry.lab.morphogenesis.kinds import BLUEPRINTS, Op, Stage
from esper_telemetry.lab.morphogenesis.slots import CURVES, EFFECTIVE, LEARNING, POTENTIALS, Slots, among, look_up
from esper_telemetry.lab.morphogenesis.training import MAX_GRADIENT_NORM

EXPLODING_DECADES = (0.0, 2.0)
VANISHING_DECADES = (-3.0, -7.0)
"""Decades of the norm, relative to the clip limit, between which the severity rises: half at ten times and at a 100,000th of the limit."""

SUSTAINED_EPOCHS = 3
"""Epochs in a row that a gradient must exceed its limit. The gradient of a healthy seed exceeds ten clip limits in one or two."""

INTENSITY_DECAY = 0.7
"""Decay per epoch of the running mean of the intensity ratio."""


def _ramp(norm: Tensor, ends: tuple[float, float]) -> Tensor:
    decades = (norm.clamp(min=1e-30) / MAX_GRADIENT_NORM).log10()
    return ((decades - ends[0]) / (ends[1] - ends[0])).clamp(0, 1)


def exploding(peak: Tensor) -> Tensor:
    """Severity of the largest norm before clipping; 1 if it is not finite."""
    return torch.where(peak.isfinite(), _ramp(peak, EXPLODING_DECADES), 1.0)


def vanishing(norm: Tensor) -> Tensor:
    """Severity of the mean norm; 0 if it is not finite."""
    return torch.where(norm.isfinite(), _ramp(norm, VANISHING_DECADES), 0.0)


def tensor_health(norm: Tensor, peak: Tensor, present: Tensor) -> dict[str, Tensor]:
    """Return the health of single parameters of the seeds, [N, S] each; for a seed that does not learn, severities are NaN and indices -1.

    These are the largest severity `exploding` and the index of its parameter, `strongest`, and the same for the parameter with the smallest
    gradient, `vanishing` and `weakest`.

    Args:
        norm, peak: [N, S, parameters], mean and largest norm of an epoch.
        present: [N, S, parameters], bool: the seed learns and has this parameter.
    """
    up, strongest = exploding(peak).masked_fill(~present, -1.0).max(-1)
    down, weakest = vanishing(norm).masked_fill(~present, -1.0).max(-1)
    learns = present.any(-1)
    severities = {"exploding": up, "vanishing": down}
    places = {"strongest": strongest, "weakest": weakest}
    return {
        **{name: torch.where(learns, severity, torch.nan) for name, severity in severities.items()},
        **{name: torch.where(learns, place, -1) for name, place in places.items()},
    }


CAUSES = ("ok", "disconnected", "dormant", "saturated", "host_fast", "indeterminate", "nonfinite")
"""Not weak; no gradient reaches the seed; little reaches it; it is lost inside the seed; the host's is unusually large; unknown; a
gradient of the seed or its host is NaN or infinite."""

LOW_INTENSITY_RATIO = 0.01
"""Intensity ratio below which a gradient is weak."""

UNUSUAL_Z, MIN_SPREAD_DECADES, MIN_HISTORY_EPOCHS, HISTORY_DECAY = 2.0, 0.15, 4, 0.8
"""Z-score that is unusual, smallest standard deviation in decades, epochs before causes are given, and decay of the history per epoch."""


class CauseHistory(NamedTuple):
    """Running mean and mean square [4, N, S] in decades, of seed, host, upstream and gain; and epochs counted [N, S]."""

    mean: Tensor
    square: Tensor
    epochs: Tensor

    @staticmethod
    def fresh(envs: int, slots: int, device: torch.device) -> CauseHistory:
        """Return an empty history."""
        empty = torch.zeros(4, envs, slots, device=device)
        return CauseHistory(empty, empty, empty[0])


def diagnose(
    history: CauseHistory, ratio: Tensor, seed: Tensor, host: Tensor, upstream: Tensor, *, counted: Tensor, alpha: Tensor
) -> tuple[CauseHistory, Tensor]:
    """Return the history with this epoch, and each seed's cause [N, S], an index into `CAUSES`; -1 if it is not counted.

    Args:
        history: history of earlier epochs.
        ratio: [N, S], intensity ratio.
        seed, host, upstream: [N, S], gradient per root of the parameter count of seed and host, and the norm at the seed's effect.
        counted: [N, S], bool: seeds that train; the history of others, and of seeds without finite gradients, restarts.
        alpha: [N, S], weight of the effect.
    """
    finite = (seed + host + upstream).isfinite()
    now = torch.stack([seed, host, upstream, seed / upstream.clamp(min=1e-30)]).nan_to_num().clamp(1e-30, 1e30).log10()
    spread = (history.square - history.mean.square()).clamp(min=0).sqrt().clamp(min=MIN_SPREAD_DECADES)
    z_seed, z_host, z_upstream, z_gain = (now - history.mean) / spread
    conditions = [
        (~finite, "nonfinite"),
        (ratio >= LOW_INTENSITY_RATIO, "ok"),
        ((upstream == 0) & (alpha > 0), "disconnected"),
        (upstream == 0, "dormant"),
        (seed == 0, "saturated"),
        (history.epochs < MIN_HISTORY_EPOCHS, "indeterminate"),
        (z_upstream <= -UNUSUAL_Z, "dormant"),
        (z_gain <= -UNUSUAL_Z, "saturated"),
        ((z_seed > -UNUSUAL_Z) & (z_host >= UNUSUAL_Z), "host_fast"),
    ]
    cause = torch.full_like(ratio, CAUSES.index("indeterminate"), dtype=torch.int64)
    for condition, name in reversed(conditions):
        cause = torch.where(condition, CAUSES.index(name), cause)
    # a mean over all epochs at first, and over the last few later
    remembered = counted & finite
    count = torch.where(remembered, history.epochs + 1, 0.0)
    weight = torch.maximum(1 / count.clamp(min=1), torch.tensor(1 - HISTORY_DECAY, device=count.device)).expand_as(now)
    mean = torch.where(remembered, torch.lerp(history.mean, now, weight), 0.0)
    square = torch.where(remembered, torch.lerp(history.square, now.square(), weight), 0.0)
    return CauseHistory(mean, square, count), torch.where(counted, cause, -1)


AGE_POTENTIAL = (0.3, 2.0)
"""Potential per epoch in a stage, and its maximum."""

OP_COSTS: Mapping[Op, float] = {Op.GERMINATE: 0.15, Op.FOSSILIZE: 0.01, Op.PRUNE: 0.005, Op.SET_ALPHA: 0.005}
MAX_RENT = 1.5

REWARDS: Mapping[str, Mapping[str, float]] = {
    "shaped": {
        "accuracy_delta": 5.0,
        "attribution": 1.0,
        "shaping": 0.02,
        "rent": -0.01,
        "alpha_shock": -0.05,
        "op_cost": -0.1,
        "fossil_bonus": 1.0,
        "final": 5.0,
        "rollback": -2.0,
    },
    "basic": {"shaping": 0.02, "rent": -0.005, "fossil_bonus": 1.0, "final": 10.0, "rollback": -2.0},
    "sparse": {"final": 10.0},
}
"""Weights of the components by mode; other components have weight 0."""


def potentials(slots: Slots) -> Tensor:
    """Sum of the potentials of all seeds [N], by stage and by the epochs in it."""
    rate, most = AGE_POTENTIAL
    height = look_up(tuple(POTENTIALS.get(one, 0.0) for one in Stage), slots.stage)
    return (height + (height > 0) * (rate * (slots.age - 1).clamp(min=0)).clamp(max=most)).sum(1)


def shaping(before: Tensor, after: Tensor, gamma: float, *, last: Tensor) -> Tensor:
    """Potential-based shaping (Ng et al. 1999), γΦ(s') - Φ(s), [N], with Φ = 0 after the `last` step [N] of an episode.

    Its discounted sum over an episode is -Φ of the first state, so it does not change which policy is best.
    """
    return gamma * after.masked_fill(last, 0.0) - before


def attribution(slots: Slots, accuracy: Tensor) -> Tensor:
    """Sum over seeds [N] of the harmonic mean of the progress since a seed's stage began and of its contribution."""
    progress = (accuracy.unsqueeze(1) - slots.anchor).clamp(min=0)
    worth = slots.contribution.clamp(min=0)
    both = 2 * progress * worth / (progress + worth).clamp(min=1e-8)
    return torch.where(among(slots.stage, EFFECTIVE), both, 0.0).sum(1)


def rent(parameters: Tensor) -> Tensor:
    """Cost per step [N] of the parameters in seeds, relative to the host's parameters, with decreasing increments."""
    return parameters.log1p().clamp(max=MAX_RENT)


def op_cost(op: Tensor) -> Tensor:
    """Cost of operations [N]."""
    return look_up(tuple(OP_COSTS.get(one, 0.0) for one in Op), op)


MAX_SLOTS = 4
"""All 2^S subsets of the seeds are measured every epoch."""


def contributions(accuracy: Tensor) -> Tensor:
    """Accuracy lost when only one seed is off [N, S].

    Args:
        accuracy: [N, 2^S]; seed s is off if bit s of the column's number is set.
    """
    alone = [2**slot for slot in range(accuracy.shape[1].bit_length() - 1)]
    return accuracy[:, :1] - accuracy[:, alone]


def shapley_values(accuracy: Tensor) -> Tensor:
    """Shapley values of the seeds [N, S] (Shapley 1953): their sum is the accuracy with all seeds minus that without any.

    Args:
        accuracy: [N, 2^S], as above.
    """
    slots = accuracy.shape[1].bit_length() - 1
    weights = torch.zeros(2**slots, slots, dtype=torch.float64)
    for subset in range(2**slots):  # a set bit is a seed that is off
        on = slots - subset.bit_count()
        for slot in range(slots):
            others = on - (not subset >> slot & 1)
            share = factorial(others) * factorial(slots - 1 - others) / factorial(slots)
            weights[subset, slot] = -share if subset >> slot & 1 else share
    return (accuracy.double() @ weights.to(accuracy.device)).float()


VERSION = 1

HOST_FEATURES = (
    "epoch_frac",
    "train_loss",
    "train_accuracy",
    "val_loss",
    "val_accuracy",
    "val_accuracy_best",
    "val_accuracy_delta",
    "epochs_since_best",
    "host_gradient",
    "host_exploding",
    "seed_parameters",
    "learning_frac",
    "felt_frac",
    "fossilized_frac",
    *(f"last_op_{op.name.lower()}" for op in Op),
)

SEED_FEATURES = (
    *(f"stage_{stage.name.lower()}" for stage in Stage),
    "gradient_norm",
    "health",
    "vanishing",
    "exploding",
    "epochs_in_stage",
    "val_accuracy",
    "val_accuracy_delta",
    "alpha",
    "epoch_frac",
    "alpha_target",
    "alpha_moving",
    "alpha_epochs_total",
    "alpha_epochs_done",
    "alpha_epochs_left",
    "alpha_velocity",
    "alpha_curve",
)
"""The 26 features of a seed; gradient health as severities, not flags."""

SLOT_FEATURES = (*SEED_FEATURES, "contribution", *(f"blueprint_{kind.name}" for kind in BLUEPRINTS))


class HostState(NamedTuple):
    """State of the hosts, [N] each; `epoch` is the elapsed fraction of the episode, `op` an index."""

    epoch: Tensor
    train_loss: Tensor
    train_accuracy: Tensor
    val_loss: Tensor
    val_accuracy: Tensor
    best: Tensor
    delta: Tensor
    stale: Tensor
    norm: Tensor
    parameters: Tensor
    op: Tensor


def feature_names(slots: int) -> tuple[str, ...]:
    """Return the names of the entries of an observation, in order."""
    return (*HOST_FEATURES, *(f"slot_{slot}_{name}" for slot in range(slots) for name in SLOT_FEATURES))


def observe(host: HostState, slots: Slots, velocity: Tensor, horizon: int) -> Tensor:
    """Return the observations [N, features], most of them between -1 and 1; non-finite values become their limits.

    Args:
        host: state of the hosts.
        slots: state of the seeds.
        velocity: [N, S], change of the weights in the last epoch.
        horizon: epochs of an episode.
    """
    rows = torch.cat([_host(host, slots, horizon), _seeds(host, slots, velocity, horizon).flatten(1)], 1)
    return rows.nan_to_num(nan=1.0, posinf=1.0, neginf=-1.0).clamp(-1, 1)


def _host(host: HostState, slots: Slots, horizon: int) -> Tensor:
    shares = [among(slots.stage, part).float().mean(1) for part in (LEARNING, EFFECTIVE, (Stage.FOSSILIZED,))]
    columns = [
        host.epoch,
        _signed_log1p(host.train_loss) / 4,
        host.train_accuracy,
        _signed_log1p(host.val_loss) / 4,
        host.val_accuracy,
        host.best,
        host.delta * 10,
        host.stale / horizon,
        _signed_log1p(host.norm) / 7,
        exploding(host.norm),
        _signed_log1p(host.parameters) / 3,
        *shares,
    ]
    return torch.cat([torch.stack(columns, 1), F.one_hot(host.op, len(Op))], 1)


def _seeds(host: HostState, slots: Slots, velocity: Tensor, horizon: int) -> Tensor:
    """Return the features of the slots, [N, S, features]."""
    wide = torch.ones_like(slots.alpha)
    accuracy = host.val_accuracy.unsqueeze(1)
    alive = slots.life > 0
    columns = [
        slots.norm.clamp(0, 10) / 10,
        slots.health,
        slots.vanishing,
        slots.exploding,
        slots.age / horizon,
        accuracy * wide,
        torch.where(alive, (accuracy - slots.anchor) * 10, 0.0),
        slots.alpha,
        wide * host.epoch.unsqueeze(1),
        slots.target,
        slots.moving.float(),
        slots.total / horizon,
        slots.done / horizon,
        (slots.total - slots.done) / horizon,
        velocity,
        slots.curve / 4,
        torch.where(slots.contribution > -1, slots.contribution, 0.0),
    ]
    kind = F.one_hot(slots.blueprint, len(BLUEPRINTS)) * alive.unsqueeze(-1)
    return torch.cat([F.one_hot(slots.stage, len(Stage)), torch.stack(columns, -1), kind], -1)


def _signed_log1p(x: Tensor) -> Tensor:
    return x.sign() * x.abs().log1p()


LABELS = {
    "stage": tuple(stage.name.lower() for stage in Stage),
    "op": tuple(op.name.lower() for op in Op),
    "cause": CAUSES,
    "curve": CURVES,
}
