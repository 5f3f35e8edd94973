"""The verdict on a run: its outcome, remarks on its settings, and unusual values."""
