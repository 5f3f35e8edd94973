"""The tags of other trainers, how their values differ from this package's, and what their x-axes count.

The source is each trainer's code. In this package a value loss is half the mean square, an entropy is positive, and a KL divergence is
Schulman's k3 unless a note says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

KL, KL_K1, CLIPPED = "policy/kl", "policy/kl_k1", "policy/clip_frac"
ENTROPY, FIT = "policy/entropy", "value/explained_variance"
POLICY_LOSS, VALUE_LOSS, LOSS = "loss/policy", "loss/value", "loss/total"
RATE, BEFORE, AFTER = "opt/lr", "grad/global/norm_preclip", "grad/global/norm_postclip"
RETURN, RETURN_100, LENGTH = "episode/return_mean", "episode/return_mean_100", "episode/length_mean"
STD = "policy/head/action/std/mean"
RATIO_MIN, RATIO_MAX, SPEED = "policy/ratio/min", "policy/ratio/max", "train/env_steps_per_second"


@dataclass(frozen=True, slots=True)
class Alias:
    """A tag of a trainer, and the key that it stands for.

    Attributes:
        tag: regular expression for the whole tag; values of several matching tags at one position are averaged.
        key: of this package.
        factor: by which its values are multiplied.
        episodes: written for every episode, and not for every update.
        late: written one rollout after the one that it belongs to.
        zero_if_off: 0 in all updates where it is not computed, and left out then.
        note: how its values differ besides.
    """

    tag: str
    key: str
    factor: float = 1.0
    episodes: bool = False
    late: bool = False
    zero_if_off: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer's way of logging.

    Attributes:
        name: of the trainer.
        signs: regular expressions for tags that only this trainer writes; one of them suffices.
        aliases: of its tags.
        x: unit of its x-axis.
        idle: tags that are all exactly 0 in updates in which no completion has an advantage.
        facts: of every run of the trainer.
        batch_tag: tag that is written once per batch of completions, where each pass over the batch writes the others again.
        settings: names of settings by fact, where those that all trainers share would give another part's.
    """

    name: str
    signs: tuple[str, ...]
    aliases: tuple[Alias, ...]
    x: str = "environment steps"
    idle: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    batch_tag: str = ""
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)


ANALYTIC = "the exact divergence, not an estimate"
LAST = "of the last minibatch alone"

SB3 = Trainer(
    "Stable-Baselines3",
    (r"train/policy_gradient_loss", r"rollout/ep_rew_mean"),
    (
        Alias(r"train/approx_kl", KL, late=True, note="mean over the last epoch"),
        Alias(r"train/clip_fraction", CLIPPED, late=True),
        Alias(r"train/explained_variance", FIT, late=True),
        Alias(r"train/entropy_loss", ENTROPY, -1.0, late=True),
        Alias(r"train/policy_gradient_loss", POLICY_LOSS, late=True),
        Alias(r"train/value_loss", VALUE_LOSS, 0.5, late=True),
        Alias(r"train/loss", LOSS, late=True, note=LAST),
        Alias(r"train/learning_rate", RATE, late=True),
        Alias(r"train/std", STD, late=True),
        Alias(r"rollout/ep_rew_mean", RETURN_100),
        Alias(r"rollout/ep_len_mean", LENGTH, note="mean of the last hundred episodes"),
        Alias(r"time/fps", SPEED, note="since the beginning"),
    ),
)

CLEANRL = Trainer(
    "CleanRL or PufferLib",
    (r"losses/old_approx_kl", r"losses/clipfrac", r"charts/SPS"),
    (
        Alias(r"losses/approx_kl", KL, note=LAST),
        Alias(r"losses/old_approx_kl", KL_K1, note=LAST),
        Alias(r"losses/clipfrac", CLIPPED),
        Alias(r"losses/explained_variance", FIT),
        Alias(r"losses/entropy", ENTROPY, note=LAST),
        Alias(r"losses/policy_loss", POLICY_LOSS, note=LAST),
        Alias(r"losses/value_loss", VALUE_LOSS, note=LAST),
        Alias(r"losses/gn|losses/grad_norm|gn", BEFORE, note=LAST),
        Alias(r"charts/learning_rate|learning_rate", RATE),
        Alias(r"charts/episodic_return", RETURN, episodes=True),
        Alias(r"charts/episodic_length", LENGTH, episodes=True),
        Alias(r"environment/(score|return|episode_return)", RETURN),
        Alias(r"charts/SPS|SPS", SPEED, note="since the beginning"),
    ),
)

