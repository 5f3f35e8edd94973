"""Healthy models of Stable-Baselines3 and sb3-contrib in their variants.

python sb3_healthy.py ppo CartPole-v1 --n-envs 1 --clip-range-vf 0.2
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("algorithm", choices=["ppo", "a2c", "recurrent", "masked"])
parser.add_argument("env")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--updates", type=int, default=4)
parser.add_argument("--n-envs", type=int, default=4)
parser.add_argument("--n-steps", type=int)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--n-epochs", type=int, default=3)
parser.add_argument("--gamma", type=float, default=0.98)
parser.add_argument("--gae-lambda", type=float)
parser.add_argument("--clip-range-vf", type=float)
parser.add_argument("--ent-coef", type=float, default=0.01)
parser.add_argument("--target-kl", type=float)
parser.add_argument("--no-normalize-advantage", action="store_true")
parser.add_argument("--normalize", choices=["observations", "rewards", "both"])
parser.add_argument("--gsde", action="store_true")
parser.add_argument("--squash", action="store_true")
parser.add_argument("--linear-rate", action="store_true")
parser.add_argument("--adam", action="store_true", help="A2C with Adam")
parser.add_argument("--rms-prop", action="store_true", help="PPO with RMSprop")
parser.add_argument("--linear-clip", action="store_true")
parser.add_argument("--max-grad-norm", type=float, default=0.5)
parser.add_argument("--shared-lstm", action="store_true")
args = parser.parse_args()


class WithoutVelocities(gym.ObservationWrapper[Any, Any, Any]):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(-5, 5, (2,), np.float32)

    def observation(self, observation: Any) -> Any:
        return observation[::2]


def make_env() -> Any:
    if args.env == "CartPoleWithoutVelocities":
        return WithoutVelocities(gym.make("CartPole-v1"))
    kwargs = {"is_slippery": True} if args.env.startswith("FrozenLake") else {}
    env: Any = gym.make(args.env, **kwargs)
    if isinstance(env.observation_space, spaces.Discrete):
        count = int(env.observation_space.n)
        box = spaces.Box(0, 1, (count,), np.float32)
        env = gym.wrappers.TransformObservation(env, lambda state: np.eye(count, dtype=np.float32)[state], box)
    if args.algorithm == "masked" and not hasattr(env.unwrapped, "action_masks"):
        rng = np.random.default_rng(args.seed)
        choices = int(env.action_space.n)
        env = ActionMasker(env, lambda _: np.arange(choices) != rng.integers(choices + 1))
    return env


def main() -> None:
    env: Any = make_vec_env(make_env, args.n_envs, seed=args.seed)
    if args.normalize:
        kinds = {"norm_obs": args.normalize != "rewards", "norm_reward": args.normalize != "observations"}
        env = VecNormalize(env, gamma=args.gamma, **kinds)
    rate: Any = (lambda left: 1e-3 * left) if args.linear_rate else 1e-3
    settings: dict[str, Any] = {"learning_rate": rate, "gamma": args.gamma, "ent_coef": args.ent_coef}
    settings |= {"seed": args.seed, "device": "cpu", "normalize_advantage": not args.no_normalize_advantage}
    settings["max_grad_norm"] = args.max_grad_norm
    settings["n_steps"] = args.n_steps or (8 if args.algorithm == "a2c" else 64)
    if args.gae_lambda is not None:
        settings["gae_lambda"] = args.gae_lambda
    policy_kwargs: dict[str, Any] = {"net_arch": [32, 32]}
    if args.gsde:
        settings |= {"use_sde": True, "sde_sample_freq": 4}
        policy_kwargs["squash_output"] = args.squash
    if args.algorithm != "a2c":
        settings |= {"batch_size": args.batch_size, "n_epochs": args.n_epochs, "target_kl": args.target_kl}
        settings["clip_range_vf"] = args.clip_range_vf
        settings["clip_range"] = (lambda left: 0.2 * left) if args.linear_clip else 0.2
    if args.rms_prop:
        policy_kwargs |= {"optimizer_class": th.optim.RMSprop, "optimizer_kwargs": {}}
    several = "MultiInput" if isinstance(env.observation_space, spaces.Dict) else "Mlp"
    model: Any
    if args.algorithm == "ppo":
        model = PPO(f"{several}Policy", env, policy_kwargs=policy_kwargs, **settings)
    elif args.algorithm == "a2c":
        model = A2C(f"{several}Policy", env, policy_kwargs=policy_kwargs, use_rms_prop=not args.adam, **settings)
    elif args.algorithm == "recurrent":
        policy_kwargs |= {"lstm_hidden_size": 16}
        if args.shared_lstm:
            policy_kwargs |= {"shared_lstm": True, "enable_critic_lstm": False}
        model = RecurrentPPO(f"{several}LstmPolicy", env, policy_kwargs=policy_kwargs, **settings)
    else:
        model = MaskablePPO(f"{several}Policy", env, policy_kwargs=policy_kwargs, **settings)
    updates = args.updates * (24 if args.algorithm == "a2c" else 1)
    model.learn(updates * settings["n_steps"] * args.n_envs)
    parameters = th.cat([p.detach().flatten() for p in model.policy.parameters()])
    print("weights", hashlib.sha256(parameters.numpy().tobytes()).hexdigest()[:12])


main()
