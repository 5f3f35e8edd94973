"""What a rank's packed vector holds, so that ranks can tell whether they measure the same, and say what differs."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from esper_telemetry.layout import Layout
from esper_telemetry.reduction import Array
from esper_telemetry.window import Table, Tables


class LayoutMismatch(RuntimeError):  # noqa: N818  # as `KeyError` names what is wrong
    """Ranks measure the same key in different ways: they do not run the same program."""


class Entry(NamedTuple):
    """One layout of a vector, and the steps and epochs of its rows."""

    layout: Layout
    steps: tuple[int, ...]
    epochs: tuple[int, ...]


Signature = tuple[Entry, ...]


def packed(tables: Tables) -> tuple[Signature, Array]:
    """The tables as one vector, and what is in it; in an order that does not depend on who was observed first."""
    items = sorted(tables.items(), key=lambda item: (item[0].name, item[0].labels, item[0].fields_text))
    signature = tuple(Entry(layout, tuple(t.steps.tolist()), tuple(t.epochs.tolist())) for layout, t in items)
    return signature, np.concatenate([np.empty(0), *(table.rows.reshape(-1) for _, table in items)])


def unpacked(signature: Signature, vector: Array) -> Tables:
    """The tables of a rank from its vector; what stands behind them is passed over."""
    tables: Tables = {}
    for layout, steps, epochs in signature:
        columns = len(layout.constant) * max(1, len(layout.labels))
        rows, vector = vector[: len(steps) * columns], vector[len(steps) * columns :]
        tables[layout] = Table(rows.reshape(len(steps), columns), np.array(steps), np.array(epochs))
    return tables


def digest(signature: Signature) -> float:
    """A hash of 52 bits, the same in every process; a float64 holds it exactly."""
    hashed = hashlib.blake2b(digest_size=8)
    for layout, steps, epochs in signature:
        hashed.update(f"{layout.name}{layout.labels}{layout.fields_text}{steps}{epochs}".encode())
    return float(int.from_bytes(hashed.digest(), "big") >> 12)


def dumped(signature: Signature) -> bytes:
    """The signature for other processes of the same program."""
    plain = [Entry(replace(layout), steps, epochs) for layout, steps, epochs in signature]  # without what is cached
    try:
        return pickle.dumps(tuple(plain))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return pickle.dumps(str(error))


def loaded(message: bytes, rank: int) -> Signature:
    """A rank's signature from its bytes; raises LayoutMismatch for a group that exists on that rank only."""
    try:
        found = pickle.loads(message)
    except (AttributeError, ImportError) as error:
        found = str(error)
    if isinstance(found, str):
        raise LayoutMismatch(f"rank {rank} measures a group that other ranks cannot know: {found}")
    return tuple(Entry(*entry) for entry in found)


def check(parts: Sequence[Tables]) -> None:
    """Raises LayoutMismatch, naming the ranks and what differs, where two of them measure one key in different ways.

    Args:
        parts: what each rank measured, field by field. What is missing on a rank is no mismatch: an episode may end on one only.
    """
    first: dict[str, tuple[int, Layout]] = {}
    for rank, part in enumerate(parts):
        for layout in part:
            for reader in (*layout.readers, *layout.histograms):
                other, known = first.setdefault(reader.key, (rank, layout))
                if known != layout:
                    raise LayoutMismatch(
                        f"ranks {other} and {rank} measure {reader.key} in different ways, {_kind(known)} and {_kind(layout)}: "
                        "all ranks have to run the same program with the same settings"
                    )


def _kind(layout: Layout) -> str:
    (field,) = layout.fields
    edges = f" between the edges {field.edges}" if field.edges else ""
    return f"as {field.width} slots of {field.reduction.__name__}{edges} in {layout.name}.{field.name}"
