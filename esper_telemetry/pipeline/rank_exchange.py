"""The ranks of a distributed run: merges what each rank measured into what one process would have measured.

At every flush the ranks make one all-gather of one packed vector. They do so when their numbers have reached the host, over telemetry's own
gloo group, so that it does not mix with the trainer's collectives or NCCL's streams. Inside `flush` the ranks have just agreed on a
gradient, so that a rank that waits there would wait a moment later anyway.

A vector begins with a hash of its layout. If the hashes differ, the ranks exchange the layouts, once per combination, and share every field
that several measure. A rank may lack a group, because an episode may end on one rank only. Ranks that measure one key in different ways
raise `LayoutMismatch`. If a vector is longer than the length that all ranks allocate, that length is raised, and all gather again.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from esper_telemetry.core.group import SlotLayout
from esper_telemetry.core.reduction import Array
from esper_telemetry.pipeline.window import Table, Tables

Result = TypeVar("Result")

RowKey = tuple[int, int, int]
"""Key of a row: its epoch, its optimizer step, and the number of earlier rows of that step."""


def comparable(tables: Tables) -> Tables:
    """Return the tables by layouts that are equal on all ranks with the same measurements, regardless of which slots are plain numbers."""
    result: Tables = {}
    for layout, table in tables.items():
        plain = replace(layout, constant=(False,) * len(layout.constant))
        result[plain] = _stacked(result[plain], table) if plain in result else table
    return result


def by_field(tables: Tables) -> Tables:
    """Return the tables with a layout for every field under every label, so that ranks share the fields that both measure."""
    result: Tables = {}
    for layout, table in tables.items():
        width = len(layout.constant)
        for place, label in enumerate(layout.labels or ("",)):
            start = place * width
            for item in layout.fields:
                part = SlotLayout(layout.group, (label,) if layout.labels else (), (item,), (False,) * item.width)
                own = table._replace(rows=table.rows[:, start : start + item.width])
                result[part] = _stacked(result[part], own) if part in result else own
                start += item.width
    return result


def merged(parts: Sequence[Tables]) -> Tables:
    """Merge what each rank measured of one update, in the order of the ranks; a layout may be missing on some."""
    layouts = dict.fromkeys(layout for part in parts for layout in part)
    return {layout: _merged(layout, [part[layout] for part in parts if layout in part]) for layout in layouts}


def _merged(layout: SlotLayout, tables: Sequence[Table]) -> Table:
    if layout.replicated or len(tables) == 1:
        return tables[0]
    keys = [_row_keys(table) for table in tables]
    if all(key == keys[0] for key in keys):
        return tables[0]._replace(rows=_over_ranks(layout, np.stack([table.rows for table in tables])))
    # Ranks measured at different steps: each merged row combines the rows with its key.
    by_key = [dict(zip(key, table.rows, strict=True)) for key, table in zip(keys, tables, strict=True)]
    every = sorted({key for rows in by_key for key in rows})
    rows = [_over_ranks(layout, np.stack([rank[key] for rank in by_key if key in rank])[:, None])[0] for key in every]
    epochs, steps, _ = zip(*every, strict=True)
    return Table(np.stack(rows), np.array(steps), np.array(epochs))


def _over_ranks(layout: SlotLayout, rows: Array) -> Array:
    """Merge [ranks, R, columns] into [R, columns]."""
    result = np.empty(rows.shape[1:])
    for reduction, columns in layout.blocks:
        block = rows[:, :, columns]
        fields = reduction.join(block.reshape(len(rows), -1, block.shape[-1]))
        result[:, columns] = fields.reshape(block.shape[1:])
    return result


def _row_keys(table: Table) -> list[RowKey]:
    counts: dict[tuple[int, int], int] = {}
    keys = []
    for place in zip(table.epochs.tolist(), table.steps.tolist(), strict=True):
        keys.append((*place, counts.setdefault(place, 0)))
        counts[place] += 1
    return keys


def _stacked(a: Table, b: Table) -> Table:
    return Table(*(np.concatenate(parts) for parts in zip(a, b, strict=True)))


class LayoutMismatch(RuntimeError):  # noqa: N818  # as `KeyError` names what is wrong
    """Ranks measure the same key in different ways: they do not run the same program."""


class SignatureEntry(NamedTuple):
    """One layout of a vector, and the steps and epochs of its rows."""

    layout: SlotLayout
    steps: tuple[int, ...]
    epochs: tuple[int, ...]


Signature = tuple[SignatureEntry, ...]


def packed(tables: Tables) -> tuple[Signature, Array]:
    """Return the tables as one vector, and its contents, in an order that does not depend on which group was observed first."""
    items = sorted(tables.items(), key=lambda item: (item[0].name, item[0].labels, item[0].fields_text))
    signature = tuple(SignatureEntry(layout, tuple(t.steps.tolist()), tuple(t.epochs.tolist())) for layout, t in items)
    return signature, np.concatenate([np.empty(0), *(table.rows.reshape(-1) for _, table in items)])


def unpacked(signature: Signature, vector: Array) -> Tables:
    """Return the tables of a rank from its vector; the rest of the vector is padding."""
    tables: Tables = {}
    for layout, steps, epochs in signature:
        columns = len(layout.constant) * max(1, len(layout.labels))
        rows, vector = vector[: len(steps) * columns], vector[len(steps) * columns :]
        tables[layout] = Table(rows.reshape(len(steps), columns), np.array(steps), np.array(epochs))
    return tables


def digest(signature: Signature) -> float:
    """Return a hash of 52 bits, the same in every process; a float64 holds it exactly."""
    hashed = hashlib.blake2b(digest_size=8)
    for layout, steps, epochs in signature:
        hashed.update(f"{layout.name}{layout.labels}{layout.fields_text}{steps}{epochs}".encode())
    return float(int.from_bytes(hashed.digest(), "big") >> 12)


def dumped(signature: Signature) -> bytes:
    """Return the signature as bytes, without the caches of its layouts; the reason if it cannot be pickled."""
    try:
        return pickle.dumps(tuple(SignatureEntry(replace(layout), *rest) for layout, *rest in signature))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return pickle.dumps(str(error))


def loaded(message: bytes, rank: int) -> Signature:
    """Return a rank's signature from its bytes; raises LayoutMismatch for a group that exists on that rank only."""
    try:
        content = pickle.loads(message)
    except (AttributeError, ImportError) as error:
        content = str(error)
    if isinstance(content, str):
        raise LayoutMismatch(f"rank {rank} measures a group that other ranks cannot know: {content}")
    return tuple(SignatureEntry(*entry) for entry in content)


