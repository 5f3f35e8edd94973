"""Adapters that make other libraries' trainers emit the events of `events`."""
