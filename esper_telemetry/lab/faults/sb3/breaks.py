"""How models of Stable-Baselines3 are broken: through environments, optimizer, policy, buffer. Names are those of the fault bed.

How the optimisation of a model of Stable-Baselines3 is broken: rates, passes, losses, minibatches, Adam.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from esper_telemetry.lab.faults import fault as changes
from esper_telemetry.lab.faults.fault import Undo
from esper_telemetry.lab.faults.optimisation import ENTROPY_COEF, PERIOD
from esper_telemetry.lab.faults.sb3.models import TrainingOutcome, answers, attribute, require


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


Break: TypeAlias = Callable[[Any, float], Undo]


def rewards(model: Any, dose: float) -> Undo:
    """Multiplies rewards."""
    return answers(model, lambda outcome, _: outcome._replace(rewards=dose * outcome.rewards))


def one_nan(model: Any, dose: float) -> Undo:
    """Makes one reward NaN, once."""
    left = [1]

    def change(outcome: TrainingOutcome, _: Any) -> TrainingOutcome:
        if not left:
            return outcome
        left.clear()
        broken = np.array(outcome.rewards, np.float32)
        broken[0] = np.nan
        return outcome._replace(rewards=broken)

    return answers(model, change)


def favoured_action(model: Any, dose: float) -> Undo:
    """Pays for action 1 and nothing else."""
    require(isinstance(model.action_space, spaces.Discrete), "its actions are no choices")

    def change(outcome: TrainingOutcome, actions: Any) -> TrainingOutcome:
        return outcome._replace(rewards=(dose * (np.asarray(actions) == 1)).astype(np.float32))

    return changes.together(answers(model, change), attribute(model, ent_coef=0.0))


def swapped_ends(model: Any, dose: float) -> Undo:
    """Takes termination for a time limit, and a time limit for termination."""

    def change(outcome: TrainingOutcome, _: Any) -> TrainingOutcome:
        infos = [{**info, "TimeLimit.truncated": not info.get("TimeLimit.truncated", False)} for info in outcome.infos]
        return outcome._replace(infos=infos)

    return answers(model, change)


def constant_observations(model: Any, dose: float) -> Undo:
    """Gives ones for the observations of the first environments."""
    require(hasattr(model.policy, "lstm_actor"), "its policy has no memory")

    def change(outcome: TrainingOutcome, _: Any) -> TrainingOutcome:
        observations = np.array(outcome.observations)
        observations[: round(dose)] = 1
        return outcome._replace(observations=observations)

    return answers(model, change)


def other_observations(model: Any, dose: float) -> Undo:
    """Trains on `dose` x + 1 of what was acted on."""
    right = model.policy.evaluate_actions
    return attribute(model.policy, evaluate_actions=lambda obs, *rest, **named: right(dose * obs + 1, *rest, **named))


def no_masks(model: Any, dose: float) -> Undo:
    """Trains without the masks under which actions were chosen."""
    require(hasattr(model.rollout_buffer, "action_masks"), "it has no action masks")
    right = model.policy.evaluate_actions
    return attribute(model.policy, evaluate_actions=lambda obs, actions, action_masks=None: right(obs, actions))


def zero_state(model: Any, dose: float) -> Undo:
    """Begins training in states of zeros instead of the stored ones."""
    require(hasattr(model.policy, "lstm_actor"), "its policy has no memory")
    right = model.policy.evaluate_actions

    def evaluate(observations: Any, actions: Any, states: Any, starts: Any) -> Any:
        zeros = type(states)(*(tuple(torch.zeros_like(state) for state in pair) for pair in states))
        return right(observations, actions, zeros, starts)

    return attribute(model.policy, evaluate_actions=evaluate)


def no_reset(model: Any, dose: float) -> Undo:
    """Never resets memory, in acting and in training."""
    require(hasattr(model.policy, "lstm_actor"), "its policy has no memory")
    right = model.policy._process_sequence

    def process(features: Any, states: Any, starts: Any, lstm: nn.LSTM) -> Any:
        return right(features, states, torch.zeros_like(starts), lstm)

    return attribute(model.policy, _process_sequence=process)


def rounded_log_probs(model: Any, dose: float) -> Undo:
    """Accumulates log-probabilities in bfloat16 in training."""
    right = model.policy.evaluate_actions

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        values, log_probs, entropy = right(*args, **kwargs)
        return values, log_probs.bfloat16().float(), entropy

    return attribute(model.policy, evaluate_actions=evaluate)


def flipped_advantages(model: Any, dose: float) -> Undo:
    """Flips the sign of advantages; returns stay right."""
    return _computed(model, lambda buffer: np.negative(buffer.advantages, out=buffer.advantages))


def stale_advantages(model: Any, dose: float) -> Undo:
    """Uses the advantages of the rollout before, in the first update those of the environment beside; returns stay right."""
    kept: list[Any] = []

    def change(buffer: Any) -> None:
        kept.append(buffer.advantages)
        buffer.advantages = kept.pop(0) if len(kept) > 1 else np.roll(kept[0], 1, axis=1)

    return _computed(model, change)


def shuffled_returns(model: Any, dose: float) -> Undo:
    """Permutes the critic's targets."""
    chance = np.random.default_rng(0)

    def shuffle(buffer: Any) -> None:
        buffer.returns = chance.permutation(buffer.returns.ravel()).reshape(buffer.returns.shape)

    return _computed(model, shuffle)


