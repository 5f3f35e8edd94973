"""Settings that were tuned for known tasks, as data; each names the environments that step together and what differs.

Every entry is measured over five seeds by `tests/ppo/test_ppo_learning.py`, or for morphogenesis by
`tests/environments/morphogenesis/test_growing_learning.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from esper_telemetry.ppo.config import SCRIPTED, PPOConfig

SCALED: Mapping[str, Any] = {"normalize_observations": True, "normalize_rewards": True}
MEMORY: Mapping[str, Any] = {**SCALED, "hidden_sizes": (64,), "lstm_size": 64}


GROWING: Mapping[str, Any] = {
    "num_steps": 32,
    "num_epochs": 4,
    "num_minibatches": 4,
    "learning_rate": 3e-3,
    "gamma": 0.99,
    "entropy_coef": 0.01,
    "hidden_sizes": (64,),
    "encoder_sizes": (64,),
    "lstm_size": 64,
    "normalize_rewards": True,
}


@dataclass(frozen=True, slots=True)
class Preset:
    """What to train a task with.

    Attributes:
        name: what it was tuned for, such as `CartPole-v1 lstm without velocities`; `none` where nobody tuned it.
        num_envs: environments that step together.
        settings: of `PPOConfig`, where they differ from the defaults.
    """

    name: str = "none"
    num_envs: int = 8
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self, **changes: Any) -> PPOConfig:
        """The settings; `changes` win."""
        return replace(PPOConfig(), **{**self.settings, **changes})


def preset(env_id: str, policy: str = "mlp", *, mask_velocity: bool = False) -> Preset:
    """The preset for that task, policy and view.

    A task that nobody tuned gets the defaults without memory, and with memory what did well on all tuned tasks:
    normalised observations and rewards.
    """
    found = PRESETS.get((env_id, policy, mask_velocity))
    if policy in SCRIPTED:
        num_envs, settings = PRESETS["morphogenesis", "lstm", False]
        return Preset(f"{env_id} {policy}", num_envs, {"num_steps": settings["num_steps"], "policy": policy})
    if found is None:
        return (
            Preset(settings={"policy": policy})
            if policy == "mlp"
            else Preset("memory", 8, {**MEMORY, "policy": policy})
        )
    num_envs, settings = found
    name = f"{env_id} {policy}" + " without velocities" * mask_velocity
    return Preset(name, num_envs, {**settings, "policy": policy})


Key = tuple[str, str, bool]

PRESETS: Mapping[Key, tuple[int, Mapping[str, Any]]] = {
    ("CartPole-v1", "mlp", False): (8, {}),
    # Returns down to -500: unscaled, the critic's gradient fills the norm that both share with the clip limit, and where no episode
    # ends early the policy learns nothing for long.
    ("Acrobot-v1", "mlp", False): (8, {"normalize_rewards": True}),
    # Rewards down to -16: unscaled, the critic's gradient fills the norm that both share with the clip limit. Episodes take
    # 200 steps and begin together: a shorter rollout sees a part of them only. Ten passes, as the updates are few.
    ("Pendulum-v1", "mlp", False): (8, {"num_steps": 256, "num_epochs": 10, "gamma": 0.9, "normalize_rewards": True}),
    ("CartPole-v1", "lstm", True): (
        8,
        {**MEMORY, "num_minibatches": 8, "learning_rate": 2e-3, "gamma": 0.98, "gae_lambda": 0.9},
    ),
    ("Acrobot-v1", "lstm", True): (8, MEMORY),
    ("Pendulum-v1", "lstm", True): (8, {**MEMORY, "gamma": 0.9}),
    ("morphogenesis", "lstm", False): (16, GROWING),
    ("cue-recall", "lstm", False): (
        16,
        {
            "num_steps": 32,
            "num_epochs": 4,
            "anneal_learning_rate": False,
            "gamma": 0.95,
            "entropy_coef": 0.01,
            "encoder_sizes": (32,),
            "hidden_sizes": (),
            "lstm_size": 32,
            "activation": "relu",
            "shared_trunk": True,
        },
    ),
}
"""By environment, policy and whether velocities are hidden: the number of environments and what differs."""
