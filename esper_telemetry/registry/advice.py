"""What to try when a metric is not normal that no alarm reads: by itself it is a hint, and often another metric tells more."""

from __future__ import annotations

FAR = "Lower the learning rate or the number of epochs; set target_kl. The head with the largest `policy/head/{head}/blame` moved most."
RARE = "Rare actions make extreme ratios: judge beside `policy/ess_frac`, and keep action probabilities away from 0 (entropy_coef)."
SPIKY = "Clip or normalise rewards; use more steps per update."
MOVES = "Lower the learning rate or the number of epochs; where values are clipped, match clip_value to the scale of the returns."
LAYER = "Compare with its group's severity; look for dead units (`repr/dormant_frac`), saturated activations or outliers in its inputs."
LOOSE = (
    "Clipping no longer holds the policy: fewer epochs, a lower learning rate, target_kl; see `repr/effective_rank`."
)
FADING = "Open the forget gate (bias 1), train on shorter sequences, or give the policy what it has to remember."
BARE = "Look up the key without this ending: what to try stands there."

BEHIND = "The backend is slower than the run, or away: fewer keys (max_keys), or let `esper-telemetry replay` send the rest later."
ADVICE = {
    "policy/kl_last": FAR,
    "policy/kl_exact": FAR,
    "policy/kl_post": FAR,
    "policy/head/{head}/kl": FAR,
    "policy/head/{head}/kl_exact": FAR,
    "policy/logratio/std": FAR,
    "policy/head/{head}/logratio/std": FAR,
    "policy/greedy_agreement": FAR,
    "policy/logratio/absmax": RARE,
    "policy/ratio/std": RARE,
    "policy/head/{head}/ratio/min": RARE,
    "policy/logp/min": RARE,
    "policy/head/{head}/std/min": "Raise entropy_coef or bound log standard deviations from below; check that rewards reward variety.",
    "policy/head/{head}/bound_frac": "Scale actions to their bounds, squash them (squash=True), or lower the initial standard deviation.",
    "adv/raw/kurtosis": SPIKY,
    "adv/raw/pos_frac": "The critic is biased: look at `value/bias_over_std`.",
    "adv/sign_flip_frac": "The mean advantage is far from 0, so the critic is biased: look at `value/bias_over_std`.",
    "reward/nonfinite": "Fix the environment or its wrappers: a reward has to be a number.",
    "norm/{normalizer}/clip_frac": "Look for outliers or a constant dimension; raise the limit of the normaliser, or warm it up.",
    "value/clip_frac": MOVES,
    "value/move_over_std": MOVES,
    "value/bias_truncated": "Bootstrap time limits with the value of the final observation, not with that of the next episode's first.",
    "value/bias_terminated": "Do not bootstrap where an episode terminates: check that the environment tells terminated from truncated.",
    "value/nrmse": "Look at `value/explained_variance` and `value/bias`: noise, a lagging critic and a wrong scale look alike here.",
    "grad/layer/{layer}/severity_explode": LAYER,
    "grad/layer/{layer}/severity_vanish": LAYER,
    "grad/sign/pos_frac": "Centre and scale the inputs; look for features or targets that are always positive.",
    "grad/pair/{pair}/intensity_ratio": "The journal names the cause (`evidence/pairs`): disconnected, dormant, saturated, or a fast host.",
    "grad/pair/{pair}/connected": "Look for detach(), no_grad or requires_grad=False between the module and the loss.",
    "grad/pair/{pair}/zero_frac": "Look for dead units inside the module and for a gate in front of it that is shut.",
    "opt/eps_dominated_frac": "Gradients are tiny next to Adam's eps: lower eps (1e-8), or find why they vanish.",
    "lstm/{part}/mean": "States drift to one side: check resets, and centre the inputs of the memory.",
    "lstm/timescale/frac_beyond_bptt": "Train on longer sequences (num_steps), or accept that so much memory is not trained.",
    "lstm/cell_log_gain": FADING,
    "lstm/bptt/h0_grad_norm": FADING,
    "lstm/staleness_first": "Acting and training begin with different states: store the state that was acted on, and reset both alike.",
    "repr/drift_cos": "The trunk moves under the heads: lower the learning rate or the number of epochs.",
    "repr/excess_ratio/high": LOOSE,
    "repr/excess_ratio/low": LOOSE,
    "env/rollbacks": "Lower the learning rate of the hosts' task; see `seed/exploding` for who broke them, `env/rollback` for how.",
    "perf/d2h_copies": "Telemetry promises one: report what you observe.",
    "telemetry/{sink}/lag_records": BEHIND,
    "telemetry/{sink}/lag_seconds": BEHIND,
    "telemetry/{sink}/errors": "`status.json` in the run directory says what the backend answered; `esper-telemetry doctor` what it lacks.",
    "telemetry/metric_errors": "A bug of this package: please report the warning in the console, which names the metric function.",
    "{key}/drift": BARE,
    "{key}/robust_z": BARE,
    "{key}/trend/mk_z": BARE,
    "{key}/period/p": "An oscillation: compare `/period/length` with episodes and schedules; lower the learning rate.",
    "{key}/acf1": "Below 0 updates undo each other: lower the learning rate, use larger batches.",
    "{key}/cusum": BARE,
    "{key}/page_hinkley": BARE,
    "{key}/lr_response": "Updates do not follow the schedule: check that it sets the optimizer's learning rate.",
}
"""By key; every metric with bounds has advice here or from an alarm (tested)."""
