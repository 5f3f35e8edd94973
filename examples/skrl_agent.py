"""skrl's PPO under telemetry: one more line before training.

python examples/skrl_agent.py && tensorboard --logdir runs
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium as gym
import torch
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.trainers.torch import SequentialTrainer
from skrl.utils.model_instantiators.torch import categorical_model, deterministic_model

from esper_telemetry import Telemetry
from esper_telemetry.adapters.skrl import attach_agent

ENVS, STEPS = 16, 64


def agent(env: Any) -> PPO:
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "device": "cpu"}
    layers = [{"name": "net", "input": "OBSERVATIONS", "layers": [64, 64], "activations": "tanh"}]
    models = {
        "policy": categorical_model(**spaces, network=layers, output="ACTIONS"),
        "value": deterministic_model(**spaces, network=layers, output="ONE"),
    }
    for role, model in models.items():
        model.init_state_dict(role=role)
    cfg = PPO_CFG(rollouts=STEPS, learning_epochs=4, mini_batches=4, value_loss_scale=0.5, time_limit_bootstrap=True)
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    return PPO(models=models, memory=RandomMemory(memory_size=STEPS, num_envs=ENVS, device="cpu"), cfg=cfg, **spaces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=50_000)
    parser.add_argument("--run-dir", help="a new runs/skrl-<time> by default")
    parser.add_argument("--sinks", nargs="*", default=["console", "tensorboard"], help="such as wandb mlflow")
    options = parser.parse_args()
    torch.manual_seed(1)
    same_step = gym.vector.AutoresetMode.SAME_STEP
    env = wrap_env(gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * ENVS, autoreset_mode=same_step))
    ppo = agent(env)
    cfg = {"timesteps": options.total_steps // ENVS, "headless": True, "disable_progressbar": True}
    trainer = SequentialTrainer(cfg=cfg, env=env, agents=ppo)
    with Telemetry(options.sinks, run_dir=options.run_dir or "auto", name="skrl") as telemetry:
        telemetry.on_alarm(lambda alarm: print(f"{alarm.event}: {alarm.type}. {alarm.text}"))
        attach_agent(telemetry, ppo)
        trainer.train()
    print(f"journal: {telemetry.run_dir}/journal.jsonl")


if __name__ == "__main__":
    main()
