"""Logs as other trainers leave them: real files of real backends, with the tags of each trainer."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from esper_telemetry.importers.records import LoggedPoint, LoggedRun

UPDATES = 30
STEPS = [256.0 * place for place in range(1, UPDATES + 1)]

Columns = Mapping[str, Sequence[float]]

SB3: Columns = {
    "train/approx_kl": [0.01] * UPDATES,
    "train/clip_fraction": [0.1] * UPDATES,
    "train/entropy_loss": [-1.09] * UPDATES,
    "train/value_loss": [8.0] * UPDATES,
    "train/explained_variance": [0.5] * UPDATES,
    "train/policy_gradient_loss": [-0.02] * UPDATES,
    "rollout/ep_rew_mean": [float(place) for place in range(UPDATES)],
}

TRAINERS: Mapping[str, tuple[str, Columns, Mapping[str, float]]] = {
    "cleanrl": (
        "CleanRL or PufferLib",
        {"losses/approx_kl": [0.01] * UPDATES, "losses/old_approx_kl": [-0.1] * UPDATES, "losses/value_loss": [4.0] * UPDATES}
        | {"losses/entropy": [0.69] * UPDATES, "losses/clipfrac": [0.2] * UPDATES},
        {"policy/kl": 0.01, "policy/kl_k1": -0.1, "loss/value": 4.0, "policy/entropy": 0.69, "policy/clip_frac": 0.2},
    ),
    "trl": (
        "TRL",
        {"train/reward": [0.4] * UPDATES, "train/frac_reward_zero_std": [0.25] * UPDATES, "train/kl": [0.1] * UPDATES}
        | {"train/entropy": [1.5] * UPDATES, "train/grad_norm": [0.7] * UPDATES, "train/loss": [0.02] * UPDATES}
        | {"train/completions/mean_length": [120.0] * UPDATES, "train/completions/clipped_ratio": [0.1] * UPDATES},
        {"lm/reward/mean": 0.4, "episode/return_mean": 0.4, "lm/groups/zero_advantage": 0.25, "lm/entropy": 1.5}
        | {"lm/kl_reference": 0.1, "lm/length/mean": 120.0, "lm/truncated_frac": 0.1},
    ),
    "verl": (
        "verl",
        {"actor/ppo_kl": [0.002] * UPDATES, "actor/pg_clipfrac": [0.01] * UPDATES, "actor/pg_loss": [0.1] * UPDATES}
        | {"critic/score/mean": [0.3] * UPDATES, "response_length/clip_ratio": [0.2] * UPDATES}
        | {"actor/entropy": [0.4] * UPDATES, "actor/grad_norm": [0.3] * UPDATES}
        | {"rollout_corr/k3_kl": [0.001] * UPDATES, "rollout_corr/rollout_is_mean": [0.98] * UPDATES},
        {"policy/kl_k1": 0.002, "policy/clip_frac_active": 0.01, "loss/policy": 0.1, "lm/reward/mean": 0.3}
        | {"lm/truncated_frac": 0.2, "lm/entropy": 0.4, "grad/global/norm_preclip": 0.3}
        | {"lm/mismatch/kl": 0.001, "lm/mismatch/ratio_mean": 0.98},
    ),
    "openrlhf": (
        "OpenRLHF",
        {"train/ppo_clip_ratio": [0.05] * UPDATES, "train/ppo_kl": [0.001] * UPDATES, "train/vllm_kl": [0.01] * UPDATES}
        | {
            "train/policy_loss": [0.2] * UPDATES,
            "train/reward": [0.6] * UPDATES,
            "train/response_length": [80.0] * UPDATES,
            "train/critic_loss": [0.3] * UPDATES,
        },
        {"policy/clip_frac_active": 0.05, "policy/kl_k1": 0.001, "lm/mismatch/kl": 0.01, "loss/policy": 0.2}
        | {"lm/reward/mean": 0.6, "lm/length/mean": 80.0, "loss/value": 0.3},
    ),
    "nemo_rl": (
        "NeMo-RL",
        {"train/token_mult_prob_error": [1.02] * UPDATES, "train/gen_kl_error": [0.001] * UPDATES}
        | {"train/probs_ratio_max": [1.4] * UPDATES, "train/reward": [0.5] * UPDATES, "train/loss": [0.1] * UPDATES}
        | {"train/truncation_rate": [0.2] * UPDATES, "train/gen_tokens_per_sample/max": [512.0] * UPDATES}
        | {"train/critic/loss": [0.3] * UPDATES, "train/critic/explained_var": [0.6] * UPDATES},
        {"lm/mismatch/mult_error": 1.02, "lm/mismatch/kl": 0.001, "policy/ratio/max": 1.4, "lm/reward/mean": 0.5}
        | {"lm/truncated_frac": 0.2, "lm/length/max": 512.0, "loss/value": 0.3, "value/explained_variance": 0.6},
    ),
    "rsl_rl": (
        "RSL-RL",
        {"Loss/value_function": [8.0] * UPDATES, "Loss/surrogate": [-0.01] * UPDATES, "Loss/entropy": [11.0] * UPDATES}
        | {"Train/mean_reward": [3.0] * UPDATES, "Policy/mean_noise_std": [0.9] * UPDATES},
        {"loss/value": 4.0, "policy/entropy": 11.0, "episode/return_mean_100": 3.0, "policy/head/action/std/mean": 0.9},
    ),
    "rllib": (
        "RLlib",
        {"learners/default_policy/vf_loss": [8.0] * UPDATES, "learners/default_policy/mean_kl_loss": [0.02] * UPDATES}
        | {"learners/default_policy/gradients_default_optimizer_global_norm": [2.0] * UPDATES}
        | {"learners/default_policy/vf_explained_var": [0.4] * UPDATES, "env_runners/episode_return_mean": [7.0] * UPDATES},
        {"loss/value": 4.0, "policy/kl": 0.02, "grad/global/norm_preclip": 2.0, "episode/return_mean_100": 7.0}
        | {"value/explained_variance": 0.4},
    ),
    "skrl": (
        "skrl",
        {"Loss / Policy loss": [0.1] * UPDATES, "Loss / Value loss": [8.0] * UPDATES, "Loss / Entropy loss": [-0.1] * UPDATES}
        | {"Reward / Total reward (mean)": [5.0] * UPDATES},
        {"loss/policy": 0.1, "loss/value": 4.0, "episode/return_mean_100": 5.0},
    ),
    "sample_factory": (
        "Sample Factory",
        {"train/kl_divergence": [0.01] * UPDATES, "train/value_loss": [4.0] * UPDATES, "train/grad_norm": [0.5] * UPDATES}
        | {"train/fraction_clipped": [0.3] * UPDATES, "reward/reward": [2.0] * UPDATES},
        {"policy/kl": 0.01, "loss/value": 4.0, "grad/global/norm_postclip": 0.5, "policy/clip_frac": 0.3},
    ),
    "rl_games": (
        "rl_games",
        {"losses/a_loss": [0.1] * UPDATES, "losses/c_loss": [8.0] * UPDATES, "info/kl": [0.03] * UPDATES}
        | {"diagnostics/clip_frac/0": [0.1] * UPDATES, "diagnostics/clip_frac/1": [0.3] * UPDATES},
        {"loss/policy": 0.1, "loss/value": 4.0, "policy/kl": 0.03, "policy/clip_frac": 0.2},
    ),
}
"""By family: the trainer's name, its logged columns, and their values under our keys."""


def logged(columns: Columns, config: Mapping[str, object] | None = None) -> LoggedRun:
    """A run whose columns are logged at `STEPS`."""
    points = {tag: [LoggedPoint(*pair) for pair in zip(STEPS, values, strict=True)] for tag, values in columns.items()}
    return LoggedRun("run", points, dict(config or {}))


def written(directory: Path, columns: Columns) -> Path:
    with SummaryWriter(str(directory)) as writer:
        for tag, values in columns.items():
            for step, value in zip(STEPS, values, strict=True):
                writer.add_scalar(tag, value, int(step))
    return directory
