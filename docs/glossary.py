"""Write docs/metrics.md from the declarations in the code: `python docs/glossary.py`, after every change of a metric."""

from __future__ import annotations

from pathlib import Path

from esper_telemetry.views.metrics_page import page

PAGE = Path(__file__).with_name("metrics.md")

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
