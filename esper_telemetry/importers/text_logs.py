"""Runs in text: tables, JSON, and printed output of trainers, compressed or not."""

from __future__ import annotations

import ast
import codecs
import csv
import gzip
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from esper_telemetry.core.files import MAX_JSON_FILE_BYTES, parse_json, read_file
from esper_telemetry.importers.records import LoggedPoint, LoggedRun, parse_number
from esper_telemetry.importers.trainers import AXES

MAX_LOG_LINE_CHARACTERS: Final = 1 << 20
MAX_TEXT_CHARACTERS: Final = 1 << 29
"""Of one file; a compressed one may hold any amount."""
TABLES: Final = {".csv", ".tsv"}
UNNAMED_LOGS: Final = {"progress", "result", "monitor", "trainer_state", "console", "output", "log", "sf_log", "train"}
"""Names of files that do not identify the run, which then has the name of their folder."""
RESTART_SHARE: Final = 0.05
"""Share of a run's range below which a falling position starts another run."""

COUNTER: Final = r"(?:.*/)?(?:epochs?|iterations?|updates?|episodes?)"
"""Columns that keep counting if the position restarts with each epoch."""

Row = Mapping[str, float]


def read_text(file: str | Path) -> list[LoggedRun]:
    """Return the runs in a table, in JSON, or in a trainer's printed output, in their order.

    JSON is a row per line, a list of rows, lists by column, `trainer_state.json` of transformers or `training_status.json` of ML-Agents.
    Printed lines without metrics are ignored (`_printed_rows`).

    Raises:
        FileNotFoundError: for a missing file.
        ValueError: for a file without metrics, or a damaged table.
    """
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"{file} is not a file")
    name = path.name.partition(".")[0]
    name = path.absolute().parent.name if name in UNNAMED_LOGS or name.isdigit() else path.name.removesuffix(path.suffix)
    if runs := _json_runs(path, name):
        return runs
    with _opened(path) as text:
        lines = _lines(text)
        head = list(islice(filter(None, map(str.strip, lines)), 3))
    with _opened(path) as text:
        if path.suffix in TABLES or _is_table(head):
            return _table_runs(path, name, _lines(text))
        config: dict[str, Any] = {}
        rows = [numbers for row in _printed_rows(_lines(text)) if isinstance(row, dict) and (numbers := flat_numbers(row, config))]
    if not rows:
        raise ValueError(
            f"found no line with metrics in {path}: tables, JSON lines, {{'loss': 0.1, ...}}, step:1 - tag:0.1, the tables of "
            "Stable-Baselines3 and what Sample Factory, RSL-RL, OpenRLHF and NeMo-RL print are read"
        )
    return runs_of(name, rows, config)


