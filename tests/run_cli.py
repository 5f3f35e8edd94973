"""A command of `esper-telemetry` in this process."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from esper_telemetry.cli.main import main


class CommandOutput(NamedTuple):
    code: int
    out: str
    err: str


def run_cli(words: Sequence[object], capture: pytest.CaptureFixture[str]) -> CommandOutput:
    """Return the exit code and what this command alone prints."""
    capture.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return CommandOutput(int(stop.value.code or 0), *capture.readouterr())
