"""A typical script for Stable-Baselines3, without any use of telemetry."""

import argparse

import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList

parser = argparse.ArgumentParser()
parser.add_argument("--callback", default="none")
parser.add_argument("--learning-rate", type=float, default=3e-4)
parser.add_argument("--steps", type=int, default=512)
parser.add_argument("--again", action="store_true")
parser.add_argument("--second", action="store_true")
args = parser.parse_args()


class Counting(BaseCallback):
    """Counts the steps, and the calls that prepare it."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared = 0

    def _init_callback(self) -> None:
        self.prepared += 1

    def _on_step(self) -> bool:
        return True


def make(seed: int) -> PPO:
    env = gym.make("CartPole-v1")
    settings = {"n_steps": 128, "batch_size": 64, "n_epochs": 2, "device": "cpu", "learning_rate": args.learning_rate}
    return PPO("MlpPolicy", env, seed=seed, **settings)


counting = Counting()
callbacks = {
    "none": None,
    "function": lambda local, general: True,
    "list": [counting],
    "object": counting,
    "nested": CallbackList([CallbackList([counting])]),
}
model = make(3)
model.learn(args.steps, callback=callbacks[args.callback], progress_bar=False)
if args.again:
    model.learn(args.steps, reset_num_timesteps=False)
if args.second:
    make(4).learn(args.steps)
if args.callback in ("list", "object", "nested"):
    print("calls", counting.n_calls, "prepared", counting.prepared, "parent", counting.parent)
print("weights", sum(float(parameter.detach().double().sum()) for parameter in model.policy.parameters()).hex())
print("draws", torch.rand(1).item())
