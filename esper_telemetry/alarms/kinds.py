"""The known ways in which a PPO run goes wrong: which metrics show each, what it means and what to try. Plain data.

The bounds behind them stand with the metrics that they read; `reads` names keys or templates of the catalogue, the deciding one first.

What is known of a way in which a run goes wrong.

What goes wrong with the data, the policy, the critic and the task.

What goes wrong in the network: gradients, the optimizer, features, memory.

What goes wrong where networks grow: seeds, and the controller that grows them.
"""

from __future__ import annotations

from dataclasses import dataclass

from esper_telemetry.core.record import RUN_FAILED


@dataclass(frozen=True, slots=True)
class AlarmType:
    """One way in which a run goes wrong.

    Attributes:
        type: its name, `family/what`.
        reads: keys or key templates that tell it.
        meaning: what has happened, in one sentence.
        action: what to try, the likeliest first.
        hard: the run is wrong for certain, however well it seems to learn.
    """

    type: str
    reads: tuple[str, ...]
    meaning: str
    action: str
    hard: bool = False


NUMERICS = (
    AlarmType(
        "numerics/nonfinite",
        ("numerics/nonfinite",),
        "A NaN or an infinity has appeared in the data, the losses, the gradients or the weights.",
        "Look at the first non-finite tensor that the journal names; lower the learning rate, clip gradients, check the rewards and "
        "observations of the environment, bound log standard deviations.",
        hard=True,
    ),
)

INTEGRITY = (
    AlarmType(
        "integrity/ratio_init",
        ("integrity/ratio_init", "policy/kl_first"),
        "The log-probabilities that were stored are not those that the trainer computes now, before anything was learned.",
        "Store the observation, the mask and the hidden state that the policy acted on; freeze normalisers and dropout between acting and "
        "training.",
        hard=True,
    ),
    AlarmType(
        "integrity/gae_identity",
        ("integrity/gae_identity",),
        "Returns are not advantages plus values: rows of the buffer are stale or shuffled against each other.",
        "Check that advantages, values and returns are indexed and masked alike, and that nothing overwrites the buffer in the update.",
        hard=True,
    ),
    AlarmType(
        "integrity/adv_norm",
        ("integrity/adv_norm", "adv/norm/mean", "adv/norm/std"),
        "Advantages are said to be normalised and are not.",
        "Normalise over the rows that count, not over padding; once, and after everything else is done to the advantages.",
        hard=True,
    ),
    AlarmType(
        "integrity/mask_violation",
        ("integrity/mask_violation",),
        "Actions were taken that their mask forbids.",
        "Apply the mask of the step that is acted on, before sampling; check the order of auto-reset and mask.",
        hard=True,
    ),
    AlarmType(
        "integrity/rows_repeated",
        ("integrity/rows_repeated",),
        "A pass over the rollout sees some transitions again and again, and leaves others out.",
        "Draw a new permutation of the rollout for each pass, and cut it into minibatches that do not overlap.",
        hard=True,
    ),
    AlarmType(
        "integrity/buffer_age",
        ("buffer/age_updates",),
        "The update learns from data that an older policy collected.",
        "Clear the buffer after each update, or correct for the age (V-trace).",
        hard=True,
    ),
)

