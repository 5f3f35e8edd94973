"""Assertions for unit tests of a trainer: one for each check of an equation, with its arguments.

    def test_advantages() -> None:
        assert_gae(rewards, values, advantages, ended=dones, next_values=next_values, gamma=0.99, gae_lambda=0.95)

An assertion raises AssertionError if the numbers differ from the reference equation, and names the mistake that explains them. It
also raises if the numbers could not be checked. A published variant passes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import getdoc, signature
from typing import ParamSpec

from esper_telemetry.equations.clipping import check_clipping
from esper_telemetry.equations.comparison import EquationCheck
from esper_telemetry.equations.drawn_actions import check_actions
from esper_telemetry.equations.entropy_loss import check_entropy, check_total_loss
from esper_telemetry.equations.gae_advantages import check_gae
from esper_telemetry.equations.gradient import check_gradient
from esper_telemetry.equations.log_probs import check_log_probs
from esper_telemetry.equations.minibatch_rows import check_log_ratios, check_minibatches
from esper_telemetry.equations.normalization import check_normalized_advantages
from esper_telemetry.equations.optimizer_step import check_optimizer_step
from esper_telemetry.equations.policy_loss import check_policy_loss
from esper_telemetry.equations.replayed_outputs import check_replayed_log_probs, check_values
from esper_telemetry.equations.returns import check_returns
from esper_telemetry.equations.schedules import check_schedule
from esper_telemetry.equations.transitions import check_executed, check_rewards, check_transitions
from esper_telemetry.equations.value_loss import check_value_loss

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


assert_actions = asserting(check_actions)
assert_clipping = asserting(check_clipping)
assert_entropy = asserting(check_entropy)
assert_executed = asserting(check_executed)
assert_gae = asserting(check_gae)
assert_gradient = asserting(check_gradient)
assert_log_probs = asserting(check_log_probs)
assert_log_ratios = asserting(check_log_ratios)
assert_minibatches = asserting(check_minibatches)
assert_normalized_advantages = asserting(check_normalized_advantages)
assert_optimizer_step = asserting(check_optimizer_step)
assert_policy_loss = asserting(check_policy_loss)
assert_replayed_log_probs = asserting(check_replayed_log_probs)
assert_returns = asserting(check_returns)
assert_rewards = asserting(check_rewards)
assert_schedule = asserting(check_schedule)
assert_total_loss = asserting(check_total_loss)
assert_transitions = asserting(check_transitions)
assert_value_loss = asserting(check_value_loss)
assert_values = asserting(check_values)
