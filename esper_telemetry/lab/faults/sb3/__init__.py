"""Faults in Stable-Baselines3: models to break, the faults themselves, and their runs."""
