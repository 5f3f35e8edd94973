"""Write the generated pages from the declarations in the code: `python docs/glossary.py`.

They are docs/metrics.md, docs/cli.md and docs/equations.md. Run it after every change of a metric, an equation, a
hypothesis or an option.
"""

from __future__ import annotations

import argparse
import html
import re
import warnings
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any, Final

import tyro
from metrics_reference import page

from esper_telemetry.cli import check, run
from esper_telemetry.cli.arguments import PROGRAM
from esper_telemetry.cli.main import COMMANDS
from esper_telemetry.equations.equation import equations
from esper_telemetry.views.equation_table import equation_title

PAGE = Path(__file__).with_name("metrics.md")
COMMANDS_PAGE = Path(__file__).with_name("cli.md")
EQUATIONS_PAGE = Path(__file__).with_name("equations.md")
COMMANDS_HEAD: Final = """# Command line

The program is `esper-telemetry COMMAND`, or `python -m esper_telemetry COMMAND`. `COMMAND --help` prints what this page lists. The word
*repeatable* replaces the default of an option that may be given several times.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the run failed, or the command found the problem that its section names |
| 2 | wrong use: one sentence on stderr, nothing is created or changed |
| 3 | the run meets the condition of `diagnose --fail-on` |
| 130, 143 | interrupted by Ctrl-C, ended by SIGTERM |

`NO_COLOR=1` switches colours off. `diagnose`, `watch`, `report`, `compare` and `doctor` start without torch.
"""
EQUATIONS_HEAD: Final = """# Equations and mistakes

The equations that `esper-telemetry check` and the alarm `integrity/equation` compare a program with, in the order of causes
([Is my PPO correct?](is_my_ppo_correct.md)). The table below an equation lists what else the numbers may equal: mistakes, with what to
change, and published variants, which raise no alarm. Numbers such as 1506.02438 are arXiv papers. *Fitted* means that the value is
estimated from the numbers, and printed.
"""
BARRED_CODE = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
EXIT_CODES: Final = {
    "train": "1: training failed; 130 and 143 after a checkpoint was saved, from which `--resume` continues.",
    "run": "the exit code of the script.",
    "check": "0: every equation that was checked matches or is a published variant; 1: one differs, or the script failed; "
    "2: wrong use, nothing could be checked, or a measurement failed.",
    "replay": "1: records are missing in the backend.",
    "doctor": "1: a backend lacks records, or the journal is damaged.",
    "diagnose": "3: the run meets the condition of `--fail-on`.",
    "workspace": "1: W&B refused to save it.",
}


def equation_page() -> str:
    """Return the page of all equations, with the mistakes and variants of each."""
    parts = []
    for equation in sorted(equations().values(), key=lambda equation: equation.rank):
        title = equation_title(equation)
        head = f"## {title}\n\n`{equation.equation}` ({equation.source}). Needs {equation.inputs}. Name: `{equation.name}`."
        rows = ["| the numbers equal | equation | what to change |", "|---|---|---|"]
        for one in equation.hypotheses:
            says = f"{one.says} {one.parameter}, which is fitted" if one.fit is not None else one.says.rstrip(";")
            cells = (
                f"{says}{f' ({one.citation})' if one.citation else ''}",
                one.equation and f"`{one.equation}`",
                "published variant: no alarm" if one.variant else one.advice,
            )
            escaped = (cell.replace("|", "\\|") for cell in cells)
            rows.append(f"| {' | '.join(escaped)} |")
        parts.append("\n".join([head, "", *rows] if equation.hypotheses else [head]))
    return with_bars(f"{EQUATIONS_HEAD}\n" + "\n\n".join(parts) + "\n")