def check_layouts(parts: Sequence[Tables]) -> None:
    """Raise LayoutMismatch, naming the ranks and the difference, if two of them measure one key in different ways.

    Args:
        parts: what each rank measured, field by field. A missing field is not a mismatch, because an episode may end on one rank only.
    """
    first: dict[str, tuple[int, SlotLayout]] = {}
    for rank, part in enumerate(parts):
        for layout in part:
            for reader in (*layout.readers, *layout.histograms):
                other, first_layout = first.setdefault(reader.key, (rank, layout))
                if first_layout != layout:
                    raise LayoutMismatch(
                        f"ranks {other} and {rank} measure {reader.key} in different ways, {_layout_text(first_layout)} and "
                        f"{_layout_text(layout)}: all ranks have to run the same program with the same settings"
                    )


def _layout_text(layout: SlotLayout) -> str:
    (field,) = layout.fields
    edges = f" between the edges {field.edges}" if field.edges else ""
    return f"as {field.width} slots of {field.reduction.__name__}{edges} in {layout.name}.{field.name}"


MEETING_TIMEOUT: Final = timedelta(seconds=60)
"""Time that a rank waits for the others to make their `Telemetry`."""
HEADER_NUMBERS: Final = 6
"""Numbers before the packed ones: the hash of the layout, their count, and the rank's `RankDecision`."""
MAX_KNOWN_SIGNATURES: Final = 256
"""Layouts that are remembered."""


class RankDecision(NamedTuple):
    """Decisions for all ranks: those of rank 0, and a request to stop by any rank.

    Attributes:
        sample_every: period of sampled updates.
        debug_updates: number of updates at DEBUG that alarms ask for.
        is_critical: whether an alarm of the run has been critical.
        stops: whether the program has asked all ranks to stop.
    """

    sample_every: int
    debug_updates: int
    is_critical: bool
    stops: bool


