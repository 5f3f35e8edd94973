"""Quantiles that merge: exact of one call, to one bin of several, and then whatever the way in which rows were split."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper_telemetry.group import Values
from esper_telemetry.metrics.advantages import advantage_stats
from esper_telemetry.metrics.distribution import LOG_RATIOS, REWARDS, SHARES, bin_counts, symmetric_edges
from esper_telemetry.metrics.masking import sample
from esper_telemetry.metrics.ratio import ratio_diagnostics
from esper_telemetry.metrics.returns import return_stats
from esper_telemetry.metrics.values import value_fit
from esper_telemetry.record import Level
from esper_telemetry.window import Window

ROWS = torch.randn(600, generator=torch.Generator().manual_seed(0)).exp() - 1


def observed(parts: Sequence[Tensor]) -> Values:
    """What several calls in one update report."""
    window = Window()
    for part in parts:
        zeros = torch.zeros_like(part)
        for group in (advantage_stats(part), return_stats(part), value_fit(part, zeros), ratio_diagnostics(part)):
            window.add(group, 0, None)
    return window.send().finish(Level.NORMAL)


def bin_of(x: float, edges: tuple[float, ...]) -> int:
    return bisect_left(edges, x)


def test_edges_are_five_per_decade_on_both_sides_of_zero() -> None:
    assert symmetric_edges(-1, 0) == (-1.0, -0.631, -0.398, -0.251, -0.158, -0.1, 0.1, 0.158, 0.251, 0.398, 0.631, 1.0)
    assert (len(LOG_RATIOS), len(REWARDS), len(SHARES)) == (52, 72, 21)


def test_one_call_has_the_exact_quantiles() -> None:
    values = observed([ROWS]).values

    expected = torch.quantile(ROWS.double(), torch.tensor([0.05, 0.95, 0.1, 0.25], dtype=torch.float64)).tolist()
    keys = ("adv/raw/p05", "adv/raw/p95", "ret/p10", "value/err/p25")
    assert [values[key] for key in keys] == pytest.approx(expected)
    assert values["policy/ratio/p99"] == pytest.approx(float(torch.quantile(ROWS.double().exp(), 0.99)))


@given(st.lists(st.integers(1, 599), min_size=1, max_size=6, unique=True))
def test_several_calls_have_the_quantiles_of_all_rows_however_they_are_split(cuts: list[int]) -> None:
    whole, halves = observed([ROWS]), observed([ROWS[:300], ROWS[300:]])
    split = observed(list(torch.tensor_split(ROWS, sorted(cuts))))

    for key in ("adv/raw/p05", "adv/raw/p95", "ret/p10", "ret/p50", "value/err/p25", "value/err/p95"):
        assert split.values[key] == halves.values[key]
        assert abs(bin_of(split.values[key], REWARDS) - bin_of(whole.values[key], REWARDS)) <= 1
    for key in ("policy/ratio/p01", "policy/ratio/p99"):
        assert split.values[key] == halves.values[key]
        near = bin_of(math.log(split.values[key]), LOG_RATIOS) - bin_of(math.log(whole.values[key]), LOG_RATIOS)
        assert abs(near) <= 1
    assert split.histograms == whole.histograms


def test_a_call_without_valid_rows_changes_nothing() -> None:
    assert observed([ROWS, torch.full((3,), math.nan)]).values["ret/p50"] == observed([ROWS]).values["ret/p50"]


def test_every_minibatch_of_one_call_knows_the_quantiles_of_all() -> None:
    """Rows per optimizer step merge without loss."""
    batches = ROWS[:600].view(4, 150)

    values = ratio_diagnostics(batches, dim=-1).values()

    assert values["policy/ratio/p01"] == ratio_diagnostics(ROWS).values()["policy/ratio/p01"]


def test_outermost_bins_hold_what_lies_outside_and_masked_rows_are_nowhere() -> None:
    """-9 and 0.1 lie at or below the first bin, 0.5 on an edge, and so in the bin below it; 7 and NaN do not count."""
    x = torch.tensor([-9.0, 0.1, 0.5, 3.0, 7.0, math.nan])
    valid = torch.tensor([True, True, True, True, False, True])

    assert bin_counts(sample(x, valid), (0.0, 0.5, 1.0)).tolist() == [3.0, 1.0]


def test_nothing_to_count_makes_no_histogram() -> None:
    record = observed([torch.full((3,), math.nan)])

    assert not record.histograms
    assert "ret/p50" not in record.values
