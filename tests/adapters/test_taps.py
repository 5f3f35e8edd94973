"""Taps on the methods of single objects, and an adapter whose library is not installed."""

import copy
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper_telemetry.adapters.taps import GeneratorTap, SurroundingTap, Tap, listen, reraise, without_trace

MISSING = """
import sys
sys.modules["stable_baselines3"] = None  # as if it were not installed
from esper_telemetry.adapters.sb3 import TelemetryCallback
"""


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, amount: int, *, times: int = 1) -> int:
        self.total += amount * times
        return self.total


class Noisy(nn.Module):
    """Counts its calls, keeps its last output, and adds noise from NumPy's and Python's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.last = inputs + self.calls + random.random() + np.random.rand()
        return self.last


def test_passes_without_trace_leave_attributes_and_all_generators() -> None:
    module, inputs = Noisy(), torch.zeros(1)

    def run(passes: int) -> list[float]:
        module.calls = 0
        random.seed(0)
        np.random.seed(0)
        with without_trace(module):
            for _ in range(passes):
                module(inputs)
        return [float(module(inputs)), float(module(inputs)), module.calls]

    assert run(0) == run(3)
    assert module.calls == 2


def test_listeners_receive_arguments_and_result_of_one_object_alone() -> None:
    counter, other, calls = Counter(), Counter(), []
    remove = listen(counter, "add", lambda args, kwargs, result: calls.append((args, dict(kwargs), result)))

    assert (counter.add(2, times=3), other.add(1)) == (6, 1)
    remove()
    remove()
    counter.add(1)

    assert calls == [((2,), {"times": 3}, 6)]
    assert "add" not in vars(counter)


def test_what_a_listener_raises_goes_to_its_handler() -> None:
    counter, errors = Counter(), []

    def fail(*_: object) -> None:
        raise IndexError("a bug")

    listen(counter, "add", fail, lambda listener, error: errors.append((listener, str(error))))

    assert counter.add(1) == 1
    assert errors == [(fail, "a bug")]


def test_functions_are_called_around_a_method_also_if_it_raises() -> None:
    counter, calls = Counter(), []
    tap = SurroundingTap(counter, "add", lambda amount: calls.append(amount), lambda: calls.append("after"))

    with pytest.raises(TypeError):
        counter.add(None)  # type: ignore[arg-type] # what is tested
    tap.remove()

    assert calls == [None, "after"]
    assert "add" not in vars(counter)


def test_items_of_a_generator_come_with_its_variables() -> None:
    class Storage:
        def batches(self, count: int) -> Iterator[str]:
            for epoch in range(count):
                yield f"batch {epoch}"

    storage, items = Storage(), []
    tap = GeneratorTap(storage, "batches", lambda item, variables: items.append((item, variables["epoch"])), reraise)

    assert list(storage.batches(2)) == ["batch 0", "batch 1"]
    assert items == [("batch 0", 0), ("batch 1", 1)]
    tap.remove()
    assert list(storage.batches(1)) == ["batch 0"]


def test_a_tap_that_was_wrapped_since_stays_and_is_silent() -> None:
    counter, calls = Counter(), []
    remove = listen(counter, "add", lambda *_: calls.append(1))
    tap = vars(counter)["add"]
    vars(counter)["add"] = lambda *args: tap(*args)

    remove()

    assert counter.add(1) == 1
    assert calls == []


def test_copies_and_pickles_have_no_tap() -> None:
    counter = Counter()
    listen(counter, "add", lambda *_: None)

    for clean in (copy.deepcopy(counter), pickle.loads(pickle.dumps(counter))):
        assert not any(isinstance(value, Tap) for value in vars(clean).values())
        assert clean.add(2) == 2
    assert counter.total == 0


def test_passes_without_trace_leave_buffers_and_generator() -> None:
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    state, generator = copy.deepcopy(network.state_dict()), torch.get_rng_state()

    with without_trace(network):
        network(torch.rand(4, 2))

    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_missing_library_is_named_with_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert done.stderr.endswith("TelemetryCallback needs stable-baselines3: pip install 'esper-telemetry[sb3]'\n")
