"""Logs as other trainers leave them: real files of real backends, with the tags of each trainer."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from esper_telemetry.importers.records import LoggedPoint, LoggedRun

UPDATES = 30
STEPS = [256.0 * place for place in range(1, UPDATES + 1)]

Columns = Mapping[str, Sequence[float]]


def constant(values: Mapping[str, float]) -> dict[str, Sequence[float]]:
    return {tag: [value] * UPDATES for tag, value in values.items()}


SB3: Columns = {
    **constant({"train/approx_kl": 0.01, "train/clip_fraction": 0.1, "train/entropy_loss": -1.09, "train/value_loss": 8.0}),
    **constant({"train/explained_variance": 0.5, "train/policy_gradient_loss": -0.02}),
    "rollout/ep_rew_mean": [float(place) for place in range(UPDATES)],
}

TRAINERS: Mapping[str, tuple[str, Columns, Mapping[str, float]]] = {
    "cleanrl": (
        "CleanRL or PufferLib",
        constant({"losses/approx_kl": 0.01, "losses/old_approx_kl": -0.1, "losses/value_loss": 4.0, "losses/entropy": 0.69})
        | constant({"losses/clipfrac": 0.2}),
        {"policy/kl": 0.01, "policy/kl_k1": -0.1, "loss/value": 4.0, "policy/entropy": 0.69, "policy/clip_frac": 0.2},
    ),
    "trl": (
        "TRL",
        constant({"train/reward": 0.4, "train/frac_reward_zero_std": 0.25, "train/kl": 0.1, "train/entropy": 1.5, "train/loss": 0.02})
        | constant({"train/grad_norm": 0.7, "train/completions/mean_length": 120.0, "train/completions/clipped_ratio": 0.1}),
        {"lm/reward/mean": 0.4, "episode/return_mean": 0.4, "lm/groups/zero_advantage": 0.25, "lm/entropy": 1.5}
        | {"lm/kl_reference": 0.1, "lm/length/mean": 120.0, "lm/truncated_frac": 0.1},
    ),
    "verl": (
        "verl",
        constant({"actor/ppo_kl": 0.002, "actor/pg_clipfrac": 0.01, "actor/pg_loss": 0.1, "actor/entropy": 0.4, "actor/grad_norm": 0.3})
        | constant({"critic/score/mean": 0.3, "response_length/clip_ratio": 0.2})
        | constant({"rollout_corr/k3_kl": 0.001, "rollout_corr/rollout_is_mean": 0.98}),
        {"policy/kl_k1": 0.002, "policy/clip_frac_active": 0.01, "loss/policy": 0.1, "lm/reward/mean": 0.3, "lm/truncated_frac": 0.2}
        | {"lm/entropy": 0.4, "grad/global/norm_preclip": 0.3, "lm/mismatch/kl": 0.001, "lm/mismatch/ratio_mean": 0.98},
    ),
    "openrlhf": (
        "OpenRLHF",
        constant({"train/ppo_clip_ratio": 0.05, "train/ppo_kl": 0.001, "train/vllm_kl": 0.01, "train/policy_loss": 0.2})
        | constant({"train/reward": 0.6, "train/response_length": 80.0, "train/critic_loss": 0.3}),
        {"policy/clip_frac_active": 0.05, "policy/kl_k1": 0.001, "lm/mismatch/kl": 0.01, "loss/policy": 0.2}
        | {"lm/reward/mean": 0.6, "lm/length/mean": 80.0, "loss/value": 0.3},
    ),
    "nemo_rl": (
        "NeMo-RL",
        constant({"train/token_mult_prob_error": 1.02, "train/gen_kl_error": 0.001, "train/probs_ratio_max": 1.4, "train/reward": 0.5})
        | constant({"train/loss": 0.1, "train/truncation_rate": 0.2, "train/gen_tokens_per_sample/max": 512.0})
        | constant({"train/critic/loss": 0.3, "train/critic/explained_var": 0.6}),
        {"lm/mismatch/mult_error": 1.02, "lm/mismatch/kl": 0.001, "policy/ratio/max": 1.4, "lm/reward/mean": 0.5}
        | {"lm/truncated_frac": 0.2, "lm/length/max": 512.0, "loss/value": 0.3, "value/explained_variance": 0.6},
    ),
    "rsl_rl": (
        "RSL-RL",
        constant({"Loss/value_function": 8.0, "Loss/surrogate": -0.01, "Loss/entropy": 11.0, "Train/mean_reward": 3.0})
        | constant({"Policy/mean_noise_std": 0.9}),
        {"loss/value": 4.0, "policy/entropy": 11.0, "episode/return_mean_100": 3.0, "policy/head/action/std/mean": 0.9},
    ),
    "rllib": (
        "RLlib",
        constant({"learners/default_policy/vf_loss": 8.0, "learners/default_policy/mean_kl_loss": 0.02})
        | constant({"learners/default_policy/gradients_default_optimizer_global_norm": 2.0})
        | constant({"learners/default_policy/vf_explained_var": 0.4, "env_runners/episode_return_mean": 7.0}),
        {"loss/value": 4.0, "policy/kl": 0.02, "grad/global/norm_preclip": 2.0, "episode/return_mean_100": 7.0}
        | {"value/explained_variance": 0.4},
    ),
    "skrl": (
        "skrl",
        constant({"Loss / Policy loss": 0.1, "Loss / Value loss": 8.0, "Loss / Entropy loss": -0.1, "Reward / Total reward (mean)": 5.0}),
        {"loss/policy": 0.1, "loss/value": 4.0, "episode/return_mean_100": 5.0},
    ),
    "sample_factory": (
        "Sample Factory",
        constant({"train/kl_divergence": 0.01, "train/value_loss": 4.0, "train/grad_norm": 0.5, "train/fraction_clipped": 0.3})
        | constant({"reward/reward": 2.0}),
        {"policy/kl": 0.01, "loss/value": 4.0, "grad/global/norm_postclip": 0.5, "policy/clip_frac": 0.3},
    ),
    "rl_games": (
        "rl_games",
        constant({"losses/a_loss": 0.1, "losses/c_loss": 8.0, "info/kl": 0.03})
        | constant({"diagnostics/clip_frac/0": 0.1, "diagnostics/clip_frac/1": 0.3}),
        {"loss/policy": 0.1, "loss/value": 4.0, "policy/kl": 0.03, "policy/clip_frac": 0.2},
    ),
}
"""By family: the trainer's name, its logged columns, and their values under our keys."""


def logged(columns: Columns, config: Mapping[str, object] | None = None) -> LoggedRun:
    points = {tag: [LoggedPoint(*pair) for pair in zip(STEPS, values, strict=True)] for tag, values in columns.items()}
    return LoggedRun("run", points, dict(config or {}))


def written(directory: Path, columns: Columns) -> Path:
    with SummaryWriter(str(directory)) as writer:
        for tag, values in columns.items():
            for step, value in zip(STEPS, values, strict=True):
                writer.add_scalar(tag, value, int(step))
    return directory
