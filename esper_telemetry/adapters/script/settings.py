"""Settings of a script, from its arguments and constants."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LinearLR

from esper_telemetry.adapters.script.autograd_graph import SAME_LINE
from esper_telemetry.adapters.script.loss_reading import LossReading
from esper_telemetry.adapters.script.script_rollouts import ScriptRollout
from esper_telemetry.adapters.script.variables import SETTINGS, Aliases, Variables, as_flag, as_number, plain_name, settings_of
from esper_telemetry.core.rate_schedule import SCHEDULE_FACT, RateSchedule

FACTS: Mapping[str, Aliases] = {
    "clip": (
        *("clip_coef", "clip_eps", "clip_range", "clip_param", "clip_epsilon", "eps_clip", "clip_ratio", "clip_rate"),
        *("ratio_clip", "clip", "clipping", "policy_clip", "ppo_clip", "ε"),
    ),
    "gamma": ("gamma", "discount", "discount_factor", "gam", "γ"),
    "gae_lambda": (
        *("gae_lambda", "lam", "lambda", "gae_lam", "lambd", "lmbda", "lambda_gae_adv", "gae_tau", "λ"),
        *("trace", "trace_decay", "lamda"),
    ),
    "num_steps": ("num_steps", "n_steps", "rollout_length"),
    "num_envs": ("num_envs", "n_envs"),
    "num_epochs": ("update_epochs", "num_epochs", "n_epochs", "epochs", "K_epochs", "ppo_epoch"),
    "num_minibatches": ("num_minibatches", "n_minibatches", "minibatches"),
    "learning_rate": ("learning_rate", "lr"),
    "value_coef": ("vf_coef", "value_coef", "critic_coef", "value_loss_coef", "value_weight", "c_v", "c1"),
    "entropy_coef": ("ent_coef", "entropy_coef", "entropy_weight", "c_e", "c2", "entropy_beta"),
    "total_steps": ("total_timesteps", "total_steps"),
    "target_kl": ("target_kl",),
    "mean_noise": ("rpo_alpha",),  # of the policy's means, only in training, https://arxiv.org/abs/2212.07536
    "env": ("env_id", "env_name", "env"),
}
"""Settings that alarms read."""

MIN_TRACE_DECAY = 0.5
"""Smallest `tau` that is the lambda of advantages."""

MIN_STEPS = 8
"""Steps within episodes that suffice to fit discounts to advantages."""

MAX_NORM: Aliases = (*("max_grad_norm", "max_gradient_norm", "grad_clip", "clip_grad_norm", "grad_clip_norm", "max_norm"),)
NORMALIZES: Aliases = ("norm_adv", "normalize_advantage", "norm_advantages")
ANNEALS: Aliases = ("anneal_lr", "anneal_learning_rate", "lr_anneal", "use_linear_lr_decay", "linear_lr_decay")
UPDATES: Aliases = (
    *("num_updates", "n_updates", "total_updates", "max_updates", "num_iterations", "n_iterations", "total_iterations"),
    *("updates", "iterations"),
)
MIN_UPDATES = 4
"""Smallest number under such a name that is a planned number of updates; a smaller one may count finished updates."""

CLIPS_VALUES: Aliases = ("clip_vloss", "clip_value_loss", "clip_vf")


def is_rate(name: str) -> bool:
    """Return True for the name of a learning rate, also of one network's."""
    return re.search(r"(^|_)lr(_|$)|rate", name.lower()) is not None


def read_coefficients(reading: LossReading) -> dict[str, float]:
    """Return the weights of the losses `value` and `entropy`, and of a KL `penalty`, in a loss, relative to the policy's term."""
    weight = 0.0 if reading.policy is None else reading.policy.weight
    terms = {"value": reading.value, "entropy": reading.entropy, "penalty": reading.penalty}
    return {name: float(f"{abs(term.weight / weight):.6g}") for name, term in terms.items() if term and weight and term.weight}


def find_coefficients(variables: Variables) -> dict[str, float]:
    """Return the weights of the losses `value` and `entropy` as they are now; scripts may anneal them."""
    weights = {name: variables.find(FACTS[f"{name}_coef"], as_number) for name in ("value", "entropy")}
    return {name: weight for name, weight in weights.items() if weight is not None}


