"""Invalid data and settings are refused in one sentence with the value or the shapes."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from test_arrays import CALLS, LOGITS, A, B, N, numbers
from torch import Tensor

import esper_telemetry as public
from esper_telemetry import metrics

REWARDS, VALUES, ADVANTAGES = (numbers(N, 2, seed=seed) for seed in range(3))
ENDED = torch.zeros(N, 2, dtype=torch.bool)
LOG_PROBS = LOGITS.log_softmax(-1)[:, 0]
LAYER = torch.nn.Linear(3, 2)
WEIGHTS = [parameter.detach() for parameter in LAYER.parameters()]

CHECKS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "check_actions": (({"a": torch.zeros(N, 2, dtype=torch.long)},), {"logits": {"a": numbers(N, 2, 3)}}),
    "check_clipping": ((WEIGHTS, WEIGHTS), {"max_norm": 0.5}),
    "check_entropy": ((A[0],), {"logits": {"a": LOGITS}, "weight": 0.01}),
    "check_executed": ((REWARDS, REWARDS), {}),
    "check_gae": ((REWARDS, VALUES, ADVANTAGES), {"gamma": 0.9, "gae_lambda": 0.8, "ended": ENDED, "last_values": VALUES[0]}),
    "check_gradient": ((WEIGHTS, {"policy": WEIGHTS}), {"coefficients": {"policy": 1.0}, "previous": WEIGHTS}),
    "check_log_probs": (({"a": torch.zeros(N, dtype=torch.long)}, LOG_PROBS), {"logits": {"a": LOGITS}}),
    "check_log_ratios": ((A, LOG_PROBS, LOG_PROBS), {}),
    "check_minibatches": (([[torch.arange(6), torch.arange(6, 12)]], N), {"environments": 1}),
    "check_normalized_advantages": ((A, B), {"floor": 0.0, "correction": 1}),
    "check_optimizer_step": ((WEIGHTS, WEIGHTS, WEIGHTS, torch.optim.SGD(LAYER.parameters(), 0.1)), {}),
    "check_policy_loss": ((A[0], A, B), {"clip": 0.2}),
    "check_replayed_log_probs": ((LOG_PROBS, LOG_PROBS), {}),
    "check_returns": ((ADVANTAGES, VALUES, ADVANTAGES + VALUES), {}),
    "check_rewards": ((REWARDS, REWARDS), {}),
    "check_schedule": (([0.1, 0.05], [0.0, 0.5]), {"initial": 0.1, "final": 0.0}),
    "check_total_loss": ((A[0], A[1], B[0]), {"value_coef": 0.5}),
    "check_transitions": ((numbers(N, 2, 3),), {"ended": ENDED}),
    "check_value_loss": ((A[0], A, B), {"clip_value": None}),
    "check_values": ((VALUES, VALUES), {}),
}

FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    **{name: (getattr(metrics, name), *call) for name, call in CALLS.items()},
    **{name: (getattr(public, name), *call) for name, call in CHECKS.items()},
}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns when these tensors are created

UNREADABLE: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "sparse": (lambda x: x.to_sparse(), r"call to_dense\(\)"),
    "quantised": (lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8), r"call dequantize\(\)"),
    "float8": (lambda x: x.float().to(torch.float8_e4m3fn), r"got a tensor of torch.float8_e4m3fn: call float\(\)"),
    "meta": (lambda x: x.to("meta"), "got a tensor on the meta device"),
    "complex": (lambda x: x.to(torch.complex64), "got a tensor of torch.complex64"),
    "nested": (lambda x: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]), "got a nested tensor"),
    "objects": (lambda x: np.array([object()] * len(x.reshape(-1))), "expected a"),
    "texts": (lambda x: np.array(["0.2"]), "expected a"),
    "an instance": (lambda x: object(), "got|expected|cannot use"),
}


def tensors(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of the tensors in nested arguments."""
    if isinstance(value, Tensor):
        yield place
    for key, part in value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ():
        yield from tensors(part, (*place, key))


def replaced(value: Any, place: tuple[Any, ...], change: Callable[[Tensor], object]) -> Any:
    if not place:
        return change(value)
    items = dict(value) if isinstance(value, Mapping) else list(value)
    items[place[0]] = replaced(items[place[0]], place[1:], change)
    return items


