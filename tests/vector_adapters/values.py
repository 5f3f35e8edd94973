"""Compute the critic's metrics from the inputs of a reference case."""

from esper_telemetry.history.critic import BETA, CriticMoments, VarianceAverage, critic_fit
from esper_telemetry.metrics.values import monte_carlo_fit, terminal_error, value_fit, value_movement
from vector_adapters.inputs import Inputs, Values, floats, mask, of_keys


@of_keys(
    "value/", "bias bias_over_std corr explained_variance r2 nrmse loss_norm err/p05 err/p25 err/p50 err/p75 err/p95 err/absmax", "err/skew"
)
def fit(inputs: Inputs) -> Values:
    """V1, V2, V3 and V6: the measured value, and its derivation from the variance of earlier updates."""
    measured = value_fit(floats(inputs["values"]), floats(inputs["returns"]), valid=mask(inputs)).values()
    assert inputs.get("beta", BETA) == BETA
    earlier = VarianceAverage()
    for variance in inputs.get("var_history", ()):
        earlier = earlier.after(variance)
    keys = ("value/bias", "value/err/std", "value/std", "value/target/std")
    derived, _ = critic_fit(CriticMoments(*map(measured.get, keys)), earlier)
    return {**measured, **derived.values()}


@of_keys("value/", "clip_frac move_over_std")
def movement(inputs: Inputs) -> Values:
    now, before, targets = (floats(inputs[name]) for name in ("values", "values_old", "returns"))
    return value_movement(now, before, targets, clip=inputs["clip_eps"]).values()


@of_keys("value/terminal_err")
def episodes_end(inputs: Inputs) -> Values:
    terminated = floats(inputs["dones"]) > 0
    return terminal_error(floats(inputs["values"]), floats(inputs["rewards"]), terminated).values()


@of_keys("value/ev_mc")
def monte_carlo(inputs: Inputs) -> Values:
    """V1, without bootstrap."""
    terminated, truncated = floats(inputs["dones"]) > 0, floats(inputs["truncations"]) > 0
    values, rewards = floats(inputs["values"]), floats(inputs["rewards"])
    return monte_carlo_fit(values, rewards, terminated | truncated, terminated, gamma=inputs["gamma"]).values()
