"""Functions of other libraries, replaced while a script runs, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Patches:
    """Remembers what was replaced, so that it can be put back in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[object, str, Any, bool]] = []

    def replace(self, owner: object, name: str, wrap: Wrap) -> None:
        """Wraps the function `owner.name`; nothing happens where there is none."""
        found = getattr(owner, name, None)
        if found is None or getattr(found, "tapped", False):
            return
        own = name in vars(owner)
        wrapped = wrap(found)
        wrapped.tapped = True  # type: ignore[attr-defined]  # so that nothing is wrapped twice
        self._undo.append((owner, name, found, own))
        setattr(owner, name, wrapped)

    def undo(self) -> None:
        """Everything is as it was."""
        while self._undo:
            owner, name, found, own = self._undo.pop()
            if own:
                setattr(owner, name, found)
            else:
                delattr(owner, name)
