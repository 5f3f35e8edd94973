"""Stable-Baselines3's PPO under telemetry: one more line, and its alarms as they come.

python examples/sb3.py && tensorboard --logdir runs
"""

from __future__ import annotations

import argparse

from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from esper_telemetry import Telemetry
from esper_telemetry.adapters.sb3 import TelemetryCallback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-steps", type=int, default=50_000)
    parser.add_argument("--run-dir", help="a new runs/sb3-cartpole-<time> by default")
    parser.add_argument("--sinks", nargs="*", default=["console", "tensorboard"], help="such as wandb mlflow")
    options = parser.parse_args()

    model = PPO("MlpPolicy", make_vec_env("CartPole-v1", 8, seed=1), n_steps=128, batch_size=256, seed=1, device="cpu")
    with Telemetry(options.sinks, run_dir=options.run_dir or "auto", name="sb3-cartpole") as telemetry:
        telemetry.on_alarm(lambda alarm: print(f"{alarm.event}: {alarm.type}. {alarm.text}"))
        model.learn(options.total_steps, callback=TelemetryCallback(telemetry))
    print(f"journal: {telemetry.run_dir}/journal.jsonl")


if __name__ == "__main__":
    main()
