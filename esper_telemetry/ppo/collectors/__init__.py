"""Collecting rollouts from environments on the host and on a device."""
