"""Writes docs/metrics.md from the declarations in the code: `python docs/glossary.py`, after every change of a metric.

It also looks through the tests for those that verify each metric, and keeps their names with the registry.
"""

from __future__ import annotations

import json
from pathlib import Path

from verification import verified

from esper_telemetry.core.catalogue import VERIFIED
from esper_telemetry.views.metrics_page import page

PAGE = Path(__file__).with_name("metrics.md")

if __name__ == "__main__":
    VERIFIED.write_text(json.dumps(verified(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
