"""RecurrentPPO and MaskablePPO of sb3-contrib, in subclasses that contain every step that a mistake may change.

python contrib_program.py --kind recurrent
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import gymnasium as gym
import torch as th
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3.common.env_util import make_vec_env


class RecurrentPolicy(RecurrentActorCriticPolicy):
    def evaluate_actions(self, obs: Any, actions: Any, lstm_states: Any, episode_starts: Any) -> Any:
        values, log_prob, entropy = super().evaluate_actions(obs, actions, lstm_states, episode_starts)
        return values, log_prob, entropy


class MaskedPolicy(MaskableActorCriticPolicy):
    def evaluate_actions(self, obs: Any, actions: Any, action_masks: Any = None) -> Any:
        values, log_prob, entropy = super().evaluate_actions(obs, actions, action_masks)
        return values, log_prob, entropy


def main() -> None:
    env: Any = make_vec_env(lambda: gym.make(args.env_id), 6, seed=args.seed)
    settings: dict[str, Any] = {"n_steps": 64, "batch_size": 96, "n_epochs": 3, "learning_rate": 1e-3, "gamma": 0.98}
    settings |= {"gae_lambda": 0.9, "ent_coef": 0.02, "seed": args.seed, "device": "cpu"}
    model: Any
    if args.kind == "recurrent":
        sizes = {"lstm_hidden_size": 16, "net_arch": [16]}
        model = RecurrentPPO(RecurrentPolicy, env, policy_kwargs=sizes, **settings)
        with th.no_grad():
            for name, weights in model.policy.named_parameters():
                weights.mul_(4 if "lstm" in name else 1)
    else:
        model = MaskablePPO(MaskedPolicy, env, policy_kwargs={"net_arch": [32, 32]}, **settings)
    with th.no_grad():
        model.policy.action_net.weight.mul_(100)
    model.learn(args.total_timesteps)
    parameters = th.cat([p.detach().flatten() for p in model.policy.parameters()])
    print("weights", hashlib.sha256(parameters.numpy().tobytes()).hexdigest()[:12])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="recurrent")
    parser.add_argument("--env-id", default="tasks:MaskedDrift-v0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=2048)
    args = parser.parse_args()
    main()
