"""Read logs by address: `tensorboard:DIR`, `csv:FILE`, `log:FILE`, `wandb:PATH`, `mlflow:URI?run=ID`."""

from __future__ import annotations

import ast
import codecs
import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from esper_telemetry.core.backends import SQLITE, check_tracking_uri, client_error, unreachable, wandb_records
from esper_telemetry.core.files import MAX_JSON_FILE_BYTES, parse_json, read_file
from esper_telemetry.core.redaction import masked
from esper_telemetry.core.terminal import printable, printable_values
from esper_telemetry.importers.records import LoggedPoint, LoggedRun, parse_number

RUN_MISSING: Final = "RESOURCE_DOES_NOT_EXIST"
"""Code of MLflow's error."""

X_NAMES: Final = (
    "time/total_timesteps",
    "num_env_steps_sampled_lifetime",
    "global_step",
    "agent_steps",
    "frame",
    "env_step",
    "train/global_step",
    "training/global_step",
    "timesteps_total",
    "training_iteration",
    "_step",
    "step",
)
"""Columns that hold the position of a row, the best first."""


def read_source(address: str) -> LoggedRun:
    """Return the run at an address.

    Raises:
        ValueError: for an unknown kind, an address that holds several runs or none, and a file that is damaged or not a log.
        FileNotFoundError: for a missing file.
        ModuleNotFoundError: if the backend's package is missing.
    """
    kind, _, rest = address.partition(":")
    if kind not in READERS:
        raise ValueError(f"--from takes {', '.join(f'{name}:...' for name in READERS)}, got {address!r}")
    if not rest:
        raise ValueError(f"--from {kind}: needs what to read, such as {EXAMPLES[kind]}")
    logged = READERS[kind](rest)
    points = {printable(tag): points for tag, points in logged.points.items()}
    return LoggedRun(printable(logged.name), points, printable_values(dict(logged.config)))


