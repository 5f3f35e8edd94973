"""Faults of the optimizer and the losses (`OPTIMISATION`), and of the network (`NETWORK`): units, gates, heads, frozen parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from esper_telemetry.lab.faults.fault import (
    Fault,
    Undo,
    fill_parameter,
    first_layers,
    freeze,
    replace_config,
    replace_steps,
    shorten_adam_memory,
    undo_all,
)
from esper_telemetry.ppo.rollout import Batch
from esper_telemetry.ppo.trainer import PPO

OSCILLATION_UPDATES = 6
"""Period of an oscillating learning rate."""

DEFAULT_ENTROPY_COEF = 0.01
"""Entropy bonus for faults if the settings have none."""


def scaled_rate(trainer: PPO, dose: float) -> Undo:
    """Multiply the learning rate."""
    return replace_steps(trainer, learning_rate=lambda rate: rate * dose)


def oscillating_rate(trainer: PPO, dose: float) -> Undo:
    """Multiply the learning rate by the dose to the power of a sine of the update."""
    count = itertools.count(1)

    def rate(planned: float) -> float:
        return float(planned * dose ** math.sin(2 * math.pi * next(count) / OSCILLATION_UPDATES))

    return replace_steps(trainer, learning_rate=rate)


def leaking_rate(trainer: PPO, dose: float) -> Undo:
    """Multiply the learning rate by the dose again in every update."""
    count = itertools.count(1)
    return replace_steps(trainer, learning_rate=lambda rate: rate * dose ** next(count))


def flipped_loss(trainer: PPO, dose: float) -> Undo:
    """Negate the advantages of the policy loss."""
    loss = trainer.steps.policy_loss
    return replace_steps(trainer, policy_loss=lambda log_ratio, advantages, clip: loss(log_ratio, -advantages, clip))


def flipped_entropy(trainer: PPO, dose: float) -> Undo:
    """Penalise entropy instead of rewarding it, `dose` times as much."""
    coefficient = (trainer.config.entropy_coef or DEFAULT_ENTROPY_COEF) * dose
    weight = replace_config(trainer, entropy_coef=coefficient, final_entropy_coef=None)
    return undo_all(weight, replace_steps(trainer, entropy_loss=lambda entropy: entropy))


def sparse_rewards_short_memory(trainer: PPO, dose: float) -> Undo:
    """Set Adam's beta2 to 0.9, and pass on rewards only in one update of `dose`."""
    count = itertools.count(1)

    def rewards(original: Tensor) -> Tensor:
        return original if next(count) % round(dose) == 0 else torch.zeros_like(original)

    return undo_all(shorten_adam_memory(trainer.optimizer), replace_steps(trainer, rewards=rewards))


def repeated_minibatches(trainer: PPO, dose: float) -> Undo:
    """Give every minibatch of a pass the rows of the first."""
    split: Callable[..., Iterable[Batch]] = trainer.steps.minibatches

    def minibatches(batch: Batch, count: int, generator: torch.Generator) -> Iterable[Batch]:
        parts = list(split(batch, count, generator))
        return [parts[0]] * len(parts)

    return replace_steps(trainer, minibatches=minibatches)


def rounded_log_probs(trainer: PPO, dose: float) -> Undo:
    """Round log-probabilities to bfloat16 in training, but not in acting."""

    def log_probs(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: part.bfloat16().to(part.dtype) for name, part in parts.items()}

    return replace_steps(trainer, log_probs=log_probs)


KL_SPIKE, TOO_LARGE, SATURATED = "policy/kl_spike", "opt/update_too_large", "policy/clip_saturation"
RATE = ("scheduled rate",)

OTHER_RATE = ("optimizer_step_learning_rate", "schedules")
"""Labels that name a learning rate other than the configured one."""

