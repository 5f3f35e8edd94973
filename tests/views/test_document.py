"""A document is built once, and has the same content as HTML, as Markdown and on a terminal."""

import pytest

from esper_telemetry.views.document import folded, h, items, print_document, table, text_lines, to_html, to_markdown

EVIL = "<img src=x>\x1b[31m|*"


def test_texts_are_escaped_where_the_document_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    document = h("p", EVIL, title=EVIL)

    assert to_html(document) == '<p title="&lt;img src=x&gt;|*">&lt;img src=x&gt;|*</p>'
    assert to_markdown(document) == "&lt;img src=x>\\|\\*\n"
    print_document(document)
    assert capsys.readouterr().out == "<img src=x>|*\n"


def test_children_are_unpacked_and_missing_ones_left_out() -> None:
    document = [h("p", None, "", "a", ["b", iter("c")]), (h("br"), h("details", h("summary", "d"), open=True))]

    assert to_html(document) == "<p>abc</p><br><details open><summary>d</summary></details>"


def test_a_table_has_its_numbers_at_the_right_of_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    document = table(("key", "value"), [("policy/kl", h("b", "1"))], numbers_from=1)

    assert to_markdown(document) == "| key | value |\n|---|---|\n| policy/kl | 1 |\n"
    assert "<tbody><tr><td>policy/kl</td><td><b>1</b></td></tr></tbody>" in to_html(document)
    print_document(document)
    assert "│ policy/kl │     1 │" in capsys.readouterr().out


def test_a_folded_part_is_a_title_with_lines_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    document = folded("Most unusual", items(["  a", "b"]))

    assert list(text_lines(document)) == ["Most unusual:", "  a", "  b"]
    print_document(document)
    assert capsys.readouterr().out == "Most unusual:\n  a\n  b\n"
    assert to_html(document) == "<details><summary>Most unusual</summary><ul><li>a</li><li>b</li></ul></details>"


def test_an_article_is_framed_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_document(h("article", h("h3", "incident 1"), h("p", "It fell."), h("p", "Alarms"), css="warn"))

    top, *rows, _ = capsys.readouterr().out.splitlines()
    assert top.startswith("╭─ incident 1 ─")
    assert [row.strip("│ ") for row in rows] == ["It fell.", "", "Alarms"]
