"""Equations of what is collected: log-probabilities, values, actions and transitions."""
