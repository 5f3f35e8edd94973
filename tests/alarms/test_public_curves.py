"""Outcomes of returns from public repositories, compared with what a reader of the plot says.

`public_curves.json.gz` has 103 curves of six repositories, drawn at random, and 62 parts of them: beginnings, and later parts as a resumed
run has. Rows are the number of episodes, the mean return and its standard deviation; at most 200 rows per curve. The labels were given by
the plots before any outcome was computed; a curve with several labels allows each of them. The misses of every second curve
were not read before the rules were final, but its score was seen when a limit was chosen.
"""

import gzip
import json
from pathlib import Path
from typing import Any, Final

from esper_telemetry.alarms.verdict.run_outcome import outcome_of
from esper_telemetry.core.record import Axes, Record, RunStatus

GOAL: Final = 0.95
MISSES: Final = {
    "ppo-Walker2DBulletEnv-v0_1": "converged",
    "td3-TD3_InvertedDoublePendulum-v1_2": "flat",
    "exploration-PPO-Swimmer-v2-794018 (first 15%)": "too short to tell",
    "a2c-BeamRiderNoFrameskip-v4_1 (first 15%)": "flat",
    "ppo-AsteroidsNoFrameskip-v4_1 (rows 20 to 38)": "flat",
    "exploration-ES-InvertedDoublePendulum-v2-899863 (rows 45 to 76)": "flat",
}
"""Outcomes that contradict the label; a reader of each of these plots says that the return rises."""


def curves() -> list[dict[str, Any]]:
    """The curves; a part has the rows and the key of its curve."""
    text = gzip.decompress((Path(__file__).parent / "public_curves.json.gz").read_bytes())
    stored: list[dict[str, Any]] = json.loads(text)["curves"]
    for curve in stored:
        if "of" in curve:
            whole = next(one for one in stored if one["name"] == curve["of"])
            curve |= {"key": whole["key"], "rows": whole["rows"][slice(*curve["rows"])]}
    return stored


def records(curve: dict[str, Any]) -> list[Record]:
    rows = []
    for update, (episodes, mean, std) in enumerate(curve["rows"], 1):
        spread = std if curve["key"] == "episode/return_mean" else None
        values = {curve["key"]: mean, "episode/count": episodes, "episode/return_std": spread}
        known = {key: float(value) for key, value in values.items() if value is not None}
        rows.append(Record(update, Axes(update, 1000 * update, 16 * update, 0.0), known))
    return rows


def test_outcomes_are_what_a_reader_of_the_plot_says() -> None:
    outcomes = {curve["name"]: outcome_of(records(curve), status=RunStatus.FINISHED).kind for curve in curves()}
    misses = {curve["name"]: str(outcomes[curve["name"]]) for curve in curves() if outcomes[curve["name"]] not in curve["label"].split("|")}

    assert len(outcomes) == 165
    assert misses == MISSES
    assert 1 - len(misses) / len(outcomes) >= GOAL
