"""The truth about a run: an append-only file of JSON lines in the run directory, and how to read it back.

Whoever writes turns values into lines (`encode_run`, `encode_record`, ...) and appends them with `Journal.write`: one
system call per call, nothing buffered, so a killed process loses nothing that `write` has returned from. Whoever reads
follows the file with a `JournalReader`, whose `offset` is all there is to remember, or takes a whole run at once with
`read_run`. A run without a directory has a `MemoryJournal` with the same two sides.

Errors: a journal that cannot be created raises, in one sentence. Once it exists, nothing that happens to the disk
raises: what could not be written waits in memory, and goes out first when there is space again.
"""

from esper_telemetry.journal.file import (
    JOURNAL_NAME,
    Journal,
    JournalReader,
    compress,
    damage_sentence,
    end_if_open,
    journal_path,
)
from esper_telemetry.journal.held import Following, Held, alarms, damaged_lines, entries, held, run_info
from esper_telemetry.journal.killed import end_after
from esper_telemetry.journal.lines import (
    SCHEMA,
    End,
    Entry,
    JournalEvent,
    Line,
    decode,
    encode_alarm,
    encode_end,
    encode_event,
    encode_metrics,
    encode_record,
    encode_run,
    to_json,
)
from esper_telemetry.journal.lock import (
    HAS_LOCKS,
    HELPERS,
    Role,
    TrainerLock,
    await_release,
    is_held,
    lock_file,
    lock_for,
    remove_lock,
)
from esper_telemetry.journal.memory import MemoryJournal, MemoryReader
from esper_telemetry.journal.plain import plain
from esper_telemetry.journal.run import Run, read_run

__all__ = [
    "HAS_LOCKS",
    "HELPERS",
    "JOURNAL_NAME",
    "SCHEMA",
    "End",
    "Entry",
    "Following",
    "Held",
    "Journal",
    "JournalEvent",
    "JournalReader",
    "Line",
    "MemoryJournal",
    "MemoryReader",
    "Role",
    "Run",
    "TrainerLock",
    "alarms",
    "await_release",
    "compress",
    "damage_sentence",
    "damaged_lines",
    "decode",
    "encode_alarm",
    "encode_end",
    "encode_event",
    "encode_metrics",
    "encode_record",
    "encode_run",
    "end_after",
    "end_if_open",
    "entries",
    "held",
    "is_held",
    "journal_path",
    "lock_file",
    "lock_for",
    "plain",
    "read_run",
    "remove_lock",
    "run_info",
    "to_json",
]
