"""What `TelemetryCallback` costs Stable-Baselines3: processor time with it over that without.

    python benchmarks/adapters.py                        # five models, five rounds; ten minutes
    python benchmarks/adapters.py ppo --rounds 9

At NORMAL with TensorBoard, W&B (offline) and MLflow. Runs with and without take turns, each in a process of its own with one torch
thread; figures are medians over the rounds, ratios medians of the rounds' ratios. `thread` is the training thread's processor time in
`learn`, which telemetry slows training by; `process` that of all threads of the process. Summaries and backends have processes of
their own, on another core.
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

SINKS = ("tensorboard", "wandb:overhead?mode=offline", "mlflow")
LIMIT = 1.05


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

    from esper_telemetry.faults.sb3.beds import MaskedArms

    return MaskablePPO("MlpPolicy", make_vec_env(MaskedArms, 8, seed=1), n_steps=256, seed=1, device="cpu")


MODELS: Mapping[str, tuple[Callable[[], Any], int]] = {
    "ppo": (ppo, 16_384),
    "ppo_pendulum": (ppo_pendulum, 16_384),
    "a2c": (a2c, 65_536),
    "recurrent_ppo": (recurrent_ppo, 8_192),
    "maskable_ppo": (maskable_ppo, 16_384),
}
"""Each model with its number of environment steps."""


def alone(name: str, watched: bool) -> dict[str, float]:
    """Seconds of one run, in this process."""
    import torch

    torch.set_num_threads(1)
    from esper_telemetry import Telemetry
    from esper_telemetry.adapters.sb3 import TelemetryCallback

    make, steps = MODELS[name]
    model = make()
    with tempfile.TemporaryDirectory() as directory:
        sinks = SINKS if watched else ()
        level = "normal" if watched else "off"
        with Telemetry(sinks, run_dir=f"{directory}/run", level=level, close_timeout=60) as telemetry:
            start = time.thread_time(), time.process_time(), time.perf_counter()
            model.learn(steps, callback=TelemetryCallback(telemetry) if watched else None)
            thread, process, wall = time.thread_time(), time.process_time(), time.perf_counter()
    return {"thread": thread - start[0], "process": process - start[1], "wall": wall - start[2]}


def spawned(name: str, watched: bool) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--alone", name, str(int(watched))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, env=environment
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(name: str, rounds: int) -> dict[str, Any]:
    """Figures of one model."""
    pairs = [(spawned(name, False), spawned(name, True)) for _ in range(rounds)]
    ratios = {kind: [on[kind] / off[kind] for off, on in pairs] for kind in ("thread", "process", "wall")}
    return {
        "model": name,
        "steps": MODELS[name][1],
        "seconds": statistics.median(off["thread"] for off, _ in pairs),
        **{kind: statistics.median(found) for kind, found in ratios.items()},
        "rounds": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}; all by default")
    parser.add_argument("--rounds", type=int, default=5, help="turns of both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there, too")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"a model is one of {', '.join(MODELS)}, got {', '.join(sorted(unknown))}")
    if options.alone:
        print(json.dumps(alone(options.alone[0], options.alone[1] == "1")))
        return
    found = []
    print(
        f"{'model':>14} {'steps':>7} {'s bare':>7} {'thread':>7} {'process':>8} {'wall':>6}   goal: thread <= {LIMIT}"
    )
    for name in options.models or MODELS:
        row = compare(name, options.rounds)
        found.append(row)
        figures = f"{row['seconds']:7.2f} {row['thread']:7.3f} {row['process']:8.3f} {row['wall']:6.3f}"
        print(f"{name:>14} {row['steps']:>7} {figures}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
