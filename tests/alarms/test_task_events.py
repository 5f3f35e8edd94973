"""Task events are reported once, and not too early."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from healthy_run import BATCH, FACTS, judged, record, values

from esper_telemetry.alarms import Verdict


def returns(curve: Callable[[int], float], updates: int = 200) -> list[Verdict]:
    """Verdicts of a run of 200 updates with this return per update."""
    made = [
        record(update, {**values(update), "episode/return_mean": curve(update), "episode/return_mean_100": 5.0})
        for update in range(1, updates + 1)
    ]
    return judged(made, {**FACTS, "total_steps": 200 * BATCH})


def told(verdicts: Iterable[Verdict]) -> list[tuple[str, Mapping[str, Any]]]:
    """Events of the task; outcomes of runs have their own tests."""
    return [(name, data) for verdict in verdicts for name, data in verdict.events if name.startswith("task/")]


def test_a_return_that_rises_and_then_stands_still() -> None:
    """The return rises from 0 to 100 in the first half."""
    found = told(returns(lambda update: float(min(update, 100))))

    assert [(name, data["update"]) for name, data in found] == [("task/improvement", 20), ("task/plateau", 140)]
    assert found[1][1]["text"] == "the return has stayed at 99.1 for about 50 updates, 99 % of the way from its lowest to its highest"


def test_a_return_that_rises_slowly_amid_noise_has_no_plateau() -> None:
    """A span of ten updates is not above the one before it by more than noise, but five of them differ by a sixth of the range."""
    found = told(returns(lambda update: 1.0 * update + 40.0 * (update * 7919 % 13) / 13))

    assert "task/plateau" not in {name for name, _ in found}


def test_a_return_that_falls() -> None:
    found = told(returns(lambda update: 50.0 if update < 100 else 10.0))

    assert [name for name, _ in found] == ["task/plateau", "task/degradation", "task/plateau"]
    assert found[1][1]["text"] == "the mean return of 10 updates has fallen from 46 to 10"


def test_neither_the_first_tenth_of_a_run_nor_noise_is_a_change() -> None:
    noise = told(returns(lambda update: 5.0 + (update * 7919 % 13) / 13))

    assert told(returns(float, 19)) == []
    assert {name for name, _ in noise} == {"task/plateau"}
