"""The Textual app of `esper-telemetry watch`: it reads journals at most four times a second, and redraws only lines that have changed."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input, Static

from esper_telemetry.core.messages import printable
from esper_telemetry.journal.file import journal_path
from esper_telemetry.journal.packed import PACKED_SUFFIX
from esper_telemetry.views.panels import view_declarations
from esper_telemetry.views.run_view import RunView, open_sample, open_view
from esper_telemetry.views.watch.charts import Line, WatchState, chart_page, paragraph, run_names
from esper_telemetry.views.watch.screens import footer, header, help_page, incident_page, overview, strip, table_page

REFRESH_SECONDS: Final = 0.25
READ_SECONDS: Final = 0.1
"""Time of a refresh that may be spent on reading."""
READ_LINES: Final = 50
SAMPLE_RECORDS: Final = 60
"""Records over the run, and at its end, with which a long journal is shown until all of it is read."""
MIN_REDRAW_SECONDS, CELLS_PER_SECOND = 0.5, 20_000
"""Redrawing a screen waits at least so long, and as many seconds as it has cells: so the output stays below 50 kB per second."""
OVER_SECONDS: Final = 10.0
"""Time after its last line from which on a run that has ended is drawn no more, but when a key is pressed."""
SCROLL_COLUMNS: Final = 8
CURSOR_PARTS: Final = 60
POINTS: Final = 400
"""Values that are kept of each key: two for each column of a wide terminal."""


HEAD_BYTES: Final = 200
"""Beginning of a journal that holds the identifier of its run."""


class Page(ScrollView, can_focus=True, inherit_bindings=False):
    """Lines below fixed ones, with a cursor that stays on its line's id when the lines change.

    Attributes:
        chosen: id of the line under the cursor; empty without any.
        frozen: columns that stay in sight when lines with an id are scrolled sideways; 0 where nothing is.
    """

    DEFAULT_CSS = """
    Page { height: 1fr; scrollbar-size: 0 0; background: ansi_default; color: ansi_default; }
    """

    def __init__(self, color: bool) -> None:
        super().__init__()
        self._color = color
        self._rich = Console(width=1000, color_system="standard")
        self._fixed: list[Line] = []
        self._lines: list[Line] = []
        self._moved = False  # until then the first line that can be chosen is: the incident that has just begun
        self.chosen = ""
        self.frozen = 0

    def show(self, fixed: Sequence[Line], lines: Sequence[Line]) -> None:
        """Replace the lines and redraw changed ones."""
        before, moved = [*self._fixed, *self._visible()], len(fixed) != len(self._fixed)
        self._fixed, self._lines = (list(map(_printable, part)) for part in (fixed, lines))
        ids = self._ids
        chosen = self.chosen if self._moved and self.chosen in ids else next(iter(ids), "")
        lost, self.chosen = chosen != self.chosen, chosen
        widest = max((line.text.cell_len for line in (*self._fixed, *self._lines)), default=0)
        size = Size(max(widest, self.size.width), len(self._fixed) + len(self._lines))
        if size != self.virtual_size:
            self.virtual_size = size
        if moved or lost or not before:
            self.refresh()
            return
        after = [*self._fixed, *self._visible()]
        for y in range(self.size.height):
            if before[y : y + 1] != after[y : y + 1]:
                self.refresh(Region(0, y, self.size.width, 1))

    @property
    def _ids(self) -> list[str]:
        return [line.id for line in self._lines if line.id]

    @property
    def room(self) -> int:
        """Number of lines that scroll."""
        return max(1, self.size.height - len(self._fixed))

    def _visible(self) -> list[Line]:
        top = round(self.scroll_y)
        return self._lines[top : top + max(0, self.size.height - len(self._fixed))]

    def render_line(self, y: int) -> Strip:
        """Return one line of the screen, cut at the edges."""
        shown, left, width = [*self._fixed, *self._visible()], round(self.scroll_x), self.size.width
        line = shown[y] if y < len(shown) else Line(Text())
        # Rich leaves out the style of a text without spans
        text = line.text if line.text.spans else Text.assemble((line.text.plain, line.text.style))
        if line.id and line.id == self.chosen:
            text = text.copy()
            text.pad_right(max(0, left + width - text.cell_len))
            text.stylize("reverse")
        segments: list[Segment] = list(text.render(self._rich))
        if not self._color:
            segments = [Segment(part.text, part.style.without_color if part.style else None) for part in segments]
        whole, frozen = Strip(segments), self.frozen
        if left == 0 or not (line.id and frozen):
            return whole.crop(0, width).adjust_cell_length(width)
        rest = whole.crop(left + frozen, left + width)
        return Strip.join([whole.crop(0, frozen), rest]).adjust_cell_length(width)

    def move(self, count: int) -> None:
        """Move the cursor by that many lines that can be chosen; scroll if no such line is in sight."""
        self._moved, ids = True, self._ids
        place = ids.index(self.chosen) if self.chosen in ids else 0
        target = min(max(place + count, 0), len(ids) - 1)
        if not ids or (target == place and count):
            self.scroll_relative(y=count, animate=False)  # the lines before the first and after the last one that can be chosen
        if not ids:
            return
        old, self.chosen = self.chosen, ids[target]
        at = next(index for index, line in enumerate(self._lines) if line.id == self.chosen)
        top, room = round(self.scroll_y), self.room
        if not top <= at < top + room:
            y = at - room // 2 if abs(count) > 1 else at if at < top else at - room + 1
            self.scroll_to(y=max(0, y), animate=False)
            self.refresh()
        elif old != self.chosen:
            for index, line in enumerate(self._lines):
                if line.id in (old, self.chosen):
                    self.refresh(Region(0, index - top + len(self._fixed), self.size.width, 1))

    def turn(self, pages: int) -> None:
        """Scroll by screens, and choose the first line in sight that can be chosen."""
        self._moved = True
        self.scroll_relative(y=pages * max(1, self.room - 1), animate=False)
        seen = [line.id for line in self._visible() if line.id]
        if seen and self.chosen not in seen:
            self.chosen = seen[0] if pages > 0 else seen[-1]
        self.refresh()

    def choose_at(self, y: int) -> bool:
        """Move the cursor to the line at a row of the screen; return False if that line cannot be chosen."""
        place, lines = y - len(self._fixed), self._visible()
        if not 0 <= place < len(lines) or not lines[place].id:
            return False
        self._moved, self.chosen = True, lines[place].id
        self.refresh()
        return True


class WatchApp(App[None]):
    """Shows runs until the reader leaves.

    Args:
        sources: run directories, or addresses of other trainers' logs.
        wait: wait for run directories that do not exist yet.

    Raises as `views.run_view.open_view`.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    #footer { height: 1; background: ansi_default; color: ansi_default; }
    Input { height: 1; border: none; padding: 0; background: ansi_default; color: ansi_default; display: none; }
    Input.shown { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", priority=False),
        Binding("down,j", "move(1)"),
        Binding("pageup", "page(-1)"),
        Binding("pagedown,space", "page(1)"),
        Binding("home,g", "move(-1000000)"),
        Binding("end,G", "move(1000000)"),
        Binding("left", "sideways(-1)"),
        Binding("right", "sideways(1)"),
        Binding("enter", "open"),
        Binding("escape,q", "go_back"),
        Binding("t,tab", "next_table"),
        Binding("slash", "filter"),
        Binding("p", "pin"),
        Binding("l", "log"),
        Binding("c", "no_cursor"),
        Binding("question_mark", "help"),
        Binding("ctrl+c", "leave", priority=True),
    ]

    def __init__(self, sources: Sequence[str], *, wait: bool = False) -> None:
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self._color = not os.environ.get("NO_COLOR")
        self._sources = list(sources)
        self._views: list[RunView | None] = [None] * len(sources)
        self._files: dict[int, FileState] = {}  # as they were when they were read to their ends
        self._whole: dict[int, RunView] = {}  # views of all records, which a thread reads for views of a sample
        self._one_thread = threading.Lock()
        for index in range(len(self._sources)):
            self._open_source(index, missing_ok=wait)
        self._state = WatchState()
        self._pages: list[tuple[str, str]] = [("overview", "")]
        self._page = Page(self._color)
        self._footer, self._keys = Static(id="footer"), Text()
        self._input = Input(placeholder="filter: regular expression; Enter keeps it, Esc takes it away")
        self._drawn_at, self._read_at = 0.0, time.monotonic()

    def _open_source(self, index: int, *, missing_ok: bool) -> None:
        source = self._sources[index]
        try:
            if ":" in source and not Path(source).is_dir():
                self._views[index] = open_view(source, max_points=POINTS)
                return
            view = self._views[index] = open_sample(source, SAMPLE_RECORDS, max_points=POINTS)
        except (OSError, ValueError):
            if not missing_ok:
                raise
        else:
            if view.sampled:
                threading.Thread(target=self._read_whole, args=(index,), daemon=True).start()

    def _read_whole(self, index: int) -> None:
        """Read all records of a run in a thread."""
        with self._one_thread, suppress(OSError, ValueError):
            self._whole[index] = open_view(self._sources[index], max_points=POINTS)

    @property
    def views(self) -> list[RunView]:
        """Runs that exist by now."""
        return [view for view in self._views if view is not None]

    def compose(self) -> ComposeResult:
        """Arrange the page, its keys and the input of the filter."""
        yield self._page
        yield self._footer
        yield self._input

    def on_mount(self) -> None:
        """Begin to read and to draw."""
        self._page.focus()
        self.set_interval(REFRESH_SECONDS, self.tick)
        self.call_after_refresh(self.tick)

    def on_resize(self, _: events.Resize) -> None:
        """Draw for the new size."""
        self.call_after_refresh(self.draw)

    def on_click(self, event: events.Click) -> None:
        """Open the line that was clicked, as Enter does."""
        if event.widget is self._page and self._page.choose_at(event.screen_y - self._page.region.y):
            self.action_open()

    def tick(self) -> None:
        """Read what was appended, for a bounded time; draw if something is new, or the age of the last record is."""
        deadline, count = time.monotonic() + READ_SECONDS, 0
        for index in range(len(self._sources)):
            if index in self._whole:
                self._views[index] = self._whole.pop(index)
                self._files.pop(index, None)
                count += 1
            view = self._views[index]
            if view is None:
                self._open_source(index, missing_ok=True)
            else:
                count += self._read_on(index, view, deadline)
        now, pause = time.monotonic(), max(MIN_REDRAW_SECONDS, self.size.width * self.size.height / CELLS_PER_SECOND)
        self._read_at = now if count else self._read_at
        if not count:
            is_over = now - self._read_at > OVER_SECONDS and all(view is not None and view.ended for view in self._views)
            pause = math.inf if is_over else 1.0
        if now - self._drawn_at >= pause:
            self.draw()

    def _read_on(self, index: int, view: RunView, deadline: float) -> int:
        """Return the number of entries that were read; a journal that another run has replaced is read from its start."""
        count, before = 0, self._files.get(index)
        with suppress(OSError):  # a journal that is gone or away: what was read stays, and grows old
            state = _file_state(view)
            if state is None or state == before:
                return 0
            if before is not None and (not state.head.startswith(before.head) or state.size < before.size):
                self._files.pop(index)
                self._open_source(index, missing_ok=True)
                return 1
            while time.monotonic() < deadline and (read := view.refresh(READ_LINES)):
                count += read
            if time.monotonic() < deadline:
                self._files[index] = state
        return count

    def draw(self) -> None:
        """Show the present page."""
        self._drawn_at, state = time.monotonic(), self._state
        width, views = max(20, self.size.width), self.views
        kind, argument = self._pages[-1]
        keys = footer(kind, width)
        if self._keys != keys:
            self._keys = keys
            self._footer.update(keys)
        top = [Line(strip(views, width)), *(header(views, width) if views and kind != "help" else [])]
        choices = [f"filter '{state.pattern}'"] if state.pattern and kind in ("overview", "table") else []
        if kind in ("overview", "chart"):
            choices += ["log axis"] if state.log else []
            if state.cursor is not None:
                choices.append(f"values at {state.cursor:,} {views[0].x_label if views else ''} (c: latest)")
        if choices:
            top.append(Line(Text("  ".join(choices), "dim")))
        if kind != "help" and not views:
            lines = [Line(Text(f"{source} does not exist yet.", "dim")) for source in self._sources]
        elif kind == "table":
            index, name = argument.split(":", 1)
            table = next((table for table in views[int(index)].tables() if table.name == name), None)
            head, lines = table_page(table, state) if table else (Line(Text()), [])
            run = f"{run_names(views)[int(index)]}: " if len(views) > 1 else ""
            top += [Line(Text(f"{run}{table.title if table else name}", "bold underline")), head]
            self._page.frozen = head.text.plain.find(table.columns[1]) if table and len(table.columns) > 1 else 0
        else:
            room = max(8, self._page.size.height - len(top))
            lines = self._lines(kind, argument, views, width, room)
        self._page.show(top, lines)

    def _lines(self, kind: str, argument: str, views: list[RunView], width: int, room: int) -> list[Line]:
        """Return the lines that scroll, of all pages but tables."""
        if kind == "help":
            names = {table.name for view in views for table in view.tables()}
            return help_page(width, [table for table in view_declarations().tables if table.name in names])
        if kind == "chart":
            return chart_page(views, argument, self._state, width, room)
        if kind == "incident":
            index, number = map(int, argument.split(":"))
            return incident_page(views[index], number, width)
        if kind == "row":
            place, rest = argument.split(":", 1)
            name, row = rest.rsplit(":", 1)
            try:
                return rendered(views[int(place)].detail(name, int(row)), width)
            except (Exception, SystemExit) as error:  # a plugin's own code
                return paragraph(f"This row cannot be shown: {error}", width, "yellow")
        return overview(views, self._state, width)

    def action_move(self, count: int) -> None:
        """Move the cursor."""
        self._page.move(count)

    def action_page(self, count: int) -> None:
        """Move the cursor by a screen."""
        self._page.turn(count)

    def action_sideways(self, direction: int) -> None:
        """Scroll a table sideways; elsewhere move the cursor over time."""
        if self._pages[-1][0] == "table":
            self._page.scroll_relative(x=direction * SCROLL_COLUMNS, animate=False)
            self._page.refresh()
            return
        last = max((view.axes.env_step for view in self.views if view.axes), default=0)
        at = last if self._state.cursor is None else self._state.cursor
        at += direction * max(1, last // CURSOR_PARTS)
        self._state.cursor = None if at >= last else max(0, at)
        self.draw()

    def action_no_cursor(self) -> None:
        """Show the latest values again."""
        self._state.cursor = None
        self.draw()

    def action_open(self) -> None:
        """Open the line under the cursor."""
        kind, _, argument = self._page.chosen.partition(":")
        if kind in ("key", "incident", "row"):
            argument = f"{self._pages[-1][1]}:{argument}" if kind == "row" else argument
            self._go("chart" if kind == "key" else kind, argument)

    def action_go_back(self) -> None:
        """Go back to the page before; take a filter away; leave from the overview."""
        if len(self._pages) > 1:
            self._pages.pop()
            self._changed_page()
        elif self._state.pattern:
            self._state.pattern = ""
            self.draw()
        else:
            self.exit()

    def action_leave(self) -> None:
        """Leave from anywhere."""
        self.exit()

    def action_next_table(self) -> None:
        """Turn to the next table, and from the last one to the overview."""
        names = [f"{index}:{table.name}" for index, view in enumerate(self.views) for table in view.tables()]
        kind, argument = self._pages[-1]
        place = names.index(argument) + 1 if kind == "table" and argument in names else 0
        self._pages = [("overview", "")]
        if place < len(names):
            self._pages.append(("table", names[place]))
        elif not names:
            self.notify("The run has no table of environments.")
        self._state.pattern = ""
        self._changed_page()

    def action_help(self) -> None:
        """Show the keys."""
        if self._pages[-1][0] != "help":
            self._go("help", "")

    def action_filter(self) -> None:
        """Ask for a filter."""
        self._input.value = self._state.pattern
        self._input.add_class("shown")
        self._input.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the reader types."""
        if self._input.has_class("shown"):
            self._state.pattern = event.value
            self.draw()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        """Keep the filter."""
        self._close_input()

    def on_key(self, event: events.Key) -> None:
        """Take the filter away with Esc."""
        if event.key == "escape" and self._input.has_class("shown"):
            event.stop()
            event.prevent_default()
            self._state.pattern = ""
            self._close_input()

    def _close_input(self) -> None:
        self._input.remove_class("shown")
        self._page.focus()
        self.draw()

    def action_pin(self) -> None:
        """Pin the metric under the cursor, or of the chart that is shown; unpin it if it is pinned."""
        kind, argument = self._pages[-1]
        key = argument if kind == "chart" else self._page.chosen.removeprefix("key:")
        if kind == "chart" or (kind == "overview" and self._page.chosen.startswith("key:")):
            (self._state.pinned.remove if key in self._state.pinned else self._state.pinned.append)(key)
            self.draw()

    def action_log(self) -> None:
        """Turn the logarithmic axis on or off."""
        self._state.log = not self._state.log
        self.draw()

    def _go(self, kind: str, argument: str) -> None:
        self._pages.append((kind, argument))
        self._changed_page()

    def _changed_page(self) -> None:
        self._page.scroll_to(0, 0, animate=False)
        self.draw()
        self._page.refresh()


class FileState(NamedTuple):
    """A journal's file: its first bytes, which name the run, and what changes with every line."""

    head: bytes
    size: int
    changed_ns: int


def _file_state(view: RunView) -> FileState | None:
    """Return the state of a run's journal; None if nothing can follow: reading a compressed journal again would unpack it."""
    path = None if view.run_dir is None else journal_path(view.run_dir)
    if path is None or path.suffix == PACKED_SUFFIX:
        return None
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        return FileState(file.read(HEAD_BYTES), stat.st_size, stat.st_mtime_ns)


def _printable(line: Line) -> Line:
    """Return the line without control characters, which readers of files leave out and names of files may have."""
    plain = line.text.plain
    return line if printable(plain) == plain else line._replace(text=Text(printable(plain)))


def rendered(renderable: RenderableType, width: int) -> list[Line]:
    """Return a Rich renderable as lines of that width; a text is shown as it is."""
    console = Console(width=width, color_system="standard", force_terminal=True, markup=False, emoji=False)
    rows = console.render_lines(renderable, console.options.update(width=width), pad=False)
    return [Line(Text.assemble(*((part.text, part.style or "") for part in row))) for row in rows]
