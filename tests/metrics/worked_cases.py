"""Cases of metric functions worked by hand."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import Derived

Group = MetricGroup | Derived


class Case(NamedTuple):
    """A call, and the values that it gives.

    Attributes:
        expected: None for a key that is absent.
        others: whether the call gives other values, too.
    """

    call: Callable[[], Group | Iterable[Group]]
    expected: Mapping[str, float | None]
    others: bool = False


def values_of(groups: Group | Iterable[Group]) -> dict[str, float]:
    return {key: value for group in (groups if isinstance(groups, Iterable) else [groups]) for key, value in group.values().items()}


def parameters(cases: Mapping[str, Iterable[Case]]) -> list[Any]:
    return [pytest.param(case, id=f"{name} [{place}]") for name, rows in cases.items() for place, case in enumerate(rows)]


def check(case: Case) -> None:
    values = values_of(case.call())
    if case.others:
        values = {key: values[key] for key in case.expected if key in values}
    assert values == pytest.approx({key: value for key, value in case.expected.items() if value is not None}, rel=1e-6, abs=1e-12)


def with_gradient(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(gradient.new_zeros(gradient.shape))
    parameter.grad = gradient
    return parameter
