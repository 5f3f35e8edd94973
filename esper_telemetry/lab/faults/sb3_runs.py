"""Faults of models of Stable-Baselines3, through their settings, optimizer, policy, buffer and environments, and the runs of a score.

Each function breaks a model by a dose and returns the function that undoes it. Names, accepted alarms and bounds are the same as for the
bundled trainer.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from torch import nn

from esper_telemetry.adapters.sb3.callback import TelemetryCallback
from esper_telemetry.lab.faults.fault import Undo, fill_parameter, freeze, shorten_adam_memory, undo_all
from esper_telemetry.lab.faults.optimisation import DEFAULT_ENTROPY_COEF, OSCILLATION_UPDATES
from esper_telemetry.lab.faults.runs import FaultRun, atomic_directory, journal_telemetry, read_fault_run, training_status
from esper_telemetry.lab.faults.sb3_models import MODELS, ModelNotApplicableError, VecEnvStep, change_env_steps, replace_attributes, require


def scaled_by_update(model: Any, factor: Callable[[int], float]) -> Undo:
    """Multiply the learning rate by the factor of each update, counted from 1."""
    right, update = model.lr_schedule, itertools.count(1)
    return replace_attributes(model, lr_schedule=lambda remaining: right(remaining) * factor(next(update)))


def change_log_probs(model: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Undo:
    """Change the log-probabilities of actions in training."""
    right = model.policy.evaluate_actions

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        values, log_probs, entropy = right(*args, **kwargs)
        return values, change(log_probs), entropy

    return replace_attributes(model.policy, evaluate_actions=evaluate)


def flipped_loss(model: Any, dose: float) -> Undo:
    """Negate the gradient of the log-probabilities, and so of the policy loss; their values stay correct."""
    return change_log_probs(model, lambda log_probs: 2 * log_probs.detach() - log_probs)


def sparse_rewards_short_memory(model: Any, dose: float) -> Undo:
    """Set Adam's beta2 to 0.9, and pass on rewards only in one update of `dose`."""
    steps = itertools.count()

    def change(step: Any, _: Any) -> Any:
        paid = (next(steps) // model.n_steps + 1) % round(dose) == 0
        return step if paid else step._replace(rewards=np.zeros_like(step.rewards))

    return undo_all(shorten_adam_memory(model.policy.optimizer), change_env_steps(model, change))


def repeated_minibatches(model: Any, dose: float) -> Undo:
    """Give every minibatch of a pass the rows of the first."""
    buffer = model.rollout_buffer
    right, samples = buffer.get, buffer._get_samples
    last: list[tuple[Any, ...]] = []

    def recorded_samples(*args: Any) -> Any:
        last[:] = [args]
        return samples(*args)

    def get(batch_size: int | None = None) -> Iterator[Any]:
        yield next(right(batch_size))
        first, total = last[0], buffer.buffer_size * buffer.n_envs
        for _ in range(1, -(-total // (batch_size or total))):
            yield buffer._get_samples(*first)

    return replace_attributes(buffer, get=get, _get_samples=recorded_samples)


Break: TypeAlias = Callable[[Any, float], Undo]


def one_nan(model: Any, dose: float) -> Undo:
    """Make one reward NaN, once."""
    pending = [True]

    def change(step: VecEnvStep, _: Any) -> VecEnvStep:
        if not pending:
            return step
        pending.clear()
        broken = np.array(step.rewards, np.float32)
        broken[0] = np.nan
        return step._replace(rewards=broken)

    return change_env_steps(model, change)


def favoured_action(model: Any, dose: float) -> Undo:
    """Reward only action 1, without an entropy bonus."""
    require(isinstance(model.action_space, spaces.Discrete), "its actions are not choices")

    def change(step: VecEnvStep, actions: Any) -> VecEnvStep:
        return step._replace(rewards=(dose * (np.asarray(actions) == 1)).astype(np.float32))

    return undo_all(change_env_steps(model, change), replace_attributes(model, ent_coef=0.0))


def swapped_ends(model: Any, dose: float) -> Undo:
    """Exchange termination and time limit."""

    def change(step: VecEnvStep, _: Any) -> VecEnvStep:
        infos = [{**info, "TimeLimit.truncated": not info.get("TimeLimit.truncated", False)} for info in step.infos]
        return step._replace(infos=infos)

    return change_env_steps(model, change)


def constant_observations(model: Any, dose: float) -> Undo:
    """Replace the observations of the first environments by ones."""
    require(hasattr(model.policy, "lstm_actor"), "its policy has no memory")

    def change(step: VecEnvStep, _: Any) -> VecEnvStep:
        observations = np.array(step.observations)
        observations[: round(dose)] = 1
        return step._replace(observations=observations)

    return change_env_steps(model, change)


def other_observations(model: Any, dose: float) -> Undo:
    """Train on `dose` x + 1 of the observations x of acting."""
    right = model.policy.evaluate_actions
    return replace_attributes(model.policy, evaluate_actions=lambda obs, *rest, **named: right(dose * obs + 1, *rest, **named))


def no_masks(model: Any, dose: float) -> Undo:
    """Train without the masks under which actions were chosen."""
    require(hasattr(model.rollout_buffer, "action_masks"), "it has no action masks")
    right = model.policy.evaluate_actions
    return replace_attributes(model.policy, evaluate_actions=lambda obs, actions, action_masks=None: right(obs, actions))


def zero_state(model: Any, dose: float) -> Undo:
    """Replace the stored initial states of training by zeros."""
    require(hasattr(model.policy, "lstm_actor"), "its policy has no memory")
    right = model.policy.evaluate_actions

    def evaluate(observations: Any, actions: Any, states: Any, starts: Any) -> Any:
        zeros = type(states)(*(tuple(torch.zeros_like(state) for state in pair) for pair in states))
        return right(observations, actions, zeros, starts)

    return replace_attributes(model.policy, evaluate_actions=evaluate)


def no_reset(model: Any, dose: float) -> Undo:
    """Never reset memory, in acting and in training."""
    require(hasattr(model.policy, "lstm_actor"), "its policy has no memory")
    right = model.policy._process_sequence

    def process(features: Any, states: Any, starts: Any, lstm: nn.LSTM) -> Any:
        return right(features, states, torch.zeros_like(starts), lstm)

    return replace_attributes(model.policy, _process_sequence=process)


def scaled_advantages(model: Any, dose: float) -> Undo:
    """Multiply advantages instead of normalising them."""
    scaled = _after_returns(model, lambda buffer: np.multiply(buffer.advantages, dose, out=buffer.advantages))
    return undo_all(scaled, replace_attributes(model, normalize_advantage=False))


def stale_advantages(model: Any, dose: float) -> Undo:
    """Use the advantages of the previous rollout, or in the first update of the next environment; returns stay correct."""
    previous: list[Any] = []

    def change(buffer: Any) -> None:
        previous.append(buffer.advantages)
        buffer.advantages = previous.pop(0) if len(previous) > 1 else np.roll(previous[0], 1, axis=1)

    return _after_returns(model, change)


def shuffled_returns(model: Any, dose: float) -> Undo:
    """Permute the critic's targets."""
    rng = np.random.default_rng(0)

    def shuffle(buffer: Any) -> None:
        buffer.returns = rng.permutation(buffer.returns.ravel()).reshape(buffer.returns.shape)

    return _after_returns(model, shuffle)


def _after_returns(model: Any, change: Callable[[Any], Any]) -> Undo:
    """Call `change` with the rollout buffer after it has computed returns and advantages."""
    buffer = model.rollout_buffer
    right = buffer.compute_returns_and_advantage

    def compute(*args: Any, **kwargs: Any) -> None:
        right(*args, **kwargs)
        change(buffer)

    return replace_attributes(buffer, compute_returns_and_advantage=compute)


def dead_units(model: Any, dose: float) -> Undo:
    """Set the biases of the first layers."""
    extractor = model.policy.mlp_extractor
    layers = [net[0] for net in (extractor.policy_net, extractor.value_net)]
    require(isinstance(extractor.policy_net[1], nn.ReLU), "its hidden layers do not use ReLU")
    return undo_all(*(fill_parameter(layer.bias, dose) for layer in layers))


def forget_bias(model: Any, dose: float) -> Undo:
    """Set the biases of the actor's forget gates."""
    require(hasattr(model.policy, "lstm_actor"), "its policy has no LSTM")
    lstm = model.policy.lstm_actor
    gate = slice(lstm.hidden_size, 2 * lstm.hidden_size)
    biases = ((lstm.bias_ih_l0, dose), (lstm.bias_hh_l0, 0.0))
    return undo_all(*(fill_parameter(bias, value, gate) for bias, value in biases))


def detached_head(model: Any, dose: float) -> Undo:
    """Detach the scores of the last part of an action."""
    count = _last_choices(model)
    right = model.policy.action_net.forward

    def forward(latents: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = right(latents)
        return torch.cat([scores[:, :-count], scores[:, -count:].detach()], -1)

    return replace_attributes(model.policy.action_net, forward=forward)


def saturated_head(model: Any, dose: float) -> Undo:
    """Add the dose to the bias of the first choice of the last part of an action."""
    first, bias = -_last_choices(model), model.policy.action_net.bias
    place = slice(first, first + 1 or None)
    return fill_parameter(bias, float(bias[first].detach()) + dose, place)


def _last_choices(model: Any) -> int:
    space = model.action_space
    require(isinstance(space, spaces.MultiDiscrete), "its actions have one part")
    return int(space.nvec[-1])


def stuck_normalizer(model: Any, dose: float) -> Undo:
    """Fix the normaliser at `dose` times the standard deviation of the observations."""
    scaled = model.get_vec_normalize_env()
    require(scaled is not None and scaled.norm_obs, "its observations are not normalised")
    moments = copy.deepcopy(scaled.obs_rms)
    moments.var = moments.var * dose**2
    return replace_attributes(scaled, obs_rms=moments, training=False)


BREAKS: Mapping[str, Break] = {
    **dict.fromkeys(("lr_x100", "lr_x10", "lr_zero"), lambda model, dose: scaled_by_update(model, lambda _: dose)),
    "lr_leak": lambda model, dose: scaled_by_update(model, lambda update: dose**update),
    "lr_period6": lambda model, dose: scaled_by_update(
        model, lambda update: float(dose ** math.sin(2 * math.pi * update / OSCILLATION_UPDATES))
    ),
    "epochs_x5": lambda model, dose: replace_attributes(model, n_epochs=round(model.n_epochs * dose)),
    "vf_x1000": lambda model, dose: replace_attributes(model, vf_coef=dose * model.vf_coef),
    "loss_sign": flipped_loss,
    "entropy_sign": lambda model, dose: replace_attributes(model, ent_coef=-dose * (model.ent_coef or DEFAULT_ENTROPY_COEF)),
    "adam_beta2": sparse_rewards_short_memory,
    "repeated_minibatches": repeated_minibatches,
    "adv_x100": scaled_advantages,
    "stale_adv": stale_advantages,
    "stuck_normalizer": stuck_normalizer,
    "detached_head": detached_head,
    "saturated_head": saturated_head,
    "bf16_log_probs": lambda model, _: change_log_probs(model, lambda log_probs: log_probs.bfloat16().float()),
    "reward_1e4": lambda model, dose: change_env_steps(model, lambda step, _: step._replace(rewards=dose * step.rewards)),
    "nan_reward": one_nan,
    "adv_sign": lambda model, _: _after_returns(model, lambda buffer: np.negative(buffer.advantages, out=buffer.advantages)),
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
    "frozen_trunk": lambda model, _: freeze(model.policy.mlp_extractor.policy_net.parameters()),
}
"""Break functions by name of the fault."""


def plan_sb3_runs(
    faults: Sequence[tuple[str, float]], envs: Sequence[str], seeds: Sequence[int], *, healthy: bool = True, explicit: bool = True
) -> list[FaultRun]:
    """Return the healthy runs, and the runs of every fault on every model with every seed.

    Args:
        faults: names and doses.
        envs: names of models, with or without the prefix `sb3-`; all models if empty.
        seeds: seeds of the models.
        healthy: plan healthy runs too.
        explicit: whether the user named the faults; a fault that cannot be injected then raises ValueError instead of being left out.

    Raises:
        ValueError: an unknown model.
    """
    names = [env if env.startswith("sb3-") else f"sb3-{env}" for env in envs] or list(MODELS)
    for env, name in zip(envs, names, strict=False):
        if name not in MODELS:
            raise ValueError(f"there is no environment {env!r} for sb3; there are {', '.join(MODELS)}")
    wrong = [name for name, _ in faults if name not in BREAKS]
    if explicit and wrong:
        raise ValueError(f"{wrong[0]} cannot be injected into sb3 from outside; these can: {', '.join(BREAKS)}")
    injectable = [(name, dose) for name, dose in faults if name in BREAKS]
    broken = [FaultRun(env, seed, name, dose) for seed in seeds for env in names for name, dose in injectable]
    return [*(FaultRun(env, seed) for seed in seeds for env in names if healthy), *broken]


def train_all_sb3(runs: Sequence[FaultRun], directory: Path, pool: Executor, level: str = "normal") -> Iterator[FaultRun]:
    """Train the runs that the directory does not hold yet, and yield every run when it is done or does not apply."""
    done = [run for run in runs if (directory / run.name).exists()]
    yield from (read_fault_run(directory / run.name) for run in done)
    rest = [run for run in runs if run not in done]
    for future in as_completed([pool.submit(train_run, run, directory, level) for run in rest]):
        yield future.result()


def train_run(run: FaultRun, directory: Path, level: str) -> FaultRun:
    """Train one run from its first update to its last; do not write if the fault does not apply."""
    model = MODELS[run.env](run.seed)
    fault_callback = FaultCallback(run)
    missing = fault_callback.missing(model)
    if missing:
        return replace(run, missing=f"{run.fault} does not apply to {run.env}: {missing}")
    steps = model.n_steps * model.n_envs * run.last
    with atomic_directory(directory / run.name) as run_dir:
        with journal_telemetry(run_dir, level) as telemetry:
            callbacks: list[BaseCallback] = [TelemetryCallback(telemetry), fault_callback]
            status = training_status(lambda: model.learn(steps, callback=callbacks), telemetry)
        return replace(run, status=status).write(run_dir)


class FaultCallback(BaseCallback):
    """Breaks a model before the rollout of the run's first broken update."""

    def __init__(self, run: FaultRun) -> None:
        super().__init__()
        self._run, self._rollouts = run, 0

    def missing(self, model: Any) -> str:
        """Return why the fault does not apply to a model; empty if it applies."""
        try:
            self._break(model)()
        except ModelNotApplicableError as lacks:
            return str(lacks)
        return ""

    def _on_rollout_start(self) -> None:
        self._rollouts += 1
        if self._rollouts == self._run.at_update:
            self._break(self.model)

    def _on_step(self) -> bool:
        return True

    def _break(self, model: Any) -> Undo:
        fault = self._run.fault
        return (lambda: None) if fault is None else BREAKS[fault](model, self._run.dose)
