"""Diagnose a run that Stable-Baselines3 has logged, from Python.

python examples/old_logs.py csv:progress.csv        # or tensorboard:DIR, wandb:PATH, mlflow:URI?run=ID
"""

from __future__ import annotations

import sys

from esper_telemetry.alarms import diagnose
from esper_telemetry.importers import read_foreign, read_source


def main() -> None:
    run = read_foreign(read_source(sys.argv[1]))
    verdicts = diagnose(run.facts, run.records)
    print(f"{run.name}: {len(run.records)} updates of {run.trainer}")
    for incident in verdicts.incidents:
        print(f"{incident.cause}: {incident.main.text}")
    print(f"{len(verdicts.unanswered)} questions could not be answered, because of values that {run.trainer} does not log")


if __name__ == "__main__":
    main()
