"""Sinks by name: `tensorboard:runs/a`, `wandb:project?mode=offline`, or any entry point `name:rest`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeAlias, cast
from urllib.parse import parse_qsl

from esper_telemetry.core.record import Record
from esper_telemetry.core.redaction import masked
from esper_telemetry.core.suggestion import did_you_mean
from esper_telemetry.sinks.protocol import FunctionSink, Sink, logger

SinkLike: TypeAlias = Sink | Callable[[Record], object] | str
"""What `as_sink` takes."""

SinkFactory: TypeAlias = Callable[[str, Mapping[str, str]], Sink]
NAME = re.compile("[a-z0-9_-]+")

GROUP = "esper_telemetry.sinks"

BUNDLED = {
    "console": "esper_telemetry.sinks.console:ConsoleSink",
    "tensorboard": "esper_telemetry.sinks.tensorboard.sink:TensorBoardSink",
    "wandb": "esper_telemetry.sinks.wandb.sink:WandbSink",
    "mlflow": "esper_telemetry.sinks.mlflow.sink:MLflowSink",
    "prometheus": "esper_telemetry.sinks.prometheus:PrometheusSink",
}
"""The sinks of this package, for a checkout that is not installed and so has no entry points."""


_registered: dict[str, SinkFactory] = {}


def register_sink(name: str, factory: SinkFactory) -> None:
    """Makes `name[:rest][?option=value&...]` a sink URI in this process; packages use an entry point instead.

    Args:
        name: in front of the colon; one that is known already is replaced, with a warning.
        factory: gets the rest and the options, and makes the sink; raises ValueError where they make no sense.

    Raises ValueError for a name that no URI can have, TypeError for a factory that cannot be called.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"the name of a sink is made of a-z, 0-9, _ and -, got {name!r}")
    if not callable(factory):
        raise TypeError(f"the factory of sink {name} must be callable, got {factory!r}")
    if name in _registered or name in known_sinks():
        logger.warning("sink %s is registered again: the new one is used from now on", name)
    _registered[name] = factory


def as_sink(thing: object) -> Sink:
    """The thing as a sink: a sink itself, a callable that takes a record, or a sink URI.

    Raises:
        TypeError: for anything else, and for a class where an instance is meant.
        ValueError: for a URI that names no sink or an unknown option.
        ModuleNotFoundError: with the install command, where the sink's package is missing.
    """
    if isinstance(thing, str):
        return sink_from_uri(thing)
    if isinstance(thing, type):
        raise TypeError(f"a sink must be an object, got the class {thing.__name__}: write {thing.__name__}()")
    if isinstance(thing, Sink):
        return thing
    if callable(thing):
        return FunctionSink(thing)
    raise TypeError(f"a sink has open, write and close, or is callable, or is a URI; got {thing!r}")


def as_sinks(things: SinkLike | Iterable[SinkLike] | None) -> list[Sink]:
    """The sinks of a list, or the one that is meant; none for None.

    Raises:
        TypeError, ValueError, ModuleNotFoundError: as `as_sink`, for any of them.
    """
    if things is None:
        return []
    if isinstance(things, str | Sink | Mapping) or callable(things) or not isinstance(things, Iterable):
        return [as_sink(things)]
    return [as_sink(thing) for thing in things]


def sink_from_uri(uri: str) -> Sink:
    """The sink that `name[:rest][?option=value&...]` describes; nothing is opened or created.

    Raises:
        ValueError: for an unknown name or option, with the known ones.
        ModuleNotFoundError: with the install command, where the sink's package is missing.
    """
    address, _, query = uri.partition("?")
    name, _, rest = address.partition(":")
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) < len(pairs):
        twice = next(option for option in options if [name for name, _ in pairs].count(option) > 1)
        raise ValueError(f"option {twice!r} stands more than once in sink {masked(uri)}")
    if name in _registered:
        return as_sink(_registered[name](rest, options))
    return _made(name, _found(name), rest, options)


def known_sinks() -> dict[str, EntryPoint]:
    """Every sink that a URI can name; an installed entry point goes before a bundled one of that name."""
    bundled = {name: EntryPoint(name, target, GROUP) for name, target in BUNDLED.items()}
    return bundled | {entry.name: entry for entry in entry_points(group=GROUP)}


def _found(name: str) -> Any:
    known = known_sinks()
    if name not in known:
        names = sorted({*known, *_registered})
        raise ValueError(f"unknown sink {name!r}; known sinks are {', '.join(names)}{did_you_mean(name, names)}")
    return known[name].load()


def _made(name: str, target: Any, rest: str, options: Mapping[str, str]) -> Sink:
    """A sink from what the entry point holds: a class with `from_uri`, any other sink class, or a function."""
    if hasattr(target, "from_uri"):
        return cast(Sink, target.from_uri(rest, options))
    if options:
        raise ValueError(f"sink {name} has no option {next(iter(options))!r}: it has none")
    if isinstance(target, type):
        return as_sink(target(rest) if rest else target())
    if rest:
        raise ValueError(f"sink {name} is a function and takes nothing after its name, got {rest!r}")
    return as_sink(target)
