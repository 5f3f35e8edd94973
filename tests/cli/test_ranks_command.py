"""Torch backends of the ranks that `torchrun` starts; the end-to-end tests cover the rest."""

import pytest
import torch

from esper_telemetry.cli.rank_agreement import backends


@pytest.mark.parametrize(("device", "expected"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("cuda:1", "cpu:gloo,cuda:gloo")])
def test_the_host_exchanges_too_where_there_are_accelerators(device: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts and plain values are on the host, which NCCL cannot reach. NCCL also refuses two ranks on one accelerator."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    assert backends(device) == expected


def test_without_an_accelerator_the_device_is_refused_later_and_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert backends("cuda") == "gloo"
