"""Read logs by address: a path, or `tensorboard:DIR`, `csv:FILE`, `log:FILE`, `wandb:PATH`, `mlflow:URI?run=ID`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from esper_telemetry.core.backends import SQLITE, check_tracking_uri, client_error, unreachable, wandb_records
from esper_telemetry.core.files import parse_json, read_file
from esper_telemetry.core.messages import printable, printable_values
from esper_telemetry.core.redaction import masked
from esper_telemetry.importers.records import LoggedPoint, LoggedRun, parse_number
from esper_telemetry.importers.text_logs import RESTART_SHARE, monitor_run, read_text, runs_of

RUN_MISSING: Final = "RESOURCE_DOES_NOT_EXIST"
"""Code of MLflow's error."""

KINDS: Final = (
    ("tensorboard", r".*tfevents.*"),
    ("wandb", r"run-.*\.wandb"),
    ("csv", r"progress\.csv(\.gz)?"),
    ("log", r"result\.json(\.gz)?"),
    ("csv", r"progress\.txt(\.gz)?"),
    ("log", r"trainer_state\.json"),
    ("log", r"sf_log\.txt"),
    ("csv", r"(.*\.)?monitor\.csv(\.gz)?"),
    ("log", r"training_status\.json"),
    ("csv", r".*\.(csv|tsv)(\.gz)?"),
    ("log", r".*\.(jsonl|log|out|txt)(\.gz)?"),
)
"""Readers, and the names of the files that a folder is searched for, the most informative first."""

MAX_NAMED_RUNS: Final = 5
LFS_POINTER: Final = b"version https://git-lfs"


def read_source(address: str, run: int | None = None) -> LoggedRun:
    """Return the run at an address.

    Args:
        address: a file, a folder that is searched, or a kind and its argument.
        run: number of the run, from 1, if there are several; the newest by default.

    Raises:
        ValueError: for an unknown kind, an address without a run of that number, and a file that is damaged or not a log.
        FileNotFoundError: for a missing file.
        ModuleNotFoundError: if the backend's package is missing.
    """
    kind, _, rest = address.partition(":")
    if os.path.exists(address):  # noqa: PTH110  # pathlib raises for a path that is too long
        runs = _runs_below(Path(address), KINDS)
    elif kind not in READERS:
        raise ValueError(f"--from takes a file, a folder, {', '.join(f'{name}:...' for name in READERS)}, got {address!r}")
    elif not rest:
        raise ValueError(f"--from {kind}: needs what to read, such as {READERS[kind][1]}")
    else:
        runs = READERS[kind][0](rest)
    if run is not None and not 1 <= run <= len(runs):
        raise ValueError(f"{address} holds {len(runs)} run{'s'[: len(runs) > 1]}, and --run asks for {run}")
    logged, note = runs[-1 if run is None else run - 1], ""
    if len(runs) > 1:
        names = [f"{number}: {each.name}" for number, each in enumerate(runs, 1)]
        shown = ", ".join(names if len(names) <= MAX_NAMED_RUNS else [*names[:2], "...", *names[-2:]])
        note = f"{len(runs)} runs are here; this is {'the newest' if run is None else f'number {run}'}. --run N takes another ({shown})."
    points = {printable(tag): points for tag, points in logged.points.items()}
    notes = tuple(printable(text) for text in (*logged.notes, note) if text)
    config = printable_values(dict(logged.config))
    return logged._replace(name=printable(logged.name), points=points, config=config, notes=notes, address=address)


def _runs_below(path: Path, kinds: Sequence[tuple[str, str]]) -> list[LoggedRun]:
    """Return the runs of the first kind with files in the folder, the oldest first. A run has the files of one folder.

    Raises ValueError if none is found, with the reason.
    """
    files = [path] if path.is_file() else sorted((file for file in path.rglob("*") if not file.is_dir()), key=_natural)
    problems: list[str] = []
    for kind, pattern in kinds:
        folders: dict[Path, list[Path]] = {}
        for file in files:
            if re.fullmatch(pattern, file.name):
                folders.setdefault(file.parent, []).append(file)
        runs: list[LoggedRun] = []
        for folder, own in sorted(folders.items(), key=lambda item: (max(map(_age, item[1])), _natural(item[0]))):
            try:
                runs += _folder_runs(kind, folder, own)
            except (ValueError, FileNotFoundError) as error:
                problems.append(str(error))
        if runs and path.is_dir() and len(kinds) > 1:
            read = [file for own in folders.values() for file in own]
            others = {file.name for file in files for _, other in KINDS[:8] if re.fullmatch(other, file.name)}
            left = sorted(others - {file.name for file in read})
            note = f"Read: {'' if len(read) == 1 else f'{len(read)} files such as '}{read[-1].relative_to(path)}"
            note += f"; also here, and not read: {', '.join(left[:4])}" if left else ""
            runs = [run._replace(notes=(*run.notes, note)) for run in runs]
        if runs:
            return runs
    if path.is_file() and not problems:
        return read_text(path)
    what = "event files of TensorBoard" if len(kinds) == 1 else "logs"
    raise ValueError(problems[0] if problems else f"found no {what} in {path}")


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key that puts run_10 after run_9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _age(file: Path) -> float:
    """Return the time at which a file was begun, or last written, to the minute: files that were copied together have the same time."""
    begun = re.search(r"tfevents\.(\d{9,11})\.", file.name)
    return float(begun[1]) if begun else file.stat().st_mtime // 60


