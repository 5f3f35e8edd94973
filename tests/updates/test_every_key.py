"""A real run reports every key of the catalogue and no other: every declaration is used.

`ELSEWHERE` names every key that does not apply to these three runs, with the reason.
"""

import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run, watch_pair
from esper_telemetry.core.metric import catalogue, declared, groups
from esper_telemetry.core.record import template_of
from esper_telemetry.testing import MemorySink
from esper_telemetry.views.metrics_page import emitter

LATER = "needs 50 updates: tests/history/test_temporal.py"
ON_A_DEVICE = "needs a policy on a GPU"
ELSEWHERE = {
    "{key}/cusum": LATER,
    "alarm/{key}": "needs an alarm: tests/alarms/test_detectors.py",
    "policy/action_effect": "needs 128 steps of one rollout within episodes: tests/equations/test_effects.py",
    "loss/penalty_coef": "needs a penalty on the KL divergence: tests/script/test_loss_graph.py",
    "opt/lr/{group}": "needs parameter groups with different rates: tests/updates/test_all_wired.py",
    "perf/memory/device_mib": ON_A_DEVICE,
    "perf/memory/device_frac": ON_A_DEVICE,
    "integrity/equation_tolerance/{equation}": "needs an equation with a separate tolerance: tests/equations/test_equations.py",
    "integrity/fitted/{equation}": "needs a wrong equation with a fitted parameter: tests/equations/test_equations.py",
}
"""Keys that no run here can report, and why."""

PARTIAL = {"AdamMemory", "LearningRate", "NormalizerClipping", "SamplingPeriod"}
"""Groups that `updates.groups.measure` yields as a `partial`, which is called after it returns."""

KEYS = {metric.key: metric for metric in catalogue()}
LANGUAGE = {key for key, metric in KEYS.items() if key.startswith("lm/") and not metric.when_positive}
"""Keys of language models: tests/metrics/test_language.py."""


def measured(run_dir: Path, env: str, *, num_steps: int, **settings: Any) -> set[str]:
    """Return the keys of a short run at DEBUG: values and histograms of all its records."""
    config = PPOConfig(num_steps=num_steps, num_epochs=2, num_minibatches=2, hidden_sizes=(8,), **settings)
    with Telemetry([MemorySink()], run_dir=run_dir, offload=False, level="debug") as telemetry:
        trainer = PPO(make_env(env, num_envs=4, seed=0), config)
        attach(telemetry, trainer)
        watch_pair(telemetry, trainer, "critic", module=trainer.policy.value, host=trainer.policy.actor)
        trainer.learn(10 * 4 * num_steps)
        trainer.evaluate(make_env(env, num_envs=1, seed=1))
        trainer.learn(22 * 4 * num_steps)
    records = read_run(run_dir).records
    return {key for record in records for key in {**record.values, **record.histograms}}


@pytest.fixture(scope="module")
def callers() -> Iterator[dict[type, set[str]]]:
    """Functions on the call stack when groups were created, by group type."""
    running: dict[type, set[str]] = defaultdict(set)

    def watched(group: type, make: Callable[..., None]) -> Callable[..., None]:
        def init(self: object, *arguments: Any, **named: Any) -> None:
            for frame, _ in traceback.walk_stack(sys._getframe(1)):
                running[group].add(f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}")
            make(self, *arguments, **named)

        return init

    with pytest.MonkeyPatch.context() as patch:
        for group in groups():
            patch.setattr(group, "__init__", watched(group, vars(group)["__init__"]))
        yield running


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory, callers: dict[type, set[str]]) -> set[str]:
    """Keys of a policy with memory and several heads, a policy that grows networks, and a continuous one with a shared trunk."""
    directory = tmp_path_factory.mktemp("runs")
    recall = measured(
        directory / "recall",
        "cue-recall",
        num_steps=5,  # the time limit is two rollouts
        policy="lstm",
        lstm_size=8,
        encoder_sizes=(8,),
        learning_rate=0.03,
        entropy_coef=0.01,
        clip=0.05,
        clip_value=0.2,
        normalize_observations=True,
        normalize_rewards=True,
    )
    pendulum = measured(directory / "pendulum", "Pendulum-v1", num_steps=10, shared_trunk=True)  # past the limit of 200
    grown = measured(directory / "growth", "morphogenesis", num_steps=8)
    return recall | pendulum | grown


@pytest.mark.system
def test_everything_that_is_emitted_is_registered(emitted: set[str]) -> None:
    assert {key for key in emitted if template_of(key, KEYS) not in KEYS} == set()


@pytest.mark.system
def test_everything_that_is_registered_is_emitted_or_has_a_reason(emitted: set[str]) -> None:
    templates = {template_of(key, KEYS) for key in emitted}
    expected = {key for key, metric in KEYS.items() if not metric.when_positive}  # other tests break the data for those

    assert expected - templates == set(ELSEWHERE) | LANGUAGE


@pytest.mark.system
def test_the_registry_names_the_function_that_makes_a_metric(emitted: set[str], callers: dict[type, set[str]]) -> None:
    """One of the functions that an entry names was on the call stack when the group was created."""
    made = {group: emitter(next(metric.key for _, metric in declared(group))).functions for group in callers}

    assert {group.__name__ for group, names in made.items() if callers[group].isdisjoint(names)} == PARTIAL
    assert len(made) > 100
