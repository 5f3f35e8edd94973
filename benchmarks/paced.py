"""Speed of a user's loop that logs 120 numbers per update to three backends, relative to a loop that logs nothing.

python benchmarks/paced.py [--turns 100] [--updates 60] [--per-second 40] [--keys 120]

An update is a fixed number of optimizer steps of an MLP: as many as fit into 25 ms on one torch thread of this machine. Nothing sleeps, so
all costs of telemetry, including caches and disk, reduce the updates per second of wall time.

Contenders work in turns (`turns.py`). The clients and the worker process that makes the loop's records (`offload=True`) start before the
first turn.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import turns
from results import Row, save
from torch import nn

from esper_telemetry import Telemetry

SINKS: dict[str, tuple[str, ...]] = {"journal": (), "three sinks": ("tensorboard", "wandb:paced?mode=offline", "mlflow")}
NOTHING = "nothing"
MIN_SPEED = 0.95
"""Goal for updates of 25 to 30 ms, relative to a loop that logs nothing."""
WARM_UP_SECONDS = 15.0
CALIBRATION_BLOCKS, CALIBRATION_STEPS = 50, 20


class Training:
    """Optimizer steps of an MLP on 256 rows, always the same work."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.optimizer = torch.optim.Adam(self.network.parameters())
        self.rows, self.targets = torch.randn(256, 4), torch.randn(256, 2)

    def update(self, steps: int) -> None:
        """Take that many steps."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.network(self.rows), self.targets).backward()
            self.optimizer.step()


def steps_per_update(per_second: float) -> int:
    """Return the number of steps that fill an update on an idle machine."""
    training = Training()
    seconds = min(timed(training) for _ in range(CALIBRATION_BLOCKS))
    return max(1, round(CALIBRATION_STEPS / seconds / per_second))


def timed(training: Training) -> float:
    """Return the seconds of `CALIBRATION_STEPS` steps."""
    begun = time.perf_counter()
    training.update(CALIBRATION_STEPS)
    return time.perf_counter() - begun


def serve_loop(contender: str, steps: int, options: argparse.Namespace) -> None:
    """Warm up, then make some updates for each turn."""
    draw = random.Random(1)
    names = [f"my/group_{key % 12}/key_{key}" for key in range(options.keys)]
    training = Training()
    numbers = itertools.count(1)
    with logging_into(contender) as log:

        def work(updates: int) -> None:
            for update in itertools.islice(numbers, updates):
                training.update(steps)
                log(update, {name: draw.random() for name in names})

        work(round(WARM_UP_SECONDS * options.per_second))
        turns.serve(partial(work, options.updates))


@contextmanager
def logging_into(contender: str) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """Yield the function that logs the numbers of an update."""
    if contender == NOTHING:
        yield lambda update, numbers: None
        return
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory,
        Telemetry(SINKS[contender], run_dir=Path(directory) / "run", close_timeout=5.0, offload=True) as telemetry,
    ):

        def log(update: int, numbers: dict[str, float]) -> None:
            telemetry.log(numbers)
            telemetry.flush(env_step=128 * (update + 1))

        yield log


def compare(options: argparse.Namespace) -> None:
    steps = options.steps or steps_per_update(options.per_second)
    settings = ["--updates", options.updates, "--per-second", options.per_second, "--keys", options.keys]
    command = [sys.executable, "-W", "ignore", __file__, "--steps", steps, *settings, "--alone"]
    found = turns.in_turns({name: turns.Contender([*command, name]) for name in [NOTHING, *SINKS]}, options.turns)
    print(f"{steps} optimizer steps per update, {options.keys} numbers, {options.turns} turns of {options.updates} updates")
    rows = []
    for name, figures in found.items():
        speed = statistics.median(options.updates / one["wall"] for one in figures)
        wall, thread = (turns.ratio(found[NOTHING], figures, figure) for figure in ("wall", "thread"))
        print(f"{name:12}{speed:8.2f} updates/s, over {NOTHING}: {wall}; by the thread's processor time: {thread}")
        if name != NOTHING:
            rows += [Row(f"{name}, wall time", str(wall), NOTHING, str(MIN_SPEED)), Row(f"{name}, processor time", str(thread), NOTHING)]
    if options.save:
        save("paced", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=100, help="of every contender; at least 2")
    parser.add_argument("--updates", type=int, default=60, help="of a turn")
    parser.add_argument("--per-second", type=float, default=40.0, help="updates that the bare loop does")
    parser.add_argument("--keys", type=int, default=120)
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps per update; by default as many as fit")
    parser.add_argument("--save", action="store_true", help="put the ratios into docs/benchmarks.json")
    parser.add_argument("--alone", choices=[NOTHING, *SINKS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    logging.getLogger("esper_telemetry").setLevel(logging.ERROR)  # do not report undelivered records at the end
    if options.alone:
        serve_loop(options.alone, options.steps, options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
