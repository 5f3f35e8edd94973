"""Facts of a run: declared facts are typed, other facts are free."""

import pickle
from math import inf

import numpy as np
import pytest
import torch

from esper_telemetry import check_total_loss
from esper_telemetry.core.facts import DECLARED, Facts, checked_facts, optimizer_facts
from esper_telemetry.journal.schema import FACTS


def test_declared_facts_are_attributes_with_their_types() -> None:
    facts = Facts.of({"clip": 1, "num_envs": 8.0, "squashed": 0, "max_grad_norm": "inf", "groups": {"actor": ["a"]}})

    assert (facts.clip, type(facts.clip)) == (1.0, float)
    assert (facts.num_envs, type(facts.num_envs)) == (8, int)
    assert facts.squashed is False
    assert facts.max_grad_norm == inf
    assert facts.groups == {"actor": ["a"]}


def test_a_fact_that_is_missing_or_has_another_form_is_not_known() -> None:
    facts = Facts.of({"clip": "wide", "num_envs": inf, "groups": 7, "target_kl": None})

    assert facts.clip is facts.num_envs is facts.target_kl is facts.gamma is None
    assert facts.groups == {}


def test_as_a_mapping_facts_are_as_they_were_given() -> None:
    """None differs from a missing fact, and plugins can read undeclared facts."""
    given = {"clip": 1, "target_kl": None, "own": [3]}
    facts = Facts.of(given)

    assert facts == given and dict(facts) == given
    assert facts.get("own") == [3] and "gamma" not in facts
    assert Facts.of(facts) is facts
    assert pickle.loads(pickle.dumps(facts)) == facts


def test_facts_of_users_are_checked_by_the_declared_types() -> None:
    assert checked_facts({"clip": np.float32(0.5), "num_envs": np.int64(8), "target_kl": None, "heads": None}) == {
        "clip": 0.5,
        "num_envs": 8,
        "target_kl": None,
    }
    for name, wrong in {"clip": "wide", "env": 3, "squashed": "yes", "heads": ["a"], "groups": {"actor": "a"}}.items():
        with pytest.raises(TypeError, match=f"fact {name} must"):
            checked_facts({name: wrong})


def test_a_precision_is_one_that_has_bounds() -> None:
    for given in ("bf16", "bfloat16", torch.bfloat16):
        assert checked_facts({"precision": given}) == {"precision": "bf16"}
    for wrong in ("single", "int64", 32):
        with pytest.raises(ValueError, match=f"fact precision must be fp32, tf32, bf16 or fp16, or .*, got '?{wrong}"):
            checked_facts({"precision": wrong})
    assert Facts.of({"precision": "torch.float16"}).precision == "fp16"  # an adapter's
    assert Facts.of({"precision": "single"}).precision is None
    with pytest.raises(ValueError, match=r"precision must be fp32, .*, got 'single'"):
        check_total_loss(1.0, 1.0, 0.0, value_coef=0.5, precision="single")


def test_every_declared_fact_has_a_form_in_the_journal() -> None:
    assert FACTS.keys() == DECLARED.keys()


def test_a_decay_of_weights_is_a_fact_of_the_optimizer() -> None:
    weights = torch.nn.Linear(2, 1).parameters()
    groups = [{"params": [parameter], "weight_decay": decay} for parameter, decay in zip(weights, (0.1, 0.0), strict=True)]

    assert optimizer_facts(torch.optim.Adam(groups)) == {"optimizer": "Adam", "weight_decay": 0.1}
    assert optimizer_facts(torch.optim.SGD([{"params": groups[0]["params"]}], lr=0.1)) == {"optimizer": "SGD"}
