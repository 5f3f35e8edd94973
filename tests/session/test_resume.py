"""Resuming a run: the journal holds each update once, derived metrics keep their history, and two processes never train one run."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from forked import run_python

from esper_telemetry import PPO, PPOConfig, RunStatus, Telemetry, attach, make_env, read_run
from esper_telemetry.events import MinibatchEnd, UpdateEnd
from esper_telemetry.journal.lock import HELPER_ROLES, Role, TrainerLock, await_release, is_held, lock_for
from esper_telemetry.journal.read import read_contents
from esper_telemetry.ppo import Checkpoints
from esper_telemetry.telemetry import session_of
from esper_telemetry.testing import MemorySink

TIMED = ("perf/", "train/env_steps_per_second", "telemetry/")
ROLLOUT = 128


def flush(telemetry: Telemetry, *numbers: float, start: int = 0) -> None:
    """Flush one record per number; each is 100 environment steps after the previous one."""
    for index, number in enumerate(numbers, start=start + 1):
        telemetry.log({"my/number": number})
        telemetry.flush(env_step=100 * index)


def numbers(run_dir: Path) -> list[tuple[int, float]]:
    return [(record.axes.update, record.values["my/number"]) for record in read_run(run_dir).records]


def begun(run_dir: Path) -> dict[str, int]:
    """Write a run of four updates; return the state after the second."""
    with Telemetry(run_dir=run_dir, name="walker", tags=["demo"], config={"clip": 0.2, "steps": 4}) as telemetry:
        flush(telemetry, 1.0, 2.0)
        state = telemetry.state_dict()
        flush(telemetry, 3.0, 4.0, start=2)
    return state


def test_the_first_record_of_an_update_stands(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training continues after update 2 with other numbers: 3 and 4 are already recorded, 5 is new."""
    state = begun(tmp_path)
    memory = MemorySink()

    with Telemetry([memory], run_dir=tmp_path, resume=True) as telemetry:
        telemetry.load_state_dict(state)
        flush(telemetry, 30.0, 40.0, 50.0, start=2)

    assert numbers(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0)]
    assert [record.values["my/number"] for record in memory.records] == [1.0, 2.0, 3.0, 4.0, 50.0]
    assert memory.statuses == [RunStatus.FINISHED]
    (warning,) = caplog.messages
    assert "continues after update 2" in warning and "updates 3 to 4 are trained again and not recorded" in warning