def read_tensorboard(directory: str) -> LoggedRun:
    """Return the run in a directory of event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    path = Path(directory)
    if not path.exists():
        raise FileNotFoundError(f"there is no {directory}")
    run = one_run(path)
    accumulator = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0})
    try:
        accumulator.Reload()
    except Exception as error:  # of protocol buffers, which a damaged event is not
        raise ValueError(f"{run} holds a damaged file of events: {error}") from None
    tags = accumulator.Tags()
    points = {
        tag: [LoggedPoint(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags["scalars"]
    }
    for tag in tags["tensors"]:
        events = accumulator.Tensors(tag)
        if any(dim.size != 1 for event in events for dim in event.tensor_proto.tensor_shape.dim):
            continue  # its shape may ask for any amount of memory
        try:
            numbers = [(event.step, make_ndarray(event.tensor_proto)) for event in events]
        except (ValueError, TypeError):  # a damaged tensor
            continue
        if all(number.size == 1 and number.dtype.kind in "fiu" for _, number in numbers):
            points[tag] = [LoggedPoint(step, float(number.reshape(()))) for step, number in numbers]
    return LoggedRun(run.name or str(run.absolute()), points)


def one_run(path: Path) -> Path:
    """Return the directory below `path` that has event files; a file of events is a run itself.

    Raises ValueError for several directories, with their names, for none, and if one of the files is a FIFO or a device.
    """
    if path.is_file():
        return path
    files = [file for file in path.rglob("*tfevents*") if not file.is_dir()]
    if strange := next((file for file in files if not file.is_file()), None):
        raise ValueError(f"{strange} is not a regular file")
    found = {file.parent for file in files}
    runs = sorted(run for run in found if found.isdisjoint(run.parents))  # settings stand in a folder below a run
    if not runs:
        raise ValueError(f"{path} holds no event files of TensorBoard")
    if len(runs) > 1 and path not in runs:
        names = ", ".join(str(run) for run in runs[:5])
        raise ValueError(f"{path} holds {len(runs)} runs: name one of {names}{' and others' if len(runs) > 5 else ''}")
    return path if path in runs else runs[0]


def read_csv(file: str) -> LoggedRun:
    """Return the run in a table with a row per update, such as SB3's and RLlib's `progress.csv`."""
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    try:
        with _opened(path, newline="") as text:
            table = [
                {name: number for name, cell in row.items() if name and (number := parse_number(cell)) is not None}
                for row in csv.DictReader(text)
            ]
    except csv.Error as error:
        raise ValueError(f"{file} is not a table: {error}") from None
    if not table:
        raise ValueError(f"{file} has no rows")
    return LoggedRun(path.stem if path.stem != "progress" else path.absolute().parent.name, points_of(table))


def read_log(file: str) -> LoggedRun:
    """Return the run in a text: JSON lines, `trainer_state.json` of transformers, or what a trainer printed.

    Of printed lines, those of transformers (`{'loss': 0.1, ...}`), verl (`step:1 - actor/ppo_kl:0.1 - ...`), OpenRLHF
    (`Global step 1: {'ppo_kl': 0.1, ...}`) and NeMo-RL (`=== Step 1/9 ===`, and below it `• Loss: 0.1`; `step_metrics={...}`) are read,
    and all others are passed over. The metrics of verl's JSON lines stand under `data`.
    """
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    with suppress(ValueError, OSError):  # lines, or a long file
        whole = parse_json(read_file(path, MAX_JSON_FILE_BYTES).removeprefix(codecs.BOM_UTF8))
        if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
            return _logged_rows(path, whole["log_history"])
    with _opened(path) as text:
        return _logged_rows(path, _printed_rows(_lines(text)))


def _opened(path: Path, newline: str | None = None) -> TextIO:
    """Open a text in UTF-8, or in UTF-16 if it begins with that mark: spreadsheets and PowerShell write marks and UTF-16."""
    with path.open("rb") as file:
        is_wide = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return path.open(newline=newline, encoding="utf-16" if is_wide else "utf-8-sig", errors="replace")


def _lines(text: TextIO) -> Iterator[str]:
    """Yield the lines; a line that is too long for a row of metrics is empty."""
    is_whole = True
    while line := text.readline(MAX_LOG_LINE_CHARACTERS):
        was_whole, is_whole = is_whole, line.endswith("\n")
        yield line.rstrip("\n") if was_whole and (is_whole or len(line) < MAX_LOG_LINE_CHARACTERS) else ""


def _logged_rows(file: Path, found: Iterable[object]) -> LoggedRun:
    """Return the run of rows of metrics; raises ValueError without any."""
    rows = [numbers for row in found if isinstance(row, dict) and (numbers := _flat_numbers(row))]
    if not rows:
        raise ValueError(
            f"{file} has no line with metrics: JSON lines, {{'loss': 0.1, ...}}, step:1 - tag:0.1 and what OpenRLHF and NeMo-RL print "
            "are read"
        )
    return LoggedRun(file.stem if file.stem not in UNNAMED_LOGS else file.absolute().parent.name, points_of(rows))


MAX_LOG_LINE_CHARACTERS: Final = 1 << 20

UNNAMED_LOGS: Final = {"trainer_state", "console", "output", "log", "train"}
"""Names of files that say nothing of the run: it has the name of their folder."""

NEMO_RL_EPOCH: Final = re.compile(r"={5,} Epoch (\d{1,15})/\d+ ={5,}")
NEMO_RL_STEP: Final = re.compile(r"={5,} Step (\d{1,15})/\d+ ={5,}")
NEMO_RL_METRIC: Final = re.compile(r"• ([A-Z][\w ()-]+): (-?(?:[\d.]+(?:e[+-]?\d+)?|nan|inf))(?![\w.])")
NEMO_RL_TAGS: Final = {
    "Avg Total Reward": "reward",
    "Avg Reward": "reward",
    "Generation KL Error": "gen_kl_error",
    "Mean Generation Length": "mean_gen_tokens_per_sample",
    "Policy Loss": "loss",
    "Critic Loss": "critic/loss",
    "Critic Grad Norm": "critic/grad_norm",
    "Critic LR": "critic/lr",
    "Critic Clip Frac": "critic/vf_clipfrac",
    "Avg Trajectory Age (gen-version)": "avg_trajectory_age",
}
"""Tags of NeMo-RL's backends by the names that it prints; all others are in lower case with underscores."""


