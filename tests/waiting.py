"""Helper that waits for the work of another thread or process."""

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

POLL_SECONDS = 0.02

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, seconds: float = 60.0) -> T:
    """Return the first true value of `condition()`; fail the test if it stays false for `seconds`.

    Args:
        what: the awaited event, worded to follow "waited 60 s for".
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() >= deadline:
            pytest.fail(f"waited {seconds:g} s for {what}")
        time.sleep(POLL_SECONDS)
    return value
