"""Measures gradients in a user's own loop, before and after clipping, without changes to the loop.

Gradients are read when backward ends and when the optimizer begins; a change between the two is clipping. No clip function is patched, so
two clip calls and clipping by value are measured as well. Hooks are registered on parameters and on the optimizer, so they also fire for
compiled modules. A hook that waits for all gradients would make `torch.autograd.grad` on watched parameters fail. Therefore the first
gradient of a pass queues a callback for the end of the pass. The callback queues itself a second time, because averaging over ranks ends
there too.

With many tensors the second reading would cost as much as the first, and clip functions mostly multiply all gradients by one factor. The
first step of an update is read whole; at later ones a sample decides whether one factor explains the change. Once a whole reading has
contradicted its sample, all steps are read whole.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer

from esper_telemetry.core.clock import Clock
from esper_telemetry.core.containment import Measurement
from esper_telemetry.core.facts import precision_of
from esper_telemetry.core.rate_schedule import group_rates, rates_by_name
from esper_telemetry.core.tensors import gradient_norms, stop_at_nonfinite, total_norm
from esper_telemetry.events import BackwardEnd, Hooks
from esper_telemetry.metrics.optimizer import LearningRate, group_learning_rates
from esper_telemetry.updates.failure import Candidate, nonfinite_local, of_parameters, user_frames
from esper_telemetry.updates.update import BackwardGradients, Update

logger = logging.getLogger("esper_telemetry")

Members: TypeAlias = nn.Module | Tensor | str | Iterable[nn.Module | Tensor | str]
"""Members of a parameter group: modules, parameters, or names of either."""

GROWTH_TOLERANCE = 1.001
"""Factor above which gradients were larger at the step than after backward; rounding stays below."""

MANY_TENSORS = 64
"""Gradients from which on a sample of them decides whether clipping has multiplied all by one factor."""

SAMPLE = 8
"""Gradients in that sample: those with the largest entries in the mean square, which clipping by value changes first."""

SAME_FACTOR = 1e-5
"""Relative difference of factors up to which they are one, rounded."""

MAX_SCALER_DEPTH = 8
"""Calls around an optimizer's step among which a gradient scaler is searched for."""

BY_HAND = (
    "ranks train a model that is not wrapped in DistributedDataParallel: if you average its gradients by hand, their norms before clipping "
    "are local to this rank; after clipping they are right"
)
UNMEASURED = (
    "the optimizer took a step without a backward pass before it: its gradients are left out (replayed CUDA graphs and gradients "
    "that are set by hand bypass autograd)"
)
SILENT = (
    "no step of the watched optimizer was seen in this update, so its gradients are not measured: a step inside a CUDA graph calls "
    "no hooks, and a gradient scaler skips steps whose gradients overflow"
)
SCALED = "clip_grad_norm_ was given gradients that a GradScaler had scaled: call scaler.unscale_(optimizer) before it"
LARGER = (
    "the gradients at the optimizer's step were larger than after backward: something other than clipping changes them (averaging "
    "over ranks by hand, gradients that are set), so their norms before clipping are not the step's norms"
)


