"""The tags of other trainers, the differences of their values from this package's, and the units of their x-axes.

The source is each trainer's code. In this package a value loss is half the mean square, an entropy is positive, and a KL divergence is
Schulman's k3 unless a note says otherwise. A trainer is recognised only by its tags, in any file or backend.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

KL, KL_K1, CLIPPED = "policy/kl", "policy/kl_k1", "policy/clip_frac"
ENTROPY, FIT = "policy/entropy", "value/explained_variance"
POLICY_LOSS, VALUE_LOSS, LOSS = "loss/policy", "loss/value", "loss/total"
RATE, BEFORE, AFTER = "opt/lr", "grad/global/norm_preclip", "grad/global/norm_postclip"
RETURN, RETURN_100, LENGTH = "episode/return_mean", "episode/return_mean_100", "episode/length_mean"
EVALUATION, COUNT, STEP_REWARD = "eval/return_mean", "episode/count", "reward/mean"
STD = "policy/head/action/std/mean"
RATIO_MIN, RATIO_MAX, SPEED = "policy/ratio/min", "policy/ratio/max", "train/env_steps_per_second"


@dataclass(frozen=True, slots=True)
class Alias:
    """A tag of a trainer, and its key in this package.

    Attributes:
        tag: regular expression for the whole tag; values of several matching tags at one position are averaged.
        key: of this package.
        factor: by which its values are multiplied.
        episodes: written for every episode, and not for every update.
        late: written one rollout late.
        zero_if_off: 0 in all updates if it is not computed; it is then left out.
        note: how else its values differ.
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
        signs: regular expressions for tags that only this trainer writes; a match of one, or of all in one tuple, suffices.
        aliases: of its tags.
        x: unit of its x-axis.
        hints: how to make it log missing values, by the prefix of the key; under an empty key, a hint on all its logs.
        idle: tags that are all exactly 0 in updates in which no completion has an advantage.
        facts: of every run of the trainer.
        batch_tag: tag that is written once per batch of completions, if each pass over the batch writes the other tags again.
        settings: names of settings by fact, if the shared names mean something else.
    """

    name: str
    signs: tuple[str | tuple[str, ...], ...]
    aliases: tuple[Alias, ...]
    x: str = "environment steps"
    hints: Mapping[str, str] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    facts: Mapping[str, str | bool] = field(default_factory=dict)
    batch_tag: str = ""
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)


ANALYTIC = "the exact divergence, not an estimate"
LAST = "of the last minibatch alone"

SB3 = Trainer(
    "Stable-Baselines3",
    (r"train/policy_gradient_loss", r"rollout/ep_(rew|len)_mean", r"rollout/exploration_rate", r"time/total_timesteps"),
    (
        Alias(r"train/approx_kl", KL, late=True, note="mean over the last epoch"),
        Alias(r"train/clip_fraction", CLIPPED, late=True),
        Alias(r"train/explained_variance", FIT, late=True),
        Alias(r"train/entropy_loss", ENTROPY, -1.0, late=True),
        Alias(r"train/(policy_gradient|policy)_loss", POLICY_LOSS, late=True),
        Alias(r"train/value_loss", VALUE_LOSS, 0.5, late=True),
        Alias(r"train/loss", LOSS, late=True, note=LAST),
        Alias(r"train/learning_rate", RATE, late=True),
        Alias(r"train/std", STD, late=True),
        Alias(r"rollout/ep_rew_mean", RETURN_100),
        Alias(r"rollout/ep_len_mean", LENGTH, note="mean of the last hundred episodes"),
        Alias(r"eval/mean_reward", EVALUATION),
        Alias(r"time/fps", SPEED, note="since the beginning"),
    ),
    hints={
        RETURN: "the Monitor wrapper of the environment, which make_vec_env adds: it logs rollout/ep_rew_mean",
        BEFORE: "self.logger.record of the norm in a callback",
    },
)

MONITOR = Trainer(
    "Stable-Baselines3's Monitor",
    (("r", "l", "t"),),
    (Alias("r", RETURN, episodes=True), Alias("l", LENGTH, episodes=True)),
    hints={"": "The Monitor wrapper writes episodes alone; losses are in progress.csv or TensorBoard's files if a logger was set."},
)

BASELINES = Trainer(
    "Baselines or Stable-Baselines 2",
    (
        r"(loss/)?approxkl|loss/approximate_kullback-leibler",
        r"(misc/)?serial_timesteps",
        r"eprewmean|EpRewMean|ep_reward_mean|mean 100 episode reward",
        r"% time spent exploring",
    ),
    (
        Alias(r"(loss/)?approxkl|loss/approximate_kullback-leibler", KL, note="the estimator k2"),
        Alias(r"meankl|loss_kl", KL, note=ANALYTIC),
        Alias(r"(loss/)?clipfrac|loss/clip_factor", CLIPPED),
        Alias(r"(misc/)?explained_variance|ev_tdlam_before", FIT),
        Alias(r"(loss/)?policy_entropy|loss/entropy_loss|entropy", ENTROPY),
        Alias(r"(loss/)?policy_(gradient_)?loss|loss_pol_surr", POLICY_LOSS),
        Alias(r"(loss/)?value_(function_)?loss", VALUE_LOSS),
        Alias(r"eprewmean|EpRewMean|ep_reward_mean|mean 100 episode reward", RETURN_100),
        Alias(r"episode_reward", RETURN, episodes=True),
        Alias(r"EpThisIter", COUNT),
        Alias(r"eplenmean|EpLenMean|ep_len_mean", LENGTH, note="mean of the last hundred episodes"),
        Alias(r"fps", SPEED),
    ),
    hints={RETURN: "the Monitor wrapper of baselines.bench: it logs eprewmean"},
)

SPINNING_UP = Trainer(
    "Spinning Up",
    (r"AverageEpRet", r"AverageTestEpRet"),
    (
        Alias(r"KL", KL_K1),
        Alias(r"ClipFrac", CLIPPED),
        Alias(r"Entropy", ENTROPY),
        Alias(r"LossPi", POLICY_LOSS),
        Alias(r"LossV", VALUE_LOSS, 0.5),
        Alias(r"AverageEpRet", RETURN),
        Alias(r"EpLen", LENGTH),
        Alias(r"AverageTestEpRet", EVALUATION),
    ),
    hints={FIT: "logger.store(ExplainedVariance=...) in the function update"},
)

ML_AGENTS = Trainer(
    "ML-Agents",
    (r"Environment/Cumulative Reward", r"Environment/Group Cumulative Reward", r"Losses/Policy Loss"),
    (
        Alias(r"Policy/Entropy", ENTROPY),
        Alias(r"Losses/Policy Loss", POLICY_LOSS, note="its absolute value"),
        Alias(r"Losses/Value Loss", VALUE_LOSS, 0.5),
        Alias(r"Policy/Learning Rate", RATE),
        Alias(r"Environment/Cumulative Reward", RETURN),
        Alias(r"Environment/Group Cumulative Reward", RETURN),
        Alias(r"Environment/Episode Length", LENGTH),
    ),
    hints={RETURN: "EndEpisode, which an agent has to call within summary_freq steps: it logs Environment/Cumulative Reward"},
)

CLEANRL = Trainer(
    "CleanRL or PufferLib",
    (r"losses/old_approx_kl", r"losses/clipfrac", r"charts/SPS", r"charts/episodic_return"),
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
    hints={
        RETURN: "the wrapper RecordEpisodeStatistics, whose episodes the script writes as charts/episodic_return",
        BEFORE: 'writer.add_scalar("losses/grad_norm", norm, global_step) with the norm that clip_grad_norm_ returns',
    },
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
    hints={RETURN: "the first episode that ends: it logs Train/mean_reward"},
)

_LEARNER = r"(?:ray/tune/)?(?:info/)?learners?/(?:[^/]+/)?(?:learner_stats/)?"
_RUNNER = r"(?:ray/tune/)?(?:env_runners/|sampler_results/)?"
RLLIB = Trainer(
    "RLlib",
    (_LEARNER + r"(mean_kl_loss|kl)",),
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
        Alias(_RUNNER + r"(episodes_this_iter|num_episodes)", COUNT),
        Alias(_RUNNER + r"episode_len_mean", LENGTH),
    ),
    x="iterations or environment steps",
    hints={RETURN: "the first episode that ends: it logs episode_return_mean or episode_reward_mean"},
)

RLLIB_OTHER = Trainer(
    "RLlib, an algorithm without a KL divergence",
    (r"(?:ray/tune/)?episode_reward_mean", _RUNNER + r"episode_return_mean", _LEARNER + r"(vf_loss|vf_explained_var)"),
    (
        Alias(_LEARNER + r"vf_explained_var", FIT, note=LAST),
        Alias(_LEARNER + r"grad_gnorm", AFTER, note="it is taken after clipping"),
        Alias(_LEARNER + r"cur_lr", RATE),
        Alias(_RUNNER + r"episode_(return|reward)_mean", RETURN_100),
        Alias(_RUNNER + r"(episodes_this_iter|num_episodes)", COUNT),
        Alias(_RUNNER + r"episode_len_mean", LENGTH),
    ),
    x="iterations or environment steps",
    hints={"": "The losses and entropies of IMPALA and A2C are sums over batches, and are not read."},
    settings={"max_grad_norm": ()},  # it limits a sum
)

SKRL = Trainer(
    "skrl",
    (r"Loss / Policy loss",),
    (
        Alias(r"Loss / Policy loss", POLICY_LOSS, note="too small if a KL limit ended the update early"),
        Alias(r"Loss / Value loss", VALUE_LOSS, 0.5, note="times its coefficient"),
        Alias(r"Policy / Standard deviation", STD),
        Alias(r"Learning / Learning rate", RATE),
        Alias(r"Reward / Total reward \(mean\)", RETURN_100),
        Alias(r"Reward / Instantaneous reward \(mean\)", STEP_REWARD, note="of single steps"),
        Alias(r"Episode / Total timesteps \(mean\)", LENGTH),
    ),
    x="steps of all environments together",
    hints={RETURN: "the first episode that ends: it logs Reward / Total reward (mean)"},
    facts={"normalize_rewards": False},
)

SAMPLE_FACTORY = Trainer(
    "Sample Factory",
    (r"train/kl_divergence", r"train/fraction_clipped", r"reward/reward"),
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
    hints={VALUE_LOSS: "TensorBoard's files below .summary"},
)

RL_GAMES = Trainer(
    "rl_games",
    (r"losses/a_loss",),
    (
        Alias(r"info/kl", KL, note="exact for continuous actions, k2 for discrete ones"),
        Alias(r"diagnostics/clip_frac/\d+|info/clip_frac", CLIPPED),
        Alias(r"diagnostics/exp_var", FIT),
        Alias(r"losses/entropy", ENTROPY),
        Alias(r"losses/a_loss", POLICY_LOSS),
        Alias(r"losses/c_loss", VALUE_LOSS, 0.5),
        Alias(r"info/last_lr", RATE),
        Alias(r"rewards0?/(step|frame)", RETURN_100),
        Alias(r"episode_lengths/(step|frame)", LENGTH),
        Alias(r"performance/(step_inference_rl_update|total)_fps", SPEED),
    ),
    hints={
        RETURN: "the first episode that ends: it logs rewards/step",
        CLIPPED: "use_diagnostics: True in the configuration: it logs diagnostics/clip_frac and diagnostics/exp_var",
        FIT: "use_diagnostics: True in the configuration: it logs diagnostics/clip_frac and diagnostics/exp_var",
    },
)

_GROUP = r"(?:train/)?(?:[^/]+/)?"
TORCHRL = Trainer(
    "TorchRL",
    (_GROUP + r"kl_approx", _GROUP + r"loss_objective"),
    (
        Alias(_GROUP + r"kl_approx", KL_K1),
        Alias(_GROUP + r"clip_fraction", CLIPPED),
        Alias(_GROUP + r"explained_variance", FIT),
        Alias(_GROUP + r"entropy", ENTROPY),
        Alias(_GROUP + r"loss_objective", POLICY_LOSS),
        Alias(_GROUP + r"grad_norm(_0)?", BEFORE),
        Alias(_GROUP + r"max_ratio", RATIO_MAX),
        Alias(_GROUP + r"mean_ratio", "policy/ratio/mean"),
        Alias(_GROUP + r"ESS", "policy/ess_frac"),
        Alias(r"train/lr|lr", RATE),
        Alias(r"train/reward|collection/reward/episode_reward_mean", RETURN),
        Alias(r"eval/reward/episode_reward_mean", EVALUATION),
        Alias(r"train/episode_length", LENGTH),
        Alias(r"r_training", STEP_REWARD, note="of single steps; episodes are not logged"),
    ),
    x="collected frames",
    hints={RETURN: "the first episode that ends: it logs collection/reward/episode_reward_mean in BenchMARL"},
)

ACTIVE = "policy/clip_frac_active"
REWARD, REWARD_STD, DEAD_GROUPS = "lm/reward/mean", "lm/reward/std", "lm/groups/zero_advantage"
TOKEN_ENTROPY, REFERENCE_KL = "lm/entropy", "lm/kl_reference"
TOKENS, LONGEST, TRUNCATED = "lm/length/mean", "lm/length/max", "lm/truncated_frac"
ENGINE_ERROR, ENGINE_RATIO, ENGINE_KL = "lm/mismatch/mult_error", "lm/mismatch/ratio_mean", "lm/mismatch/kl"
BATCH = "mean of one batch of completions"
LANGUAGE: Final[Mapping[str, str | bool]] = {"model": "language"}


def _rewards(tag: str, note: str = "") -> tuple[Alias, ...]:
    """Aliases of the mean reward of one batch of completions, which is the return of an update."""
    return Alias(tag, REWARD, note=note), Alias(tag, RETURN, note=", ".join(filter(None, (BATCH, note))))


_TRL = r"(?:train/)?"
TRL = Trainer(
    "TRL",
    (_TRL + r"frac_reward_zero_std", _TRL + r"completions/clipped_ratio", (_TRL + r"loss", _TRL + r"grad_norm", _TRL + r"reward")),
    (
        *_rewards(_TRL + r"reward"),
        Alias(_TRL + r"reward_std", REWARD_STD),
        Alias(_TRL + r"frac_reward_zero_std", DEAD_GROUPS),
        Alias(_TRL + r"entropy", TOKEN_ENTROPY),
        Alias(_TRL + r"kl", REFERENCE_KL),
        Alias(_TRL + r"clip_ratio/region_mean", ACTIVE, note="always 0 if num_iterations is 1"),
        Alias(_TRL + r"completions/mean_length|" + _TRL + r"completion_length", TOKENS),
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

ADVANTAGES = {"advantages": "critic/advantages/mean", "scores": "critic/score/mean"}
"""verl's means of advantages and scores over the answers of a step."""

