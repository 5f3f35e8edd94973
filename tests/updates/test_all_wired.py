"""Every declared metric of gradients, optimizer and costs is reported at its level by a real run; `test_every_key.py` shows DEBUG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run, watch_pair
from esper_telemetry.core.catalogue import catalogue
from esper_telemetry.core.record import Level, template_of
from esper_telemetry.ppo.environments import CueRecall
from esper_telemetry.testing import MemorySink

FAMILIES = ("grad/", "opt/", "perf/", "telemetry/", "train/", "loss/")
ELSEWHERE = {"telemetry/escalation_remaining", "perf/memory/device_mib", "perf/memory/device_frac"}
"""There only where alarms are raised, and where a policy is on a GPU."""


def keys_of(run_dir: Path, source: PPO, *, level: str, updates: int = 5) -> set[str]:
    """Keys, as their templates, of a run with a watched head."""
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
    """A shared trunk with memory and several heads, and separate networks."""
    common: dict[str, Any] = {"num_steps": 32, "num_epochs": 2, "num_minibatches": 2, "entropy_coef": 0.01}
    recall = PPOConfig(policy="lstm", lstm_size=8, hidden_sizes=(8,), shared_trunk=True, **common)
    plain = PPOConfig(hidden_sizes=(8,), **common)
    return [PPO(CueRecall(8, seed=0), recall), PPO(make_env("CartPole-v1", num_envs=4), plain)]


def declared(level: Level) -> set[str]:
    """Keys of these families that must be there: all but counters of events that did not happen."""
    return {
        metric.key
        for metric in catalogue()
        if metric.key.startswith(FAMILIES) and metric.level <= level and not metric.when_positive
    } - ELSEWHERE


def test_normal_reports_what_belongs_to_it_and_nothing_else(tmp_path: Path) -> None:
    """Two of nine updates are sampled: two estimates of the signal may both be negative, and a correlation needs twenty."""
    keys = {key for i, s in enumerate(sources()) for key in keys_of(tmp_path / str(i), s, level="normal", updates=9)}

    assert declared(Level.NORMAL) - keys <= {"grad/gns/b_simple", "opt/update_to_weight/lr_response"}
    assert not keys & (declared(Level.DEBUG) - declared(Level.NORMAL))


def test_minimal_reports_the_headlines(tmp_path: Path) -> None:
    (recall, _) = sources()

    keys = keys_of(tmp_path, recall, level="minimal", updates=2)

    assert {key for key in keys if key.startswith(FAMILIES)} == declared(Level.MINIMAL)