@dataclass(slots=True)
class _StepCounter:
    """Numbers of NeMo-RL's steps, which begin again with each epoch, and with another job that writes into the same file."""

    before: int = 0
    last: int = 0
    epoch: int = 0

    def begin_epoch(self, epoch: int) -> None:
        if epoch > self.epoch:
            self.before, self.last = self.before + self.last, 0
        self.epoch = epoch

    def step(self, number: int) -> int:
        if number == 1 < self.last:  # another job; one that goes on after a checkpoint has later numbers
            self.before += self.last
        self.last = number
        return self.before + number


def _printed_rows(lines: Iterable[str]) -> Iterator[object]:
    """Yield what a trainer printed of each step, in a row or, as NeMo-RL does, in several."""
    step: dict[str, object] = {}
    counter = _StepCounter()
    for line in lines:
        if epoch := NEMO_RL_EPOCH.search(line):
            counter.begin_epoch(int(epoch[1]))
        elif header := NEMO_RL_STEP.search(line):
            if len(step) > 1:
                yield step
            step = {"step": counter.step(int(header[1]))}
        elif step and (metric := NEMO_RL_METRIC.search(line)):
            name = NEMO_RL_TAGS.get(metric[1], metric[1].lower().replace(" ", "_"))
            step[f"train/{name}"] = metric[2]
        else:
            yield _printed_row(line)
    if len(step) > 1:
        yield step


def _printed_row(line: str) -> object:
    """Return what a line says of a step; None for a line that is no row of metrics."""
    line = WRAPPED.sub(r"\1", line)
    if step := re.search(r"\bstep:(\d+) - (\S.*)", line):
        cells = (cell.rpartition(":") for cell in step[2].split(" - "))
        return {"step": step[1]} | {name.strip(): value for name, _, value in cells}
    braces = re.search(r"\{.*\}", line)
    if braces is None:
        return None
    row = None
    text = NOT_FINITE.sub(r"'\1'", braces[0])
    for parse, content in ((parse_json, braces[0]), (ast.literal_eval, text)):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # braces of other programs
            row = parse(content)
            break
    if isinstance(row, dict) and (step := PREFIXED_ROW.search(line[: braces.start()])):
        return ({"step": step[1]} if step[1] else {}) | {f"train/{name}": value for name, value in row.items()}
    return row


PREFIXED_ROW: Final = re.compile(r"(?:\bGlobal step (\d+): |\bstep_metrics=)$")
"""What OpenRLHF and NeMo-RL print before metrics whose tags have the prefix `train/` in their backends."""

WRAPPED: Final = re.compile(r"\b(?:np\.\w+|tensor)\(([^(),]*)(?:, [^()]*)?\)")
"""Numbers as NumPy and torch print them."""

NOT_FINITE: Final = re.compile(r"(?<=[:,\[(] )(-?(?:nan|inf))(?=[,}\])])")
"""Numbers in a printed dictionary that are no literals of Python."""


