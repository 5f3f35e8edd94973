"""Compute the gradient and optimizer metrics from the inputs of a reference case."""

from typing import Any

import torch
from torch import Tensor

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.history.gradient_history import NoiseAverage
from esper_telemetry.metrics.gradients.actor_critic import interference, parameter_interference
from esper_telemetry.metrics.gradients.directions import (
    concentration,
    gradient_signs,
    gradient_zeros,
    layer_concentration,
    minibatch_alignment,
    shard_noise,
    successive_alignment,
    two_batch_noise,
    weighted_pair_cosine,
)
from esper_telemetry.metrics.gradients.gradient_health import gradient_health
from esper_telemetry.metrics.gradients.norms import gradient_norms
from esper_telemetry.metrics.optimizer import adam_parameters, adam_state, adam_step, first_moment_weight, weight_growth, weight_norm
from vector_adapters.inputs import Inputs, Values, floats, of_keys


def parameter(gradient: Any, dtype: str = "float64") -> Tensor:
    """Return a parameter with this gradient; None means no gradient."""
    value = torch.zeros(1) if gradient is None else floats(gradient, dtype)
    result = torch.nn.Parameter(torch.zeros_like(value))
    result.grad = None if gradient is None else value
    return result


def merged(*groups: MetricGroup) -> Values:
    return {key: value for group in groups for key, value in group.values().items()}


@of_keys(
    "grad/",
    "global/norm_preclip global/norm_preclip_max global/norm_preclip_nonfinite global/norm_postclip layer/{l}/norm",
    "{g}/norm_preclip {g}/rms clip/coef clip/coef_min clip/freq clip/excess_log10",
)
def norms(inputs: Inputs) -> Values:
    """Norms and clipping: of one gradient, of named ones, or of the global norms of several steps."""
    limit = inputs.get("max_grad_norm")
    if "minibatch_norms" in inputs:
        return merged(*gradient_norms(floats(inputs["minibatch_norms"])[:, None], ["all"], max_norm=limit))
    gradients = inputs["named_grads"] if "named_grads" in inputs else {"all": inputs["grad"]}
    named = {name: parameter(gradient, inputs.get("dtype", "float64")) for name, gradient in gradients.items()}
    return merged(*gradient_health(named, groups=inputs.get("groups"), max_norm=limit))


@of_keys("grad/interference/", "actor_effective cancel cos critic_share log_ratio")
def opposed(inputs: Inputs) -> Values:
    """Actor against critic."""
    actor, critic = floats(inputs["g_actor"]), floats(inputs["g_critic"])
    coef = inputs["clip_coef"]
    sizes = interference(actor.norm()[None], critic.norm()[None], coefs=coef)
    return merged(sizes, parameter_interference([actor], [critic]))


@of_keys("grad/", "align/mean_pair_cos align/direction_variance sign/agreement")
def minibatches(inputs: Inputs) -> Values:
    gradients = floats(inputs["grads"])
    return {**minibatch_alignment(gradients).values(), "aux:weighted_pair_cos": float(weighted_pair_cosine(gradients))}


@of_keys("grad/align/successive_cos")
def successive(inputs: Inputs) -> Values:
    """Agreement of each update with the previous one."""
    gradients = [floats(gradient) for gradient in inputs["grads"]]
    key = "grad/align/successive_cos"
    pairs = zip(gradients, [None, *gradients], strict=False)
    return {key: [successive_alignment(now, before).values().get(key) for now, before in pairs]}


@of_keys("grad/", "zero_frac sign/pos_frac concentration/entropy concentration/participation concentration/hoyer")
def entries(inputs: Inputs) -> Values:
    """Statistics over the entries of one gradient."""
    gradient = floats(inputs["grad"])
    zeros, _ = gradient_zeros([gradient], ["all"])
    return merged(zeros, gradient_signs([gradient]), concentration([gradient]))


@of_keys("grad/concentration/layer_entropy")
def layers(inputs: Inputs) -> Values:
    """Concentration over layers."""
    return layer_concentration(floats(inputs["layer_norms"])).values()


@of_keys("grad/gns/", "g2 tr_sigma b_simple noise_dominated")
def noise(inputs: Inputs) -> Values:
    """Noise scale: of shards, of two batch sizes, or averaged over updates."""
    if "g2" in inputs:
        average = NoiseAverage(inputs["beta"])
        steps = zip(inputs["g2"], inputs["tr_sigma"], strict=True)
        return {"grad/gns/b_simple": [average.step(g2, tr).b_simple for g2, tr in steps]}
    if "grads" in inputs:
        gradients = floats(inputs["grads"])
        sizes = inputs["batches"] if "batches" in inputs else [inputs["batch"]] * len(gradients)
        measured = shard_noise(gradients, sizes).values()
    else:
        small, big = floats(inputs["sq_norm_small"]), floats(inputs["sq_norm_big"])
        measured = two_batch_noise(small, big, b_small=inputs["b_small"], b_big=inputs["b_big"]).values()
    scale = NoiseAverage().step(measured.get("grad/gns/g2"), measured.get("grad/gns/tr_sigma"))
    return {**measured, **scale.values()}


def adam_with_state(inputs: Inputs) -> torch.optim.Optimizer:
    second = floats(inputs["exp_avg_sq"])
    weights = torch.nn.Parameter(torch.ones_like(second))
    optimizer = torch.optim.Adam([weights], betas=tuple(inputs["betas"]), eps=inputs.get("eps", 1e-8))
    first = floats(inputs["exp_avg"]) if "exp_avg" in inputs else torch.zeros_like(second)
    step = torch.tensor(float(inputs["step"]))
    optimizer.state[weights] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
    return optimizer


@of_keys("opt/", "snr_share eps_dominated_frac")
def adam_memory(inputs: Inputs) -> Values:
    optimizer = adam_with_state(inputs)
    state = adam_state(adam_parameters(optimizer))
    m, v = state.exp_avg / state.bias(state.beta1), state.exp_avg_sq / state.bias(state.beta2)
    rho = float(m.square().sum() / v.sum())
    kappa = float(first_moment_weight(state.beta1, state.step))
    return {**adam_step(optimizer).values(), "aux:rho": rho, "aux:kappa": kappa}


@of_keys("opt/", "update_to_weight update_rms_over_lr stable_rms")
def adam_updates(inputs: Inputs) -> Values:
    weights = torch.nn.Parameter(floats(inputs["weights"]))
    optimizer = torch.optim.Adam([weights], lr=inputs["lr"], betas=tuple(inputs["betas"]), eps=inputs["eps"])
    results: dict[str, list[Any]] = {}
    for gradient in inputs["grads"]:
        weights.grad = floats(gradient)
        optimizer.step()
        values: Values = {**adam_step(optimizer).values()}
        values["aux:update"] = adam_state(adam_parameters(optimizer)).update().tolist()
        for key in ("opt/update_to_weight", "opt/update_rms_over_lr", "opt/stable_rms", "aux:update"):
            results.setdefault(key, []).append(values.get(key))
    return dict(results)


@of_keys("opt/weight_growth")
def growth(inputs: Inputs) -> Values:
    """Growth of the weights since the start."""
    initial = weight_norm([floats(inputs["weights_init"])])
    return weight_growth([floats(inputs["weights"])], initial).values()
