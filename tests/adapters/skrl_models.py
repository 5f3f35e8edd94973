"""Small agents of skrl: PPO with Gaussian and categorical policies, separate and shared models, preprocessors, an LSTM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from adapter_runs import moments, recorded, taps_in
from skrl.agents.torch.ppo import PPO, PPO_CFG, PPO_RNN
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.trainers.torch import SequentialTrainer
from skrl.utils.model_instantiators.torch import categorical_model, deterministic_model, gaussian_model, shared_model
from torch import Tensor, nn

from esper_telemetry import Telemetry
from esper_telemetry.adapters.skrl import attach_agent
from esper_telemetry.journal.read import Run

ENVS, STEPS = 8, 16
ROLLOUT = ENVS * STEPS
FAILING = ("next_values", "joined_minibatches", "SampledMinibatch")
IN_BACKENDS = ("categorical", "lstm")


class SkrlAgent:
    """An agent with its environment; `learn` continues where it was."""

    def __init__(self, agent: Any, env: Any) -> None:
        self.agent, self.env = agent, env

    def learn(self, updates: int) -> None:
        cfg = {"timesteps": updates * self.agent.cfg.rollouts, "headless": True, "disable_progressbar": True}
        cfg["close_environment_at_exit"] = False
        SequentialTrainer(cfg=cfg, env=self.env, agents=self.agent).train()


def pendulum_env(envs: int, *, seed: int, limit: int = 200, wrappers: Sequence[Callable[[Any], Any]] = ()) -> Any:
    """Pendulum-v1 with rewards divided by ten and actions from -1 to 1; only the time limit ends episodes."""
    scaled = (
        lambda env: gym.wrappers.RescaleAction(env, np.float32(-1), np.float32(1)),
        lambda env: gym.wrappers.TransformReward(env, lambda reward: 0.1 * float(reward)),
    )
    return _vector("Pendulum-v1", envs, seed, [*scaled, *wrappers], max_episode_steps=limit)


def cartpole_env(envs: int, *, seed: int, wrappers: Sequence[Callable[[Any], Any]] = ()) -> Any:
    return _vector("CartPole-v1", envs, seed, wrappers)


def _vector(name: str, envs: int, seed: int, wrappers: Sequence[Callable[[Any], Any]], **settings: Any) -> Any:
    def make() -> Any:
        env = gym.make(name, **settings)
        for wrapper in wrappers:
            env = wrapper(env)
        return env

    vector = gym.vector.SyncVectorEnv([make] * envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    env = wrap_env(vector, verbose=False)
    env._seed = seed
    return env


class LSTMModel:
    """What the policy and the critic with an LSTM share; sequences of `STEPS` steps."""

    hidden, length = 16, STEPS

    def build(self, outputs: int, envs: int, length: int) -> None:
        self.lstm = nn.LSTM(self.num_observations, self.hidden, batch_first=True)  # type: ignore[attr-defined]
        self.net = nn.Sequential(nn.Linear(self.hidden, 32), nn.Tanh(), nn.Linear(32, outputs))
        self.envs, self.length = envs, length

    def get_specification(self) -> dict[str, Any]:
        sizes = [(1, self.envs, self.hidden)] * 2
        return {"rnn": {"sequence_length": self.length, "sizes": sizes}}

    def features(self, inputs: Mapping[str, Any]) -> tuple[Tensor, list[Tensor]]:
        rows, (hidden, memory) = inputs["observations"], inputs["rnn"]
        if not self.training:  # type: ignore[attr-defined]
            out, states = self.lstm(rows.view(-1, 1, rows.shape[-1]), (hidden.contiguous(), memory.contiguous()))
            return out.flatten(0, 1), [*states]
        sequences = rows.view(-1, self.length, rows.shape[-1])
        first = [state.view(1, -1, self.length, self.hidden)[:, :, 0].contiguous() for state in (hidden, memory)]
        ended = (inputs["terminated"] | inputs["truncated"]).view(-1, self.length)
        steps, states = [], (first[0], first[1])
        for step in range(self.length):
            if step:
                alive = (~ended[:, step - 1]).float().view(1, -1, 1)
                states = (states[0] * alive, states[1] * alive)
            out, states = self.lstm(sequences[:, step : step + 1], states)
            steps.append(out)
        return torch.cat(steps, 1).flatten(0, 1), [*states]


class LSTMPolicy(LSTMModel, GaussianMixin, Model):  # type: ignore[misc, unused-ignore]  # skrl may be absent
    def __init__(self, envs: int, length: int, **spaces: Any) -> None:
        Model.__init__(self, **spaces)
        GaussianMixin.__init__(self)
        self.build(self.num_actions, envs, length)
        self.log_std = nn.Parameter(torch.zeros(self.num_actions))

    def compute(self, inputs: Mapping[str, Any], role: str) -> tuple[Tensor, dict[str, Any]]:
        features, states = self.features(inputs)
        return self.net(features), {"log_std": self.log_std, "rnn": states}


class LSTMValue(LSTMModel, DeterministicMixin, Model):  # type: ignore[misc, unused-ignore]  # skrl may be absent
    def __init__(self, envs: int, length: int, **spaces: Any) -> None:
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self.build(1, envs, length)

    def compute(self, inputs: Mapping[str, Any], role: str) -> tuple[Tensor, dict[str, Any]]:
        features, states = self.features(inputs)
        return self.net(features), {"rnn": states}


def networks(env: Any, kind: str, envs: int, steps: int, widths: Sequence[int]) -> dict[str, Any]:
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "device": "cpu"}
    layers = [{"name": "net", "input": "OBSERVATIONS", "layers": [*widths], "activations": "tanh"}]
    if kind == "lstm":
        return {"policy": LSTMPolicy(envs, steps, **spaces), "value": LSTMValue(envs, steps, **spaces)}
    if kind == "shared":
        parts = [{"network": layers, "output": "ACTIONS"}, {"network": layers, "output": "ONE"}]
        mixins = ["GaussianMixin", "DeterministicMixin"]
        both = shared_model(**spaces, structure=mixins, roles=["policy", "value"], parameters=parts)
        models = {"policy": both, "value": both}
    else:
        make = categorical_model if kind == "categorical" else gaussian_model
        models = {
            "policy": make(**spaces, network=layers, output="ACTIONS"),
            "value": deterministic_model(**spaces, network=layers, output="ONE"),
        }
    for role, model in models.items():
        model.init_state_dict(role=role)
    return models


def skrl_agent(
    env: Callable[..., Any] = pendulum_env,
    kind: str = "separate",
    *,
    seed: int = 1,
    envs: int = ENVS,
    steps: int = STEPS,
    widths: Sequence[int] = (32, 32),
    scalers: Sequence[str] = (),
    **settings: Any,
) -> SkrlAgent:
    """Return an agent with small settings; `scalers` names the preprocessors: observation, value."""
    torch.manual_seed(seed)
    world = env(envs, seed=seed)
    cfg: dict[str, Any] = {
        "rollouts": steps,
        "learning_epochs": 2,
        "mini_batches": 4,
        "learning_rate": 3e-4,
        "entropy_loss_scale": 0.01,
        "experiment": {"write_interval": 0, "checkpoint_interval": 0},
    }
    for name in scalers:
        size = world.observation_space if name == "observation" else 1
        cfg |= {f"{name}_preprocessor": RunningStandardScaler, f"{name}_preprocessor_kwargs": {"size": size}}
    agent = (PPO_RNN if kind == "lstm" else PPO)(
        models=networks(world, kind, envs, steps, widths),
        memory=RandomMemory(memory_size=steps, num_envs=envs, device="cpu"),
        observation_space=world.observation_space,
        action_space=world.action_space,
        device="cpu",
        cfg=PPO_CFG(**{**cfg, **settings}),
    )
    return SkrlAgent(agent, world)


def short_pendulum(envs: int, *, seed: int) -> Any:
    """A pendulum whose episodes end within two rollouts."""
    return pendulum_env(envs, seed=seed, limit=20)


def adaptive(**settings: Any) -> dict[str, Any]:
    """Settings of a learning rate that follows the KL divergence."""
    from skrl.resources.schedulers.torch import KLAdaptiveLR

    return {"learning_rate_scheduler": KLAdaptiveLR, "learning_rate_scheduler_kwargs": {"kl_threshold": 0.01}, **settings}


MODELS: Mapping[str, Callable[[], SkrlAgent]] = {
    "gaussian": skrl_agent,
    "categorical": lambda: skrl_agent(cartpole_env, "categorical"),
    "shared": lambda: skrl_agent(short_pendulum, "shared", **adaptive()),
    "value_preprocessor": lambda: skrl_agent(short_pendulum, scalers=("value",), time_limit_bootstrap=True),
    "shaped": lambda: skrl_agent(
        short_pendulum, rewards_shaper=lambda rewards, *_: 0.5 * rewards, time_limit_bootstrap=True, kl_threshold=0.02
    ),
    "lstm": lambda: with_states_apart(skrl_agent(short_pendulum, "lstm")),
}

LARGE: Mapping[str, Any] = {"envs": 16, "steps": 64, "learning_epochs": 4}
"""Settings with which CartPole is learned."""


def with_states_apart(model: SkrlAgent) -> SkrlAgent:
    """Give `PPO_RNN` a dictionary for each of its initial and final states, without which it stores the state after a step."""
    agent, record = model.agent, model.agent.record_transition

    def record_transition(**columns: Any) -> None:
        record(**columns)
        agent._rnn_initial_states = dict(agent._rnn_final_states)

    agent.record_transition = record_transition
    return model


def learning_agent(**settings: Any) -> SkrlAgent:
    return skrl_agent(cartpole_env, "categorical", **{**LARGE, "learning_rate": 1e-3, "value_loss_scale": 0.5, **settings})


def default_agent(seed: int) -> SkrlAgent:
    """An agent with skrl's own default settings for learning on CartPole."""
    default, names = PPO_CFG(), ("learning_epochs", "mini_batches", "learning_rate", "entropy_loss_scale")
    settings = {name: getattr(default, name) for name in names}
    return skrl_agent(cartpole_env, "categorical", seed=seed, **{**LARGE, **settings})


