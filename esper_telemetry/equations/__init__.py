"""Equations of PPO, a file per quantity: the reference, the mistakes and variants that are recognised, and the check."""
