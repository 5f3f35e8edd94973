"""How the optimisation of a model of Stable-Baselines3 is broken: rates, passes, losses, minibatches, Adam."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from esper_telemetry.lab.faults import changes
from esper_telemetry.lab.faults.fault import Undo
from esper_telemetry.lab.faults.optimisation import ENTROPY_COEF, PERIOD
from esper_telemetry.lab.faults.sb3.replacing import answers, attribute


def learning_rate(model: Any, dose: float) -> Undo:
    """Multiplies the learning rate."""
    right = model.lr_schedule
    return attribute(model, lr_schedule=lambda remaining: dose * right(remaining))


def scheduled(model: Any, factor: Callable[[int], float]) -> Undo:
    """Multiplies the learning rate by what `factor` says of each update, from 1."""
    right, passed = model.lr_schedule, itertools.count(1)
    return attribute(model, lr_schedule=lambda remaining: right(remaining) * factor(next(passed)))


def leaking_rate(model: Any, dose: float) -> Undo:
    """Lets the learning rate grow by that factor in every update."""
    return scheduled(model, lambda update: dose**update)


def oscillating_rate(model: Any, dose: float) -> Undo:
    """Multiplies the learning rate by powers of the dose between -1 and 1 that come back."""
    return scheduled(model, lambda update: float(dose ** math.sin(2 * math.pi * update / PERIOD)))


def value_coef(model: Any, dose: float) -> Undo:
    """Multiplies the weight of the value loss."""
    return attribute(model, vf_coef=dose * model.vf_coef)


def more_epochs(model: Any, dose: float) -> Undo:
    """Multiplies the passes over a rollout."""
    return attribute(model, n_epochs=round(model.n_epochs * dose))


def flipped_loss(model: Any, dose: float) -> Undo:
    """Turns the gradient of the log-probabilities round, and with it that of the policy loss; their values are right."""
    right = model.policy.evaluate_actions

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        values, log_probs, entropy = right(*args, **kwargs)
        return values, 2 * log_probs.detach() - log_probs, entropy

    return attribute(model.policy, evaluate_actions=evaluate)


def flipped_entropy(model: Any, dose: float) -> Undo:
    """Punishes entropy instead of rewarding it, `dose` times as much."""
    return attribute(model, ent_coef=-dose * (model.ent_coef or ENTROPY_COEF))


def sparse_rewards_short_memory(model: Any, dose: float) -> Undo:
    """Shortens Adam's memory of squares to ten steps and lets rewards through in one update of `dose` only."""
    group, steps = model.policy.optimizer.param_groups[0], itertools.count()
    betas = group["betas"]
    group["betas"] = (betas[0], 0.9)

    def undo() -> None:
        group["betas"] = betas

    def change(outcome: Any, _: Any) -> Any:
        paid = (next(steps) // model.n_steps + 1) % round(dose) == 0
        return outcome if paid else outcome._replace(rewards=np.zeros_like(outcome.rewards))

    return changes.together(undo, answers(model, change))


def repeated_minibatches(model: Any, dose: float) -> Undo:
    """Every minibatch of a pass holds the rows of the first."""
    buffer = model.rollout_buffer
    right, taken = buffer.get, buffer._get_samples
    last: list[tuple[Any, ...]] = []

    def remembered(*args: Any) -> Any:
        last[:] = [args]
        return taken(*args)

    def get(batch_size: int | None = None) -> Iterator[Any]:
        yield next(right(batch_size))
        first, total = last[0], buffer.buffer_size * buffer.n_envs
        for _ in range(1, -(-total // (batch_size or total))):
            yield buffer._get_samples(*first)

    return attribute(buffer, get=get, _get_samples=remembered)


def scaled_advantages(model: Any, dose: float) -> Undo:
    """Multiplies advantages, and does not normalise them."""
    buffer = model.rollout_buffer
    right = buffer.compute_returns_and_advantage

    def compute(*args: Any, **kwargs: Any) -> None:
        right(*args, **kwargs)
        buffer.advantages *= dose

    return changes.together(
        attribute(buffer, compute_returns_and_advantage=compute), attribute(model, normalize_advantage=False)
    )
