"""Delivery from the journal to sinks: live, catching up after a fault, or replaying a finished run, in one code path.

A `Delivery` follows the journal with a cursor and feeds one sink. It opens the sink at the `run` line, writes records
in batches, saves its progress in `cursors.json`, and closes the sink with the status of the `end` line. Only the delivery
catches exceptions of the sink. `Deliveries` runs the deliveries of a live run: sinks that may not share the
trainer's interpreter run in one child process, the others in a thread each. `replay` runs one delivery to its end.

A sink gets records in the order of the journal, each at least once. Records of the last second before a process was
killed may be sent again, because the cursor was not saved yet.
"""
