"""Equations of a rollout's targets: advantages, returns, and normalised advantages."""
