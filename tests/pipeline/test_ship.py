"""Updates on a GPU are copied to the host asynchronously and measured there like updates on the CPU."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_gpu import GPU, DeviceCalls, mark, pretended_gpu

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.core.record import Axes, Level
from esper_telemetry.pipeline import window as window_module
from esper_telemetry.pipeline.sampling import Sampling
from esper_telemetry.pipeline.window import FlushedUpdate, ship, thinned
from esper_telemetry.updates.update import BackwardGradients, JoinedMinibatches, Update

pytestmark = [pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: no worker"), pytest.mark.system]

MAX_CALLS, MAX_CALLS_OF_A_MINIBATCH = 50, 10
UPDATES, MINIBATCHES = 4, 20
OF_TIME = ("perf/", "telemetry/", "train/env_steps_per_second")
LSTM = {"policy": "lstm", "lstm_size": 8}


@pytest.fixture(autouse=True)
def unsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampling, "begin", lambda self, *, raised=False: False)


def trainer(settings: dict[str, Any], device: str) -> PPO:
    config = PPOConfig(num_steps=16, num_epochs=5, num_minibatches=4, hidden_sizes=(8,), **settings)
    return PPO(make_env("CartPole-v1", num_envs=4, seed=0), config, device=device)


def calls(run_dir: Path, level: str, settings: dict[str, Any]) -> float:
    with pretended_gpu(), Telemetry(run_dir=run_dir, level=level, detect=False) as telemetry:
        ppo = trainer(settings, "cuda")
        attach(telemetry, ppo)
        ppo.learn(3 * 64)
        with DeviceCalls() as counted:
            ppo.learn((3 + UPDATES) * 64)
    return float(counted.count) / UPDATES


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
@pytest.mark.parametrize("settings", [{}, LSTM], ids=["mlp", "lstm"])
def test_an_update_that_is_not_sampled_takes_few_operations_of_the_device(tmp_path: Path, settings: dict[str, Any]) -> None:
    without = calls(tmp_path / "off", "off", settings)
    for level in ("minimal", "normal"):
        more = calls(tmp_path / level, level, settings) - without
        assert 10 < more <= MAX_CALLS + MAX_CALLS_OF_A_MINIBATCH * MINIBATCHES / 2


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
@pytest.mark.parametrize("settings", [{}, LSTM], ids=["mlp", "lstm"])
def test_every_number_is_the_one_that_is_measured_on_the_device(tmp_path: Path, settings: dict[str, Any]) -> None:
    for name, offload in (("here", False), ("shipped", None)):
        with pretended_gpu(), Telemetry(run_dir=tmp_path / name, offload=offload) as telemetry:
            ppo = trainer(settings, "cuda")
            attach(telemetry, ppo)
            ppo.learn(6 * 64)

    here, shipped = (read_run(tmp_path / name).records for name in ("here", "shipped"))
    assert (tmp_path / "shipped" / "summary.log").exists(), "no worker was there"
    for one, other in zip(here, shipped, strict=True):
        assert untimed(other.values) == pytest.approx(untimed(one.values), rel=1e-9)
        assert other.values["perf/d2h_copies"] > 10 and one.values["perf/d2h_copies"] == 1
        assert other.values["perf/memory/device_mib"] == one.values["perf/memory/device_mib"] == 1


def untimed(values: Any) -> dict[str, float]:
    return {key: value for key, value in values.items() if not key.startswith(OF_TIME)}


def minibatches(counts: tuple[int, ...]) -> JoinedMinibatches:
    rows = torch.arange(float(sum(counts)))
    losses, logits = {"policy": torch.arange(float(len(counts)))}, {"action": torch.stack([rows, rows], -1)}
    return JoinedMinibatches(tuple(range(len(counts))), counts, rows, -rows, None, losses, logits=logits, rows=rows.long())


@pytest.fixture
def on_gpu() -> Iterator[Update]:
    """An update of seven minibatches."""
    with pretended_gpu():
        columns = minibatches((3, 3, 3, 3, 3, 3, 1))
        for tensor in (columns.log_ratio, columns.advantages, *columns.losses.values(), *columns.logits.values()):
            mark(tensor, GPU)
        yield Update(minibatches=columns._replace(rows=None))


def test_what_the_trainer_writes_afterwards_changes_no_copy(on_gpu: Update) -> None:
    assert on_gpu.minibatches is not None
    shipment = ship(FlushedUpdate(Axes(1, 1, 1, 0.0), Level.NORMAL, updates=(on_gpu,)))
    on_gpu.minibatches.log_ratio.zero_()

    (update,) = shipment.update.updates
    assert update.minibatches is not None and not update.on_device
    assert update.minibatches.log_ratio.tolist() == [float(row) for row in range(19)]
    assert (shipment.update.copies, shipment.update.minibatch_stride) == (4, 1)
    assert shipment.arrival is not None


def test_a_tensor_that_several_parts_hold_is_copied_once(on_gpu: Update) -> None:
    assert ship(FlushedUpdate(Axes(1, 1, 1, 0.0), Level.NORMAL, updates=(on_gpu, on_gpu))).update.copies == 4


def test_of_a_large_update_whole_minibatches_travel_the_first_and_the_last_among_them() -> None:
    thin = thinned(Update(minibatches=minibatches((3, 3, 3, 3, 3, 3, 1))), 4).minibatches

    assert thin is not None
    assert (thin.epochs, thin.counts, thin.rows) == ((0, 4, 6), (3, 3, 1), None)
    assert thin.log_ratio.tolist() == [0, 1, 2, 12, 13, 14, 18]
    assert thin.losses["policy"].tolist() == [0, 4, 6] and thin.logits["action"].shape == (7, 2)


def test_a_record_says_how_many_minibatches_stand_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record has all minibatch metrics, and raises no alarm."""
    monkeypatch.setattr(window_module, "MAX_MINIBATCH_ROWS", 64)
    with pretended_gpu(), Telemetry(run_dir=tmp_path / "run") as telemetry:
        ppo = trainer({}, "cuda")
        attach(telemetry, ppo)
        ppo.learn(12 * 64)

    run = read_run(tmp_path / "run")
    assert {record.values["telemetry/minibatch_stride"] for record in run.records} == {5.0}
    assert all("policy/kl" in record.values and "loss/policy" in record.values for record in run.records)
    assert Counter(alarm.type for alarm in run.alarms if alarm.type.startswith(("integrity/", "telemetry/"))) == {}


def test_an_update_of_backward_passes_alone_is_on_the_device_too(on_gpu: Update) -> None:
    norms = torch.ones(2, 3)
    mark(norms, GPU)
    passes = BackwardGradients((0, 0), ("a", "b", "c"), (1, 1, 1), norms, None)
    update = Update(gradients=(passes,))

    assert update.on_device
    (shipped,) = ship(FlushedUpdate(Axes(1, 1, 1, 0.0), Level.NORMAL, updates=(update,))).update.updates
    assert shipped.gradients[0].norms.is_cpu and not shipped.on_device
