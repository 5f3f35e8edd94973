"""Cost of telemetry by the duration of an update; time of a rollout and of training on it.

python benchmarks/durations.py            # updates of 30, 100 and 300 ms with three backends; 3 minutes
python benchmarks/durations.py phases     # rollout and update of this trainer and of Stable-Baselines3; 1 minute
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from clocked_hooks import ClockedHooks
from contenders import ENVIRONMENT, OPENING_SECONDS, Work, attached, ours
from results import Row, save

from esper_telemetry.events import RolloutEnd

MILLISECONDS = (30, 100, 300)
UPDATES, FIRST_UPDATES, CALIBRATION_UPDATES = 128, 32, 6
GOAL_PERCENT = 2
WORK = Work(0, 0)
ROLLOUT = WORK.num_envs * WORK.num_steps


def train(trainer: Any, updates: int) -> int:
    """Train for at least that many more updates, and return their number: steps in which environments are reset do not count."""
    before = int(trainer.updates)
    trainer.learn(trainer.env_steps + (updates - 1) * ROLLOUT + 1)
    return int(trainer.updates) - before


def seconds_per_update(epochs: int) -> float:
    """Return the processor time of an update with that many epochs, without telemetry."""
    trainer, _ = ours(Work(0, 0, epochs=epochs))
    train(trainer, 2)
    begun = time.thread_time()
    updates = train(trainer, CALIBRATION_UPDATES)
    return (time.thread_time() - begun) / updates


def durations() -> Iterator[Row]:
    """Yield telemetry's share of updates that take about 30, 100 and 300 ms."""
    few, many = seconds_per_update(1), seconds_per_update(9)
    per_epoch = (many - few) / 8
    for target in MILLISECONDS:
        epochs = max(1, round(1 + (target / 1e3 - few) / per_epoch))
        clock = ClockedHooks()
        trainer, _ = ours(Work(0, 0, epochs=epochs), hooks=clock)
        with attached(trainer):
            train(trainer, FIRST_UPDATES)  # sampled more often than the rest
            time.sleep(OPENING_SECONDS)
            clock.forget()
            begun = time.thread_time()
            updates = train(trainer, UPDATES)
            total = time.thread_time() - begun
        telemetry = sum(clock.seconds())
        bare = 1e3 * (total - telemetry) / updates
        yield Row(f"{target} ms, share", f"{100 * telemetry / (total - telemetry):.1f} %", "", f"{GOAL_PERCENT} %")
        yield Row(f"{target} ms, per update", f"{1e3 * telemetry / updates:.2f} ms")
        yield Row(f"{target} ms, measured without telemetry", f"{bare:.0f} ms")


def phases() -> Iterator[Row]:
    """Yield the time of a rollout and of an update in the bundled trainer and in Stable-Baselines3."""
    mine, theirs = own_phases(), sb3_phases()
    for name, one, other in zip(("rollout", "update"), mine, theirs, strict=True):
        yield Row(f"{name}, ms", f"{1e3 * one:.1f}", f"{1e3 * other:.1f}")


def own_phases() -> tuple[float, float]:
    """Return the seconds of a rollout and of training on it."""
    trainer, _ = ours(WORK)
    train(trainer, 2)
    rollouts, updates = list[float](), list[float]()
    marks = list[float]()
    trainer.hooks.on(RolloutEnd, lambda event: marks.append(time.thread_time()))
    for _ in range(UPDATES):
        begun = time.thread_time()
        train(trainer, 1)
        rollouts.append(marks[-1] - begun)
        updates.append(time.thread_time() - marks[-1])
    return statistics.median(rollouts), statistics.median(updates)


def sb3_phases() -> tuple[float, float]:
    """Return the same for Stable-Baselines3."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env(ENVIRONMENT, WORK.num_envs, seed=0)
    settings: Any = {"n_steps": WORK.num_steps, "batch_size": ROLLOUT // WORK.minibatches, "n_epochs": WORK.epochs}
    model: Any = PPO("MlpPolicy", env, learning_rate=WORK.learning_rate, device="cpu", seed=0, **settings)
    taken: dict[str, list[float]] = {"collect_rollouts": [], "train": []}
    for name, times in taken.items():
        setattr(model, name, timed(getattr(model, name), times))
    model.learn((UPDATES + 2) * ROLLOUT)
    collecting, training = (statistics.median(times[2:]) for times in taken.values())
    return collecting, training


def timed(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    """Return the function, wrapped to append its processor seconds."""

    def call(*args: Any, **keywords: Any) -> Any:
        begun = time.thread_time()
        result = function(*args, **keywords)
        times.append(time.thread_time() - begun)
        return result

    return call


def main() -> None:
    measures = {"durations": durations, "phases": phases}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=measures, default="durations")
    part = parser.parse_args().part
    torch.set_num_threads(1)
    rows = list(measures[part]())
    save(part, rows)
    for row in rows:
        print(row.what, row.ours, row.others)


if __name__ == "__main__":
    main()
