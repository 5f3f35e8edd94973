"""What a model of Stable-Baselines3 says of itself: settings, facts for detectors, groups of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from esper_telemetry.adapters.sb3.heads import Heads

PLAIN = (bool, int, float, str, type(None))

SETTINGS = (
    *("n_steps", "batch_size", "n_epochs", "n_envs", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm"),
    *("normalize_advantage", "target_kl", "learning_rate", "clip_range", "clip_range_vf", "use_sde", "sde_sample_freq"),
    "seed",
)

TRANSITIONS = 2048
"""Of which A2C has a record: what PPO collects for one by default."""

ACTOR = ("policy_net", "pi_features_extractor", "action_net", "log_std", "lstm_actor")
CRITIC = ("value_net", "vf_features_extractor", "critic", "lstm_critic")


class ModelProgress(NamedTuple):
    """What was done before, as `events.RunStart` tells it."""

    update: int
    env_step: int
    gradient_step: int


class OptimizerSettings(NamedTuple):
    """What an optimizer works with; `beta2` is None where it is not Adam."""

    learning_rate: float
    beta2: float | None


def optimizer_settings(optimizer: Any) -> OptimizerSettings:
    """As it was used last."""
    group = optimizer.param_groups[0]
    betas = group.get("betas")
    return OptimizerSettings(float(group["lr"]), None if betas is None else float(betas[1]))


def coefficients_of(model: Any) -> dict[str, float]:
    """Weights of the losses as they are now: their value loss is the mean squared error, ours half of it."""
    return {"value": 2 * float(model.vf_coef), "entropy": float(model.ent_coef)}


def progress_of(model: Any) -> ModelProgress:
    """As far as a model knows: updates are counted by their steps, the steps of its optimizer by passes."""
    rollout = model.n_steps * model.n_envs
    minibatches = minibatches_of(model) if hasattr(model, "n_epochs") else 1
    return ModelProgress(model.num_timesteps // rollout, model.num_timesteps, model._n_updates * minibatches)


def minibatches_of(model: Any) -> int:
    """In one pass over a rollout."""
    rollout = int(model.n_steps * model.n_envs)
    return -(-rollout // int(getattr(model, "batch_size", rollout)))


def config_of(model: Any) -> dict[str, Any]:
    """The settings of a model that are plain, a schedule by what it begins with."""
    found = {name: _plain(getattr(model, name)) for name in SETTINGS if hasattr(model, name)}
    return {
        "algorithm": type(model).__name__,
        "policy": type(model.policy).__name__,
        **found,
        "policy_kwargs": {name: str(value) for name, value in model.policy_kwargs.items()},
    }


def updates_per_record(model: Any) -> int:
    """One where a rollout is learned from in passes; of A2C, whose updates are single steps, as many as collect enough transitions."""
    return 1 if hasattr(model, "n_epochs") else -(-TRANSITIONS // int(model.n_steps * model.n_envs))


def facts_of(model: Any, heads: Heads, updates: int) -> dict[str, Any]:
    """What detectors need to know of this run, whose records tell of so many updates each; plain Python."""
    policy, spec, scaled = model.policy, _spec(model), model.get_vec_normalize_env()
    lstm = getattr(policy, "lstm_actor", None)
    return {
        "trainer": f"stable-baselines3 {type(model).__name__}",
        "env": "" if spec is None else str(spec.id),
        "total_steps": model._total_timesteps,
        "num_envs": model.n_envs,
        "ranks": 1,
        "horizon": None if spec is None else spec.max_episode_steps,
        "precision": "fp32",
        "optimizer": type(policy.optimizer).__name__,
        "advantage_correction": 1,
        "groups": groups_of(policy),
        "value_head": ["value_net"],
        "heads": heads.kinds,
        "max_grad_norm": model.max_grad_norm,
        "clip": _initial(getattr(model, "clip_range", None)),
        "clip_value": _initial(getattr(model, "clip_range_vf", None)),
        "gamma": model.gamma,
        "gae_lambda": model.gae_lambda,
        "normalize_advantages": bool(model.normalize_advantage),
        "normalize_minibatches": True,
        "num_steps": updates * model.n_steps,
        "num_epochs": getattr(model, "n_epochs", 1),
        "num_minibatches": updates * minibatches_of(model),
        "learning_rate": float(model.lr_schedule(1.0)),
        "value_coef": 2 * model.vf_coef,  # their loss is the mean squared error, ours half of it
        "entropy_coef": model.ent_coef,
        "policy": "mlp" if lstm is None else "lstm",
        "lstm_size": None if lstm is None else lstm.hidden_size,
        "activation": _activation(policy),
        "normalize_observations": bool(scaled is not None and scaled.norm_obs),
        "normalize_rewards": bool(scaled is not None and scaled.norm_reward),
        "target_kl": getattr(model, "target_kl", None),
        "desired_kl": None,
    }


def groups_of(policy: nn.Module) -> dict[str, list[str]]:
    """Names of the parameters that serve the actor, the critic or both, and again of the memory's."""
    names = list(trainable(policy))
    owners = {name: _owner(policy, name) for name in names}
    found = {group: [name for name in names if owners[name] == group] for group in ("actor", "shared", "critic")}
    found["lstm"] = [name for name in names if name.split(".")[0] in ("lstm_actor", "lstm_critic")]
    return {group: members for group, members in found.items() if members}


def trainable(policy: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, a tensor with several names by its first one."""
    return dict(policy.named_parameters())


def shares_trunk(policy: nn.Module) -> bool:
    """Whether parameters serve both losses."""
    return any(_owner(policy, name) == "shared" for name in trainable(policy))


def _owner(policy: nn.Module, name: str) -> str:
    parts = name.split(".")
    if any(part in CRITIC for part in parts):
        return "critic"
    if any(part in ACTOR for part in parts):
        return "actor"
    alone = getattr(policy, "share_features_extractor", True) is False
    if alone and parts[0] == "features_extractor":
        return "actor"  # the same object as `pi_features_extractor`
    return "actor" if getattr(policy, "shared_lstm", False) else "shared"


def _activation(policy: nn.Module) -> str | None:
    """That of the hidden layers, where metrics know it."""
    kind = getattr(policy, "activation_fn", None)
    return "tanh" if kind is nn.Tanh else "relu" if kind is nn.ReLU else None


def _spec(model: Any) -> Any:
    """Of the first environment; None where there is none to be had."""
    try:
        return model.get_env().get_attr("spec")[0]
    except Exception:  # whatever an environment raises where it has no such attribute
        return None


def _initial(value: Any) -> float | None:
    """The value that a schedule begins with."""
    return None if value is None else float(value(1.0) if callable(value) else value)


def _plain(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    try:
        return float(value(1.0)) if callable(value) else str(value)
    except Exception:  # not a schedule
        return str(value)
