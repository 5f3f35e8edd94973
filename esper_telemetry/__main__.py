"""`python -m esper_telemetry`: the command line."""

from esper_telemetry.cli import main

if __name__ == "__main__":
    main()
