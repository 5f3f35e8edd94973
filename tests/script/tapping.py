"""Taps on this process, for tests that act as a script."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from esper_telemetry.adapters.script.listener import ScriptListener
from esper_telemetry.adapters.script.observed_steps import ObservedSteps
from esper_telemetry.adapters.script.script_episodes import EpisodeLog
from esper_telemetry.adapters.script.script_taps import Taps


def new_listener() -> ScriptListener:
    return ScriptListener(lambda _: None, lambda _: None)


def observed(log: EpisodeLog) -> ObservedSteps:
    steps = log.collected()
    assert steps is not None
    return steps


@contextmanager
def tapped(*, fails: bool = False) -> Iterator[ScriptListener]:
    """Listen to this process as to a script, and remove all taps afterwards; one of them has failed if `fails`."""
    gc.unfreeze()  # functions of test files, so that they are found
    listener = new_listener()
    taps = Taps(lambda: listener, lambda _, callback: callback, lambda _: None)
    taps.install()
    try:
        yield listener
    finally:
        taps.remove()
    assert (taps.error is not None) is fails and sys.getprofile() is None