def _folder_runs(kind: str, folder: Path, files: Sequence[Path]) -> list[LoggedRun]:
    """Return the runs in files of one kind in one folder."""
    if strange := next((file for file in files if not file.is_file()), None):
        raise ValueError(f"{strange} is not a regular file")
    if kind == "tensorboard":
        return _event_runs(folder, files)
    if kind == "wandb":
        return [_local_wandb(file) for file in files]
    runs = [run for file in files for run in read_text(file)]
    if len(runs) > 1 and all({"r", "l", "t"} <= run.points.keys() for run in runs):  # one file per environment
        rows = [
            {column: points[place].value for column, points in run.points.items()} for run in runs for place in range(len(run.points["r"]))
        ]
        return [monitor_run(folder.absolute().name, rows)]
    return runs


def read_tensorboard(directory: str) -> list[LoggedRun]:
    """Return the runs in a folder of event files, or in one file, the oldest first."""
    path = Path(directory)
    if not path.exists():
        raise FileNotFoundError(f"{directory} does not exist")
    return _event_runs(path.parent, [path]) if path.is_file() else _runs_below(path, KINDS[:1])


def _event_runs(folder: Path, files: Sequence[Path]) -> list[LoggedRun]:
    """Return the runs in the event files of a folder. A file that begins again with tags of the previous file belongs to another run."""
    runs: list[dict[str, list[LoggedPoint]]] = []
    for file in sorted(files, key=lambda file: (_age(file), _natural(file))):
        points = _scalars(file)
        if not points:
            continue
        shared = points.keys() & runs[-1].keys() if runs else set()
        before = [point.x for tag in shared for point in runs[-1][tag]]
        begin = min((points[tag][0].x for tag in shared), default=math.inf)
        if not runs or (before and begin - min(before) <= RESTART_SHARE * (max(before) - min(before))):
            runs.append(points)
            continue
        for tag, own in points.items():  # a run that was resumed writes some steps again
            runs[-1][tag] = [point for point in runs[-1].get(tag, []) if point.x < own[0].x] + own
    if not runs:
        pointer = any(file.stat().st_size < 1024 and file.read_bytes().startswith(LFS_POINTER) for file in files)
        reason = f"{files[0]} is a pointer of Git LFS: git lfs pull fetches the file"
        raise ValueError(reason if pointer else f"{folder} lacks numbers in its event files")
    name = folder.name or folder.absolute().name
    return [LoggedRun(name if len(runs) == 1 else f"{name} ({number} of {len(runs)})", points) for number, points in enumerate(runs, 1)]


