"""The source of truth about a run: an append-only file of JSON lines in the run directory.

Writers encode values as lines (`encode_run`, `encode_record`, ...) and append them with `Journal.write`. Each write is one unbuffered
system call, so a killed process loses nothing after `write` has returned. Readers follow the file with a `JournalReader`, whose
only state is its `offset`, or read a run at once with `read_run`. A run without a directory has a `MemoryJournal`.

JSON lines, not SQLite: run directories are kept on network file systems, and `tail -f`, `jq`, DuckDB and pandas can read them.
"""
