"""What a fault needs of a trainer: functions that return the sentence that says what is missing, or None."""

from __future__ import annotations

from esper_telemetry.ppo.networks.mlp import MLP
from esper_telemetry.ppo.networks.recurrent import RecurrentTrunk
from esper_telemetry.ppo.trainer import PPO


def memory(trainer: PPO) -> str | None:
    """A recurrent policy."""
    return None if trainer.policy.cores() else "its policy has no memory"


def lstm(trainer: PPO) -> str | None:
    """An LSTM: a GRU has no forget gate."""
    kinds = {core.kind for core in trainer.policy.cores().values()}
    return None if "lstm" in kinds else "its policy has no LSTM"


def restrictions(trainer: PPO) -> str | None:
    """Actions that are masked or matter only sometimes."""
    masked = hasattr(trainer.env, "action_masks")
    partly = any(spec.relevant_for is not None for spec in trainer.env.action_specs.values())
    return None if masked or partly else "it has no action masks"


def several_heads(trainer: PPO) -> str | None:
    """An action of several parts."""
    return None if len(trainer.env.action_specs) > 1 else "its actions have one part"


def choices(trainer: PPO) -> str | None:
    """A categorical part of the action."""
    kinds = {spec.kind for spec in trainer.env.action_specs.values()}
    return None if "categorical" in kinds else "its actions are continuous"


def relu(trainer: PPO) -> str | None:
    """Hidden layers with ReLU that read the observation."""
    layers = first_layers(trainer)
    return None if layers and trainer.config.activation == "relu" else "no layer with ReLU reads its observations"


def normalized_advantages(trainer: PPO) -> str | None:
    """Advantages that are said to be normalised."""
    return None if trainer.config.normalize_advantages else "its advantages are not normalised"


def normalized_observations(trainer: PPO) -> str | None:
    """A running normaliser of observations."""
    return None if trainer.normalizers.observations is not None else "its observations are not normalised"


def numbers(trainer: PPO) -> str | None:
    """Observations that can be scaled."""
    layout = getattr(trainer.env, "observation_layout", None)
    return "its observations hold images" if layout is not None and layout.images else None


def on_the_host(trainer: PPO) -> str | None:
    """Environments that are stepped as arrays."""
    env: object = trainer.collector.env
    arrays = not hasattr(env, "device")
    return None if arrays else "its environments step on a device"


def several_environments(trainer: PPO) -> str | None:
    """More than one environment side by side."""
    return None if trainer.env.num_envs > 1 else "it has one environment only"


def scheduled_rate(trainer: PPO) -> str | None:
    """A learning rate that does not follow the KL."""
    return None if trainer.config.desired_kl is None else "its learning rate follows the KL"


def several_minibatches(trainer: PPO) -> str | None:
    """More than one minibatch in a pass."""
    return None if trainer.config.num_minibatches > 1 else "it takes one minibatch per pass"


def first_layers(trainer: PPO) -> list[MLP]:
    """The hidden layers that read the observations, of every trunk; those behind convolutions are none."""
    trunks = trainer.policy.named_trunks().values()
    readers = [trunk.encoder if isinstance(trunk, RecurrentTrunk) else trunk for trunk in trunks]
    return [reader for reader in readers if isinstance(reader, MLP) and len(reader.layers)]