POLICY = (
    AlarmType(
        "policy/kl_spike",
        ("policy/kl", "policy/kl_max"),
        "One update moved the policy much further than usual.",
        "Lower the learning rate or the number of epochs, set target_kl, use larger minibatches.",
    ),
    AlarmType(
        "policy/ratio_explosion",
        (
            "policy/ess_frac_min",
            "policy/ratio/max",
            "policy/ess_frac",
            "policy/head/{head}/blame",
            "policy/head/{head}/ratio/max",
        ),
        "A few samples' probabilities have changed so much that they decide the update alone.",
        "Look at the head with the largest blame; lower the learning rate, set target_kl, keep action probabilities away from 0.",
    ),
    AlarmType(
        "policy/ratio_collapse",
        ("policy/ratio/min", "policy/ratio/p01"),
        "Actions that turned out well have become ten times less likely.",
        "Check the sign and the order of advantages; lower the learning rate.",
    ),
    AlarmType(
        "policy/clip_saturation",
        (
            "policy/clip_frac",
            "policy/clip_frac_active",
            "policy/clip_frac_pos",
            "policy/clip_frac_neg",
            "policy/head/{head}/clip_frac",
        ),
        "Much of the batch has left the trust region and teaches nothing more.",
        "Fewer epochs or a lower learning rate; a larger batch where advantages are noisy.",
    ),
    AlarmType(
        "policy/kl_stall",
        ("policy/kl_max", "opt/lr"),
        "The policy does not move at all.",
        "Check that its parameters are in the optimizer and require gradients, that the learning rate is not 0, that advantages vary.",
    ),
    AlarmType(
        "policy/entropy_collapse",
        (
            "policy/entropy_norm",
            "policy/entropy_marginal_norm",
            "policy/head/{head}/entropy_norm",
            "policy/entropy_grad_ratio",
        ),
        "The policy does the same everywhere: it has stopped exploring without having solved the task.",
        "Raise entropy_coef, lower the learning rate, check whether one action is rewarded by mistake.",
    ),
    AlarmType(
        "policy/entropy_crash",
        ("policy/entropy_rate", "policy/entropy_norm", "loss/entropy", "loss/entropy_coef"),
        "The policy makes up its mind abnormally early.",
        "Raise entropy_coef, lower the learning rate, normalise rewards.",
    ),
    AlarmType(
        "policy/entropy_explosion",
        ("policy/entropy_norm", "policy/kl"),
        "The policy stays random: it learns nothing, or the bonus for exploring outweighs the task.",
        "Lower entropy_coef; check that rewards arrive and that advantages are not all the same.",
    ),
    AlarmType(
        "policy/action_shift",
        ("policy/action_shift_js", "policy/head/{head}/action_shift_js"),
        "The mix of actions changed abruptly between two rollouts.",
        "Look at the update before: KL, ratios and the learning rate; check for a change of the environment.",
    ),
    AlarmType(
        "policy/wrong_direction",
        ("policy/surrogate_gain",),
        "Updates make good actions rarer and bad ones likelier.",
        "Check the sign of the policy loss and that advantages belong to the actions beside them; lower the learning rate.",
    ),
    AlarmType(
        "policy/dead_head",
        ("grad/head/{head}/norm", "policy/head/{head}/decision_frac"),
        "A head that has choices to make gets no gradient.",
        "Check its mask, and whether its output is detached or left out of the joint log-probability.",
        hard=True,
    ),
)

VALUE = (
    AlarmType(
        "value/fit_collapse",
        ("value/r2", "value/explained_variance", "value/loss_norm"),
        "The critic predicted returns and no longer does.",
        "Normalise returns, lower the learning rate or value_coef, give the critic its own network; check for a change of rewards.",
    ),
    AlarmType(
        "value/loss_jump",
        ("loss/value",),
        "The critic's error jumped.",
        "Compare with ret/std: if that jumped too the rewards changed; otherwise lower the learning rate.",
    ),
    AlarmType(
        "value/scale_shift",
        ("ret/std", "reward/absmax"),
        "Returns are on another scale than before.",
        "Normalise rewards, clip outliers, look for a bug or a new phase in the environment.",
    ),
    AlarmType(
        "value/bias",
        ("value/bias_over_std", "value/bias", "value/terminal_err", "episode/truncated_frac"),
        "The critic is wrong by much in one direction, which explained variance cannot see.",
        "Check the treatment of time limits (bootstrap) and of the last value; train the critic for more epochs.",
    ),
)

ADVANTAGES = (
    AlarmType(
        "adv/degenerate",
        ("adv/participation", "adv/raw/absmax_over_std", "adv/std_floored"),
        "The learning signal comes from a handful of steps, or there is none.",
        "Clip or normalise rewards, use more steps per update; if all rewards are equal, check that they are wired.",
    ),
    AlarmType(
        "obs/constant",
        ("obs/constant_frac",),
        "Some environments give the same observation in every step.",
        "Look for an environment that hangs or was not reset, a sensor that is not wired, a normaliser that cuts everything off.",
    ),
    AlarmType(
        "reward/constant",
        ("reward/std",),
        "The reward has been the same in every step for long.",
        "Check the reward function and its wrappers: clipped away, or not wired.",
        hard=True,
    ),
    AlarmType(
        "norm/drift",
        ("norm/{normalizer}/drift",),
        "A normaliser still moves, so that the networks see shifting inputs.",
        "Warm it up before training, freeze it later, or bound outliers.",
    ),
)

TASK = (
    AlarmType(
        "task/no_episodes",
        ("episode/count", "episode/length_mean"),
        "No episode has finished for long.",
        "Set a time limit; check that termination is passed on.",
        hard=True,
    ),
    AlarmType(
        "task/return_drop",
        ("episode/return_mean_100", "episode/return_mean"),
        "The return has fallen well below its best.",
        "Look for the alarm that came first; go back to the best checkpoint with a lower learning rate.",
    ),
)

RUN = (
    AlarmType(
        RUN_FAILED,
        ("alarm/{key}",),
        "An exception ended the run.",
        "Read the exception and its traceback; where a tensor is not finite, look at what computes the first one.",
        hard=True,
    ),
)

