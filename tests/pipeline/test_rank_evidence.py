"""What ranks agree on in addition to numbers: sampled updates, and the rank whose transitions are the evidence."""

from pathlib import Path

import pytest
import torch
from two_ranks import run_together

from esper_telemetry import Telemetry, read_run
from esper_telemetry.telemetry import session_of
from esper_telemetry.updates.update import JoinedMinibatches, Update

EXPLODED = torch.tensor([0.0, 5.0, -0.1, 0.1])


def jumping(log_ratio: torch.Tensor) -> Update:
    """An update of one minibatch."""
    return Update(
        minibatches=JoinedMinibatches(
            epochs=(0,), counts=(len(log_ratio),), log_ratio=log_ratio, advantages=torch.ones(len(log_ratio)), valid=None, losses={}
        )
    )


def update(rank: int, run_dir: str) -> list[int]:
    """Run one update whose ratios explode in different places; return the sampling periods before and after."""
    telemetry = Telemetry(run_dir=run_dir)
    session_of(telemetry).start(facts={"ranks": 2, "clip": 0.2})
    found = [session_of(telemetry).sampling.every]
    session_of(telemetry).sampling.proposed = 4 if rank == 0 else 32
    session_of(telemetry).submit(jumping(EXPLODED + rank))
    telemetry.flush(env_step=4)
    telemetry.close()
    return [*found, session_of(telemetry).sampling.every]


@pytest.mark.system
def test_ranks_look_closely_as_often_as_the_first_one_can_afford(tmp_path: Path) -> None:
    assert run_together(update, tmp_path, str(tmp_path / "run")) == [[8, 4], [8, 4]]


def test_evidence_is_of_the_first_rank_and_says_so(tmp_path: Path) -> None:
    """Rank 1 has a log-ratio of 6: the record has it, but the evidence shows rank 0's transitions."""
    run_together(update, tmp_path, str(tmp_path / "run"))
    run = read_run(tmp_path / "run")
    (alarm,) = [alarm for alarm in run.alarms if alarm.type == "policy/kl_spike"]

    assert run.records[0].values["policy/logratio/absmax"] == 6.0
    assert alarm.evidence["rank"] == 0
    assert [row["log_ratio"] for row in alarm.evidence["worst"]] == pytest.approx([5.0, 0.1, -0.1, 0.0])
