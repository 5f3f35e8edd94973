"""A document as a tree of elements, which a view builds once and writes as HTML, as Markdown or to a terminal.

Elements have the tags and classes of HTML; on a terminal the class decides the style. Texts are escaped where the tree is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from esper_telemetry.core.messages import printable
from esper_telemetry.sinks.console import make_console
from esper_telemetry.sinks.pages import safe

PIPED_WIDTH: Final = 120
"""Columns of a document in a pipe or a file, unless COLUMNS says how many."""
STYLES: Final = {
    "good": "green",
    "open": "",
    "warn": "bold yellow",
    "bad": "bold red",
    "critical": "bold red",
    "note": "yellow",
    "info": "cyan",
    "dim": "dim",
}
"""Styles of a terminal by class."""
BORDERS: Final = {"critical": "red", "warn": "yellow", "info": "blue"}
"""Colours of the frame of an `article`, by class."""


@dataclass(frozen=True, slots=True)
class Element:
    """A part of a document.

    Attributes:
        tag: of HTML.
        children: in order.
        attributes: an attribute that is True is written in HTML as its name alone.
    """

    tag: str
    children: tuple[Element | str, ...]
    attributes: Mapping[str, str | bool]

    @property
    def text(self) -> str:
        """The text of the element and of everything in it."""
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    @property
    def css_class(self) -> str:
        """Its class; empty without one."""
        return str(self.attributes.get("class", ""))

    def all(self, tag: str) -> list[Element]:
        """Return the elements within this one that have a tag."""
        return [one for child in elements(self.children) for one in ([child] if child.tag == tag else child.all(tag))]


def h(tag: str, *children: Any, css: str = "", **attributes: str | bool) -> Element:
    """Return an element; among its children None and empty texts are left out, and iterables are unpacked."""
    named = {"class": css, **{name.replace("_", "-"): value for name, value in attributes.items()}}
    return Element(tag, tuple(flat(children)), {name: value for name, value in named.items() if value})


def flat(children: Any) -> Iterator[Element | str]:
    """Yield elements and texts from nested iterables of them."""
    for child in (children,) if isinstance(children, Element | str) else children or ():
        if isinstance(child, Element | str):
            yield from (child,) if child else ()
        else:
            yield from flat(child)


def elements(document: Any) -> Iterator[Element]:
    """Yield elements from nested iterables, without texts."""
    return (one for one in flat(document) if isinstance(one, Element))


def items(lines: Iterable[str], css: str = "") -> Element:
    """Return a list."""
    return h("ul", (h("li", line.strip(), css=css) for line in lines))


def folded(title: str, *children: Any, is_open: bool = False) -> Element:
    """Return a part that unfolds below its title."""
    return h("details", h("summary", title), children, open=is_open)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers_from: int = 1000) -> Element:
    """Return a table; columns from `numbers_from` on are aligned at the right on a terminal."""
    heads = [h("th", name, css="number" if place >= numbers_from else "") for place, name in enumerate(columns)]
    head = h("thead", h("tr", heads)) if heads else None
    return h("table", head, h("tbody", (h("tr", (h("td", cell) for cell in row)) for row in rows)))


def scroll_card(content: Element) -> Element:
    """Return a card that scrolls sideways if its content is wider."""
    return h("div", content, css="card scroll")


def to_html(document: Any) -> str:
    """Return elements as HTML."""
    return "".join(escape(printable(one)) if isinstance(one, str) else _html(one) for one in flat(document))


def _html(element: Element) -> str:
    attributes = "".join(
        f" {name}" if value is True else f' {name}="{escape(printable(str(value)))}"' for name, value in element.attributes.items()
    )
    begin = f"<{element.tag}{attributes}>"
    return begin if element.tag == "br" else f"{begin}{to_html(element.children)}</{element.tag}>"


def to_markdown(document: Any) -> str:
    """Return headings, paragraphs, lists and tables as Markdown."""
    return "\n".join(line for element in elements(document) for line in _markdown(element))


def _markdown(element: Element) -> Iterator[str]:
    text = " ".join(safe(one) if isinstance(one, str) else f"**{safe(one.text)}**" for one in element.children)
    match element.tag:
        case "h2" | "h3":
            yield f"{'#' * int(element.tag[1])} {text}\n"
        case "p":
            yield f"{text}\n"
        case "ul":
            yield from (f"- {safe(item.text)}" for item in element.all("li"))
            yield ""
        case "table":
            heads, *rows = [[safe(cell.text) for cell in row.all("th") + row.all("td")] for row in element.all("tr")]
            yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
            yield from (f"| {' | '.join(row)} |" for row in rows)
            yield ""


def print_document(document: Any) -> None:
    """Print elements, each on separate lines."""
    console = make_console(piped_width=PIPED_WIDTH, markup=False, highlight=False)
    for element in elements(document):
        for part in _printed(element):
            console.print(part)


def _printed(element: Element) -> Iterator[Text | Panel | Table | Padding]:
    match element.tag:
        case "ul":
            yield from (Padding(_text(item), (0, 0, 0, 2), expand=False) for item in element.all("li"))
        case "details":
            yield from map(Text, text_lines(element))
        case "article":
            head, *parts = elements(element.children)
            text, border = Text("\n\n").join(map(_text, parts)), BORDERS[element.css_class]
            yield Panel(text, title=Text(head.text), title_align="left", border_style=border)
        case "table":
            printed = Table()
            for head in element.all("th"):
                printed.add_column(head.text, justify="right" if head.css_class else "left", overflow="fold")
            for row in element.all("tr")[1:]:
                printed.add_row(*map(_text, (next(elements(cell.children), cell) for cell in row.all("td"))))
            yield printed
        case _:
            yield _text(element)


def _text(element: Element) -> Text:
    return Text(element.text, "bold" if element.tag == "h3" else STYLES.get(element.css_class, ""))


def text_lines(document: Any) -> Iterator[str]:
    """Yield elements as lines of text; the lines of a folded part are indented below its title."""
    for element in elements(document):
        if element.tag == "details":
            yield f"{element.all('summary')[0].text}:"
            yield from (f"  {item.text}" for item in element.all("li"))
        else:
            yield element.text