def larger(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    return gym.wrappers.TransformReward(env, lambda reward: 1e4 * float(reward))


def blind(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    return gym.wrappers.TransformObservation(env, lambda observation: 0 * observation, None)


BROKEN: Mapping[str, Callable[[], SkrlAgent]] = {
    "learning_rate_x100": lambda: learning_agent(learning_rate=0.1),
    "reward_1e4": lambda: skrl_agent(partial(cartpole_env, wrappers=[larger]), "categorical", **LARGE),
    "constant_observations": lambda: skrl_agent(partial(cartpole_env, wrappers=[blind]), "categorical", **LARGE),
    "observation_preprocessor": lambda: learning_agent(scalers=("observation",)),
}
CAUSES = {
    "learning_rate_x100": {"policy/kl_spike", "opt/update_too_large"},
    "reward_1e4": {"reward/unscaled"},
    "constant_observations": {"obs/constant"},
    "observation_preprocessor": {"integrity/ratio_init"},
}
HEALTHY = {f"default, seed {seed}": partial(default_agent, seed) for seed in (1, 2, 3)}


def train(model: SkrlAgent, updates: int, telemetry: Telemetry | None = None) -> SkrlAgent:
    if telemetry is not None:
        attach_agent(telemetry, model.agent)
    model.learn(updates)
    return model


def recorded_run(model: SkrlAgent, run_dir: Path, **settings: Any) -> Run:
    return recorded(train, model, run_dir, **settings)[0]


def taps_of(model: Any) -> list[str]:
    agent = model.agent
    owners = [agent, agent.memory, agent.cfg, agent.policy, agent.value, *filter(None, [agent.scheduler])]
    return taps_in(owners, agent.optimizer)


def fingerprint(model: SkrlAgent) -> dict[str, Tensor]:
    agent = model.agent
    modules = {name: module for name, module in agent.checkpoint_modules.items() if isinstance(module, nn.Module)}
    weights = {f"{part}.{name}": x.clone() for part, module in modules.items() for name, x in module.state_dict().items()}
    return {**weights, **moments(agent.optimizer), "generator": torch.get_rng_state()}
