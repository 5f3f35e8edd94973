"""Histories of keys in a run: which values they report and when, compared with their single parts."""

import math
from typing import Any

import numpy as np
import pytest

from esper_telemetry.core.facts import Facts
from esper_telemetry.core.metric import Array
from esper_telemetry.core.record import Level
from esper_telemetry.history.derive import ALL_SUFFIXES, HEADLINES, KeyHistories
from esper_telemetry.history.deviations import ChangeState, Cusum, LogDrift, TwoSided, level_model
from esper_telemetry.history.trend import goertzel, theil_sen

FACTS: dict[str, Any] = {"groups": {"actor": [], "head:op": []}, "horizon": 200, "num_steps": 20}


def records(values: list[float], key: str = "policy/kl", **facts: Any) -> list[dict[str, float]]:
    temporal = KeyHistories(Facts.of(FACTS | facts))
    return [temporal.derive({} if math.isnan(x) else {key: x}, Level.NORMAL) for x in values]


def wave(updates: int) -> list[float]:
    rng = np.random.default_rng(0)
    decades = 0.3 * np.sin(2 * np.pi * np.arange(updates) / 10) + 0.05 * rng.normal(size=updates)
    return [float(x) for x in 10**decades]


def test_a_headline_reports_every_suffix() -> None:
    """60 values: a baseline of 50, tests every ten updates, ten updates per episode of 200 steps."""
    last = records(wave(100))[-1]

    assert set(last) == {f"policy/kl/{suffix}" for suffix in ALL_SUFFIXES}


def test_first_value_has_a_level_and_no_drift() -> None:
    first = records([0.01])[0]

    assert first["policy/kl/ema"] == pytest.approx(0.01)
    assert first["policy/kl/ew_std"] == 0
    assert "policy/kl/drift" not in first
    assert "policy/kl/robust_z" not in first


def test_doubling_is_a_drift_of_ln_2_and_a_spike_is_unusual() -> None:
    """A constant history has the smallest scale, 0.15 decades, so a tenfold value is 1/0.15 scales off."""
    result = records([0.01] * 20 + [0.02])[-1], records([0.01] * 20 + [0.1])[-1]

    assert result[0]["policy/kl/drift"] == pytest.approx(math.log(2))
    assert result[1]["policy/kl/robust_z"] == pytest.approx(1 / 0.15)


def test_a_key_that_is_missing_reports_nothing_and_goes_on_later() -> None:
    with_gap = records([0.01, math.nan, 0.02])

    assert with_gap[1] == {}
    assert with_gap[2]["policy/kl/ema"] == records([0.01, 0.02])[1]["policy/kl/ema"]


def test_tests_for_trends_come_every_tenth_update_in_decades() -> None:
    """x grows by a tenth of a decade per update."""
    result = records([10 ** (0.1 * t) for t in range(31)])

    assert [t for t, values in enumerate(result, 1) if "policy/kl/trend/slope" in values] == [20, 30]
    assert result[29]["policy/kl/trend/slope"] == pytest.approx(0.1)
    assert result[29]["policy/kl/trend/mk_z"] > 3


def test_oscillation_at_the_time_limit_has_its_length() -> None:
    x = wave(100)
    last = records(x)[-1]

    assert last["policy/kl/period/length"] == pytest.approx(10, abs=1)
    assert last["policy/kl/period/goertzel"] == pytest.approx(goertzel(np.log10(x[-20:]), 2))
    assert "policy/kl/period/goertzel" not in records(x, horizon=None)[-1]


@pytest.mark.parametrize("horizon", [None, "long", math.nan, 0, 20, 10_000])
def test_a_time_limit_that_is_unknown_or_out_of_reach_is_no_period(horizon: Any) -> None:
    """An update has 20 steps: no window can hold a cycle of one update or of 500 updates."""
    assert "policy/kl/period/goertzel" not in records(wave(40), horizon=horizon)[-1]


def test_returns_may_be_negative_so_they_are_followed_as_they_are() -> None:
    x = [-10.0 + t for t in range(20)]
    last = records(x, "episode/return_mean_100")[-1]

    assert last["episode/return_mean_100/trend/slope"] == theil_sen(np.array(x))
    assert not [key for key in last if key.endswith(("drift", "macd", "robust_z"))]


def test_groups_of_parameters_have_levels_and_outliers_only() -> None:
    last = records(wave(100), "grad/head_op/norm_preclip")[-1]

    assert {key.removeprefix("grad/head_op/norm_preclip/") for key in last} == {"ema", "ew_std", "drift", "macd", "robust_z"}


def test_minimal_follows_nothing() -> None:
    assert KeyHistories(Facts.of(FACTS)).derive({"policy/kl": 0.01}, Level.MINIMAL) == {}


def test_no_value_makes_a_history_raise() -> None:
    temporal = KeyHistories(Facts.of(FACTS))
    for x in (0.0, -1.0, 1e308, 1e-308, 5e-324, *[0.01] * 60, 1e308, -1e308):
        result = temporal.derive({row.key: x for row in HEADLINES}, Level.NORMAL)

        assert all(math.isfinite(value) for value in result.values())


def test_sums_of_a_running_series_are_those_of_the_whole() -> None:
    x = np.random.default_rng(1).normal(size=80)
    changes, cusum = ChangeState(1), Cusum(1)

    running = [float(changes.step(np.array([value]))[0]) for value in x]

    whole = [float(np.asarray(cusum.step(np.array([z])).cusum)[0]) for z in level_model(x[:50]).score(x[50:], x[49:-1])]
    assert np.isnan(running[:50]).all()
    assert running[50:] == pytest.approx(whole)


def noise(phi: float, series: int, points: int) -> Array:
    """[series, points] of autoregressive noise with unit standard deviation."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(series, points))
    for t in range(1, points):
        x[:, t] = phi * x[:, t - 1] + math.sqrt(1 - phi**2) * x[:, t]
    return x


def test_drift_beyond_four_spreads_is_rare_on_noise_and_certain_for_a_step() -> None:
    """The values are independent; the first twenty determine the spread."""
    state, off = LogDrift(200), []
    x = np.exp(0.3 * noise(0.0, 200, 120))
    x[:, -1] *= 10
    for value in x.T:
        before = state.fast.std.copy()
        drift = np.asarray(state.step(value).drift)
        off.append(np.abs(drift) > 4 * before)

    assert np.mean(off[20:-1]) <= 0.01
    assert np.mean(off[-1]) > 0.9


def test_rise_and_fall_both_count() -> None:
    step = [0.0] * 10 + [1.0] * 20
    for x in (step, [-value for value in step]):
        state = TwoSided(1)
        result = [float(np.asarray(state.step(np.array([value]), np.array([0.1])).page_hinkley)[0]) for value in x]

        assert result[9] == 0
        assert result[-1] > 5