RSL_RL = Trainer(
    "RSL-RL",
    (r"Loss/surrogate",),
    (
        Alias(r"Loss/(value|value_function)", VALUE_LOSS, 0.5),
        Alias(r"Loss/surrogate", POLICY_LOSS),
        Alias(r"Loss/entropy", ENTROPY),
        Alias(r"Loss/learning_rate", RATE),
        Alias(r"Policy/mean_(std|noise_std)", STD),
        Alias(r"Train/mean_reward", RETURN_100),
        Alias(r"Train/mean_episode_length", LENGTH, note="mean of the last hundred episodes"),
        Alias(r"Perf/total_fps", SPEED),
    ),
    x="iterations",
)

_LEARNER = r"(?:ray/tune/)?(?:info/)?learners?/(?:default_policy|default_module|[^/]+)/(?:learner_stats/)?"
_RUNNER = r"(?:ray/tune/)?(?:env_runners/|sampler_results/)?"
RLLIB = Trainer(
    "RLlib",
    (_LEARNER + r"(vf_loss|mean_kl_loss|vf_explained_var)",),
    (
        Alias(_LEARNER + r"(mean_kl_loss|kl)", KL, note=ANALYTIC),
        Alias(_LEARNER + r"vf_explained_var", FIT, note=LAST),
        Alias(_LEARNER + r"entropy", ENTROPY, note=LAST),
        Alias(_LEARNER + r"policy_loss", POLICY_LOSS, note=LAST),
        Alias(_LEARNER + r"(vf_loss_unclipped|vf_loss)", VALUE_LOSS, 0.5, note="cut at vf_clip_param, " + LAST),
        Alias(_LEARNER + r"total_loss", LOSS, note=LAST),
        Alias(_LEARNER + r"gradients_default_optimizer_global_norm", BEFORE, note=LAST),
        Alias(_LEARNER + r"(default_optimizer_learning_rate|cur_lr)", RATE),
        Alias(_RUNNER + r"episode_(return|reward)_mean", RETURN_100),
        Alias(_RUNNER + r"episode_len_mean", LENGTH),
    ),
    x="iterations or environment steps",
)

SKRL = Trainer(
    "skrl",
    (r"Loss / Policy loss",),
    (
        Alias(r"Loss / Policy loss", POLICY_LOSS, note="too small where a KL limit ended the update early"),
        Alias(r"Loss / Value loss", VALUE_LOSS, 0.5, note="times its coefficient"),
        Alias(r"Policy / Standard deviation", STD),
        Alias(r"Learning / Learning rate", RATE),
        Alias(r"Reward / Total reward \(mean\)", RETURN_100),
        Alias(r"Episode / Total timesteps \(mean\)", LENGTH),
    ),
    x="steps of all environments together",
)

SAMPLE_FACTORY = Trainer(
    "Sample Factory",
    (r"train/kl_divergence", r"train/fraction_clipped"),
    (
        Alias(r"train/kl_divergence", KL, note=ANALYTIC + ", of one minibatch"),
        Alias(r"train/fraction_clipped", CLIPPED, note="of one minibatch"),
        Alias(r"train/entropy", ENTROPY, note="of one minibatch"),
        Alias(r"train/policy_loss", POLICY_LOSS, note="of one minibatch"),
        Alias(r"train/value_loss", VALUE_LOSS, note="times its coefficient, of one minibatch"),
        Alias(r"train/loss", LOSS, note="of one minibatch"),
        Alias(r"train/grad_norm", AFTER, note="it is taken after clipping"),
        Alias(r"train/ratio_min", RATIO_MIN),
        Alias(r"train/ratio_max", RATIO_MAX),
        Alias(r"train/(actual_lr|lr)", RATE),
        Alias(r"reward/reward", RETURN_100),
        Alias(r"len/len", LENGTH),
    ),
)

