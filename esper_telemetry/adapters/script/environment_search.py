"""Search for an environment whose functions have other names than `step` and `reset`, by the flow of data.

Until an environment has been stepped, Python's profiler shows the functions of the program that begin after a call of the network and
return before its next call. A function that returns a reward and flags of ends is the step of an environment, surely so if it received
the choice that the policy has just drawn. From then on it is tapped like other environments, and the profiler is off.
Its code is exchanged, so that all references to the function lead to the tap: of modules, classes, objects, and other functions.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from inspect import CO_GENERATOR, unwrap
from pathlib import Path
from sysconfig import get_paths
from types import CellType, CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from esper_telemetry.adapters.script.observed_steps import as_numbers, named_parts, step_result
from esper_telemetry.adapters.script.patches import wrapping
from esper_telemetry.adapters.script.script_episodes import EpisodeLog
from esper_telemetry.adapters.script.variables import locals_of

if TYPE_CHECKING:
    from esper_telemetry.adapters.script.listener import ScriptListener
    from esper_telemetry.adapters.script.patches import Patches
    from esper_telemetry.adapters.script.script_taps import Taps

MAX_EVENTS, MAX_EVENTS_AT_ONCE = 1 << 18, 1 << 16
"""Calls and returns that are looked at, in all (about a tenth of a second) and between two calls of the network.

The first call of a network may import modules, which are hundreds of thousands of calls.
"""

MAX_GENERATORS = 4096  # in a list

NO_STEP = (
    "no function of the program took an action and returned a reward with a flag, True or False, for the end of the episode, or with an "
    "observation. "
    "Give the environment a method `step(action)` that returns (observation, reward, done), and a method `reset()`"
)
IN_CHILDREN = (
    "what the program's child processes step is seen only if they send an observation, a reward and one or two flags of each step; print "
    "or log the returns of episodes, or report them from the loop (docs/own_loop.md)"
)
"""What is said of a program whose environment was not seen, without and with child processes."""

MAX_LOSSES = 64
"""Backward passes without an environment after which a program is assumed to have none."""

MAX_CHOICES = 8
"""Latest choices of the policy with which arguments are compared."""

LIBRARY_PATHS = (*get_paths().values(), str(Path(__file__).parents[2]), "<")
"""Beginnings of the paths of code that is not the program's."""

LIBRARY_FOLDERS = ("site-packages", "dist-packages")

NUMBERS = (bool, int, float, list, tuple, np.generic, np.ndarray, Tensor)
"""Types of actions, and of parts of a result: nothing else is read, because reading an object may change it."""


class StepCall(NamedTuple):
    """A call of a function that may be the step of an environment.

    Attributes:
        frame, caller: of the function, which has returned `result`, and of its caller.
        began: number of the call, in the order in which calls began.
        action: name of the argument with the policy's choice; empty if none has it.
        arguments: by name.
    """

    frame: FrameType
    caller: FrameType | None
    began: int
    action: str
    arguments: Mapping[str, Any]
    result: tuple[Any, ...] | list[Any]

    @property
    def code(self) -> CodeType:
        """Code of the function."""
        return self.frame.f_code

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        """How well it fits: a flag and the choice are the surest signs, and objects distinguish environments."""
        return not isinstance(self.result, list), bool(self.action), self.method_of() is not None

    def method_of(self) -> tuple[Any, type] | None:
        """Return the object and the class whose method this is; None for other functions."""
        owner = next(iter(self.arguments.values()), None) if self.code.co_argcount else None
        for kind in type(owner).__mro__ if owner is not None else ():
            method = vars(kind).get(self.code.co_name)
            if isinstance(method, FunctionType) and getattr(unwrap(method), "__code__", None) is self.code:  # perhaps decorated
                return owner, kind
        return None

    def functions(self) -> list[FunctionType]:
        """Return the functions with this code, first the called one: a function within another one may have been made several times."""
        known = [one for one in gc.get_referrers(self.code) if isinstance(one, FunctionType) and one.__code__ is self.code]
        return sorted(known, key=lambda one: not self._has_cells_of(one))

    def _has_cells_of(self, function: FunctionType) -> bool:
        """Return True if the variables of outer functions that it uses are those of the call."""
        own, cells = self.frame.f_locals, function.__closure__ or ()
        pairs = zip(self.code.co_freevars, cells, strict=True)
        return all(own.get(name, cells) is _contents(cell, cells) for name, cell in pairs)


