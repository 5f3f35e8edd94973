"""What stands between a trainer's events and the records of its updates: `UpdateRecorder` and the probes of sampled updates.

It is a part of its own above `updates` and the session: it measures, submits and flushes there, and `updates` knows no session.
"""
