"""What a rank's packed vector holds, so that ranks can tell whether they measure the same, and say what differs."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from esper_telemetry.layout import Field, Layout
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


def check(signatures: Sequence[Signature]) -> None:
    """Raises LayoutMismatch, naming the rank and what differs, where two ranks measure one key in different ways.

    A group that is missing on some ranks is none: an episode may end on one of them only.
    """
    first: dict[str, tuple[int, Layout]] = {}
    for rank, signature in enumerate(signatures):
        for layout in (entry.layout for entry in signature):
            for key in _keys(layout):
                other, known = first.setdefault(key, (rank, layout))
                if known != layout:
                    raise LayoutMismatch(
                        f"ranks {other} and {rank} measure {key} in different ways, {_difference(known, layout)}: "
                        "all ranks have to run the same program with the same settings"
                    )


def _keys(layout: Layout) -> Iterator[str]:
    for reader in (*layout.readers, *layout.histograms):
        yield reader.key


def _difference(a: Layout, b: Layout) -> str:
    if a.name != b.name:
        return f"as {a.name} and as {b.name}"
    if a.labels != b.labels:
        return f"{a.name} with the labels {a.labels} and {b.labels}"
    texts = [{field.name: field for field in layout.fields} for layout in (a, b)]
    name = next(name for name in texts[0].keys() | texts[1].keys() if texts[0].get(name) != texts[1].get(name))
    kinds = [_kind(text.get(name)) for text in texts]
    return f"{a.name}.{name} with {kinds[0]} and {kinds[1]}"


def _kind(field: Field | None) -> str:
    if field is None:
        return "no value"
    return f"{field.width} slots of {field.reduction.__name__}" + (
        f" and the edges {field.edges}" if field.edges else ""
    )
