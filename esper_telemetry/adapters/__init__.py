"""Foreign trainers made to emit the events of `events`."""
