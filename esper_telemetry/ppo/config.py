"""Settings of the bundled trainer, whose defaults suit classic control on a CPU, and presets tuned for known tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Any

from esper_telemetry.core.requirements import require_count, require_number, require_types
from esper_telemetry.ppo.environments.environment_registry import PresetSettings, controllers, registered

ACTIVATIONS = ("tanh", "relu")
MAX_SEED = 2**32 - 1
"""Largest seed that Python, NumPy, torch and Gymnasium all accept."""
MAX_ROLLOUT_ROWS = 1 << 30
"""Largest number of rows of a rollout: a column of float32 takes 4 GiB."""
MAX_WIDTH = 1 << 16
"""Largest width of a layer, and number of layers."""
MAX_SETTING = 1e6
"""Largest learning rate, coefficient or limit, so that products of several stay in the range of float32."""
MAX_LOG_STD = 20.0
"""Largest size of the log standard deviation: e^20 is 5e8."""
LOG_STD_RANGE = (-5.0, 2.0)
"""Bounds of a log standard deviation that depends on the state; as in CleanRL's soft actor-critic."""
POLICIES = ("mlp", "lstm", "gru")
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, slots=True)
class PPOConfig:
    """Settings of PPO (Schulman et al. 2017, arXiv:1707.06347); a wrong setting raises ValueError.

    Attributes:
        num_steps: steps per environment and rollout.
        num_epochs: passes over each rollout.
        num_minibatches: optimizer steps per pass; a recurrent policy splits environments, others split rows.
        learning_rate: step size of Adam at the start.
        anneal_learning_rate: lower the learning rate linearly to zero over the run.
        desired_kl: KL divergence that the learning rate adapts to, instead of annealing. Once per update the rate is divided by 1.5
            if the KL of the last pass exceeds twice this value, and multiplied by 1.5 if the KL is below half of it (Schulman et
            al. 2017, §4; as in RSL-RL).
        target_kl: an update ends after a pass whose mean KL exceeds 1.5 times this value.
        gamma: discount factor.
        gae_lambda: decay of the advantage estimator's trace (arXiv:1506.02438).
        clip: distance from 1 at which ratios are clipped.
        clip_value: distance from the old value at which the value loss clips the new one; None disables it.
        entropy_coef: weight of the entropy bonus, at the start.
        final_entropy_coef: weight of the entropy bonus at the end of the run, reached linearly; None keeps the initial weight.
        value_coef: weight of the value loss, 0.5 MSE.
        max_grad_norm: limit of the global gradient norm; None disables clipping.
        normalize_advantages: bring the advantages to mean 0 and (unbiased) standard deviation 1.
        normalize_minibatches: normalise advantages in each minibatch instead of over the rollout.
        advantage_std_floor: smallest standard deviation that advantages are divided by.
        normalize_observations: bring observations to mean 0 and standard deviation 1, by running statistics.
        normalize_rewards: divide rewards by the running standard deviation of the discounted return.
        policy: `mlp`, or `lstm` or `gru`, which remember the episode. The command line also accepts a controller of a registered
            environment, which does not learn; `PPO` refuses it.
        hidden_sizes: widths of the hidden layers of actor and critic; in a recurrent policy they follow the memory.
        encoder_sizes: widths of the hidden layers before the memory of a recurrent policy.
        lstm_size: width of the recurrent state, for `lstm` and `gru`.
        lstm_layers: number of stacked recurrent cells.
        activation: `tanh` or `relu`.
        shared_trunk: let actor and critic share their hidden layers and their memory.
        log_std: initial log standard deviation of continuous actions.
        state_dependent_std: compute the log standard deviation from the state, between -5 and 2, instead of learning one number per
            dimension.
        squash: keep continuous actions within their bounds by a tanh instead of clipping them. The entropy, both as reported and as
            a bonus, is the entropy before the tanh.
        precision: `fp32`, or `bf16` by autocast for hidden layers and convolutions, in acting and in training; heads, losses,
            memories, weights and optimizer stay in float32.
        compile: compile the passes of the update with `torch.compile`, which takes up to minutes at first; a memory is not compiled.
        watchdog: restore the last good weights after an update that leaves non-finite ones, and clear the
            optimizer; training ends after three such updates in a row.
        seed: seed of initial weights, sampling and shuffling, and of environments that were made without one.
        stop_on_nonfinite: end training with FloatingPointError at the first gradient that is not finite, in the order of the backward
            pass. On a GPU each check synchronises.
    """

    num_steps: int = 128
    num_epochs: int = 8
    num_minibatches: int = 4
    learning_rate: float = 2.5e-3
    anneal_learning_rate: bool = True
    desired_kl: float | None = None
    target_kl: float | None = None
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    clip_value: float | None = None
    entropy_coef: float = 0.0
    final_entropy_coef: float | None = None
    value_coef: float = 0.5
    max_grad_norm: float | None = 0.5
    normalize_advantages: bool = True
    normalize_minibatches: bool = False
    advantage_std_floor: float = 0.0
    normalize_observations: bool = False
    normalize_rewards: bool = False
    policy: str = "mlp"
    hidden_sizes: tuple[int, ...] = (64, 64)
    encoder_sizes: tuple[int, ...] = ()
    lstm_size: int = 64
    lstm_layers: int = 1
    activation: str = "tanh"
    shared_trunk: bool = False
    log_std: float = 0.0
    state_dependent_std: bool = False
    squash: bool = False
    precision: str = "fp32"
    compile: bool = False
    watchdog: bool = False
    seed: int = 0
    stop_on_nonfinite: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError or TypeError, one sentence with the offending value, for the first wrong setting."""
        require_types(self)
        for name in ("num_steps", "num_epochs", "num_minibatches"):
            require_count(name, getattr(self, name), low=1, high=MAX_ROLLOUT_ROWS)
        for name in ("lstm_size", "lstm_layers"):
            require_count(name, getattr(self, name), low=1, high=MAX_WIDTH)
        for name in ("learning_rate", "clip", "desired_kl", "target_kl", "clip_value"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), above=0.0, high=MAX_SETTING)
        for name in ("gamma", "gae_lambda"):
            require_number(name, getattr(self, name), low=0.0, high=1.0)
        for name in ("entropy_coef", "value_coef", "advantage_std_floor", "final_entropy_coef"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), low=0.0, high=MAX_SETTING)
        limit = self.max_grad_norm  # an infinite limit disables clipping
        require(limit is None or limit > 0, "max_grad_norm must be positive", limit)
        if self.policy not in POLICIES:
            names = (*POLICIES, *controllers())
            require(self.policy in names, f"policy must be one of {', '.join(names)}", self.policy)
        hidden = len(self.hidden_sizes) > 0 or self.policy != "mlp"
        require(hidden, "hidden_sizes must name at least one layer", self.hidden_sizes)
        for name in ("hidden_sizes", "encoder_sizes"):
            sizes = getattr(self, name)
            require(all(1 <= size <= MAX_WIDTH for size in sizes), f"{name} must be from 1 to {MAX_WIDTH:,} each", sizes)
        require(self.activation in ACTIVATIONS, f"activation must be one of {', '.join(ACTIVATIONS)}", self.activation)
        require(self.precision in PRECISIONS, f"precision must be one of {', '.join(PRECISIONS)}", self.precision)
        require_number("log_std", self.log_std, low=-MAX_LOG_STD, high=MAX_LOG_STD)
        low, high = LOG_STD_RANGE
        in_range = not self.state_dependent_std or low <= self.log_std <= high
        require(in_range, f"log_std that depends on the state must be between {low} and {high}", self.log_std)
        both = self.watchdog and self.stop_on_nonfinite
        require(not both, "watchdog repairs what stop_on_nonfinite stops at: choose one of them", "both")
        require(0 <= self.seed <= MAX_SEED, f"seed must be between 0 and {MAX_SEED}", self.seed)

    def check_rollout(self, num_envs: int) -> None:
        """Raise ValueError, with counts that would work, unless the minibatches divide a rollout of `num_envs`.

        A recurrent policy learns from whole sequences and needs an environment for every minibatch.
        """
        rows = self.num_steps * num_envs
        require(rows <= MAX_ROLLOUT_ROWS, f"num_steps x {num_envs:,} environments must be at most {MAX_ROLLOUT_ROWS:,}", rows)
        if self.policy != "mlp":
            rule = f"num_minibatches of a recurrent policy must not exceed the {num_envs} environments"
            require(self.num_minibatches <= num_envs, rule, self.num_minibatches)
            return
        if rows % self.num_minibatches:
            small = [count for count in range(1, isqrt(rows) + 1) if rows % count == 0]
            divisors = sorted({*small, *(rows // count for count in small)})
            near = sorted(sorted(divisors, key=lambda count: abs(count - self.num_minibatches))[:4])
            raise ValueError(
                f"num_minibatches must divide the rollout of {num_envs} x {self.num_steps} = {rows} rows, "
                f"got {self.num_minibatches}; the nearest divisors are {', '.join(map(str, near))}"
            )

    def check_ranks(self, num_envs: int, ranks: int) -> None:
        """Raise ValueError if one of several ranks, each with `num_envs`, might have fewer minibatches than another.

        Up to every second row may be a reset. Ranks with different numbers of steps would wait for each other forever.
        """
        if ranks > 1:
            require(self.num_steps >= 2, "num_steps of several ranks must be at least 2", self.num_steps)
            most = num_envs if self.policy != "mlp" else self.num_steps // 2 * num_envs
            rule = f"num_minibatches of {ranks} ranks with {num_envs} environments each must not exceed {most}"
            require(self.num_minibatches <= most, rule, self.num_minibatches)


def require(condition: bool, rule: str, value: object) -> None:
    """Raise ValueError with the rule and the value that breaks it."""
    if not condition:
        raise ValueError(f"{rule}, got {value!r}")


MEMORY: Mapping[str, Any] = {"normalize_observations": True, "normalize_rewards": True, "hidden_sizes": (64,), "lstm_size": 64}
"""Policies with memory get normalised observations and rewards. Otherwise the critic's gradient dominates the norm that both share with the
clip limit, and CartPole-v1 with a shared LSTM learns nothing."""

PRESETS: Mapping[tuple[str, str, bool], PresetSettings] = {
    ("CartPole-v1", "mlp", False): (8, {}),
    # Returns down to -500: unscaled, the critic's gradient dominates the norm that both share with the clip limit, and if no episode
    # ends early the policy learns nothing for a long time.
    ("Acrobot-v1", "mlp", False): (8, {"normalize_rewards": True}),
    # Rewards down to -16: unscaled, the critic's gradient dominates the norm that both share with the clip limit. Episodes take
    # 200 steps and begin together, so a shorter rollout sees only a part of them. Ten passes, because the updates are few.
    ("Pendulum-v1", "mlp", False): (8, {"num_steps": 256, "num_epochs": 10, "gamma": 0.9, "normalize_rewards": True}),
    ("CartPole-v1", "lstm", True): (8, {**MEMORY, "num_minibatches": 8, "learning_rate": 2e-3, "gamma": 0.98, "gae_lambda": 0.9}),
    ("Acrobot-v1", "lstm", True): (8, MEMORY),
    ("Pendulum-v1", "lstm", True): (8, {**MEMORY, "gamma": 0.9}),
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
"""By environment, policy and whether velocities are hidden. Measured over five seeds by `tests/ppo/test_ppo_learning.py`; registered
environments bring their own."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings for a task.

    Attributes:
        name: the task it was tuned for, such as `CartPole-v1 lstm without velocities`; `none` for a task without tuned settings.
        num_envs: environments that step together.
        settings: fields of `PPOConfig` that differ from the defaults.
    """

    name: str = "none"
    num_envs: int = 8
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self, **changes: Any) -> PPOConfig:
        """The settings; `changes` override them."""
        return replace(PPOConfig(), **{**self.settings, **changes})


def preset(env_id: str, policy: str = "mlp", *, mask_velocity: bool = False) -> Preset:
    """Return the preset for that task, policy and view.

    A task without tuned settings gets the defaults; with memory, it gets the settings that worked on all tuned tasks:
    normalised observations and rewards.
    """
    tuned = PRESETS.get((env_id, policy, mask_velocity))
    environment = registered(env_id)
    if environment is not None and not mask_velocity:
        tuned = environment.presets.get(policy, tuned)
    if tuned is not None:
        num_envs, settings = tuned
        name = f"{env_id} {policy}" + " without velocities" * mask_velocity
        return Preset(name, num_envs, {**settings, "policy": policy})
    if policy == "mlp":
        return Preset(settings={"policy": policy})
    return Preset("memory", settings={**MEMORY, "policy": policy})
