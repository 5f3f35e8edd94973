"""The bed of real programs: its declarations, and the rule that says by returns alone what a run does."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest
from bed_programs import PROGRAMS_OF_BED, WRONG
from bed_truth import harm, judged


def episodes(levels: list[float], *, each: int = 10) -> list[tuple[int, float]]:
    """Ten episodes of 10 steps per level, one above and one below it in turn."""
    returns = [level + (1 if index % 2 else -1) for level in levels for index in range(each)]
    return [(10 * (index + 1), value) for index, value in enumerate(returns)]


@pytest.mark.parametrize(
    ("levels", "kind"),
    [
        ([5, 5, 6, 7, 8, 9, 9, 9, 9, 9], "learns"),
        ([5, 5, 5, 5, 5, 5, 5, 5, 5, 5], "flat"),
        ([5, 5, 5, 5, 5, 5, 5, 5, 5.4, 5.4], "flat"),  # less than half of the first episodes' spread of 1
        ([5, 4, 3, 3, 3, 3, 3, 3, 3, 3], "declining"),
        ([5, 6, 9, 9, 9, 9, 9, 7, 6.5, 6], "declining"),  # more than half of the rise of 4 is lost
    ],
)
def test_the_truth_is_told_from_returns(levels: list[float], kind: str) -> None:
    assert judged(episodes(levels)).kind == kind
    assert judged(episodes(levels, each=2)).kind == "undecided"


def test_harm_is_measured_beside_the_correct_twin(tmp_path: Path) -> None:
    """Two of three seeds are flat where the twin learns; a program that fails like its twin does no harm."""
    rise, flat = [5.0, 5, 6, 7, 8, 9, 9, 9, 9, 9], [5.0] * 10
    runs = {"twin": [rise, rise, flat], "broken": [flat, rise, flat], "hard": [flat, flat, flat]}
    for name, seeds in runs.items():
        for seed, levels in enumerate(seeds, 1):
            directory = tmp_path / name / str(seed)
            directory.mkdir(parents=True)
            (directory / "run.json").write_text(json.dumps({"exit": 0}))
            (directory / "returns.txt").write_text("".join(f"{step} {value}\n" for step, value in episodes(levels)))

    assert harm(tmp_path, "broken", "twin", (1, 2, 3)) is True
    assert harm(tmp_path, "twin", "twin", (1, 2, 3)) is False
    assert harm(tmp_path, "broken", "hard", (1, 2, 3)) is False
    assert harm(tmp_path, "broken", "never run", (1, 2, 3)) is None


def test_the_programs_are_what_the_page_says() -> None:
    """Every edit still fits the healthy program; siblings share a half; each wrong program has causes and a correct twin."""
    for program in PROGRAMS_OF_BED:
        compile(program.command(1, "run")[0], program.name, "exec")
    names = [program.name for program in PROGRAMS_OF_BED]
    families = sorted((program.family, program.half) for program in PROGRAMS_OF_BED if program.kind != "correct")

    assert len(set(names)) == len(names)
    assert len(WRONG) >= 40 and sum(program.source.startswith("https://") for program in WRONG) >= 20
    assert all(program.causes and program.twin in names for program in WRONG)
    assert all(len({half for _, half in group}) == 1 for _, group in groupby(families, key=lambda one: one[0]))
    assert sum(program.kind == "published" for program in PROGRAMS_OF_BED) >= 15
