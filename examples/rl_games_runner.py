"""rl_games' PPO under telemetry: the observer of its runner.

python examples/rl_games_runner.py && tensorboard --logdir runs
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium as gym
import torch
from rl_games.common import env_configurations, vecenv
from rl_games.common.ivecenv import IVecEnv
from rl_games.torch_runner import Runner
from torch import Tensor

from esper_telemetry import Telemetry
from esper_telemetry.adapters.rl_games import TelemetryObserver

ENVS, STEPS = 16, 64


class CartPole(IVecEnv):  # type: ignore[misc] # the package has no type information
    """CartPole-v1 with tensors and time limits; it replaces Isaac Lab's environments."""

    def __init__(self, envs: int) -> None:
        same_step = gym.vector.AutoresetMode.SAME_STEP
        self._env = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * envs, autoreset_mode=same_step)

    def get_env_info(self) -> dict[str, Any]:
        return {"observation_space": self._env.single_observation_space, "action_space": self._env.single_action_space}

    def reset(self) -> Tensor:
        return torch.as_tensor(self._env.reset(seed=1)[0])

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        observations, rewards, terminated, truncated, _ = self._env.step(actions.numpy())
        limits = {"time_outs": torch.as_tensor(truncated & ~terminated)}
        paid = torch.as_tensor(rewards, dtype=torch.float32)
        return torch.as_tensor(observations.copy()), paid, torch.as_tensor(terminated | truncated), limits


vecenv.register("CARTPOLE", lambda config_name, num_actors, **_: CartPole(num_actors))
env_configurations.register("cartpole", {"vecenv_type": "CARTPOLE", "env_creator": lambda **_: None})


def config(updates: int) -> dict[str, Any]:
    mlp = {"units": [64, 64], "activation": "tanh", "initializer": {"name": "default"}}
    return {
        "params": {
            "seed": 1,
            "algo": {"name": "a2c_discrete"},
            "model": {"name": "discrete_a2c"},
            "network": {"name": "actor_critic", "separate": True, "space": {"discrete": {}}, "mlp": mlp},
            "config": {
                "name": "cartpole",
                "env_name": "cartpole",
                "train_dir": "runs/rl_games",
                "device": "cpu",
                "torch_compile": False,
                "num_actors": ENVS,
                "horizon_length": STEPS,
                "minibatch_size": ENVS * STEPS // 4,
                "mini_epochs": 4,
                "max_epochs": updates,
                "reward_shaper": {},
                "value_bootstrap": True,
                "normalize_input": False,
                "normalize_value": True,
                "normalize_advantage": True,
                "gamma": 0.99,
                "tau": 0.95,
                "learning_rate": 1e-3,
                "lr_schedule": "adaptive",
                "kl_threshold": 0.008,
                "entropy_coef": 0.005,
                "critic_coef": 2.0,
                "clip_value": True,
                "e_clip": 0.2,
                "truncate_grads": True,
                "grad_norm": 1.0,
            },
        }
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=50_000)
    parser.add_argument("--run-dir", help="a new runs/rl-games-<time> by default")
    parser.add_argument("--sinks", nargs="*", default=["console", "tensorboard"], help="such as wandb mlflow")
    options = parser.parse_args()
    with Telemetry(options.sinks, run_dir=options.run_dir or "auto", name="rl-games") as telemetry:
        telemetry.on_alarm(lambda alarm: print(f"{alarm.event}: {alarm.type}. {alarm.text}"))
        runner = Runner(TelemetryObserver(telemetry))
        runner.load(config(options.total_steps // (ENVS * STEPS)))
        runner.run({"train": True})
    print(f"journal: {telemetry.run_dir}/journal.jsonl")


if __name__ == "__main__":
    main()