def _opened(path: Path) -> TextIO:
    """Open a text in UTF-8, or in UTF-16 if it begins with that mark: spreadsheets and PowerShell write marks and UTF-16."""
    with path.open("rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
    binary = gzip.open(path) if is_compressed else path.open("rb")  # noqa: SIM115  # the caller closes it
    with suppress(OSError, EOFError):  # damaged; the first line raises
        is_wide = binary.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        binary.seek(0)
    return io.TextIOWrapper(binary, encoding="utf-16" if is_wide else "utf-8-sig", errors="replace")


def _lines(text: TextIO) -> Iterator[str]:
    """Yield the lines; a line that is too long for a row of metrics is empty. Raises ValueError for a file that is damaged or too long."""
    is_whole, characters = True, 0
    try:
        while line := text.readline(MAX_LOG_LINE_CHARACTERS):
            characters += len(line)
            if characters > MAX_TEXT_CHARACTERS:
                raise ValueError(f"{text.name} holds more than {MAX_TEXT_CHARACTERS >> 20:,} million characters")
            was_whole, is_whole = is_whole, line.endswith("\n")
            yield line.rstrip("\n") if was_whole and (is_whole or len(line) < MAX_LOG_LINE_CHARACTERS) else ""
    except (OSError, EOFError) as error:
        raise ValueError(f"{text.name} is damaged: {error}") from None


def _json_runs(path: Path, name: str) -> list[LoggedRun]:
    """Return the runs of a file that is JSON as a whole; none for lines and for a long file."""
    with suppress(ValueError, OSError, RecursionError):
        whole = parse_json(read_file(path, MAX_JSON_FILE_BYTES).removeprefix(codecs.BOM_UTF8))
        if not isinstance(whole, dict):
            rows = whole if isinstance(whole, list) else []
        elif isinstance(whole.get("log_history"), list):
            rows = whole["log_history"]
        elif columns := {column: values for column, values in whole.items() if isinstance(values, list) and len(values) > 1}:
            longest = max(map(len, columns.values()))
            rows = [{column: cells[place] for column, cells in columns.items() if place < len(cells)} for place in range(longest)]
        else:
            statuses = {
                behaviour: [
                    {"step": saved.get("steps"), "Environment/Cumulative Reward": saved.get("reward")}
                    for saved in status["checkpoints"]
                    if isinstance(saved, dict)
                ]
                for behaviour, status in whole.items()
                if isinstance(status, dict) and isinstance(status.get("checkpoints"), list)
            }
            return [run for behaviour, saved in statuses.items() for run in runs_of(behaviour, map(flat_numbers, saved))]
        config: dict[str, Any] = {}
        return runs_of(name, [flat_numbers(row, config) for row in rows if isinstance(row, dict)], config)
    return []


def flat_numbers(row: Mapping[str, Any], config: dict[str, Any] | None = None) -> dict[str, float]:
    """Return the numbers of a row, and of its groups under `group/name`; settings of the row's `config` join `config`.

    verl puts numbers under `data`, and writes NaN as null.
    """
    numbers: dict[str, float] = {}
    for name, cell in row.items():
        if isinstance(cell, dict):
            if name == "config":
                if config is not None:
                    config.update(cell)
            elif name == "data":
                numbers |= flat_numbers({tag: math.nan if value is None else value for tag, value in cell.items()})
            else:
                numbers |= {f"{name}/{tag}": number for tag, number in flat_numbers(cell).items()}
        elif (number := parse_number(cell)) is not None:
            numbers[str(name)] = number
    return numbers


def _delimiter(header: str) -> str:
    return max("\t,;", key=header.count)


def _is_table(head: Sequence[str]) -> bool:
    """Return whether the first lines are names and numbers of a table; they may follow a comment."""
    lines = [line for line in head if not line.startswith("#")][:2]
    if len(lines) < 2 or lines[0][0] in "{[":
        return False
    names, cells = (next(csv.reader([line], delimiter=_delimiter(lines[0]))) for line in lines)
    filled = [cell for cell in cells if cell.strip()]
    return 1 < len(names) == len(cells) and 2 * sum(parse_number(cell) is not None for cell in filled) >= len(filled) > 0


def _table_runs(path: Path, name: str, lines: Iterator[str]) -> list[LoggedRun]:
    """Return the runs in a table with names above its columns; columns without names have their numbers.

    Cells may hold dictionaries, as in old tables of RLlib; the panels of W&B export a column per run, and TensorBoard's pages one tag.
    """
    lines = (line for line in lines if line and not line.startswith("#"))
    header = next(lines, "")
    delimiter = _delimiter(header)
    config: dict[str, Any] = {}
    rows: list[dict[str, float]] = []
    try:
        names = [cell.strip() for cell in next(csv.reader([header], delimiter=delimiter), [])]
        if names and all(parse_number(cell) is not None for cell in names):
            lines, names = chain([header], lines), [str(place) for place, _ in enumerate(names, 1)]
        for cells in csv.reader(lines, delimiter=delimiter):
            row: dict[str, float] = {}
            for column, cell in zip(names, cells, strict=False):
                if cell[:1] == "{" and (column != "config" or not config):
                    with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                        row |= flat_numbers({column: ast.literal_eval(NOT_FINITE.sub(r"'\1'", cell))}, config)
                elif column and (number := parse_number(cell)) is not None:
                    row[column] = number
            rows.append(row)
    except csv.Error as error:
        raise ValueError(f"{path} is not a table: {error}") from None
    if not any(rows):
        raise ValueError(f"found no rows in {path}")
    if names[:3] == ["r", "l", "t"]:
        return [monitor_run(name, rows)]
    if names == ["Wall time", "Step", "Value"]:
        return runs_of(name, [{"step": row["Step"], name: row["Value"]} for row in rows if len(row) == 3])
    panels = {match for column in names if (match := re.fullmatch(r"(.+) - (.+?)", column))}
    if panels and len(panels) >= len(names) - 1:
        tags = {match[0]: (match[1], match[2]) for match in panels if not re.search(r"__(MIN|MAX)$|^_step$", match[2])}
        by_run: dict[str, list[dict[str, float]]] = {}
        for row in rows:
            axis = {column: value for column, value in row.items() if column not in tags and " - " not in column}
            for column, (run, tag) in tags.items():
                if column in row:
                    by_run.setdefault(run, []).append({**axis, tag: row[column]})
        return [run for title, own in by_run.items() for run in runs_of(title, own)]
    return runs_of(name, rows, config)


def monitor_run(name: str, rows: Iterable[Mapping[str, float]]) -> LoggedRun:
    """Return the run of episodes that a Monitor wrapper wrote; several environments are ordered by time."""
    steps = 0.0
    points: dict[str, list[LoggedPoint]] = {"r": [], "l": [], "t": []}
    for row in sorted((row for row in rows if {"r", "l", "t"} <= set(row)), key=lambda row: row["t"]):
        steps += row["l"]
        for column, values in points.items():
            values.append(LoggedPoint(steps, row[column]))
    return LoggedRun(name, points, x="environment steps")


def runs_of(name: str, rows: Iterable[Row], config: Mapping[str, Any] | None = None) -> list[LoggedRun]:
    """Return the runs in consecutive rows. The position falls to the beginning when another run begins.

    Rows of one run are sorted by position: W&B has a row per call, and exports them in any order. Without a column that holds a position
    it is the row's number.
    """
    rows = [row for row in rows if row]
    ticks = {name: {row[name] for row in rows if name in row} for name in AXES}
    whole = [name for name, values in ticks.items() if values and all(float(value).is_integer() for value in values)]
    axis = next((name for name in whole if len(ticks[name]) > 1), whole[0] if whole else None)
    if axis is None:
        return [LoggedRun(name, points_of(rows, None), config or {}, x="rows")] if rows else []
    positions: list[float] = []
    for row in rows:
        positions.append(row.get(axis, positions[-1] if positions else 0.0))
    starts = [0]
    for place, (one, other) in enumerate(pairwise(positions), 1):
        if other < one:
            before = positions[starts[-1] : place]
            if other - min(before) <= RESTART_SHARE * (max(before) - min(before)):
                starts.append(place)
    if len(starts) > 1 and _counts_on(rows, axis):  # a position within each epoch
        return [LoggedRun(name, points_of(rows, None), config or {}, x="rows")]
    runs = []
    for number, (begin, end) in enumerate(zip(starts, [*starts[1:], len(rows)], strict=True), 1):
        order = sorted(range(begin, end), key=positions.__getitem__)
        title = name if len(starts) == 1 else f"{name} ({number} of {len(starts)})"
        points = points_of([rows[place] for place in order], axis, [positions[place] for place in order])
        runs.append(LoggedRun(title, points, config or {}, x=AXES[axis], axis=axis))
    return runs


def _counts_on(rows: Sequence[Row], axis: str) -> bool:
    """Return whether another counter rises over all rows."""
    counters = [name for name in rows[0] if name != axis and re.fullmatch(COUNTER, name, re.IGNORECASE)]
    return any(
        all(name in row for row in rows)
        and rows[0][name] < rows[-1][name]
        and all(one[name] <= other[name] for one, other in pairwise(rows))
        for name in counters
    )


def points_of(rows: Iterable[Row], axis: str | None, positions: Iterable[float] | None = None) -> dict[str, list[LoggedPoint]]:
    """Return the points of each column but the axis, at the positions of the rows, or at their numbers."""
    rows = list(rows)
    points: dict[str, list[LoggedPoint]] = {}
    for x, row in zip(range(1, len(rows) + 1) if positions is None else positions, rows, strict=True):
        for name, value in row.items():
            if name != axis:
                points.setdefault(name, []).append(LoggedPoint(float(x), value))
    return points


class StepBlock(NamedTuple):
    """Lines that a trainer prints for one step: a heading, then one line per metric.

    Attributes:
        heading: pattern of the heading. Its first group is the step's number.
        metric: pattern of a metric's line. Its groups are name and value.
        tags: maps printed names to the tags that the trainer sends to its backends. Names that map to None are left out.
        prefix: prefix of tags whose names are in lower case with underscores.
    """

    heading: re.Pattern[str]
    metric: re.Pattern[str]
    tags: Mapping[str, str]
    prefix: str | None = None


_NUMBER = r"(-?(?:[\d.]+(?:e[+-]?\d+)?|nan|inf))"
NEMO_RL_EPOCH: Final = re.compile(r"={5,} Epoch (\d{1,15})/\d+ ={5,}")
BLOCKS: Final = (
    StepBlock(
        re.compile(r"={5,} Step (\d{1,15})/\d+ ={5,}"),
        re.compile(rf"• ([A-Z][\w ()-]+): {_NUMBER}(?![\w.])"),
        {
            "Avg Total Reward": "train/reward",
            "Avg Reward": "train/reward",
            "Generation KL Error": "train/gen_kl_error",
            "Mean Generation Length": "train/mean_gen_tokens_per_sample",
            "Policy Loss": "train/loss",
            "Critic Loss": "train/critic/loss",
            "Critic Grad Norm": "train/critic/grad_norm",
            "Critic LR": "train/critic/lr",
            "Critic Clip Frac": "train/critic/vf_clipfrac",
            "Avg Trajectory Age (gen-version)": "train/avg_trajectory_age",
        },
        "train/",
    ),
    StepBlock(
        re.compile(r"Learning iteration (\d{1,15})/\d+"),
        re.compile(rf"^\s*(?:Mean )?([A-Za-z][\w ]+?):\s+{_NUMBER}\s*$"),
        {
            "Value function loss": "Loss/value_function",
            "value_function loss": "Loss/value_function",
            "Surrogate loss": "Loss/surrogate",
            "surrogate loss": "Loss/surrogate",
            "entropy loss": "Loss/entropy",
            "action noise std": "Policy/mean_noise_std",
            "reward": "Train/mean_reward",
            "episode length": "Train/mean_episode_length",
        },
    ),
)
"""NeMo-RL and RSL-RL."""

TABLE_CELL: Final = re.compile(r"[^|]*\|(\s+)([^|]+?)\s*\|\s*([^|\s]*)\s*\|\s*")
"""A line of the tables of Stable-Baselines3 and Baselines: names are indented below the heading of their group."""
TABLE_BORDER: Final = re.compile(r"\W*-{5,}\s*")
FRAMES: Final = re.compile(r"Total num frames: (\d+)\.")
FRAMES_REWARD: Final = re.compile(rf"Avg episode reward: \[\(0, '{_NUMBER}'\)")
EPISODE: Final = re.compile(rf"global_step=(\d+),? episodic_return=\[?{_NUMBER}")


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
        if number == 1 < self.last:  # another job; a job that continues from a checkpoint has later numbers
            self.before += self.last
        self.last = number
        return self.before + number


def _printed_rows(lines: Iterable[str]) -> Iterator[object]:
    """Yield the row that a trainer printed for each step: in one line or several, as a table, or below a heading.

    Rows come from transformers (`{'loss': 0.1, ...}`), verl (`step:1 - actor/ppo_kl:0.1 - ...`), OpenRLHF
    (`Global step 1: {'ppo_kl': 0.1, ...}`), NeMo-RL (`step_metrics={...}`), CleanRL (`global_step=1, episodic_return=1`) and Sample
    Factory (`Total num frames: 1.`, then `Avg episode reward: [(0, '1')]`).
    """
    step: dict[str, object] = {}
    block, counter = BLOCKS[0], _StepCounter()
    table: dict[str, object] = {}
    group, frames = "", ""
    for line in lines:
        if cell := TABLE_CELL.fullmatch(line):
            indent, name, value = cell.groups()
            group = "" if len(indent) == 1 else group
            if not value and name.endswith("/"):
                group = name
            else:
                table[group + name] = value
        elif table and TABLE_BORDER.fullmatch(line):
            yield table
            table = {}
        elif epoch := NEMO_RL_EPOCH.search(line):
            counter.begin_epoch(int(epoch[1]))
        elif found := next(((each, heading) for each in BLOCKS if (heading := each.heading.search(line))), None):
            if len(step) > 1:
                yield step
            block, number = found[0], int(found[1][1])
            step = {"step": counter.step(number) if block is BLOCKS[0] else number}
        elif step and (metric := block.metric.search(line)):
            default = None if block.prefix is None else block.prefix + metric[1].lower().replace(" ", "_")
            if tag := block.tags.get(metric[1], default):
                step[tag] = metric[2]
        elif passed := FRAMES.search(line):
            frames = passed[1]
        elif frames and (reward := FRAMES_REWARD.search(line)):
            yield {"frame": frames, "reward/reward": reward[1]}
        elif episode := EPISODE.search(line):
            yield {"global_step": episode[1], "charts/episodic_return": episode[2]}
        else:
            yield _printed_row(line)
    yield from filter(None, (step if len(step) > 1 else {}, table))


def _printed_row(line: str) -> object:
    """Return a line's metrics of a step; None for other lines."""
    line = WRAPPED.sub(r"\1", line)
    if step := re.search(r"\bstep:(\d+) - (\S.*)", line):
        cells = (cell.rpartition(":") for cell in step[2].split(" - "))
        metrics = {name.strip(): value for name, _, value in cells}
        return {"step": step[1]} | {tag: value for tag, value in metrics.items() if not ROUNDED.fullmatch(tag + value)}
    braces = re.search(r"\{.*\}", line)
    if braces is None:
        return None
    row = None
    for parse, content in ((parse_json, braces[0]), (ast.literal_eval, NOT_FINITE.sub(r"'\1'", braces[0]))):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # braces of other programs
            row = parse(content)
            break
    if isinstance(row, dict) and (step := PREFIXED_ROW.search(line[: braces.start()])):
        return ({"step": step[1]} if step[1] else {}) | {f"train/{name}": value for name, value in row.items()}
    return row


ROUNDED: Final = re.compile(r"actor/(lr|ppo_kl)-?0\.000")
"""Numbers that early releases of verl print with three decimals, and that are not 0."""

PREFIXED_ROW: Final = re.compile(r"(?:\bGlobal step (\d+): |\bstep_metrics=)$")
"""Text that OpenRLHF and NeMo-RL print before metrics whose tags have the prefix `train/` in their backends."""

WRAPPED: Final = re.compile(r"\b(?:np\.\w+|tensor)\(([^(),]*)(?:, [^()]*)?\)")
"""Numbers as NumPy and torch print them."""

NOT_FINITE: Final = re.compile(r"(?<=[:,\[(] )(-?(?:nan|inf))(?=[,}\])])")
"""Numbers in a printed dictionary that are not literals of Python."""
