"""Stable-Baselines3 programs with one mistake each in collecting rollouts, as users make them."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_models import of_corpus
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import VecEnvWrapper, VecNormalize
from torch import Tensor, nn

from esper_telemetry.lab.faults.sb3_models import MaskedArms

SETTINGS: Mapping[str, Any] = {"n_steps": 64, "batch_size": 64, "n_epochs": 2, "device": "cpu"}


def vec_env(name: str = "CartPole-v1", *, seed: int = 1, **settings: Any) -> Any:
    return make_vec_env(name, 4, seed=seed, **settings)


def short_pendulum(seed: int) -> Any:
    """Pendulums whose episodes a time limit ends within the rollout."""
    return vec_env("Pendulum-v1", seed=seed, env_kwargs={"max_episode_steps": 15})


def ppo(env: Any, policy: Any = "MlpPolicy", *, kind: Any = PPO, seed: int = 1, **settings: Any) -> Any:
    return kind(policy, env, **{**SETTINGS, "seed": seed, **settings})


class Late(gym.Wrapper[Any, Any, Any, Any]):
    """Sends each action to the environment five steps after it was chosen, below everything that Stable-Baselines3 sees."""

    def reset(self, **settings: Any) -> Any:
        self._waiting = [self.action_space.sample() for _ in range(5)]
        return self.env.reset(**settings)

    def step(self, action: Any) -> Any:
        self._waiting.append(action)
        return self.env.step(self._waiting.pop(0))


class OtherOrder(VecEnvWrapper):
    def reset(self) -> Any:
        return self.venv.reset()

    def step_async(self, actions: Any) -> None:
        self.venv.step_async(np.roll(actions, 1, axis=0))

    def step_wait(self) -> Any:
        return self.venv.step_wait()


class Dropout(FlattenExtractor):
    """Drops a fifth of the observation's entries in training."""

    def __init__(self, space: Any) -> None:
        super().__init__(space)
        self.dropout = nn.Dropout(0.2)

    def forward(self, observations: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(super().forward(observations))
        return dropped


class Normed(FlattenExtractor):
    def __init__(self, space: Any) -> None:
        super().__init__(space)
        self.norm = nn.BatchNorm1d(self.features_dim)

    def forward(self, observations: Tensor) -> Tensor:
        normed: Tensor = self.norm(super().forward(observations))
        return normed


class LastObservation(ActorCriticPolicy):
    """Acts on the previous step's observation."""

    last: Any = None

    def forward(self, obs: Any, deterministic: bool = False) -> Any:
        before = obs if self.last is None else self.last
        object.__setattr__(self, "last", obs.clone())
        return super().forward(before, deterministic)


class MeanLogProb(ActorCriticPolicy):
    """Averages log-probabilities over the dimensions of the action, both in acting and in training."""

    def forward(self, obs: Any, deterministic: bool = False) -> Any:
        actions, values, log_probs = super().forward(obs, deterministic)
        return actions, values, log_probs / actions.shape[-1]

    def evaluate_actions(self, obs: Any, actions: Any) -> Any:
        values, log_probs, entropy = super().evaluate_actions(obs, actions)
        return values, log_probs / actions.shape[-1], entropy


class ReacherLike(gym.Env[Any, Any]):
    """Three numbers to match in each step."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (3,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self._target(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        paid = -float(np.abs(np.asarray(action) - self._shown).sum())
        return self._target(), paid, False, self._steps >= 20, {}

    def _target(self) -> Any:
        self._shown = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return self._shown


class LateRewards(RolloutBuffer):
    late: Any = None

    def add(self, obs: Any, action: Any, reward: Any, *rest: Any, **named: Any) -> None:
        before, self.late = (np.zeros_like(reward) if self.late is None else self.late), np.array(reward)
        super().add(obs, action, before, *rest, **named)


class ClippedRewards(RolloutBuffer):
    """Clips rewards when they are stored, including rewards that contain the value after a time limit."""

    def add(self, obs: Any, action: Any, reward: Any, *rest: Any, **named: Any) -> None:
        super().add(obs, action, np.clip(reward, -10, 10), *rest, **named)


class ScaledRewards(RolloutBuffer):
    def add(self, obs: Any, action: Any, reward: Any, *rest: Any, **named: Any) -> None:
        super().add(obs, action, 0.1 * reward, *rest, **named)


class RawRewards(PPO):
    """Stores unnormalised rewards and adds no value after time limits."""

    def collect_rollouts(self, env: Any, callback: Any, rollout_buffer: Any, n_rollout_steps: int) -> bool:
        add = rollout_buffer.add

        def add_raw(obs: Any, action: Any, reward: Any, *rest: Any) -> None:
            add(obs, action, env.get_original_reward(), *rest)

        rollout_buffer.add = add_raw
        try:
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        finally:
            del rollout_buffer.add


class ChangedAnswers(PPO):
    """Continues with observations or rewards that differ from the environments' answers."""

    def changed(self, env: Any, observations: Any, rewards: Any, dones: Any, infos: Any) -> tuple[Any, Any]:
        """Return the observations and rewards to continue with."""
        raise NotImplementedError

    def collect_rollouts(self, env: Any, *arguments: Any, **named: Any) -> bool:
        step = env.step

        def other(actions: Any) -> Any:
            answer = step(actions)
            return *self.changed(env, *answer), *answer[2:]

        env.step = other
        try:
            return super().collect_rollouts(env, *arguments, **named)
        finally:
            del env.step


class RawAnswers(ChangedAnswers):
    def changed(self, env: Any, observations: Any, rewards: Any, dones: Any, infos: Any) -> tuple[Any, Any]:
        return observations, env.get_original_reward()


class OwnNames(PPO):
    """A collecting loop with other variable names for the observations; it also keeps an episode's last observation."""

    def collect_rollouts(self, env: Any, callback: Any, rollout_buffer: Any, n_rollout_steps: int) -> bool:
        rollout_buffer.reset()
        callback.on_rollout_start()
        for _ in range(n_rollout_steps):
            with torch.no_grad():
                chosen, value, log_prob = self.policy(torch.as_tensor(self._last_obs))
            after, rewards, dones, infos = env.step(chosen.numpy())
            self.num_timesteps += env.num_envs
            callback.update_locals(locals())
            if not callback.on_step():
                return False
            after = after.copy()
            for index in np.flatnonzero(dones):
                after[index] = infos[index]["terminal_observation"]
            starts = self._last_episode_starts
            rollout_buffer.add(self._last_obs, chosen.numpy().reshape(-1, 1), rewards, starts, value, log_prob)
            self._last_obs, self._last_episode_starts = after, dones
        with torch.no_grad():
            last = self.policy.predict_values(torch.as_tensor(self._last_obs))
        rollout_buffer.compute_returns_and_advantage(last_values=last, dones=dones)
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True


class ScaledAnswers(ChangedAnswers):
    def changed(self, env: Any, observations: Any, rewards: Any, dones: Any, infos: Any) -> tuple[Any, Any]:
        return observations / 2, rewards


class ListedMinibatches(RolloutBuffer):
    """Fetches all minibatches of a pass before using the first."""

    def get(self, batch_size: int | None = None) -> Any:
        yield from list(super().get(batch_size))


class NextFetched(RolloutBuffer):
    """Fetches the next minibatch while one is in use."""

    def get(self, batch_size: int | None = None) -> Any:
        fetched = super().get(batch_size)
        ready = next(fetched, None)
        while ready is not None:
            used, ready = ready, next(fetched, None)
            yield used


class ListedCopies(RolloutBuffer):
    """Fetches all minibatches of a pass at once and yields copies of their observations."""

    def get(self, batch_size: int | None = None) -> Any:
        for samples in list(super().get(batch_size)):
            yield samples._replace(observations=samples.observations.clone())


class LateObservations(RolloutBuffer):
    late: Any = None

    def add(self, obs: Any, *rest: Any, **named: Any) -> None:
        before, self.late = (obs if self.late is None else self.late), np.array(obs)
        super().add(before, *rest, **named)


class LastNormalised(PPO):
    """Normalises a rollout's observations again with the statistics at its end."""

    def collect_rollouts(self, env: Any, callback: Any, rollout_buffer: Any, n_rollout_steps: int) -> bool:
        raw = [env.get_original_obs()]
        step = env.step_wait

        def recorded() -> Any:
            result = step()
            raw.append(env.get_original_obs())
            return result

        env.step_wait = recorded
        end = callback.on_rollout_end

        def renormalise() -> None:
            rollout_buffer.observations[:] = [env.normalize_obs(x) for x in raw[:-1]]
            end()

        callback.on_rollout_end = renormalise
        try:
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        finally:
            env.step_wait = step
            del callback.on_rollout_end


class OlderWeights(PPO):
    """Acts with the weights from before the last update, and trains the newest weights."""

    older: Any = None

    def collect_rollouts(self, *arguments: Any, **named: Any) -> bool:
        newest = copy.deepcopy(self.policy.state_dict())
        self.policy.load_state_dict(newest if self.older is None else self.older)
        self.older = newest
        finished = super().collect_rollouts(*arguments, **named)
        self.policy.load_state_dict(newest)
        return finished


class StoresStatesAfter(RecurrentPPO):  # type: ignore[misc]
    """Stores the state that the policy returned for an observation, not the state that it received."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        forward, add, returned = self.policy.forward, self.rollout_buffer.add, {}

        def remembered(*inputs: Any, **named: Any) -> Any:
            result = forward(*inputs, **named)
            returned["states"] = result[3]
            return result

        self.policy.forward = remembered
        self.rollout_buffer.add = lambda *row, lstm_states: add(*row, lstm_states=self.kept(returned["states"], lstm_states))

    def kept(self, after: Any, before: Any) -> Any:
        return after


class StoresHalfTheStates(StoresStatesAfter):
    def kept(self, after: Any, before: Any) -> Any:
        return type(before)(*(tuple(part / 2 for part in pair) for pair in before))


class OtherActionsInTraining(ActorCriticPolicy):
    """Evaluates the actions of other rows in the minibatch."""

    def evaluate_actions(self, obs: Any, actions: Any) -> Any:
        return super().evaluate_actions(obs, actions.roll(1, 0))


def with_strong_memory(model: Any) -> Any:
    """Scale the LSTM and the head so that memory decides actions from the start."""
    with torch.no_grad():
        for name, weights in model.policy.named_parameters():
            weights.mul_(4 if "lstm" in name else 50 if "action_net.weight" in name else 1)
    return model


def recurrent(kind: Any = RecurrentPPO, *, policy: Any = "MlpLstmPolicy", seed: int = 1, **settings: Any) -> Any:
    return ppo(vec_env(seed=seed), policy, kind=kind, seed=seed, **settings)


def own_loop(mistake: str, env: Any, **settings: Any) -> Any:
    return ppo(env, kind=of_corpus(f"subclass-{mistake}").OwnPPO, **settings)


PROGRAMS: Mapping[str, tuple[Any, ...]] = {
    "an environment that never updates its observation": (
        lambda seed: own_loop("obs_never_updated", vec_env(seed=seed), seed=seed),
        "transitions_never_updated",
    ),
    "actions that are sent to other environments": (
        lambda seed: ppo(OtherOrder(vec_env(seed=seed)), seed=seed),
        "executed_actions_other_environment",
    ),
    "dropout in training": (
        lambda seed: ppo(vec_env(seed=seed), seed=seed, policy_kwargs={"features_extractor_class": Dropout}),
        "replayed_log_probs_other_mode",
    ),
    "batch norm in training": (
        lambda seed: ppo(vec_env(seed=seed), seed=seed, policy_kwargs={"features_extractor_class": Normed}),
        "replayed_log_probs_other_mode",
    ),
    "dropout in acting": (
        lambda seed: own_loop("dropout", vec_env(seed=seed), seed=seed, policy_kwargs={"activation_fn": dropped_tanh}),
        *("replayed_log_probs_random_passes", "values_random_passes"),
    ),
    "actions that are cut before they are stored": (
        lambda seed: own_loop("clipped_stored", vec_env("MountainCarContinuous-v0", seed=seed), seed=seed),
        "log_probs_clipped_actions",
    ),
    "the likeliest action always": (lambda seed: own_loop("argmax", vec_env(seed=seed), seed=seed), "actions_deterministic"),
    "a policy that acts on the observation before": (
        lambda seed: ppo(vec_env(seed=seed), LastObservation, seed=seed),
        *("replayed_log_probs_observation_before", "values_observation_before"),
    ),
    "log-probabilities averaged over dimensions": (
        lambda seed: ppo(make_vec_env(ReacherLike, 4, seed=seed), MeanLogProb, seed=seed),
        "log_probs_mean_over_dimensions",
    ),
    "rewards that are stored one step late, with the values after time limits": (
        lambda seed: ppo(short_pendulum(seed), seed=seed, rollout_buffer_class=LateRewards),
        "stored_rewards_step_before",
    ),
    "rewards that are stored as they were before normalisation": (
        lambda seed: ppo(VecNormalize(short_pendulum(seed)), kind=RawRewards, seed=seed),
        "stored_rewards_raw",
    ),
    "rewards before normalisation instead of the environments' answers": (
        lambda seed: ppo(VecNormalize(short_pendulum(seed)), kind=RawAnswers, seed=seed),
        "stored_rewards_raw",
    ),
    "an episode's final observation instead of the next episode's first observation": (
        lambda seed: own_loop("final_obs_after_reset", short_pendulum(seed), seed=seed),
        "transitions_final_observation",
    ),
    "the same mistake in a loop with other names": (
        lambda seed: ppo(vec_env(seed=seed, env_kwargs={"max_episode_steps": 15}), kind=OwnNames, seed=seed),
        "transitions_final_observation",
    ),
    "the previous step's observations instead of the environments' answers": (
        lambda seed: own_loop("acts_on_stale_obs", vec_env("Pendulum-v1", seed=seed), seed=seed),
        "transitions_stale",
    ),
    "observations that are stored one step late": (
        lambda seed: ppo(vec_env(seed=seed), seed=seed, rollout_buffer_class=LateObservations),
        *("transitions_stale", "replayed_log_probs_observation_after", "values_observation_after"),
    ),
    "statistics that change between collecting and training": (
        lambda seed: ppo(VecNormalize(vec_env(seed=seed)), kind=LastNormalised, seed=seed),
        *("replayed_log_probs_other_statistics", "values_other_statistics"),
    ),
    "weights of an update before in acting": (
        lambda seed: ppo(vec_env(seed=seed), kind=OlderWeights, seed=seed),
        *("replayed_log_probs_older_weights", "values_older_weights"),
    ),
    "a memory that begins empty in training": (
        lambda seed: with_strong_memory(recurrent(policy=of_corpus("recurrent-zero_states").RecurrentPolicy, seed=seed, batch_size=48)),
        "replayed_log_probs_memory_zero",
    ),
    "masks that training leaves out": (
        lambda seed: masked(of_corpus("masked-no_mask_in_training").MaskedPolicy, seed),
        "replayed_log_probs_mask_missing",
    ),
    "hidden states that are stored one step late": (
        lambda seed: with_strong_memory(recurrent(StoresStatesAfter, seed=seed)),
        *("replayed_log_probs_memory_stored_late", "values_memory_stored_late"),
    ),
    "hidden states that are stored in other units": (
        lambda seed: with_strong_memory(recurrent(StoresHalfTheStates, seed=seed)),
        *("replayed_log_probs_other_memory", "values_other_memory"),
    ),
    "a memory that is never reset in acting": (
        lambda seed: recurrent(policy=of_corpus("recurrent-no_reset_in_acting").RecurrentPolicy, seed=seed),
        *("replayed_log_probs_memory_not_reset", "values_memory_not_reset"),
    ),
}
"""By mistake: a program, and the hypotheses that name the mistake, as the last segments of their keys."""


def dropped_tanh() -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Dropout(0.2))


def masked(policy: Any, seed: int) -> Any:
    return ppo(make_vec_env(MaskedArms, 4, seed=seed), policy, kind=MaskablePPO, seed=seed)


def late_effects(seed: int) -> Any:
    """Return a model whose actions take effect five steps late, which may be a property of the environment."""
    return ppo(vec_env("Acrobot-v1", seed=seed, wrapper_class=Late), seed=seed, n_steps=384, batch_size=256)


HEALTHY: Mapping[str, Callable[[int], Any]] = {
    "CartPole": lambda seed: ppo(vec_env(seed=seed), seed=seed),
    "Pendulum, normalised": lambda seed: ppo(VecNormalize(vec_env("Pendulum-v1", seed=seed)), seed=seed),
    "Pendulum, gSDE": lambda seed: ppo(vec_env("Pendulum-v1", seed=seed), seed=seed, use_sde=True, policy_kwargs={"squash_output": True}),
    "Pendulum, observations scaled by the loop": lambda seed: ppo(vec_env("Pendulum-v1", seed=seed), kind=ScaledAnswers, seed=seed),
    "FrozenLake": lambda seed: ppo(vec_env("FrozenLake-v1", seed=seed), seed=seed),
    "CliffWalking": lambda seed: ppo(vec_env("CliffWalking-v1", seed=seed), seed=seed),
    "MountainCarContinuous": lambda seed: ppo(vec_env("MountainCarContinuous-v0", seed=seed), seed=seed),
    "A2C": lambda seed: A2C("MlpPolicy", vec_env(seed=seed), device="cpu", seed=seed),
    "RecurrentPPO": lambda seed: recurrent(seed=seed),
    "MaskablePPO": lambda seed: masked("MlpPolicy", seed),
}
"""Correct programs by name."""
