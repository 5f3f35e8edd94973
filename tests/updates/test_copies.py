"""Copies of a policy within this process share none of its tensors, even if its classes cannot be pickled."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_telemetry.updates.pickles import policy_copy


def policy() -> Any:
    """Local classes and functions that cannot be pickled, an optimizer, and a tensor with a graph."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("steps", torch.zeros(1))
            self.square: Callable[[Tensor], Tensor] = lambda x: x.square()
            self.optimizer = torch.optim.SGD(self.parameters(), 0.1)
            self.last: Tensor = self.layer(torch.ones(2))

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = self.square(self.layer(inputs))
            return result

    return Local()


def test_a_copy_gives_the_same_outputs_from_tensors_of_its_own() -> None:
    own = policy()
    own.layer.bias.requires_grad_(False)

    copy = policy_copy(own)

    assert torch.equal(copy(torch.ones(2)), own(torch.ones(2)))
    assert [p.requires_grad for p in copy.parameters()] == [True, False]
    assert copy.optimizer is None
    with torch.no_grad():
        for tensor in (*copy.parameters(), *copy.buffers()):
            tensor.add_(1.0)
    assert not torch.equal(copy.layer.weight, own.layer.weight)
    assert not own.steps.any()


def replaced_by_closure(own: Any) -> None:
    forward = own.forward
    own.forward = lambda inputs: 2 * forward(inputs)


def replaced_by_default(own: Any) -> None:
    own.forward = lambda inputs, layer=own.layer: layer(inputs)


def replaced_by_hook(own: Any) -> None:
    own.layer.register_forward_hook(lambda module, inputs, output: output + own.layer.weight.sum())


@pytest.mark.parametrize("change", [replaced_by_closure, replaced_by_default, replaced_by_hook])
def test_functions_that_hold_the_policy_hold_the_copy_in_a_copy(change: Callable[[Any], None]) -> None:
    own = policy()
    change(own)
    copy = policy_copy(own)
    before = own(torch.ones(2))

    assert torch.equal(copy(torch.ones(2)), before)
    with torch.no_grad():
        own.layer.weight.add_(1.0)
    assert torch.equal(copy(torch.ones(2)), before)


def test_what_cannot_be_copied_is_named() -> None:
    own = policy()
    own.lock = threading.Lock()

    with pytest.raises(TypeError, match=r"^the policy cannot be copied: TypeError: cannot pickle '_thread.lock' object$"):
        policy_copy(own)


def test_a_huge_policy_is_not_copied() -> None:
    own = nn.Embedding(1, 1)
    own.weight = nn.Parameter(torch.zeros(1).expand(1 << 27, 1), requires_grad=False)

    with pytest.raises(TypeError, match=r"^the policy is not copied: it has 134,217,728 numbers, and the limit is 67,108,864$"):
        policy_copy(own)
