"""Which tests verify which metric, found in the tests themselves; `docs/glossary.py` writes it into the registry."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from esper_telemetry.core.catalogue import catalogue
from esper_telemetry.core.record import template_of

TESTS = Path(__file__).parents[1] / "tests"
ORDER = ("metrics", "series", "ranks", "ppo", "wiring")
"""Folders whose tests tell most of a number; others follow."""
MOST = 2
"""Tests that an entry names, of each kind."""

EMITTED = "tests/updates/test_every_key.py"
"""Checks of every key that a real run reports it."""


def verified() -> dict[str, tuple[str, ...]]:
    """Tests by key: cases of exact arithmetic, files that expect the key by name, and for all others the run that reports it."""
    keys = {metric.key for metric in catalogue()}
    known = dict.fromkeys(keys)
    cases, files = by_case(known), by_file(known)
    return {key: (*cases.get(key, ())[:MOST], *files.get(key, ())[:MOST]) or (EMITTED,) for key in sorted(keys)}


def by_case(known: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Reference cases that say what a key must be."""
    found: dict[str, tuple[str, ...]] = {}
    for case in json.loads((TESTS / "vectors.json").read_text(encoding="utf-8"))["vectors"]:
        for key in sorted({template_of(key, known) for key in case["expected"]} & known.keys()):
            found[key] = (*found.get(key, ()), f"tests/test_vectors.py[{case['name']}]")
    return found


def by_file(known: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Test files that name a key, or one made from its template."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(TESTS.rglob("test_*.py"), key=_rank):
        for key in sorted(named_in(path, known)):
            found[key] = (*found.get(key, ()), path.relative_to(TESTS.parent).as_posix())
    return found


def named_in(path: Path, known: Mapping[str, Any]) -> set[str]:
    """Keys, as their templates, that stand in a file as texts of their own."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {template_of(text, known) for text in _texts(ast.walk(tree)) if "/" in text} & known.keys()


def _texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _rank(path: Path) -> tuple[int, str]:
    folder = path.relative_to(TESTS).parts[0]
    return ORDER.index(folder) if folder in ORDER else len(ORDER), path.as_posix()
