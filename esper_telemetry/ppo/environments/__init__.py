"""Environments for the bundled trainer: their protocols, the bridge to Gymnasium, and bundled tasks."""
