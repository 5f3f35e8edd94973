"""Three backends and the process beside the trainer; and `WandbCallback` on the same W&B run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import sb3_models
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper_telemetry import read_run
from esper_telemetry.sinks.wandb_log import rows_in

pytestmark = pytest.mark.sb3

KEYS = ("policy/kl", "grad/actor/norm_preclip", "sb3/train/approx_kl", "lstm/h/rms")


def test_all_three_backends_hold_what_the_journal_holds(tmp_path: Path) -> None:
    run = sb3_models.watched(
        sb3_models.recurrent(), tmp_path / "run", sinks=["tensorboard", "wandb:sb3?mode=offline", "mlflow"], offload=True
    )

    wanted = {key: [record.values[key] for record in run.records] for key in KEYS}
    steps = [record.axes.env_step for record in run.records]
    scalars = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    client = MlflowClient(f"sqlite:///{tmp_path / 'run/mlflow.db'}")
    (found,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    for key in KEYS:
        events = scalars.Scalars(key)
        assert [event.step for event in events] == steps
        assert [event.value for event in events] == pytest.approx(wanted[key], rel=1e-6)
        history = client.get_metric_history(found.info.run_id, key)
        assert [(entry.step, entry.value) for entry in history] == list(zip(steps, wanted[key], strict=True))
