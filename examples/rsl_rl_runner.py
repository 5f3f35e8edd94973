"""RSL-RL's PPO under telemetry: one more line before `learn`; or one entry of the configuration, with `--writer`.

python examples/rsl_rl_runner.py && tensorboard --logdir runs
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict
from torch import Tensor

from esper_telemetry import Telemetry
from esper_telemetry.adapters.rsl_rl import attach_runner

ENVS, STEPS = 16, 64


class SignedCartPole(VecEnv):  # type: ignore[misc] # the package has no type information
    """CartPole-v1 in which a positive action pushes right; it replaces Isaac Lab's environments."""

    def __init__(self) -> None:
        self.num_envs, self.num_actions, self.max_episode_length, self.device = ENVS, 1, 500, "cpu"
        self.cfg: dict[str, Any] = {}
        self.episode_length_buf = torch.zeros(ENVS, dtype=torch.long)
        envs = [lambda: gym.make("CartPole-v1")] * ENVS
        self._env = gym.vector.SyncVectorEnv(envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
        self._observations, _ = self._env.reset(seed=1)

    def get_observations(self) -> TensorDict:
        return TensorDict({"policy": torch.as_tensor(self._observations.copy())}, batch_size=[ENVS])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        outcome = self._env.step((actions[:, 0] > 0).long().numpy())
        self._observations, rewards, terminated, truncated, _ = outcome
        dones = torch.as_tensor(terminated | truncated).long()
        extras = {"time_outs": torch.as_tensor(truncated & ~terminated)}
        return self.get_observations(), torch.as_tensor(rewards, dtype=torch.float32), dones, extras


def config() -> dict[str, Any]:
    networks = {"class_name": "MLPModel", "hidden_dims": [64, 64], "activation": "tanh"}
    return {
        "num_steps_per_env": STEPS,
        "save_interval": 100,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 4, "num_mini_batches": 4, "entropy_coef": 0.005},
        "actor": {**networks, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0}},
        "critic": networks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=50_000)
    parser.add_argument("--run-dir", help="a new runs/rsl-rl-<time> by default")
    parser.add_argument("--sinks", nargs="*", default=["console", "tensorboard"], help="such as wandb mlflow")
    parser.add_argument("--writer", action="store_true", help="attach through RSL-RL's configuration")
    options = parser.parse_args()
    torch.manual_seed(1)
    iterations = options.total_steps // (ENVS * STEPS)

    if options.writer:
        settings = config()
        path = "esper_telemetry.adapters.rsl_rl:TelemetryWriter"
        settings["logger"] = {"class_name": path, "sinks": options.sinks, "run_dir": options.run_dir}
        OnPolicyRunner(SignedCartPole(), settings, log_dir=str(Path(options.run_dir or "runs/rsl-rl") / "logs")).learn(iterations)
        return
    runner = OnPolicyRunner(SignedCartPole(), config(), log_dir=None)
    with Telemetry(options.sinks, run_dir=options.run_dir or "auto", name="rsl-rl") as telemetry:
        telemetry.on_alarm(lambda alarm: print(f"{alarm.event}: {alarm.type}. {alarm.text}"))
        attach_runner(telemetry, runner)
        runner.learn(iterations)
    print(f"journal: {telemetry.run_dir}/journal.jsonl")


if __name__ == "__main__":
    main()
