"""Make `esper_telemetry/alarms/healthy_values.json`: quantiles of metrics in healthy runs by kind of task.

python benchmarks/healthy_values.py DIRECTORY [--seeds 2]
python benchmarks/healthy_values.py --corpus

Trains the bundled PPO and Stable-Baselines3 on classic control and cue recall, in DIRECTORY; existing runs are reused.
`--corpus` uses the runs of correct programs in the tuning half of `benchmarks/mistakes`. Other kinds of task keep their rows.
A run counts if its outcome is solved, learning or converged and no alarm about training was raised.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mistakes.corpus import TASK_PROGRAMS

from esper_telemetry.alarms.diagnosis import diagnose
from esper_telemetry.alarms.verdict.run_outcome import GOOD
from esper_telemetry.alarms.verdict.unusual import RunValues, kind_of_task, quantiles_of
from esper_telemetry.core.facts import Facts
from esper_telemetry.journal.read import read_run

RUNS = Path(__file__).parents[1] / "runs" / "mistakes" / "tasks"
TABLE = Path(__file__).parents[1] / "esper_telemetry" / "alarms" / "healthy_values.json"

BUNDLED = {
    "CartPole-v1": ("50000",),
    "Acrobot-v1": ("80000",),
    "Pendulum-v1": ("150000",),
    "cue-recall": ("60000", "--policy", "lstm"),
    "CartPole-v1-lstm": ("60000", "--policy", "lstm", "--mask-velocity"),
}
SB3 = {
    "CartPole-v1": (50_000, 8, {"n_steps": 128, "batch_size": 256, "n_epochs": 10}),
    "Acrobot-v1": (100_000, 16, {"n_steps": 128, "n_epochs": 4, "gae_lambda": 0.94}),
    "Pendulum-v1": (100_000, 4, {"n_steps": 512, "gamma": 0.9, "learning_rate": 1e-3, "n_epochs": 10}),
}
"""Environments with total steps, number of environments and settings."""

SB3_SCRIPT = """
import json, sys
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from esper_telemetry import Telemetry
from esper_telemetry.adapters.sb3 import TelemetryCallback
env, run_dir, seed, steps, count, settings = json.loads(sys.argv[1])
model = PPO("MlpPolicy", make_vec_env(env, count, seed=seed), seed=seed, device="cpu", **settings)
with Telemetry([], run_dir=run_dir) as telemetry:
    model.learn(steps, callback=TelemetryCallback(telemetry))
"""


def train(directory: Path, seeds: int) -> None:
    """Train the missing runs."""
    for seed in range(1, seeds + 1):
        for name, (steps, *options) in BUNDLED.items():
            path = directory / f"bundled-{name}-{seed}"
            words = ["--env", name.removesuffix("-lstm"), "--total-steps", steps, "--seed", str(seed), *options]
            command = ["train", *words, "--threads", "1", "--sink", "console", "--run-dir", str(path)]
            if not path.exists():
                subprocess.run([sys.executable, "-m", "esper_telemetry", *command], stdout=subprocess.DEVNULL, check=False)
        for name, (total, count, settings) in SB3.items():
            path = directory / f"sb3-{name}-{seed}"
            arguments = json.dumps([name, str(path), seed, total, count, settings])
            if not path.exists():
                subprocess.run([sys.executable, "-c", SB3_SCRIPT, arguments], stdout=subprocess.DEVNULL, check=False)


def runs_of_corpus() -> Iterator[Path]:
    """Yield the runs of correct programs in the tuning half of the corpus."""
    twins = {one.twin for one in TASK_PROGRAMS if one.kind == "wrong" and one.half == "tuning"}
    for one in TASK_PROGRAMS:
        if one.name in twins or (one.half == "tuning" and one.kind in ("variant", "published")):
            yield from sorted((RUNS / one.name).glob("*/run"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--corpus", action="store_true")
    options = parser.parse_args()
    if options.corpus:
        paths = list(runs_of_corpus())
    elif options.directory:
        options.directory.mkdir(parents=True, exist_ok=True)
        train(options.directory, options.seeds)
        paths = sorted(options.directory.iterdir())
    else:
        parser.error("give DIRECTORY or --corpus")
    kinds: dict[str, list[dict[str, list[float]]]] = {}
    for path in paths:
        run = read_run(path)
        verdict = diagnose(run.info.facts, run.records, status=run.status)
        alarms = {incident.cause for incident in verdict.incidents if not incident.cause.startswith("telemetry/")}
        healthy = verdict.outcome.kind in GOOD and not alarms
        left_out = "" if healthy else " (left out)"
        name = path.relative_to(path.parents[2])
        print(f"{name}: {verdict.outcome.text}; {', '.join(sorted(alarms)) or 'no alarm'}{left_out}")
        if healthy:
            values = RunValues()
            for record in run.records:
                values.add(record)
            samples = {key: list(numbers) for key, numbers in values.samples.items()}
            for kind in (kind_of_task(Facts.of(run.info.facts)), "any"):
                kinds.setdefault(kind, []).append(samples)
    table = {
        kind: {key: [float(f"{value:.3g}") for value in quantiles] for key, quantiles in quantiles_of(runs)}
        for kind, runs in sorted(kinds.items())
    }
    before = json.loads(TABLE.read_text(encoding="utf-8"))
    counts = {**before["runs"], **{kind: len(runs) for kind, runs in sorted(kinds.items())}}
    table = {**before["kinds"], **table}
    lines = [
        f'  "{kind}": {{\n' + ",\n".join(f'   "{key}": {json.dumps(row)}' for key, row in rows.items()) + "\n  }"
        for kind, rows in table.items()
    ]
    text = f'{{\n "runs": {json.dumps(counts)},\n "kinds": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
