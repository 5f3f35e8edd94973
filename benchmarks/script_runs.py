"""Processor time of a script's thread under `esper-telemetry run`, relative to `python SCRIPT`, by the number of updates.

python benchmarks/script_runs.py [--updates 20 200] [--rounds 5] [--save]

The script is `examples/unedited.py`: updates of 1,024 steps and 16 minibatches, networks of 64 units. Imports are included in both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from results import Row, save

SCRIPT = Path(__file__).parents[1] / "examples" / "unedited.py"
STEPS = 1024
PLAIN, TRACED = "import runpy; runpy.run_path(sys.argv[0], run_name='__main__')", "from esper_telemetry.__main__ import main; main()"
PROGRAM = """
import sys, time
try:
    {call}
finally:
    print(time.thread_time())
"""


def seconds(updates: int, *, traced: bool) -> float:
    """Return the seconds of the script's thread."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(SCRIPT), "--total-steps", str(updates * STEPS)]
        arguments = ["esper-telemetry", "run", "--run-dir", "run", *words] if traced else words
        code = PROGRAM.format(call=f"sys.argv[:] = {arguments!r}; {TRACED if traced else PLAIN}")
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure in turns, print, and save if `--save` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", nargs="+", type=int, default=[20, 200])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="put the ratios into docs/benchmarks.json")
    options = parser.parse_args()
    rows = []
    for updates in options.updates:
        ratios = sorted(seconds(updates, traced=True) / seconds(updates, traced=False) for _ in range(options.rounds))
        row = Row(f"{updates} updates", f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", "`python SCRIPT`")
        print(f"{row.what}: {row.ours}", flush=True)
        rows.append(row)
    if options.save:
        save("script_runs", rows)


if __name__ == "__main__":
    main()
