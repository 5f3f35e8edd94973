"""Variables of a script at its calls into torch, and members of its containers.

Shapes: T steps, B environments, N rows.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

T = TypeVar("T")

Aliases = tuple[str, ...]
"""Names that scripts have for the same thing, the commonest first."""

GLOBAL_STEP: Aliases = (
    *("global_step", "global_steps", "total_steps_done", "num_timesteps", "timestep", "env_steps", "step_count"),
    "agent_steps",
)
SETTINGS: Aliases = ("args", "config", "cfg", "hp", "hparams", "opts", "options", "params", "flags")
"""Names of the object with a script's settings."""

ACTOR = r"(^|\.|_)(actor|policy|pi|action|act|logits|mean|mu|log_?std|dist|heads?)(_|\.|\d|$|net|head|mean|log_?std)"
CRITIC = r"(^|\.|_)(critic|value|vf|v|val|q)(_|\.|\d|$|net|head)"
"""Names of parameters, as regular expressions; the critic's are tried first. Parameters that match neither serve both."""

SKIPPED_PACKAGES = {"torch", "esper_telemetry", "accelerate", "contextlib", "gymnasium", "gym"}
"""Packages whose frames are between the script and the tap."""

LIBRARIES = {*SKIPPED_PACKAGES, "numpy", "builtins", "collections", "argparse", "logging", "tensorboard", "wandb", "random"}
"""Packages whose objects are not containers of the script."""

MAX_FRAMES, MAX_CALLING_FRAMES = 4, 16
"""Frames of the script that are searched, and frames whose lines are read, the innermost first."""

MAX_CONTAINERS = 256
"""Containers in variables that are searched."""

MAX_CONTAINER_DEPTH = 3
"""Containers in each other, as `self.buffer.transitions[0].reward`."""

MAX_MEMBERS = 256
"""Members of a container that is searched; one with more holds data, not names."""

MAX_INDICES = 8
"""Vectors of whole numbers that are compared with the rows of a minibatch."""

HOLDER_WORDS = {
    *("buf", "buffer", "batch", "mb", "minibatch", "t", "th", "tensor", "arr", "array", "lst", "list", "all", "flat"),
    *("b", "np", "hist", "memory", "mem", "rollout", "data", "seq", "my"),
}
"""Parts of names that describe how something is stored, not its meaning."""

MIN_FACTOR = 0.5
"""Smallest number that may discount or decay."""

MIN_DISCOUNT = 0.8
"""Smallest number outside a recursion that may be the discount: weights of losses are smaller."""

ROUNDING = 1e-6
"""Largest difference of the weights of an average from 1 in sum."""

CO_OPTIMIZED = 0x1
"""Flag of code whose local variables are not a dictionary."""


class Variables:
    """The variables of frames, the innermost first, then the members of objects in them, then the members of their settings.

    An instance keeps objects alive that the script would release: do not store it beyond the call that made it.
    """

    def __init__(self, scopes: list[Mapping[str, Any]]) -> None:
        self._scopes = scopes
        self._nested: list[Mapping[str, Any]] | None = None

    def find(self, names: Aliases, accept: Callable[[Any], T | None]) -> T | None:
        """Return the result of `accept` for the first variable with one of these names that it accepts.

        Variables precede members of containers. Exact names precede names that match only after `plain_name`.
        """
        return self.find_named(names, accept)[1]

    def find_named(self, names: Aliases, accept: Callable[[Any], T | None]) -> tuple[str, T | None]:
        """Return the name of the variable that `find` finds, and the result of `accept`; "" and None if there is none."""
        for members in (False, True):
            scopes = self.nested if members else self._scopes
            for name in names:
                for scope in scopes:
                    if name in scope and (value := accept(scope[name])) is not None:
                        return name, value
        plain = {plain_name(name) for name in names}
        for scope in (*self._scopes, *self.nested):
            for name, entry in scope.items():
                if plain_name(name) in plain and name.strip("_").lower() not in COUNTERS and (value := accept(entry)) is not None:
                    return name, value
        return "", None

    @property
    def nested(self) -> list[Mapping[str, Any]]:
        """Members by name of the containers among the variables: dictionaries, objects, records, and columns of lists of records."""
        if self._nested is None:
            self._nested = list(islice(_containers(self._scopes), MAX_CONTAINERS))
        return self._nested

    def named_values(self) -> Iterator[tuple[str, Any]]:
        """All variables and members of containers with their names."""
        for scope in (*self._scopes, *self.nested):
            yield from scope.items()

    def from_outside(self) -> list[Mapping[str, Any]]:
        """The variables by scope, the outermost first, as the program made them; members of containers last."""
        return [*reversed(self._scopes), *self.nested]

    def values(self) -> Iterator[Any]:
        """All variables, without members of containers other than `self` and settings."""
        for scope in self._scopes:
            yield from scope.values()

    def modules(self) -> list[nn.Module]:
        """Return the modules among the variables, each once."""
        return list({id(value): value for value in self.values() if isinstance(value, nn.Module)}.values())

    def with_constants(self, constants: Mapping[str, Any]) -> Variables:
        """Return the same with constants that are found if no variable is."""
        return Variables([*self._scopes, constants])

    def find_instance(self, kind: type[T]) -> T | None:
        """Return the first object of a class among the variables and the members of containers."""
        values = (value for scope in (*self._scopes, *self.nested) for value in list(scope.values()))
        return next((value for value in values if isinstance(value, kind)), None)

    def integers(self) -> dict[tuple[int, str], int]:
        """Whole numbers among the variables, by scope and name."""
        return {
            (place, name): value for place, scope in enumerate(self._scopes) for name, value in list(scope.items()) if type(value) is int
        }

    def indices(self, count: int) -> list[Tensor]:
        """Copies of the vectors of that many whole numbers, which may include the rows of a minibatch."""
        arrays = (value for value in self.values() if isinstance(value, np.ndarray | Tensor))
        whole = (one for one in arrays if one.ndim == 1 and len(one) == count and one.dtype in (torch.long, np.int64))
        return [torch.as_tensor(one).clone() for one in islice(whole, MAX_INDICES)]

    def tensors(self) -> Iterator[Tensor]:
        """All variables that are tensors, and those in dictionaries and objects among the variables."""
        for value in self.values():
            if isinstance(value, Tensor):
                yield value
            elif not isinstance(value, PLAIN):
                yield from (entry for entry in members_of(value).values() if isinstance(entry, Tensor))