class StepNorms(NamedTuple):
    """One optimizer step: the K parameters with a gradient, their numbers of entries, and the norms [K] before and after clipping;
    `found_inf`, 0-d, is above 0 if a fused optimizer skips the step, None for other optimizers.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    before: Tensor
    after: Tensor
    found_inf: Tensor | None


class GradientTap:
    """Records the gradients of the parameters that one optimizer changes.

    Args:
        model: gives the parameters their names; if it is wrapped or compiled, the inner module's names are used.
        optimizer: whose steps are watched.
        clock: counts the time that this takes.

        prefix: beginning of the names, if another watched model has the same ones.

    Attributes:
        hooks: emit `BackwardEnd` at every step, with the gradients that it uses.
        origin: first tensor of the loop that was not finite when gradients were not. It is None on an accelerator, which would have to be
            awaited.

    Raises:
        ValueError: the optimizer changes no parameter of the model, or its parameters are sharded over ranks.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, clock: AbstractContextManager[None], *, prefix: str = "") -> None:
        self.model, self.prefix = model, prefix
        self.names = {id(parameter): prefix + inner_name(name) for name, parameter in model.named_parameters()}
        self.origin: Candidate | None = None
        self.optimizer = optimizer
        self.hooks = Hooks()
        self._clock = clock
        self._pid = os.getpid()
        self._steps: list[StepNorms] = []
        # Of the last pass: the `id` of each parameter, the norms of their gradients, and the marks of these.
        self._before: tuple[tuple[int, ...], Tensor, list[tuple[int, int]]] | None = None
        self._samples = True  # until a whole reading contradicts its sample
        # Of the last step: the same, their names and their numbers of entries.
        self._described: tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]] = (), (), ()
        self._stepped = self._missed = self._stops = False
        self._warned: set[str] = set()
        mine = [parameter for parameter in self._parameters() if id(parameter) in self.names]
        if not mine:
            raise ValueError("the optimizer changes no parameter of the model: watch the model that it was made for")
        if any(hasattr(parameter, "full_tensor") for parameter in mine):
            raise ValueError("parameters that are sharded over ranks cannot be watched: no rank has a whole gradient")
        self._trained = [parameter for parameter in mine if parameter.requires_grad]
        self._removers: list[Callable[[], None]] = [optimizer.register_step_pre_hook(self._before_step).remove]
        if self._trained:
            self._removers.append(register_multi_grad_hook(self._trained, self._in_backward, mode="any").remove)
        if averaged_by_hand(model) and torch.distributed.get_rank() == 0:
            self.warn(BY_HAND)

    def remove(self) -> None:
        """Remove all hooks."""
        for remove in self._removers:
            remove()
        self._removers = []

    def stop_on_nonfinite(self) -> None:
        """Make backward passes raise at the first gradient that is not finite."""
        if not self._stops:
            self._stops = True
            self._removers.append(stop_at_nonfinite(self.trained()))

    def trained(self) -> dict[str, Tensor]:
        """Return the parameters of the model that the optimizer trains, by name."""
        return {self.names[id(parameter)]: parameter for parameter in self._trained}

    def take(self, *, whole: bool) -> list[StepNorms]:
        """Return the steps since the last call, without skipped ones; `whole` updates have at least one."""
        steps, self._steps = self._steps, []
        if self._missed:
            self.warn(UNMEASURED)
        elif whole and not self._stepped:
            self.warn(SILENT)
        self._stepped = self._missed = False
        if any(step.found_inf is not None for step in steps):  # reading it waits for the device
            steps = [step for step in steps if step.found_inf is None or not float(step.found_inf)]
        if any(step.before.is_cpu and grown(step) for step in steps):
            self.warn(LARGER)
        return steps

    def warn(self, sentence: str) -> None:
        """Log a warning once."""
        if sentence not in self._warned:
            self._warned.add(sentence)
            logger.warning("esper-telemetry: %s", sentence)

    def _in_backward(self, _: Tensor) -> None:
        """Queue a callback for the end of backward, after earlier ones such as the averaging over ranks."""
        if os.getpid() == self._pid:
            marks = [mark(gradient) for p in self._trained if (gradient := p.grad) is not None]
            queue = torch.autograd.Variable._execution_engine.queue_callback  # as torch's wrappers do
            queue(lambda: queue(lambda: self._after_backward(marks)))

    @torch.no_grad()
    def _after_backward(self, marks: list[tuple[int, int]]) -> None:
        now = (mark(gradient) for p in self._trained if (gradient := p.grad) is not None)
        if all(before == after for before, after in zip_longest(marks, now)):  # `torch.autograd.grad` adds to nothing
            return
        with self._clock, self._contained():
            present = self._present()
            norms = norms_of([gradient for _, gradient in present]) if present else torch.empty(0)
            own = tuple([id(parameter) for parameter, _ in present])
            self._before = own, norms, [mark(gradient) for _, gradient in present] if len(own) >= MANY_TENSORS else []
            if norms.is_cpu and self.origin is None and not bool(norms.isfinite().all()):
                self.origin = nonfinite_local([dict(frame.f_locals) for frame in user_frames()])

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if os.getpid() != self._pid:
            return
        self._stepped = True
        before, self._before = self._before, None
        with self._clock, self._contained():
            present = self._present()
            if not present:
                return
            own = tuple([id(parameter) for parameter, _ in present])
            measured, first, marks = before or ((), torch.empty(0), [])
            if own != measured:
                places = {parameter: place for place, parameter in enumerate(measured)}
                if not places.keys() >= set(own):
                    self._missed = True
                    return
                first, marks = first[[places[parameter] for parameter in own]], []
            step = self._norms(own, present, first, marks)
            self._steps.append(step)
            if self.hooks.wants(BackwardEnd):
                names = self._names()
                parameters = {names[id(parameter)]: parameter for parameter in self._parameters()}
                self.hooks.emit(BackwardEnd(0, len(self._steps) - 1, parameters, step.names, step.before, None))

    def _names(self) -> dict[int, str]:
        """Return the names of the optimizer's parameters by `id`; parameters of other models are numbered."""
        return {id(p): self.names.get(id(p), f"parameter_{place}") for place, p in enumerate(self._parameters())}

    def _norms(
        self, own: tuple[int, ...], present: Sequence[tuple[Tensor, Tensor]], first: Tensor, marks: Sequence[tuple[int, int]]
    ) -> StepNorms:
        gradients = [gradient for _, gradient in present]
        scaled = scaled_norms(gradients, first, marks) if self._samples and marks and first.is_cpu else None
        after = scaled if scaled is not None and self._steps else norms_of(gradients)
        if scaled is not None and not torch.allclose(after, scaled, rtol=SAME_FACTOR, atol=0.0):
            self._samples = False
        own_scale = getattr(self.optimizer, "grad_scale", None)  # a fused optimizer divides by it itself
        found_inf = getattr(self.optimizer, "found_inf", None)
        scale = scale_around()
        if isinstance(own_scale, Tensor):
            if after.is_cpu and bool((total_norm(after) * GROWTH_TOLERANCE < total_norm(first)).all()):
                self.warn(SCALED)
            after = after / own_scale.to(after.device)
        if scale is not None:
            first = first / scale.to(first.device)
        if own != self._described[0]:
            named = self._names()
            numels = tuple([parameter.numel() for parameter, _ in present])
            self._described = own, tuple([named[parameter] for parameter in own]), numels
        _, names, numels = self._described
        return StepNorms(names, numels, first, after, found_inf if isinstance(found_inf, Tensor) else None)

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """Contain exceptions; each is logged once."""
        try:
            yield
        except Exception as error:  # training continues after any error
            self.warn(f"gradients of a step could not be measured: {type(error).__name__}: {error}")

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _present(self) -> list[tuple[Tensor, Tensor]]:
        """Return parameters with their gradients, as they are now, dense and real."""
        present = [(p, gradient) for p in self._parameters() if (gradient := p.grad) is not None]
        if {g.layout for _, g in present} == {torch.strided} and not any(d.is_complex for d in {g.dtype for _, g in present}):
            return present
        dense = [(p, g.coalesce().values() if g.layout is torch.sparse_coo else g) for p, g in present]
        return [(p, torch.view_as_real(g) if g.is_complex() else g) for p, g in dense]


