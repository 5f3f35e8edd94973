"""Environments of plugins: if one cannot be loaded, a warning names it and the others work."""

import logging
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from esper_telemetry.ppo.environments import environment_registry as registry


@pytest.fixture(autouse=True)
def broken_plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A plugin whose module exits the process with a message for the terminal."""
    (tmp_path / "exiting_plugin.py").write_text("raise SystemExit('\\x1b[31mno')\n")
    monkeypatch.syspath_prepend(tmp_path)
    entries = {
        name: EntryPoint(name, target, registry.ENTRY_POINT_GROUP)
        for name, target in {**registry.BUNDLED, "broken": "exiting_plugin:make"}.items()
    }
    monkeypatch.setattr(registry, "_registered", lambda: entries)
    registry.every_environment.cache_clear()
    yield
    registry.every_environment.cache_clear()


def test_a_plugin_that_ends_the_process_costs_its_environment(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "esper_telemetry"):
        assert list(registry.every_environment()) == ["cue-recall"]
        assert registry.controllers() == ()

    assert [one.getMessage() for one in caplog.records] == [
        "the environment 'broken' of exiting_plugin:make cannot be loaded: SystemExit: no"
    ]


def test_whoever_asks_for_it_gets_one_sentence() -> None:
    with pytest.raises(ValueError, match="'broken' of exiting_plugin:make cannot be loaded: SystemExit: no"):
        registry.make_env("broken")
