import logging
from typing import Any

import pytest
from sink_runs import HISTOGRAM, METRICS, record, run_info

from esper_telemetry.core.record import MetricInfo, RunInfo
from esper_telemetry.sinks.layout import KeyBudget


def budget(max_keys: int = 300, run: RunInfo | None = None, **settings: Any) -> KeyBudget:
    return KeyBudget(run or run_info(), "W&B", max_keys=max_keys, details=settings.get("details", False))


def test_the_least_important_families_are_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Three of five keys fit: returns rank first, then the policy; perf and telemetry are last."""
    values = dict.fromkeys(["perf/a", "telemetry/b", "policy/c", "episode/d", "policy/e"], 1.0)
    limited = budget(3, run_info(metrics={}))

    selected = limited.select(record(1, values))
    limited.select(record(2, {**values, "perf/late": 1.0}))

    assert set(selected.values) == {"episode/d", "policy/c", "policy/e"}
    assert [entry.getMessage() for entry in caplog.records] == [
        "W&B shows 3 keys and leaves 2 others (of perf, telemetry) to the journal; max_keys= raises that limit"
    ]


def test_histories_of_other_keys_come_last() -> None:
    """Two of three keys fit: a whole family ranks before the history of an important key."""
    history = MetricInfo(unit="as key", question="What is its level?")
    run = run_info(metrics={**METRICS, "{key}/ema": history})
    limited = budget(2, run, details=True)

    selected = limited.select(record(1, dict.fromkeys(["episode/return_mean_100/ema", "perf/a", "policy/kl_max"], 1.0)))

    assert set(selected.values) == {"perf/a", "policy/kl_max"}
    assert "policy/kl/ema" not in budget(300, run).select(record(1, {"policy/kl/ema": 1.0})).values


def test_a_key_that_was_shown_stays() -> None:
    limited = budget(1, run_info(metrics={}))
    limited.select(record(1, {"perf/a": 1.0}))

    assert set(limited.select(record(2, {"perf/a": 1.0, "episode/b": 1.0})).values) == {"perf/a"}


def test_room_is_kept_for_the_returns_that_come_late() -> None:
    """Five keys. Two keys declared as minimal are still missing, which reserves one place in five."""
    limited = budget(5)

    early = limited.select(record(1, {f"perf/{name}": 1.0 for name in "abcdefg"}))
    late = limited.select(record(2, {"episode/return_mean": 1.0}))

    assert len(early.values) == 4
    assert set(late.values) == {"episode/return_mean"}


def test_keys_of_somebody_elses_lead() -> None:
    selected = budget(1, run_info(metrics={})).select(record(1, {"episode/a": 1.0, "my/schedule": 1.0}))

    assert set(selected.values) == {"my/schedule"}


@pytest.mark.parametrize(
    ("settings", "facts", "has_details"),
    [
        ({}, {}, False),
        ({"details": True}, {}, True),
        ({}, {"level": "DEBUG"}, True),
        ({}, {"level": 3}, True),
        ({}, {"level": "normal"}, False),
    ],
)
def test_single_layers_are_shown_on_request_and_at_debug(
    settings: dict[str, bool], facts: dict[str, object], has_details: bool, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = budget(300, run_info(facts=facts), **settings).select(record(1, {"grad/layer/actor_0/norm": 1.0}))

    assert bool(chosen.values) is has_details
    assert not caplog.records


def test_histograms_count_as_keys_too() -> None:
    selected = budget(1, run_info(metrics={})).select(record(1, {"episode/a": 1.0}, {"policy/ratio": HISTOGRAM}))

    assert not selected.histograms


def test_no_budget_at_all_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="max_keys must be positive, got 0"):
        budget(0)


def test_nothing_is_said_while_everything_fits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    assert len(budget().select(record(1, dict.fromkeys(["policy/kl", *map(str, range(50))], 1.0))).values) == 51
    assert not caplog.records
