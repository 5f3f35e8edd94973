"""A run as on every system: recorded, delivered, locked, resumed and read. `.github/workflows/platforms.yml` runs it on three systems.

Usage: python tests/refusals/every_platform.py [TRAINING], in an empty directory; prints the digest of the weights.
"""

import sys
from pathlib import Path

from trainings import TRAININGS, nothing

from esper_telemetry import PrometheusSink, Telemetry, read_run
from esper_telemetry.cli.main import run
from esper_telemetry.journal.lock import Role, is_held

RUN = Path("run")
COMMANDS = (["diagnose", "run"], ["doctor", "run"], ["report", "run"], ["metrics", "policy/kl"])


def main(training: str = "bundled") -> None:
    sinks: list[PrometheusSink | str] = [PrometheusSink("metrics.prom"), "tensorboard"]
    with Telemetry(sinks, run_dir=RUN, offload=True, close_timeout=120.0) as telemetry:
        assert is_held(RUN, Role.TRAINER)
        weights = TRAININGS[training](telemetry, nothing)
        try:
            Telemetry([], run_dir=RUN, resume=True)
        except (BlockingIOError, FileExistsError):  # the second one if the journal is still empty
            print(weights)
    with Telemetry(sinks, run_dir=RUN, resume=True, close_timeout=120.0) as telemetry:
        telemetry.load_state_dict({"update": 100, "env_step": 100_000, "gradient_step": 100})
        telemetry.log({"my/number": 1.0})
        telemetry.flush(env_step=100_001)
    records = read_run(RUN).records
    assert len(records) > 5 and records[-1].values["my/number"] == 1.0
    assert "esper_" in Path("metrics.prom").read_text(encoding="utf-8")
    assert [*(RUN / "tensorboard").glob("events.*")]
    assert [run(command) for command in COMMANDS] == [0] * len(COMMANDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
