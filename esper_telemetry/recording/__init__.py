"""What stands between a trainer's events and the records of its updates: `UpdateRecorder` and the probes of sampled updates."""
