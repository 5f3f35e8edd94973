"""Pickles of policies, and of objects that hold them, without their tensors, which travel beside the pickle and are copied once each."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Reduction: TypeAlias = Callable[[Any], Any]

MIN_ARRAY_BYTES = 1 << 10
"""Bytes from which on an array travels as a tensor: smaller ones, such as bounds of spaces, are part of the pickle."""


class PolicyPickle(NamedTuple):
    """A policy without its optimizer, or objects that hold a policy, without that.

    Attributes:
        content: pickle without tensors.
        tensors: in it.
    """

    content: bytes
    tensors: tuple[Tensor, ...]

    def load(self, policy: nn.Module | None = None) -> Any:
        """Return what was pickled; objects that hold a policy hold this one."""
        return ContentUnpickler(self.content, self.tensors, policy).load()


def pickled_policy(policy: nn.Module) -> PolicyPickle | None:
    """Return a pickle with copies of its tensors; None where it cannot be copied: see `TensorPickler.is_portable`."""
    optimizers = {type(part) for part in vars(policy).values() if isinstance(part, Optimizer)}
    pickler = TensorPickler(dict.fromkeys(optimizers, left_out))
    if not (pickler.dump(policy) and pickler.is_portable):
        return None
    return PolicyPickle(pickler.content, tuple([tensor.detach().clone() for tensor in pickler.tensors]))


def pickled_around(policy: nn.Module, content: object, without: Mapping[type, Reduction]) -> PolicyPickle | None:
    """Return a pickle of `content` with references to its tensors; None where it cannot be copied.

    Args:
        policy: that `content` holds, and the pickle does not.
        content: anything.
        without: (type -> reduction, as `copyreg` has them) of objects that are pickled in part.
    """

    def leave_out(module: nn.Module) -> Any:
        return (_policy, ()) if module is policy else module.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    pickler = TensorPickler({**without, type(policy): leave_out})
    if not (pickler.dump(content) and pickler.is_portable):
        return None
    return PolicyPickle(pickler.content, tuple([tensor.detach() for tensor in pickler.tensors]))


class TensorPickler:
    """Pickles objects, one behind the other, without their tensors and large arrays.

    Args:
        without: (type -> reduction, as `copyreg` has them) of objects that are pickled in part.
        first: tensors that are the first of `tensors`.

    Attributes:
        tensors: that were left out, in the order of their places; tensors with the same memory have one place.
        reached: places of tensors that the objects hold.
    """

    def __init__(self, without: Mapping[type, Reduction], first: Sequence[Tensor] = ()) -> None:
        self.tensors: list[Tensor] = list(first)
        self.reached = set[int]()
        self._places: dict[object, int] = {id(tensor): place for place, tensor in enumerate(first)}
        self._stream = io.BytesIO()
        self._pickler = pickle.Pickler(self._stream, protocol=pickle.HIGHEST_PROTOCOL)
        own = {Tensor: self._leave_out, nn.Parameter: self._leave_out, np.ndarray: self._leave_array_out}
        self._pickler.dispatch_table = {**copyreg.dispatch_table, **own, **without}

    def dump(self, content: object) -> bool:
        """Pickle an object; return False where it cannot be."""
        try:
            self._pickler.dump(content)
        except Exception:  # pickling runs code of policies, which need not be made for it
            return False
        return True

    @property
    def content(self) -> bytes:
        """The pickle so far."""
        return self._stream.getvalue()

    @property
    def is_portable(self) -> bool:
        """True where another process can load it: no class is one that only the script has, and no tensor is on a device."""
        return b"__main__" not in self.content and all(tensor.is_cpu for tensor in self.tensors)

    def _leave_out(self, tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        parameter = isinstance(tensor, nn.Parameter)
        plain = not (parameter or tensor.requires_grad) and tensor.numel() > 0 and tensor.is_contiguous()
        place = self._place((tensor.data_ptr(), tensor.numel(), tensor.dtype) if plain else id(tensor), tensor)
        return _restored, (place, tuple(tensor.shape), parameter, tensor.requires_grad)

    def _leave_array_out(self, array: Any) -> Any:
        simple = array.dtype.kind in "biuf" and array.flags.c_contiguous and array.flags.writeable
        if array.nbytes < MIN_ARRAY_BYTES or not simple or not array.dtype.isnative:
            return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        try:
            tensor = torch.from_numpy(array)
        except TypeError:  # a type of numbers that torch does not have
            return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        place = self._place((tensor.data_ptr(), tensor.numel(), tensor.dtype), tensor)
        return _restored_array, (place, array.shape)

    def _place(self, key: object, tensor: Tensor) -> int:
        place = self._places.get(id(tensor), self._places.get(key))
        if place is None:
            self._places[key] = place = len(self.tensors)
            self.tensors.append(tensor)
        self.reached.add(place)
        return place


class ContentUnpickler(pickle.Unpickler):
    """Puts tensors, and a policy, where they were left out.

    Args:
        content, tensors: of a `TensorPickler`.
        policy: that was left out.
    """

    def __init__(self, content: bytes, tensors: Sequence[Tensor], policy: nn.Module | None = None) -> None:
        super().__init__(io.BytesIO(content))
        self._tensors, self._policy = tensors, policy

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names."""
        if module == __name__:
            own = {"_restored": self._restore, "_restored_array": self._restore_array, "_policy": lambda: self._policy}
            if name in own:
                return own[name]
        return super().find_class(module, name)

    def _restore(self, place: int, shape: tuple[int, ...], parameter: bool, requires_grad: bool) -> Tensor:
        tensor = self._tensors[place]
        if parameter:
            return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad)
        return tensor.view(shape).requires_grad_(requires_grad)

    def _restore_array(self, place: int, shape: tuple[int, ...]) -> Any:
        return self._tensors[place].view(shape).numpy()


def left_out(_: object) -> Any:
    """Reduce an object to None."""
    return type(None), ()


def _restored(*_: object) -> Tensor:
    """Stand in a pickle for a tensor."""
    raise AssertionError("only the unpickler knows its tensors")


def _restored_array(*_: object) -> Any:
    """Stand in a pickle for an array."""
    raise AssertionError("only the unpickler knows its arrays")


def _policy() -> nn.Module:
    """Stand in a pickle for the policy."""
    raise AssertionError("only the unpickler knows the policy")