def stated_numbers(variables: Variables) -> dict[str, float]:
    """Return the settings of `FACTS` that are numbers of variables or their members, by fact."""
    numbers = {fact: variables.find(names, partial(_setting, fact)) for fact, names in FACTS.items() if fact != "env"}
    return {fact: number for fact, number in numbers.items() if number is not None}


def find_facts(
    variables: Variables, max_norm: float | None, readings: Sequence[LossReading] = (), counts_updates: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the facts for the alarms that follow from the script's settings and its first losses.

    In some programs `epochs` counts updates, not passes over a rollout: such names are in `counts_updates`.
    """
    others = {*map(plain_name, counts_updates)}
    facts: dict[str, Any] = {
        "precision": "fp32",
        "max_grad_norm": max_norm,
        "advantage_correction": 1,
        "columns_by_name": True,
        "setting_names": {},
    }
    for fact, names in FACTS.items():
        known = tuple(name for name in names if fact != "num_epochs" or plain_name(name) not in others)
        name, value = variables.find_named(known, partial(_setting, fact))
        if value is not None:
            facts[fact] = value
            facts["setting_names"][fact] = name
    decay = None if "gae_lambda" in facts else variables.find(("tau",), _trace_decay)
    if decay is not None:
        facts["gae_lambda"] = decay
    normalizes = variables.find(NORMALIZES, as_flag)
    if normalizes is not None:
        facts.update(normalize_advantages=normalizes, normalize_minibatches=normalizes)
    for reading in readings:
        if reading.policy is not None and reading.policy.clip is not None:
            facts.setdefault("clip", round(reading.policy.clip, 6))
        if reading.value is not None and reading.value.clip is not None:
            facts["clip_value"] = round(reading.value.clip, 6)
    if variables.find(CLIPS_VALUES, as_flag) and "clip" in facts:
        facts.setdefault("clip_value", facts["clip"])
    return facts


def _setting(fact: str, value: object) -> Any:
    """Return a value that a setting may have: a number, or the name of an environment. A ratio is clipped by less than 1."""
    if fact == "env":
        return value if isinstance(value, str) else None
    number = as_number(value)
    return None if number is None or (fact == "clip" and number >= 1) else value


def _trace_decay(value: object) -> float | None:
    """Return a number that decays a trace. None for a small one, by which other algorithms update a target network."""
    number = as_number(value)
    return number if number is not None and number >= MIN_TRACE_DECAY else None


def find_discounts(rollout: ScriptRollout | None, facts: Mapping[str, Any], discounts: Sequence[tuple[float, ...]]) -> dict[str, float]:
    """Return the discount factor and the lambda that fit the advantages or the returns, or the ones that the code multiplies."""
    found = {} if rollout is None else _fitted_discounts(rollout, facts) or _discount_of_sums(rollout)
    fitting = [one for one in discounts if facts.get("gamma", one[0]) == one[0]]
    longest: tuple[float, ...] = max(fitting, key=lambda one: len(one), default=())
    return found or dict(zip(("gamma", "gae_lambda"), longest, strict=False))


def _fitted_discounts(rollout: ScriptRollout, facts: Mapping[str, Any]) -> dict[str, float]:
    """Return discount and lambda that give the advantages of a rollout [T, B] from its rewards and values; empty if none do.

    Within episodes s A_t + m = r_t - V_t + γ V_{t+1} + γ λ (s A_{t+1} + m), with s = 1 and m = 0 unless the advantages are normalised.
    Least squares give s, γ, γ λ s and m - γ λ m. Steps next to ends are left out: mistakes are common there.
    """
    rewards, values, advantages = (one.double().cpu() for one in (rollout.rewards, rollout.values, rollout.advantages))
    inside = ~rollout.ended[:-1].cpu()
    inside[1:] &= inside[:-1].clone()
    target = (rewards - values)[:-1][inside]
    columns = torch.stack([advantages[:-1], -values[1:], -advantages[1:], torch.ones_like(values[1:])], -1)[inside]
    if len(columns) < MIN_STEPS or not bool(columns.isfinite().all()) or torch.linalg.matrix_rank(columns) < 4:
        return {}
    size, gamma, carried, _ = torch.linalg.lstsq(columns, target).solution.tolist()
    gamma = float(facts.get("gamma", gamma))
    gae_lambda = float(facts.get("gae_lambda", carried / (size * gamma)))
    for digits in range(2, 6):  # the script's numbers are the shortest
        pair = (round(gamma, digits), round(gae_lambda, digits))
        rest = target - pair[0] * columns[:, 1]
        own = torch.stack([columns[:, 0] + pair[0] * pair[1] * columns[:, 2], columns[:, 3]], -1)
        error = (rest - own @ torch.linalg.lstsq(own, rest).solution).abs().max() / target.abs().max()
        if error <= SAME_LINE and all(0 <= one <= 1 for one in pair):
            return dict(zip(("gamma", "gae_lambda"), pair, strict=True))
    return {}


def _discount_of_sums(rollout: ScriptRollout) -> dict[str, float]:
    """Return the discount of returns that are sums of rewards, and 1 for lambda; empty for other returns."""
    inside = ~rollout.ended[:-1]
    rewards, now, later = (one[inside].double().cpu() for one in (rollout.rewards[:-1], rollout.returns[:-1], rollout.returns[1:]))
    if len(now) < MIN_STEPS or not bool(later.any()):
        return {}
    gamma = round(float(later @ (now - rewards) / (later @ later)), 5)
    error = (rewards + gamma * later - now).abs().max() / now.abs().max()
    return {"gamma": gamma, "gae_lambda": 1.0} if error <= SAME_LINE and 0 < gamma <= 1 else {}


def unchecked_equations(facts: Mapping[str, Any], traced: Mapping[str, str] = {}) -> dict[str, str]:
    """Return why equations cannot be checked with the script's settings.

    Args:
        facts: that were found.
        traced: columns of a rollout that was found, as in `untraced_equations`.
    """
    shown = f"observations {traced.get('observations', '')}".strip()
    reasons = {
        equation: f"the {shown} differ from those of the environments: the script may transform them on purpose"
        if what == "observations"
        else f"the script transforms {what} or observations, perhaps on purpose: its {what} cannot be compared with the environments'"
        for equation, what in TRANSFORMED.items()
        if {"observations", what} <= traced.keys()
    }
    if SCHEDULE_FACT not in facts:
        reasons["schedules"] = "the settings do not say whether the learning rate is annealed (anneal_lr) or in how many steps"
    if not facts.get("has_critic", True):
        reasons |= dict.fromkeys(("values", "returns", "value_loss"), "the program has no critic")
    missing = [name for name in ("gamma", "gae_lambda") if name not in facts]
    if missing and not traced:  # else no discounts fit a rollout that was found, which is a lead
        reasons["advantages"] = f"the settings do not say {' and '.join(missing)}"
    if facts.get("mean_noise"):
        reasons["replayed_log_probs"] = f"training adds noise to the means of actions (rpo_alpha = {facts['mean_noise']})"
    return reasons


ROLES: Mapping[str, tuple[str, ...]] = {
    "transitions": ("observations",),
    "stored_rewards": ("observations", "rewards"),
    "executed_actions": ("observations", "actions"),
    "actions": ("actions", "distributions in acting"),
    "log_probs": ("actions", "log-probabilities", "distributions in acting"),
    "replayed_log_probs": ("log-probabilities",),
    "values": ("values",),
    "advantages": ("rewards", "values", "advantages"),
    "returns": ("values", "advantages", "returns"),
    "normalized_advantages": ("advantages",),
    "minibatches": ("log-probabilities", "advantages", "returns"),
    "log_ratios": ("log-probabilities", "actions"),
    "value_loss": ("returns", "values"),
    "entropy_loss": ("entropy",),
}
"""Columns that a script's equations need, traced to variables or to the loss."""
TRANSFORMED: Final = {"transitions": "observations", "stored_rewards": "rewards", "executed_actions": "actions"}
"""Equations of columns that scripts transform on purpose, and the column: a difference does not show that it was not traced."""
COLUMNS: Final = ("rewards", "values", "advantages", "log-probabilities")
"""Columns without which there is no rollout."""
STEPPED: Final = (*TRANSFORMED, "advantages")
"""Equations that need what the environments returned."""
IN_LOSS: Final = ("policy_loss", "value_loss", "entropy_loss", "total_loss", "gradient", "clipping", "optimizer_step")
"""Equations of the loss and of what follows it."""


def untraced_equations(traced: Mapping[str, str], loss: str, has_rollout: bool = True, unseen: str = "") -> dict[str, str]:
    """Return the missing and found columns of each equation; it is used if the equation is not checked.

    Args:
        traced: variables with their places in the source, by role; empty for a role without variables.
        loss: place of the loss.
        has_rollout: the columns make a rollout.
        unseen: why no environment was seen; empty if one was.
    """
    lacking = [] if has_rollout else [role for role in COLUMNS if role not in traced]
    texts = {}
    for equation, roles in ROLES.items():
        missing = [role for role in roles if role not in traced] or lacking
        known = [f"{role} {place}".strip() for role, place in traced.items() if role in roles]
        if missing:
            others = [f"{role} {place}".strip() for role, place in traced.items() if place]
            found = f"found {', '.join(known or others) or 'none of the columns of a rollout'}"
            texts[equation] = f"sought {' and '.join(missing)} for the loss in {loss}; {found}"
        else:
            texts[equation] = f"found {', '.join(known)}, which do not fit together; the loss is in {loss}"
    unseen_by = next((equation for equation in texts if equation in STEPPED), "") if unseen else ""  # said once
    return {equation: f"{unseen}; {text}" if equation == unseen_by else text for equation, text in texts.items()}


def equation_places(lines: Mapping[str, str], loss: str, clears: str) -> dict[str, str]:
    """Return file and line of what each equation computes: of its last column, otherwise of the loss.

    Args:
        lines: places by role of a column.
        loss: place of the loss.
        clears: places where gradients are cleared; empty without any.
    """
    columns = {equation: roles[-1] for equation, roles in ROLES.items()} | dict.fromkeys(IN_LOSS, "")
    return {equation: lines.get(column, loss) for equation, column in columns.items()} | {"clipping": clears or loss}


def find_schedule(
    variables: Variables, facts: Mapping[str, Any], rate: float, collected: int = 0, *, sets_rate: bool = True
) -> dict[str, Any]:
    """Return the fact of the learning rate's schedule, if the script shows whether it is annealed.

    A linear scheduler of torch, for as many iterations as the run has updates, shows it like a setting, and also shows the final rate.

    Args:
        rate: of the first step.
        collected: transitions of the first rollout, by which a number of updates is one of steps; 0 if it is not known.
        sets_rate: the script may change the rate: one that does not has a constant one.
    """
    anneals = variables.find(ANNEALS, as_flag)
    updates = variables.find(UPDATES, lambda value: value if type(value) is int and value >= MIN_UPDATES else None)
    total = facts.get("total_steps")
    total = total if isinstance(total, int) else (updates or 0) * collected
    scheduler = variables.find_instance(LinearLR)
    if scheduler is not None:
        falls_in_this_run = scheduler.total_iters in (updates, total // max(1, collected))
        scheduler = scheduler if falls_in_this_run and scheduler.start_factor > scheduler.end_factor else None
    anneals = True if scheduler is not None else anneals
    if anneals is None and not sets_rate:
        anneals, total = False, total or max(1, collected)
    if anneals is None or total <= 0 or not rate > 0:
        return {}
    counts = {name: facts[name] for name in ("num_epochs", "num_minibatches", "num_envs") if isinstance(facts.get(name), int)}
    is_set = scheduler is not None
    left = float(scheduler.end_factor) / float(scheduler.start_factor) if scheduler is not None else 0.0
    final = left * rate if anneals else rate
    schedule = RateSchedule(initial=rate, final=final, total_steps=total, final_is_set=is_set, counts=counts)
    return {SCHEDULE_FACT: schedule.fact()}


def find_config(variables: Variables) -> dict[str, Any]:
    """Return the script's settings that are plain values."""
    settings = variables.find(SETTINGS, lambda value: settings_of(value) or None) or {}
    return {key: value for key, value in settings.items() if isinstance(value, str | int | float | bool | None) and not key.startswith("_")}
