"""Assertions for unit tests of a trainer: one for each check of an equation, with its arguments.

    def test_advantages() -> None:
        assert_gae(rewards, values, advantages, ended=dones, next_values=next_values, gamma=0.99, gae_lambda=0.95)

An assertion raises AssertionError where the numbers differ from the reference equation, with the mistake that explains them, and where they
could not be checked. A published variant passes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import getdoc, signature
from typing import ParamSpec

from esper_telemetry.metrics.integrity.advantages import check_gae
from esper_telemetry.metrics.integrity.equations import EquationCheck

P = ParamSpec("P")


def asserting(check: Callable[P, EquationCheck]) -> Callable[P, None]:
    """Return a function with the arguments of a check, which raises AssertionError unless the equation holds."""

    @wraps(check)
    def asserted(*args: P.args, **kwargs: P.kwargs) -> None:
        __tracebackhide__ = True  # pytest shows the line of the test instead
        result = check(*args, **kwargs)
        if result.error is None or not result.holds:
            raise AssertionError(result.details)

    name = check.__name__
    asserted.__name__ = asserted.__qualname__ = name.replace("check_", "assert_", 1)
    asserted.__module__ = __name__
    asserted.__doc__ = f"Raise AssertionError unless `{name}` holds.\n\n{getdoc(check)}"
    asserted.__annotations__ = {**check.__annotations__, "return": "None"}
    asserted.__signature__ = signature(check).replace(return_annotation="None")  # type: ignore[attr-defined]  # for help()
    return asserted


assert_gae = asserting(check_gae)
