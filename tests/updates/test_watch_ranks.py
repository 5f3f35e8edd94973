"""`Telemetry.watch` when ranks average gradients."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import run_together

from esper_telemetry import Telemetry, read_run


class WarningLog(logging.Handler):
    """Collects the messages of warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(record.getMessage())


def stepped(rank: int, run_dir: str, wrapped: bool) -> dict[str, Any]:
    """Take one step on different data; return the clipped norm, the rank's own norm, and the warnings."""
    handler = WarningLog()
    logging.getLogger("esper_telemetry").addHandler(handler)
    torch.manual_seed(0)
    inner = nn.Linear(3, 1)
    model: nn.Module = DistributedDataParallel(inner) if wrapped else inner
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.full((4, 3), 1.0 + 2.0 * rank)
    own = torch.autograd.grad(inner(inputs).square().mean(), list(inner.parameters()))
    with Telemetry(run_dir=run_dir) as telemetry:
        telemetry.watch(model, optimizer, critic="weight")
        loss: Tensor = model(inputs).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        telemetry.flush(env_step=1)
    return {"norm": float(norm), "own": float(torch.cat([g.flatten() for g in own]).norm()), "warnings": handler.sentences}


def test_norms_are_those_of_the_average(tmp_path: Path) -> None:
    """Hooks of a backward pass see each rank's own gradient. Telemetry reports the averaged one, which all ranks use."""
    first, second = run_together(stepped, tmp_path, str(tmp_path / "run"), True)

    assert first["norm"] == second["norm"] != first["own"]
    (record,) = read_run(tmp_path / "run").records
    assert record.values["grad/global/norm_preclip"] == pytest.approx(first["norm"], rel=1e-6)
    assert record.values["grad/global/norm_postclip"] == pytest.approx(0.5, rel=1e-5)
    assert first["warnings"] == []


def test_ranks_without_averaging_cost_a_warning(tmp_path: Path) -> None:
    first, _ = run_together(stepped, tmp_path, str(tmp_path / "run"), False)

    assert [sentence for sentence in first["warnings"] if "not wrapped in DistributedDataParallel" in sentence]
