"""Texts for readers are plain English: six hard constructions are rare in the docs, in messages and in the package.

A construction is counted per 1,000 words. A hit is a place to look at, not always a bad sentence, so the limits are above 0.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "esper_telemetry").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_RATE_OF_TEXTS = 2.0
MAX_RATE_OF_PACKAGE = 3.0

HARD_CONSTRUCTIONS = {
    # "None where it has none": `if` and `when` are for conditions, `where` is for places
    "conditional where": r"\b(None|True|False|0|1) where\b|\bwhere (it|they|there|no|none|neither|nothing|this|that|these|one)\b",
    # "those of the step before": repeat the noun
    "pronoun chain": r"\b(that|those|the ones?) (of|whose|beside|before|after)\b|\bthose (that|which|who|in|at|on|from|with)\b",
    # "is no share": "is not a share"; "there is no share" is plain
    "negated noun": r"(?<!there )\b(is|are|was|were) no\b|\b(has|have|had|gets?|gives?|takes?|reads?|holds?) (no|nothing|none)\b",
    # "Of several ranks rank 0's": the subject comes first
    "fronted genitive": r"^(Of|With|From|By|Behind|Beside) (several|those|these|many|all)\b|^Of (what|it|them)\b",
    # "stands in the journal", "goes on behind it": the verb that people use
    "literal verb": r"\b(stands?|stood|lies|lay) (in|at|on|for|between|beside|behind)\b|\b(goes|go|went|gone) on\b"
    r"|\b(gives|comes|takes) (out|apart|over)\b|\btells? (apart|which|how)\b|\bis (owed|paid|meant|told)\b",
    "archaic connective": r"\b(nobody|nowhere|besides?|whoever|whatever|anew|thereby|whereby|lest|by itself|in place of|as far as)\b",
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


@cache
def constructions(sentence: str) -> list[str]:
    for phrase in PLAIN:
        sentence = sentence.replace(phrase, "X")
    return [name for name, rule in HARD_CONSTRUCTIONS.items() for _ in re.finditer(rule, sentence, flags=re.IGNORECASE)]


def prose_of_page(path: Path) -> str:
    text = re.sub(r"```.*?```|<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


@cache
def texts_of_module(path: Path) -> tuple[list[str], list[str]]:
    """Messages that a user may see, and docstrings and comments. A value in an f-string counts as one word."""
    source = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(source)))
    statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    joined = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in joined for part in node.values}
    strings = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    messages = ["".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values) for node in joined]
    messages += [str(node.value) for node in strings if id(node) not in statements | parts]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return messages, [*(str(node.value) for node in strings if id(node) in statements), *comments]


def check_rate(texts: Iterable[str], limit: float) -> None:
    words, hard = 0, []
    for sentence in (one for text in texts for one in sentences(text)):
        words += len(sentence.split())
        hard += [f"{name}: {sentence}" for name in constructions(sentence)]
    rate = 1000 * len(hard) / max(words, 1)
    assert rate <= limit, f"{rate:.2f} hard constructions per 1,000 words:\n" + "\n".join(hard)


def test_pages_are_plain_english() -> None:
    check_rate(map(prose_of_page, PAGES), MAX_RATE_OF_TEXTS)


def test_messages_are_plain_english() -> None:
    check_rate((text for path in PACKAGE for text in texts_of_module(path)[0]), MAX_RATE_OF_TEXTS)


@pytest.mark.parametrize("part", sorted({path.relative_to(ROOT).parts[1] for path in PACKAGE}))
def test_every_part_of_the_package_is_plain_english(part: str) -> None:
    paths = [path for path in PACKAGE if path.relative_to(ROOT).parts[1] == part]
    check_rate((text for path in paths for kind in texts_of_module(path) for text in kind), MAX_RATE_OF_PACKAGE)


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
