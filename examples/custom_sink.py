"""Two custom sinks: a function of one record, and a class with three methods.

python examples/custom_sink.py
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from esper_telemetry import PPO, PPOConfig, Record, RunInfo, RunStatus, Telemetry, attach, make_env

COLUMNS = ("episode/return_mean_100", "policy/kl", "policy/clip_frac", "value/explained_variance")


class CsvSink:
    """Writes some columns of every record to a file; a row per update."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: TextIO | None = None

    def open(self, run: RunInfo) -> None:
        self.file = self.path.open("a", newline="", encoding="utf-8")
        csv.writer(self.file).writerow(["update", "env_step", *COLUMNS])

    def write(self, records: Sequence[Record]) -> None:
        assert self.file is not None, "open comes first"
        rows = csv.writer(self.file)
        for record in records:
            axes = record.axes
            rows.writerow([axes.update, axes.env_step, *(record.values.get(key, "") for key in COLUMNS)])
        self.file.flush()

    def close(self, status: RunStatus) -> None:
        if self.file is not None:
            self.file.close()


def warn_when_clipped(record: Record) -> None:
    """Prints a warning when more than a third of the ratios are clipped."""
    share = record.values.get("policy/clip_frac", 0.0)
    if share > 1 / 3:
        print(f"update {record.axes.update}: {share:.0%} of the ratios are clipped: lower the learning rate?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-steps", type=int, default=20_480)
    parser.add_argument("--run-dir", help="a new runs/custom-sink-<time> by default")
    parser.add_argument("--csv", type=Path, default=Path("ppo.csv"))
    options = parser.parse_args()
    run_dir = options.run_dir or "auto"
    with Telemetry([CsvSink(options.csv), warn_when_clipped], run_dir=run_dir, name="custom-sink") as telemetry:
        trainer = PPO(make_env("CartPole-v1", num_envs=8), PPOConfig(seed=1))
        attach(telemetry, trainer)
        trainer.learn(options.total_steps)
    print(f"{options.csv} has a row per update")


if __name__ == "__main__":
    main()