def test_updates_that_are_not_recorded_again_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The repeated update 3 is not finite, unlike the recorded one: sinks do not show it, so a warning and the end do."""
    alarms: list[int] = []
    state = begun(tmp_path)
    before = (tmp_path / "journal.jsonl").read_text().count('"kind":"alarm"')

    with Telemetry("console", run_dir=tmp_path, resume=True) as telemetry:
        telemetry.on_alarm(lambda alarm: alarms.append(alarm.axes.update))
        telemetry.load_state_dict(state)
        telemetry.log({"loss/value": float("nan")})
        telemetry.flush(env_step=300)
        assert alarms == [3] and telemetry.should_stop()

    assert numbers(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert (tmp_path / "journal.jsonl").read_text().count('"kind":"alarm"') == before == 0
    assert "1 update was trained again and not recorded; their alarms: numerics/nonfinite in update 3." in capsys.readouterr().out
    assert read_run(tmp_path).events[-1].data["text"].endswith("their alarms: numerics/nonfinite in update 3")


def test_without_a_state_updates_are_told_by_their_steps(tmp_path: Path) -> None:
    """A loop that restores only its own counters."""
    begun(tmp_path)

    with Telemetry(run_dir=tmp_path, resume=True) as telemetry:
        flush(telemetry, 30.0, 40.0, 50.0, 60.0, start=2)

    assert numbers(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0), (6, 60.0)]


def test_the_run_stays_the_same_run(tmp_path: Path) -> None:
    state = begun(tmp_path)
    before = read_run(tmp_path).info

    with Telemetry(run_dir=tmp_path, config={"steps": 8}, resume=True) as telemetry:
        telemetry.load_state_dict(state)
        flush(telemetry, 3.0, start=2)

    after = read_run(tmp_path).info
    assert (after.run_id, after.name, after.started, after.tags) == (before.run_id, "walker", before.started, ("demo",))
    assert after.config == {"clip": 0.2, "steps": 8}
    assert after.resumed_from == {"update": 2, "env_step": 200, "gradient_step": 0, "recorded": 4, "seq": 5}
    assert before.resumed_from is None


def test_a_sink_takes_up_where_it_stopped_and_is_opened_as_the_run_is_now(tmp_path: Path) -> None:
    memories = [MemorySink(), MemorySink()]
    with Telemetry([memories[0]], run_dir=tmp_path, config={"steps": 4}) as telemetry:
        flush(telemetry, 1.0, 2.0)

    with Telemetry([memories[1]], run_dir=tmp_path, config={"steps": 8}, resume=True) as telemetry:
        flush(telemetry, 3.0, start=2)
        report = telemetry.close()

    assert [record.axes.update for record in memories[1].records] == [3]
    assert [run.config["steps"] for run in memories[1].runs] == [8]
    assert report is not None and report.complete
    assert [sink.sent for sink in report.sinks] == [3]


def test_a_killed_run_without_an_end_gets_one_before_it_goes_on(tmp_path: Path) -> None:
    script = (
        "import os, sys; from esper_telemetry import Telemetry\n"
        "telemetry = Telemetry(run_dir=sys.argv[1]); telemetry.flush(env_step=1); os._exit(9)"
    )
    run_python("-c", script, tmp_path)
    assert read_contents(tmp_path).status is None

    Telemetry(run_dir=tmp_path, resume=True).close()

    kinds = [line.split('"')[3] for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert kinds == ["run", "event", "record", "end", "run", "end"]


def test_a_run_that_is_still_trained_is_left_alone(tmp_path: Path) -> None:
    with Telemetry(run_dir=tmp_path) as telemetry:
        session_of(telemetry).start()
        before = (tmp_path / "journal.jsonl").read_bytes()
        with pytest.raises(BlockingIOError, match=f"{tmp_path} is still being trained"):
            Telemetry(run_dir=tmp_path, resume=True)
        assert (tmp_path / "journal.jsonl").read_bytes() == before
        assert is_held(tmp_path, Role.TRAINER)

    Telemetry(run_dir=tmp_path, resume=True).close()


@pytest.mark.parametrize("helper", HELPER_ROLES)
def test_helpers_of_a_killed_run_are_waited_for(tmp_path: Path, helper: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path)
    monkeypatch.setattr("esper_telemetry.pipeline.run_recorder.MAX_HELPER_SECONDS", 0.1)
    lock = lock_for(tmp_path, helper)
    with pytest.raises(BlockingIOError, match="still delivers records from before the run stopped"):
        Telemetry(run_dir=tmp_path, resume=True)
    os.close(lock)

    Telemetry(run_dir=tmp_path, resume=True).close()


def test_a_forked_worker_that_outlives_the_trainer_does_not_hold_the_run(tmp_path: Path) -> None:
    lock = TrainerLock(tmp_path)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        lock.close()
        assert await_release(tmp_path, Role.TRAINER, 10.0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("run_dir", ["auto", None])
def test_resume_needs_a_directory(run_dir: Any) -> None:
    with pytest.raises(ValueError, match="resume needs the directory of the run to continue"):
        Telemetry(run_dir=run_dir, resume=True)


@pytest.mark.system
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: no worker")
def test_a_checkpoint_waits_until_the_journal_has_all_before_it(tmp_path: Path) -> None:
    """So the journal stays complete if any process, including the worker, dies after the checkpoint."""
    counts = []
    with Telemetry(run_dir=tmp_path) as telemetry:
        source = trainer()
        attach(telemetry, source)

        def save(event: UpdateEnd) -> None:
            source.save(tmp_path / "latest.pt")
            counts.append((tmp_path / "journal.jsonl").read_text().count('{"kind":"record"'))

        source.hooks.on(UpdateEnd, save, last=True)
        source.learn(6 * ROLLOUT)

    assert counts == list(range(1, source.updates + 1))


def test_what_holds_no_run_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"it holds no journal\.jsonl"):
        Telemetry(run_dir=tmp_path, resume=True)
    (tmp_path / "journal.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="has no line that describes the run"):
        Telemetry(run_dir=tmp_path, resume=True)

    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("left", ["", '{"kind":"run","schema":1,"run_id":"a'])
def test_a_trainer_that_was_killed_before_its_first_line_was_whole_has_left_no_run(tmp_path: Path, left: str, resume: bool) -> None:
    (tmp_path / "journal.jsonl").write_text(left)
    with Telemetry(run_dir=tmp_path, resume=resume) as telemetry:
        telemetry.log({"my/number": 1.0})
        telemetry.flush(env_step=1)

    run = read_run(tmp_path)
    assert [record.values["my/number"] for record in run.records] == [1.0]
    assert not run.damaged


def trainer(**settings: Any) -> PPO:
    config = PPOConfig(num_steps=32, num_epochs=2, num_minibatches=2, **settings)
    return PPO(make_env("CartPole-v1", num_envs=4), config)


def values(run_dir: Path) -> list[dict[str, float]]:
    """Return the values of every record, without values that depend on the clock or on backends."""
    return [{key: value for key, value in record.values.items() if not key.startswith(TIMED)} for record in read_run(run_dir).records]


@pytest.mark.system
@pytest.mark.parametrize(
    ("settings", "offload"), [({}, False), pytest.param({"policy": "lstm", "normalize_observations": True}, True, marks=pytest.mark.slow)]
)
def test_measures_that_need_history_go_on_with_a_checkpoint(tmp_path: Path, settings: dict[str, Any], offload: bool) -> None:
    """Saved around update 20, when windows of 20 updates are full, and trained to 26: the last updates are trained twice.

    Below DEBUG, the choice of sampled updates depends on their cost, so on time.
    """

    def train(name: str, *, until: int = 30, resume: bool = False) -> None:
        with Telemetry(run_dir=tmp_path / name, offload=offload, level="debug", resume=resume) as telemetry:
            source = trainer(**settings)
            checkpoints = Checkpoints(source, tmp_path / f"{name} {until}", every=20 * ROLLOUT)
            if resume:
                source.load(tmp_path / f"{name} 26" / checkpoints.latest.name)
            attach(telemetry, source)

            def wait(event: UpdateEnd) -> None:
                """Let every update wait for its record: on a busy machine a worker may fall behind updates this small."""
                telemetry.state_dict()

            source.hooks.on(UpdateEnd, wait, last=True)
            source.hooks.on(UpdateEnd, lambda event: source.stop() if event.update == until else None)
            source.learn(30 * ROLLOUT)

    train("whole")
    train("cut", until=26)
    train("cut", resume=True)

    resumed_from = read_run(tmp_path / "cut").info.resumed_from
    assert resumed_from is not None and 20 <= resumed_from["update"] < resumed_from["recorded"] == 26
    assert values(tmp_path / "cut") == values(tmp_path / "whole")
    assert "episode/return_mean_100" in values(tmp_path / "cut")[-1]


@pytest.mark.usefixtures("one_core")
def test_what_a_crash_cut_short_stands_and_is_trained_again(tmp_path: Path) -> None:
    """The third update raises in its second minibatch, so its record is partial; only the second is saved."""
    with pytest.raises(RuntimeError, match="out of luck"), Telemetry(run_dir=tmp_path) as telemetry:
        crashing = trainer()
        checkpoints = Checkpoints(crashing, tmp_path, every=ROLLOUT)
        attach(telemetry, crashing)
        crashing.hooks.on(MinibatchEnd, lambda event: fail() if crashing.updates == 3 and event.step == 1 else None)
        crashing.learn(30 * ROLLOUT)
    assert [record.partial for record in read_run(tmp_path).records] == [False, False, True]

    with Telemetry(run_dir=tmp_path, resume=True) as telemetry:
        resumed = trainer()
        attach(telemetry, resumed)
        resumed.load(checkpoints.latest)
        assert resumed.updates == 2
        resumed.learn(5 * ROLLOUT)

    run = read_run(tmp_path)
    assert [record.axes.update for record in run.records] == list(range(1, resumed.updates + 1))
    assert [record.axes.update for record in run.records if record.partial] == [3]
    assert [event.type for event in run.events if event.type not in ("outcome", "environments")] == ["failure"]
    assert next(event.data["outcome"] for event in run.events if event.type == "outcome") == "failed"
    assert run.status is RunStatus.FINISHED


def fail() -> None:
    raise RuntimeError("out of luck")


@pytest.mark.usefixtures("one_core")
def test_a_new_run_may_begin_with_an_old_checkpoint(tmp_path: Path) -> None:
    """The first update after a resume does not count the steps of the earlier run."""
    old = trainer()
    old.learn(3 * ROLLOUT)
    old.save(tmp_path / "old.pt")

    with Telemetry(run_dir=tmp_path / "new") as telemetry:
        new = trainer()
        attach(telemetry, new)
        new.load(tmp_path / "old.pt")
        new.learn(old.env_steps + 1)

    run = read_run(tmp_path / "new")
    assert [record.axes.update for record in run.records] == [old.updates + 1]
    assert run.info.resumed_from is None
    perf = run.records[0].values
    assert (
        perf["train/env_steps_per_second"] * 0.001 * sum(perf[f"perf/{part}_ms"] for part in ("environment", "inference", "update"))
        < 2 * ROLLOUT
    )
