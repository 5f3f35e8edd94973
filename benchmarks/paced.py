"""How fast a loop of one's own goes that logs 120 numbers per update into three backends, over one that logs nothing.

python benchmarks/paced.py [--turns 40] [--updates 160] [--per-second 40] [--keys 120]

An update is a fixed number of optimizer steps of an MLP, as many as this machine does in 25 ms on one torch thread. Nothing sleeps, so
whatever telemetry takes, on this core, of the caches or of the disk, is missing from the updates per second of wall time.

Machines that others use too are faster in one minute than in the next, by more than what is looked for here. So every contender is a
process that lives all the time and works for some seconds at a time, while the others wait for their turn; each turn of all gives a
ratio. Starting and ending are not in it: clients are made, and the records of the loop have moved to the process beside it, before the
first turn. What the backends still have to do after a turn, they do before the next one begins.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from esper_telemetry import Telemetry

SINKS: dict[str, tuple[str, ...]] = {
    "journal": (),
    "three sinks": ("tensorboard", "wandb:paced?mode=offline", "mlflow"),
}
NOTHING = "nothing"
WARM_UP_SECONDS = 15.0
DELIVERY_SECONDS = 1.0
"""After a turn, until the next contender's."""
CALIBRATION_BLOCKS, CALIBRATION_STEPS = 50, 20


class Training:
    """Optimizer steps of an MLP on 256 rows, always the same work."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.optimizer = torch.optim.Adam(self.network.parameters())
        self.rows, self.targets = torch.randn(256, 4), torch.randn(256, 2)

    def update(self, steps: int) -> None:
        """That many steps."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.network(self.rows), self.targets).backward()
            self.optimizer.step()


def steps_per_update(per_second: float) -> int:
    """How many steps fit into an update, where nothing disturbs them."""
    training = Training()
    seconds = min(timed(training) for _ in range(CALIBRATION_BLOCKS))
    return max(1, round(CALIBRATION_STEPS / seconds / per_second))


def timed(training: Training) -> float:
    """Seconds of some steps."""
    begun = time.perf_counter()
    training.update(CALIBRATION_STEPS)
    return time.perf_counter() - begun


def serve(contender: str, steps: int, options: argparse.Namespace) -> None:
    """Warms up, then works whenever a line comes in, and answers with the updates per second of wall time."""
    draw = random.Random(1)
    names = [f"my/group_{key % 12}/key_{key}" for key in range(options.keys)]
    training = Training()
    with logging_into(contender) as log:
        update = 0

        def work(updates: int) -> float:
            nonlocal update
            begun = time.perf_counter()
            for _ in range(updates):
                update += 1
                training.update(steps)
                log(update, {name: draw.random() for name in names})
            return updates / (time.perf_counter() - begun)

        work(round(WARM_UP_SECONDS * options.per_second))
        print("ready", flush=True)
        for _ in sys.stdin:
            print(work(options.updates), flush=True)


@contextmanager
def logging_into(contender: str) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """What is done with the numbers of an update."""
    if contender == NOTHING:
        yield lambda update, numbers: None
        return
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory,
        Telemetry(SINKS[contender], run_dir=Path(directory) / "run", close_timeout=5.0) as telemetry,
    ):

        def log(update: int, numbers: dict[str, float]) -> None:
            telemetry.log(numbers)
            telemetry.flush(env_step=128 * (update + 1))

        yield log


class Contender:
    """A process that works when it is its turn."""

    def __init__(self, name: str, steps: int, options: argparse.Namespace) -> None:
        settings = ["--updates", options.updates, "--per-second", options.per_second, "--keys", options.keys]
        command = [sys.executable, "-W", "ignore", __file__, "--alone", name, "--steps", steps, *settings]
        self._process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._answer() != "ready":
            raise RuntimeError(f"{name} ended before its first turn")

    def turn(self) -> float:
        """Updates per second of some updates."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        speed = float(self._answer())
        time.sleep(DELIVERY_SECONDS)
        return speed

    def end(self) -> None:
        """Lets it close what it has open."""
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def compare(options: argparse.Namespace) -> None:
    names = [NOTHING, *SINKS]
    steps = options.steps or steps_per_update(options.per_second)
    contenders = {name: Contender(name, steps, options) for name in names}
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(options.turns):
        for name in names[turn % 3 :] + names[: turn % 3]:
            found[name].append(contenders[name].turn())
        print(json.dumps({name: round(speeds[-1], 2) for name, speeds in found.items()}), flush=True)
    for contender in contenders.values():
        contender.end()
    print(
        f"{steps} optimizer steps per update, {options.keys} numbers, {options.turns} turns of {options.updates} updates"
    )
    for name, speeds in found.items():
        print(f"{name:12}{statistics.median(speeds):8.2f} updates/s{ratios(speeds, found[NOTHING], NOTHING)}")
    print(f"three sinks{ratios(found['three sinks'], found['journal'], 'the journal alone')}")


def ratios(speeds: list[float], others: list[float], name: str) -> str:
    """The median ratio, and between which the middle half lies."""
    each = [mine / theirs for mine, theirs in zip(speeds, others, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
    return f", over {name}: {middle:.3f} (half of them {low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40, help="of every contender; at least 2")
    parser.add_argument("--updates", type=int, default=160, help="of a turn")
    parser.add_argument("--per-second", type=float, default=40.0, help="updates that the bare loop does")
    parser.add_argument("--keys", type=int, default=120)
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps per update; by default as many as fit")
    parser.add_argument("--alone", choices=[NOTHING, *SINKS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    logging.getLogger("esper_telemetry").setLevel(logging.ERROR)  # what is not delivered when it closes is no news here
    if options.alone:
        serve(options.alone, options.steps, options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
