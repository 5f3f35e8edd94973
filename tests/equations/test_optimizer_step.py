"""Weights after a step compared with the optimizer's equation, and clipped gradients compared with unclipped ones."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from explained import names
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from torch import Tensor, nn

from esper_telemetry.equations.clipping import check_clipping
from esper_telemetry.equations.comparison import EquationCheck
from esper_telemetry.equations.optimizer_step import check_optimizer_step

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: Mapping[str, Make] = {
    "adam": lambda p: torch.optim.Adam(p, 3e-4, eps=1e-5),
    "adam_l2": lambda p: torch.optim.Adam(p, 1e-3, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True),
    "fused": lambda p: torch.optim.Adam(p, 1e-3, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.1),
    "ascent": lambda p: torch.optim.Adam(p, 1e-3, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.01),
    "momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
    "dampened": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, dampening=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 7e-4, alpha=0.99, eps=1e-5),
    "centered": lambda p: torch.optim.RMSprop(p, 7e-4, centered=True, momentum=0.5),
    "tf_rmsprop": lambda p: RMSpropTFLike(p, 7e-4, alpha=0.99, eps=1e-5),
}


class Steps:
    """A network whose optimizer has already taken some steps before the checked one."""

    def __init__(self, make: Make, seed: int, steps: int = 5) -> None:
        torch.manual_seed(seed)
        self.parameters = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(0.1 * torch.randn(4)), nn.Parameter(torch.zeros(2, 4))]
        self.optimizer = make(self.parameters)
        for _ in range(steps):
            self.draw_gradients()
            self.optimizer.step()
        self.draw_gradients()
        self.before = [p.detach().clone() for p in self.parameters]
        self.state = copy.deepcopy(self.optimizer.state_dict())
        self.gradients: list[Tensor | None] = [None if p.grad is None else p.grad.clone() for p in self.parameters]

    def draw_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = 0.1 * torch.randn_like(parameter)

    def check(self, **arguments: Any) -> EquationCheck:
        settings = {"state": self.state, **arguments}
        return check_optimizer_step(self.before, self.parameters, self.gradients, self.optimizer, **settings)


@pytest.mark.parametrize("steps", [0, 20])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_torch_match(name: str, seed: int, steps: int) -> None:
    case = Steps(OPTIMIZERS[name], seed, steps)
    case.optimizer.step()

    result = case.check()

    assert result.matches
    assert result.error is not None and result.error < 5e-4


@pytest.mark.parametrize(("rate", "size"), [(1e-7, 0), (1e-5, 0), (1e-2, 0), (1e-6, 1), (2.7e-5, 1)])
def test_steps_at_any_learning_rate_match(rate: float, size: int) -> None:
    """At 1e-7 the rounding of the weights is as large as the step; at the end of a schedule, all weights of size 1 round by a hundredth."""

    def grown(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        for parameter in parameters:
            parameter.data += size
        return torch.optim.Adam(parameters, rate)

    case = Steps(grown, 0)
    case.optimizer.step()

    assert case.check().matches


def twice(case: Steps) -> None:
    case.optimizer.step()
    case.optimizer.step()


def with_lost_state(case: Steps) -> None:
    case.optimizer.state.clear()
    case.optimizer.step()


def downhill(case: Steps) -> None:
    with torch.no_grad():
        for parameter in case.parameters:
            assert parameter.grad is not None
            parameter.sub_(case.optimizer.param_groups[0]["lr"] * parameter.grad)


def with_settings(**changes: Any) -> Callable[[Steps], None]:
    """Take a step with other settings than the optimizer has before and after it."""

    def step(case: Steps) -> None:
        group = case.optimizer.param_groups[0]
        kept = {name: group[name] for name in changes}
        group.update(changes)
        case.optimizer.step()
        group.update(kept)

    return step


def uncorrected(case: Steps) -> None:
    group = case.optimizer.param_groups[0]
    case.optimizer.step()
    with torch.no_grad():
        for parameter, before in zip(case.parameters, case.before, strict=True):
            entry = case.optimizer.state[parameter]
            parameter.copy_(before - group["lr"] * entry["exp_avg"] / (entry["exp_avg_sq"].sqrt() + group["eps"]))


def decayed(case: Steps) -> None:
    case.optimizer.step()
    with torch.no_grad():
        for parameter in case.parameters:
            parameter.mul_(0.99)


MISTAKES: Mapping[str, tuple[str, Callable[[Steps], None]]] = {
    "no_step": ("adam", lambda case: None),
    "twice": ("adam", twice),
    "state_cleared": ("adam", with_lost_state),
    "gradient_descent": ("adam", downhill),
    "ascent": ("adam", with_settings(lr=-3e-4)),
    "negated_gradient": ("adam", with_settings(maximize=True)),
    "no_bias_correction": ("adam", uncorrected),
    "weight_decay": ("adam", decayed),
    "decay_coupling": ("adamw", with_settings(decoupled_weight_decay=False)),
    "no_decay": ("adamw", with_settings(weight_decay=0.0)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_named_alone(name: str, seed: int) -> None:
    optimizer, mistake = MISTAKES[name]
    case = Steps(OPTIMIZERS[optimizer], seed)
    mistake(case)

    result = case.check()

    assert names(result) == {name}
    assert not result.holds


@pytest.mark.parametrize("optimizer", ["momentum", "rmsprop"])
@pytest.mark.parametrize("mistake", [twice, with_lost_state, downhill])
def test_mistakes_with_other_optimizers_are_named_alone(optimizer: str, mistake: Callable[[Steps], None]) -> None:
    case = Steps(OPTIMIZERS[optimizer], 0)
    if optimizer == "momentum":
        case.optimizer.param_groups[0]["weight_decay"] = 0.0
    mistake(case)

    expected = {name for name, (_, known) in MISTAKES.items() if known is mistake}
    if optimizer == "momentum" and mistake is not twice:  # a first step with momentum is plain gradient descent
        expected = {"state_cleared", "gradient_descent"}
    assert names(case.check()) == expected


@pytest.mark.parametrize("rate", [1e-3, 0.0])
def test_another_learning_rate_than_set_is_named_with_its_value(seed: int, rate: float) -> None:
    case = Steps(lambda p: torch.optim.Adam(p, rate), seed)
    case.optimizer.step()

    result = case.check(learning_rate=3e-4)

    assert names(result) == {"learning_rate"}
    assert result.explanations[0].fitted == pytest.approx(rate, rel=1e-3, abs=1e-9)


def test_a_parameter_that_the_optimizer_lacks_is_named(seed: int) -> None:
    case = Steps(lambda p: torch.optim.Adam(p[:2], 1e-3), seed)
    case.optimizer.step()

    assert names(case.check()) == {"left_out"}


def test_a_parameter_without_a_gradient_stays() -> None:
    case = Steps(OPTIMIZERS["adam"], 0)
    case.parameters[1].grad = case.gradients[1] = None
    case.optimizer.step()

    assert case.check().matches


def test_a_step_without_any_gradient_is_named() -> None:
    """A gradient that was cleared, or a loss without a backward pass: the weights stay, as the optimizer's rule says."""
    case = Steps(OPTIMIZERS["adam"], 0)
    for place, parameter in enumerate(case.parameters):
        parameter.grad = case.gradients[place] = None
    case.optimizer.step()

    assert names(case.check()) == {"no_gradients"}


