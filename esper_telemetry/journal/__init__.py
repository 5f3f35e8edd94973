"""The source of truth about a run: an append-only file of JSON lines in the run directory.

Writers encode values as lines (`encode_run`, `encode_record`, ...) and append them with `Journal.write`. Each write is one unbuffered
system call, so a killed process loses nothing after `write` has returned. Readers follow the file with a `JournalReader`, whose
only state is its `offset`, or read a run at once with `read_run`. A run without a directory has a `MemoryJournal`.

JSON lines, not SQLite: run directories are kept on network file systems, and `tail -f`, `jq`, DuckDB and pandas can read them.
"""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.journal.file import JOURNAL_NAME as JOURNAL_NAME
    from esper_telemetry.journal.file import Journal as Journal
    from esper_telemetry.journal.file import JournalReader as JournalReader
    from esper_telemetry.journal.file import compress as compress
    from esper_telemetry.journal.file import damage_sentence as damage_sentence
    from esper_telemetry.journal.file import end_if_open as end_if_open
    from esper_telemetry.journal.file import journal_path as journal_path
    from esper_telemetry.journal.lines import SCHEMA as SCHEMA
    from esper_telemetry.journal.lines import End as End
    from esper_telemetry.journal.lines import Entry as Entry
    from esper_telemetry.journal.lines import JournalEvent as JournalEvent
    from esper_telemetry.journal.lines import Line as Line
    from esper_telemetry.journal.lines import decode as decode
    from esper_telemetry.journal.lines import encode_alarm as encode_alarm
    from esper_telemetry.journal.lines import encode_end as encode_end
    from esper_telemetry.journal.lines import encode_event as encode_event
    from esper_telemetry.journal.lines import encode_metrics as encode_metrics
    from esper_telemetry.journal.lines import encode_record as encode_record
    from esper_telemetry.journal.lines import encode_run as encode_run
    from esper_telemetry.journal.lines import plain as plain
    from esper_telemetry.journal.lines import to_json as to_json
    from esper_telemetry.journal.lock import HELPER_ROLES as HELPER_ROLES
    from esper_telemetry.journal.lock import Role as Role
    from esper_telemetry.journal.lock import TrainerLock as TrainerLock
    from esper_telemetry.journal.lock import await_release as await_release
    from esper_telemetry.journal.lock import is_held as is_held
    from esper_telemetry.journal.lock import lock_file as lock_file
    from esper_telemetry.journal.lock import lock_for as lock_for
    from esper_telemetry.journal.lock import remove_lock as remove_lock
    from esper_telemetry.journal.memory_journal import MemoryJournal as MemoryJournal
    from esper_telemetry.journal.memory_journal import MemoryReader as MemoryReader
    from esper_telemetry.journal.read import JournalFollower as JournalFollower
    from esper_telemetry.journal.read import Run as Run
    from esper_telemetry.journal.read import alarms as alarms
    from esper_telemetry.journal.read import damaged_lines as damaged_lines
    from esper_telemetry.journal.read import end_after_parent as end_after_parent
    from esper_telemetry.journal.read import entries as entries
    from esper_telemetry.journal.read import read_contents as read_contents
    from esper_telemetry.journal.read import read_run as read_run
    from esper_telemetry.journal.read import run_info as run_info

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "esper_telemetry.journal.file": (
            "JOURNAL_NAME",
            "Journal",
            "JournalReader",
            "compress",
            "damage_sentence",
            "end_if_open",
            "journal_path",
        ),
        "esper_telemetry.journal.lines": (
            "End",
            "Entry",
            "JournalEvent",
            "Line",
            "SCHEMA",
            "decode",
            "encode_alarm",
            "encode_end",
            "encode_event",
            "encode_metrics",
            "encode_record",
            "encode_run",
            "plain",
            "to_json",
        ),
        "esper_telemetry.journal.lock": (
            "HELPER_ROLES",
            "Role",
            "TrainerLock",
            "await_release",
            "is_held",
            "lock_file",
            "lock_for",
            "remove_lock",
        ),
        "esper_telemetry.journal.memory_journal": ("MemoryJournal", "MemoryReader"),
        "esper_telemetry.journal.read": (
            "JournalFollower",
            "Run",
            "alarms",
            "damaged_lines",
            "end_after_parent",
            "entries",
            "read_contents",
            "read_run",
            "run_info",
        ),
    },
)
