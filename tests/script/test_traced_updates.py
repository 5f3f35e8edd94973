"""Scripts of which only some updates are traced."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from test_script_runs import SCRIPTS, python

from esper_telemetry import read_run
from esper_telemetry.adapters.script.observed_steps import step_parts
from esper_telemetry.adapters.script.script_episodes import EpisodeLog
from esper_telemetry.adapters.script.traced_updates import ALL_TRACED, MAX_PERIOD, TracedUpdates

RUN = """
import sys
from esper_telemetry.__main__ import main
from esper_telemetry.adapters.script import traced_updates
period, script, *arguments = sys.argv[1:]
traced_updates.ALL_TRACED = 2
traced_updates.TracedUpdates._period = lambda self: int(period)
sys.argv = ["esper-telemetry", "run", "--run-dir", f"run{period}", script, *arguments]
main()
"""
COMPARED = (
    "policy/kl",
    "policy/entropy",
    "loss/value",
    "adv/raw/std",
    "integrity/gae_identity",
    "integrity/ratio_init",
    "value/explained_variance",
)


@pytest.mark.parametrize(
    ("script", "updates"),
    [("lstm.py --total-timesteps 2560", 10), ("tensor_environment.py", 12)],
)
@pytest.mark.system
def test_traced_updates_have_the_same_numbers_and_the_others_are_counted(tmp_path: Path, script: str, updates: int) -> None:
    (tmp_path / "traced.py").write_text(RUN)
    name, *arguments = script.split()
    done = [python(tmp_path, "traced.py", period, str(SCRIPTS / name), *arguments) for period in ("1", "4")]
    assert [one.code for one in done] == [0, 0]
    assert done[0].stdout == done[1].stdout
    whole, some = (read_run(tmp_path / f"run{period}").records for period in ("1", "4"))
    assert len(whole) == len(some) == updates
    for all_values, record in zip(whole, some, strict=True):
        values, traced = record.values, record.axes.update in (1, 2, 6, 10)
        assert replace(record.axes, wall_time=0) == replace(all_values.axes, wall_time=0)
        assert values.get("telemetry/unmeasured", 0) == (not traced)
        assert values.get("episode/return_mean") == all_values.values.get("episode/return_mean")
        assert values["opt/lr"] == all_values.values["opt/lr"]
        found = {key: values.get(key) for key in COMPARED}
        assert found == ({key: all_values.values.get(key) for key in COMPARED} if traced else dict.fromkeys(COMPARED))


def traced(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float], count: int, *, raised: int = 0, every_one: bool = False
) -> list[int]:
    """Return the traced updates, if others take the first of these times, and traced ones the second."""
    now = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    chosen, found = TracedUpdates(every_one=every_one), []
    for update in range(1, count + 1):
        found += [update] if chosen.includes_this else []
        now[0] += seconds[chosen.includes_this]
        chosen.end_update(raised=update == raised)
    return found


def test_costly_updates_become_rarer_with_the_length_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = traced(monkeypatch, (1.0, 3.0), 1000)
    assert found[:ALL_TRACED] == list(range(1, ALL_TRACED + 1))
    periods = [later - one for one, later in zip(found[ALL_TRACED:], found[ALL_TRACED + 1 :], strict=False)]
    assert periods == sorted(periods)
    assert periods[-1] == MAX_PERIOD
    assert len(found) < 110


def test_cheap_updates_are_traced_except_one_that_shows_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(traced(monkeypatch, (1.0, 1.05), 200)) == 199
    assert len(traced(monkeypatch, (1.0, 1.25), 200)) < 90


def test_an_alarm_asks_for_traces_from_the_next_whole_rollout_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rare = traced(monkeypatch, (1.0, 9.0), 300)
    assert not {200, 201, 202} & {*rare}
    assert 202 in traced(monkeypatch, (1.0, 9.0), 300, raised=200)


def test_debug_traces_every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    assert traced(monkeypatch, (1.0, 9.0), 50, every_one=True) == list(range(1, 51))


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("mode", [gymnasium.vector.AutoresetMode.NEXT_STEP, gymnasium.vector.AutoresetMode.SAME_STEP])
def test_counted_steps_give_the_episodes_of_recorded_ones(num_envs: int | None, mode: gymnasium.vector.AutoresetMode) -> None:
    def single() -> Any:
        return gymnasium.make("CartPole-v1", max_episode_steps=13)

    env: Any = single() if num_envs is None else gymnasium.vector.SyncVectorEnv([single] * num_envs, autoreset_mode=mode)
    counting, recording = EpisodeLog(), EpisodeLog()
    env.action_space.seed(0)
    for log in (counting, recording):
        log.sums_inner = False
        assert log.includes(env)
    env.reset(seed=0)
    counted = 0
    for _ in range(200):
        action = env.action_space.sample()
        result = env.step(action)
        fast = counting.counts(env, result)
        counted += fast
        parts = step_parts(result)
        assert parts is not None
        if not fast:
            counting.after_step(env, parts, action, traced=False)
        recording.after_step(env, parts, action, traced=False)
        if num_envs is None and any(result[2:4]):
            observation = env.reset()
            for log in (counting, recording):
                log.reset(env, observation)

    assert counted > 100
    assert (counting.steps, counting.hidden) == (recording.steps, recording.hidden)
    episodes = counting.take()[0]
    assert episodes == recording.take()[0]
    assert len(episodes) > 10
