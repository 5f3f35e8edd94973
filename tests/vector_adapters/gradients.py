"""Compute the gradient and optimizer metrics from the inputs of a reference case."""

from collections.abc import Mapping
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

Inputs = Mapping[str, Any]
Values = dict[str, Any]


def floats(values: Any, dtype: str = "float64") -> Tensor:
    """Return a tensor from nested lists, in which "nan" and "inf" are non-finite numbers."""
    if isinstance(values, list):
        parts = [floats(value, dtype) for value in values]
        return torch.stack(parts) if parts else torch.zeros(0, dtype=getattr(torch, dtype))
    return torch.tensor(float(values), dtype=getattr(torch, dtype))


def parameter(gradient: Any, dtype: str = "float64") -> Tensor:
    """Return a parameter with this gradient; None means no gradient."""
    value = torch.zeros(1) if gradient is None else floats(gradient, dtype)
    result = torch.nn.Parameter(torch.zeros_like(value))
    result.grad = None if gradient is None else value
    return result


def merged(*groups: MetricGroup) -> Values:
    return {key: value for group in groups for key, value in group.values().items()}


def norms(inputs: Inputs) -> Values:
    """Norms and clipping: of one gradient, of named ones, or of the global norms of several steps."""
    limit = inputs.get("max_grad_norm")
    if "minibatch_norms" in inputs:
        return merged(*gradient_norms(floats(inputs["minibatch_norms"])[:, None], ["all"], max_norm=limit))
    gradients = inputs["named_grads"] if "named_grads" in inputs else {"all": inputs["grad"]}
    named = {name: parameter(gradient, inputs.get("dtype", "float64")) for name, gradient in gradients.items()}
    return merged(*gradient_health(named, groups=inputs.get("groups"), max_norm=limit))


def opposed(inputs: Inputs) -> Values:
    """Actor against critic."""
    actor, critic = floats(inputs["g_actor"]), floats(inputs["g_critic"])
    coef = inputs["clip_coef"]
    sizes = interference(actor.norm()[None], critic.norm()[None], coefs=coef)
    return merged(sizes, parameter_interference([actor], [critic]))


def minibatches(inputs: Inputs) -> Values:
    gradients = floats(inputs["grads"])
    return {**minibatch_alignment(gradients).values(), "aux:weighted_pair_cos": float(weighted_pair_cosine(gradients))}


def successive(inputs: Inputs) -> Values:
    """Agreement of each update with the previous one."""
    gradients = [floats(gradient) for gradient in inputs["grads"]]
    key = "grad/align/successive_cos"
    pairs = zip(gradients, [None, *gradients], strict=False)
    return {key: [successive_alignment(now, before).values().get(key) for now, before in pairs]}


def entries(inputs: Inputs) -> Values:
    """Statistics over the entries of one gradient."""
    gradient = floats(inputs["grad"])
    zeros, _ = gradient_zeros([gradient], ["all"])
    return merged(zeros, gradient_signs([gradient]), concentration([gradient]))


def layers(inputs: Inputs) -> Values:
    """Concentration over layers."""
    return layer_concentration(floats(inputs["layer_norms"])).values()


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


def adam_memory(inputs: Inputs) -> Values:
    optimizer = adam_with_state(inputs)
    state = adam_state(adam_parameters(optimizer))
    m, v = state.exp_avg / state.bias(state.beta1), state.exp_avg_sq / state.bias(state.beta2)
    rho = float(m.square().sum() / v.sum())
    kappa = float(first_moment_weight(state.beta1, state.step))
    return {**adam_step(optimizer).values(), "aux:rho": rho, "aux:kappa": kappa}


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


def growth(inputs: Inputs) -> Values:
    """Growth of the weights since the start."""
    initial = weight_norm([floats(inputs["weights_init"])])
    return weight_growth([floats(inputs["weights"])], initial).values()


ADAPTERS = {
    "grad/global/norm_preclip": norms,
    "grad/global/norm_preclip_max": norms,
    "grad/global/norm_preclip_nonfinite": norms,
    "grad/global/norm_postclip": norms,
    "grad/layer/{l}/norm": norms,
    "grad/{g}/norm_preclip": norms,
    "grad/{g}/rms": norms,
    "grad/clip/coef": norms,
    "grad/clip/coef_min": norms,
    "grad/clip/freq": norms,
    "grad/clip/excess_log10": norms,
    "grad/interference/actor_effective": opposed,
    "grad/interference/cancel": opposed,
    "grad/interference/cos": opposed,
    "grad/interference/critic_share": opposed,
    "grad/interference/log_ratio": opposed,
    "grad/align/mean_pair_cos": minibatches,
    "grad/align/direction_variance": minibatches,
    "grad/sign/agreement": minibatches,
    "grad/align/successive_cos": successive,
    "grad/zero_frac": entries,
    "grad/sign/pos_frac": entries,
    "grad/concentration/entropy": entries,
    "grad/concentration/participation": entries,
    "grad/concentration/hoyer": entries,
    "grad/concentration/layer_entropy": layers,
    "grad/gns/g2": noise,
    "grad/gns/tr_sigma": noise,
    "grad/gns/b_simple": noise,
    "grad/gns/noise_dominated": noise,
    "opt/snr_share": adam_memory,
    "opt/eps_dominated_frac": adam_memory,
    "opt/update_to_weight": adam_updates,
    "opt/update_rms_over_lr": adam_updates,
    "opt/stable_rms": adam_updates,
    "opt/weight_growth": growth,
}
"""By metric key, template segments as in the reference cases."""
