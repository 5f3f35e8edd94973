"""Functions of other libraries, replaced while a script runs, and put back; torch is not imported here."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, FunctionType, ModuleType
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)

AS_SEQUENCE, ITEM, SQ_ITEM = 11, 3, 44
"""Places, in pointers, of `tp_as_sequence` after the header of an object, and of `sq_item` in it; its number in `typeslots.h`."""

CALL = """
def outer({}):
    def call(*args, **options):
        function = "function"
        return function(*args, **options)
        {}
    return call
"""
"""A function with cells that calls another one, a constant; Python counts the cells that are read after its end, too."""


class AfterImport(MetaPathFinder):
    """Finds modules like all other finders, and calls back when one of them has been loaded by any importer.

    Args:
        callbacks: by the full name of the module.
    """

    def __init__(self, callbacks: dict[str, Callable[[ModuleType], None]]) -> None:
        self._callbacks = callbacks

    def install(self) -> None:
        """Begin; modules that are loaded already are called back for at once."""
        for name in [name for name in self._callbacks if name in sys.modules]:
            self._callbacks.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """End; harmless when repeated."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Another finder's, with a loader that calls back."""
        callback = self._callbacks.pop(fullname, None)
        if callback is None:
            return None
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                callback(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this loader is of this module alone
        return spec


def wrapping(function: Callable[..., Any]) -> Wrap:
    """Return how `Patches` wraps a function: `function` is called with the replaced one and its arguments, and returns the result."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            return function(original, *args, **options)

        # TorchScript compiles torch's source with the globals of what it finds; a program's globals would make this a frame of the program
        if isinstance(original, FunctionType) and original.__module__.partition(".")[0] == "torch":
            wrapped = FunctionType(wrapped.__code__, original.__globals__, original.__name__, None, wrapped.__closure__)
            wrapped._torchdynamo_inline = original  # type: ignore[attr-defined]  # what `torch.compile` traces instead
        return functools.wraps(original)(wrapped)

    return wrap


def _operators() -> dict[int, str]:
    """Operators by the ids of their functions, in torch's table, by which TorchScript compiles calls; empty if torch has no such table."""
    table: dict[int, str] = getattr(sys.modules.get("torch.jit._builtins"), "_get_builtin_table", dict)()
    return table


class Patches:
    """Functions of other libraries that are replaced, and put back in reverse order."""

    def __init__(self) -> None:
        self._replaced: list[tuple[object, str, Any, bool]] = []

    def replace(self, owner: object, name: str, wrap: Wrap) -> None:
        """Wrap the function `owner.name`; nothing happens if it does not exist, or is wrapped already."""
        original = getattr(owner, name, None)
        if original is None or getattr(original, "tapped", False):
            return
        own = name in vars(owner)
        wrapped = wrap(original)
        wrapped.tapped = True  # type: ignore[attr-defined]  # so that nothing is wrapped twice
        self._replaced.append((owner, name, original, own))
        setattr(owner, name, wrapped)
        operators = _operators()
        if id(original) in operators:
            operators[id(wrapped)] = operators[id(original)]

    def replace_code(self, function: FunctionType, wrap: Wrap) -> None:
        """Wrap a function for everybody who holds it, even a frame or a cell: its code becomes a call of the wrapped function."""
        code, original = function.__code__, copy_of(function)
        if not hasattr(function, "__wrapped__"):  # `inspect.signature` reads it
            self._replaced.append((function, "__wrapped__", None, False))
            function.__wrapped__ = original  # type: ignore[attr-defined]  # functions accept any attribute
        self._replaced.append((function, "__code__", code, True))
        function.__code__ = _code_of_call(wrap(original), len(code.co_freevars))

    def undo(self) -> None:
        """Put everything back."""
        while self._replaced:
            self.undo_last()
        if (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
            rules.clear_lru_cache()  # `torch.compile` knows torch's functions by what their names held when it began

    def restore(self, owner: object, name: str) -> None:
        """Put one function back; nothing happens if it was not replaced."""
        place = next((at for at, one in enumerate(self._replaced) if one[0] is owner and one[1] == name), None)
        if place is not None:
            self._replaced.append(self._replaced.pop(place))
            self.undo_last()

    def undo_last(self) -> None:
        """Put the function back that was replaced last."""
        owner, name, original, own = self._replaced.pop()
        if getattr(vars(owner).get(name), "tapped", False):
            _operators().pop(id(vars(owner)[name]), None)  # another object may get this id
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def copy_of(function: FunctionType) -> FunctionType:
    """Return a function that does the same, whatever becomes of the code of the first one."""
    parts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copied = FunctionType(function.__code__, *parts)
    copied.__kwdefaults__, copied.__annotations__ = function.__kwdefaults__, function.__annotations__
    return copied


def _code_of_call(function: Callable[..., Any], cells: int) -> CodeType:
    """Return code that calls a function with all arguments, for a function that has so many cells."""
    free = "".join(f"c{cell}, " for cell in range(cells))
    made: dict[str, Any] = {}
    exec(CALL.format(free, free or "None"), made)
    code: CodeType = made["outer"](*[None] * cells).__code__
    return code.replace(co_consts=tuple(function if one == "function" else one for one in code.co_consts))


def clear_item_slots(kind: type[Any]) -> bool:
    """Clear the slot `sq_item` of a class whose `__getitem__` was replaced, and of its subclasses; return False if that is not possible.

    Python sets the slot with `__getitem__`. With it a tensor counts as a sequence, and `torch.tensor([numbers[0]])` raises.
    """
    if sys.implementation.name != "cpython":
        return False
    get_slot = ctypes.pythonapi.PyType_GetSlot
    get_slot.argtypes, get_slot.restype = [ctypes.py_object, ctypes.c_int], ctypes.c_void_p
    for one in (kind, *subclasses(kind)):
        methods = ctypes.c_void_p.from_address(id(one) + object.__basicsize__ + AS_SEQUENCE * POINTER_BYTES).value
        slot = ctypes.c_void_p.from_address(methods + ITEM * POINTER_BYTES) if methods else None
        if slot is None or slot.value != get_slot(one, SQ_ITEM):
            return False  # another layout than this one
        slot.value = None
    return True


def subclasses(kind: type[Any]) -> Iterable[type[Any]]:
    """All classes that derive from it."""
    for derived in type.__subclasses__(kind):
        yield derived
        yield from subclasses(derived)