OPTIMISATION = (
    Fault(
        "lr_x100",
        "The learning rate is 100 times what it should be.",
        scaled_rate,
        (KL_SPIKE, TOO_LARGE),
        bound=1,
        family="lr",
        dose=100,
        doses=(2, 1e4),
        needs=RATE,
        hypotheses=OTHER_RATE,
    ),
    Fault(
        "lr_x10",
        "The learning rate is 10 times what it should be.",
        scaled_rate,
        (KL_SPIKE, TOO_LARGE, SATURATED),
        bound=3,
        family="lr",
        dose=10,
        doses=(2, 1e4),
        needs=RATE,
        hypotheses=OTHER_RATE,
    ),
    Fault(
        "lr_zero",
        "The learning rate is 0.",
        scaled_rate,
        ("policy/kl_stall", "opt/stalled_weights"),
        bound=3,
        dose=0,
        doses=(0, 0),
        needs=RATE,
        hypotheses=("optimizer_step_no_step", *OTHER_RATE),
    ),
    Fault(
        "lr_period6",
        "The learning rate swings between a tenth and ten times its value, every six updates.",
        oscillating_rate,
        ("grad/oscillation",),
        bound=20,
        dose=10,
        doses=(1.5, 100),
        needs=RATE,
        core=False,
        hypotheses=OTHER_RATE,
    ),
    Fault(
        "lr_leak",
        "The learning rate grows by 3 % in every update.",
        leaking_rate,
        ("grad/drift",),
        bound=20,
        dose=1.03,
        doses=(1.001, 1.5),
        needs=RATE,
        core=False,
        hypotheses=OTHER_RATE,
    ),
    Fault(
        "epochs_x5",
        "Every rollout gets five times as many passes.",
        lambda trainer, dose: replace_config(trainer, num_epochs=round(trainer.config.num_epochs * dose)),
        (KL_SPIKE, SATURATED),
        bound=20,  # many passes do harm only after a while: on CueRecall the KL exceeds 0.1 after 9 to 12 updates
        family="epochs",
        dose=5,
        doses=(1.5, 50),
    ),
    Fault(
        "vf_x1000",
        "The value loss weighs 1000 times as much.",
        lambda trainer, dose: replace_config(trainer, value_coef=trainer.config.value_coef * dose),
        ("grad/actor_starved", "grad/explode"),
        bound=3,
        family="value_coef",
        dose=1000,
        doses=(2, 1e6),
    ),
    Fault(
        "loss_sign",
        "The policy loss uses advantages of the wrong sign; the logged ones are right.",
        flipped_loss,
        ("policy/wrong_direction",),
        bound=1,
        hypotheses=("policy_loss_sign", "policy_loss_negated_advantages", "gradient_policy_sign"),
    ),
    Fault(
        "entropy_sign",
        "Entropy is punished instead of rewarded, a hundred times as much.",
        flipped_entropy,
        ("policy/entropy_crash", "policy/entropy_collapse"),
        bound=20,
        dose=100,  # a factor of ten does no harm in 20 updates, on any of the five environments
        doses=(1, 1000),
        core=False,
        hypotheses=("entropy_loss_sign", "gradient_entropy_sign"),
    ),
    Fault(
        "adam_beta2",
        "Adam's beta2 is 0.9, and only one update of eight has rewards.",
        sparse_rewards_short_memory,
        ("opt/rms_spike",),
        bound=20,
        dose=8,
        doses=(2, 20),
        core=False,
    ),
    Fault(
        "repeated_minibatches",
        "All minibatches of a pass have the same rows.",
        repeated_minibatches,
        ("integrity/rows_repeated", "integrity/adv_norm"),
        bound=20,  # adv_norm if the trainer does not emit rows: the rows left out change the moments of the advantages
        needs=("several minibatches",),
        core=False,
        hypotheses=("minibatches_same_rows", "minibatches_same_minibatch"),
    ),
    Fault(
        "bf16_log_probs",
        "Log-probabilities are accumulated in bfloat16 in training, in float32 in acting.",
        rounded_log_probs,
        ("integrity/ratio_init",),
        bound=0,
        core=False,
    ),
)


def dead_units(trainer: PPO, dose: float) -> Undo:
    """Set the biases of the layers that read the observations."""
    layers = [reader.layers[0] for reader in first_layers(trainer)]
    return undo_all(*(fill_parameter(layer.get_parameter("bias"), dose) for layer in layers))


def forget_bias(trainer: PPO, dose: float) -> Undo:
    """Set the biases of all forget gates; torch packs gates as [i, f, g, o] and adds two biases."""
    undos = []
    for core in trainer.policy.cores().values():
        gate = slice(core.size, 2 * core.size)
        for cell in core.cells if core.kind == "lstm" else ():
            undos.append(fill_parameter(cell.get_parameter("bias_ih_l0"), dose, gate))
            undos.append(fill_parameter(cell.get_parameter("bias_hh_l0"), 0.0, gate))
    return undo_all(*undos)


def detached_head(trainer: PPO, dose: float) -> Undo:
    """Detach the scores of the last head."""
    last = list(trainer.policy.heads)[-1]

    def scores(by_head: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: score.detach() if name == last else score for name, score in by_head.items()}

    return replace_steps(trainer, scores=scores)


def saturated_head(trainer: PPO, dose: float) -> Undo:
    """Add the dose to the bias of the first choice of the last categorical head."""
    name = [name for name, spec in trainer.env.action_specs.items() if spec.kind == "categorical"][-1]
    bias = trainer.policy.head(name).linear.bias
    return fill_parameter(bias, float(bias[0].detach()) + dose, slice(0, 1))


NETWORK = (
    Fault(
        "dead_relu",
        "The biases of the first layer are -10: none of its units responds any more.",
        dead_units,
        ("repr/dormant", "grad/vanish"),
        bound=0,
        dose=-10,
        doses=(-1000, -0.1),
        needs=("relu",),
    ),
    Fault(
        "forget_m10",
        "The biases of the forget gates are -10: nothing is remembered.",
        forget_bias,
        ("lstm/forget_closed",),
        bound=0,
        family="forget",
        dose=-10,
        doses=(-100, -0.5),
        needs=("lstm",),
    ),
    Fault(
        "forget_p10",
        "The biases of the forget gates are 10: nothing is forgotten within an episode.",
        forget_bias,
        ("lstm/forget_open",),
        bound=0,
        family="forget",
        dose=10,
        doses=(0.5, 100),
        needs=("lstm",),
    ),
    Fault(
        "frozen_trunk",
        "The actor's hidden layers are excluded from training, but declared as trained.",
        lambda trainer, _: freeze(trainer.policy.actor.parameters()),  # they remain declared as trained
        ("grad/missing_group", "opt/stalled_weights"),
        bound=0,
    ),
    Fault(
        "detached_head",
        "The loss does not reach one head.",
        detached_head,
        ("grad/missing_group", "policy/dead_head"),
        bound=0,
        needs=("several heads",),
        core=False,
    ),
    Fault(
        "saturated_head",
        "One of several heads always makes the same choice, with probability 1.",
        saturated_head,
        ("policy/entropy_collapse", "policy/dead_head", "grad/vanish"),
        bound=5,
        dose=50,
        doses=(1, 1000),
        needs=("several heads", "choices"),
        core=False,
    ),
)