def _scalars(file: Path) -> dict[str, list[LoggedPoint]]:
    """Return the numbers by tag of one event file, which may still grow; none for a file of another kind."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.util.tensor_util import make_ndarray

    points: dict[str, list[LoggedPoint]] = {}
    try:
        for number, data in enumerate(_event_records(file)):
            event = Event.FromString(data)
            if number == 0 and not event.file_version:
                return {}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    points.setdefault(value.tag, []).append(LoggedPoint(event.step, value.simple_value))
                elif value.HasField("tensor") and {dim.size for dim in value.tensor.tensor_shape.dim} <= {1}:
                    with suppress(ValueError, TypeError):  # a damaged tensor; larger ones may ask for any memory
                        array = make_ndarray(value.tensor)
                        if array.size == 1 and array.dtype.kind in "fiu":
                            points.setdefault(value.tag, []).append(LoggedPoint(event.step, float(array.reshape(()))))
    except Exception as error:  # of protocol buffers, which a damaged event is not
        if not points:
            return {}
        raise ValueError(f"{file} is a damaged file of events: {error}") from None
    return points


def _event_records(file: Path) -> Iterator[bytes]:
    """Yield the records of a file: the length in 8 bytes, a checksum in 4, the record, and another checksum."""
    with file.open("rb") as stream:
        while len(header := stream.read(12)) == 12:
            length = int.from_bytes(header[:8], "little")
            if length > MAX_EVENT_BYTES:
                return
            data = stream.read(length + 4)
            if len(data) < length + 4:  # it is being written
                return
            yield data[:length]


MAX_EVENT_BYTES: Final = 1 << 28


def read_wandb(path: str) -> list[LoggedRun]:
    """Return the runs of W&B in a folder or file of this machine, else entity/project/run on the server."""
    local = Path(path)
    if local.exists():
        return [_local_wandb(local)] if local.is_file() else _runs_below(local, KINDS[1:2])
    if path.count("/") not in (1, 2):
        raise ValueError(f"wandb: needs a folder of a run, or entity/project/run, got {path!r}")
    import wandb

    if not wandb.login(prompt=False):  # without a key, the API would ask for one
        raise ValueError("W&B needs a key: run `wandb login`, or set WANDB_API_KEY")
    try:
        run = wandb.Api(timeout=30).run(path)
        rows = [_numbers_of(row) for row in run.scan_history()]
    except Exception as error:  # W&B has many, also from its HTTP client
        if reason := unreachable(error):
            raise ValueError(f"W&B cannot be read: {reason}") from None
        message = str(error).splitlines()[0] if str(error) else repr(error)
        raise ValueError(f"cannot read run {path} from W&B: {message}") from None
    return runs_of(run.name, rows, dict(run.config))


def _local_wandb(file: Path) -> LoggedRun:
    from wandb.proto.wandb_internal_pb2 import Record

    name, config, rows = file.stem, {}, []
    try:
        for data in wandb_records(read_file(file)):
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                rows.append(_numbers_of(_json_items(record.history.item)))
            elif kind == "run":
                name = record.run.display_name or name
                config.update(_json_items(record.run.config.update))
            elif kind == "config":
                config.update(_json_items(record.config.update))
    except Exception as error:  # of protocol buffers, of JSON and of numbers
        raise ValueError(f"{file} is damaged: {error}") from None
    runs = runs_of(name, rows, config)
    if not runs:
        raise ValueError(f"{file} lacks numbers")
    return runs[-1]


def _json_items(items: Iterable[Any]) -> dict[str, Any]:
    values = {}
    for item in items:
        value = parse_json(item.value_json)
        values["/".join(item.nested_key) or item.key] = value.get("value") if isinstance(value, dict) and "value" in value else value
    return values


def _numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row; W&B writes NaN and infinities as words."""
    words = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    cells = {name: words.get(value, value) if isinstance(value, str) else value for name, value in row.items()}
    return {
        name: float(number)
        for name, value in cells.items()
        if isinstance(value, int | float) and (number := parse_number(value)) is not None
    }


def read_mlflow(address: str) -> list[LoggedRun]:
    """Return a run of MLflow: `URI?run=ID`, in the default store if the URI is empty."""
    uri, mark, query = address.rpartition("?run=")
    if not mark or not query:
        raise ValueError(f"mlflow: needs the run, such as {MLFLOW_EXAMPLE}, got mlflow:{address}")
    if uri:
        check_tracking_uri(uri)
    from mlflow import MlflowClient, get_tracking_uri
    from mlflow.exceptions import MlflowException

    uri = uri or get_tracking_uri()
    database, where = Path(uri.removeprefix(SQLITE)), masked(uri)
    if uri.startswith(SQLITE) and not database.is_file():  # MLflow would create one
        raise FileNotFoundError(f"{database} does not exist")
    try:
        client = MlflowClient(tracking_uri=uri)
        run = client.get_run(query)
        history = {key: client.get_metric_history(query, key) for key in run.data.metrics}
    except Exception as error:  # of MLflow, or of the client of a database
        if isinstance(error, MlflowException) and error.error_code == RUN_MISSING:
            raise ValueError(f"run {query} does not exist in MLflow at {where}") from None
        raise ValueError(f"MLflow at {where} cannot be read: {client_error(error)}") from None
    points = {
        key: [LoggedPoint(metric.step, metric.value) for metric in sorted(metrics, key=lambda m: (m.step, m.timestamp))]
        for key, metrics in history.items()
    }
    return [LoggedRun(run.info.run_name or query, points, dict(run.data.params))]


MLFLOW_EXAMPLE: Final = "mlflow:sqlite:///mlflow.db?run=0123456789abcdef"
READERS: Mapping[str, tuple[Callable[[str], list[LoggedRun]], str]] = {
    "tensorboard": (read_tensorboard, "tensorboard:runs/PPO_1"),
    "wandb": (read_wandb, "wandb:entity/project/run"),
    "csv": (read_text, "csv:logs/progress.csv"),
    "log": (read_text, "log:outputs/checkpoint-500/trainer_state.json"),
    "mlflow": (read_mlflow, MLFLOW_EXAMPLE),
}
"""The reader of each kind of address, and an example."""