RL_GAMES = Trainer(
    "rl_games",
    (r"losses/a_loss",),
    (
        Alias(r"info/kl", KL, note="exact for continuous actions, k2 for discrete ones"),
        Alias(r"diagnostics/clip_frac/\d+", CLIPPED),
        Alias(r"diagnostics/exp_var", FIT),
        Alias(r"losses/entropy", ENTROPY),
        Alias(r"losses/a_loss", POLICY_LOSS),
        Alias(r"losses/c_loss", VALUE_LOSS, 0.5),
        Alias(r"info/last_lr", RATE),
        Alias(r"rewards/step", RETURN_100),
        Alias(r"episode_lengths/step", LENGTH),
        Alias(r"performance/step_inference_rl_update_fps", SPEED),
    ),
    x="environment steps",
)

TORCHRL = Trainer(
    "TorchRL",
    (r"(?:train/)?kl_approx", r"(?:train/)?loss_objective"),
    (
        Alias(r"(?:train/)?kl_approx", KL_K1),
        Alias(r"(?:train/)?clip_fraction", CLIPPED),
        Alias(r"(?:train/)?explained_variance", FIT),
        Alias(r"(?:train/)?entropy", ENTROPY),
        Alias(r"(?:train/)?loss_objective", POLICY_LOSS),
        Alias(r"(?:train/)?grad_norm(_0)?", BEFORE),
        Alias(r"(?:train/)?max_ratio", RATIO_MAX),
        Alias(r"(?:train/)?mean_ratio", "policy/ratio/mean"),
        Alias(r"(?:train/)?ESS", "policy/ess_frac"),
        Alias(r"train/lr|lr", RATE),
        Alias(r"train/reward", RETURN),
        Alias(r"train/episode_length", LENGTH),
        Alias(r"r_training", "reward/mean", note="of single steps; episodes are not logged"),
    ),
    x="collected frames",
)

ACTIVE = "policy/clip_frac_active"
REWARD, REWARD_STD, DEAD_GROUPS = "lm/reward/mean", "lm/reward/std", "lm/groups/zero_advantage"
TOKEN_ENTROPY, REFERENCE_KL = "lm/entropy", "lm/kl_reference"
TOKENS, LONGEST, TRUNCATED = "lm/length/mean", "lm/length/max", "lm/truncated_frac"
ENGINE_ERROR, ENGINE_RATIO, ENGINE_KL = "lm/mismatch/mult_error", "lm/mismatch/ratio_mean", "lm/mismatch/kl"
BATCH = "mean of one batch of completions"
LANGUAGE = {"model": "language"}

_TRL = r"(?:train/)?"
TRL = Trainer(
    "TRL",
    (_TRL + r"frac_reward_zero_std", _TRL + r"completions/clipped_ratio"),
    (
        Alias(_TRL + r"reward", REWARD),
        Alias(_TRL + r"reward", RETURN, note=BATCH),
        Alias(_TRL + r"reward", RETURN_100, note=BATCH),
        Alias(_TRL + r"reward_std", REWARD_STD),
        Alias(_TRL + r"frac_reward_zero_std", DEAD_GROUPS),
        Alias(_TRL + r"entropy", TOKEN_ENTROPY),
        Alias(_TRL + r"kl", REFERENCE_KL),
        Alias(_TRL + r"clip_ratio/region_mean", ACTIVE, note="always 0 where num_iterations is 1"),
        Alias(_TRL + r"completions/mean_length", TOKENS),
        Alias(_TRL + r"completions/max_length", LONGEST),
        Alias(_TRL + r"completions/clipped_ratio", TRUNCATED),
        Alias(_TRL + r"sampling/importance_sampling_ratio/mean", ENGINE_RATIO, note="truncated or masked"),
        Alias(_TRL + r"loss", LOSS),
        Alias(_TRL + r"grad_norm", BEFORE),
        Alias(_TRL + r"learning_rate", RATE),
    ),
    x="optimizer steps",
    facts=LANGUAGE,
    batch_tag=_TRL + r"reward",
    settings={"clip": ("epsilon",), "total_steps": ("max_steps",)},
)

