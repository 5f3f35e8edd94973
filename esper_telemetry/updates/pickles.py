"""Pickles of policies, and of objects that hold them. Tensors are sent separately from the pickle and copied once each."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Reduction: TypeAlias = Callable[[Any], Any]

MAX_COPIED_ENTRIES = 1 << 26
"""Entries of a policy that is copied within this process: 256 megabytes."""

MIN_ARRAY_BYTES = 1 << 10
"""Bytes from which on an array travels as a tensor: smaller ones, such as bounds of spaces, are part of the pickle."""


class PolicyPickle(NamedTuple):
    """Pickle of a policy without its optimizer, or of objects without the policy that they hold.

    Attributes:
        content: pickle without tensors.
        tensors: in it.
        references: functions and classes that no pickle can name; empty if another process can load it.
    """

    content: bytes
    tensors: tuple[Tensor, ...]
    references: tuple[Any, ...] = ()

    def load(self, policy: nn.Module | None = None) -> Any:
        """Return what was pickled; objects that hold a policy hold this one."""
        return ContentUnpickler(self.content, self.tensors, self.references, policy).load()


def policy_copy(policy: nn.Module) -> Any:
    """Return a copy of a policy with copies of its tensors and without its optimizer: a pass through the policy may write to it.

    Raises:
        TypeError: if the policy cannot be copied.
    """
    return pickled_policy(policy, local=True).load()


@overload
def pickled_policy(policy: nn.Module, *, local: Literal[True]) -> PolicyPickle: ...
@overload
def pickled_policy(policy: nn.Module, *, local: bool = False) -> PolicyPickle | None: ...


def pickled_policy(policy: nn.Module, *, local: bool = False) -> PolicyPickle | None:
    """Return a pickle with copies of its tensors; None if another process cannot load it: see `TensorPickler.is_portable`.

    Args:
        policy: the policy.
        local: this process alone loads it.

    Raises:
        TypeError: if it is local and cannot be copied.
    """
    optimizers = {type(part) for part in vars(policy).values() if isinstance(part, Optimizer)}
    pickler = TensorPickler(dict.fromkeys(optimizers, left_out), local=local)
    if not (pickler.dump(policy) and pickler.is_portable):
        return None
    if local and (entries := sum(tensor.numel() for tensor in pickler.tensors)) > MAX_COPIED_ENTRIES:
        raise TypeError(f"the policy is not copied: it has {entries:,} numbers, and the limit is {MAX_COPIED_ENTRIES:,}")
    return pickler.result(clone=True)


def pickled_around(policy: nn.Module, content: object, without: Mapping[type, Reduction], *, local: bool = False) -> PolicyPickle | None:
    """Return a pickle of `content` with references to its tensors; None if another process cannot load it.

    Args:
        policy: that `content` holds, and the pickle does not.
        content: anything.
        without: (type -> reduction, as `copyreg` has them) of objects that are pickled in part.
        local: this process alone loads it.

    Raises:
        TypeError: if it is local and cannot be copied.
    """

    def leave_out(module: nn.Module) -> Any:
        return (_placeholder, ("policy",)) if module is policy else module.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    pickler = TensorPickler({**without, type(policy): leave_out}, local=local)
    return pickler.result(clone=False) if pickler.dump(content) and pickler.is_portable else None


class TensorPickler:
    """Pickles objects in sequence, without their tensors and large arrays.

    Args:
        without: (type -> reduction, as `copyreg` has them) of objects that are pickled in part.
        first: tensors that are the first of `tensors`.
        local: this process alone loads the pickle, which may hold objects of classes and functions that no pickle can name.

    Attributes:
        tensors: that were left out, in the order of their places; tensors with the same memory have one place.
        reached: places of tensors that the objects hold.
        references: classes and functions that were left out.
    """

    def __init__(self, without: Mapping[type, Reduction], first: Sequence[Tensor] = (), *, local: bool = False) -> None:
        self.tensors: list[Tensor] = list(first)
        self.reached = set[int]()
        self.references: list[Any] = []
        self._local = local
        self._places: dict[object, int] = {id(tensor): place for place, tensor in enumerate(first)}
        self._stream = io.BytesIO()
        kind = partial(_LocalPickler, self.references) if local else pickle.Pickler
        self._pickler = kind(self._stream, protocol=pickle.HIGHEST_PROTOCOL)
        own = {Tensor: self._leave_out, nn.Parameter: self._leave_out, np.ndarray: self._leave_array_out}
        self._pickler.dispatch_table = {**copyreg.dispatch_table, **own, **without}

    def dump(self, content: object) -> bool:
        """Pickle an object; if it cannot be, return False, or raise TypeError if it is local."""
        try:
            self._pickler.dump(content)
        except Exception as error:  # pickling runs a policy's code, which may not support it
            if self._local:
                raise TypeError(f"the policy cannot be copied: {type(error).__name__}: {error}") from error
            return False
        return True

    def result(self, *, clone: bool) -> PolicyPickle:
        """Return the pickle so far, with copies of its tensors or with the tensors themselves."""
        tensors = [tensor.detach().clone() if clone else tensor.detach() for tensor in self.tensors]
        return PolicyPickle(self.content, tuple(tensors), tuple(self.references))

    @property
    def content(self) -> bytes:
        """The pickle so far."""
        return self._stream.getvalue()

    @property
    def is_portable(self) -> bool:
        """True if another process can load it: it cannot import classes of the script, nor use tensors on a device."""
        return self._local or (b"__main__" not in self.content and all(tensor.is_cpu for tensor in self.tensors))

    def _leave_out(self, tensor: Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        parameter = isinstance(tensor, nn.Parameter)
        plain = not (parameter or tensor.requires_grad) and tensor.numel() > 0 and tensor.is_contiguous()
        place = self._place((tensor.data_ptr(), tensor.numel(), tensor.dtype) if plain else id(tensor), tensor)
        return _placeholder, ("tensor", place, tuple(tensor.shape), parameter, tensor.requires_grad)

    def _leave_array_out(self, array: Any) -> Any:
        simple = array.dtype.kind in "biuf" and array.flags.c_contiguous and array.flags.writeable
        if array.nbytes < MIN_ARRAY_BYTES or not simple or not array.dtype.isnative:
            return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        try:
            tensor = torch.from_numpy(array)
        except TypeError:  # a type of numbers that torch does not have
            return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        place = self._place((tensor.data_ptr(), tensor.numel(), tensor.dtype), tensor)
        return _placeholder, ("array", place, array.shape)

    def _place(self, key: object, tensor: Tensor) -> int:
        place = self._places.get(id(tensor), self._places.get(key))
        if place is None:
            self._places[key] = place = len(self.tensors)
            self.tensors.append(tensor)
        self.reached.add(place)
        return place


class _LocalPickler(pickle.Pickler):
    """Leaves classes and functions out, and appends them to `references`: copies share them with the original.

    The variables of a closure are copied, because they may hold the policy.
    """

    def __init__(self, references: list[Any], stream: io.BytesIO, *, protocol: int) -> None:
        super().__init__(stream, protocol)
        self._references = references

    def reducer_override(self, value: Any) -> Any:
        """Return how a class, a function or a method is reduced."""
        if isinstance(value, MethodType):
            is_of_class = getattr(type(value.__self__), value.__name__, None) is value.__func__
            return NotImplemented if is_of_class else (MethodType, (value.__func__, value.__self__))
        if not isinstance(value, type | FunctionType) or value.__module__ == __name__:
            return NotImplemented
        self._references.append(value)
        place = len(self._references) - 1
        if isinstance(value, type) or "<locals>" not in value.__qualname__:
            return _placeholder, ("reference", place)
        cells = tuple([cell.cell_contents for cell in value.__closure__ or ()])
        return _placeholder, ("closure", place, cells, value.__defaults__, value.__kwdefaults__)


class ContentUnpickler(pickle.Unpickler):
    """Restores tensors, classes, functions and a policy that were left out.

    Args:
        content, tensors, references: of a `TensorPickler`.
        policy: that was left out.
    """

    def __init__(self, content: bytes, tensors: Sequence[Tensor], references: Sequence[Any] = (), policy: nn.Module | None = None) -> None:
        super().__init__(io.BytesIO(content))
        self._tensors, self._references, self._policy = tensors, references, policy

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names."""
        return self._restored if (module, name) == (__name__, _placeholder.__name__) else super().find_class(module, name)

    def _restored(self, kind: str, *values: Any) -> Any:
        restore: dict[str, Callable[..., Any]] = {
            "tensor": self._restore_tensor,
            "array": self._restore_array,
            "reference": self._references.__getitem__,
            "closure": self._restore_closure,
            "policy": lambda: self._policy,
        }
        return restore[kind](*values)

    def _restore_tensor(self, place: int, shape: tuple[int, ...], parameter: bool, requires_grad: bool) -> Tensor:
        tensor = self._tensors[place]
        if parameter:
            own = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
            return own.requires_grad_(requires_grad)
        return tensor.view(shape).requires_grad_(requires_grad)

    def _restore_array(self, place: int, shape: tuple[int, ...]) -> Any:
        return self._tensors[place].view(shape).numpy()

    def _restore_closure(
        self, place: int, cells: tuple[Any, ...], defaults: tuple[Any, ...] | None, keywords: dict[str, Any] | None
    ) -> FunctionType:
        original: FunctionType = self._references[place]
        variables = tuple([CellType(value) for value in cells])
        function = FunctionType(original.__code__, original.__globals__, original.__name__, defaults, variables)
        function.__kwdefaults__ = keywords
        return function


def left_out(_: object) -> Any:
    """Reduce an object to None."""
    return type(None), ()


def _placeholder(kind: str, *_: object) -> Any:
    """Placeholder of a tensor, an array, a class, a function or the policy in a pickle."""
    raise AssertionError(f"only the unpickler knows what is left out, such as this {kind}")
