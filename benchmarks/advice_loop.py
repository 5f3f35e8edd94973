"""Loops of a program that reads only `diagnose --json`: it trains, makes the first change in `advice`, and trains again.

python benchmarks/advice_loop.py            # three programs with one mistake each; 4 minutes
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mistakes.corpus import BY_NAME

TELEMETRY = (sys.executable, "-m", "esper_telemetry")

RATE = "train --env CartPole-v1 --total-steps 40000 --seed 1 --learning-rate 0.3 --run-dir run"
"""Options of the bundled trainer, with a learning rate a thousand times as high as usual."""

ACTIONS = """
import gymnasium
import numpy as np
from stable_baselines3 import PPO
from esper_telemetry import Telemetry
from esper_telemetry.adapters.sb3 import TelemetryCallback

class Reach(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-100, 100, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.target = 0, self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.target, {}

    def step(self, action):
        self.steps += 1
        cost = float(abs(action[0] / 100 - self.target[0]))
        self.target = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.target, -cost, False, self.steps == 32, {}

env = Reach()
PPO("MlpPolicy", env, seed=1, n_steps=512).learn(20000, callback=TelemetryCallback(Telemetry(run_dir="run")))
"""
"""Stable-Baselines3 with actions whose span is 200 times the policy's standard deviation."""

ENDS = BY_NAME["script-ends_ignored"]
"""A script whose advantages run across the ends of episodes."""
ENDS_COMMAND = "run --run-dir run program.py --env-id CartPole-v1 --total-timesteps 40000 --seed 1"


def diagnosis(command: Sequence[str], program: str) -> dict[str, Any]:
    """Train in an empty directory, with the program as `program.py`, and return the answer of `diagnose --json`."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "program.py").write_text(program)
        silent: Any = {"cwd": directory, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": True}
        subprocess.run(command, **silent)
        answer = subprocess.run([*TELEMETRY, "diagnose", "run", "--json"], cwd=directory, capture_output=True, check=True)
    return dict(json.loads(answer.stdout))


def other_rate(advice: dict[str, Any]) -> dict[str, Any]:
    """Change the option of the command that the answer names, and train again."""
    option = rf"(?<=--{advice['setting'].replace('_', '-')} )\S+"
    command, changes = re.subn(option, str(advice["value"]), RATE)
    assert changes == 1, f"the command has no setting {advice['setting']}"
    return diagnosis([*TELEMETRY, *command.split()], "")


def other_env(advice: dict[str, Any]) -> dict[str, Any]:
    """Put the wrapper of the answer around the environment, and train again."""
    assert advice["setting"] == "env", f"{advice['setting']} is no setting of the environment"
    return diagnosis(
        [sys.executable, "program.py"], ACTIONS.replace("env = Reach()", f"env = {advice['value']}".replace("(env", "(Reach()"))
    )


def other_line(advice: dict[str, Any]) -> dict[str, Any]:
    """Write the loop at the line of the answer as the equation says, and train again."""
    line, wrong = int(advice["place"].rpartition(":")[2]), ENDS.text()
    first, last = (wrong[: wrong.index(piece)].count("\n") + 1 for piece in ("advantages = ", "returns = advantages"))
    assert first <= line < last, f"line {line} is not in the wrong lines {first} to {last - 1}"
    return diagnosis([*TELEMETRY, *ENDS_COMMAND.split()], ENDS.correct().text())


LOOPS = {
    "learning rate 0.3, `train`": ([*TELEMETRY, *RATE.split()], "", other_rate),
    "actions in [-100, 100], Stable-Baselines3": ([sys.executable, "program.py"], ACTIONS, other_env),
    "advantages without `1 - done`, `run`": ([*TELEMETRY, *ENDS_COMMAND.split()], ENDS.text(), other_line),
}
"""First command, its program, and what makes the change."""


def main() -> None:
    """Print the table of docs/agents.md."""
    print("| run | outcome | `setting` | `value` | outcome after the change |\n|---|---|---|---|---|")
    for name, (command, program, change) in LOOPS.items():
        before = diagnosis(command, program)
        advice = before["advice"][0]
        after = change(advice)
        place = f", at `{advice['place']}`" if advice["place"] else ""
        cells = (before["outcome"]["text"], f"`{advice['setting']}`{place}", f"`{advice['value']}`", after["outcome"]["text"])
        print("|", " | ".join((name, *cells)), "|", flush=True)


if __name__ == "__main__":
    main()
