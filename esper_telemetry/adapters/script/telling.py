"""What people read of it, on stderr: a line when the first update is over, and one at the end. Nothing here needs torch."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from esper_telemetry.adapters.script.script import ScriptListener

WORDS = {"memory": "recurrent states"}
"""What some of the things that are found are called."""


def found_line(script: ScriptListener, name: str, run_dir: Path | None) -> str:
    """What is known of the script, what is not, and where it goes."""
    episodes = (
        "episodes (the script itself misses them: Gymnasium 1.x tells of them elsewhere)"
        if script.blind
        else "episodes"
    )
    found = [episodes if what == "episodes" else WORDS.get(what, what) for what in script.found]
    missing = [WORDS.get(what, what) for what in script.missing]
    lacking = f"; not found: {', '.join(missing)}" if missing else ""
    return f"{name}: found {', '.join(found)}{lacking}; journal in {run_dir}"


def last_line(
    script: ScriptListener | None,
    name: str,
    run_dir: Path | None,
    error: BaseException | None,
    updates: int | None = None,
) -> str:
    """The last line of a run; `updates` are those of a model, where the script itself was not listened to."""
    if error is not None:
        return f"{name}: telemetry stopped and the script went on: {type(error).__name__}: {error}"
    if run_dir is None:
        reason = "torch was not imported" if script is None else "no optimizer step with a probability ratio was seen"
        return f"{name}: found nothing to measure: {reason}"
    count = updates if updates is not None else script.updates if script else 0
    return f"{name}: {count} update{'' if count == 1 else 's'}; what went wrong in them: esper-telemetry diagnose {run_dir}"


def own_log() -> None:
    """What telemetry logs goes to stderr, marked as ours, and not where the script sends its own log."""
    logger = logging.getLogger("esper_telemetry")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("esper-telemetry: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False


def say(sentence: str) -> None:
    """On stderr, whatever has become of it."""
    try:
        sys.stderr.write(f"esper-telemetry: {sentence}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return