def test_copies_are_in_the_order_of_the_optimizer() -> None:
    case = Steps(OPTIMIZERS["adam"], 0)
    case.optimizer.step()
    before, after, gradients = (
        {str(number): None if x is None else x.detach().clone() for number, x in enumerate(tensors)}
        for tensors in (case.before, case.parameters, case.gradients)
    )

    result = check_optimizer_step(before, after, gradients, case.optimizer, state=case.state)  # type: ignore[arg-type]

    assert result.matches


def test_the_first_step_needs_no_state() -> None:
    case = Steps(OPTIMIZERS["momentum"], 0, steps=0)
    fresh = OPTIMIZERS["momentum"](case.parameters)
    case.optimizer.step()

    assert check_optimizer_step(case.before, case.parameters, case.gradients, fresh).matches


def test_an_optimizer_whose_rule_is_not_known_cannot_be_checked() -> None:
    case = Steps(lambda p: torch.optim.Adagrad(p, 0.1), 0)
    case.optimizer.step()

    assert case.check().text == "the optimizer's steps could not be checked: the update rule of Adagrad is not known"


def test_wrong_numbers_and_shapes_are_refused_with_a_reason() -> None:
    case = Steps(OPTIMIZERS["adam"], 0)
    with pytest.raises(ValueError, match="same number of tensors, got 3, 3 and 2"):
        check_optimizer_step(case.before, case.parameters, case.gradients[:2], case.optimizer)
    with pytest.raises(ValueError, match=r"before \[4\], after \[4, 3\] and gradient \[4, 3\] at 0"):
        check_optimizer_step(case.before[1:] + case.before[:1], case.parameters, case.gradients, case.optimizer)
    with pytest.raises(ValueError, match="all 3 parameters of the optimizer, got 2"):
        check_optimizer_step(case.before[:2], case.before[:2], case.gradients[:2], case.optimizer)


def gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 3, generator=generator), 5 * torch.randn(4, generator=generator)]


def clipped(parts: list[Tensor], limit: float) -> list[Tensor]:
    norm = torch.cat([part.flatten() for part in parts]).norm()
    return [part * (limit / (norm + 1e-6)).clamp(max=1.0) for part in parts]


CLIPS: Mapping[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "not_clipped": lambda parts: parts,
    "by_value": lambda parts: [part.clamp(-0.5, 0.5) for part in parts],
    "each_tensor": lambda parts: [clipped([part], 0.5)[0] for part in parts],
    "cleared": lambda parts: [torch.zeros_like(part) for part in parts],
    "norm": lambda parts: clipped(parts, 2.0),
    "value": lambda parts: [part.clamp(-0.1, 0.1) for part in parts],
}


def test_clipping_by_the_global_norm_matches(seed: int) -> None:
    parts = gradients(seed)

    assert check_clipping(parts, clipped(parts, 0.5), max_norm=0.5).matches
    assert check_clipping(parts, parts, max_norm=None).matches
    assert check_clipping(parts, parts, max_norm=100.0).matches


@pytest.mark.parametrize("name", CLIPS)
def test_each_other_clip_is_named_alone(name: str, seed: int) -> None:
    parts = gradients(seed)

    result = check_clipping(parts, CLIPS[name](parts), max_norm=0.5)

    assert names(result) == {name}


def test_a_fitted_limit_is_the_one_that_was_used() -> None:
    parts = gradients(0)

    assert check_clipping(parts, clipped(parts, 2.0), max_norm=0.5).explanations[0].fitted == pytest.approx(2.0, rel=1e-4)


def test_clipped_gradients_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="same shapes"):
        check_clipping([torch.ones(2)], [torch.ones(3)], max_norm=1.0)