def command_page() -> str:
    """Return the page of all commands with their options."""
    return with_bars("\n".join([COMMANDS_HEAD, *(section(name, parser) for name, parser in parsers())]))


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every command with its parser."""
    own = {"run": run.parser, "check": check.parser}
    for name, form in COMMANDS.items():
        if name in own:
            yield name, own[name]()
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # tyro names no successor of get_parser
            parser: Any = tyro.extras.get_parser(form, prog=f"{PROGRAM} {name}", config=(tyro.conf.OmitArgPrefixes,))
        yield name, parser  # tyro's copy of argparse has the same attributes


def section(name: str, parser: argparse.ArgumentParser) -> str:
    """Return the part of the page about one command."""
    text, _, example = cleandoc(parser.description or "").partition("Example: ")
    actions = [action for action in parser._actions if action.dest != "help"]
    rows = [table_row(action) for action in actions if not action.dest.startswith("ppo.")]
    settings = [table_row(action) for action in actions if action.dest.startswith("ppo.")]
    head = "| argument | default | meaning |\n|---|---|---|\n"
    parts = [
        f"## {name}",
        " ".join(text.split()),
        f"```text\n{synopsis(parser.prog, actions)}\n```",
        f"```sh\n{example.strip()}\n```",
        head + "\n".join(rows),
    ]
    if settings:
        parts.append("Settings of PPO:\n\n" + head + "\n".join(settings))
    if name in EXIT_CODES:
        parts.append(f"Exit codes: {EXIT_CODES[name]}")
    return "\n\n".join(parts) + "\n"


def synopsis(program: str, actions: list[argparse.Action]) -> str:
    """Return the form of the command: required options, then others, then arguments by place."""
    required = [spelling(action) for action in actions if action.option_strings and action.required]
    places = [action for action in actions if not action.option_strings]
    names = [f"[{label(action)}]" if action.nargs in ("?", argparse.REMAINDER) else label(action) for action in places]
    return " ".join([program, *required, "[OPTIONS]", *names])


def label(action: argparse.Action) -> str:
    """Return the name of a value in capitals, or its choices."""
    metavar = " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar or ""
    if not action.option_strings:
        is_named = re.fullmatch(r"[A-Z|]+", metavar) and metavar != "STR"
        name = (metavar if is_named else action.dest.upper().replace("-", "_")).removesuffix("S")
        return f"{name} ..." if action.nargs in ("*", "+", argparse.REMAINDER) else name
    if not metavar:
        return "|".join(action.choices or ()) or action.dest.upper()
    text = metavar.replace("{None}|", "").replace("[INT [INT ...]]", "INT ...")
    return "|".join(choice for choice in text.strip("{}").split(",") if choice != "None")


def spelling(action: argparse.Action) -> str:
    """Return an argument as it is typed."""
    if not action.option_strings:
        return label(action)
    if action.nargs == 0:
        return action.option_strings[0] if action.default is False else f"--[no-]{action.option_strings[0][2:]}"
    return f"{', '.join(action.option_strings)} {label(action)}"


def table_row(action: argparse.Action) -> str:
    """Return the row of an argument; its help ends with the default."""
    words = " ".join((action.help or "").replace("%(default)g", str(action.default)).split())
    match = re.search(r" ?\((?:default: (?P<default>.*?)|(?P<mark>required|repeatable))\)$", words)
    default = "on" if action.default is True else ""
    if match:
        words = words[: match.start()]
        value = (match["default"] or "").strip("'")
        default = match["mark"] or default or (f"`{value}`" if value not in ("", "None", "False") else "")
    first, _, rest = words.partition(" ")
    meaning = f"{first if first.endswith(',') else first[:1].upper() + first[1:]} {rest}".rstrip(". ")
    return " | ".join(["", f"`{spelling(action)}`".replace("|", "\\|"), default, in_cell(meaning), ""]).strip()


def with_bars(text: str) -> str:
    """Return Markdown whose code with an escaped bar is HTML: the site's tables would show the backslash too."""

    def tag(match: re.Match[str]) -> str:
        code = html.escape(match[1].replace("\\|", "|"), quote=False)
        for character in "|_*[]":
            code = code.replace(character, f"&#{ord(character)};")
        return f"<code>{code}</code>"

    return BARRED_CODE.sub(tag, text)


def in_cell(text: str) -> str:
    """Return text as a cell of a table: no bar begins a column, no bracket a tag or a link."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    COMMANDS_PAGE.write_text(command_page(), encoding="utf-8")
    EQUATIONS_PAGE.write_text(equation_page(), encoding="utf-8")
    print(f"wrote {PAGE}, {COMMANDS_PAGE} and {EQUATIONS_PAGE}")
