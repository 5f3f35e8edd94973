"""Taps on the functions of torch, Gymnasium and TensorBoard that a script calls, while it runs.

Every tap calls the replaced function with the script's arguments, and returns its result. An exception in a tap ends that tap.
Nothing here imports torch or NumPy before the script does, because the script may set variables that they read.
"""

from __future__ import annotations

import builtins
import functools
import logging
import math
import re
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from inspect import getattr_static
from types import FunctionType, GeneratorType
from typing import TYPE_CHECKING, Any, SupportsFloat

from esper_telemetry.adapters.script.patches import AfterImport, Patches, Wrap, clear_item_slots, subclasses, wrapping
from esper_telemetry.core.redaction import error_line

if TYPE_CHECKING:
    from esper_telemetry.adapters.script.environment_search import EnvironmentSearch
    from esper_telemetry.adapters.script.listener import ScriptListener
    from esper_telemetry.core.clock import Clock

_logger = logging.getLogger("esper_telemetry")

RETURN_WORD = re.compile("episod.*(return|reward)|return(?!s)|score", re.IGNORECASE)  # `returns` are targets
"""Part of the tag of a scalar with the return of episodes."""

TIMED_EVERY = 17
"""One brief call in so many is timed. Brief calls are periodic, so a prime number samples all of them."""

MAX_HEAD_OUTPUTS = 32
"""Largest number of outputs of a layer that may be the critic, perhaps together with the policy."""

MAX_SEARCHES = 8
"""Optimizers and passes before the first step of a known environment, at which environments of other classes are searched for."""

NO_ROWS = (int, slice, tuple, type(None), type(...))
"""Types of indices that are not the rows of a minibatch."""


