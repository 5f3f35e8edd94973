"""Sinks by URI: `tensorboard:runs/a`, `wandb:project?mode=offline`, or any entry point `name:rest` of `esper_telemetry.sinks`.

A sink class parses the rest of the URI in `from_uri(rest, options)`, so that its own module holds everything about it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable
from urllib.parse import parse_qsl

from esper_telemetry.core.backends import SQLITE
from esper_telemetry.core.messages import did_you_mean, shown
from esper_telemetry.core.record import Record
from esper_telemetry.core.redaction import masked
from esper_telemetry.sinks.sink_protocol import FunctionSink, Sink, logger

SinkLike: TypeAlias = Sink | Callable[[Record], object] | str
"""Argument of `as_sink`."""

SinkFactory: TypeAlias = Callable[[str, Mapping[str, str]], Sink]
NAME = re.compile("[a-z0-9_-]+")
SCHEME = re.compile("[A-Za-z][A-Za-z0-9+.-]+:")
"""Beginning of an address; a single letter is a drive of Windows."""

GROUP = "esper_telemetry.sinks"

BUNDLED = {
    "console": "esper_telemetry.sinks.console:ConsoleSink",
    "tensorboard": "esper_telemetry.sinks.tensorboard.tensorboard_sink:TensorBoardSink",
    "wandb": "esper_telemetry.sinks.wandb.wandb_sink:WandbSink",
    "mlflow": "esper_telemetry.sinks.mlflow.mlflow_sink:MLflowSink",
    "prometheus": "esper_telemetry.sinks.prometheus:PrometheusSink",
    "trackio": "esper_telemetry.sinks.trackio:TrackioSink",
}
"""The sinks of this package; entry points are missing in a checkout that is not installed."""

_registered: dict[str, SinkFactory] = {}


@runtime_checkable
class SupportsFromUri(Protocol):
    """A sink class that parses the rest of a URI; other classes are called with only the rest."""

    def from_uri(self, rest: str, options: Mapping[str, str]) -> Sink:
        """Return the sink; raises ValueError if the rest or an option is invalid."""


def register_sink(name: str, factory: SinkFactory) -> None:
    """Make `name[:rest][?option=value&...]` a sink URI in this process; packages use an entry point instead.

    Args:
        name: the part before the colon; an existing one is replaced, with a warning.
        factory: makes the sink from the rest and the options; raises ValueError if they are invalid.

    Raises:
        ValueError: for a name that cannot be part of a URI.
        TypeError: for a factory that cannot be called.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"the name of a sink may contain only a-z, 0-9, _ and -, got {name!r}")
    if not callable(factory):
        raise TypeError(f"the factory of sink {name} must be callable, got {factory!r}")
    if name in _registered or name in known_sinks():
        logger.warning("sink %s is registered again: the new one is used from now on", name)
    _registered[name] = factory


def as_sink(thing: object) -> Sink:
    """Return a sink for a sink itself, a callable that takes a record, or a sink URI.

    Raises:
        TypeError: for anything else, including a sink class instead of an instance.
        ValueError: for a URI with an unknown sink or option.
        ModuleNotFoundError: the sink's package is missing; the message has the install command.
    """
    if isinstance(thing, str):
        return sink_from_uri(thing)
    if isinstance(thing, type):
        raise TypeError(f"a sink must be an object, got the class {thing.__name__}: write {thing.__name__}()")
    if isinstance(thing, Sink):
        return thing
    if callable(thing):
        return FunctionSink(thing)
    raise TypeError(f"a sink has open, write and close, or is callable, or is a URI; got {shown(thing)}")


def as_sinks(things: SinkLike | Iterable[SinkLike] | None) -> list[Sink]:
    """Return the sinks of a list, or of one sink without a list; an empty list for None.

    Raises:
        TypeError, ValueError, ModuleNotFoundError: as `as_sink`, for any of them.
    """
    if things is None:
        return []
    is_one = isinstance(things, str | Sink | Mapping) or callable(things) or hasattr(things, "ndim")
    if is_one or not isinstance(things, Iterable):
        return [as_sink(things)]
    return [as_sink(thing) for thing in things]


def sink_from_uri(uri: str) -> Sink:
    """Return the sink that `name[:rest][?option=value&...]` describes; nothing is opened or created.

    Raises:
        ValueError: for an unknown name or option; the message lists the known ones.
        ModuleNotFoundError: the sink's package is missing; the message has the install command.
    """
    if not uri.isprintable():  # clients and files refuse control characters and invalid UTF-8
        raise ValueError(f"a sink URI must not contain unprintable characters, got {masked(uri)!r}")
    address, _, query = uri.partition("?")
    name, _, rest = address.partition(":")
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) < len(pairs):
        twice = next(option for option in options if [name for name, _ in pairs].count(option) > 1)
        raise ValueError(f"option {twice!r} is given more than once in sink {masked(uri)}")
    if name in _registered:
        return as_sink(_registered[name](rest, options))
    sinks = known_sinks()
    if name not in sinks:
        names = sorted({*sinks, *_registered})
        raise ValueError(f"unknown sink {shown(name)}; known sinks are {', '.join(names)}{did_you_mean(name, names)}")
    return _from_target(name, sinks[name].load(), rest, options)


def leads_outside(uri: str, run_dir: Path) -> bool:
    """Return whether the address of a sink may lead out of a run directory: to a server, another database, or any place of a plugin.

    A name without an address, a folder of event files and a project on the user's own server do not.
    """
    name, _, rest = uri.partition("?")[0].partition(":")
    if name not in BUNDLED:
        return bool(rest)
    if rest.startswith(SQLITE):
        return not Path(rest.removeprefix(SQLITE)).resolve().is_relative_to(run_dir.resolve())
    return SCHEME.match(rest) is not None


def known_sinks() -> dict[str, EntryPoint]:
    """Return every sink that a URI can name; an installed entry point overrides a bundled one with the same name."""
    bundled = {name: EntryPoint(name, target, GROUP) for name, target in BUNDLED.items()}
    return bundled | {entry.name: entry for entry in entry_points(group=GROUP)}


def _from_target(name: str, target: Any, rest: str, options: Mapping[str, str]) -> Sink:
    """Return a sink for the target of an entry point: a class with `from_uri`, any other sink class, or a function."""
    if isinstance(target, SupportsFromUri):
        return target.from_uri(rest, options)
    if options:
        raise ValueError(f"sink {name} has no option {next(iter(options))!r}: it takes none")
    if isinstance(target, type):
        return as_sink(target(rest) if rest else target())
    if rest:
        raise ValueError(f"sink {name} is a function and takes nothing after its name, got {rest!r}")
    return as_sink(target)
