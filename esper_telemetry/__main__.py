"""`python -m esper_telemetry` and `esper-telemetry`: the command line.

`run` and `check` are recognised here, before anything is imported that a script should import, or set up, itself.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line and exit."""
    if sys.argv[1:2] == ["run"]:
        from esper_telemetry.cli.run import main as run_script

        run_script(sys.argv[2:])
    elif sys.argv[1:2] == ["check"]:
        from esper_telemetry.cli.check import main as check

        check(sys.argv[2:])
    else:
        from esper_telemetry.core.lazy import collection_paused

        # Read when NumPy is imported: its threads gain nothing on small networks, and spin on cores that other processes need.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        with collection_paused():
            from esper_telemetry.cli.main import main as command_line
        command_line()


if __name__ == "__main__":
    main()
