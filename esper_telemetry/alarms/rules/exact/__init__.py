"""Alarms of exact checks: identities and equations."""
