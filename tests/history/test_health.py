"""Severity, thresholds, health, pairs and noise scale."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper_telemetry.core.record import Level
from esper_telemetry.history.derive import PairEvidence, diagnose_pair, pair_intensity
from esper_telemetry.history.gradient_history import (
    DECADES_EXPLODE,
    FACTOR_WEIGHTS,
    GradientHistory,
    NoiseAverage,
    NormBaseline,
    explode_severity,
    gradient_condition,
    vanish_severity,
)

NORMS = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=6)
TAU_VANISH, TAU_EXPLODE = 1e-7, 5.0


def health(norms: list[float], zero_frac: float = 0.0) -> float:
    result = gradient_condition(np.array(norms), tau_vanish=TAU_VANISH, tau_explode=TAU_EXPLODE, zero_frac=zero_frac)
    assert result.health is not None
    return result.health


@given(st.floats(0, 1e12), st.floats(0, 1e12))
def test_severities_are_monotone_and_bounded(a: float, b: float) -> None:
    small, large = sorted([a, b])
    explode, vanish = (f(np.array([small, large]), 1e-3) for f in (explode_severity, vanish_severity))

    assert 0 <= explode[0] <= explode[1] <= 1
    assert 1 >= vanish[0] >= vanish[1] >= 0


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_norm_that_is_not_finite_explodes_and_does_not_vanish(norm: float) -> None:
    assert explode_severity(np.array([norm]), 1.0)[0] == 1.0
    assert vanish_severity(np.array([norm]), 1.0)[0] == 0.0


@given(NORMS, st.floats(0, 1))
def test_health_is_bounded_and_its_losses_add_up(norms: list[float], zero_frac: float) -> None:
    result = gradient_condition(np.array(norms), tau_vanish=TAU_VANISH, tau_explode=TAU_EXPLODE, zero_frac=zero_frac)
    assert result.health is not None and 0 <= result.health <= 1

    faults = (result.vanish, result.explode, result.imbalance, result.zero)
    factors = [1 - phi * fault for phi, fault in zip(FACTOR_WEIGHTS, faults, strict=True)]
    if result.health > 0:
        assert -math.log(result.health) == pytest.approx(sum(-math.log(f) for f in factors), abs=1e-12)
    assert (result.cause is None) == (result.health == 1)


@given(NORMS, st.floats(0, 1e6, allow_subnormal=False), st.floats(0, 1))
def test_health_does_not_fall_while_a_small_norm_grows(others: list[float], norm: float, share: float) -> None:
    """On [0, min(τ_e, M)] with M the largest other norm."""
    top = min(TAU_EXPLODE, max(others))
    high = min(norm, top)

    assert health([*others, share * high]) <= health([*others, high]) + 1e-12


@given(NORMS, st.floats(0, 1e6, allow_subnormal=False), st.floats(1, 1e6))
def test_health_does_not_rise_while_a_large_norm_grows(others: list[float], norm: float, factor: float) -> None:
    """On [max(τ_v, m), ∞) with m the smallest other norm."""
    low = max(TAU_VANISH, min(others), norm)

    assert health([*others, low * factor]) <= health([*others, low]) + 1e-12


@given(NORMS, st.floats(1e-3, 1e3))
def test_health_does_not_depend_on_the_unit_of_norms(norms: list[float], unit: float) -> None:
    one = gradient_condition(np.array(norms), tau_vanish=1e-7, tau_explode=5.0)
    other = gradient_condition(np.array(norms) * unit, tau_vanish=1e-7 * unit, tau_explode=5.0 * unit)

    assert one.health == pytest.approx(other.health, abs=1e-9)


def test_hints_alone_cannot_push_health_below_a_quarter() -> None:
    assert health([1e-5, 5.0, 1e-6], zero_frac=1.0) >= 0.25


def test_health_without_gradients_is_unknown_and_zeros_need_not_be_measured() -> None:
    assert gradient_condition(np.array([]), tau_vanish=1e-7, tau_explode=5.0).values() == {}
    assert gradient_condition(np.array([1.0]), tau_vanish=1e-7, tau_explode=5.0).values() == {"grad/health": 1.0}


def test_baseline_learns_from_healthy_updates_only_and_starts_anew_after_fifty_others() -> None:
    baseline = NormBaseline(("actor", "critic"), max_grad_norm=0.5)
    for _ in range(30):
        baseline.step(np.array([0.1, 0.1]), np.array([0.1, 0.1]))
    before, _ = baseline.step(np.array([0.1, 0.1]), np.array([0.1, 0.1]))

    shares = [baseline.step(np.array([500.0, 0.1]), np.array([500.0, 0.1])) for _ in range(50)]

    first, last = shares[0][0].values(), shares[-1][0].values()
    assert first["grad/actor/severity_explode"] == last["grad/actor/severity_explode"] == 1.0
    assert last["grad/actor/threshold_explode"] == before.values()["grad/actor/threshold_explode"]
    assert first["grad/critic/severity_explode"] == 0.0
    assert [restarted.tolist() for _, restarted in shares[-2:]] == [[False, False], [True, False]]


def test_group_without_gradients_has_no_severity_and_one_that_is_not_finite_explodes() -> None:
    result, _ = NormBaseline(("actor", "critic"), 0.5).step(np.array([np.nan, np.nan]), np.array([np.nan, np.inf]))

    assert "grad/actor/severity_explode" not in result.values()
    assert result.values()["grad/critic/severity_explode"] == 1.0


def test_layer_that_is_missing_in_an_update_keeps_its_history_and_those_of_the_others() -> None:
    """Norms are 0.1, so a layer explodes above 2 with a history, and above 10 without. A norm of 30 is log10(15) decades above."""
    history = GradientHistory((), max_grad_norm=1.0)
    both = {"grad/layer/encoder/norm": 0.1, "grad/layer/head/norm": 0.1}
    for _ in range(30):
        history.derive(both, Level.DEBUG)

    alone = history.derive({"grad/layer/encoder/norm": 30.0}, Level.DEBUG)
    again = history.derive({"grad/layer/head/norm": 30.0, "grad/layer/encoder/norm": 0.1}, Level.DEBUG)

    severity = math.log10(15) / DECADES_EXPLODE
    assert alone["grad/health"] == pytest.approx(1 - severity)
    assert "grad/layer/head/severity_explode" not in alone
    assert again["grad/layer/head/severity_explode"] == pytest.approx(severity)
    assert again["grad/layer/encoder/severity_explode"] == 0


def test_intensity_does_not_depend_on_the_modules_sizes() -> None:
    """Entries of 0.1 and 1 throughout: ratio 0.1 for any number of them."""
    result = pair_intensity("seed", seed_norm=0.1 * 4, seed_params=16, host_norm=1.0 * 30, host_params=900)

    assert result.values() == {"grad/pair/seed/intensity_ratio": pytest.approx(0.1)}
    assert pair_intensity("seed", seed_norm=None, seed_params=1, host_norm=1.0, host_params=1).values() == {}


def evidence(**changes: float | None) -> PairEvidence:
    usual = {"ratio": 0.001, "z_seed": 0.0, "z_host": 0.0, "z_up": 0.0, "z_gain": 0.0, "zero_frac": 0.0}
    return PairEvidence(grads_exist=True, upstream_exists=True, **{**usual, **changes})  # type: ignore[arg-type]  # numbers


def test_confidence_is_how_far_the_deciding_z_lies_beyond_its_threshold() -> None:
    """At -5: (5 - 2)/(1 + 5)."""
    result = diagnose_pair(evidence(z_up=-5.0))

    assert (result.cause, result.confidence) == ("dormant", 0.5)
    assert diagnose_pair(evidence(z_up=-math.inf)).confidence == 1.0
    assert diagnose_pair(evidence(ratio=0.01)).cause == "ok"


def test_noise_scale_averages_signal_and_noise_separately() -> None:
    """Signal 2, -1 and noise 10, 14: the sums at equal weights are 1 and 24, including the negative signal."""
    average = NoiseAverage(beta=0.999999)
    assert average.step(2.0, 10.0).b_simple == pytest.approx(5.0)
    second = average.step(-1.0, 14.0)

    assert second.b_simple == pytest.approx(24.0, rel=1e-4)
    assert second.noise_dominated == 1.0
    assert average.step(None, None).values() == {}
