"""Untrusted texts cannot control the terminal."""

import io
import logging

import pytest

from esper_telemetry.core.messages import printable, printable_values
from esper_telemetry.sinks.console import make_console


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext, 中文, עברית", "plain\n\ttext, 中文, עברית"),
        ("\x1b[2J\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07\x1b]8;;http://x\x1b\\link", "link"),
        ("\x9b31mred\x1bcreset", "redreset"),
        ("\x1b]0;without an end", "]0;without an end"),
        ("\x1b\x1b[31m[31m", "[31m"),
        ("over\rwritten\b\x00\x7f", "overwritten"),
        ("exe.\u202egnp", "exe.gnp"),
        ("half \ud800", "half \ufffd"),
        ("seen\u200b\ufeff\u2028\U000e0068\U000e0069", "seen"),
        ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 👩\u200d💻", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 👩\u200d💻"),
    ],
)
def test_escape_sequences_and_control_characters_are_left_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_names_and_texts_of_decoded_json_are_printable() -> None:
    assert printable_values({"a\x1b[1m": ["b\x07", {"c": 1.5}], "d": None}) == {"a": ["b", {"c": 1.5}], "d": None}


def test_the_messages_of_a_client_reach_the_log_without_escape_sequences(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("esper_telemetry", "esper_telemetry.sinks"):
        logging.getLogger(name).warning("sink %s: %s, %d errors", "a\x1b[2J", ValueError("\x1b]0;x\x07bad"), 3)

    assert [entry.getMessage() for entry in caplog.records] == ["sink a: bad, 3 errors"] * 2


def test_a_console_writes_its_own_colours_and_no_others() -> None:
    file = io.StringIO()
    console = make_console(file=file, force_terminal=True, color_system="standard", markup=False, highlight=False)

    console.print("a\x1b[2Jb", style="red")

    assert file.getvalue() == "\x1b[31mab\x1b[0m\n"


def test_a_width_of_no_columns_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    file = io.StringIO()

    make_console(file=file, piped_width=120).print("text")

    assert file.getvalue() == "text\n"
