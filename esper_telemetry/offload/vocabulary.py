"""What writer and reader of a pickle both know, left out of it.

A pickle names every type by its module, looked up each time, and asks every object at length how it is to be pickled. For messages that
are made of the same few types, which takes three quarters of their time, that is said once, on both sides.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

Reduction = Callable[[Any], tuple[type, tuple[Any, ...]]]


class Vocabulary:
    """Types and other objects that pickles need not describe; the same on both sides.

    Args:
        kinds: named tuples, and dataclasses of at least two fields that are made of these alone.
        others: objects that live as long as the process, such as members of enumerations.

    Attributes:
        preamble: a pickle of all of them; whoever reads another one must have read it just before.
        reductions: how objects of these types are pickled, for a pickler's `dispatch_table`.
    """

    def __init__(self, kinds: Sequence[type] = (), others: Sequence[object] = ()) -> None:
        content = io.BytesIO()
        pickler = pickle.Pickler(content, protocol=5)
        pickler.dump((*kinds, *others))
        self.preamble, self._memo = content.getvalue(), pickler.memo
        self.reductions: dict[type, Reduction] = {kind: _reduction(kind) for kind in kinds}

    def teach(self, pickler: pickle.Pickler) -> None:
        """Makes it begin a pickle as if it had just written the preamble."""
        pickler.memo = self._memo


def _reduction(kind: type) -> Reduction:
    """The type and its fields, in order."""
    content: Callable[[Any], tuple[Any, ...]] = tuple
    if not issubclass(kind, tuple):
        content = attrgetter(*[field.name for field in fields(kind)])  # type: ignore[arg-type]  # a dataclass
    return lambda instance: (kind, content(instance))


NOTHING = Vocabulary()
"""Knows nothing."""
