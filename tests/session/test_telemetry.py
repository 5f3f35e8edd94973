"""Telemetry: each flush makes one record of the observed groups, even after errors."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from forked import run_python

from esper_telemetry import (
    Level,
    Max,
    Mean,
    Metric,
    MetricGroup,
    RunStatus,
    Telemetry,
    gradient_health,
    ratio_diagnostics,
    read_run,
    reports,
)
from esper_telemetry.metrics.gradients import gradient_health as health
from esper_telemetry.metrics.gradients.norms import gradient_norms
from esper_telemetry.telemetry import session_of
from esper_telemetry.testing import MemorySink
from esper_telemetry.updates.failure import Candidate
from esper_telemetry.updates.update import Update


@dataclass(frozen=True, slots=True)
class Curiosity(MetricGroup):
    bonus: Mean | torch.Tensor | None = reports(
        Metric(key="curiosity/bonus", unit="reward", question="How much does novelty pay?"),
        Metric(key="curiosity/bonus_max", unit="reward", question="At most?", over="max"),
    )
    peak: Max | None = reports(Metric(key="curiosity/peak", unit="reward", question="The largest?", level=Level.DEBUG))


def values_of(run_dir: Path, update: int = -1) -> dict[str, float]:
    return dict(read_run(run_dir).records[update].values)


def test_observed_groups_and_logged_numbers_become_one_record(tmp_path: Path, telemetry: Telemetry) -> None:
    telemetry.observe(Curiosity(bonus=torch.tensor(1.0)))
    telemetry.observe(Curiosity(bonus=torch.tensor(3.0)))
    telemetry.log({"my/schedule": 0.3})
    telemetry.flush(env_step=64)

    run = read_run(tmp_path / "run")
    record = run.records[0]
    assert len(run.records) == 1
    assert [record.values[key] for key in ("curiosity/bonus", "curiosity/bonus_max", "my/schedule")] == [2.0, 3.0, 0.3]
    assert (record.axes.update, record.axes.env_step, record.axes.gradient_step) == (1, 64, 2)
    info = run.info.describe("curiosity/bonus")
    assert info is not None and info.question == "How much does novelty pay?"


def test_without_a_directory_everything_stays_in_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    memory = MemorySink()
    with Telemetry([memory], run_dir=None) as telemetry:
        telemetry.log({"a/b": 1.0})
        telemetry.flush(env_step=1)

    assert [record.values["a/b"] for record in memory.records] == [1.0]
    assert list(tmp_path.iterdir()) == []


def test_two_telemetries_live_side_by_side(tmp_path: Path) -> None:
    with Telemetry(run_dir=tmp_path / "a") as a, Telemetry(run_dir=tmp_path / "b") as b:
        a.log({"x/y": 1.0})
        b.log({"x/y": 2.0})
        b.flush(env_step=1)
        a.flush(env_step=1)

    assert [values_of(tmp_path / name)["x/y"] for name in "ab"] == [1.0, 2.0]


def test_a_level_leaves_out_what_lies_above_it(tmp_path: Path) -> None:
    group = Curiosity(bonus=torch.tensor(1.0), peak=Max(torch.tensor(2.0)))
    for level in ("normal", "DEBUG"):
        with Telemetry(run_dir=tmp_path / level, level=level) as telemetry:
            telemetry.observe(group)
            telemetry.flush(env_step=1)

    assert "curiosity/peak" not in values_of(tmp_path / "normal")
    assert values_of(tmp_path / "DEBUG")["curiosity/peak"] == 2.0


def test_off_does_and_leaves_nothing(tmp_path: Path) -> None:
    with Telemetry(["no such sink"], run_dir=tmp_path / "run", level="off") as telemetry:
        telemetry.observe(Curiosity(bonus=torch.tensor(1.0)))
        telemetry.flush(env_step=1)

    assert list(tmp_path.iterdir()) == []


def test_step_overrides_the_count_under_gradient_accumulation(tmp_path: Path, telemetry: Telemetry) -> None:
    for micro_batch in range(4):
        telemetry.observe(Curiosity(bonus=torch.tensor(1.0)), step=micro_batch // 2)
    telemetry.flush(env_step=1)

    assert read_run(tmp_path / "run").records[0].axes.gradient_step == 2


def test_health_of_every_minibatch_counts_once_and_belongs_to_its_epoch(tmp_path: Path, telemetry: Telemetry) -> None:
    """Gradients (3, 4), (6, 8) and (0, 0), which are overwritten later: norms 5, 10 and 0. A limit of 5.1 clips one of them."""
    weight = torch.nn.Parameter(torch.zeros(2))
    for epoch, gradient in enumerate(([3.0, 4.0], [6.0, 8.0], [0.0, 0.0])):
        weight.grad = torch.tensor(gradient)
        telemetry.observe(gradient_health({"w": weight}, groups={"actor": ["w"]}, max_norm=5.1), epoch=epoch)
        weight.grad.fill_(99.0)
    telemetry.flush(env_step=64)

    record = read_run(tmp_path / "run").records[0]
    assert record.axes.gradient_step == 3
    assert record.values["grad/global/norm_preclip"] == record.values["grad/actor/norm_preclip"] == 5.0
    assert record.values["grad/layer/w/norm"] == 5.0
    assert record.values["grad/global/norm_preclip_max"] == 10.0
    assert record.values["grad/clip/freq"] == pytest.approx(1 / 3)


def test_health_is_summarised_once_per_update(tmp_path: Path, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing the norms twice would cost ten times a minibatch of a small network."""
    rows: list[int] = []

    def counted(norms: torch.Tensor, *args: object, **kwargs: object) -> object:
        rows.append(len(norms))
        return gradient_norms(norms, *args, **kwargs)  # type: ignore[arg-type]  # the arguments of the call

    monkeypatch.setattr(health, "gradient_norms", counted)
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    for update in range(2):
        for _ in range(16):
            telemetry.observe(gradient_health([weight]))
        telemetry.flush(env_step=update)

    assert rows == [16, 16]