def norms_of(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each gradient, [K], on the first one's device; types and devices may differ."""
    together = all(g.is_cpu for g in gradients) or len({g.device for g in gradients}) == 1
    if together and len({g.dtype for g in gradients}) == 1:
        return gradient_norms(gradients)
    device = gradients[0].device
    return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64).to(device) for g in gradients])


def mark(gradient: Tensor) -> tuple[int, int]:
    """Return what changes when the gradient is set, or changed in place."""
    return id(gradient), gradient._version


def scaled_norms(gradients: Sequence[Tensor], first: Tensor, marks: Sequence[tuple[int, int]]) -> Tensor | None:
    """Return the norms [K] times the factor by which a sample of the gradients has changed; None unless one factor explains all.

    Args:
        first: the norms before, [K].
        marks: the marks of the gradients before.
    """
    changes = {
        gradient._version - version if id(gradient) == name else -1 for gradient, (name, version) in zip(gradients, marks, strict=True)
    }
    if len(changes) > 1 or -1 in changes:
        return None
    numels = torch.tensor([gradient.numel() for gradient in gradients], dtype=first.dtype)
    places = (first / numels.sqrt()).topk(SAMPLE).indices
    factors = norms_of([gradients[place] for place in places.tolist()]) / first[places]
    smallest, largest = factors.aminmax()
    return first * largest if bool(largest - smallest <= SAME_FACTOR * largest) else None


def scale_around() -> Tensor | None:
    """Return the scale [0-d] of the gradient scaler that takes the current step; None without a scaler."""
    frame: Any = sys._getframe(1)
    for _ in range(MAX_SCALER_DEPTH):
        frame = frame.f_back
        if frame is None:
            return None
        if frame.f_code.co_name == "step" and frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            scale: Tensor | None = frame.f_locals["self"]._scale
            return scale
    return None


