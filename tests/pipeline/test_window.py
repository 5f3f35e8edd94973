"""`log` accepts plain numbers, even if the same keys come repeatedly."""

import math

import pytest

from esper_telemetry.pipeline import window
from esper_telemetry.pipeline.window import LoggedValues


def test_the_last_number_of_a_key_counts() -> None:
    numbers = LoggedValues()
    numbers.add({"a": 1.0, "b": 2.0})
    numbers.add({"a": 3})

    assert numbers.take() == {"a": 3.0, "b": 2.0}
    assert not numbers


@pytest.mark.parametrize("before", [{}, {"a": 0.0, "b": 0.0}])
def test_non_finite_numbers_are_counted_whether_their_keys_are_new_or_not(before: dict[str, float]) -> None:
    numbers = LoggedValues()
    numbers.add(before)
    numbers.take()
    for value in (math.nan, math.inf, 4.0, -math.inf):
        numbers.add({"a": value, "b": 1.0})

    assert numbers.take() == {"a_nonfinite": 3.0, "a": 4.0, "b": 1.0}


def test_numbers_whose_sum_overflows_are_finite() -> None:
    numbers = LoggedValues()
    for _ in range(2):
        numbers.add({"a": 1e308, "b": 1e308})

        assert numbers.take() == {"a": 1e308, "b": 1e308}


def test_a_key_that_no_backend_takes_is_refused_every_time() -> None:
    numbers = LoggedValues()
    for _ in range(2):
        with pytest.raises(ValueError, match="Loss"):
            numbers.add({"fine": 1.0, "Loss": 1.0})


def test_keys_without_end_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "MAX_CHECKED_KEYS", 10)
    numbers = LoggedValues()
    for key in range(100):
        numbers.add({f"key_{key}": 1.0})

    assert len(numbers._checked) <= 10
    assert len(numbers.take()) == 100
