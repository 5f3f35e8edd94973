"""Texts and pages about a run and its metrics."""
