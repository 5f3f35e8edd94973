"""Equation of the gradient: that of the PPO loss at the same minibatch and the same weights, and the mistakes that are recognised in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from esper_telemetry.core.lazy import Tensor, torch
from esper_telemetry.equations.entropy_loss import ENTROPY_LOSS
from esper_telemetry.equations.equation import Equation, Hypothesis
from esper_telemetry.equations.loss_gradients import (
    TERMS,
    GradientInputs,
    by_norm,
    factor,
    fit_kl,
    fit_limit,
    fit_penalty,
    fit_scale,
    fit_weight,
    leaks,
    parts_missing,
    parts_with_previous,
    stopped,
    sum_with_previous,
    summed,
)
from esper_telemetry.equations.policy_loss import POLICY_LOSS
from esper_telemetry.equations.value_loss import VALUE_LOSS


def _alternative(name: str, says: str, equation: str, **details: Any) -> Hypothesis:
    """A hypothesis of another loss in place of a term."""
    return Hypothesis(name, says, equation, lambda inputs: inputs.replaced(name), **details)


def _of_losses(equation: Equation, names: Mapping[str, str]) -> Iterator[Hypothesis]:
    """Yield hypotheses of a loss as those of its gradient, by new names and those of the loss."""
    losses = {one.name: one for one in equation.hypotheses}
    for name, loss in names.items():
        yield replace(
            losses[loss], name=name, says=f"the gradient of {losses[loss].says}", compute=partial(_replaced, name=name)
        )


def _replaced(inputs: GradientInputs, name: str) -> Tensor | None:
    return inputs.replaced(name)


POLICY_ALTERNATIVES: Final = {
    "no_clip": "no_clip",
    "no_minimum": "no_minimum",
    "maximum": "optimistic",
    "ratio_inverted": "inverted_ratio",
    "no_ratio": "log_prob",
    "probability_difference": "no_exponential",
    "advantages_negated": "negated_advantages",
    "advantages_raw": "unnormalized",
    "advantages_broadcast": "broadcast",
    "advantages_reversed": "reversed_rows",
    "advantages_shifted": "shifted_rows",
    "dual_clip": "dual_clip",
}
"""Hypotheses of the policy loss by the names that they have here."""

VALUE_ALTERNATIVES: Final = {
    "target_advantages": "advantage_target",
    "target_normalized": "normalized_advantage_target",
    "target_old_values": "old_value_target",
    "target_moving": "moving_target",
    "target_shifted": "shifted_rows",
    "target_following": "following_rows",
    "target_normalized_returns": "normalized_returns",
    "value_absolute": "absolute",
    "value_root": "root",
    "values_broadcast": "broadcast",
    "value_clipped": "clipped",
    "value_clip_minimum": "minimum",
    "value_huber": "huber",
}

TERM_NAMES: Final = {"policy": "policy loss", "value": "value loss", "entropy": "entropy bonus"}


def _of_each_term(mistake: str) -> Iterator[Hypothesis]:
    """Yield a mistake in each term: the other `sign`, `missing`, `summed` over the rows, or `padded`: a mean over padding too."""
    for term, words in TERM_NAMES.items():
        weight, symbol = {"policy": "", "value": "c_v ", "entropy": "c_e "}[term], f"L_{term}"
        says, equation, compute, advice = {
            "sign": (
                f"a loss whose {words} has the wrong sign",
                f"L - 2 {weight}{symbol}",
                partial(factor, term=term, times=-1.0),
                "Minimise the policy loss, which is the negative surrogate, and the value loss; subtract the entropy",
            ),
            "missing": (
                f"the loss without its {words}",
                f"L - {weight}{symbol}",
                partial(_without, term=term),
                f"The {words} is missing from the total, or computed from detached numbers",
            ),
            "summed": (
                f"a loss whose {words} is a sum over the rows",
                f"L + (N - 1) {weight}{symbol}",
                partial(summed, terms=(term,)),
                f"Take the mean of the {words} over the minibatch",
            ),
            "padded": (
                f"a loss whose {words} is a mean over padding too",
                f"L with {symbol} of rows and padding",
                partial(_replaced, name=f"{term}_padded"),
                f"Leave padding out of the {words} with the mask of the minibatch",
            ),
        }[mistake]
        yield Hypothesis(f"{term}_{mistake}", f"the gradient of {says}", f"g = ∇({equation})", compute, advice=advice)


def _without(inputs: GradientInputs, term: str) -> Tensor | None:
    return inputs.without(term)


PPO_SOURCE: Final = "1707.06347, eq. 7 and 9"

GRADIENT = Equation(
    name="gradient",
    rank=60,
    quantity="the gradients before clipping",
    equation="∇(L_policy + c_v L_value - c_e H) of the minibatch",
    source=PPO_SOURCE,
    inputs="the live policy at a minibatch, its rows, and the gradient before clipping",
    compute=GradientInputs.total,
    tolerance=1.0,  # errors of the bundled trainer and of Stable-Baselines3 on a CPU: 0, because both passes run the same kernels
    advice="Compare the terms of the loss in the update with the equation, one at a time",
    hypotheses=(
        Hypothesis(
            name="not_cleared",
            says="the sum of this minibatch's gradient and the one before",
            equation="g_k = ∇L_k + g_{k-1}",
            compute=sum_with_previous,
            source="torch.optim.Optimizer.zero_grad",
            advice="Call optimizer.zero_grad() before each backward pass",
        ),
        Hypothesis(
            name="parts_not_cleared",
            says="the gradient of the loss, in some parameters added to the one before",
            equation="g_k = ∇L_k in some parameters, ∇L_k + g_{k-1} in others",
            compute=parts_with_previous,
            source="torch.optim.Optimizer.zero_grad",
            advice="Clear the gradients of all parameters: optimizer.zero_grad() clears those that the optimizer has",
        ),
        Hypothesis(
            name="zero",
            says="zero",
            equation="g = 0",
            compute=lambda inputs: torch.zeros_like(inputs.claimed),
            advice="The loss is detached, or the gradient is cleared after the backward pass",
        ),
        Hypothesis(
            name="sign",
            says="the gradient with the opposite sign",
            equation="g = -∇L",
            compute=lambda inputs: -inputs.total(),
            advice="The optimizer climbs the loss: remove the minus sign",
        ),
        *_of_each_term("sign"),
        *_of_each_term("missing"),
        Hypothesis(
            name="value_halved",
            says="the gradient of a loss whose value term counts half",
            equation="g = ∇(L_policy + ½ c_v L_value - c_e H)",
            compute=partial(factor, term="value", times=0.5),
            advice="The factor ½ of the squared error is applied twice, or the coefficient assumes that it is not there",
        ),
        Hypothesis(
            name="value_doubled",
            says="the gradient of a loss whose value term counts twice",
            equation="g = ∇(L_policy + 2 c_v L_value - c_e H)",
            compute=partial(factor, term="value", times=2.0),
            advice="The factor ½ of the squared error is missing, or the coefficient includes it already",
        ),
        Hypothesis(
            name="summed",
            says="the gradient of the sum of the rows in place of their mean",
            equation="g = N ∇L",
            compute=partial(summed, terms=TERMS),
            advice="Take the mean over the minibatch",
        ),
        *_of_each_term("summed"),
        *_of_each_term("padded"),
        Hypothesis(
            name="critic_stopped",
            says="the gradient of a loss whose value term does not reach the shared parameters",
            equation="g = ∇L without c_v ∇L_value in shared parameters",
            compute=partial(stopped, terms=("value",)),
            advice="The critic's input is detached from the trunk that it shares with the actor",
        ),
        Hypothesis(
            name="actor_stopped",
            says="the gradient of a loss whose policy term does not reach the shared parameters",
            equation="g = ∇L without ∇(L_policy - c_e H) in shared parameters",
            compute=partial(stopped, terms=("policy", "entropy")),
            advice="The actor's input is detached from the trunk that it shares with the critic",
        ),
        Hypothesis(
            name="critic_leaks",
            says="the gradient of a loss whose value term reaches the trunk that it was meant to be stopped at",
            equation="g = ∇L + c_v ∇L_value in the trunk",
            compute=leaks,
            advice="Detach the trunk's output before the critic reads it",
        ),
        Hypothesis(
            name="parts_missing",
            says="the gradient of the loss with some parameters left out",
            equation="g = ∇L in some parameters, 0 in others",
            compute=parts_missing,
            advice="Some parameters have no gradient although the loss depends on them: look for detach() and no_grad()",
        ),
        *_of_losses(POLICY_LOSS, POLICY_ALTERNATIVES),
        _alternative(
            "advantages_normalized",
            "the gradient of a policy loss whose advantages are normalised though the setting is off",
            "L_policy of (A - mean A) / std A in place of A",
            source="stable-baselines3, normalize_advantage",
            advice="Leave the advantages as they are, or switch the setting on",
        ),
        _alternative(
            "advantages_centred",
            "the gradient of a policy loss whose advantages are centred but not divided by their deviation",
            "L_policy of A - mean A",
            advice="Divide by the standard deviation",
        ),
        _alternative(
            "advantages_std_alone",
            "the gradient of a policy loss whose advantages are divided by their deviation but not centred",
            "L_policy of A / std A",
            advice="Subtract the mean before you divide",
        ),
        _alternative(
            "returns_for_advantages",
            "the gradient of a policy loss with returns in place of advantages",
            "L_policy of R",
            advice="Subtract the values from the returns",
        ),
        _alternative(
            "advantages_attached",
            "the gradient of a policy loss that reaches the values through the advantages",
            "L_policy of A = R - V, with ∇V",
            advice="Detach the advantages, or compute them without gradients",
        ),
        *_of_losses(VALUE_LOSS, VALUE_ALTERNATIVES),
        _alternative(
            "value_unclipped",
            "the gradient of a value loss that is not clipped though the setting is on",
            "L_value = ½ mean (V - R)²",
            advice="Clip the values to the old ones ± clip_range_vf, or switch the setting off",
        ),
        _alternative(
            "value_clip_maximum",
            "the gradient of a clipped value loss with the maximum",
            "L_value = ½ mean max((V - R)², (V_clip - R)²)",
            variant=True,
            source="2005.12729, section 3",
        ),
        _alternative(
            "value_clip_no_maximum",
            "the gradient of a clipped value loss without the maximum",
            "L_value = ½ mean (V_clip - R)²",
            variant=True,
            source="stable-baselines3, clip_range_vf",
        ),
        *_of_losses(
            ENTROPY_LOSS,
            {"entropy_of_sample": "sample", "entropy_of_sample_sign": "sample_sign", "entropy_unmasked": "unmasked"},
        ),
        Hypothesis(  # see `LossGradients.of_errors`; robust losses have thresholds that no setting shows
            name="other_errors",
            says="the gradient of a loss whose value term is another increasing function of the size of the error",
            equation="L_value = mean f(|V - R|), f increasing and convex",
            variant=True,
            source="2006.05990 (Andrychowicz et al.), 3.4: the Huber loss",
        ),
        Hypothesis(
            name="clipped_already",
            says="the gradient of the loss, clipped by its norm",
            equation="g = ∇L min(1, c / ‖∇L‖)",
            compute=by_norm,
            variant=True,
            source="torch.nn.utils.clip_grad_norm_",
        ),
        Hypothesis(
            name="value_weight",
            says="the gradient of a loss whose value term has another weight,",
            equation="g = ∇(L_policy + c L_value - c_e H)",
            fit=partial(fit_weight, "value"),
            parameter="value_coef",
            advice="Compare the weight of the value loss with the setting; it is that of half the squared error",
        ),
        Hypothesis(
            name="entropy_weight",
            says="the gradient of a loss whose entropy bonus has another weight,",
            equation="g = ∇(L_policy + c_v L_value - c H)",
            fit=partial(fit_weight, "entropy"),
            parameter="entropy_coef",
            advice="Compare the weight of the entropy bonus with the setting",
        ),
        Hypothesis(
            name="policy_weight",
            says="the gradient of a loss whose policy term has a weight,",
            equation="g = ∇(c L_policy + c_v L_value - c_e H)",
            fit=partial(fit_weight, "policy"),
            parameter="weight",
            advice="The policy loss has the weight 1",
        ),
        Hypothesis(
            name="scaled",
            says="the gradient of the loss multiplied by a",
            equation="g = c ∇L",
            fit=fit_scale,
            parameter="factor",
            advice="Look for a division of the loss, such as one for gradient accumulation",
        ),
        Hypothesis(
            name="clipped_by_value",
            says="the gradient of the loss, each entry cut at",
            equation="g = clip(∇L, ±c)",
            fit=fit_limit,
            parameter="limit",
            source="torch.nn.utils.clip_grad_value_",
            advice="PPO clips the global norm of the gradient",
        ),
        Hypothesis(
            name="weight_penalty",
            says="the gradient of the loss with a penalty on the weights,",
            equation="g = ∇L + c w",
            fit=fit_penalty,
            parameter="weight",
            advice="Remove the penalty, or set weight_decay of the optimizer in its place",
        ),
        Hypothesis(
            name="kl_penalty",
            says="the gradient of the loss with a penalty on the KL divergence,",
            equation="g = ∇(L + β KL)",
            fit=fit_kl,
            parameter="β",
            variant=True,
            source="1707.06347, eq. 8",
        ),
    ),
)
