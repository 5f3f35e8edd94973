"""Groups become values: one row, many minibatches, labels, missing data and errors."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from esper_telemetry.core.group import MetricGroup, pack
from esper_telemetry.core.metric import Metric, Rows, label, reports
from esper_telemetry.core.reduction import Counts, Max, Mean, Moments, Sum


def metric(key: str, **settings: object) -> Metric:
    return Metric(key=key, unit="1", question="?", **settings)  # type: ignore[arg-type]  # any settings


@dataclass(frozen=True, slots=True)
class Probe(MetricGroup):
    kl: Mean | None = reports(
        metric("a/kl"),
        metric("a/kl_max", over="max", rows=Rows.AFTER_STEP),
        metric("a/kl_first", rows=Rows.FIRST),
        metric("a/kl_last", rows=Rows.LAST_EPOCH),
        metric("a/kl_epoch_slope", over="slope"),
    )
    spread: Moments | None = reports(metric("a/mean"), metric("a/std", of="std"))
    bad: Sum | None = reports(metric("a/kl_nonfinite", when_positive=True))
    bonus: Tensor | float | None = reports(metric("a/bonus"))


@dataclass(frozen=True, slots=True)
class PerGroup(MetricGroup):
    group: tuple[str, ...] | str = label()
    norm: Mean | Tensor | None = reports(metric("grad/{group}/norm"))
    peak: Max | None = reports(metric("grad/{group}/peak"))


def test_a_mean_weighs_minibatches_by_their_counts() -> None:
    """Totals 2 of 4 rows and 9 of 1 row: 11/5, not the mean of 0.5 and 9."""
    group = Probe(kl=Mean(torch.tensor([2.0, 9.0]), torch.tensor([4.0, 1.0])))

    assert group.values()["a/kl"] == 11 / 5


def test_rows_select_the_steps_of_the_update() -> None:
    """Two epochs of two minibatches with KL 0, 1 | 2, 3: largest after a step 3, first 0, last epoch 2.5, slope 2.5 - 0.5."""
    packed = pack(Probe(kl=Mean(torch.tensor([0.0, 1.0, 2.0, 3.0]), 1.0)))

    values = packed.layout.finish(packed.table(), np.arange(4), np.array([0, 0, 1, 1])).values

    assert values == {"a/kl": 1.5, "a/kl_max": 3.0, "a/kl_first": 0.0, "a/kl_last": 2.5, "a/kl_epoch_slope": 2.0}


def test_what_needs_a_step_is_absent_before_one() -> None:
    values = Probe(kl=Mean(torch.tensor(0.5), 1.0)).values()

    assert "a/kl_max" not in values
    assert "a/kl_epoch_slope" not in values


def test_no_data_non_finite_statistics_and_counters_at_zero_are_absent() -> None:
    assert Probe(kl=Mean(torch.tensor(0.0), 0.0), bonus=torch.tensor(float("inf")), bad=Sum(0.0)).values() == {}
    assert Probe(bad=Sum(2.0), bonus=torch.tensor(3.0)).values() == {"a/kl_nonfinite": 2.0, "a/bonus": 3.0}


def test_labels_fill_the_keys() -> None:
    group = PerGroup(("actor", "critic"), Mean(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), 1.0))

    assert group.values() == {"grad/actor/norm": 2.0, "grad/critic/norm": 4.0}


def test_plain_numbers_and_tensors_of_several_shapes_share_a_row() -> None:
    """The count is a number, the total has two labels, and the peak is one tensor for both."""
    group = PerGroup(("a", "b"), Mean(torch.tensor([4.0, 6.0]), 2.0), Max(torch.tensor(9.0)))

    assert group.values() == {"grad/a/norm": 2.0, "grad/b/norm": 3.0, "grad/a/peak": 9.0, "grad/b/peak": 9.0}


def test_histograms_add_up() -> None:
    @dataclass(frozen=True, slots=True)
    class Shape(MetricGroup):
        counts: Counts | None = reports(metric("a/hist"))

    packed = pack(Shape(Counts(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (0.0, 1.0, 2.0))))
    histograms = packed.layout.finish(packed.table(), np.arange(2), np.zeros(2, dtype=int)).histograms

    assert histograms["a/hist"].counts == (4.0, 6.0)
    assert histograms["a/hist"].edges == (0.0, 1.0, 2.0)


def test_packing_copies_without_the_graph() -> None:
    bonus = torch.ones((), requires_grad=True) * 2
    packed = pack(Probe(bonus=bonus))
    bonus.data.add_(1)

    assert packed.tensors[0, 0] == 2.0
    assert not packed.tensors.requires_grad


@pytest.mark.parametrize(
    ("group", "error", "text"),
    [
        (Probe(bonus="much"), TypeError, r"Probe\.bonus must be a tensor, a number or a reduction, got str"),  # type: ignore[arg-type]
        (Probe(bonus=torch.ones(2, 2)), ValueError, r"Probe\.bonus must be a 0-d tensor .* got shape \[2, 2\]"),
        (PerGroup(("a", "b"), torch.ones(3)), ValueError, r"must have one shape, got \[\[2\], \[3\]\]"),
    ],
)
def test_a_wrong_field_is_refused_with_its_value(group: MetricGroup, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        pack(group)


def test_a_group_must_be_a_dataclass() -> None:
    class Bare(MetricGroup):
        pass

    with pytest.raises(TypeError, match="Bare must be a dataclass"):
        pack(Bare())


def test_a_key_must_be_legal_in_every_backend() -> None:
    with pytest.raises(ValueError, match="'Loss/KL'"):
        metric("Loss/KL")