TELEMETRY = (
    AlarmType(
        "telemetry/overhead",
        ("perf/telemetry_frac", "telemetry/sample_every"),
        "Telemetry takes more of the training time than it should.",
        "Lower the level, leave a second core free, or log less of your own.",
    ),
    AlarmType(
        "telemetry/missing_metric",
        ("telemetry/undefined",),
        "A metric that was there has had no value for several updates.",
        "Its description says when it is absent; check what feeds it.",
    ),
    AlarmType(
        "telemetry/delivery",
        ("telemetry/dropped", "telemetry/errors", "telemetry/queue_depth"),
        "A backend fails or falls behind; the journal has everything.",
        "Check the address and the key of the backend; `esper-telemetry replay` sends what is missing.",
    ),
    AlarmType(
        "telemetry/storm",
        ("alarm/active", "alarm/{key}"),
        "More alarms were raised than anybody can read.",
        "Look at the first ones: the rest are most likely their consequences.",
    ),
)


GRADIENTS = (
    AlarmType(
        "grad/explode",
        ("grad/{group}/severity_explode", "grad/global/norm_preclip_max", "grad/global/norm_preclip", "grad/health"),
        "Gradients are far larger than this run's usual ones.",
        "Clip by the global norm (max_grad_norm 0.5), lower the learning rate, look for outliers in returns; the table of "
        "layers says where.",
    ),
    AlarmType(
        "grad/vanish",
        ("grad/{group}/severity_vanish", "grad/zero_frac", "grad/layer/{layer}/zero_frac", "grad/health"),
        "A part of the network gets next to no gradient.",
        "Look for dead ReLUs (repr/dormant_frac), saturated tanhs, a detached branch; lower the learning rate, use another activation.",
    ),
    AlarmType(
        "grad/missing_group",
        ("grad/{group}/norm_preclip",),
        "A part of the network that is meant to be trained has no gradient at all.",
        "Look for detach(), no_grad or requires_grad=False on the way from the loss to it.",
        hard=True,
    ),
    AlarmType(
        "grad/actor_starved",
        ("grad/interference/log_ratio", "grad/interference/critic_share", "grad/interference/actor_effective"),
        "The critic's gradient fills the clip limit and the actor learns from what is left.",
        "Normalise returns, lower value_coef, use separate networks or clip them apart.",
    ),
    AlarmType(
        "grad/interference",
        ("grad/interference/cos", "grad/interference/cancel"),
        "Actor and critic pull the shared network in opposite directions.",
        "Use separate networks, or lower value_coef.",
    ),
    AlarmType(
        "grad/clip_saturated",
        ("grad/clip/coef_min", "grad/clip/coef", "grad/clip/excess_log10"),
        "Clipping shrinks gradients to a small part of themselves, so the learning rate means little.",
        "Find what is large (grad/interference/critic_share); normalise returns or lower value_coef before raising the limit.",
    ),
    AlarmType(
        "grad/oscillation",
        ("grad/align/successive_cos",),
        "Updates undo each other.",
        "Lower the learning rate, use larger batches or fewer epochs.",
    ),
    AlarmType(
        "grad/noise_dominated",
        ("grad/gns/noise_dominated", "grad/gns/b_simple", "opt/snr_share"),
        "The gradient is noise.",
        "Use larger batches: more environments or more steps per update.",
    ),
    AlarmType(
        "grad/drift",
        ("grad/global/norm_preclip",),
        "Gradient norms wander away from their average.",
        "Look at the learning-rate schedule, at weight growth and at the scale of returns.",
    ),
    AlarmType(
        "grad/concentration",
        ("grad/concentration/entropy", "grad/concentration/layer_entropy", "grad/concentration/participation"),
        "A few parameters own the gradient.",
        "Look at the largest layer in the table; check the scale of inputs and the initialisation of the heads.",
    ),
)

OPTIMIZER = (
    AlarmType(
        "opt/update_too_large",
        ("opt/update_to_weight", "opt/update_to_weight/{layer}"),
        "A step changes the weights by a large share of themselves.",
        "Lower the learning rate, or warm it up.",
    ),
    AlarmType(
        "opt/stalled_weights",
        ("opt/update_to_weight/{layer}",),
        "Weights that are meant to be trained do not move.",
        "Check that the optimizer has them, and that their learning rate is not 0.",
        hard=True,
    ),
    AlarmType(
        "opt/rms_spike",
        ("opt/stable_rms", "opt/beta2"),
        "Gradients have outgrown Adam's memory of them: the loss tends to jump some steps later.",
        "Lower beta2 (0.95), warm up the learning rate, clip gradients.",
    ),
    AlarmType(
        "opt/state_lost",
        ("opt/state_reset",),
        "The optimizer was made anew in the middle of training, and its moments are gone.",
        "Save and load the optimizer with the policy; do not build it again when parameters are added.",
    ),
)

