"""What goes wrong with the data, the policy, the critic and the task."""

from __future__ import annotations

from esper_telemetry.alarms.kind import AlarmType
from esper_telemetry.record import RUN_FAILED

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
