"""Unusual values, by comparison with the bounds of metrics and with the packaged table of healthy runs."""

from importlib import import_module

import pytest
from healthy_run import FACTS

import esper_telemetry
from esper_telemetry.alarms.verdict.bounds import beyond_bound, critical_values, distance_beyond
from esper_telemetry.alarms.verdict.run_outcome import OutcomeKind
from esper_telemetry.alarms.verdict.unusual import (
    NORMALIZED_KEYS,
    RunValues,
    dotted_name,
    fact_remedy,
    healthy_values,
    judge_value,
    key_remedy,
    keys_without_bounds,
    kind_of_task,
    notable,
    quantiles_of,
    scale_free,
    suppliers,
)
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.metric import Metric
from esper_telemetry.core.record import Axes, MetricInfo, Record
from esper_telemetry.equations.equation import EQUATION_KEY, equations


@pytest.mark.parametrize(
    ("text", "value", "decades"),
    [
        ("> 0.03", 0.3, 1.0),
        ("> 0.03", 0.02, 0.0),
        ("< 0.1", 0.001, 2.0),
        ("< 0", -0.5, 0.51),
        ("|mean| > 0.05", -0.5, 1.0),
        ("> 1.6 (a factor of 5)", 16.0, 1.0),
        (">= 0.25", 0.25, 0.01),
        ("outside 0.1 to 0.9", 0.001, 2.0),
        ("outside 0.1 to 0.9", 0.5, 0.0),
        ("> 10 with policy/ess_frac < 0.8", 100.0, None),
        ("robust z of log10 above 4", 100.0, None),
        ("", 1.0, None),
    ],
)
def test_bounds_that_are_plain_numbers_are_read(text: str, value: float, decades: float | None) -> None:
    """The distance is in decades if both numbers are positive; a text with a condition is not a bound."""
    assert beyond_bound(text, value) == (None if decades is None else pytest.approx(decades))


@pytest.mark.parametrize(
    ("text", "other", "is_beyond"),
    [
        ("< 0 with policy/kl > 1", 2.0, True),
        ("< 0 with policy/kl > 1", 0.5, False),
        ("< 0 with policy/kl > 1", None, False),
        ("< 0 unless policy/kl > 1", 2.0, False),
        ("< 0 unless policy/kl > 1", 0.5, True),
        ("< 0 unless policy/kl > 1", None, True),
    ],
)
def test_a_bound_holds_on_its_condition(text: str, other: float | None, is_beyond: bool) -> None:
    """A condition with `with` must be known to hold; one with `unless` must not be known to hold."""
    assert bool(distance_beyond(text, -1.0, {"policy/kl": other}.get)) is is_beyond
    assert not distance_beyond(text, 1.0, {"policy/kl": other}.get)


def test_a_value_is_critical_by_the_median_of_the_latest_records() -> None:
    """Six of the last ten KL divergences are beyond 0.1, and one of the last three learning rates; other keys are unknown."""
    metrics = {"policy/kl": MetricInfo("nats", "?", critical="> 0.1"), "opt/lr": MetricInfo("1", "?", critical="> 1")}
    records = [{"policy/kl": 9.0}] * 20 + [{"policy/kl": 0.01, "my/key": 9.0}] * 4
    records += [{"policy/kl": 0.3, "opt/lr": rate} for rate in (0.0, 0.0, 2.0)] + [{"policy/kl": 0.3}] * 3

    assert critical_values(records, metrics) == {"policy/kl": 0.3}
    assert critical_values([{"policy/kl": 0.3, "opt/lr": 2.0}], metrics) == {"policy/kl": 0.3, "opt/lr": 2.0}
    assert critical_values([], metrics) == {}


def test_bounds_of_normalised_advantages_and_of_lambda_returns_need_both() -> None:
    """The run does not normalise, and its critic learns one-step targets."""
    returns = equations()["returns"]
    key, targets = EQUATION_KEY + returns.label(), EQUATION_KEY + returns.label(returns["td_targets"])
    checked = {key: 0.9, targets: 1.0}
    plain = Facts(normalize_advantages=False)

    aside = keys_without_bounds(plain, [checked, {"integrity/gae_identity": 0.4}])

    assert set(aside) == {*NORMALIZED_KEYS, "integrity/gae_identity"}
    assert set(keys_without_bounds(plain, [])) == {*NORMALIZED_KEYS}
    assert set(keys_without_bounds(Facts(), [{key: 0.9}])) == {"adv/norm/mean"}, "it is not known whether it normalises"
    normal = Facts(normalize_advantages=True, columns_by_name=True)
    assert set(keys_without_bounds(normal, [{key: 0.9}])) == {"integrity/gae_identity"}
    metrics = {name: MetricInfo("1", "?", critical="> 0.05") for name in ("adv/norm/mean", "policy/kl")}
    assert critical_values([{"adv/norm/mean": 1.0, "policy/kl": 0.3}], metrics, aside) == {"policy/kl": 0.3}


