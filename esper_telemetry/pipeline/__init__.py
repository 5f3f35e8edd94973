"""From update data to journal lines: measure, derive, detect, append, in this process or in a worker."""
