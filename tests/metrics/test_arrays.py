"""Metric functions accept NumPy arrays and lists instead of tensors and return equal results."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esper_telemetry import metrics
from esper_telemetry.core.arrays import as_tensor
from esper_telemetry.core.group import MetricGroup

N = 12


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some(*shape: int) -> Tensor:
    return torch.arange(int(np.prod(shape))).reshape(shape) % 3 > 0


A, B, C, D, E, VALID = (*(numbers(N, seed=seed) for seed in range(5)), some(N))
LOGITS, MASK, CHOSEN = numbers(N, 3), torch.ones(N, 3, dtype=torch.bool), torch.arange(N) % 3
NORMS = numbers(2, 3).abs()
NAMES = ("actor.weight", "actor.bias", "critic.weight")

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "advantage_stats": ((A,), {"valid": VALID}),
    "bonus_gradient": (({"a": LOGITS},), {"log_std": {"b": numbers(N, 2)}, "relevant": {"b": VALID}, "valid": VALID, "entropy_coef": 0.1}),
    "buffer_age": ((3, 1), {}),
    "entropy_rows": (({"a": LOGITS}, {"a": MASK}), {"log_std": {"b": numbers(N, 2)}, "relevant": {"b": VALID}}),
    "entropy_stats": (({"a": LOGITS}, {"a": MASK}), {"relevant": {"a": VALID}, "valid": VALID}),
    "episode_stats": ((A, B.abs()), {"recent_returns": A, "recent_ends": torch.arange(N)}),
    "gae_identity": ((A, B, C), {"valid": VALID}),
    "gradient_norms": ((NORMS, NAMES), {"nonfinite": torch.zeros(2, 3), "applied": NORMS / 2}),
    "gradient_zeros": (([A, B, C], NAMES), {}),
    "head_interference": (({"a": [A, LOGITS], "b": [B, LOGITS + 1]}, ("bias", "weight")), {}),
    "interference": ((A.abs(), B.abs()), {"coefs": C.abs(), "dots": D}),
    "layer_interference": (([A, LOGITS], [B, LOGITS + 1], ("bias", "weight")), {}),
    "leaf_interference": (([LOGITS, LOGITS], [LOGITS + 1, LOGITS]), {"coefs": torch.tensor([0.5, 1.0])}),
    "loss_terms": ((A, B, C, D), {"count": E.abs()}),
    "mask_violation": (({"a": CHOSEN}, {"a": ~MASK}), {"relevant": {"a": VALID}, "valid": VALID}),
    "nonfinite_count": (([A / 0, B],), {"valid": VALID}),
    "normalized_advantage_stats": ((A, B), {"valid": VALID}),
    "observation_scale": ((LOGITS,), {"valid": VALID}),
    "ppo_losses": ((A, B, C, D, E), {"clip": 0.2, "value_coef": 0.5, "entropy_coef": 0.01, "valid": VALID}),
    "ratio_diagnostics": ((A, B), {"clip": 0.2, "valid": VALID}),
    "return_stats": ((A,), {"valid": VALID}),
    "reward_stats": ((A,), {"valid": VALID}),
    "rows_repeated": ((CHOSEN,), {"valid": VALID}),
    "value_fit": ((A, B), {"valid": VALID}),
    "value_movement": ((A, B, C), {"clip": 0.2, "valid": VALID}),
}
OF_OTHER_THINGS = {"gradient_health", "head_entropy", "policy_entropy"}
"""Functions of modules, and methods of the result of `entropy_rows`."""


def converted(value: Any, convert: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, Mapping):
        return {key: converted(item, convert) for key, item in value.items()}
    return [converted(item, convert) for item in value] if isinstance(value, list) else value


def measured(name: str, convert: Callable[[Tensor], Any]) -> dict[str, float]:
    positional, keywords = CALLS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = getattr(metrics, name)(*(converted(value, convert) for value in positional), **converted(keywords, convert))
        if name == "entropy_rows":
            result = (metrics.policy_entropy(result, valid=convert(VALID)), metrics.head_entropy(result))
        return {key: value for group in groups_of(result) for key, value in group.values().items()}


def groups_of(result: MetricGroup | Iterable[MetricGroup]) -> tuple[MetricGroup, ...]:
    return (result,) if isinstance(result, MetricGroup) else tuple(result)


def test_every_function_is_tried() -> None:
    assert set(CALLS) | OF_OTHER_THINGS == set(metrics.__all__)


def frozen_array(tensor: Tensor) -> object:
    array = tensor.numpy().copy()
    array.flags.writeable = False
    return array


def backwards(tensor: Tensor) -> object:
    """Return an array with strides that torch does not support."""
    return tensor.numpy()[..., ::-1].copy()[..., ::-1]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "convert",
    [Tensor.numpy, Tensor.tolist, frozen_array, backwards, lambda tensor: list(tensor.unbind())],
    ids=["arrays", "lists", "read-only arrays", "reversed arrays", "lists of tensors"],
)
def test_arrays_and_lists_give_what_tensors_give(name: str, convert: Callable[[Tensor], Any]) -> None:
    expected = measured(name, lambda tensor: tensor)

    assert expected
    assert measured(name, convert) == expected


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("entropy_rows", "leaf_interference")])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.longdouble, ">f4"])
def test_every_floating_type_is_accepted(name: str, dtype: Any) -> None:
    def convert(tensor: Tensor) -> Any:
        return tensor.numpy().astype(dtype) if tensor.is_floating_point() else tensor.numpy()

    assert measured(name, convert) == pytest.approx(measured(name, lambda tensor: as_tensor(convert(tensor))))


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.uint32, np.int64, np.bool_])
def test_integers_and_booleans_are_numbers(dtype: Any) -> None:
    array = np.array([0, 1, 1, 0], dtype=dtype)

    assert metrics.reward_stats(array).values() == metrics.reward_stats([0.0, 1.0, 1.0, 0.0]).values()


def test_masks_of_zeros_and_ones_are_masks() -> None:
    ones = VALID.numpy().astype(np.float32)

    assert metrics.value_fit(A, B, valid=ones).values() == metrics.value_fit(A, B, valid=VALID).values()
    assert metrics.rows_repeated(CHOSEN, valid=ones).values() == metrics.rows_repeated(CHOSEN, valid=VALID).values()


def test_numbers_stand_for_arrays_of_one() -> None:
    expected = metrics.loss_terms(torch.tensor(0.5), torch.tensor(2.0)).values()

    assert metrics.loss_terms(0.5, np.float32(2.0)).values() == expected


def test_a_tensor_is_neither_copied_nor_converted() -> None:
    assert as_tensor(A) is A
    assert as_tensor(A.numpy()).data_ptr() == A.data_ptr()


def test_what_requires_grad_is_only_read() -> None:
    tracked = A.float().requires_grad_()

    assert metrics.return_stats([*tracked.unbind()]).values() == metrics.return_stats(A.float()).values()
    assert tracked.grad is None


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (None, TypeError, "expected a tensor, a NumPy array or a list of numbers, got None"),
        ("abc", TypeError, "got 'abc'"),
        ([1.0, None], TypeError, r"got \[1.0, None\]"),
        ([[1.0], [1.0, 2.0]], ValueError, "rows of nested lists must have one length"),
        ([torch.zeros(1), torch.zeros(2)], ValueError, r"must have one shape, got \[\(1,\), \(2,\)\]"),
        ({"a": 1.0}, TypeError, r"got \{'a': 1.0\}"),
        (np.array([1j]), TypeError, "NumPy array of shape"),
    ],
)
def test_what_holds_no_numbers_is_quoted(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        metrics.return_stats(value)


WRONG_SHAPES: dict[str, Callable[[], object]] = {
    "entropy_rows": lambda: metrics.entropy_rows({"a": LOGITS}, {"a": MASK[:5]}),
    "head_entropy": lambda: metrics.head_entropy(metrics.entropy_rows({"a": LOGITS}), valid=VALID[:5]),
    "heads": lambda: metrics.entropy_stats({"a": LOGITS, "b": LOGITS[:5]}),
    "gradient_norms": lambda: metrics.gradient_norms(LOGITS, NAMES, nonfinite=torch.zeros(5, 3)),
    "gradient_zeros": lambda: metrics.gradient_zeros([A] * N, ["a"] * 5),
    "leaf_interference": lambda: metrics.leaf_interference([A] * N, [A] * 5),
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_shapes_that_do_not_fit_are_both_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"12.*\b5\b|\b5\b.*12"):
        WRONG_SHAPES[name]()


@pytest.mark.parametrize("logits", [LOGITS, LOGITS.numpy(), "a"])
def test_logits_without_a_head_are_refused(logits: Any) -> None:
    with pytest.raises(TypeError, match="expected a mapping from the name of each head"):
        metrics.entropy_stats(logits)


def test_an_action_without_a_mask_of_its_own_is_named() -> None:
    with pytest.raises(ValueError, match="head 'b' has a mask but lacks actions"):
        metrics.mask_violation({"a": CHOSEN}, {"b": MASK})


@pytest.mark.parametrize("wrong", [None, 3, "agent", [np.zeros(2)]])
def test_gradients_are_those_of_modules_and_parameters(wrong: Any) -> None:
    with pytest.raises(TypeError, match="gradient_health takes a module or its parameters, got"):
        metrics.gradient_health(wrong)


def test_one_parameter_is_a_list_of_one() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)

    alone, listed = (groups_of(metrics.gradient_health(given)) for given in (parameter, [parameter]))

    assert [group.values() for group in alone] == [group.values() for group in listed]