def _computed(model: Any, change: Callable[[Any], Any]) -> Undo:
    """Changes what the buffer has computed."""
    buffer = model.rollout_buffer
    right = buffer.compute_returns_and_advantage

    def compute(*args: Any, **kwargs: Any) -> None:
        right(*args, **kwargs)
        change(buffer)

    return attribute(buffer, compute_returns_and_advantage=compute)


def dead_units(model: Any, dose: float) -> Undo:
    """Sets the biases of the first layers."""
    extractor = model.policy.mlp_extractor
    layers = [net[0] for net in (extractor.policy_net, extractor.value_net)]
    require(isinstance(extractor.policy_net[1], nn.ReLU), "its hidden layers have no ReLU")
    return changes.together(*(changes.parameter(layer.bias, dose) for layer in layers))


def forget_bias(model: Any, dose: float) -> Undo:
    """Sets the biases of the actor's forget gates."""
    lstm = getattr(model.policy, "lstm_actor", None)
    require(lstm is not None, "its policy has no LSTM")
    gate = slice(model.policy.lstm_actor.hidden_size, 2 * model.policy.lstm_actor.hidden_size)
    biases = ((model.policy.lstm_actor.bias_ih_l0, dose), (model.policy.lstm_actor.bias_hh_l0, 0.0))
    return changes.together(*(changes.parameter(bias, value, gate) for bias, value in biases))


def frozen_trunk(model: Any, dose: float) -> Undo:
    """Takes the actor's hidden layers out of training."""
    return changes.frozen(model.policy.mlp_extractor.policy_net.parameters())


def detached_head(model: Any, dose: float) -> Undo:
    """Detaches the scores of the last part of an action."""
    count = _last_choices(model)
    right = model.policy.action_net.forward

    def forward(latents: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = right(latents)
        return torch.cat([scores[:, :-count], scores[:, -count:].detach()], -1)

    return attribute(model.policy.action_net, forward=forward)


def saturated_head(model: Any, dose: float) -> Undo:
    """Adds to the bias of the first choice of the last part of an action."""
    first, bias = -_last_choices(model), model.policy.action_net.bias
    place = slice(first, first + 1 or None)
    return changes.parameter(bias, float(bias[first].detach()) + dose, place)


def _last_choices(model: Any) -> int:
    space = model.action_space
    require(isinstance(space, spaces.MultiDiscrete), "its actions have one part")
    return int(space.nvec[-1])


def stuck_normalizer(model: Any, dose: float) -> Undo:
    """Stops the normaliser of observations where they had `dose` times their spread."""
    scaled = model.get_vec_normalize_env()
    require(scaled is not None and scaled.norm_obs, "its observations are not normalised")
    moments = copy.deepcopy(scaled.obs_rms)
    moments.var = moments.var * dose**2
    return attribute(scaled, obs_rms=moments, training=False)


BREAKS: Mapping[str, Break] = {
    **dict.fromkeys(("lr_x100", "lr_x10", "lr_zero"), learning_rate),
    "lr_leak": leaking_rate,
    "lr_period6": oscillating_rate,
    "epochs_x5": more_epochs,
    "vf_x1000": value_coef,
    "loss_sign": flipped_loss,
    "entropy_sign": flipped_entropy,
    "adam_beta2": sparse_rewards_short_memory,
    "repeated_minibatches": repeated_minibatches,
    "adv_x100": scaled_advantages,
    "stale_adv": stale_advantages,
    "stuck_normalizer": stuck_normalizer,
    "detached_head": detached_head,
    "saturated_head": saturated_head,
    "bf16_log_probs": rounded_log_probs,
    "reward_1e4": rewards,
    "nan_reward": one_nan,
    "adv_sign": flipped_advantages,
    "returns_shuffled": shuffled_returns,
    "obs_mismatch": other_observations,
    "h0_zero": zero_state,
    "mask_bug": no_masks,
    "no_reset": no_reset,
    "ent0_strong": favoured_action,
    "constant_observations": constant_observations,
    "swapped_ends": swapped_ends,
    "dead_relu": dead_units,
    **dict.fromkeys(("forget_m10", "forget_p10"), forget_bias),
    "frozen_trunk": frozen_trunk,
}
"""By the name of the fault, whose accepted alarms and bounds hold here too."""
