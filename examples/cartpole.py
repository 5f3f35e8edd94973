"""The bundled trainer with telemetry in TensorBoard and, if installed, MLflow and W&B (offline without a key).

python examples/cartpole.py && tensorboard --logdir runs
"""

from __future__ import annotations

import argparse

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-steps", type=int, default=50_000)
    parser.add_argument("--run-dir", help="a new runs/cartpole-<time> by default")
    parser.add_argument("--sinks", nargs="*", default=["console", "tensorboard"], help="such as wandb mlflow")
    options = parser.parse_args()

    with Telemetry(options.sinks, run_dir=options.run_dir or "auto", name="cartpole") as telemetry:
        trainer = PPO(make_env("CartPole-v1", num_envs=8), PPOConfig(seed=1))
        attach(telemetry, trainer)
        trainer.learn(total_steps=options.total_steps)
    print(f"journal: {telemetry.run_dir}/journal.jsonl")


if __name__ == "__main__":
    main()
