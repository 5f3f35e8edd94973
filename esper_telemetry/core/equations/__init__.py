"""Declarations of equations, and the settings that they need."""
