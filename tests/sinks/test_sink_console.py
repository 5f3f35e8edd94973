from dataclasses import replace

import pytest
from sink_runs import record, run_info

from esper_telemetry.core.record import RunStatus
from esper_telemetry.sinks import ConsoleSink
from esper_telemetry.sinks.console import fitting, line


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def sink() -> ConsoleSink:
    opened = ConsoleSink()
    opened.open(run_info())
    return opened


def test_a_line_holds_the_numbers_that_are_there(sink: ConsoleSink, capsys: pytest.CaptureFixture[str]) -> None:
    sink.write([record(1, {"episode/return_mean_100": 21.04, "policy/clip_frac": 0.083, "train/env_steps_per_second": 9e3})])

    assert printed(capsys) == ["update 1  step 1,000  return 21.0  steps/s 9,000  clipped 8%"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"episode/return_mean": 30.0, "episode/return_mean_100": 21.0}, "return 21.0"),
        ({"episode/return_mean": 30.0}, "return of the update 30.0"),
    ],
)
def test_the_return_is_that_of_the_last_hundred_episodes_or_says_what_it_is(
    values: dict[str, float], text: str, sink: ConsoleSink, capsys: pytest.CaptureFixture[str]
) -> None:
    sink.write([record(1, values)])

    assert printed(capsys) == [f"update 1  step 1,000  {text}"]


def test_a_line_a_second_is_enough_but_the_last_is_always_shown(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink(every_seconds=3600)
    sink.open(run_info())
    for update in range(1, 5):
        sink.write([record(update, {"policy/kl": 0.01})])
    sink.close(RunStatus.INTERRUPTED)

    assert printed(capsys) == ["update 1  step 1,000  kl 0.01", "update 4  step 4,000  kl 0.01", "interrupted after 4 updates, 4,000 steps"]


def test_a_long_line_is_not_broken_where_there_is_no_terminal(sink: ConsoleSink, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("episode/return_mean", "policy/kl", "policy/clip_frac", "policy/entropy", "value/explained_variance")
    sink.write([record(1, dict.fromkeys([*keys, "grad/global/norm_preclip", "train/env_steps_per_second"], 0.123456))])

    assert len(printed(capsys)) == 1


def test_a_run_without_updates_only_says_how_it_ended(sink: ConsoleSink, capsys: pytest.CaptureFixture[str]) -> None:
    sink.close(RunStatus.FAILED)
    sink.close(RunStatus.FAILED)

    assert printed(capsys) == ["failed"]


def test_numbers_that_do_not_fit_are_left_out_from_the_least_important_on() -> None:
    """`return 21.0` takes 11 columns and `kl 0.01` takes 7, each after a gap of 2: 22 in total."""
    numbers = ["[dim]return[/dim] 21.0", "[dim]kl[/dim] 0.01", "[dim]grad[/dim] 3"]

    assert list(fitting(numbers, 22)) == numbers[:2]
    assert list(fitting(numbers, 21)) == numbers[:1]
    assert list(fitting(numbers, None)) == numbers


def test_a_line_says_how_much_of_the_run_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink()
    sink.open(replace(run_info(), config={"total_timesteps": 4000}))
    sink.write([record(1, {"policy/kl": 0.01})])

    assert printed(capsys) == ["update 1  step 1,000/4,000 (25%)  kl 0.01"]
    assert "step 5,000/5,000 (100%)" in line(record(5, {}), total=4000)  # the last rollout goes beyond
