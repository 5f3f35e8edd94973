"""Histograms with fixed edges add up, however the rows are split."""

import math
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper_telemetry.core.group import Values
from esper_telemetry.core.record import Level
from esper_telemetry.metrics.advantages import advantage_stats
from esper_telemetry.metrics.ratio import ratio_diagnostics
from esper_telemetry.metrics.rollout_stats import return_stats
from esper_telemetry.metrics.statistics import LOG_RATIOS, REWARDS, SHARES, bin_counts, sample, symmetric_edges
from esper_telemetry.metrics.values import value_fit
from esper_telemetry.pipeline.window import Window

ROWS = torch.randn(600, generator=torch.Generator().manual_seed(0)).exp() - 1


def observed(parts: Sequence[Tensor], level: Level = Level.NORMAL) -> Values:
    """Return the values of several calls in one update."""
    window = Window()
    for part in parts:
        zeros = torch.zeros_like(part)
        for group in (advantage_stats(part), return_stats(part), value_fit(part, zeros), ratio_diagnostics(part)):
            window.add(group, 0, None)
    return window.send().finish(level)


def test_edges_are_five_per_decade_on_both_sides_of_zero() -> None:
    assert symmetric_edges(-1, 0) == (-1.0, -0.631, -0.398, -0.251, -0.158, -0.1, 0.1, 0.158, 0.251, 0.398, 0.631, 1.0)
    assert (len(LOG_RATIOS), len(REWARDS), len(SHARES)) == (52, 72, 21)


@given(st.lists(st.integers(1, 599), min_size=1, max_size=6, unique=True))
def test_several_calls_have_the_histograms_of_all_rows_however_they_are_split(cuts: list[int]) -> None:
    whole, split = observed([ROWS]), observed(list(torch.tensor_split(ROWS, sorted(cuts))))

    assert set(whole.histograms) == {"adv/raw/hist", "ret/hist", "value/err/hist", "policy/logratio/hist"}
    assert split.histograms == whole.histograms
    assert {sum(result.counts) for result in whole.histograms.values()} == {600}


def test_minibatches_of_one_call_add_up() -> None:
    window = Window()
    window.add(ratio_diagnostics(ROWS.view(4, 150), dim=-1), [0, 0, 1, 1], None)

    assert window.send().finish(Level.NORMAL).histograms == {"policy/logratio/hist": observed([ROWS]).histograms["policy/logratio/hist"]}


def test_outermost_bins_hold_what_lies_outside_and_masked_rows_are_nowhere() -> None:
    """-9 and 0.1 are at or below the first bin. 0.5 is on an edge, so in the bin below it. 7 and NaN do not count."""
    x = torch.tensor([-9.0, 0.1, 0.5, 3.0, 7.0, math.nan])
    valid = torch.tensor([True, True, True, True, False, True])

    assert bin_counts(sample(x, valid), (0.0, 0.5, 1.0)).tolist() == [3.0, 1.0]


def test_a_histogram_comes_only_where_there_is_something_to_count_and_at_its_level() -> None:
    assert not observed([torch.full((3,), math.nan)]).histograms
    assert not observed([ROWS], Level.MINIMAL).histograms
