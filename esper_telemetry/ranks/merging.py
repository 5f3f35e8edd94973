"""What several processes measured of one update, as if one had measured it.

Rows merge over ranks first and over optimizer steps later, in `layout`: the largest value of a minibatch is that of the whole minibatch,
not that of a rank's part of it. What is the same on every rank, as gradients are that have been summed, is rank 0's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from esper_telemetry.layout import Layout
from esper_telemetry.reduction import Array
from esper_telemetry.window import Table, Tables

Key = tuple[int, int, int]
"""Where a row belongs: its epoch, its optimizer step, and how many rows of that step came before it."""


def comparable(tables: Tables) -> Tables:
    """The same by layouts that are equal on all ranks that measure the same: which slots are plain numbers does not matter."""
    found: Tables = {}
    for layout, table in tables.items():
        plain = replace(layout, constant=(False,) * len(layout.constant))
        found[plain] = _stacked(found[plain], table) if plain in found else table
    return found


def by_field(tables: Tables) -> Tables:
    """The same with a layout for every field under every label: ranks then share what they both measure, and lack the rest."""
    found: Tables = {}
    for layout, table in tables.items():
        width = len(layout.constant)
        for place, label in enumerate(layout.labels or ("",)):
            start = place * width
            for field in layout.fields:
                part = Layout(layout.group, (label,) if layout.labels else (), (field,), (False,) * field.width)
                own = table._replace(rows=table.rows[:, start : start + field.width])
                found[part] = _stacked(found[part], own) if part in found else own
                start += field.width
    return found


def merged(parts: Sequence[Tables]) -> Tables:
    """One update from what each rank measured of it, in the order of the ranks; a layout may be missing on some."""
    layouts = dict.fromkeys(layout for part in parts for layout in part)
    return {layout: _merged(layout, [part[layout] for part in parts if layout in part]) for layout in layouts}


def _merged(layout: Layout, tables: Sequence[Table]) -> Table:
    if layout.replicated or len(tables) == 1:
        return tables[0]
    keys = [_keys(table) for table in tables]
    if all(key == keys[0] for key in keys):
        return tables[0]._replace(rows=_over_ranks(layout, np.stack([table.rows for table in tables])))
    return _row_by_row(layout, tables, keys)


def _over_ranks(layout: Layout, rows: Array) -> Array:
    """[ranks, R, columns] merged into [R, columns]."""
    result = np.empty(rows.shape[1:])
    for reduction, columns in layout.blocks:
        block = rows[:, :, columns]
        fields = reduction.join(block.reshape(len(rows), -1, block.shape[-1]))
        result[:, columns] = fields.reshape(block.shape[1:])
    return result


def _row_by_row(layout: Layout, tables: Sequence[Table], keys: Sequence[list[Key]]) -> Table:
    """Where ranks measured at different steps: each row merges those that belong to it."""
    found = [dict(zip(key, table.rows, strict=True)) for key, table in zip(keys, tables, strict=True)]
    every = sorted({key for rows in found for key in rows})
    rows = [_over_ranks(layout, np.stack([rank[key] for rank in found if key in rank])[:, None])[0] for key in every]
    epochs, steps, _ = zip(*every, strict=True)
    return Table(np.stack(rows), np.array(steps), np.array(epochs))


def _keys(table: Table) -> list[Key]:
    counts: dict[tuple[int, int], int] = {}
    keys = []
    for place in zip(table.epochs.tolist(), table.steps.tolist(), strict=True):
        keys.append((*place, counts.setdefault(place, 0)))
        counts[place] += 1
    return keys


def _stacked(a: Table, b: Table) -> Table:
    return Table(*(np.concatenate(parts) for parts in zip(a, b, strict=True)))