REPRESENTATION = (
    AlarmType(
        "repr/dormant",
        ("repr/dormant_frac", "repr/dead_frac", "repr/dormant_frac/{layer}"),
        "Many units no longer respond to anything.",
        "Lower the learning rate, use tanh or layer norm, reset dormant units.",
    ),
    AlarmType(
        "repr/rank_collapse",
        ("repr/effective_rank", "repr/feature_rank", "repr/srank"),
        "The features use far fewer dimensions than before: the network loses the ability to tell states apart.",
        "Fewer epochs, a lower learning rate, regularise features (Moalla 2024), normalise observations.",
    ),
    AlarmType(
        "repr/norm_growth",
        ("repr/feature_norm", "opt/weight_growth"),
        "Features grow, which precedes a collapse of their rank.",
        "Weight decay, layer norm, a lower learning rate.",
    ),
)

MEMORY = (
    AlarmType(
        "lstm/forget_closed",
        ("lstm/gate/{gate}/sat_lo", "lstm/timescale/median"),
        "The forget gate is shut: memory does not last from one step to the next.",
        "Initialise the forget bias at 1, lower the learning rate, normalise inputs.",
    ),
    AlarmType(
        "lstm/forget_open",
        ("lstm/gate/{gate}/sat_hi",),
        "The forget gate never closes: the memory only adds up.",
        "Check that states are reset at the ends of episodes; clip the cell state.",
    ),
    AlarmType(
        "lstm/cell_drift",
        ("lstm/{part}/rms", "lstm/{part}/absmax", "lstm/c_growth"),
        "The cell state grows with its age.",
        "Check resets, shorten sequences, clip or regularise the cell state.",
    ),
    AlarmType(
        "lstm/stale_state",
        ("lstm/staleness",),
        "Training begins with states that the current weights would not have reached.",
        "Recompute states at the start of each epoch, burn in, or use whole episodes.",
    ),
    AlarmType(
        "lstm/reset_missing",
        ("lstm/reset_rate",),
        "Episodes end and memory is never reset: it leaks from one episode into the next.",
        "Zero the state where `done` was set, in acting and in training alike.",
        hard=True,
    ),
)


SEEDS = (
    AlarmType(
        "seed/explode",
        ("seed/exploding", "seed/exploding_frac", "seed/grad/norm"),
        "The gradient of a seed is many times its clip limit, or those of many seeds are ten times theirs.",
        "Lower the learning rate of seeds, or blend them more slowly; the watchdog gives back weights that are lost (env/rollbacks).",
    ),
    AlarmType(
        "seed/vanish",
        ("seed/vanishing", "seed/grad/norm"),
        "Seeds get next to no gradient at all.",
        "See why in seed/cause: nothing reaches them, or they lose it; a host that has learned everything leaves nothing either.",
    ),
    AlarmType(
        "seed/dormant",
        ("seed/cause/{cause}", "seed/intensity_ratio", "seed/alpha"),
        "Seeds learn next to nothing because the loss hardly reaches them; this is not a host that is merely faster.",
        "Raise the weight with which they count (seed/alpha), or prune them: a seed without effect costs its parameters.",
    ),
    AlarmType(
        "seed/stalled",
        ("seed/germinated", "seed/gate/{gate}/pass_frac", "seed/gate/{gate}/asked", "seed/stage/{stage}"),
        "Seeds are germinated and none of them gets as far as having an effect.",
        "See which gate refuses them; train them for longer before they are advanced, or use permissive gates.",
    ),
    AlarmType(
        "seed/reward_hacking",
        ("env/score", "episode/return_mean", "env/reward/{component}"),
        "The controller earns as much as ever while the hosts that it grows become worse.",
        "See which component of the reward pays (env/reward), and weigh it less; pay for the end of the episode (reward sparse).",
    ),
)


__all__ = ["ALARMS", "NONFINITE", "AlarmType", "alarms_reading"]

ALARMS = (
    *NUMERICS,
    *INTEGRITY,
    *POLICY,
    *VALUE,
    *ADVANTAGES,
    *GRADIENTS,
    *OPTIMIZER,
    *REPRESENTATION,
    *MEMORY,
    *SEEDS,
    *TASK,
    *RUN,
    *TELEMETRY,
)
"""In causal order: what comes first tends to be the cause of what comes after."""


NONFINITE = "_nonfinite"
"""How the keys end that count what was left out of a metric because it was not finite."""


def alarms_reading(key: str) -> tuple[AlarmType, ...]:
    """Those that read a key or template, the ones that it decides first."""
    if key.endswith(NONFINITE):
        return NUMERICS
    deciding = [alarm for alarm in ALARMS if alarm.reads[0] == key]
    return (*deciding, *(alarm for alarm in ALARMS if key in alarm.reads[1:]))
