"""The catalogue is complete, unique and readable."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import (
    ENTRY_POINT_GROUP,
    Metric,
    catalogue,
    declared,
    declaring_modules,
    families,
    groups,
    label_field,
    reports,
)
from esper_telemetry.core.record import LABELS, WHOLE_KEYS, Level, check_key, template_of
from esper_telemetry.core.reduction import Mean
from esper_telemetry.history.derive import RunHistory, key_histories


def test_keys_and_numbers_are_unique_and_sorted() -> None:
    keys = [metric.key for group in groups() for _, metric in declared(group)]
    numbers = [metric.number for metric in catalogue()]

    assert sorted(set(keys)) == sorted(keys)
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("metric", catalogue(), ids=lambda metric: metric.key)
def test_every_metric_explains_itself(metric: Metric) -> None:
    info = metric.info()

    assert info.unit
    assert info.question.endswith(("?", ".")) and "?" in info.question
    assert info.id.startswith("TELE-")
    assert info.low is None or info.high is None or info.low < info.high


def test_templates_name_the_label_of_their_group() -> None:
    for group in groups():
        for _, metric in declared(group):
            names = re.findall(r"\{([a-z_]+)\}", metric.key)
            assert names == ([label_field(group)] if label_field(group) else []), metric.key
            check_key(re.sub(r"\{[a-z_]+\}", "x", metric.key))


def test_readers_of_records_have_every_label() -> None:
    names = {name for metric in catalogue() for name in re.findall(r"\{([a-z_]+)\}", metric.key)}

    assert names <= {*LABELS, *WHOLE_KEYS}


@pytest.mark.parametrize(
    ("key", "template"),
    [
        ("policy/kl/ema", "{key}/ema"),
        ("grad/actor/norm_preclip/trend/slope", "{key}/trend/slope"),
        ("policy/head/op/kl", "policy/head/{head}/kl"),
        ("lstm/age/mean", "lstm/age/mean"),
        ("lstm/h/mean", "lstm/{part}/mean"),
        ("policy/kl", "policy/kl"),
        ("curiosity/bonus", "curiosity/bonus"),
    ],
)
def test_a_key_is_traced_to_the_template_it_was_made_from(key: str, template: str) -> None:
    """A label of temporal suffixes is a whole key with any number of segments."""
    assert template_of(key, {metric.key: metric for metric in catalogue()}) == template


def test_no_label_takes_a_key_of_another_declaration() -> None:
    """Covers every declared key, with a plain label, and every history that a run derives."""
    declared_keys = {metric.key: metric for metric in catalogue()}
    plain = {re.sub(r"\{(\w+)\}", lambda m: "policy/kl" if m[1] in WHOLE_KEYS else "x", key): key for key in declared_keys}
    histories = {f"{row.key}/{end}": f"{{key}}/{end}" for row in key_histories(["actor"]) for end in row.suffixes}

    wrong = {
        key: template_of(key, declared_keys)
        for key, template in {**plain, **histories}.items()
        if template_of(key, declared_keys) != template
    }

    assert wrong == {}


def test_every_key_that_is_derived_from_earlier_updates_has_its_own_declaration() -> None:
    """In twenty updates, the rate and the step size fall. A layer named `lr_response` would be judged as a step size."""
    history, values = RunHistory({"groups": {"actor": ()}}), {row.key: 0.5 for row in key_histories(["actor"])}
    declared_keys = {metric.key: metric for metric in catalogue()}
    for update in range(1, 21):
        derived = history.derive({**values, "opt/lr": 1 / update, "opt/update_to_weight": 1 / update}, Level.DEBUG)

    assert derived["opt/update_to_weight/lr_response"] == 1
    owners = {key: template_of(key, declared_keys) for key in derived}
    assert {owner.rpartition("/")[2] for key, owner in owners.items()} == {key.rpartition("/")[2] for key in owners}


def test_the_history_of_a_declared_key_is_not_a_layer() -> None:
    """As in journals that declare no separate history."""
    templates = dict.fromkeys(["opt/update_to_weight", "opt/update_to_weight/{layer}", "{key}/lr_response"])

    assert template_of("opt/update_to_weight/lr_response", templates) == "{key}/lr_response"
    assert template_of("opt/update_to_weight/trunk", templates) == "opt/update_to_weight/{layer}"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An installed module that declares a new metric and one of ours again."""
    module = ModuleType("curiosity_metrics")

    @dataclass(frozen=True, slots=True)
    class Curiosity(MetricGroup):
        bonus: Mean = reports(
            Metric(key="curiosity/bonus", unit="reward", question="How much does novelty pay?"),
            Metric(key="policy/kl", unit="reward", question="Is this ours?"),
        )

    Curiosity.__module__ = module.__name__
    module.Curiosity = Curiosity  # type: ignore[attr-defined]  # a plugin's module would define it
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entries = [
        EntryPoint("broken", "no_such_module_of_metrics", ENTRY_POINT_GROUP),
        EntryPoint("curiosity", module.__name__, ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr("esper_telemetry.core.metric.entry_points", lambda group: entries)
    forget()
    yield module
    forget()


def forget() -> None:
    for cached in (catalogue, families, declaring_modules):
        cached.cache_clear()


def test_plugins_add_metrics(plugin: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    """A plugin that cannot be imported and a key that is declared twice each cause one warning."""
    metrics = {metric.key: metric for metric in catalogue()}

    assert metrics["curiosity/bonus"].question == "How much does novelty pay?"
    assert metrics["policy/kl"].unit == "nats"
    assert "curiosity_metrics declares the metric 'policy/kl' again" in caplog.text
    assert "the metrics of the plugin 'broken' (no_such_module_of_metrics) cannot be loaded" in caplog.text
