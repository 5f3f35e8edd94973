"""The catalogue is complete, unique and readable."""

from __future__ import annotations

import re

import pytest

from esper_telemetry.core.catalogue import catalogue, groups
from esper_telemetry.core.metric import Metric, declared, label_field
from esper_telemetry.core.record import LABELS, WHOLE_KEYS, check_key, template_of


def test_keys_and_numbers_are_unique_and_sorted() -> None:
    found = catalogue()

    assert len({metric.key for metric in found}) == len(found)
    assert [metric.number for metric in found] == sorted({metric.number for metric in found})


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


def test_labels_are_known_to_readers_of_records() -> None:
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
    """A label of temporal suffixes is a whole key, of however many segments."""
    assert template_of(key, {metric.key: metric for metric in catalogue()}) == template
