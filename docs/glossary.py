"""Write docs/metrics.md, and the list in docs/is_my_ppo_correct.md, from the declarations in the code: `python docs/glossary.py`.

Run it after every change of a metric, an equation or a hypothesis.
"""

from __future__ import annotations

import re
from pathlib import Path

from esper_telemetry.views.equations import equation_list
from esper_telemetry.views.metrics_page import page

PAGE = Path(__file__).with_name("metrics.md")
EQUATIONS_PAGE = Path(__file__).with_name("is_my_ppo_correct.md")
LIST = re.compile(r"(?<=<!-- equations: begin -->\n).*?(?=<!-- equations: end -->)", re.DOTALL)


def with_equations(text: str) -> str:
    """Return the page of equations with the list as it is declared."""
    return LIST.sub(lambda _: f"\n{equation_list()}\n\n", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    EQUATIONS_PAGE.write_text(with_equations(EQUATIONS_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE} and {EQUATIONS_PAGE}")
