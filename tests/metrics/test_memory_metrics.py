"""Memory of the training process and its children in the record, and the limit it is compared with."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from esper_telemetry import Telemetry, read_run
from esper_telemetry.core import process_memory as memory
from esper_telemetry.core.process_memory import MIB, MemorySampler, MemoryUsage, memory_limit
from esper_telemetry.core.record import Level
from esper_telemetry.metrics.performance import process_memory

HUNGRY = "b = bytearray(64 << 20); b[::4096] = b'x' * len(b[::4096]); print('ready', flush=True); input()"
"""A program that allocates 64 MiB and waits."""


def test_the_share_is_that_of_the_process_and_its_children() -> None:
    """600 and 250 MiB of 1,000 are 85 %. A process on the CPU has no device."""
    values = process_memory(MemoryUsage(600 * MIB, 250 * MIB, 1000 * MIB)).values()

    assert values == {"perf/memory/process_mib": 600, "perf/memory/children_mib": 250, "perf/memory/process_frac": pytest.approx(0.85)}
    assert process_memory(MemoryUsage()).values() == {}
    assert process_memory(MemoryUsage(MIB)).values(Level.MINIMAL) == {"perf/memory/process_mib": 1}


@pytest.mark.system
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_memory_of_children_counts_and_is_sampled_once_per_second() -> None:
    time = 0.0
    sampler = MemorySampler(clock=lambda: time)
    before = sampler.sample()
    with subprocess.Popen([sys.executable, "-c", HUNGRY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        unchanged = sampler.sample()
        time = memory.SAMPLE_SECONDS
        after = sampler.sample()
        child.communicate(b"\n")

    assert unchanged == before and before.process is not None and before.process > 10 * MIB
    assert before.children is not None and after.children is not None
    assert after.children - before.children >= 64 * MIB


@pytest.mark.system
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc")
def test_what_forked_processes_share_with_the_trainer_counts_once() -> None:
    """Four processes share the trainer's 64 MiB, and each writes 8 MiB."""
    ballast = bytearray(b"x" * (64 << 20))
    before = MemorySampler().sample().children
    written, ready = os.pipe()
    released, release = os.pipe()
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            own = bytearray(b"y" * (8 << 20))
            os.write(ready, own[:1])
            os.close(release)
            os.read(released, 1)
            os._exit(0)
        children.append(child)
    for _ in children:
        os.read(written, 1)

    after = MemorySampler().sample().children

    for end in (release, released, written, ready):
        os.close(end)
    for child in children:
        os.waitpid(child, 0)
    assert before is not None and after is not None and len(ballast) == 64 << 20
    assert 4 * 8 * MIB <= after - before < 4 * 32 * MIB


def test_memory_of_devices_is_what_this_process_has_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 bytes on the second of two devices, a quarter of which is free. A device that is not used is not queried."""
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        memory_reserved=lambda device: 300 * device,
        mem_get_info=lambda device: {1: (250, 1000)}[device],
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

    assert MemorySampler().sample()[3:] == (300, 0.75)


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/a/b\n", {"a/memory.max": "3000\n", "a/b/memory.max": "max\n"}, 3000),
        ("0::/a/b\n", {"a/memory.max": "3000\n", "a/b/memory.max": "2000\n"}, 2000),
        ("4:cpu,memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "1000\n"}, 1000),
        ("4:memory:/of/the/host\n", {"memory/memory.limit_in_bytes": "500\n"}, 500),
        ("garbage", {}, None),
    ],
)
def test_the_smallest_limit_of_the_control_groups_counts(
    group: str, files: dict[str, str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    for place, text in {"proc/7/cgroup": group, **{f"cgroup/{name}": text for name, text in files.items()}}.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)

    limit = memory_limit(7)

    assert limit is not None and (limit == expected or (expected is None and limit > MIB))


def test_a_process_that_is_gone_has_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PROC", tmp_path)

    assert MemorySampler(1).sample()[:2] == (None, None)


@pytest.mark.system
@pytest.mark.parametrize("offload", [False, True])
def test_every_record_has_the_memory_of_the_trainer(offload: bool, tmp_path: Path) -> None:
    """A worker reports the memory of the training process, which is 256 MiB more than its own."""
    ballast = bytearray(256 << 20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    with Telemetry(run_dir=tmp_path / "run", offload=offload) as telemetry:
        telemetry.log({"my/value": 1.0})
        telemetry.flush(env_step=1)

    (record,) = read_run(tmp_path / "run").records
    assert record.values["perf/memory/process_mib"] > len(ballast) / MIB
    assert 0 < record.values["perf/memory/process_frac"] < 1
