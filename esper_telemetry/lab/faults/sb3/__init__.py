"""Faults in Stable-Baselines3."""
