"""RLlib's PPO under telemetry: one more line for the configuration.

python examples/rllib_runner.py && tensorboard --logdir runs
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ray.rllib.algorithms.ppo import PPOConfig

from esper_telemetry import Telemetry
from esper_telemetry.adapters.rllib import attach_config

ROLLOUT = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=30_000)
    parser.add_argument("--learners", type=int, default=0, help="Ray actors that learn; 0 for this process")
    parser.add_argument("--env-runners", type=int, default=0, help="Ray actors with environments; 0 for this process")
    parser.add_argument("--run-dir", type=Path, help="a new runs/rllib-<time> by default")
    parser.add_argument("--sinks", nargs="*", default=["console", "tensorboard"], help="such as wandb mlflow")
    options = parser.parse_args()
    run_dir = options.run_dir.absolute() if options.run_dir else "auto"  # a learner may have another working directory

    def telemetry() -> Telemetry:
        telemetry = Telemetry(options.sinks, run_dir=run_dir, name="rllib")
        telemetry.on_alarm(lambda alarm: print(f"{alarm.event}: {alarm.type}. {alarm.text}"))
        return telemetry

    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=options.env_runners, num_envs_per_env_runner=8)
        .learners(num_learners=options.learners)
        .training(train_batch_size=ROLLOUT, minibatch_size=128, num_epochs=6, lr=1e-3, lambda_=0.95)
        .training(vf_clip_param=float("inf"), vf_loss_coeff=0.01)  # a finite limit stops the critic at larger errors
        .debugging(seed=1)
    )
    algorithm = attach_config(config, telemetry).build_algo()
    for _ in range(-(-options.total_steps // ROLLOUT)):
        algorithm.train()
    algorithm.stop()  # ends the run


if __name__ == "__main__":
    main()