@dataclass(slots=True)
class Peers:
    """The ranks that report together.

    Attributes:
        rank, size: rank of this process, and number of ranks.
        group: process group that exchanges the measurements.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    _length: int = 1024
    _signature_by_digest: dict[float, Signature] = field(default_factory=dict)

    @classmethod
    def meet(cls) -> Peers | None:
        """Return the ranks of the initialised process group; None without one, or with a single process.

        Raises:
            RuntimeError: a rank did not arrive within a minute.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        try:
            meeting = dist.new_group(backend="gloo", timeout=MEETING_TIMEOUT)
            group = dist.new_group(backend="gloo")  # waits for half an hour, as training does
        except RuntimeError as error:
            raise RuntimeError(
                f"not all {dist.get_world_size()} ranks made a Telemetry within {MEETING_TIMEOUT.seconds} s: make one on every rank, "
                "or pass ranks='alone' to the rank that should report only its own numbers"
            ) from error
        dist.destroy_process_group(meeting)
        return cls(dist.get_rank(), dist.get_world_size(), group)

    def from_rank_zero(self, make: Callable[[], Result]) -> Result:
        """Return the result of `make` on rank 0 on every rank; its exception ends the group and is raised on every rank."""
        outcome: list[Result | Exception | None] = [None]
        error: Exception | None = None
        if self.rank == 0:
            try:
                outcome = [make()]
            except Exception as raised:  # any exception: the other ranks wait for it
                error, outcome = raised, [_portable(raised)]
        dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        (result,) = outcome
        if isinstance(result, Exception):
            self.leave()
            raise error or result
        return result  # type: ignore[return-value]  # rank 0 has put its result there

    def join(self, tables: Tables, decision: RankDecision) -> tuple[Tables, RankDecision]:
        """Return the measurements of all ranks of one update, and their decision; all ranks must call it.

        Args:
            tables: measurements of this rank.
            decision: decision of this rank.

        Raises:
            LayoutMismatch: the ranks do not measure the same; raised on every rank.
            RuntimeError: a rank has gone.
        """
        own = comparable(tables)
        signature, vector = packed({layout: table for layout, table in own.items() if not layout.replicated})
        gathered = self._gather(np.concatenate([[digest(signature), len(vector), *decision], vector]))
        signatures = self._signatures(signature, [row[0] for row in gathered])
        parts = [unpacked(other, row[HEADER_NUMBERS:]) for other, row in zip(signatures, gathered, strict=True)]
        if any(other is not signature for other in signatures):
            parts = [by_field(part) for part in parts]
            check_layouts(parts)
        joined = merged(parts) | {layout: table for layout, table in own.items() if layout.replicated}
        sample_every, debug_updates, is_critical, _ = gathered[0][2:HEADER_NUMBERS]
        stops = any(row[HEADER_NUMBERS - 1] for row in gathered)
        return joined, RankDecision(int(sample_every), int(debug_updates), bool(is_critical), stops)

    def leave(self) -> None:
        """End the group without any exchange: a rank that has failed calls it, and the others may be gone."""
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            with suppress(RuntimeError, ValueError):  # the whole process group may be gone already
                dist.destroy_process_group(group)

    def _gather(self, vector: Array) -> Sequence[Array]:
        """Return every rank's vector, each of [at least its length]."""
        gathered = self._exchange(vector[: self._length])
        longest = HEADER_NUMBERS + int(max(row[1] for row in gathered))
        if longest > self._length:
            self._length = longest + longest // 4
            gathered = self._exchange(vector)
        return gathered

    def _exchange(self, vector: Array) -> list[Array]:
        padded = torch.zeros(self._length, dtype=torch.float64)
        padded[: len(vector)] = torch.from_numpy(vector)
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded, group=self.group)
        return [row.numpy() for row in gathered]

    def _signatures(self, own: Signature, digests: Sequence[float]) -> list[Signature]:
        """Return the contents of every rank's vector. All ranks know the same signatures, so all or none exchange them."""
        if len(set(digests)) == 1:
            return [own] * self.size
        if not self._signature_by_digest.keys() >= set(digests):
            messages: list[Any] = [None] * self.size
            dist.all_gather_object(messages, dumped(own), group=self.group)
            signatures = [loaded(message, rank) for rank, message in enumerate(messages)]
            if len(self._signature_by_digest) > MAX_KNOWN_SIGNATURES:
                self._signature_by_digest.clear()
            self._signature_by_digest.update(zip(digests, signatures, strict=True))
        return [self._signature_by_digest[value] for value in digests]


def _portable(error: Exception) -> Exception:
    """Return the exception itself if it can be sent to another process, else one with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception's own pickling may raise anything
        return RuntimeError(str(error))
    return error
