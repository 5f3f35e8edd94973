"""PPO of Stable-Baselines3 in a subclass that contains every step that a mistake may change: collecting, advantages, and the update.

python sb3_program.py --env-id tasks:Drift-v0
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
import torch.nn.functional as F
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import obs_as_tensor


class Buffer(RolloutBuffer):
    def compute_returns_and_advantage(self, last_values: Any, dones: Any) -> None:
        last_values = last_values.clone().cpu().numpy().flatten()
        trace = np.zeros(self.n_envs, np.float32)
        for step in reversed(range(self.buffer_size)):
            if step == self.buffer_size - 1:
                alive, following = 1.0 - dones.astype(np.float32), last_values
            else:
                alive, following = 1.0 - self.episode_starts[step + 1], self.values[step + 1]
            delta = self.rewards[step] + self.gamma * following * alive - self.values[step]
            trace = delta + self.gamma * self.gae_lambda * alive * trace
            self.advantages[step] = trace
        self.returns = self.advantages + self.values


class OwnPPO(PPO):
    def collect_rollouts(self, env: Any, callback: Any, rollout_buffer: Any, n_rollout_steps: int) -> bool:
        self.policy.set_training_mode(False)
        rollout_buffer.reset()
        callback.on_rollout_start()
        for n_steps in range(n_rollout_steps):
            with th.no_grad():
                actions, values, log_probs = self.policy(obs_as_tensor(self._last_obs, self.device))
            actions = actions.cpu().numpy()
            clipped_actions = actions
            if isinstance(self.action_space, spaces.Box):
                clipped_actions = np.clip(actions, self.action_space.low, self.action_space.high)
            new_obs, rewards, dones, infos = env.step(clipped_actions)
            self.num_timesteps += env.num_envs
            callback.update_locals(locals())
            if not callback.on_step():
                return False
            self._update_info_buffer(infos, dones)
            if isinstance(self.action_space, spaces.Discrete):
                actions = actions.reshape(-1, 1)
            for idx, done in enumerate(dones):
                if done and infos[idx].get("TimeLimit.truncated", False):
                    terminal_obs = self.policy.obs_to_tensor(infos[idx]["terminal_observation"])[0]
                    with th.no_grad():
                        terminal_value = self.policy.predict_values(terminal_obs)[0]
                    rewards[idx] += self.gamma * terminal_value
            rollout_buffer.add(self._last_obs, actions, rewards, self._last_episode_starts, values, log_probs)
            self._last_obs = new_obs
            self._last_episode_starts = dones
        with th.no_grad():
            values = self.policy.predict_values(obs_as_tensor(new_obs, self.device))
        rollout_buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def train(self) -> None:
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        clip_range = self.clip_range(self._current_progress_remaining)
        for _epoch in range(self.n_epochs):
            for data in self.rollout_buffer.get(self.batch_size):
                actions = data.actions
                if isinstance(self.action_space, spaces.Discrete):
                    actions = actions.long().flatten()
                values, log_prob, entropy = self.policy.evaluate_actions(data.observations, actions)
                values = values.flatten()
                advantages = data.advantages
                if self.normalize_advantage:
                    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                ratio = th.exp(log_prob - data.old_log_prob)
                policy_loss_1 = advantages * ratio
                policy_loss_2 = advantages * th.clamp(ratio, 1 - clip_range, 1 + clip_range)
                policy_loss = -th.min(policy_loss_1, policy_loss_2).mean()
                value_loss = F.mse_loss(data.returns, values)
                entropy_loss = -th.mean(entropy)
                loss = policy_loss + self.ent_coef * entropy_loss + self.vf_coef * value_loss
                self.policy.optimizer.zero_grad()
                loss.backward()
                th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
                self.policy.optimizer.step()
            self._n_updates += 1


def make_env() -> Any:
    return gym.make(args.env_id)


def main() -> None:
    env: Any = make_vec_env(make_env, 6, seed=args.seed)
    settings: dict[str, Any] = {
        "n_steps": 64,
        "batch_size": 96,
        "n_epochs": 3,
        "learning_rate": 1e-3,
        "gamma": 0.98,
        "gae_lambda": 0.9,
        "ent_coef": 0.02,
        "seed": args.seed,
        "device": "cpu",
    }
    policy_kwargs: dict[str, Any] = {"net_arch": [32, 32]}
    model = OwnPPO("MlpPolicy", env, rollout_buffer_class=Buffer, policy_kwargs=policy_kwargs, **settings)
    with th.no_grad():
        model.policy.action_net.weight.mul_(100)
    model.learn(args.total_timesteps)
    parameters = th.cat([p.detach().flatten() for p in model.policy.parameters()])
    print("weights", hashlib.sha256(parameters.numpy().tobytes()).hexdigest()[:12])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env-id", default="tasks:Drift-v0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=2048)
    args = parser.parse_args()
    main()