VERL = Trainer(
    "verl",
    (r"actor/ppo_kl", r"actor/pg_clipfrac"),
    (
        *_rewards(r"critic/score/mean"),
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
        Alias(r"val-core/.+/mean@\d+", EVALUATION, note="the main scores of validation"),
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
        "target_kl": (),  # it belongs to the penalty of the reward
    },
)

OPENRLHF = Trainer(
    "OpenRLHF",
    (r"train/ppo_clip_ratio", r"train/vllm_kl"),
    (
        *_rewards(r"train/reward"),
        Alias(r"train/entropy_loss", TOKEN_ENTROPY),
        *_rewards(r"train/rollout/reward_mean", "before filtering"),
        Alias(r"train/rollout/reward_std", REWARD_STD),
        Alias(r"train/rollout/reward_std", "episode/return_std"),
        Alias(r"train/rollout/num_samples", COUNT),
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
        *_rewards(r"train/reward"),
        Alias(r"train/approx_entropy", TOKEN_ENTROPY, note="from the sampled tokens alone"),
        Alias(r"train/kl_penalty", REFERENCE_KL, zero_if_off=True),
        Alias(r"train/baseline_reward/pct_[01]", DEAD_GROUPS, 0.02, note="a lower bound: groups whose rewards are all 0 or all 1"),
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

TRAINERS = (
    SB3,
    SAMPLE_FACTORY,
    RL_GAMES,
    RSL_RL,
    RLLIB,
    RLLIB_OTHER,
    SKRL,
    CLEANRL,
    TORCHRL,
    SPINNING_UP,
    ML_AGENTS,
    BASELINES,
    MONITOR,
    NEMO_RL,
    OPENRLHF,
    VERL,
    TRL,
)

OFF_POLICY: Final = re.compile(
    r"(?:.*[/ ])?(?:critic_loss|ent_coef|alpha_loss|exploration_rate|td_(?:error|loss)|mean_td_error|qf?\d?_(?:loss|values?)|mean_q"
    r"|q-loss|(?:Average)?Q\d?Vals|LossQ\d?|Q\d Loss|% time spent exploring)"
)
"""Tags of SAC, DQN, TD3 and others that learn from a replay buffer."""
ON_POLICY: Final = frozenset({KL, KL_K1, CLIPPED, FIT, ACTIVE})
"""Keys that they do not have."""

AXES: Final = {
    "time/total_timesteps": "environment steps",
    "num_env_steps_sampled_lifetime": "environment steps",
    "global_step": "",
    "agent_steps": "",
    "frame": "",
    "env_step": "environment steps",
    "train/global_step": "",
    "training/global_step": "",
    "counters/total_frames": "collected frames",
    "timesteps_total": "environment steps",
    "misc/total_timesteps": "environment steps",
    "total_timesteps": "environment steps",
    "TotalEnvInteracts": "environment steps",
    "TimestepsSoFar": "environment steps",
    "steps": "environment steps",
    "time/episodes": "episodes",
    "training_iteration": "iterations",
    "Epoch": "epochs",
    "_step": "",
    "Step": "",
    "step": "",
    "epoch": "epochs",
}
"""Columns with the position of a row, the best first, and their units if they differ from the trainer's."""

_MEAN, _EPISODE = (r"(?:average|avg|mean|total|cumulative|recent|true|raw|last|100)*", r"(?:rollout|episodes?|episodic|eps?)*")
LIKELY: Final = {
    RETURN: rf"{_MEAN}{_EPISODE}{_MEAN}(?:ret|returns?|rew|rewards?|r|score)s?{_MEAN}",
    "env_step": r"(?:total|env|global|num|agent)*(?:timesteps?|steps?|frames?|interacts|interactions)(?:total|sofar|sampled)?",
    LENGTH: rf"{_MEAN}{_EPISODE}{_MEAN}(?:len|length)s?{_MEAN}",
    KL: r"(?:approx|mean|policy|old|estimated)*kl(?:div|divergence|approx|difference|avg|mean)*",
    CLIPPED: r"(?:policy)?clip(?:ped)?(?:frac|fraction|ratio)(?:avg|mean)?",
    ENTROPY: r"(?:policy|mean|action|average|avg)*entropy(?:mean|avg)?",
    FIT: r"(?:vf|value|critic)?(?:explainedvar|explainedvariance|ev)",
    VALUE_LOSS: r"(?:(?:v|vf|vl|value|valuefunction|valuefn|vfn|critic|baseline)loss|lossv|lossvalue)(?:avg|mean|before)?",
    POLICY_LOSS: r"(?:(?:p|pi|pg|policy|actor|policygradient|surrogate)loss|losspi|losspolicy|lossactor)(?:avg|mean)?",
    BEFORE: r"(?:global)?grad(?:ient)?(?:global)?g?norm",
    RATE: r"(?:cur)?(?:learningrate|lr)",
}
"""Likely keys of unknown trainers' columns, by the column's last part in lower case, with only letters and digits."""


def trainer_of(tags: Iterable[str]) -> Trainer | None:
    """Return the trainer that wrote these tags; None if no known one did."""
    ordered = sorted(tags)

    def has(sign: str) -> bool:
        return any(re.fullmatch(sign, tag) for tag in ordered)

    for trainer in TRAINERS:
        if any(has(sign) if isinstance(sign, str) else all(map(has, sign)) for sign in trainer.signs):
            return trainer
    return None


def likely_columns(tags: Iterable[str]) -> dict[str, str]:
    """Return the likely column of each key among an unknown trainer's columns."""
    ordered = sorted(tags, key=lambda tag: (not re.search(r"ep|mean|average|total", tag, re.IGNORECASE), len(tag)))
    leaves = {tag: re.sub(r"[^a-z0-9]", "", re.split(r"[/|]", tag)[-1].lower()) for tag in ordered}
    found = {}
    for key, pattern in LIKELY.items():
        columns = [tag for tag, leaf in leaves.items() if re.fullmatch(pattern, leaf)]
        columns = [tag for tag in columns if not re.search(r"(^|[/_ ])(eval|test|val)", tag, re.IGNORECASE)] or columns
        if columns:
            found[key] = columns[0]
    return found