def test_quantiles_weigh_runs_alike() -> None:
    """A run with 2 values and one with 4: each has half of the eight places."""
    ((key, quantiles),) = quantiles_of([{"a": [1.0, 1.0]}, {"a": [3.0, 3.0, 3.0, 3.0]}])

    assert key == "a"
    assert quantiles == [1.0, 1.0, 3.0, 3.0, 3.0]


def test_values_that_healthy_runs_have_are_usual_whatever_the_bounds_say() -> None:
    metric = Metric.fraction("a/b", 0, "b").bounds(warn="> 0.3")

    usual = judge_value(metric, 0.45, [0.1, 0.2, 0.3, 0.5, 0.6])
    far = judge_value(metric, 0.9, [0.1, 0.2, 0.3, 0.5, 0.6])

    assert usual is None
    assert far is not None and far.is_far and far.text == "0.9 (healthy runs 0.2 to 0.5; warning: > 0.3)"
    assert judge_value(metric, 0.45, None) is not None


def test_values_that_are_better_than_healthy_ones_are_usual() -> None:
    """Only a low explained variance is bad. A critical value counts although healthy runs have it, too."""
    metric = Metric.fraction("a/b", 0, "b").bounds(warn="< 0.1", critical="< 0")

    assert judge_value(metric, 0.99, [0.1, 0.2, 0.3, 0.5, 0.6]) is None
    assert judge_value(metric, -0.1, [-0.2, -0.1, 0.0, 0.1, 0.2]) is not None


def test_the_table_holds_plausible_values_of_declared_metrics() -> None:
    table = healthy_values()

    assert {"any", "discrete", "continuous", "memory"} <= table.keys()
    for kind, rows in table.items():
        assert rows.keys() <= scale_free().keys(), kind
        assert all(len(row) == 5 and row == sorted(row) for row in rows.values())
    assert table["any"]["obs/constant_frac"][-1] == 0
    assert 0.0 < table["discrete"]["policy/kl"][2] < 0.03


def test_the_worst_comes_first_and_long_runs_are_thinned_out() -> None:
    usual = healthy_values()["discrete"]["policy/kl"][2]
    values = RunValues()
    for update in range(1, 2001):
        values.add(Record(update, Axes(update, update, update, 0.0), {"obs/constant_frac": 1.0, "policy/kl": usual, "x": 1e9}))

    unusual = values.unusual(Facts(heads={"action": "categorical"}))

    assert [entry.key for entry in unusual] == ["obs/constant_frac"]
    assert all(len(kept) <= 500 for kept in values.samples.values())


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (Facts(), "any"),
        (Facts(heads={"a": "categorical"}), "discrete"),
        (Facts(heads={"a": "gaussian"}), "continuous"),
        (Facts(heads={"a": "categorical"}, policy="lstm"), "memory"),
    ],
)
def test_the_kind_of_task_comes_from_the_facts(facts: Facts, kind: str) -> None:
    assert kind_of_task(facts) == kind


def test_each_missing_value_names_what_supplies_it() -> None:
    own, trainer = Facts(level="normal"), Facts(level="normal", optimizer="Adam")

    assert key_remedy("reward/std", own) == "telemetry.observe(esper_telemetry.metrics.reward_stats(...))"
    assert key_remedy("grad/global/norm_preclip", own) == "telemetry.watch(agent, optimizer)"
    assert key_remedy("value/r2", own) == "telemetry.observe(esper_telemetry.metrics.value_fit(...))"
    assert key_remedy("my/number", own) == 'telemetry.log({"my/number": ...})'
    assert key_remedy("reward/std", Facts(level="minimal")) == 'level="normal"'
    assert key_remedy("repr/effective_rank", trainer).startswith("a larger budget=")
    assert fact_remedy(("groups",)) == "telemetry.watch(agent, optimizer, actor=..., critic=...)"
    assert fact_remedy(("num_envs",)) == 'Telemetry(facts={"num_envs": ...})'


def test_functions_that_are_named_exist() -> None:
    """Every function next to a group returns that group, and none is private."""
    assert all(not name.startswith("_") for _, functions in suppliers().values() for name in functions)
    assert "episode_stats" in suppliers()["episode/return_mean"][1]
    for _, functions in suppliers().values():
        for module, _, name in (dotted_name(function).rpartition(".") for function in functions):
            assert callable(getattr(import_module(module), name))
    for equation in equations().values():
        assert not equation.check or callable(getattr(esper_telemetry, equation.check))


def test_critical_values_of_a_run_that_learns_are_those_that_healthy_runs_do_not_have() -> None:
    """The bound of `grad/clip/coef_min` is 0.01, and healthy runs of this kind go down to 0.002."""
    critical = {"grad/clip/coef_min": 0.005, "policy/kl": 3.0, "policy/head/op/kl": 3.0}

    facts = Facts.of({**FACTS, "policy": "mlp"})

    assert notable(critical, facts, OutcomeKind.LEARNING) == {"policy/kl": 3.0, "policy/head/op/kl": 3.0}
    assert notable(critical, facts, OutcomeKind.FLAT) == critical
