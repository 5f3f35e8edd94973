"""Two processes joined by `torch.distributed`, for tests."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = ["torch._dynamo", "esper_telemetry.ppo.trainer"]
"""Modules that the fork server imports once for all ranks: four seconds."""


def run_together(body: Callable[..., Any], directory: Path, *arguments: Any) -> list[Any]:
    """Results of `body(rank, *arguments)`, a function of a test module, in two processes; None for a process that died."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes = [context.Process(target=_one, args=(body, rank, str(directory), arguments), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        assert process.exitcode is not None, "a rank hangs"
    results = [directory / f"{rank}.pt" for rank in range(2)]
    return [torch.load(path) if path.exists() else None for path in results]


def _one(body: Callable[..., Any], rank: int, directory: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=2)
    dist.barrier()  # a rank that exits before the other has connected would break its group
    torch.save(body(rank, *arguments), f"{directory}/{rank}.pt")
