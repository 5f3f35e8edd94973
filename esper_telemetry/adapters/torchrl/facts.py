"""Settings, facts for the alarms, parameters and candidates for the first non-finite tensor of a TorchRL loss module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from esper_telemetry.adapters.torchrl.rollouts import HEAD, acting_distribution, is_squashed
from esper_telemetry.core.facts import UNCHECKED_FACT
from esper_telemetry.updates.failure import Candidate

NORMALIZERS = ("ObservationNorm", "VecNorm", "VecNormV2")
"""Transforms of environments that normalise observations."""

REWARD_SCALES = ("RewardScaling", "VecNorm", "VecNormV2")
"""Transforms that scale rewards."""

STD_FLOOR = 1e-4
"""Smallest standard deviation by which TorchRL divides advantages."""

SETTINGS = (
    *("clip_epsilon", "clip_value", "entropy_bonus", "entropy_coeff", "critic_coeff", "loss_critic_type"),
    *("normalize_advantage", "separate_losses", "delay_actor"),
)


def parameters_of(loss: nn.Module) -> dict[str, Tensor]:
    """Return the trainable parameters of actor and critic by name; one that both have by its first name."""
    return {
        name.replace("_network_params", "").replace(".module", ""): parameter
        for name, parameter in loss.named_parameters()
        if parameter.requires_grad
    }


def is_squared(loss: Any) -> bool:
    """Return True where the critic's loss is the squared error of its estimates, which are not cut."""
    return getattr(loss, "loss_critic_type", None) == "l2" and not getattr(loss, "clip_value", None)


def config_of(loss: Any) -> dict[str, Any]:
    """Return the settings of the loss module as plain values."""
    config: dict[str, Any] = {"loss": type(loss).__name__}
    for name in SETTINGS:
        value = getattr(loss, name, None)
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if value is not None:
            config[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return config


def facts_of(
    loss: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    estimator: Any,
    batch: Any,
    parameters: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Return what alarms need to know of a run, as far as the objects say; `batch` is the first one, None where none is known."""
    steps, envs = (None, None) if batch is None else (batch.batch_size[-1], batch.batch_size[:-1].numel())
    with torch.no_grad():
        distribution = None if batch is None else acting_distribution(batch, loss)
    own, averaged = bool(getattr(loss, "normalize_advantage", False)), bool(getattr(estimator, "average_gae", False))
    clip, critic = getattr(loss, "clip_epsilon", None), _number(getattr(loss, "critic_coeff", None))
    of_critic = [name for name in parameters if name.startswith("critic.")]
    weights = [place for place, name in enumerate(of_critic) if name.endswith("weight")]
    settings: dict[str, Any] = {
        "trainer": "torchrl",
        "num_envs": envs,
        "num_steps": steps,
        "ranks": 1,
        "precision": "fp32",
        "optimizer": type(optimizers[0]).__name__,
        "advantage_correction": 1,
        "advantage_std_floor": STD_FLOOR,
        "groups": groups_of(loss, parameters),
        "value_head": of_critic[weights[-1] :] if weights else [],  # its last weight and what follows
        "clip": _number(clip),
        "clip_value": _number(getattr(loss, "clip_value", None)),
        "gamma": gamma_of(loss, estimator),
        "gae_lambda": _number(getattr(estimator, "lmbda", None)),
        "normalize_advantages": own or averaged,
        "normalize_minibatches": own,
        "learning_rate": float(optimizers[0].param_groups[0]["lr"]),
        "value_coef": None
        if critic is None
        else 2 * critic,  # their value loss is the mean squared error, ours half of it
        "entropy_coef": _number(getattr(loss, "entropy_coeff", None)),
        "policy": "mlp",
        "squashed": is_squashed(distribution),
        "inverts_squash": is_squashed(distribution),  # the loss module gets actions after the squash
        "recomputes_advantages": True,  # loops ask the estimator again before each pass
        UNCHECKED_FACT: _unchecked(loss, estimator),
    }
    if distribution is not None:
        settings["heads"] = {HEAD: "categorical" if hasattr(distribution, "logits") else "continuous"}
    return {name: value for name, value in settings.items() if value is not None}


def gamma_of(loss: Any, estimator: Any) -> float | None:
    """Return the discount of the estimator, or of the loss module's own; None where neither says."""
    own = getattr(loss, "_value_estimator", None)
    known = (getattr(one, "gamma", None) for one in (estimator, own))
    return next((_number(gamma) for gamma in known if gamma is not None), None)


def environment_facts(env: Any) -> dict[str, Any]:
    """Return what an environment says of itself and its transforms; nothing where the collector hides it."""
    transforms = [type(transform).__name__ for transform in getattr(getattr(env, "transform", None), "transforms", ())]
    while env is not None and hasattr(env, "base_env"):
        env = env.base_env
    name = getattr(env, "env_name", None)
    name = name[0] if isinstance(name, list) and name else name
    return {
        **({"env": str(name)} if name else {}),
        "normalize_observations": any(kind in NORMALIZERS for kind in transforms),
        "normalize_rewards": any(kind in REWARD_SCALES for kind in transforms),
    }


def groups_of(loss: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of the parameters of `actor`, `critic` and of both (`shared`)."""
    parts = {part: getattr(loss, f"{part}_network_params", None) for part in ("actor", "critic")}
    members = {part: set() if own is None else {*map(id, own.parameters())} for part, own in parts.items()}
    groups: dict[str, list[str]] = {"actor": [], "shared": [], "critic": []}
    for name, parameter in parameters.items():
        owners = [part for part, own in members.items() if id(parameter) in own]
        if owners:
            groups["shared" if len(owners) == 2 else owners[0]].append(name)
    return {group: names for group, names in groups.items() if names}


def nonfinite_candidates(loss: nn.Module) -> Iterator[Candidate]:
    """Yield the parameters and their gradients, to search for the first tensor that is not finite."""
    parameters = parameters_of(loss)
    yield from (Candidate(name, parameter.detach()) for name, parameter in parameters.items())
    yield from (Candidate(f"gradient of {name}", p.grad) for name, p in parameters.items() if p.grad is not None)


def _unchecked(loss: Any, estimator: Any) -> dict[str, str]:
    """Return why equations cannot be checked that the events do not show."""
    reasons = dict.fromkeys(
        ("transitions", "executed_actions", "stored_rewards"),
        "batches of collectors keep no copy of what environments returned",
    )
    reasons["total_loss"] = "the loop adds the losses"
    if not is_squared(loss):
        reasons["value_loss"] = f"the critic's loss is {getattr(loss, 'loss_critic_type', 'another one')}"
    if estimator is None:
        reasons |= dict.fromkeys(("advantages", "returns", "normalized_advantages"), "the loss computes the advantages")
    return reasons


def _number(value: Any) -> float | None:
    """A number that the module may hold in single precision."""
    return None if value is None or isinstance(value, bool) else float(f"{float(value):.7g}")