class Taps:
    """Installs the taps as the libraries are imported.

    Args:
        make: makes the script's listener, when torch is there.
        join: returns the callback for a model of Stable-Baselines3 from the script's callback.
        watch: called with a trainer of transformers that is about to train.

    Attributes:
        script: the listener; None before torch is there.
        error: first exception in a tap, which ended that tap; None without one.
        clock: telemetry's, which counts the time of the taps; None before it exists.
    """

    def __init__(self, make: Callable[[], ScriptListener], join: Callable[[Any, Any], Any], watch: Callable[[Any], None]) -> None:
        self.script: ScriptListener | None = None
        self.error: BaseException | None = None
        self.clock: Clock | None = None
        self._calls = 0
        self._searches = MAX_SEARCHES
        self._search: EnvironmentSearch | None = None
        self._ended: set[object] = set()
        self._asking = self._passing = self._calling = False
        self._make, self._join, self._watch = make, join, watch
        self._patches, self._model_patches = Patches(), Patches()
        self._removers: list[Callable[[], None]] = []
        installers: dict[str, Callable[[Any], None]] = {
            "torch": self._tap_torch,
            "gymnasium": self._tap_environments,
            "gym": self._tap_environments,
            "multiprocessing.connection": self._tap_connections,
            "torch.utils.tensorboard.writer": self._tap_writer,
            "tensorboardX.writer": self._tap_writer,
            "stable_baselines3.common.base_class": self._tap_stable_baselines3,
            "transformers.trainer": self._tap_transformers,
        }
        self._imports = AfterImport({name: self._contained(tap) for name, tap in installers.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        """Classes of the script that are pickled by value take their taps with them: in another process these do nothing."""
        return Taps, (None, None, None)

    def install(self) -> None:
        """Begin to listen."""
        self._imports.install()

    def remove(self) -> None:
        """Put everything back."""
        self.leave_script()
        self._model_patches.undo()

    def leave_script(self) -> None:
        """Listen only to the `learn` of models: a library trains, not the script."""
        if self._search is not None:
            self._search.end()
        self._search = None
        self._imports.remove()
        self._patches.undo()
        for remove in self._removers:
            remove()
        self._removers, self.script = [], None

    @property
    def traces(self) -> bool:
        """True unless the script is not there yet, or the update is only counted."""
        return self.script is not None and not self.script.counts_only

    def call(self, function: Callable[[ScriptListener], object], weight: int = 1, tap: object = None) -> None:
        """Call a function with the listener, if it listens. An exception ends the tap and is not raised.

        Args:
            weight: how many calls the time of this one counts for; 0 to count none.
            tap: identifies the tap if several have this function.
        """
        script, clock, tap = self.script, self.clock, tap or function.__code__
        if script is None or tap in self._ended or not script.listens:
            return
        calling, self._calling = self._calling, True
        try:
            if clock is None or not weight:
                function(script)
            else:
                with clock.weighing(weight):
                    function(script)
        except Exception as error:  # the script continues after any error
            self._end(tap, error)
        finally:
            self._calling = calling

    def _call_briefly(self, function: Callable[[ScriptListener], object], tap: object = None) -> None:
        """The same for functions that take about as long as reading the clock: one call in several is timed, and counts for all."""
        self._calls += 1
        self.call(function, 0 if self._calls % TIMED_EVERY else TIMED_EVERY, tap)

    def _end(self, tap: object, error: Exception) -> None:
        """End a tap that has failed, with a warning: the other taps continue."""
        self._ended.add(tap)
        self.error = self.error or error
        frames = [frame.f_code.co_qualname.rpartition("<locals>.")[2] for frame, _ in traceback.walk_tb(error.__traceback__)]
        named = (name for name in frames[1:] if not name.endswith("<lambda>"))  # after the caller here
        _logger.warning(
            "esper-telemetry: %s failed and is not called again; the script and other measurements continue: %s",
            next(named, "a tap"),
            error_line(error),
            exc_info=_logger.isEnabledFor(logging.DEBUG),
        )

    def _contained(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function without its exceptions, the first of which ends it: the script continues with any version of a library."""
        tap = getattr(function, "__code__", function)

        def contained(*args: Any) -> Any:
            if tap not in self._ended:
                try:
                    return function(*args)
                except Exception as error:
                    self._end(tap, error)
            return None

        return contained

    def _observed(self, record: Callable[..., object]) -> Wrap:
        """Return how a function is wrapped so that `record` is called after it, with the listener, the result and the arguments."""

        def observed(function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            if self.script is not None and not _compiling():
                self._call_briefly(lambda script: record(script, result, *args, **options), record)
            return result

        return wrapping(observed)

    def _asked(self, record: Callable[..., object], method: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        """Record a distribution's results for the script, but not for another distribution that contains it."""
        if self._asking or not self.traces or _compiling():
            return method(*args, **options)
        self._asking = True
        try:
            result = method(*args, **options)
        finally:
            self._asking = False
        self._call_briefly(lambda script: record(script, result, *args, **options), record)
        return result

    def _tap_torch(self, torch: Any) -> None:
        from torch.optim import optimizer

        from esper_telemetry.adapters.script.environment_search import EnvironmentSearch
        from esper_telemetry.adapters.script.variables import calling_variables

        def before_step(optimizer: Any, *_: Any) -> None:
            self.call(lambda script: script.before_step(optimizer, calling_variables))

        def after_step(optimizer: Any, *_: Any) -> None:
            self.call(lambda script: script.after_step(optimizer))

        def log_prob(script: ScriptListener, result: Any, distribution: Any, value: Any = None) -> None:
            script.distributions.add(distribution, result, value)

        def entropy(script: ScriptListener, result: Any, _: Any) -> None:
            script.distributions.add_entropy(result)

        def sample(script: ScriptListener, choice: Any, distribution: Any, *__: Any, **___: Any) -> None:
            if self._search is not None:
                self._after_network(choice)
            script.distributions.add_sample(distribution, choice)

        def drawn(script: ScriptListener, choice: Any, probs: Any, count: int = 1, *_: Any, **options: Any) -> None:
            if choice.shape == probs.shape or options.get("num_samples", count) == 1:  # several are rows, not choices
                if self._search is not None:
                    self._after_network(choice)
                script.distributions.draws += 1
                if script.distributions.has_tokens and probs.dim() == 2 and choice.numel() == len(probs):
                    script.distributions.add_tokens(choice, probs.log().clamp(min=torch.finfo(probs.dtype).min))

        def noise(_: ScriptListener, __: Any, *___: Any, **____: Any) -> None:
            if self._search is not None:  # a policy of plain tensors adds it to its means
                self._after_network()

        def largest(_: ScriptListener, index: Any, *__: Any, **___: Any) -> None:
            if self._search is not None:
                self._search.add_choice(index)

        def printed(script: ScriptListener, _: Any, *words: Any, **__: Any) -> None:
            script.returns.add_text(" ".join(map(str, words)))

        def logged(script: ScriptListener, _: Any, __: Any, record: logging.LogRecord) -> None:
            if not record.name.startswith("esper_telemetry"):
                script.returns.add_text(record.getMessage())

        self.script, self._search = self._make(), EnvironmentSearch(self, self._patches)
        self._patches.replace(builtins, "print", self._observed(printed))
        self._patches.replace(logging.Logger, "handle", self._observed(logged))
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                self._patches.replace(owner, name, wrapping(functools.partial(self._clip, by_norm="norm" in name)))
        self._patches.replace(torch.Tensor, "backward", wrapping(self._backward))
        self._patches.replace(torch.autograd, "grad", wrapping(self._backward))
        self._patches.replace(torch.Tensor, "__getitem__", self._indexed)
        if not clear_item_slots(torch.Tensor):
            self._patches.undo_last()
        self._patches.replace(torch.Tensor, "index_select", self._indexed)
        self._patches.replace(optimizer.Optimizer, "__init__", self._observed(self._search_environments))
        for kind in (torch.distributions.Distribution, *subclasses(torch.distributions.Distribution)):
            for record in (log_prob, entropy, sample):
                if record.__name__ in vars(kind):
                    self._patches.replace(kind, record.__name__, wrapping(functools.partial(self._asked, record)))
        for owner in (torch, torch.Tensor):
            for name in ("multinomial", "bernoulli"):
                self._patches.replace(owner, name, wrapping(functools.partial(self._asked, drawn)))
            self._patches.replace(owner, "argmax", wrapping(functools.partial(self._asked, largest)))
        for name in ("randn", "randn_like", "normal"):
            self._patches.replace(torch, name, wrapping(functools.partial(self._asked, noise)))
        for kind in (torch.nn.Linear, torch.nn.Conv2d):
            self._patches.replace(kind, "forward", wrapping(self._layer))
        for kind in (torch.nn.LSTM, torch.nn.RNNCellBase):
            self._patches.replace(kind, "__init__", self._observed(self._tap_modules))
        before = optimizer.register_optimizer_step_pre_hook(before_step)
        after = optimizer.register_optimizer_step_post_hook(after_step)
        self._removers += [before.remove, after.remove]

    def _clip(self, clip: Callable[..., Any], parameters: Any, *args: Any, by_norm: bool, **options: Any) -> Any:
        if _compiling():
            return clip(parameters, *args, **options)
        listed, again = _listed(parameters)
        limit = args[0] if args else options.get("max_norm")
        max_norm = float(limit) if by_norm and isinstance(limit, int | float) and limit > 0 else None
        self.call(lambda script: script.before_clip(listed, max_norm))
        return clip(again, *args, **options)

    def _backward(self, backward: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        """With a default device torch calls the method again for the same pass. `autograd.grad` counts if it ends in leaves."""
        loss = _loss_of(*args, **options)
        if self._passing or self._calling or self.script is None or loss is None or _compiling():
            return backward(*args, **options)
        if self._search is not None:
            self._search.before_backward()
        self.call(lambda script: script.before_backward(loss, taken=backward.__name__ == "grad"))
        self._passing = True
        try:
            result = backward(*args, **options)
        finally:
            self._passing = False
        if result is None:  # `autograd.grad` returns gradients that the parameters do not have yet
            self.call(lambda script: script.after_backward())
        return result

    def _indexed(self, take: Callable[..., Any]) -> Callable[..., Any]:
        """Record by which rows a script indexes what it has stored: the last argument, perhaps after an axis."""

        @functools.wraps(take)
        def taken(source: Any, *args: Any, **options: Any) -> Any:
            rows = args[-1] if args else None
            if type(rows) not in NO_ROWS and self.traces and not self._calling:
                plain = type(source).__name__ == "Tensor" and not source.requires_grad  # not a compiler's placeholder
                self.call(lambda script: script.indices.add(source, rows) if plain else None, 0)
            return take(source, *args, **options)

        return taken

    def _layer(self, forward: Callable[..., Any], layer: Any, inputs: Any) -> Any:
        def called(script: ScriptListener, layer: Any, inputs: Any, output: Any) -> None:
            if getattr(layer, "out_features", math.inf) <= MAX_HEAD_OUTPUTS:  # no convolution
                script.estimates.add(layer, output)
            if script.acting.add(layer, inputs, has_graph=output.requires_grad):
                script.before_acting(inputs)

        output = forward(layer, inputs)
        if self.traces and not _compiling():
            if self._searches:
                self.call(lambda script: self._search_environments(script))
            if self._search is not None:
                self._after_network()
            self._call_briefly(lambda script: called(script, layer, inputs, output))
        return output

    def _after_network(self, choice: Any = None) -> None:
        """The network has been called, or has made a `choice`: an environment may be stepped next."""
        search = self._search
        self.call(lambda script: search.after_network(script, choice) if search else None)
        if search is not None and search.is_over:
            self._search = None

    def _tap_modules(self, script: ScriptListener, *_: Any, **__: Any) -> None:
        """Tap calls of modules from the first LSTM or recurrent cell on, so that scripts without one are not slowed down."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        def before_forward(module: Any, arguments: tuple[Any, ...]) -> None:
            if self.traces and not _compiling():
                self._call_briefly(lambda script: script.lstm.add(module, arguments))

        script.lstm_count += 1
        if script.lstm_count == 1:
            self._removers.append(register_module_forward_pre_hook(before_forward).remove)

    def _tap_environments(self, module: Any) -> None:
        """Tap `step` and `reset` of all environments and wrappers of Gymnasium, or of Gym, including later definitions in the script."""
        kinds = [module.Env]
        with suppress(ImportError):  # vector environments of some versions are not an `Env`
            kinds.append(import_module(f"{module.__name__}.vector").VectorEnv)
        for base in kinds:
            for kind in (base, *subclasses(base)):
                self._tap_environment(kind)
            self._patches.replace(base, "__init_subclass__", functools.partial(self._subclass, base))

    def _tap_environment(self, kind: type) -> None:
        for name, wrap in (("step", self._step), ("reset", wrapping(self._reset))):
            if name in vars(kind):
                self._patches.replace(kind, name, wrap)

    def _search_environments(self, script: ScriptListener, *_: Any, **__: Any) -> None:
        """Tap the classes that can `step` and `reset` but are not of Gymnasium or Gym, until an environment has been stepped."""
        if self._search is not None:
            self._search.end()  # it would look at each class here
        self._searches = 0 if script.environments.steps else max(0, self._searches - 1)
        for kind in subclasses(object) if self._searches else ():
            if _may_be_environment(kind):
                with suppress(AttributeError, TypeError):  # classes may refuse to be changed
                    self._patches.replace(kind, "step", wrapping(self._foreign_step))
                    self._patches.replace(kind, "reset", wrapping(self._reset))

    def _foreign_step(self, step: Callable[..., Any], env: Any, /, *args: Any, **options: Any) -> Any:
        """Record the steps of an environment of another class, unless the steps of an inner environment are recorded."""
        script = self.script
        if script is None or script.environments.busy:
            return step(env, *args, **options)
        self.end_update(env)
        log = script.environments
        outer, log.stepped = log.stepped, env
        before, recorded, began = log.steps, log.recorded, time.perf_counter()
        try:
            result = step(env, *args, **options)
        finally:
            log.stepped = outer
        if log.steps == before:
            self.after_step(env, result, _action(*args, **options), began, foreign=True)
        elif log.recorded == recorded + 1:  # of an environment in this one, which is a wrapper
            self._call_briefly(lambda script: script.environments.show(result))
        return result

    def after_step(self, env: Any, result: Any, action: Any, began: float, *, foreign: bool = False) -> None:
        """Record a step that began then, if its result is one of an environment."""
        seconds = time.perf_counter() - began
        self._call_briefly(lambda script: script.after_env_step(env, result, action, seconds, foreign=foreign))

    def _subclass(self, base: type, _: Callable[..., None]) -> Any:
        """Tap environments that are defined or imported later."""

        def begun(kind: type[Any], /, **options: Any) -> None:
            super(base, kind).__init_subclass__(**options)  # type: ignore[arg-type]  # as in a class body
            self._contained(self._tap_environment)(kind)

        return classmethod(begun)

    def _step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def stepped(env: Any, *args: Any, **options: Any) -> Any:
            script = self.script
            log = None if script is None else script.environments
            if log is not None and (log.inside or log.resetting):  # a wrapper steps another one
                if not log.sums_inner:
                    return step(env, *args, **options)
                count = log.inner_steps
                result = step(env, *args, **options)
                if log.inner_steps == count:
                    log.add_inner_step(env, result)
                return result
            if script is None or not script.listens:
                return step(env, *args, **options)
            self.end_update()
            script.environments.inner_rewards.clear()
            script.environments.inside, began = True, time.perf_counter()
            try:
                result = step(env, *args, **options)
            finally:
                script.environments.inside = False
            parts = tuple(result) if isinstance(result, Iterator) else result  # as `zip` returns: it can be read once
            self.after_step(env, parts, _action(*args, **options), began)
            return result if parts is result else iter(parts)

        return stepped

    def end_update(self, env: Any = None) -> None:
        """End the update that is open: the script collects again, in an `env` of training if it is given."""
        if self.script is not None and self.script.open:
            self.call(lambda script: script.before_env_step() if env is None or script.environments.includes(env) else None)

    def _reset(self, reset: Callable[..., Any], env: Any, /, *args: Any, **options: Any) -> Any:
        """Record resets by the script. Steps that an environment takes to reset itself are not the script's."""
        script = self.script
        if script is None or script.environments.inside or script.environments.stepped is env:
            return reset(env, *args, **options)
        log = script.environments
        (before, log.resetting), resets = (log.resetting, True), log.resets
        try:
            result = reset(env, *args, **options)
        finally:
            log.resetting = before
        if log.resets == resets:
            self._call_briefly(lambda script: script.environments.reset(env, result))
        else:  # an environment in this one
            self._call_briefly(lambda script: script.environments.show(result, reset=True), "reset")
        return result

    def _tap_connections(self, module: Any) -> None:
        """Tap the pipes to environments in other processes: an answer with a reward and flags is the result of `step`."""
        sent: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

        def tapped_send(send: Callable[..., Any], connection: Any, message: Any) -> Any:
            script = self.script
            if script is not None and script.listens and not script.environments.inside:
                sent[connection] = message
            return send(connection, message)

        def tapped_receive(receive: Callable[..., Any], connection: Any) -> Any:
            answer = receive(connection)
            if connection in sent:
                self._contained(self._after_answer)(connection, sent.pop(connection), answer)
            return answer

        self._patches.replace(module._ConnectionBase, "send", wrapping(tapped_send))
        self._patches.replace(module._ConnectionBase, "recv", wrapping(tapped_receive))

    def _after_answer(self, connection: Any, message: Any, answer: Any) -> None:
        """Record the answer to a message if it is the result of `step`."""
        from esper_telemetry.adapters.script.observed_steps import step_parts

        nested = isinstance(answer, tuple) and len(answer) > 0 and isinstance(answer[0], tuple)
        result = answer[0] if nested else answer
        parts = step_parts(result)
        if parts is not None and parts[1].size == 1:
            self.end_update()
            named = isinstance(message, tuple) and len(message) == 2 and isinstance(message[0], str)
            action = message[1] if named else message
            self._call_briefly(lambda script: script.after_env_step(connection, result, action))

    def _tap_stable_baselines3(self, module: Any) -> None:
        """Every `learn` of every algorithm, including sb3-contrib, prepares its callbacks there."""

        def prepared(prepare: Callable[..., Any], model: Any, *args: Any, **options: Any) -> Any:
            callback = prepare(model, *args, **options)
            joined = self._contained(lambda: self._join(model, callback))()
            return callback if joined is None else joined

        self._model_patches.replace(module.BaseAlgorithm, "_init_callback", wrapping(prepared))

    def _tap_transformers(self, module: Any) -> None:
        """Every trainer of transformers and TRL begins there."""

        def trained(train: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
            self._contained(self._watch)(trainer)
            return train(trainer, *args, **options)

        self._model_patches.replace(module.Trainer, "train", wrapping(trained))

    def _tap_writer(self, module: Any) -> None:
        def record(script: ScriptListener, _: Any, __: Any, tag: Any, scalar_value: Any, *___: Any, **____: Any) -> None:
            script.scalars.add(tag, scalar_value)
            label = RETURN_WORD.search(tag) if isinstance(tag, str) else None
            if label is not None and isinstance(scalar_value, SupportsFloat):
                script.returns.add(label[0], scalar_value)

        self._patches.replace(module.SummaryWriter, "add_scalar", self._observed(record))


def _may_be_environment(kind: type[Any]) -> bool:
    """Return True for a class with the methods of an environment that can be recorded, unless it is torch's."""
    return (
        "step" in vars(kind)  # first, because most classes are without it
        and all(isinstance(getattr_static(kind, name, None), FunctionType) for name in ("step", "reset"))
        and hasattr(kind, "__weakref__")
        and not any(base.__module__.partition(".")[0] == "torch" for base in kind.__mro__)
    )


def _action(*args: Any, **options: Any) -> Any:
    """The action among the arguments of an environment's `step`."""
    return args[0] if args else options.get("action", options.get("actions"))


def _loss_of(outputs: Any, inputs: Any = None, *_: Any, **options: Any) -> Any:
    """The loss of a pass over its graph; None for a pass with respect to anything except leaves, such as a penalty on gradients."""
    outputs = outputs[0] if isinstance(outputs, list | tuple) and len(outputs) == 1 else outputs
    ends = inputs if isinstance(inputs, list | tuple) else [inputs] if hasattr(inputs, "is_leaf") else []
    single = hasattr(outputs, "grad_fn") and not options.get("create_graph")
    return outputs if single and all(getattr(one, "is_leaf", False) for one in ends) else None


def _listed(parameters: Any) -> tuple[list[Any], Any]:
    """The parameters as a list, and as what the script passed: a generator can be read once."""
    if not isinstance(parameters, Iterable) or hasattr(parameters, "grad_fn"):
        return [parameters], parameters
    listed = list(parameters)
    return listed, (item for item in listed) if isinstance(parameters, GeneratorType) else parameters


def _compiling() -> bool:
    """True while torch traces the caller: it must see the plain function."""
    import torch

    return torch.compiler.is_compiling()
