"""Facts about W&B and MLflow that sinks and importers share: addresses, requests, files, and errors of an unreachable server."""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Final
from urllib.parse import urlsplit

from esper_telemetry.core.messages import did_you_mean
from esper_telemetry.core.redaction import error_line, masked

UNREACHABLE: Final = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Error numbers of the system for a server that was not reached."""

MAX_CAUSES: Final = 20
"""Causes of an exception that are examined: a chain of causes may be circular."""

SQLITE: Final = "sqlite:///"
SERVERS: Final = ("http", "https")
DATABASES: Final = ("sqlite", "postgresql", "mysql", "mssql")
"""May be followed by `+driver`, as in `postgresql+psycopg2`."""
SCHEMES: Final = (*SERVERS, *DATABASES, "file", "databricks", "databricks-uc", "uc")
"""Schemes of the tracking URIs that MLflow has built in; entry points of the group below add others."""
STORE_GROUP: Final = "mlflow.tracking_store"
PORT_ONLY: Final = re.compile(r"[\w.-]+:\d+(/.*)?")
REQUEST_TIMEOUT_SECONDS: Final = 10
REQUEST_RETRIES: Final = 1

WANDB_BLOCK_BYTES: Final = 32768
WANDB_HEADER_BYTES: Final = 7
WANDB_CHUNK: Final = struct.Struct("<IHB")
"""Checksum, length and kind of a chunk; W&B's files are logs in LevelDB's format with a separate header."""
WHOLE, FIRST, LAST = 1, 2, 4


def unreachable(error: BaseException) -> str:
    """Return the sentence for a server that did not answer, from the causes of a client's exception; empty for any other error."""
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if cause is None:
            break
        if isinstance(cause, OSError) and (cause.errno in UNREACHABLE or isinstance(cause, socket.gaierror)):
            return f"the server does not answer ({cause.strerror})"
        if isinstance(cause, TimeoutError) and str(cause) == "timed out":  # raised by the socket itself
            return "the server does not answer (no answer in time)"
        cause = cause.__cause__ or cause.__context__
    return ""


def client_error(error: BaseException) -> str:
    """Return an exception of a client in one line: in plain words if a server did not answer, else as `error_line`."""
    return unreachable(error) or error_line(error)


def limit_mlflow_requests() -> None:
    """Make MLflow's requests in this process fail after seconds instead of minutes, and switch off MLflow's usage reports."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(REQUEST_TIMEOUT_SECONDS))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(REQUEST_RETRIES))
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


def check_tracking_uri(uri: str) -> None:
    """Raise ValueError for an address that MLflow clients cannot open: an unknown scheme, no host, a wrong port, no database."""
    shown = masked(uri)
    if PORT_ONLY.fullmatch(uri):
        raise ValueError(f"a tracking URI of MLflow must begin with its scheme, got {shown!r}; did you mean http://{shown}?")
    try:
        parts = urlsplit(uri)
        port = parts.port if parts.scheme in SERVERS else None
    except ValueError as error:  # an unclosed bracket, or a port that is not a number or too large
        raise ValueError(f"the tracking URI {shown!r} of MLflow cannot be read: {error}") from None
    scheme = parts.scheme.partition("+")[0]
    is_windows_drive = len(scheme) == 1
    schemes = {*SCHEMES, *(entry.name for entry in entry_points(group=STORE_GROUP))} if scheme not in SCHEMES else SCHEMES
    if scheme and not is_windows_drive and scheme not in schemes:
        near = did_you_mean(scheme, schemes) or f": it knows {', '.join(SCHEMES)}"
        raise ValueError(f"MLflow does not support the scheme {scheme!r} of a tracking URI, got {shown!r}{near}")
    if scheme in SERVERS and (not parts.hostname or port == 0):
        raise ValueError(f"the tracking URI of an MLflow server must be like http://HOST:PORT, got {shown!r}")
    if scheme == "sqlite" and (parts.netloc or not parts.path.strip("/")):
        raise ValueError(f"the tracking URI of an SQLite database must be like {SQLITE}FILE, got {shown!r}")
    if scheme in DATABASES[1:] and not parts.netloc:
        raise ValueError(f"the tracking URI of a database must be like {scheme}://USER@HOST/NAME, got {shown!r}")


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the complete records of a `.wandb` file, up to the first chunk that is cut off or unreadable."""
    position, parts = WANDB_HEADER_BYTES, bytearray()
    while position + WANDB_CHUNK.size <= len(data):
        space = WANDB_BLOCK_BYTES - position % WANDB_BLOCK_BYTES
        if space < WANDB_CHUNK.size:
            position += space
            continue
        _, length, kind = WANDB_CHUNK.unpack_from(data, position)
        position += WANDB_CHUNK.size + length
        if not kind or position > len(data):
            return
        chunk = data[position - length : position]
        if kind in (WHOLE, FIRST):
            parts.clear()
        parts += chunk
        if kind in (WHOLE, LAST):
            yield bytes(parts)