def averaged_by_hand(model: nn.Module) -> bool:
    """Return whether several ranks train a model that is not wrapped for averaging."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    inner = isinstance(getattr(model, "_orig_mod", None), nn.parallel.DistributedDataParallel)
    return torch.distributed.get_world_size() > 1 and not wrapped and not inner


def inner_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def grown(step: StepNorms) -> bool:
    """Return whether the gradients were larger at the step than after backward."""
    return bool(total_norm(step.after.double()) > GROWTH_TOLERANCE * total_norm(step.before.double()))


def group_names(model: nn.Module, members: Members) -> list[str]:
    """Return the names of the members' parameters.

    Raises ValueError for a name or a member that the model does not have.
    """
    named = {inner_name(name): parameter for name, parameter in model.named_parameters()}
    group: dict[str, None] = {}
    for member in [members] if isinstance(members, nn.Module | Tensor | str) else list(members):
        if isinstance(member, str):
            shown = repr(member)
            names = [name for name in named if name == member or name.startswith(f"{member}.")]
        else:
            shown = f"a {type(member).__name__}"
            searched = {id(p) for p in member.parameters()} if isinstance(member, nn.Module) else {id(member)}
            names = [name for name, parameter in named.items() if id(parameter) in searched]
        if not names:
            raise ValueError(f"{shown} is not part of the model, which has {', '.join(named) or 'no parameters'}")
        group.update(dict.fromkeys(names))
    return list(group)


class WatchedModels:
    """Taps, one per optimizer. Steps of optimizers that step equally often are joined.

    Args:
        clock: counts the time that this takes.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._taps: list[GradientTap] = []

    def __bool__(self) -> bool:
        """Return whether anything is watched."""
        return bool(self._taps)

    def add(self, model: nn.Module, optimizer: Optimizer, *, part: str, stop_on_nonfinite: bool) -> GradientTap:
        """Watch a model and its optimizer, and return their tap. The same pair is not watched twice.

        Args:
            part: name of the model, for its parameters' names if another watched model has the same ones.
            stop_on_nonfinite: make backward passes raise at the first gradient that is not finite.

        Raises:
            ValueError: if the optimizer is watched with another model.
        """
        tap = next((tap for tap in self._taps if tap.optimizer is optimizer), None)
        if tap is None:
            own = {inner_name(name) for name, _ in model.named_parameters()}
            used = {name for other in self._taps if other.model is not model for name in other.names.values()}
            tap = GradientTap(model, optimizer, self._clock, prefix="" if own.isdisjoint(used) else f"{part}.")
            self._taps.append(tap)
        elif tap.model is not model:
            raise ValueError("this optimizer is watched already: watch it once, with a module that holds all its parameters")
        if stop_on_nonfinite:
            tap.stop_on_nonfinite()
        return tap

    def remove(self, tap: GradientTap) -> None:
        """Stop watching the optimizer of a tap."""
        tap.remove()
        if tap in self._taps:
            self._taps.remove(tap)

    def stop(self) -> None:
        """Watch nothing any more."""
        for tap in list(self._taps):
            self.remove(tap)

    def take(self, *, whole: bool) -> Update:
        """Return the gradients of all steps since the last call: a `whole` update, or its steps so far."""
        origin = next((tap.origin.words for tap in self._taps if tap.origin is not None), "")
        return Update(gradients=tuple(stacked([tap.take(whole=whole) for tap in self._taps])), origin=origin)

    @property
    def precision(self) -> str | None:
        """Precision of the first parameter's type, as the fact of that name; None if nothing is watched."""
        types = (parameter.dtype for tap in self._taps for parameter in tap.trained().values())
        return precision_of(next(types, None))

    def nonfinite_candidates(self) -> Iterator[Candidate]:
        """Yield what was not finite first, then the parameters that optimizers train, as they are, then their gradients."""
        yield from (tap.origin for tap in self._taps if tap.origin is not None)
        yield from of_parameters([item for tap in self._taps for item in tap.trained().items()])

    def rates(self, groups: Mapping[str, Sequence[str]]) -> list[Measurement]:
        """Return the measurements of the first optimizer's learning rate, and of all rates if they differ; `groups` name them."""
        rates = [rate for tap in self._taps for rate in group_rates(tap.optimizer)]
        parameters = {name: parameter for tap in self._taps for name, parameter in tap.trained().items()}
        named = rates_by_name(rates, parameters, lambda: groups)
        measurements: list[Measurement] = [partial(LearningRate, lr=one.rate) for one in rates[:1]]
        return [*measurements, *([partial(group_learning_rates, named)] if named else [])]


def stacked(taps: Iterable[Sequence[StepNorms]]) -> list[BackwardGradients]:
    """Return steps grouped by the parameters with gradients. Steps of several optimizers that step equally often are joined."""
    parts = [steps for steps in taps if steps]
    if len({len(steps) for steps in parts}) == 1:
        parts = [[joined(at_once) for at_once in zip(*parts, strict=True)]]
    groups: dict[tuple[str, ...], list[StepNorms]] = {}
    for step in (step for steps in parts for step in steps):
        groups.setdefault(step.names, []).append(step)
    return [
        BackwardGradients(
            epochs=(0,) * len(steps),
            names=names,
            numels=steps[0].numels,
            norms=torch.stack([step.before.double() for step in steps]),
            max_norm=None,
            applied=torch.stack([step.after.double() for step in steps]),
        )
        for names, steps in groups.items()
    ]


def joined(steps: Sequence[StepNorms]) -> StepNorms:
    """Return steps of several optimizers as one."""
    device = steps[0].before.device
    return StepNorms(
        names=tuple(name for step in steps for name in step.names),
        numels=tuple(count for step in steps for count in step.numels),
        before=torch.cat([step.before.double().to(device) for step in steps]),
        after=torch.cat([step.after.double().to(device) for step in steps]),
        found_inf=None,
    )
