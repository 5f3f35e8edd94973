"""A run that survives being killed: start it, kill it, start it again with the same command.

python examples/resume.py --run-dir runs/mine
"""

from __future__ import annotations

import argparse
from pathlib import Path

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env
from esper_telemetry.ppo import Checkpoints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-steps", type=int, default=50_000)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/resume"))
    options = parser.parse_args()
    resume = (options.run_dir / "journal.jsonl").exists()

    with Telemetry(["console", "tensorboard"], run_dir=options.run_dir, resume=resume) as telemetry:
        trainer = PPO(make_env("CartPole-v1", num_envs=8), PPOConfig(seed=1))
        attach(telemetry, trainer)
        checkpoints = Checkpoints(trainer, options.run_dir / "checkpoints", every=1_000)
        if checkpoints.latest.exists():
            trainer.load(checkpoints.latest)  # without one, training restarts; existing records are kept
        trainer.learn(total_steps=options.total_steps)
        checkpoints.save()


if __name__ == "__main__":
    main()
