"""A custom alarm: a number that you log must not stay below a bound for three updates in a row."""

from __future__ import annotations

from pathlib import Path

import tyro

from esper_telemetry import Telemetry
from esper_telemetry.alarms import AlarmRule, OnRamp, Ramp, Thresholds

COVERAGE = Ramp("coverage", 0.5, 0.1, "share of the map that the agents have seen")
LOST = AlarmRule(
    type="explore/coverage_lost",
    inputs=("explore/coverage",),
    meaning="The agents see less of the map than they should.",
    action="Raise entropy_coef; look at a video of an episode.",
    judge=OnRamp("explore/coverage", COVERAGE, "the agents see {percent} of the map{usual}"),
    bounds=(COVERAGE,),
    source="a third of the map is enough to find the goal",
    histories=("explore/coverage",),
    n_on=3,
)


def main(total_steps: int = 20_480, run_dir: Path | None = None, threshold: tuple[str, ...] = ()) -> None:
    """Log a share that shrinks, and print the alarms that it raises.

    Args:
        total_steps: environment steps.
        run_dir: directory of the run.
        threshold: other bounds as NAME=VALUE, such as coverage_low=0.4.
    """
    detect = Thresholds.parse(threshold, alarms=LOST)
    with Telemetry(["console"], run_dir=run_dir or "auto", alarms=LOST, detect=detect) as telemetry:
        telemetry.on_alarm(lambda alarm: print(f"{alarm.event}: {alarm.text}"))
        for update in range(total_steps // 256):
            telemetry.log({"explore/coverage": 0.9 * 0.7**update})
            telemetry.flush(env_step=(update + 1) * 256)


if __name__ == "__main__":
    tyro.cli(main)
