"""Imports at first use and without garbage collection."""

import gc

import pytest

from esper_telemetry.core.lazy import collection_paused


@pytest.fixture
def collection_enabled() -> bool:
    """Enable the collector, which is Python's default."""
    gc.enable()
    return gc.isenabled()


@pytest.mark.usefixtures("collection_enabled")
def test_no_garbage_is_collected_inside_and_the_collector_runs_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="stop"), collection_paused():
        assert not gc.isenabled()
        raise ValueError("stop")
    assert gc.isenabled()


@pytest.mark.usefixtures("collection_enabled")
def test_a_collector_that_the_program_disabled_stays_disabled() -> None:
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