def test_health_of_gradients_that_break_is_counted_in_its_minibatch(tmp_path: Path, telemetry: Telemetry) -> None:
    """Gradients 5, (NaN, 4) and 5, whose finite entries count: norms 5, 4 and 5, and one entry that is not finite."""
    weight = torch.nn.Parameter(torch.zeros(2))
    for gradient in ([3.0, 4.0], [math.nan, 4.0], [3.0, 4.0]):
        weight.grad = torch.tensor(gradient)
        telemetry.observe(gradient_health({"w": weight}, max_norm=1.0))
    telemetry.flush(env_step=64)

    values = values_of(tmp_path / "run")
    assert values["grad/global/norm_preclip"] == pytest.approx(14 / 3)
    assert values["grad/global/norm_preclip_nonfinite"] == 1.0
    assert values["grad/clip/coef"] == pytest.approx(0.2)


def test_health_of_parts_that_differ_is_told_apart(tmp_path: Path, telemetry: Telemetry) -> None:
    """Norms 4 and |(4, 3)| = 5 in two minibatches. The second parameter is frozen in the first, so it counts only once."""
    parameters = {name: torch.nn.Parameter(torch.zeros(1)) for name in ("trained", "frozen")}
    for name, gradient in (("trained", 4.0), ("frozen", 3.0)):
        parameters[name].grad = torch.full((1,), gradient)
        telemetry.observe(gradient_health(parameters))
    telemetry.flush(env_step=64)

    values = values_of(tmp_path / "run")
    assert values["grad/global/norm_preclip"] == 4.5
    assert values["grad/layer/frozen/norm"] == 3.0


def test_a_limit_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="max_norm must be positive, got 0"):
        gradient_health([], max_norm=0.0)


