"""Where a script is listened to: functions of torch, Gymnasium and TensorBoard that it calls.

Every tap calls what it stands for with what the script gave it, and returns what that returns. What goes wrong in a tap ends all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import GeneratorType, ModuleType
from typing import TYPE_CHECKING, Any

from esper_telemetry.adapters.script.frames import names_here
from esper_telemetry.adapters.script.imports import AfterImport
from esper_telemetry.adapters.script.patches import Patches

if TYPE_CHECKING:
    from esper_telemetry.adapters.script.script import ScriptListener
    from esper_telemetry.core.clock import Clock


TIMED_EVERY = 17
"""Brief calls come in rhythms: a prime meets all of them."""


class Taps:
    """Installs the taps as what they listen to is imported.

    Args:
        make: makes the script's listener, when torch is there.
        join: returns the callback with which a model of Stable-Baselines3 learns, for the one that the script gave it.

    Attributes:
        script: what listens; None before torch is there.
        error: what went wrong in a tap, after which all are off.
        clock: telemetry's, which counts what the taps take; None before there is any.
    """

    def __init__(self, make: Callable[[], ScriptListener], join: Callable[[Any, Any], Any]) -> None:
        self.script: ScriptListener | None = None
        self.error: BaseException | None = None
        self.clock: Clock | None = None
        self._calls = 0
        self._make, self._join = make, join
        self._patches, self._model_patches = Patches(), Patches()
        self._removers: list[Callable[[], None]] = []
        self._imports = AfterImport(
            {
                "torch": self._torch,
                "gymnasium": self._gymnasium,
                "torch.utils.tensorboard.writer": self._writer,
                "tensorboardX.writer": self._writer,
                "stable_baselines3.common.base_class": self._stable_baselines3,
            }
        )

    def install(self) -> None:
        """Begins to listen."""
        self._imports.install()

    def remove(self) -> None:
        """Everything is as it was."""
        self.leave_script()
        self._model_patches.undo()

    def leave_script(self) -> None:
        """Listens to the `learn` of models alone: a library trains, not the script."""
        self._imports.remove()
        self._patches.undo()
        for remove in self._removers:
            remove()
        self._removers, self.script = [], None

    def contained(self, function: Callable[[ScriptListener], None]) -> None:
        """Tells the script's listener something, if it listens; an exception ends this for good and goes no further."""
        self._call(function, 1)

    def briefly(self, function: Callable[[ScriptListener], None]) -> None:
        """The same for what takes about as long as a look at the clock: one call in several is timed, and counts for all."""
        self._calls += 1
        self._call(function, 0 if self._calls % TIMED_EVERY else TIMED_EVERY)

    def _call(self, function: Callable[[ScriptListener], None], weight: int) -> None:
        script, clock = self.script, self.clock
        if script is None or self.error is not None or not script.listens:
            return
        try:
            if clock is None or not weight:
                function(script)
            else:
                with clock.weighing(weight):
                    function(script)
        except Exception as error:  # whatever it is, the script goes on
            self.error = error

    def _contained_install(self, install: Callable[[], None]) -> None:
        try:
            install()
        except Exception as error:  # an unusual version of the library: the script goes on
            self.error = self.error or error

    def _torch(self, torch: ModuleType) -> None:
        def install() -> None:
            from torch.optim import optimizer

            self.script = self._make()
            for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
                for name in ("clip_grad_norm_", "clip_grad_value_"):
                    self._patches.replace(owner, name, functools.partial(self._clip, by_norm="norm" in name))
            for kind in (torch.distributions.Categorical, torch.distributions.Normal):
                self._patches.replace(kind, "log_prob", self._log_prob)
            self._patches.replace(torch.nn.LSTM, "__init__", self._lstm)
            before = optimizer.register_optimizer_step_pre_hook(self._before_step)
            after = optimizer.register_optimizer_step_post_hook(self._after_step)
            self._removers += [before.remove, after.remove]

        self._contained_install(install)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self.contained(lambda script: script.before_step(optimizer, names_here()))

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self.contained(lambda script: script.after_step(optimizer))

    def _clip(self, clip: Callable[..., Any], *, by_norm: bool) -> Callable[..., Any]:
        @functools.wraps(clip)
        def clipped(parameters: Any, *args: Any, **options: Any) -> Any:
            if _compiling():
                return clip(parameters, *args, **options)
            listed, given = _listed(parameters)
            limit = args[0] if args else options.get("max_norm")
            max_norm = float(limit) if by_norm and isinstance(limit, int | float) and limit > 0 else None
            self.contained(lambda script: script.gradients.before_clip(listed, max_norm))
            return clip(given, *args, **options)

        return clipped

    def _log_prob(self, log_prob: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(log_prob)
        def tapped(distribution: Any, *args: Any, **options: Any) -> Any:
            if not _compiling():
                self.briefly(lambda script: script.distributions.see(distribution))
            return log_prob(distribution, *args, **options)

        return tapped

    def _lstm(self, make: Callable[..., None]) -> Callable[..., None]:
        """Modules are watched from the first LSTM on, so that scripts without one pay nothing."""

        @functools.wraps(make)
        def made(module: Any, *args: Any, **options: Any) -> None:
            make(module, *args, **options)
            self.contained(self._watch_modules)

        return made

    def _watch_modules(self, script: ScriptListener) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook

        script.memories += 1
        if script.memories == 1:
            hook = register_module_forward_pre_hook(self._before_forward)
            self._removers.append(hook.remove)

    def _before_forward(self, module: Any, arguments: tuple[Any, ...]) -> None:
        if not _compiling():
            self.briefly(lambda script: script.memory.see(module, arguments))

    def _gymnasium(self, gymnasium: ModuleType) -> None:
        def install() -> None:
            from gymnasium import vector
            from gymnasium.wrappers import OrderEnforcing, TimeLimit

            for kind in (*_below(vector.VectorEnv), TimeLimit, OrderEnforcing):
                self._watch_environment(kind)
            self._patches.replace(
                vector.VectorEnv, "__init_subclass__", functools.partial(self._subclass, vector.VectorEnv)
            )

        self._contained_install(install)

    def _watch_environment(self, kind: type) -> None:
        """Those of `gymnasium.make` are known by what it puts around every one of them."""
        for name, wrap in (("step", self._step), ("reset", self._reset)):
            if name in vars(kind):
                self._patches.replace(kind, name, wrap)

    def _subclass(self, base: type, _: Callable[..., None]) -> Any:
        """Vector environments that are defined or imported later."""

        def begun(kind: type[Any], /, **options: Any) -> None:
            super(base, kind).__init_subclass__(**options)  # type: ignore[arg-type]  # as in a class body
            self._contained_install(lambda: self._watch_environment(kind))

        return classmethod(begun)

    def _step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def stepped(env: Any, *args: Any, **options: Any) -> Any:
            began: list[float] = []
            if self.script is not None and self.script.open:
                self.contained(lambda script: script.between_steps())
            self.briefly(lambda script: began.append(script.environments.enter()))
            try:
                result = step(env, *args, **options)
            except BaseException:
                self.briefly(lambda script: _left(script, began))
                raise
            self.briefly(lambda script: _took(script, env, result, began))
            return result

        return stepped

    def _reset(self, reset: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(reset)
        def began(env: Any, *args: Any, **options: Any) -> Any:
            result = reset(env, *args, **options)
            self.briefly(lambda script: script.environments.reset(env))
            return result

        return began

    def _stable_baselines3(self, module: ModuleType) -> None:
        """Every `learn` of every algorithm prepares its callbacks there, those of sb3-contrib too."""
        self._contained_install(
            lambda: self._model_patches.replace(module.BaseAlgorithm, "_init_callback", self._with_telemetry)
        )

    def _with_telemetry(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(prepare)
        def prepared(model: Any, *args: Any, **options: Any) -> Any:
            callback = prepare(model, *args, **options)
            if self.error is None:
                try:
                    return self._join(model, callback)
                except Exception as error:  # whatever it is, the script goes on
                    self.error = error
            return callback

        return prepared

    def _writer(self, module: ModuleType) -> None:
        def see(add: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(add)
            def added(writer: Any, tag: Any, scalar_value: Any, *args: Any, **options: Any) -> Any:
                self.briefly(lambda script: script.scalars.see(tag, scalar_value))
                return add(writer, tag, scalar_value, *args, **options)

            return added

        self._contained_install(lambda: self._patches.replace(module.SummaryWriter, "add_scalar", see))


def _left(script: ScriptListener, began: list[float]) -> None:
    for moment in began:
        script.environments.leave(moment)


def _took(script: ScriptListener, env: Any, result: Any, began: list[float]) -> None:
    """A step of the script's own, not one that an environment around it takes."""
    outermost = [script.environments.leave(moment) for moment in began]
    if all(outermost) and script.environments.knows(env):
        script.environments.stepped(env, result)


def _listed(parameters: Any) -> tuple[list[Any], Any]:
    """The parameters as a list, and as what the script gave: a generator can be read once."""
    if not isinstance(parameters, Iterable) or hasattr(parameters, "grad_fn"):
        return [parameters], parameters
    listed = list(parameters)
    return listed, (item for item in listed) if isinstance(parameters, GeneratorType) else parameters


def _below(kind: type[Any]) -> Iterable[type[Any]]:
    """All classes that derive from it."""
    for derived in kind.__subclasses__():
        yield derived
        yield from _below(derived)


def _compiling() -> bool:
    """Whether torch traces what calls us: it must see the plain function."""
    import torch

    return torch.compiler.is_compiling()
