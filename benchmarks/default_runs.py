"""Alarms of default configurations: every trainer with its defaults, on tasks that it learns.

    python -m benchmarks.default_runs [--trainers sb3-ppo bundled] [--tasks CartPole-v1] [--seeds 1 2 3] --save FILE

Prints a row for each run: the trainer, the task, the seed, the outcome and every alarm. Finished rows are read from the file, so that
an interrupted benchmark continues.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

STEPS = {
    "CartPole-v1": 100_000,
    "Acrobot-v1": 120_000,
    "Pendulum-v1": 150_000,
    "LunarLander-v3": 100_000,
    "BipedalWalker-v3": 100_000,
    "HalfCheetah-v5": 100_000,
    "cue-recall": 60_000,
    "morphogenesis": 20_480,
}
"""Environment steps by task."""
OWN_TASKS = ("cue-recall", "morphogenesis")
"""Tasks of the bundled trainer alone."""
TRAINERS = ("bundled", "sb3-ppo", "sb3-a2c", "sb3-recurrent")
SB3 = """
import sys
from sb3_contrib import RecurrentPPO
from stable_baselines3 import A2C, PPO
from esper_telemetry import Telemetry
from esper_telemetry.adapters.sb3 import TelemetryCallback
trainer, task, seed, steps, run_dir = sys.argv[1:]
kind, policy = {"ppo": (PPO, "MlpPolicy"), "a2c": (A2C, "MlpPolicy"), "recurrent": (RecurrentPPO, "MlpLstmPolicy")}[trainer[4:]]
with Telemetry([], run_dir=run_dir) as telemetry:
    kind(policy, task, seed=int(seed), device="cpu").learn(int(steps), callback=TelemetryCallback(telemetry))
"""


def row_of(trainer: str, task: str, seed: int) -> dict[str, Any]:
    """Train; return the row of the run, with the exit code of `check` and the number of updates of each alarm."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir, steps = str(Path(folder, "run")), str(STEPS[task])
        own = ["-m", "esper_telemetry", "train", "--env", task, "--total-steps", steps, "--seed", str(seed)]
        program = ["-c", SB3, trainer, task, str(seed), steps, run_dir]
        words = [*own, "--run-dir", run_dir, "--sink", "prometheus"] if trainer == "bundled" else program
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        commands = (["diagnose", run_dir, "--json"], ["check", run_dir])
        diagnosed, checked = (
            subprocess.run([sys.executable, "-m", "esper_telemetry", *one], capture_output=True, text=True, check=False) for one in commands
        )
        verdict = json.loads(diagnosed.stdout)
        from esper_telemetry import read_run

        run = read_run(run_dir)
        raised = Counter(alarm.type for alarm in run.alarms if alarm.event == "raise")
        return {
            "trainer": trainer,
            "task": task,
            "seed": seed,
            "updates": len(run.records),
            "outcome": verdict["outcome"],
            "alarms": dict(raised),
            "texts": [alarm.text for alarm in run.alarms if alarm.event == "raise"],
            "check": checked.returncode,
        }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", nargs="+", default=TRAINERS)
    parser.add_argument("--tasks", nargs="+", default=list(STEPS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--save", type=Path, required=True)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.save.read_text().splitlines()] if options.save.exists() else []
    finished = {(row["trainer"], row["task"], row["seed"]) for row in rows}
    for task in options.tasks:
        for trainer in options.trainers if task not in OWN_TASKS else ("bundled",):
            for seed in options.seeds:
                if (trainer, task, seed) not in finished:
                    row = row_of(trainer, task, seed)
                    with options.save.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(trainer, task, seed, row["outcome"], row["alarms"], row["check"], flush=True)


if __name__ == "__main__":
    main()