@pytest.mark.system
def test_an_exception_flushes_what_is_open_and_ends_the_run_as_failed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"), Telemetry(run_dir=tmp_path / "run") as telemetry:
        tensors = [Candidate("weights", torch.ones(2)), Candidate("rewards", torch.tensor([[0.0, math.nan]]), 1)]
        session_of(telemetry).expect_updates(candidates=lambda: tensors, open_update=Update)
        telemetry.log({"a/b": 1.0})
        raise RuntimeError("boom")

    run = read_run(tmp_path / "run")
    failure = next(event for event in run.events if event.type == "failure")
    assert run.records[-1].partial
    assert run.status is RunStatus.FAILED
    assert failure.data["first_nonfinite"] == "rewards[0, 1] = nan"
    assert failure.data["nonfinite"] == {"tensor": "rewards", "count": 1, "size": 2, "environments": [1]}
    assert [alarm.type for alarm in run.alarms] == ["numerics/nonfinite", "run/failed"]


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), "interrupted"), (SystemExit(0), "finished"), (SystemExit(3), "failed")]
)
def test_the_status_tells_how_the_block_was_left(tmp_path: Path, error: BaseException, status: str) -> None:
    with pytest.raises(type(error)), Telemetry(run_dir=tmp_path / "run"):
        raise error

    assert read_run(tmp_path / "run").status == status


@pytest.mark.parametrize(
    ("end", "status"),
    [("", RunStatus.FINISHED), ("raise ValueError('broken')", RunStatus.FAILED), ("raise KeyboardInterrupt", RunStatus.INTERRUPTED)],
)
def test_a_script_that_closes_nothing_ends_as_it_ended(tmp_path: Path, end: str, status: RunStatus) -> None:
    code = f"from esper_telemetry import Telemetry; t = Telemetry(run_dir='run'); t.flush(env_step=1); {end}"

    run_python("-c", code, cwd=tmp_path)

    assert read_run(tmp_path / "run").status is status


def test_the_journal_is_strict_json(tmp_path: Path) -> None:
    with Telemetry(run_dir=tmp_path / "run", config={"path": tmp_path, "bad": math.inf}) as telemetry:
        telemetry.observe(Curiosity(bonus=torch.tensor(math.inf)))
        telemetry.flush(env_step=1)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_a_program_can_ask_whether_to_stop(tmp_path: Path) -> None:
    """After a critical alarm, and after a request, also of a callback or at level off."""
    with Telemetry(run_dir=tmp_path / "alarm") as telemetry:
        telemetry.log({"loss/value": 1.0})
        telemetry.flush(env_step=1)
        assert not telemetry.should_stop()
        telemetry.log({"loss/value": float("nan")})
        telemetry.flush(env_step=2)
        assert telemetry.should_stop() and not telemetry.should_stop(alarms=False)
        telemetry.request_stop()
        assert telemetry.should_stop(alarms=False)
    with Telemetry(level="off") as telemetry:
        assert not telemetry.should_stop()
        telemetry.request_stop()
        assert telemetry.should_stop()


@pytest.mark.parametrize(
    ("autocast", "detached", "precision", "raises"),
    [(False, False, "fp32", True), (False, True, "fp32", True), (True, False, "bf16", False)],
)
def test_log_ratios_say_the_precision_that_judges_them(
    tmp_path: Path, autocast: bool, detached: bool, precision: str, raises: bool
) -> None:
    """Ratios before the first step differ from 1 by 0.01 nats: bfloat16 explains it, even if its result was cast to float32."""
    actor, inputs = torch.nn.Linear(4, 2), torch.randn(8, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        log_probs = torch.distributions.Categorical(logits=actor(inputs)).log_prob(torch.zeros(8))
    log_ratio = log_probs.float() - log_probs.detach() + 0.01
    with Telemetry(run_dir=tmp_path) as telemetry:
        telemetry.observe(ratio_diagnostics(log_ratio.detach() if detached else log_ratio))
        telemetry.flush(env_step=1)
        assert telemetry.should_stop() is raises
    assert read_run(tmp_path).info.facts["precision"] == precision


def test_watched_parameters_say_the_precision_of_a_loop_that_has_no_log_ratios_yet(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
    with Telemetry(run_dir=tmp_path) as telemetry:
        telemetry.watch(model, torch.optim.SGD(model.parameters()))
        telemetry.flush(env_step=1)
    assert read_run(tmp_path).info.facts["precision"] == "bf16"
