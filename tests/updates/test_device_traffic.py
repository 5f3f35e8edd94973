"""Telemetry reads one packed vector per record from the device, and no single number, because that would wait for the device."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_gpu import pretended_gpu
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from esper_telemetry import (
    PPO,
    PPOConfig,
    Telemetry,
    advantage_stats,
    attach,
    gradient_health,
    make_env,
    ratio_diagnostics,
    read_run,
    value_fit,
)
from esper_telemetry.core.tensors import gradient_norms
from esper_telemetry.pipeline.sampling import Sampling

UPDATES, MINIBATCHES = 3, 4
SINGLE_NUMBERS = ("aten::item", "aten::_local_scalar_dense")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Counted(TorchDispatchMode):
    """Counts operations by name in a tenth of the profiler's time, but only on the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is not annotated
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


def operations(work: Callable[[], object], *kinds: ProfilerActivity) -> dict[str, int]:
    """Return the profiled number of calls of each operation, including device copies."""
    with profile(activities=[ProfilerActivity.CPU, *kinds]) as profiled:
        work()
    return {event.key: event.count for event in profiled.key_averages()}


def single_numbers(counts: dict[str, int]) -> int:
    return sum(counts.get(name, 0) for name in SINGLE_NUMBERS)


def own_loop(telemetry: Telemetry, device: str) -> Callable[[], None]:
    """Return the calls of a hand-written loop in some updates; its tensors exist already."""
    agent = nn.Linear(8, 3, device=device)
    rows = torch.randn(64, device=device)
    agent(torch.randn(64, 8, device=device)).square().mean().backward()

    def work() -> None:
        for update in range(1, UPDATES + 1):
            telemetry.observe(advantage_stats(rows), value_fit(rows, rows * 2))
            for epoch in range(MINIBATCHES):
                health = gradient_health(agent, groups={"actor": ["weight"]}, max_norm=0.5)
                telemetry.observe(health, ratio_diagnostics(rows / 10, rows, clip=0.2), epoch=epoch)
            telemetry.flush(env_step=64 * update)

    return work


def attached(telemetry: Telemetry, device: str, **settings: Any) -> PPO:
    config = PPOConfig(num_steps=16, num_epochs=2, num_minibatches=2, hidden_sizes=(8,), **settings)
    trainer = PPO(make_env("CartPole-v1", num_envs=4, seed=0), config, device=device)
    attach(telemetry, trainer)
    return trainer


def trained(run_dir: Path, level: str, **settings: Any) -> Counter[str]:
    """Return the operations of a short training on the training thread."""
    with Telemetry(run_dir=run_dir, level=level, offload=False, detect=False) as telemetry:
        trainer = attached(telemetry, "cpu", **settings)
        with Counted() as counted:
            trainer.learn(10 * 4 * 16)
    return Counter(counted.calls)


def copies_of(run_dir: Path) -> list[float]:
    return [record.values["perf/d2h_copies"] for record in read_run(run_dir).records]


@pytest.mark.system
def test_a_loop_of_ones_own_reads_no_single_number(tmp_path: Path) -> None:
    """The first call of a process tries the fused norms, so it is not counted."""
    gradient_norms([torch.ones(1)])
    with Telemetry(run_dir=tmp_path / "run") as telemetry:
        counts = operations(own_loop(telemetry, "cpu"))

    assert counts["aten::linalg_vector_norm"] >= 1, "the profiler saw nothing"
    assert single_numbers(counts) == 0
    assert copies_of(tmp_path / "run") == [0.0] * UPDATES


@pytest.mark.system
@pytest.mark.parametrize("settings", [{}, {"policy": "lstm", "lstm_size": 8}], ids=["mlp", "lstm"])
def test_beside_a_trainer_no_single_number_is_read_that_it_does_not_read_itself(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled updates are excluded: they compare equations, and the hypotheses they try depend on the numbers."""
    monkeypatch.setattr(Sampling, "begin", lambda self, *, raised=False: False)
    off, on = trained(tmp_path / "off", "off", **settings), trained(tmp_path / "on", "normal", **settings)

    assert sum(on.values()) > 2 * sum(off.values()), "nothing was measured"
    assert single_numbers(on) == single_numbers(off) > 0


@pytest.mark.system
def test_no_measurement_waits_for_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only sampled updates may wait."""
    monkeypatch.setattr(Sampling, "begin", lambda self, *, raised=False: False)
    with pretended_gpu() as gpu, Telemetry(run_dir=tmp_path / "run", detect=False) as telemetry:
        attached(telemetry, "cuda").learn(UPDATES * 64)
    asking = {file for _, file in gpu.reads}

    assert asking, "the trainer itself reads actions"
    assert {file for file in asking if not file.startswith("ppo/")} == set()
    assert all(10 < copies <= 50 for copies in copies_of(tmp_path / "run")), "of the columns of an update"


def test_reading_a_number_would_be_noticed() -> None:
    assert single_numbers(operations(lambda: float(torch.ones(3).sum()))) == 2


@needs_cuda
def test_on_a_gpu_a_flush_is_one_copy_and_nothing_waits(tmp_path: Path) -> None:
    """Anything that waits raises an error. Reading the last copy after the next update waits only for a finished event."""
    with Telemetry(run_dir=tmp_path / "run") as telemetry:
        work = own_loop(telemetry, "cuda")
        work()  # compiles and allocates, which waits once
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            counts = operations(work, ProfilerActivity.CUDA)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    assert sum(count for name, count in counts.items() if name.startswith("Memcpy DtoH")) == UPDATES
    assert single_numbers(counts) == 0
    assert copies_of(tmp_path / "run")[UPDATES:] == [1.0] * UPDATES


@needs_cuda
def test_on_a_gpu_an_attached_trainer_copies_once_per_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except in sampled updates, whose number and cost `budget` limits."""
    monkeypatch.setattr(Sampling, "begin", lambda self, *, raised=False: False)

    def copied(level: str) -> tuple[int, int, int]:
        with Telemetry(run_dir=tmp_path / level, level=level, detect=False) as telemetry:
            trainer = attached(telemetry, "cuda")
            counts = operations(lambda: trainer.learn(UPDATES * 64), ProfilerActivity.CUDA)
        copies = sum(count for name, count in counts.items() if name.startswith("Memcpy DtoH"))
        return copies, single_numbers(counts), trainer.updates

    (copies_off, numbers_off, updates), (copies_on, numbers_on, _) = copied("off"), copied("normal")

    assert copies_on - copies_off == updates >= UPDATES
    assert numbers_on == numbers_off
