"""How often this process is a fork of another: what a process holds is not to be written to by its forks as well."""

from __future__ import annotations

import os

_generation = 0


def generation() -> int:
    """Differs from what a process has seen in every fork of it; costs no call of the system."""
    return _generation


def _count() -> None:
    global _generation
    _generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count)
