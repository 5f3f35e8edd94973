"""Texts for readers are plain English: six hard constructions are rare in the docs, in messages and in the package.

A construction is counted per 1,000 words. A hit is a place to look at, not always a bad sentence, so the limits are above 0.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "esper_telemetry").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_RATE_OF_TEXTS = 2.0
MAX_RATE_OF_PACKAGE = 3.0

HARD_CONSTRUCTIONS = {
    # "None where it has none": `if` and `when` are for conditions, `where` is for places
    "conditional where": r"\b(None|True|False|empty|0|1|absent|alone|and|but|even|also|only|not) where\b"
    r"|, where (it|they|there|that|this|no|one)\b|^Where\b(?!.*\?$)",
    # "those of the step before": repeat the noun
    "pronoun chain": r"\b(those|that|the ones?) (of|whose|beside|before|after|behind)\b|\bthat which\b"
    r"|\bthose (that|which|who|in|at|on|for|from|with)\b",
    # "is no share": "is not a share"; "there is no share" is plain
    "negated noun": r"(?<!there )\b(is|are|was|were) no\b|\b(has|have|had|gets?|gives?|takes?|reads?|holds?) (no|nothing|none)\b",
    # "Of several ranks rank 0's": the subject comes first
    "fronted genitive": r"^(Of|Behind|Beside|Besides|With|From|By) (several|all|what|those|these|many|it|them)\b",
    # "stands in the journal", "goes on behind it": the verb that people use
    "literal verb": r"\b(stands?|stood) (in|at|on|for|beside|behind|there)\b|\b(goes|go|went|gone) on\b|\b(gives|give|gave) out\b"
    r"|\bcomes? (out|apart|in place)\b|\btells? (apart|which|how)\b|\bis (owed|paid|meant|told)\b|\b(lies|lay) (in|at|on|between|outside)\b",
    "archaic connective": r"\b(nobody|nowhere|beside|besides|whoever|whatever|anew|thereby|therein|whereby|lest|by itself|in place of"
    r"|as far as|once more|which is to say)\b",
}
PLAIN = {
    "no gradient": "a parameter that backpropagation does not reach, in torch's own words",
    "no attribute": "the words of Python's AttributeError",
}
"""Phrases with the form of a hard construction that are terms of the field, and why."""


def sentences(text: str) -> Iterator[str]:
    """Sentences of at least four words; code counts as one word."""
    text = re.sub(r"<code>.*?</code>|`[^`]*`", "X", text)
    for part in re.split(r"(?<=[.!?;:])\s+|\n\s*\n|\n\s*[-*]\s|\s*\|\s*", text):
        if len(part.split()) >= 4:
            yield " ".join(part.split())


def constructions(sentence: str) -> list[str]:
    for phrase in PLAIN:
        sentence = sentence.replace(phrase, "X")
    return [name for name, rule in HARD_CONSTRUCTIONS.items() for _ in re.finditer(rule, sentence, flags=re.IGNORECASE)]


def page_texts(path: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```|<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    yield re.sub(r"\]\([^)]*\)", "]", text)


def docstring_nodes(tree: ast.AST) -> set[int]:
    """Identities of the expressions that are only a string: docstrings, and descriptions below constants."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def messages(path: Path) -> Iterator[str]:
    """Texts that a user may see: strings that are not docstrings. The values in an f-string count as one word."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = docstring_nodes(tree)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (docstrings | parts):
            yield node.value


def explanations(path: Path) -> Iterator[str]:
    """Docstrings and comments."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    docstrings = docstring_nodes(tree)
    yield from (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) in docstrings)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from (token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)


def check_rate(texts: Iterable[str], limit: float) -> None:
    words, hard = 0, []
    for sentence in (one for text in texts for one in sentences(text)):
        words += len(sentence.split())
        hard += [f"{name}: {sentence}" for name in constructions(sentence)]
    rate = 1000 * len(hard) / words
    assert rate <= limit, f"{rate:.2f} hard constructions per 1,000 words:\n" + "\n".join(hard)


def test_pages_are_plain_english() -> None:
    check_rate((text for path in PAGES for text in page_texts(path)), MAX_RATE_OF_TEXTS)


def test_messages_are_plain_english() -> None:
    check_rate((text for path in PACKAGE for text in messages(path)), MAX_RATE_OF_TEXTS)


def test_the_package_is_plain_english() -> None:
    check_rate((text for path in PACKAGE for read in (messages, explanations) for text in read(path)), MAX_RATE_OF_PACKAGE)


@pytest.mark.parametrize(
    ("sentence", "construction"),
    [
        ("The result is None where it has one.", "conditional where"),
        ("The log-probabilities equal those of the previous step.", "pronoun chain"),
        ("The number is no share of the rows.", "negated noun"),
        ("Of several ranks rank 0 reports.", "fronted genitive"),
        ("The run goes on with other settings.", "literal verb"),
        ("A schedule that nobody steps is constant.", "archaic connective"),
    ],
)
def test_constructions_are_counted(sentence: str, construction: str) -> None:
    """None of them is in the plain sentence "The value is None if there is no gradient"."""
    assert constructions(sentence) == [construction]
    assert constructions("The value is None if there is no gradient.") == []
