"""Settings, facts for the alarms, parameters and candidates for the first non-finite tensor of an RSL-RL runner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper_telemetry.core.facts import UNCHECKED_FACT
from esper_telemetry.updates.failure import Candidate

HEAD = "action"
"""Name of the one head of a policy."""

GAUSSIAN = ("GaussianDistribution", "HeteroscedasticGaussianDistribution")
"""Distributions whose parameters are means and standard deviations."""

LOSSES = ("policy_loss", "value_loss", "entropy_loss", "total_loss", "log_ratios")
"""Equations of losses and of ratios, which the adapter computes itself."""

PLAIN_TYPES = (bool, int, float, str, type(None))

ROLLOUT_COLUMNS = ("rewards", "values", "actions_log_prob", "returns", "advantages")
"""Columns of the storage, in the order in which they are computed."""


def raw_model(alg: Any, name: str) -> nn.Module:
    """Return the `actor` or the `critic` itself, not the wrapper that `torch.compile` makes of it."""
    model: nn.Module = getattr(alg, f"_raw_{name}", None) or getattr(alg, name)
    return model


def parameters_of(alg: Any) -> dict[str, Tensor]:
    """Return the parameters of actor and critic by name; one that both have by its first name."""
    parameters: dict[str, Tensor] = {}
    known: set[int] = set()
    for part in ("actor", "critic"):
        for name, parameter in raw_model(alg, part).named_parameters():
            if id(parameter) not in known:
                known.add(id(parameter))
                parameters[f"{part}.{name}"] = parameter
    return parameters


def is_gaussian(alg: Any) -> bool:
    """Return True where the policy's distribution is a Gaussian."""
    distribution = getattr(raw_model(alg, "actor"), "distribution", None)
    return any(kind.__name__ in GAUSSIAN for kind in type(distribution).__mro__)


def groups_of(alg: Any) -> dict[str, list[str]]:
    """Return the names of the parameters of `actor`, `critic`, those of both (`shared`), and those of memory (`lstm`)."""
    names = parameters_of(alg)
    of_critic = {id(parameter) for parameter in raw_model(alg, "critic").parameters()}
    groups: dict[str, list[str]] = {"actor": [], "shared": [], "critic": [], "lstm": []}
    for name, parameter in names.items():
        part = name.split(".", 1)[0]
        groups["shared" if part == "actor" and id(parameter) in of_critic else part].append(name)
        if ".rnn." in name:
            groups["lstm"].append(name)
    return {group: members for group, members in groups.items() if members}


def config_of(runner: Any) -> dict[str, Any]:
    """Return the runner's configuration as plain values."""
    config: dict[str, Any] = _plain(runner.cfg)
    return config


def facts_of(runner: Any, iterations: int | None) -> dict[str, Any]:
    """Return what alarms need to know of a run of so many iterations."""
    alg, env = runner.alg, runner.env
    actor, storage = raw_model(alg, "actor"), alg.storage
    cell = getattr(getattr(actor, "rnn", None), "rnn", None)
    ranks = int(getattr(runner, "gpu_world_size", 1))
    steps, envs = int(storage.num_transitions_per_env), int(storage.num_envs)
    adaptive = alg.schedule == "adaptive" and alg.desired_kl is not None
    on_tensor_cores = "cuda" in str(alg.device) and torch.backends.cuda.matmul.allow_tf32
    horizon = getattr(env, "max_episode_length", None)
    spec = getattr(getattr(env, "unwrapped", None), "spec", None)
    layers = [name for name, part in raw_model(alg, "critic").named_modules() if isinstance(part, nn.Linear)]
    kinds = {type(part) for part in actor.modules()}
    return {
        "trainer": f"rsl-rl {type(alg).__name__}",
        "env": str(getattr(spec, "id", None) or runner.cfg.get("experiment_name") or type(env).__name__),
        "total_steps": None if iterations is None else iterations * steps * envs * ranks,
        "num_envs": envs * ranks,
        "ranks": ranks,
        "horizon": int(horizon) if isinstance(horizon, int | float) else None,
        "reward_threshold": None,
        "precision": "bf16" if alg.use_mixed_precision else "tf32" if on_tensor_cores else "fp32",
        "optimizer": type(alg.optimizer).__name__,
        "advantage_correction": 1,
        "groups": groups_of(alg),
        "value_head": [f"critic.{layers[-1]}"] if layers else [],
        "heads": {HEAD: "continuous"},
        "max_grad_norm": alg.max_grad_norm,
        "clip": alg.clip_param,
        "clip_value": alg.clip_param if alg.use_clipped_value_loss else None,
        "gamma": alg.gamma,
        "gae_lambda": alg.lam,
        "normalize_advantages": True,
        "normalize_minibatches": bool(alg.normalize_advantage_per_mini_batch),
        "num_steps": steps,
        "num_epochs": alg.num_learning_epochs,
        "num_minibatches": alg.num_mini_batches,
        "learning_rate": float(alg.learning_rate),
        "value_coef": 2 * alg.value_loss_coef,  # their value loss is the mean squared error, ours half of it
        "entropy_coef": alg.entropy_coef,
        "policy": "mlp" if cell is None else "lstm" if isinstance(cell, nn.LSTM) else "gru",
        "lstm_size": None if cell is None else cell.hidden_size,
        "activation": "tanh" if nn.Tanh in kinds else "relu" if nn.ReLU in kinds else None,
        "normalize_observations": bool(getattr(actor, "obs_normalization", False)),
        "normalize_rewards": False,
        "squashed": False,
        "correlated_noise": False,
        "target_kl": None,
        "desired_kl": alg.desired_kl if adaptive else None,
        UNCHECKED_FACT: _unchecked(alg, adaptive=adaptive),
    }


def nonfinite_candidates(alg: Any) -> Iterator[Candidate]:
    """Yield the tensors to search for the first non-finite one, in forward order: the storage, parameters and gradients."""
    storage = alg.storage
    rows = slice(0, storage.step or None)
    for name, part in storage.observations.items():
        yield Candidate(f"observations[{name!r}]", part[rows], environments=1)
    for name in ROLLOUT_COLUMNS:
        yield Candidate(name, getattr(storage, name)[rows], environments=1)
    parameters = parameters_of(alg)
    yield from (Candidate(name, parameter.detach()) for name, parameter in parameters.items())
    yield from (Candidate(f"gradient of {name}", p.grad) for name, p in parameters.items() if p.grad is not None)


def _unchecked(alg: Any, *, adaptive: bool) -> dict[str, str]:
    """Return why equations cannot be checked that the events do not show."""
    environment = "RSL-RL does not return the last observations of episodes, nor what arrived in its environments"
    reasons = dict.fromkeys(LOSSES, "RSL-RL keeps its losses to itself")
    reasons |= dict.fromkeys(("transitions", "executed_actions"), environment)
    reasons["clipping"] = "RSL-RL clips the gradients of actor and critic apart"
    if adaptive:
        reasons["schedules"] = "the KL divergence sets the learning rate (schedule 'adaptive')"
    if not is_gaussian(alg):
        reasons["log_probs"] = reasons["actions"] = "only Gaussian policies are shown"
    return reasons


def _plain(value: Any) -> Any:
    if isinstance(value, PLAIN_TYPES):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value)