VERL = Trainer(
    "verl",
    (r"actor/ppo_kl", r"actor/pg_clipfrac"),
    (
        Alias(r"critic/score/mean", REWARD),
        Alias(r"critic/score/mean", RETURN, note=BATCH),
        Alias(r"critic/score/mean", RETURN_100, note=BATCH),
        Alias(r"actor/entropy|actor/entropy_loss", TOKEN_ENTROPY),
        Alias(r"actor/reward_kl_penalty", REFERENCE_KL, note="by the estimator that kl_penalty names"),
        Alias(r"actor/kl_loss", REFERENCE_KL, note="by the estimator that kl_loss_type names"),
        Alias(r"actor/ppo_kl", KL_K1),
        Alias(r"actor/pg_clipfrac", ACTIVE),
        Alias(r"actor/pg_loss", POLICY_LOSS),
        Alias(r"actor/grad_norm", BEFORE),
        Alias(r"actor/lr", RATE),
        Alias(r"actor/lr\(1e-4\)", RATE, 1e-4),
        Alias(r"critic/vf_explained_var", FIT),
        Alias(r"critic/vf_loss", VALUE_LOSS),
        Alias(r"critic/vf_clipfrac", "value/clip_frac"),
        Alias(r"rollout_corr/k3_kl", ENGINE_KL),
        Alias(r"rollout_corr/rollout_is_mean", ENGINE_RATIO, note="cut at rollout_is_threshold"),
        Alias(r"val-core/.+/mean@\d+", "eval/return_mean", note="the main scores of validation"),
        Alias(r"response_length/mean", TOKENS),
        Alias(r"response_length/max", LONGEST),
        Alias(r"response_length/clip_ratio", TRUNCATED),
    ),
    x="training steps",
    idle=("critic/advantages/max", "critic/advantages/min"),
    facts=LANGUAGE,
    settings={
        "learning_rate": ("actor_rollout_ref.actor.optim.lr",),
        "total_steps": ("trainer.total_training_steps",),
        "clip": ("actor_rollout_ref.actor.clip_ratio_high", "actor_rollout_ref.actor.clip_ratio"),
        "max_grad_norm": ("actor_rollout_ref.actor.optim.clip_grad", "actor_rollout_ref.actor.grad_clip"),
        "target_kl": (),  # that of the reward's penalty
    },
)

OPENRLHF = Trainer(
    "OpenRLHF",
    (r"train/ppo_clip_ratio", r"train/vllm_kl"),
    (
        Alias(r"train/reward", REWARD),
        Alias(r"train/reward", RETURN, note=BATCH),
        Alias(r"train/reward", RETURN_100, note=BATCH),
        Alias(r"train/entropy_loss", TOKEN_ENTROPY),
        Alias(r"train/rollout/reward_mean", REWARD, note="before filtering"),
        Alias(r"train/rollout/reward_mean", RETURN, note=BATCH + ", before filtering"),
        Alias(r"train/rollout/reward_mean", RETURN_100, note=BATCH + ", before filtering"),
        Alias(r"train/rollout/reward_std", REWARD_STD),
        Alias(r"train/rollout/reward_std", "episode/return_std"),
        Alias(r"train/rollout/num_samples", "episode/count"),
        Alias(r"train/rollout/truncated_rate", TRUNCATED),
        Alias(r"train/kl", REFERENCE_KL, zero_if_off=True, note="by the estimator that kl_estimator names"),
        Alias(r"train/ppo_kl", KL_K1),
        Alias(r"train/vllm_kl", ENGINE_KL, note="k1, which may be negative"),
        Alias(r"train/ppo_clip_ratio", ACTIVE),
        Alias(r"train/policy_loss", POLICY_LOSS),
        Alias(r"train/critic_loss", VALUE_LOSS),
        Alias(r"train/(actor_grad_norm|grad_norm)", BEFORE),
        Alias(r"train/actor_lr", RATE),
        Alias(r"train/response_length", TOKENS),
    ),
    x="training steps",
    idle=("train/group_reward_std",),
    facts=LANGUAGE,
)

