"""Reference cases: public functions compute the same numbers as exact arithmetic.

`ESPER_VECTORS=FILE pytest tests/test_vectors.py` runs other cases of the same schema.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from vector_adapters import adapters_of, uncovered

CASES: list[dict[str, Any]] = json.loads(
    Path(os.environ.get("ESPER_VECTORS") or Path(__file__).with_name("vectors.json")).read_text(encoding="utf-8")
)["vectors"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_reference_case(case: Mapping[str, Any]) -> None:
    missing = list(uncovered(case))
    assert not missing, "nothing computes " + ", ".join(missing)
    values: dict[str, Any] = {}
    for adapter in adapters_of(case):
        values |= adapter(case["inputs"])

    wrong = {
        key: (values.get(key), expected)
        for key, expected in case["expected"].items()
        if not agrees(values.get(key), expected, case["tolerance"])
    }

    assert not wrong, "\n".join(f"{key}: got {actual}, expected {expected}" for key, (actual, expected) in wrong.items())


def agrees(got: Any, expected: Any, tolerance: float) -> bool:
    """Return True if a value equals the expected one: numbers within a relative tolerance (absolute at 0), the rest exactly."""
    if isinstance(expected, list):
        return (
            isinstance(got, list) and len(got) == len(expected) and all(agrees(g, e, tolerance) for g, e in zip(got, expected, strict=True))
        )
    if isinstance(expected, dict):
        return isinstance(got, dict) and all(agrees(got.get(key), value, tolerance) for key, value in expected.items())
    if expected is None or isinstance(expected, str | bool):
        return bool(got == expected)
    if not isinstance(got, int | float) or math.isnan(got):
        return False
    return bool(abs(got - expected) <= tolerance * (abs(expected) if expected else 1))
