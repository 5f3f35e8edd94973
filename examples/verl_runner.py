"""verl's GRPO under telemetry, without an edit of verl's code: an environment variable switches the installed plugin on.

    python examples/verl_runner.py && tensorboard --logdir runs

It needs `pip install -e '.[verl,tensorboard]'`. Nothing is downloaded: a two-layer Llama with random weights learns on a CPU to repeat the
letter of its prompt. On GPUs, set the same two variables before verl's own command, `python -m verl.trainer.main_ppo`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from esper_telemetry.lab.verl_cpu import ENVIRONMENT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--workers", type=int, default=1, help="processes that learn together")
    parser.add_argument("--critic", action="store_true", help="PPO with a critic instead of GRPO")
    parser.add_argument("--run-dir", type=Path, help="a new runs/verl-<time> by default")
    parser.add_argument("--sinks", nargs="*", default=["console", "tensorboard"], help="such as wandb mlflow")
    options = parser.parse_args()
    run_dir = options.run_dir or Path("runs", f"verl-{time.strftime('%Y%m%d-%H%M%S')}")

    os.environ["ESPER_TELEMETRY_RUN_DIR"] = str(run_dir.absolute())  # Ray's processes have other working directories
    os.environ["ESPER_TELEMETRY_SINKS"] = ",".join(options.sinks)
    os.environ |= ENVIRONMENT  # verl on a CPU; not needed on GPUs

    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo  # reads the variables

    from esper_telemetry.lab.small_language_model import save_model
    from esper_telemetry.lab.verl_cpu.verl_training import cpu_config, ray_settings

    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory), seed=1)
        estimator = "gae" if options.critic else "grpo"
        settings = {"algorithm__adv_estimator": estimator, **ray_settings(options.workers)}
        run_ppo(cpu_config(model, steps=options.steps, workers=options.workers, **settings), TaskRunnerV1)


if __name__ == "__main__":
    main()