NEMO_RL = Trainer(
    "NeMo-RL",
    (
        r"train/token_mult_prob_error",
        r"train/probs_ratio_clamped",
        r"train/gen_kl_error",
        r"train/mean_gen_tokens_per_sample",
        r"train/avg_trajectory_age",
    ),
    (
        Alias(r"train/reward", REWARD),
        Alias(r"train/reward", RETURN, note=BATCH),
        Alias(r"train/reward", RETURN_100, note=BATCH),
        Alias(r"train/approx_entropy", TOKEN_ENTROPY, note="from the sampled tokens alone"),
        Alias(r"train/kl_penalty", REFERENCE_KL, zero_if_off=True),
        Alias(
            r"train/baseline_reward/pct_[01]",
            DEAD_GROUPS,
            0.02,
            note="a lower bound: groups whose rewards are all 0 or all 1",
        ),
        Alias(r"train/token_mult_prob_error", ENGINE_ERROR),
        Alias(r"train/gen_kl_error", ENGINE_KL),
        Alias(r"train/sampling_importance_ratio", ENGINE_RATIO),
        Alias(r"train/probs_ratio", "policy/ratio/mean"),
        Alias(r"train/probs_ratio_min", RATIO_MIN),
        Alias(r"train/probs_ratio_max", RATIO_MAX),
        Alias(r"train/loss", POLICY_LOSS, note="with its KL penalty"),
        Alias(r"train/grad_norm", BEFORE),
        Alias(r"train/lr", RATE),
        Alias(r"train/critic/loss", VALUE_LOSS, note="clipped, times its coefficient"),
        Alias(r"train/critic/residual_sq_mean", VALUE_LOSS, 0.5),
        Alias(r"train/critic/explained_var", FIT),
        Alias(r"train/mean_gen_tokens_per_sample", TOKENS),
        Alias(r"train/(max_gen_tokens_per_sample|gen_tokens_per_sample/max)", LONGEST),
        Alias(r"train/truncation_rate", TRUNCATED),
    ),
    x="training steps",
    idle=("train/advantages/max", "train/advantages/min"),
    facts=LANGUAGE,
    settings={
        "learning_rate": ("policy.optimizer.kwargs.lr", "policy.megatron_cfg.optimizer.lr"),
        "total_steps": ("grpo.max_num_steps", "ppo.max_num_steps"),
        "clip": ("loss_fn.ratio_clip_max",),
        "max_grad_norm": ("policy.max_grad_norm",),
    },
)

TRAINERS = (SB3, SAMPLE_FACTORY, RL_GAMES, RSL_RL, RLLIB, SKRL, CLEANRL, TORCHRL, TRL, VERL, OPENRLHF, NEMO_RL)


def trainer_of(tags: Iterable[str]) -> Trainer:
    """Return the trainer that wrote these tags; raises ValueError if none of the known ones did."""
    ordered = sorted(tags)
    for trainer in TRAINERS:
        if any(re.fullmatch(sign, tag) for sign in trainer.signs for tag in ordered):
            return trainer
    names = ", ".join(trainer.name for trainer in TRAINERS)
    examples = ", ".join(ordered[:8]) or "nothing"
    raise ValueError(f"these are not the tags of {names}: {examples}{' and others' if len(ordered) > 8 else ''}")
