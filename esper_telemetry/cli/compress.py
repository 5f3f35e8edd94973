"""`esper-telemetry compress`: pack the journals of finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from esper_telemetry.cli.mistakes import WrongUse, without_warnings, wrong_use
from esper_telemetry.journal.file import compress as pack
from esper_telemetry.journal.file import damage_sentence, journal_path
from esper_telemetry.journal.lock import HELPER_ROLES, Role, is_held
from esper_telemetry.journal.read import damaged_lines

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Compress


def compress(options: Compress) -> int:
    """Pack each journal and print how much that saves; all directories are checked before anything is changed."""
    for run_dir in options.run_dirs:
        with wrong_use():
            journal_path(run_dir)
        if any(is_held(Path(run_dir), role) for role in (Role.TRAINER, *HELPER_ROLES)):
            raise WrongUse(f"{run_dir} is still being trained, or delivered")
    for run_dir in options.run_dirs:
        with wrong_use(), without_warnings():
            damaged = damaged_lines(run_dir)
            before, after = pack(run_dir)
        saved = "is packed already" if before == after else f"{before / 1e6:.1f} MB are now {after / 1e6:.1f} MB"
        print(f"{run_dir}: {saved}")
        if damaged:
            print(
                f"{damage_sentence(journal_path(run_dir), damaged)} wherever the journal is read, and packed as it is"
            )
    return 0