def test_every_public_function_is_tried() -> None:
    names = {name for name in public.__all__ if name.startswith("check_")} | set(metrics.__all__)

    assert names - set(FUNCTIONS) == {"gradient_health", "head_entropy", "policy_entropy"}, "they take other things"


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_no_metric_can_read_is_named(name: str, kind: str) -> None:
    function, positional, keywords = FUNCTIONS[name]
    change, text = UNREADABLE[kind]

    for place in tensors([positional, keywords]):
        changed, others = replaced([positional, keywords], place, change)
        with pytest.raises((TypeError, ValueError), match=text) as refusal:
            function(*changed, **others)
        assert len(str(refusal.value)) < 500 and "\n" not in str(refusal.value), place


SIZED = [name for name in CALLS if name not in ("entropy_rows", "gradient_norms", "gradient_zeros", "leaf_interference", "nonfinite_count")]


@pytest.mark.parametrize("name", SIZED)
def test_sizes_that_do_not_fit_are_both_named(name: str) -> None:
    """Five rows instead of 12; a matrix of 12 rows has 36 entries."""
    for place in tensors(list(CALLS[name])):
        arguments, settings = replaced(list(CALLS[name]), place, lambda x: x[:5])
        with pytest.raises(ValueError, match=r"\b(12|36)\b.*\b1?5\b|\b1?5\b.*\b(12|36)\b"):
            getattr(metrics, name)(*arguments, **settings)


@pytest.mark.parametrize("change", [lambda x: x[:1], lambda x: x.unsqueeze(-1), lambda x: x.reshape(-1)[0], lambda x: x[:0]])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_shapes_that_torch_cannot_combine_are_one_sentence(name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Some functions accept some of these shapes."""
    function, positional, keywords = FUNCTIONS[name]

    for place in tensors([positional, keywords]):
        changed, others = replaced([positional, keywords], place, lambda x: change(x) if x.ndim else x)
        try:
            function(*changed, **others)
        except (TypeError, ValueError) as refusal:
            assert "\n" not in str(refusal)


SETTINGS = [
    (name, setting) for name, (_, _, keywords) in FUNCTIONS.items() for setting, value in keywords.items() if isinstance(value, float)
]


@pytest.mark.parametrize("value", ["0.2", [0.2], 1j, torch.ones(3), object()])
@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_a_setting_that_is_no_number_is_named(name: str, setting: str, value: object) -> None:
    function, positional, keywords = FUNCTIONS[name]

    with pytest.raises(TypeError, match=f"^{setting} must be one number, got "):
        function(*positional, **{**keywords, setting: value})


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_a_setting_is_not_nan_and_may_be_a_number_of_torch(name: str, setting: str) -> None:
    function, positional, keywords = FUNCTIONS[name]

    with pytest.raises(ValueError, match=f"^{setting} must .*, got nan$"):
        function(*positional, **{**keywords, setting: math.nan})
    function(*positional, **{**keywords, setting: torch.tensor(keywords[setting])})


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: metrics.ratio_diagnostics(A, B, clip=-0.1), "clip must not be negative, got -0.1"),
        (
            lambda: metrics.entropy_stats({"a": 1}),
            "entropy_rows cannot use logits {a: 1}: IndexError: Dimension specified as 0 but tensor has no dimensions",
        ),
        (lambda: metrics.episode_stats([1.0], [-2.0]), "the length of an episode must not be negative, got -2"),
        (lambda: metrics.ratio_diagnostics(A, B, dim="all"), "dim must be one number, got 'all'"),  # type: ignore[arg-type]
    ],
)
def test_settings_out_of_range_are_named(call: Callable[[], object], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{text}$"):
        call()


def test_booleans_and_unsigned_integers_have_differences_with_a_sign() -> None:
    """0 - 1 = -1; unsigned integers would give 255."""
    estimates, targets = torch.tensor([0, 1, 1, 0], dtype=torch.uint8), torch.tensor([True, True, False, False])

    assert metrics.value_fit(estimates, targets).values() == metrics.value_fit(estimates.float(), targets.float()).values()


@pytest.mark.parametrize("kind", ["None", "nested"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_first_argument_that_holds_no_numbers_is_one_sentence(name: str, kind: str) -> None:
    """If the package fails inside for such a value, the error names the function that the user called."""
    function, arguments, settings = FUNCTIONS[name]
    value = None if kind == "None" else torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    try:
        function(value, *arguments[1:], **settings)
    except (TypeError, ValueError) as error:
        assert "\n" not in str(error) and not str(error).startswith("'NoneType'")
