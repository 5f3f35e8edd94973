"""Whole training steps, from forward to optimizer, with different tools that measure gradients, each in its own process."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from networks import NETWORKS, loss_of
from torch import Tensor, nn

LIMIT = 0.5
UPDATE = 16
"""Steps between two records, as in the default update of 4 epochs of 4 minibatches."""

Step = Callable[[], object]


class Training:
    """A network that is trained step by step; `clip` is the usual call between backward and the optimizer's step."""

    def __init__(self, network: str) -> None:
        self.model, self.x = NETWORKS[network].made()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5, eps=1e-5, fused=True)
        self.steps = 0

    def step(self, clip: Callable[[], object]) -> None:
        """Take one step."""
        self.optimizer.zero_grad()
        loss_of(self.model, self.x).backward()
        clip()
        self.optimizer.step()
        self.steps += 1

    @property
    def over(self) -> bool:
        """True if an update ends with this step."""
        return self.steps % UPDATE == 0

    def clip(self) -> Tensor:
        """Clip with torch's function."""
        norm: Tensor = nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)
        return norm


@contextmanager
def bare(training: Training) -> Iterator[Step]:
    """Step without measurements."""
    yield lambda: training.step(training.clip)


@contextmanager
def ours(training: Training) -> Iterator[Step]:
    """A user's loop: gradient health at every step, a record to TensorBoard per update."""
    from esper_telemetry import Telemetry, gradient_health

    with tempfile.TemporaryDirectory() as directory, Telemetry(["tensorboard"], run_dir=Path(directory) / "run") as telemetry:

        def look() -> None:
            telemetry.observe(gradient_health(training.model, max_norm=LIMIT))
            training.clip()

        def step() -> None:
            training.step(look)
            if training.over:
                telemetry.flush(env_step=training.steps)

        yield step


@contextmanager
def shared(training: Training) -> Iterator[Step]:
    """The same, but clipping and telemetry share the norms, as in the bundled trainer."""
    from esper_telemetry import Telemetry
    from esper_telemetry.core import tensors as ops
    from esper_telemetry.metrics.gradients.norms import gradient_norms

    parameters = dict(training.model.named_parameters())
    numels = [parameter.numel() for parameter in parameters.values()]
    kept: list[Tensor] = []
    with tempfile.TemporaryDirectory() as directory, Telemetry(["tensorboard"], run_dir=Path(directory) / "run") as telemetry:

        def clip() -> None:
            gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
            kept.append(ops.gradient_norms(gradients))
            ops.clip_gradients(gradients, kept[-1], LIMIT)

        def step() -> None:
            training.step(clip)
            if training.over:
                telemetry.observe(gradient_norms(torch.stack(kept), tuple(parameters), None, numels, max_norm=LIMIT), epoch=[0] * len(kept))
                telemetry.flush(env_step=training.steps)
                kept.clear()

        yield step


@contextmanager
def naive(training: Training) -> Iterator[Step]:
    """Five statistics of every tensor by `.item()`: norm, largest size, mean, number of non-finite entries, share of zeros."""
    found: dict[str, tuple[float, ...]] = {}

    def look() -> None:
        for name, parameter in training.model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            found[name] = (
                gradient.norm().item(),
                gradient.abs().max().item(),
                gradient.mean().item(),
                (~torch.isfinite(gradient)).sum().item(),
                (gradient == 0).float().mean().item(),
            )
        training.clip()

    yield lambda: training.step(look)


@contextmanager
def wandb_watch(training: Training) -> Iterator[Step]:
    """`wandb.watch(log="gradients", log_freq=1)`, offline, and one `log` per update."""
    import wandb

    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    with tempfile.TemporaryDirectory() as directory:
        run = wandb.init(project="benchmark", dir=directory)
        run.watch(training.model, log="gradients", log_freq=1)

        def step() -> None:
            training.step(training.clip)
            if training.over:
                run.log({"step": training.steps})

        yield step
        run.finish()


@contextmanager
def cockpit(training: Training) -> Iterator[Step]:
    """Cockpit with gradient norms only, at every step: its cheapest measurement."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from backpack import extend
        from cockpit import Cockpit, quantities
        from cockpit.utils import schedules

    extend(training.model)
    found = Cockpit(training.model.parameters(), quantities=[quantities.GradNorm(schedules.linear(interval=1))])

    def step() -> None:
        training.optimizer.zero_grad()
        loss = loss_of(training.model, training.x)
        info: dict[str, Any] = {"batch_size": len(training.x), "individual_losses": loss.detach().expand(1)}
        with found(training.steps, info={**info, "loss": loss, "optimizer": training.optimizer}):
            loss.backward(create_graph=found.create_graph(training.steps))
        training.clip()
        training.optimizer.step()
        training.steps += 1

    yield step


WATCHERS: dict[str, Callable[[Training], Any]] = {
    "bare": bare,
    "esper, shared norms": shared,
    "esper, gradient_health": ours,
    "naive .item() loop": naive,
    "wandb.watch": wandb_watch,
    "cockpit, GradNorm": cockpit,
}
NEEDS = {"wandb.watch": "wandb", "cockpit, GradNorm": "cockpit"}
"""Packages that may be missing."""
