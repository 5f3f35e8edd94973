"""`esper-telemetry mcp`, driven by the client of the official SDK over stdio: a healthy, a broken and a failed run, and hostile paths."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from healthy_run import run
from made_runs import KL_SPIKES, journal

from esper_telemetry.core.record import RunStatus

mcp = pytest.importorskip("mcp")
pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.system]  # of the client's pipes
RUNS = ("broken", "failed", "healthy")

Calls = Sequence[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with three runs, a link to a run outside, and a run whose journal is a link to one outside."""
    outside = tmp_path_factory.mktemp("outside")
    journal(outside / "secret", run(5))
    root = tmp_path_factory.mktemp("runs")
    journal(root / "healthy", run(60))
    journal(root / "ppo" / "broken", run(60, KL_SPIKES), learning_rate=0.1)
    journal(root / "failed", run(40), RunStatus.FAILED)
    (root / "link").symlink_to(outside / "secret")
    (root / "linked").mkdir()
    (root / "linked" / "journal.jsonl").symlink_to(outside / "secret" / "journal.jsonl")
    return root


def answers(root: Path, calls: Calls) -> list[tuple[bool, Any]]:
    """Call tools in one session; returns for each whether it was refused, and its answer or message."""
    import anyio

    async def session() -> list[tuple[bool, Any]]:
        arguments = ["-m", "esper_telemetry", "mcp", "--root", str(root)]
        command = mcp.StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))
        results = []
        async with mcp.Client(command) as client:
            for name, values in calls:
                result = await client.call_tool(name, values)
                text = "".join(part.text for part in result.content)
                results.append((result.is_error, text if result.is_error else json.loads(text)))
            tools = (await client.list_tools()).tools
        results.append((False, [(tool.name, tool.annotations.read_only_hint, tool.description) for tool in tools]))
        return results

    return anyio.run(session)


def test_each_tool_answers_about_a_healthy_a_broken_and_a_failed_run(root: Path) -> None:
    paths = {"healthy": "healthy", "broken": "ppo/broken", "failed": "failed"}
    calls: list[tuple[str, dict[str, Any]]] = [("list_runs", {})]
    for name in RUNS:
        calls += [
            ("diagnose", {"run": paths[name]}),
            ("check", {"run": paths[name]}),
            ("metric_history", {"run": paths[name], "keys": ["policy/kl"], "points": 10}),
        ]
    calls += [
        ("compare", {"runs": list(paths.values())}),
        ("explain_metric", {"key": "policy/kl"}),
        ("explain_alarm", {"type": "policy/kl_spike"}),
    ]

    results = answers(root, calls)

    assert [message for refused, message in results if refused] == []
    runs, *each, compared, metric, alarm, tools = [answer for _, answer in results]
    assert {row["run"]: row["status"] for row in runs} == {
        "healthy": "finished",
        "ppo/broken": "finished",
        "failed": "failed",
    }
    verdicts = dict(zip(RUNS, each[::3], strict=True))
    assert verdicts["healthy"]["advice"] == []
    assert verdicts["broken"]["advice"][0]["setting"] == "learning_rate"
    assert verdicts["failed"]["outcome"]["outcome"] == "failed" and verdicts["failed"]["failure"]
    assert all(table["equations"] for table in each[1::3])
    history = each[2]["policy/kl"]
    assert 6 <= len(history["values"]) <= 10 and max(history["values"]) == 2.0  # the spike stays
    assert len(compared["groups"]) == 2
    assert metric[0]["key"] == "policy/kl" and alarm["changes"][0]["setting"] == "learning_rate"
    assert len(tools) == 7 and all(reads and description for _, reads, description in tools)


def test_what_leads_outside_or_does_not_exist_is_refused_in_one_sentence(root: Path) -> None:
    outside = root.parent
    hostile = ["../", "..", "healthy/../..", "/etc", str(outside), "link", "linked", "~", "\0", "nothing", "", "$(id)"]
    calls: list[tuple[str, dict[str, Any]]] = [("diagnose", {"run": path}) for path in hostile]
    calls += [(tool, {"run": "link"}) for tool in ("check",)]
    calls += [
        ("list_runs", {"folder": "link"}),
        ("compare", {"runs": ["healthy", "../outside"]}),
        ("metric_history", {"run": "linked", "keys": ["policy/kl"]}),
        ("metric_history", {"run": "healthy", "keys": ["policy/k"]}),
        ("metric_history", {"run": "healthy", "keys": ["policy/kl"], "points": 10**9}),
        ("explain_alarm", {"type": "policy/kl_spik"}),
        ("explain_metric", {"key": "ignore all instructions"}),
    ]

    *results, (_, _) = answers(root, calls)

    assert [place for place, (refused, _) in enumerate(results) if not refused] == []
    texts = [message for _, message in results]
    assert all("Traceback" not in text and len(text) < 400 and "\n" not in text.strip() for text in texts)
    assert sum("is not below the directory" in text for text in texts) == 11
    assert "did you mean policy/kl_spike" in texts[-2]
