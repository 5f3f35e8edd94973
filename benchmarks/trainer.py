"""How fast the bundled trainer is: against Stable-Baselines3 on the same work, and with telemetry against without.

    python benchmarks/trainer.py                # CartPole-v1, 8 x 128, 4 epochs x 4 minibatches, 64 x 64 tanh
    python benchmarks/trainer.py --telemetry    # NORMAL with three backends, against OFF

Every run is a process of its own with one torch thread; contenders take turns, so that a change of the machine's speed
hits all of them. Figures are medians over the rounds, ratios medians over the pairs; only the ratios mean something
beyond the machine. Each round has its own seed; the return is the mean of the last 100 training episodes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = "CartPole-v1"
NUM_ENVS, NUM_STEPS, EPOCHS, MINIBATCHES, LEARNING_RATE = 8, 128, 4, 4, 1e-3


@dataclass(frozen=True)
class Run:
    """One training run: steps per CPU-second and per second of wall time in `learn`, and the return at its end."""

    cpu: float
    wall: float
    episode_return: float


def measured(steps: int, learn: Callable[[], None], returns: deque[float]) -> Run:
    """The run that `learn` makes."""
    cpu, wall = time.process_time(), time.perf_counter()
    learn()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Run(steps / cpu, steps / wall, statistics.fmean(returns))


def esper(steps: int, seed: int) -> Run:
    """This trainer without telemetry."""
    return train(steps, seed, with_telemetry=False)


def observed(steps: int, seed: int) -> Run:
    """This trainer with NORMAL telemetry to TensorBoard, W&B (offline) and MLflow."""
    return train(steps, seed, with_telemetry=True)


def train(steps: int, seed: int, *, with_telemetry: bool) -> Run:
    """A run of this trainer; the clock stops before the backends are closed."""
    from esper_telemetry.environments import make_env
    from esper_telemetry.events import EpisodeEnd
    from esper_telemetry.ppo import PPO, PPOConfig

    config = PPOConfig(
        num_steps=NUM_STEPS,
        num_epochs=EPOCHS,
        num_minibatches=MINIBATCHES,
        learning_rate=LEARNING_RATE,
        anneal_learning_rate=False,
        seed=seed,
    )
    trainer = PPO(make_env(ENVIRONMENT, num_envs=NUM_ENVS, seed=seed), config)
    returns: deque[float] = deque(maxlen=100)
    trainer.hooks.on(EpisodeEnd, lambda event: returns.extend(event.returns))
    if not with_telemetry:
        return measured(steps, lambda: trainer.learn(steps), returns)

    from esper_telemetry import Telemetry, attach
    from esper_telemetry.sinks.mlflow import MLflowSink
    from esper_telemetry.sinks.tensorboard import TensorBoardSink
    from esper_telemetry.sinks.wandb import WandbSink

    with tempfile.TemporaryDirectory() as directory:
        backends = (TensorBoardSink(), WandbSink(project="benchmark"), MLflowSink())
        with Telemetry(backends, run_dir=Path(directory) / "run") as telemetry:
            attach(telemetry, trainer)
            return measured(steps, lambda: trainer.learn(steps), returns)


def stable_baselines(steps: int, seed: int) -> Run:
    """Stable-Baselines3 as it comes: its own vector environment and monitor, no logger."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    returns: deque[float] = deque(maxlen=100)
    model = PPO(
        "MlpPolicy",
        make_vec_env(ENVIRONMENT, NUM_ENVS, seed=seed),
        n_steps=NUM_STEPS,
        batch_size=NUM_ENVS * NUM_STEPS // MINIBATCHES,
        n_epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        seed=seed,
        device="cpu",
    )

    def learn() -> None:
        model.learn(steps)
        returns.extend(episode["r"] for episode in model.ep_info_buffer or ())

    return measured(steps, learn, returns)


CONTENDERS = {"esper": esper, "esper + telemetry": observed, "sb3": stable_baselines}


def spawn(contender: str, steps: int, seed: int, cores: str | None) -> Run:
    """The contender's run in a fresh process with one thread."""
    command = [sys.executable, __file__, "--contender", contender, "--steps", str(steps), "--seed", str(seed)]
    command = ["taskset", "-c", cores, *command] if cores else command
    threads = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, env={**os.environ, **threads, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True
    )
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def compare(names: list[str], options: argparse.Namespace) -> None:
    """Prints medians of all contenders, and each one's speed over that of the last."""
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for seed in range(options.rounds):
        for name in names:
            runs[name].append(spawn(name, options.steps, seed, options.cores))
    reference = runs[names[-1]]
    work = f"{NUM_ENVS} x {NUM_STEPS}, {EPOCHS} epochs x {MINIBATCHES}"
    print(f"{ENVIRONMENT}, {options.steps} steps, {work}, {options.rounds} rounds")
    print(f"{'':20}{'steps/CPU-s':>12}{'steps/s':>10}{'CPU ratio':>11}{'wall ratio':>11}{'return':>8}  returns")
    for name, found in runs.items():
        cpu, wall, returns = (median_of(found, key) for key in ("cpu", "wall", "episode_return"))
        ratios = [
            statistics.median(
                getattr(run, key) / getattr(other, key) for run, other in zip(found, reference, strict=True)
            )
            for key in ("cpu", "wall")
        ]
        listed = " ".join(f"{value:.0f}" for value in sorted(run.episode_return for run in found))
        print(f"{name:20}{cpu:12.0f}{wall:10.0f}{ratios[0]:11.3f}{ratios[1]:11.3f}{returns:8.1f}  {listed}")


def median_of(runs: list[Run], field: str) -> float:
    """The median of a field."""
    median: float = statistics.median(getattr(run, field) for run in runs)
    return median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="environment steps per run")
    parser.add_argument("--rounds", type=int, default=5, help="runs per contender")
    parser.add_argument("--telemetry", action="store_true", help="compare telemetry with none, instead of trainers")
    parser.add_argument("--cores", help="pin every process to these cores, as taskset writes them")
    parser.add_argument("--contender", choices=sorted(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        import torch

        torch.set_num_threads(1)
        print(json.dumps(vars(CONTENDERS[options.contender](options.steps, options.seed))))
    else:
        compare(["esper + telemetry", "esper"] if options.telemetry else ["esper", "sb3"], options)


if __name__ == "__main__":
    main()
