"""PPO of Stable-Baselines3 or the bundled trainer with given settings, under telemetry.

python library_program.py --trainer sb3 --env-id CartPole-v1 --settings '{"n_steps": 128}' --run-dir runs/a
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import task_environment
import torch

from esper_telemetry import PPO, PPOConfig, Telemetry, attach
from esper_telemetry.adapters.sb3 import TelemetryCallback
from esper_telemetry.ppo.environments.gymnasium import GymnasiumEnvironment

ACTIVATIONS = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU, "saturated": lambda: torch.nn.Hardtanh(-1e-4, 1e-4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", choices=["sb3", "bundled"], required=True)
    parser.add_argument("--env-id", required=True)
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--total-timesteps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, help="directory of telemetry, which is off without it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    level = "normal" if args.run_dir else "off"
    with Telemetry([], run_dir=args.run_dir, level=level, offload=False) as telemetry:
        (train_sb3 if args.trainer == "sb3" else train_bundled)(args, dict(args.settings), telemetry)


def train_sb3(args: Any, settings: dict[str, Any], telemetry: Telemetry) -> None:
    """Train with settings of PPO, plus `n_envs`, `normalize`, `linear_rate`, and `activation` in `policy_kwargs`."""
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    env: Any = make_vec_env(lambda: task_environment.make(args.env_id), settings.pop("n_envs", 1), seed=args.seed)
    if settings.pop("normalize", False):
        env = VecNormalize(env, gamma=settings.get("gamma", 0.99))
    if settings.pop("linear_rate", False):
        initial = settings["learning_rate"]
        settings["learning_rate"] = lambda left: left * initial
    policy_kwargs = settings.setdefault("policy_kwargs", {})
    if "activation" in policy_kwargs:
        policy_kwargs["activation_fn"] = ACTIVATIONS[policy_kwargs.pop("activation")]
    model = stable_baselines3.PPO("MlpPolicy", env, seed=args.seed, device="cpu", **settings)
    model.learn(args.total_timesteps, callback=TelemetryCallback(telemetry))


def train_bundled(args: Any, settings: dict[str, Any], telemetry: Telemetry) -> None:
    """Train with settings of `PPOConfig`, plus `num_envs`."""
    makers = [lambda: task_environment.make(args.env_id) for _ in range(settings.pop("num_envs", 8))]
    vector = gym.vector.SyncVectorEnv(makers, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    env = GymnasiumEnvironment(vector, name=args.env_id, seed=args.seed)
    trainer = PPO(env, PPOConfig(**settings, seed=args.seed))
    attach(telemetry, trainer)
    trainer.learn(total_steps=args.total_timesteps)


main()
