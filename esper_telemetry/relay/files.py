"""Small files that several processes of a run change: one at a time, and never seen half-written."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from esper_telemetry.journal import lock_file

LOCKED: Final = ("journal.jsonl", "journal.jsonl.gz")
"""The file whose lock is taken: it is there as long as the run is."""


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """One process and thread at a time, as far as the file system knows locks; raises OSError where there is no journal."""
    path = next((run_dir / name for name in LOCKED if (run_dir / name).exists()), run_dir / LOCKED[0])
    with path.open("rb") as journal:
        with contextlib.suppress(OSError):
            lock_file(journal.fileno(), wait=True)
        yield


def replaced(path: Path, content: str) -> None:
    """Gives a file a new content, as a whole or not at all; raises OSError where that cannot be written."""
    draft = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        draft.write_text(content, encoding="utf-8")
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
