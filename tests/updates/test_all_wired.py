"""A real run reports every declared metric of gradients, optimizer and costs at its level; `test_every_key.py` checks DEBUG."""

from pathlib import Path
from typing import Any

import pytest
import torch

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run, watch_pair
from esper_telemetry.core.metric import catalogue
from esper_telemetry.core.record import Level, template_of
from esper_telemetry.events import RolloutEnd
from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.testing import MemorySink

FAMILIES = ("grad/", "opt/", "perf/", "telemetry/", "train/", "loss/")
ELSEWHERE = {"telemetry/escalation_remaining", "perf/memory/device_mib", "perf/memory/device_frac"}
"""Present only if alarms are raised or a policy is on a GPU."""


def keys_of(run_dir: Path, source: PPO, *, level: str, updates: int = 5) -> set[str]:
    """Return the keys, as templates, of a run with a watched head."""
    with Telemetry([MemorySink()], run_dir=run_dir, detect=False, offload=False, level=level) as telemetry:
        attach(telemetry, source)
        head = next(iter(source.policy.heads.values()))
        watch_pair(telemetry, source, "head", module=head, host=source.policy.actor)
        while source.updates < updates:
            source.learn(source.env_steps + 1)
    templates = {metric.key: metric for metric in catalogue()}
    records = read_run(run_dir).records
    keys = {key for record in records for key in (*record.values, *record.histograms)}
    return {key if key in templates else template_of(key, templates) for key in keys}


def sources() -> list[PPO]:
    """Return a trainer with a shared trunk, memory and several heads, and one with separate networks, whose critic's rate is doubled."""
    common: dict[str, Any] = {"num_steps": 32, "num_epochs": 2, "num_minibatches": 2, "entropy_coef": 0.01}
    common["anneal_learning_rate"] = False
    recall = PPOConfig(policy="lstm", lstm_size=8, hidden_sizes=(8,), shared_trunk=True, **common)
    plain = PPOConfig(hidden_sizes=(8,), **common)
    apart = PPO(make_env("CartPole-v1", num_envs=4), plain)
    groups = apart.policy.groups()
    parts = [{"params": [apart.parameters[name] for name in groups[part]]} for part in ("actor", "critic")]
    apart.optimizer = torch.optim.Adam(parts, lr=1e-3)
    apart.hooks.on(RolloutEnd, lambda _: apart.optimizer.param_groups[1].update(lr=2 * plain.learning_rate))
    return [PPO(CueRecall(8, seed=0), recall), apart]


def declared(level: Level) -> set[str]:
    """Return the keys of these families that must be reported: all except counters of events that did not happen."""
    return {
        metric.key for metric in catalogue() if metric.key.startswith(FAMILIES) and metric.level <= level and not metric.when_positive
    } - ELSEWHERE


@pytest.mark.system
def test_normal_reports_what_belongs_to_it_and_nothing_else(tmp_path: Path) -> None:
    """Two of nine updates are sampled. Two estimates of the signal may both be negative, a correlation needs twenty, and the loss has no
    penalty on the KL divergence.
    """
    keys = {key for i, s in enumerate(sources()) for key in keys_of(tmp_path / str(i), s, level="normal", updates=9)}

    assert declared(Level.NORMAL) - keys <= {"grad/gns/b_simple", "loss/penalty_coef", "opt/update_to_weight/lr_response"}
    assert not keys & (declared(Level.DEBUG) - declared(Level.NORMAL))


@pytest.mark.system
def test_the_rates_of_two_parameter_groups_are_theirs(tmp_path: Path) -> None:
    """The trainer sets one rate for all, then a hook doubles the critic's. `opt/lr` is the first group's."""
    _, apart = sources()
    with Telemetry(run_dir=tmp_path, detect=False, offload=True) as telemetry:
        attach(telemetry, apart)
        apart.learn(200)

    rate = apart.config.learning_rate
    expected = {"opt/lr": rate, "opt/lr/actor": rate, "opt/lr/critic": 2 * rate}
    for record in read_run(tmp_path).records:
        assert {key: value for key, value in record.values.items() if key.startswith("opt/lr")} == expected


def test_minimal_reports_the_headlines(tmp_path: Path) -> None:
    (recall, _) = sources()

    keys = keys_of(tmp_path, recall, level="minimal", updates=2)

    assert {key for key in keys if key.startswith(FAMILIES)} == declared(Level.MINIMAL)
