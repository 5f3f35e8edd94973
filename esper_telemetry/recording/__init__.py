"""Turns a trainer's events into records of its updates: `UpdateRecorder` and the probes of sampled updates.

This package is separate from `updates`, which does not depend on the session. It measures with `updates`, and submits to the session.
"""
