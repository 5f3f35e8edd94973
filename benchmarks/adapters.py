"""Processor time of Stable-Baselines3 with `TelemetryCallback` over that without.

    python benchmarks/adapters.py                        # five models, forty turns; fifteen minutes
    python benchmarks/adapters.py ppo --turns 80

At NORMAL with TensorBoard, W&B (offline) and MLflow. One model trains a second or two with the callback and as long without, in turns, in
a process of its own with one torch thread: two processes with the same work differ by more than the effect. Figures are medians of the
turns' ratios, with the quartiles. `thread` is the training thread's processor time, by which telemetry slows training; `process` that of
all threads of the process. The worker and the sink process run on another core.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import turns

SINKS = ("tensorboard", "wandb:overhead?mode=offline", "mlflow")
MAX_RATIO = 1.05


def ppo() -> Any:
    from stable_baselines3 import PPO

    return PPO("MlpPolicy", "CartPole-v1", seed=1, device="cpu")


def ppo_pendulum() -> Any:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env("Pendulum-v1", 8, seed=1)
    return PPO("MlpPolicy", env, n_steps=256, batch_size=128, seed=1, device="cpu")


def a2c() -> Any:
    from stable_baselines3 import A2C
    from stable_baselines3.common.env_util import make_vec_env

    return A2C("MlpPolicy", make_vec_env("CartPole-v1", 8, seed=1), n_steps=64, seed=1, device="cpu")


def recurrent_ppo() -> Any:
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env("CartPole-v1", 8, seed=1)
    return RecurrentPPO("MlpLstmPolicy", env, policy_kwargs={"lstm_hidden_size": 64}, seed=1, device="cpu")


def maskable_ppo() -> Any:
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.env_util import make_vec_env

    from esper_telemetry.lab.faults.sb3_models import MaskedArms

    return MaskablePPO("MlpPolicy", make_vec_env(MaskedArms, 8, seed=1), n_steps=256, seed=1, device="cpu")


MODELS: Mapping[str, tuple[Callable[[], Any], int]] = {
    "ppo": (ppo, 1),
    "ppo_pendulum": (ppo_pendulum, 1),
    "a2c": (a2c, 32),
    "recurrent_ppo": (recurrent_ppo, 1),
    "maskable_ppo": (maskable_ppo, 1),
}
"""Models with the rollouts of a turn."""
WARM_UP_TURNS = 5


def train(name: str, count: int) -> dict[str, list[turns.Figures]]:
    """Figures of every turn, in this process."""
    import torch

    torch.set_num_threads(1)
    from esper_telemetry import Telemetry
    from esper_telemetry.adapters.sb3 import TelemetryCallback

    make, rollouts = MODELS[name]
    model = make()
    steps = rollouts * model.n_steps * model.n_envs
    figures: dict[str, list[turns.Figures]] = {"bare": [], "callback": []}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory,
        Telemetry(SINKS, run_dir=f"{directory}/run") as telemetry,
    ):
        callbacks = {"bare": None, "callback": TelemetryCallback(telemetry)}
        for turn in range(WARM_UP_TURNS + count):
            for kind in sorted(figures, reverse=turn % 2 == 1):
                time.sleep(turns.PAUSE_SECONDS)
                begun = turns.clocks()
                model.learn(steps, callback=callbacks[kind], reset_num_timesteps=False)
                if turn >= WARM_UP_TURNS:
                    figures[kind].append(turns.since(begun))
    return figures


def compare(name: str, count: int) -> dict[str, Any]:
    """Figures of one model, from a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--alone", name, "--turns", str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    return {
        "model": name,
        "seconds": statistics.median(one["thread"] for one in figures["bare"]),
        **{kind: turns.ratio(figures["callback"], figures["bare"], kind) for kind in ("thread", "process", "wall")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}; all by default")
    parser.add_argument("--turns", type=int, default=40, help="of both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there, too")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"a model is one of {', '.join(MODELS)}, got {', '.join(sorted(unknown))}")
    if options.alone:
        print(json.dumps(train(options.alone, options.turns)))
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"}
    rows = []
    print(f"{'model':>14} {'s bare':>7} {'thread':>22} {'process':>22} {'wall':>22}   goal: thread <= {MAX_RATIO}")
    for name in options.models or MODELS:
        row = compare(name, options.turns)
        rows.append(row)
        print(
            f"{name:>14} {row['seconds']:7.2f} {row['thread']!s:>22} {row['process']!s:>22} {row['wall']!s:>22}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
