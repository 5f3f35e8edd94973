"""Small trainers for the tests of faults, and the records of their runs."""

from contextlib import suppress
from typing import Any

from esper_telemetry.core.record import Record
from esper_telemetry.lab.faults import Fault, schedule
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.telemetry import Telemetry, attach

MEMORY: dict[str, Any] = {
    "policy": "lstm",
    "num_steps": 16,
    "num_epochs": 2,
    "num_minibatches": 2,
    "encoder_sizes": (16,),
    "hidden_sizes": (),
    "lstm_size": 16,
    "activation": "relu",
    "shared_trunk": True,
    "entropy_coef": 0.01,
    "anneal_learning_rate": False,
}
PLAIN: dict[str, Any] = {"num_steps": 32, "num_epochs": 2, "num_minibatches": 2, "hidden_sizes": (16, 16)}


def recall(**settings: Any) -> PPO:
    """CueRecall with an LSTM: memory, two heads, restricted choices, ReLU."""
    return PPO(make_env("cue-recall", num_envs=8, seed=1), PPOConfig(**{**MEMORY, "seed": 1, **settings}))


def cartpole(**settings: Any) -> PPO:
    return PPO(make_env("CartPole-v1", num_envs=4, seed=1), PPOConfig(**{**PLAIN, "seed": 1, **settings}))


def pendulum(**settings: Any) -> PPO:
    return PPO(make_env("Pendulum-v1", num_envs=2, seed=1), PPOConfig(**{**PLAIN, "seed": 1, **settings}))


def learn(trainer: PPO, updates: int) -> None:
    per_update = trainer.config.num_steps * trainer.env.num_envs
    trainer.learn(per_update * (trainer.updates + updates))


def recorded(trainer: PPO, fault: str | Fault | None = None, *, at_update: int = 2, updates: int = 3) -> list[Record]:
    """Return the records of a run whose fault begins at that update. The run lasts until weights are non-finite."""
    records: list[Record] = []
    with suppress(FloatingPointError), Telemetry([records.append], run_dir=None, level="debug") as telemetry:
        attach(telemetry, trainer)
        if fault is not None:
            schedule(trainer, fault, at_update=at_update)
        learn(trainer, updates)
    return records
