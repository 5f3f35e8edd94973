"""What goes wrong in the network: gradients, the optimizer, features, memory."""

from __future__ import annotations

from esper_telemetry.alarms.kind import AlarmType

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