MAX_ARRAYS = 12
"""Most arrays of a tuple or a list that are the columns of a rollout, not its steps."""

NO_MEMBERS = (type, ModuleType, Tensor, np.ndarray, str)
"""Types of the usual variables without members; a tuple, because a union would be made in each call."""

PLAIN = (list, deque, int, float, *NO_MEMBERS)
"""The same, and types with too many members or none that are tensors."""

COUNTERS = frozenset({"epoch", "step", "update", "iteration", "minibatch"})
"""Names of loop variables, whose plural is the name of a setting."""


@lru_cache(maxsize=4096)
def plain_name(name: str) -> str:
    """Return a name without its storage details: `oldLogProbs_t` and `old_log_prob` become `oldlogprob`."""
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_")
    plain = [word.rstrip("s") if len(word) > 2 else word for word in words if word and word not in HOLDER_WORDS]
    return "".join(plain) or name.lower()


def _containers(scopes: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the members of the containers in some scopes, then the members of nested containers."""
    visited, level = set[int](), list(scopes)
    for _ in range(MAX_CONTAINER_DEPTH):
        deeper: list[Mapping[str, Any]] = []
        for scope in level:
            for value in list(scope.values()):
                if id(value) not in visited:
                    visited.add(id(value))
                    deeper += [members] if (members := members_of(value)) else []
        yield from deeper
        level = deeper


def members_of(value: object) -> dict[str, Any]:
    """Return the members by name of a dictionary, a record or an object of the script's; empty for anything else.

    A list of records is one of columns: `[Step(reward=1), Step(reward=2)]` has the member `reward` with [1, 2]. Arrays in a tuple
    or a short list are numbered.
    """
    if isinstance(value, NO_MEMBERS):
        return {}
    if isinstance(value, Mapping):
        if len(value) > MAX_MEMBERS:
            return {}
        return {key: entry for key, entry in list(value.items()) if isinstance(key, str)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    parts = value if isinstance(value, tuple | list) and 1 < len(value) <= MAX_ARRAYS else ()
    if parts and all(isinstance(one, Tensor | np.ndarray) and one.ndim for one in parts):
        return {f"array_{place}": one for place, one in enumerate(parts)}
    if isinstance(value, list | deque) and len(value) > 1:
        return _columns(list(value))
    if isinstance(value, tuple) or (callable(value) and not hasattr(value, "__dict__")):
        return {}
    tensors = getattr(getattr(value, "dataset", value), "tensors", None)  # of a TensorDataset, also in a DataLoader
    if isinstance(tensors, tuple):
        return {f"tensors_{place}": tensor for place, tensor in enumerate(tensors)}
    if type(value).__module__.partition(".")[0] in LIBRARIES and not isinstance(value, nn.Module):
        return {}
    if dataclasses.is_dataclass(value) and not hasattr(value, "__dict__"):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if hasattr(value, one.name)}
    own = getattr(value, "__dict__", None)
    return dict(own) if isinstance(own, dict) and len(own) <= MAX_MEMBERS else {}


def _columns(rows: list[Any]) -> dict[str, Any]:
    """The columns of a list of records of one kind, also of a list of such lists."""
    if isinstance(rows[0], list) and all(isinstance(row, list) for row in rows):
        rows = [one for row in rows for one in row]
        if len(rows) < 2:
            return {}
    kind = type(rows[0])
    if any(type(row) is not kind for row in rows):
        return {}
    if isinstance(rows[0], tuple | list):
        width = len(rows[0])
        is_regular = 1 < width <= MAX_MEMBERS and all(len(row) == width for row in rows)
        names = getattr(rows[0], "_fields", [f"column_{place}" for place in range(width)] if is_regular else ())
        return {name: [row[place] for row in rows] for place, name in enumerate(names)}
    if kind.__module__.partition(".")[0] in LIBRARIES:
        return {}
    names = members_of(rows[0])
    return {name: [members_of(row).get(name) for row in rows] for name in names}


def calling_variables() -> Variables:
    """Return the variables of the script's frames that called into torch."""
    scopes: list[Mapping[str, Any]] = []
    for frame in _frames():
        scopes.append(locals_of(frame))
        scopes += [vars(owner) for name in ("self", "agent") if hasattr(owner := scopes[-1].get(name), "__dict__")]
    scopes += [values for scope in list(scopes) for name in SETTINGS if (values := settings_of(scope.get(name)))]
    return Variables(scopes)


class Source(NamedTuple):
    """Settings in the files of the script's frames.

    Attributes:
        numbers: with a name: by assignments, defaults of arguments and calls.
        lines: file and line by the name of a variable or member that is assigned there first, if possible with arithmetic.
        discounts: numbers in products of the code that may be the discount factor, the likeliest first; with the lambda in pairs.
        sets_rate: the rate of an optimizer is assigned, or a scheduler made.
        words: strings in the code.
        clears: file and lines where gradients are cleared; empty without any.
        counts_updates: names of the numbers that limit a loop over updates, in which the program acts and learns.
    """

    numbers: Mapping[str, float]
    lines: Mapping[str, str] = {}
    discounts: tuple[tuple[float, ...], ...] = ()
    sets_rate: bool = False
    words: frozenset[str] = frozenset()
    clears: str = ""
    counts_updates: frozenset[str] = frozenset()


def read_source(acted: Collection[tuple[str, int]] = ()) -> Source:
    """Return the settings in the files of the script's frames, which learn now and have acted at other lines."""
    now = calling_lines()
    counts = set[str]()
    named: dict[str, float] = {}
    lines: dict[str, tuple[int, str]] = {}
    trees: list[ast.AST] = []
    sets_rate = False
    words, clears = set[str](), list[str]()
    for path in dict.fromkeys(frame.f_code.co_filename for frame in _frames()):
        with suppress(OSError, SyntaxError, ValueError):
            tree = ast.parse(Path(path).read_bytes())
            for name, number in _named_numbers(tree):
                named.setdefault(name, number)
            for node in ast.walk(tree):
                words |= {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
                for name, rank in _stores(node):
                    if rank > lines.get(name, (-1, ""))[0]:
                        lines[name] = rank, f"{Path(path).name}:{node.lineno}"  # type: ignore[attr-defined]
                if isinstance(node, ast.For) and all(any(_is_in(node, path, place) for place in places) for places in (acted, now)):
                    counts |= {_name(part) for part in ast.walk(node.iter)} - {"", "range"}
            trees.append(tree)
            calls = {node.lineno for node in ast.walk(tree) if getattr(node, "attr", "") == "zero_grad"}  # type: ignore[attr-defined]
            clears += [f"{Path(path).name}:{', '.join(map(str, sorted(calls)))}"] if calls else []
            sets_rate = sets_rate or any(_sets_rate(node) for node in ast.walk(tree))
    places = {name: place for name, (_, place) in lines.items()}
    return Source(named, places, _discounts(trees, named), sets_rate, frozenset(words), "; ".join(clears), frozenset(counts))


def _is_in(node: ast.For, path: str, place: tuple[str, int]) -> bool:
    return place[0] == path and node.lineno <= place[1] <= (node.end_lineno or 0)


def _stores(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that a node stores, with a rank: 2 where arithmetic is, 1 where an entry is set, 0 elsewhere."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield _name(node), 0
    if not isinstance(node, ast.Assign | ast.AugAssign):
        return
    computes = isinstance(node, ast.AugAssign) or isinstance(node.value, ast.BinOp)
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        owner = target.value if isinstance(target, ast.Subscript) else target
        if isinstance(owner, ast.Name | ast.Attribute) and (computes or owner is not target):
            yield _name(owner), 2 if computes else 1


def calling_lines() -> list[tuple[str, int]]:
    """Return file and line of each of the script's frames, the innermost first."""
    return [(frame.f_code.co_filename, frame.f_lineno) for frame in _frames(MAX_CALLING_FRAMES)]


def calling_line() -> tuple[Any, int]:
    """Return code and line of the script's innermost frame."""
    frame = next(_frames(1), None)
    return (None, 0) if frame is None else (frame.f_code, frame.f_lineno)


def calling_place() -> str:
    """Return file and line of the script's innermost frame."""
    frame = next(_frames(), None)
    return "the script" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _discounts(trees: Iterable[ast.AST], numbers: Mapping[str, float]) -> tuple[tuple[float, ...], ...]:
    """Return the numbers of products that discount, each as the discount factor alone or with the lambda, the likeliest first.

    A recursion multiplies what it assigns, as `run = delta + 0.99 * 0.95 * run`. Other products have the discount alone, as
    `reward + 0.99 * value`, or nothing else, as `discounted(deltas, 0.99 * 0.95)`. Moving averages are no sums of rewards.
    """
    recursive: dict[tuple[float, ...], None] = {}
    others: dict[tuple[float, ...], None] = {}
    averages: set[ast.AST] = set()
    nodes = [node for tree in trees for node in ast.walk(tree)]
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            weights = [sum(_factors_of(side, numbers)[0]) for side in (node.left, node.right)]
            averages |= set(ast.walk(node)) if abs(sum(weights) - 1) < ROUNDING and all(weights) else set()
    inner = {part for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) for part in (node.left, node.right)}
    assigned = [
        (part, {_base_name(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])})
        for node in nodes
        if isinstance(node, ast.Assign | ast.AugAssign)
        for part in ast.walk(node.value)
    ]
    targets = {id(part): names for part, names in assigned}
    for node in nodes:
        if node in inner or node in averages:
            continue
        own, names = _factors_of(node, numbers)
        factors = tuple(sorted((one for one in own if one >= MIN_FACTOR), reverse=True))[:2]
        if (factors and names & targets.get(id(node), set())) or (len(factors) == 2 and not names):
            recursive[factors] = None
        elif factors and factors[0] >= MIN_DISCOUNT:
            others[factors[:1]] = None
    pairs = [one for one in recursive if len(one) == 2]
    swapped = [pair[::-1] if (pair[1],) in others and (pair[0],) not in others else pair for pair in pairs]
    return (*swapped, *(one for one in recursive if len(one) == 1), *sorted(others, reverse=True))


def _factors_of(node: ast.AST, numbers: Mapping[str, float]) -> tuple[list[float], set[str]]:
    """Return the numbers from 0 to 1 that a product multiplies, also by name, and the names of its other factors."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return [], set()
    factors, names, waiting = list[float](), set[str](), [node.left, node.right]
    while waiting:
        part = waiting.pop()
        number = part.value if isinstance(part, ast.Constant) else numbers.get(_name(part))
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult):
            waiting += [part.left, part.right]
        elif isinstance(number, float) and 0 < number < 1:
            factors.append(number)
        else:
            names |= {one.id for one in ast.walk(part) if isinstance(one, ast.Name)} or {""}
    return factors, names


def _name(node: ast.AST) -> str:
    """Return the name of a variable or an attribute; empty for other nodes."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _base_name(node: ast.AST) -> str:
    """Return the name of a variable, also of one that is indexed."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return str(getattr(node, "id", ""))


def _sets_rate(node: ast.AST) -> bool:
    """Return True for an assignment to `group["lr"]`, and for a name with `lr_scheduler` or `LR` in it."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "lr"
    return _name(node) == "lr_scheduler" or _name(node).endswith(("LR", "Scheduler"))


def _named_numbers(tree: ast.AST) -> Iterator[tuple[str, float]]:
    """Yield the settings in calls and assignments, then the defaults of arguments, which calls replace."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in sorted(ast.walk(tree), key=lambda node: isinstance(node, ast.arguments)):
        pairs: list[tuple[Any, Any]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
            for target, value in list(pairs):
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs += zip(target.elts, value.elts, strict=False)
        elif isinstance(node, ast.AnnAssign | ast.keyword):
            pairs = [(node.target if isinstance(node, ast.AnnAssign) else node.arg, node.value)]
        elif isinstance(node, ast.arguments):
            own = [*node.posonlyargs, *node.args]
            pairs = list(zip(own[len(own) - len(node.defaults) :], node.defaults, strict=True))
            pairs += zip(node.kwonlyargs, node.kw_defaults, strict=True)
        elif isinstance(node, ast.Call):
            called = functions.get(_name(node.func))
            own = [] if called is None else called.args.args
            pairs = list(zip(own[bool(own) and own[0].arg == "self" :], node.args, strict=False))
        for target, value in pairs:
            name = target if isinstance(target, str) else _name(target) or getattr(target, "arg", None)
            if name and isinstance(value, ast.Constant) and isinstance(value.value, int | float):
                yield name, value.value


def _frames(limit: int = MAX_FRAMES) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    count = 0
    while frame is not None and count < limit:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in SKIPPED_PACKAGES:
            yield frame
            count += 1
            if frame.f_globals.get("__name__") == "__main__" and frame.f_locals is frame.f_globals:
                return
        frame = frame.f_back


OWN_REFERENCES = 3  # of the frame, of the variable in `locals_of`, and of the argument of `getrefcount`


def locals_of(frame: FrameType) -> Mapping[str, Any]:
    """A copy of a frame's variables.

    Python 3.11 and 3.12 keep a dictionary of a function's variables with its frame after they have been read. It is emptied, as they would
    otherwise live longer than in the script, unless the script has it too, as the result of `locals()`.
    """
    variables = frame.f_locals
    if not frame.f_code.co_flags & CO_OPTIMIZED:
        return variables
    copied = dict(variables)
    if type(variables) is dict and sys.getrefcount(variables) <= OWN_REFERENCES:
        variables.clear()
    return copied


def settings_of(value: object) -> dict[str, Any]:
    """Settings by name, of a dictionary or an object with attributes; empty for anything else."""
    if isinstance(value, Mapping):
        return {key: entry for key, entry in value.items() if isinstance(key, str)}
    return dict(vars(value)) if hasattr(value, "__dict__") and not callable(value) else {}


def as_tensor(value: object) -> Tensor | None:
    """Accept a tensor or an array of numbers, as a detached floating tensor."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fbiu":
        value = torch.as_tensor(value)
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return value.detach() if value.is_floating_point() else value.detach().float()


def as_integer(value: object) -> int | None:
    """Accept a whole number."""
    return None if isinstance(value, bool) or not isinstance(value, int | np.integer) else int(value)


def as_flag(value: object) -> bool | None:
    """Accept True and False."""
    return value if isinstance(value, bool) else None


def as_number(value: object) -> float | None:
    """Accept a number of Python."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def stacked(value: object) -> Tensor | None:
    """Accept a tensor, an array, or a list or tuple of numbers, arrays or tensors of one shape, as a detached floating tensor."""
    if not isinstance(value, list | tuple | deque) or not value:
        return as_tensor(value)
    if isinstance(value[0], Tensor):
        parts = [as_tensor(one) for one in value]
        known = [part for part in parts if part is not None]
        return torch.stack(known) if len(known) == len(parts) and len({part.shape for part in known}) == 1 else None
    if isinstance(value[0], int | float | np.generic | np.ndarray):
        with suppress(ValueError, TypeError, RuntimeError):  # of several shapes, or with tensors that have a graph
            return as_tensor(np.asarray(value))
    return None


def parameter_names(variables: Variables, parameters: Iterable[Tensor]) -> dict[int, str]:
    """Return names of parameters by `id`, from the smallest of the script's modules that have most of them; else by their places."""
    places = {key: f"parameter_{place}" for place, key in enumerate(dict.fromkeys(map(id, parameters)))}
    named = [{id(parameter): name for name, parameter in module.named_parameters()} for module in variables.modules()]
    names = max(named, key=lambda own: (len(places.keys() & own.keys()), -len(own)), default={})
    # without the prefixes of DataParallel and torch.compile
    plain = {key: re.sub(r"(^|\.)(module|_orig_mod)(?=\.)", "", name).lstrip(".") for key, name in names.items()}
    return places | {key: name for key, name in plain.items() if key in places}


def groups_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the parameters that serve the actor, the critic or both, by their names; empty if the names do not say."""
    groups: dict[str, list[str]] = {}
    for name in names:
        group = "critic" if re.search(CRITIC, name) else "actor" if re.search(ACTOR, name) else "shared"
        groups.setdefault(group, []).append(name)
    return groups if {"actor", "critic"} & groups.keys() else {}
