"""Memory and terminal output of `esper-telemetry watch` on a long unfinished run.

python benchmarks/watch.py RUN_DIR [--updates 10000] [--minutes 30] [--per-second 5] [--columns 200] [--rows 50]

The journal repeats a run's records up to that number of updates; its alarms are not repeated. It grows at a live pace while `watch` shows
it in a pseudo-terminal, and every minute the next page is opened. The output is the time to the first screen with the last update, then the
resident memory and the bytes written to the terminal, minute by minute.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")
UPDATE = re.compile(rb"update ([\d,]+)")


def turns(source: Path, seconds: float, begin: float) -> Iterator[tuple[int, bytes]]:
    """Yield (update, line) without end: all lines once, then the records and events of each update again, with increasing axes."""
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    last = [line["axes"] for line in lines if line["kind"] == "record"][-1]
    for turn in itertools.count():
        for line in lines:
            is_repeated = line["kind"] == "record" or line.get("type") in ("environments", "growth")
            if line["kind"] == "end" or (turn and not is_repeated):
                continue
            update, axes = 0, line.get("axes")
            if axes:
                shifted: dict[str, Any] = {name: axes[name] + turn * last[name] for name in last}
                update = shifted["update"]
                line = {**line, "axes": {**shifted, "wall_time": begin + seconds * update}}
            yield update, json.dumps(line, separators=(",", ":")).encode() + b"\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--per-second", type=float, default=5.0)
    parser.add_argument("--columns", type=int, default=200)
    parser.add_argument("--rows", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        show(Path(directory) / "journal.jsonl", options)


def show(path: Path, options: argparse.Namespace) -> None:
    seconds = 1 / options.per_second
    begin = time.time() - seconds * options.updates
    lines = turns(options.run_dir / "journal.jsonl", seconds, begin)
    with path.open("ab", buffering=0) as journal:
        journal.write(b"".join(line for _, line in itertools.takewhile(lambda each: each[0] <= options.updates, lines)))
        print(f"{options.updates:,} updates, {path.stat().st_size / 1e6:.0f} MB", flush=True)
        terminal, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", options.rows, options.columns, 0, 0))
        started = time.monotonic()
        command = [sys.executable, "-m", "esper_telemetry", "watch", str(path.parent)]
        with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env={**os.environ, "TERM": "xterm"}) as watch:
            shown, text, minute, written = False, b"", 1, 0
            while minute <= options.minutes and watch.poll() is None:
                update, line = next(lines)
                while (wait := begin + seconds * update - time.time()) > 0 or select.select([terminal], [], [], 0)[0]:
                    if select.select([terminal], [], [], max(0.0, wait))[0]:
                        output = os.read(terminal, 1 << 16)
                        written += len(output)
                        if not shown:
                            text = ESCAPES.sub(b"", text + output)
                            shown = any(int(n.replace(b",", b"")) >= options.updates for n in UPDATE.findall(text))
                            if shown:
                                print(f"first screen with the last update after {time.monotonic() - started:.1f} s", flush=True)
                journal.write(line)
                if time.monotonic() - started >= 60 * minute:
                    kib = int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{watch.pid}/status").read_text())[0])
                    print(f"minute {minute}: {kib / 1024:.1f} MiB, {written / 60_000:.1f} kB/s", flush=True)
                    minute, written = minute + 1, 0
                    os.write(terminal, b"t")
            os.write(terminal, b"\x03")


if __name__ == "__main__":
    main()
