"""The registry is complete, matches the code and is readable; the page made from it is up to date."""

import json
import re
from pathlib import Path

import pytest
from metrics_reference import page
from run_cli import run_cli

from esper_telemetry.alarms.metric_entries import PRIORITIES, alarms_reading, metric_entries
from esper_telemetry.alarms.rule import AlarmRule
from esper_telemetry.alarms.thresholds import alarm_rules
from esper_telemetry.core.metric import families
from esper_telemetry.core.record import Level, MetricInfo, RunInfo, template_of
from esper_telemetry.history.derive import key_histories
from esper_telemetry.sinks.pages import glossary, metric_description
from esper_telemetry.views.metrics_page import entry_values

ENTRIES = {entry.metric.key: entry for entry in metric_entries()}
DOCS = Path(__file__).parents[2] / "docs"


def test_every_entry_is_complete() -> None:
    titles = {family.title for family in families().values()}
    for entry in metric_entries():
        metric = entry.metric
        reasons = metric.source or entry.alarms or "nonfinite" in metric.key or metric.healthy
        assert entry.name and entry.name == entry.name.strip() and "_" not in entry.name
        assert entry.category in titles, metric.key
        assert entry.priority in PRIORITIES, metric.key
        assert entry.reduction, metric.key
        assert reasons or not (metric.warn or metric.critical), metric.key


def test_names_are_unique() -> None:
    names = [entry.name for entry in metric_entries()]

    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("alarm", alarm_rules(), ids=lambda alarm: alarm.type)
def test_every_alarm_reads_metrics_that_there_are(alarm: AlarmRule) -> None:
    assert alarm.source and alarm.inputs
    assert set(alarm.inputs) <= ENTRIES.keys()
    assert alarm.meaning.endswith(".") and alarm.action.endswith(".")


def test_the_alarm_that_a_metric_decides_comes_first() -> None:
    assert [alarm.type for alarm in alarms_reading("policy/entropy_norm")] == [
        "policy/entropy_collapse",
        "policy/entropy_explosion",
        "policy/entropy_crash",
    ]
    assert [alarm.type for alarm in alarms_reading("grad/global/norm_preclip_nonfinite")] == ["numerics/nonfinite"]


def test_headlines_are_measured_at_every_level() -> None:
    """MINIMAL also records the metrics that show certain mistakes without sampling."""
    late = {
        entry.metric.key
        for entry in metric_entries()
        if entry.priority == "critical" and entry.metric.cost == "free" and entry.metric.level > Level.MINIMAL
    }

    assert late <= {"reward/std", "grad/{group}/norm_preclip", "grad/head/{head}/norm"}


def test_an_entry_names_the_histories_that_follow_it() -> None:
    """Exactly the histories that a run derives from it."""
    endings = {entry.metric.key: set(entry.series) for entry in metric_entries() if entry.series}
    rows = key_histories(["actor"])

    assert endings["policy/kl"] >= {"ema", "drift", "trend/mk_z", "period/p", "cusum"}
    assert endings["grad/interference/cos"] == {"ema", "ew_std"}
    assert endings["grad/{group}/norm_preclip"] >= {"ema", "robust_z"}
    assert {template_of(row.key, endings) for row in rows} == endings.keys()
    assert {f"{{key}}/{name}" for names in endings.values() for name in names} == {
        entry.metric.key for entry in metric_entries() if entry.metric.key.startswith("{key}/")
    }


def test_every_metric_with_bounds_has_advice() -> None:
    bounded = [entry for entry in metric_entries() if entry.metric.warn or entry.metric.critical]

    assert [entry.metric.key for entry in bounded if not entry.action] == []
    assert [entry.metric.key for entry in metric_entries() if entry.metric.advice and entry not in bounded] == []
    assert [entry.metric.key for entry in bounded if entry.metric.advice and entry.alarms] == []


def test_sinks_say_how_they_carry_it() -> None:
    assert entry_values(ENTRIES["policy/kl"])["sinks"] == {
        **dict.fromkeys(("journal", "tensorboard", "wandb", "mlflow"), "scalar"),
        "console": "column",
    }
    assert entry_values(ENTRIES["grad/decades"])["sinks"]["mlflow"] == "quantiles p05, p50 and p95"
    assert "details" in entry_values(ENTRIES["grad/layer/{layer}/norm"])["sinks"]["wandb"]


def test_the_page_is_up_to_date() -> None:
    written = (DOCS / "metrics.md").read_text(encoding="utf-8")

    assert written == page(), "run: python docs/glossary.py"


def test_the_page_explains_every_metric_and_its_links_lead_somewhere() -> None:
    text = page()
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    anchors = {"".join(c for c in h.lower() if c.isalnum() or c in " -_").replace(" ", "-") for h in headings}

    assert all(f"### `{key}`" in text for key in ENTRIES)
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= anchors


def test_the_command_explains_one_metric_by_its_key(capfd: pytest.CaptureFixture[str]) -> None:
    """The key may also be a chart's, which contains the name of a head."""
    code, out, _ = run_cli(["metrics", "policy/head/op/kl"], capfd)

    assert code == 0
    assert "policy/head/{head}/kl" in out and "How far did the update move this head" in out


def test_the_command_lists_what_begins_alike(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(["metrics", "policy/ratio/", "--json"], capfd)

    entries = json.loads(out)
    assert code == 0
    assert [entry["key"] for entry in entries] == [key for key in ENTRIES if key.startswith("policy/ratio/")]
    assert {"name", "category", "priority", "reduction", "alarms", "action", "sinks", "source", "id"} <= set(entries[0])


def test_a_part_of_a_key_or_of_a_name_finds_it(capfd: pytest.CaptureFixture[str]) -> None:
    """Keys whose last segment matches are listed first; a single match is explained."""
    keys = [entry["key"] for entry in json.loads(run_cli(["metrics", "kl", "--json"], capfd)[1])]

    assert keys[0] == "policy/kl"
    assert all("kl" in key.lower() or "kl" in ENTRIES[key].name.lower() for key in keys) and len(keys) > 1
    assert "policy/entropy_norm" in run_cli(["metrics", "tropy_norm"], capfd)[1]
    assert run_cli(["metrics", "klx"], capfd)[2].startswith("esper-telemetry: there is no metric 'klx'; did you mean kl")


def test_a_key_that_is_not_there_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_cli(["metrics", "policy/clip_fraction"], capfd)

    assert (code, out) == (2, "")
    assert err.startswith("esper-telemetry: there is no metric 'policy/clip_fraction'; did you mean policy/clip_frac")


def test_a_tooltip_says_what_to_try() -> None:
    text = metric_description(ENTRIES["policy/clip_frac"].info())

    assert text.startswith("**Clip fraction.** What share of the samples left the trust region")
    assert "Not healthy? Use fewer epochs or a lower learning rate" in text and text.endswith("TELE-119")


def test_a_tooltip_of_a_users_metric_says_what_there_is() -> None:
    assert metric_description(MetricInfo(unit="reward", question="How much?")) == "How much? Unit: reward."


def test_the_glossary_explains_every_metric_under_the_question_of_its_family() -> None:
    run = RunInfo("a", "a", None, 0.0, metrics={key: entry.info() for key, entry in ENTRIES.items()})

    text = glossary(run)

    assert sum(f"`{key}` |" in text for key in ENTRIES) == len(ENTRIES)
    assert "`policy/kl` | How far did this update move the policy" in text
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles[:2] == ["## alarm: Is anything wrong?", "## episode: Is it learning?"]