def _contents(cell: CellType, default: object) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return default


class EnvironmentSearch:
    """Searches for an environment of the program by the flow of its data.

    Args:
        taps: receive the steps.
        patches: hold the functions that are replaced.

    Attributes:
        is_over: an environment is known, or none will be.
    """

    def __init__(self, taps: Taps, patches: Patches) -> None:
        self.is_over = False
        self._taps, self._patches = taps, patches
        self._profiler = self._profile  # one object, to recognise it
        self._events, self._limit = MAX_EVENTS, 0
        self._calls = self._losses = 0
        self._began: dict[FrameType, tuple[int, Mapping[str, Any]]] = {}
        self._choices: deque[Any] = deque(maxlen=MAX_CHOICES)
        self._found: StepCall | None = None
        self._adopted: CodeType | None = None
        self._adopted_steps = 0  # of the environments when it was adopted
        self._tapped: list[FunctionType] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Classes of the program that are pickled by value take their taps with them: in another process these do nothing."""
        return EnvironmentSearch, (self._taps, type(self._patches)())

    def after_network(self, script: ScriptListener, choice: Any = None) -> None:
        """The network has been called, or has made a choice: what was found before is a step."""
        self.end()
        found, self._found = self._found, None
        self._began.clear()
        self._losses = 0 if choice is not None else self._losses
        if script.environments.steps > self._adopted_steps or script.environments.closed or self._events <= 0:
            self.is_over = True
        elif found is not None and found.code is not self._adopted:
            self._adopt(script, found)
        if choice is not None:
            self.add_choice(choice)
        if self.is_over:
            self._forget()
        elif sys.getprofile() is None:
            self._limit = max(0, self._events - MAX_EVENTS_AT_ONCE)
            sys.setprofile(self._profiler)

    def add_choice(self, choice: Any) -> None:
        """Add numbers that the program may act with."""
        if (numbers := as_numbers(choice)) is not None:
            self._choices.append(numbers.astype(np.float64))

    def end(self) -> None:
        """Stop looking, until the network is called again."""
        if sys.getprofile() is self._profiler:
            sys.setprofile(None)

    def before_backward(self) -> None:
        """A loss is trained on, so that nothing acts now."""
        self.end()
        self._losses += 1
        self.is_over = self.is_over or self._losses > MAX_LOSSES

    def _forget(self) -> None:
        """Drop what the profiler has kept alive: the found calls, and copies of variables in the frames of the program."""
        self._found = None
        self._began.clear()
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if is_own(frame.f_code.co_filename):  # a copy of the variables of this function would keep its own frame
                locals_of(frame)
            frame = frame.f_back

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        try:
            self._events -= 1
            if self._events <= self._limit:
                self.end()
            elif event == "call" and is_own(frame.f_code.co_filename):
                code = frame.f_code
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                own = frame.f_locals  # Python copies it back into the variables: it must not be changed here
                self._calls += 1
                self._began[frame] = self._calls, {name: own.get(name) for name in names}
            elif event == "return" and frame in self._began:
                self._consider(frame, *self._began.pop(frame), argument)
        except Exception:  # such as of an object that refuses to be an array: the program continues
            self._events = 0
            self.end()

    def _consider(self, frame: FrameType, began: int, arguments: Mapping[str, Any], returned: object) -> None:
        result = step_result(returned)
        if result is None:
            return
        is_generator = bool(frame.f_code.co_flags & CO_GENERATOR)
        values = frame.f_locals if is_generator else arguments
        held = [name for name, value in values.items() if self._holds_choice(value)]
        action = held[-1] if held else ""
        if not action and frame.f_code.co_name == "step" and callable(getattr(next(iter(arguments.values()), None), "reset", None)):
            action = [*arguments][-1]  # the policy's choice may have been squashed
        call = StepCall(frame, frame.f_back, began, action, arguments, result)
        parts = named_parts(returned) or returned
        size = len(parts) if isinstance(parts, tuple | list) else 0
        if isinstance(next(iter(arguments.values()), None), nn.Module):
            return
        if not action and (size < 3 or not arguments or isinstance(result, list)):
            return
        known = self._found
        # a call that began earlier encloses the known one, which has returned already
        if known is None or (*call.rank, call.began < known.began) > (*known.rank, False):
            self._found = call

    def _holds_choice(self, value: object) -> bool:
        """Return True for numbers that are all among those of one of the latest choices."""
        if not isinstance(value, NUMBERS) or not self._choices:
            return False
        numbers = as_numbers(value)
        if numbers is None or numbers.size > max(one.size for one in self._choices):
            return False
        return any(bool(np.isin(numbers.astype(np.float64), one).all()) for one in self._choices)

    def _adopt(self, script: ScriptListener, call: StepCall) -> None:
        """Tap the function as the step of an environment, instead of one that took no further step, and record the call that was found."""
        for function in self._tapped:
            self._patches.restore(function, "__code__")
        if self._tapped:
            script.environments = EpisodeLog()
        method, self._tapped = call.method_of(), call.functions()
        if not self._tapped:
            return
        is_generator = bool(call.code.co_flags & CO_GENERATOR)
        name = call.action or ("" if is_generator else _other_argument(call.arguments, call.result))
        for function in self._tapped:
            own = None if method is not None else function
            step = functools.partial(self._step, action=name, code=call.code, env=own)
            self._patches.replace_code(function, wrapping(self._generator) if is_generator else step)
        env = self._tapped[0] if method is None else method[0]
        if is_generator:
            env = self._replace_generators(call)
            if env is None:
                return  # the next one that the function makes is tapped
        action = call.arguments.get(name, locals_of(call.frame).get(name))
        script.after_env_step(env, call.result, action, foreign=True)
        self._adopted, self._adopted_steps = call.code, script.environments.steps
        if method is not None:
            self._tapped += self._tap_resets(method[1], call.code.co_name, self._adopted_steps)

    def _step(self, step: Callable[..., Any], action: str, code: CodeType, env: Any = None) -> Callable[..., Any]:
        """Record the steps of an environment; `env` is a function that is one, else it is the first argument."""
        names = code.co_varnames[: code.co_argcount]
        place = names.index(action) if action in names else len(names) - 1

        @functools.wraps(step)
        def stepped(*args: Any, **options: Any) -> Any:
            script = self._taps.script
            if script is None or not script.listens or script.environments.busy:
                return step(*args, **options)
            log, own = script.environments, args[0] if env is None else env
            self._taps.end_update(own)
            log.inside, began = True, time.perf_counter()
            try:
                result = step(*args, **options)
            finally:
                log.inside = False
            chosen = options.get(action, args[place] if place < len(args) else None)
            self._taps.after_step(own, step_result(result), chosen, began, foreign=True)
            return result

        return stepped

    def _tap_resets(self, kind: type, step: str, steps: int) -> list[FunctionType]:
        """Tap the methods that may begin an episode: methods of the program's classes without a required argument."""
        taps: list[FunctionType] = []
        for name, method in [pair for owner in kind.__mro__ for pair in vars(owner).items()]:
            code = method.__code__ if isinstance(method, FunctionType) else None
            if code is None or name == step or name.startswith("__") or not is_own(code.co_filename):
                continue
            if code.co_argcount - len(method.__defaults__ or ()) <= 1:
                self._patches.replace_code(method, functools.partial(self._perhaps_reset, method, steps))
                taps.append(method)
        return taps

    def _perhaps_reset(self, tapped: FunctionType, steps: int, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def called(env: Any, *args: Any, **options: Any) -> Any:
            nonlocal steps
            script = self._taps.script
            if script is None or not script.listens or script.environments.busy:
                self._patches.restore(tapped, "__code__")  # a part of another method
                return method(env, *args, **options)
            log = script.environments
            log.resetting = True
            try:
                result = method(env, *args, **options)
            finally:
                log.resetting = False
            before, steps = steps, log.steps
            self._taps.call(lambda _: None if log.begins(env, result, before) else self._patches.restore(tapped, "__code__"))
            return result

        return called

    def _generator(self, function: Callable[..., Any], *args: Any, **options: Any) -> ObservedGenerator:
        return ObservedGenerator(function(*args, **options), self._taps)

    def _replace_generators(self, call: StepCall) -> ObservedGenerator | None:
        """Replace the generator that has just made a step, and others of its function.

        They are found in variables of modules, members of objects, lists and dictionaries. Returns the replacement if there is only one.
        """
        frame, made = call.caller, dict[int, ObservedGenerator]()
        while frame is not None:
            owners = [*locals_of(frame).values(), *frame.f_globals.values()]
            members = [vars(one) for one in owners if is_own_object(one)]
            held = [*owners, *(value for one in members for value in one.values())]
            for scope in (frame.f_globals, *members, *(one for one in held if type(one) in (list, dict) and len(one) <= MAX_GENERATORS)):
                for key, value in list(scope.items() if isinstance(scope, dict) else enumerate(scope)):
                    if getattr(value, "gi_code", None) is call.code:
                        scope[key] = made.setdefault(id(value), ObservedGenerator(value, self._taps))
            frame = frame.f_back
        return next(iter(made.values())) if len(made) == 1 else None


class ObservedGenerator(Generator[Any, Any, Any]):
    """A generator that is an environment: it receives actions, and yields results of steps. A new one begins an episode."""

    def __init__(self, generator: Generator[Any, Any, Any], taps: Taps) -> None:
        self._generator, self._taps = generator, taps

    def send(self, value: Any) -> Any:
        """Return what the generator yields next."""
        began, is_first = time.perf_counter(), value is None
        if not is_first:
            self._taps.end_update(self)
        result = self._generator.send(value)
        if is_first:
            self._taps.call(lambda script: script.environments.reset(self, result))
        else:
            self._taps.after_step(self, step_result(result), value, began, foreign=True)
        return result

    def throw(self, *error: Any) -> Any:
        """Raise an exception in the generator."""
        return self._generator.throw(*error)

    def close(self) -> None:
        """Close the generator."""
        self._generator.close()


def _other_argument(arguments: Mapping[str, Any], result: Sequence[Any]) -> str:
    """Return the first argument of a step that has numbers of another shape than its observation; empty without one."""
    seen = as_numbers(result[0])
    for name, value in arguments.items():
        numbers = as_numbers(value) if isinstance(value, NUMBERS) else None
        if numbers is not None and (seen is None or numbers.shape != seen.shape):
            return name
    return ""


def is_own_object(value: object) -> bool:
    """Return True for an object with members of one of the program's classes."""
    module = sys.modules.get(type(value).__module__)
    return isinstance(getattr(value, "__dict__", None), dict) and is_own(getattr(module, "__file__", None) or "<")


@functools.lru_cache(maxsize=4096)
def is_own(path: str) -> bool:
    """Return True for a file of the program, neither of Python nor of an installed package."""
    return not path.startswith(LIBRARY_PATHS) and not any(folder in path for folder in LIBRARY_FOLDERS)
