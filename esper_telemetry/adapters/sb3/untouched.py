"""Passes through a policy that leave no trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from esper_telemetry.adapters.sb3.taps import silence


@contextmanager
def untouched(policy: nn.Module) -> Iterator[None]:
    """Within it nobody hears of the passes, and random numbers are drawn from copies of the generators; after it buffers are what
    they were.
    """
    buffers = [(buffer, buffer.clone()) for buffer in policy.buffers()]
    devices = {parameter.device for parameter in policy.parameters() if parameter.is_cuda}
    try:
        with silence(policy.modules()), torch.random.fork_rng(devices=[device.index or 0 for device in devices]):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
