"""The built-in alarms, one file per family."""