def _flat_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row. verl puts them under `data`, and writes those that are not finite as null."""
    data = row.get("data")
    cells = (
        {**row, **{name: math.nan if cell is None else cell for name, cell in data.items()}}
        if isinstance(data, dict)
        else row
    )
    return {str(name): number for name, cell in cells.items() if (number := parse_number(cell)) is not None}


def points_of(rows: Iterable[Mapping[str, float]]) -> dict[str, list[LoggedPoint]]:
    """Return the points of each column, at the position that the row holds, else at the row's number.

    Several rows may have one position: W&B has a row per call.
    """
    rows = list(rows)
    axis = next((name for name in X_NAMES if any(name in row for row in rows)), None)
    points: dict[str, list[LoggedPoint]] = {}
    x = 0.0
    for place, row in enumerate(rows):
        x = float(place) if axis is None else row.get(axis, x)
        for name, value in row.items():
            if name != axis:
                points.setdefault(name, []).append(LoggedPoint(x, value))
    return points


def read_wandb(path: str) -> LoggedRun:
    """Return a run of W&B: a folder or file of this machine, else entity/project/run on the server."""
    local = Path(path)
    if local.exists():
        return _local_wandb(local)
    if path.count("/") not in (1, 2):
        raise ValueError(f"wandb: needs a folder of a run, or entity/project/run, got {path!r}")
    import wandb

    if not wandb.login(prompt=False):  # without a key, the API would ask for one
        raise ValueError("W&B has no key here: wandb login, or set WANDB_API_KEY")
    try:
        run = wandb.Api(timeout=30).run(path)
        rows = [_numbers_of(row) for row in run.scan_history()]
    except Exception as error:  # W&B has many, down to those of its HTTP client
        if reason := unreachable(error):
            raise ValueError(f"W&B cannot be read: {reason}") from None
        message = str(error).splitlines()[0] if str(error) else repr(error)
        raise ValueError(f"W&B has no run {path} to read: {message}") from None
    return LoggedRun(run.name, points_of(rows), dict(run.config))


def _local_wandb(path: Path) -> LoggedRun:
    from wandb.proto.wandb_internal_pb2 import Record

    files = [path] if path.is_file() else sorted(file for file in path.rglob("run-*.wandb") if file.is_file())
    if len(files) != 1:
        raise ValueError(f"{path} holds {len(files) or 'no'} runs of W&B{': name one of them' if files else ''}")
    name, config, rows = files[0].stem, {}, []
    try:
        for data in wandb_records(read_file(files[0])):
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
        raise ValueError(f"{files[0]} is damaged: {error}") from None
    return LoggedRun(name, points_of(rows), config)


def _json_items(items: Iterable[Any]) -> dict[str, Any]:
    values = {}
    for item in items:
        value = parse_json(item.value_json)
        values["/".join(item.nested_key) or item.key] = (
            value.get("value") if isinstance(value, dict) and "value" in value else value
        )
    return values


def _numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row; W&B writes those that are not finite as words."""
    words = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    cells = {name: words.get(value, value) if isinstance(value, str) else value for name, value in row.items()}
    return {
        name: float(number)
        for name, value in cells.items()
        if isinstance(value, int | float) and (number := parse_number(value)) is not None
    }


def read_mlflow(address: str) -> LoggedRun:
    """Return a run of MLflow: `URI?run=ID`, in the default store where the URI is empty."""
    uri, mark, query = address.rpartition("?run=")
    if not mark or not query:
        raise ValueError(f"mlflow: needs the run, such as {EXAMPLES['mlflow']}, got mlflow:{address}")
    if uri:
        check_tracking_uri(uri)
    from mlflow import MlflowClient, get_tracking_uri
    from mlflow.exceptions import MlflowException

    uri = uri or get_tracking_uri()
    database, where = Path(uri.removeprefix(SQLITE)), masked(uri)
    if uri.startswith(SQLITE) and not database.is_file():  # MLflow would create one
        raise FileNotFoundError(f"there is no {database}")
    try:
        client = MlflowClient(tracking_uri=uri)
        run = client.get_run(query)
        history = {key: client.get_metric_history(query, key) for key in run.data.metrics}
    except Exception as error:  # of MLflow, or of the client of a database
        if isinstance(error, MlflowException) and error.error_code == RUN_MISSING:
            raise ValueError(f"MLflow at {where} has no run {query} to read") from None
        raise ValueError(f"MLflow at {where} cannot be read: {client_error(error)}") from None
    points = {
        key: [LoggedPoint(metric.step, metric.value) for metric in sorted(metrics, key=lambda m: (m.step, m.timestamp))]
        for key, metrics in history.items()
    }
    return LoggedRun(run.info.run_name or query, points, dict(run.data.params))


READERS: Mapping[str, Callable[[str], LoggedRun]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "csv": read_csv,
    "log": read_log,
    "mlflow": read_mlflow,
}

EXAMPLES = {
    "tensorboard": "tensorboard:runs/PPO_1",
    "wandb": "wandb:entity/project/run",
    "csv": "csv:logs/progress.csv",
    "log": "log:outputs/checkpoint-500/trainer_state.json",
    "mlflow": "mlflow:sqlite:///mlflow.db?run=0123456789abcdef",
}
"""An address of each kind."""
