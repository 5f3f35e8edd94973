"""`diagnose --json`: what the schema in the docs says, in at most 8 kB, with the setting to change."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from healthy_run import run, set_to
from made_runs import KL_SPIKES, journal, wrong_script

from esper_telemetry.cli.main import main
from esper_telemetry.core.record import RunStatus
from esper_telemetry.views.verdict_text import MAX_BYTES, shortened, to_text

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "diagnose.schema.json").read_text(encoding="utf-8"))

Diagnose = Callable[..., dict[str, Any]]


@pytest.fixture
def diagnose(capsys: pytest.CaptureFixture[str]) -> Diagnose:
    jsonschema = pytest.importorskip("jsonschema")

    def call(*words: object, code: int = 0) -> dict[str, Any]:
        with pytest.raises(SystemExit) as stop:
            main(["diagnose", *map(str, words), "--json"])
        out = capsys.readouterr().out
        assert stop.value.code == code
        values: dict[str, Any] = json.loads(out)
        jsonschema.validate(values, SCHEMA)
        assert "--all" in words or len(out.encode()) <= 8192
        return values

    return call


def test_a_healthy_run_has_nothing_to_change(tmp_path: Path, diagnose: Diagnose) -> None:
    values = diagnose(journal(tmp_path / "run", run(60)))

    assert values["schema"] == 1
    assert (values["incidents"], values["advice"], values["left_out"]) == ([], [], {})


def test_a_setting_outside_published_values_is_changed_to_a_usual_one(tmp_path: Path, diagnose: Diagnose) -> None:
    """The published values end at 0.003; nine of ten are at most 5.4e-4."""
    path = journal(tmp_path / "run", run(60, KL_SPIKES), learning_rate=0.1)

    values = diagnose(path)

    (incident,) = values["incidents"]
    assert (incident["cause"], incident["since"], incident["level"]) == ("policy/kl_spike", 30, "critical")
    assert {"setting": "learning_rate", "value": 5.4e-4, "now": 0.1}.items() <= incident["advice"].items()
    assert incident["evidence"][0] == {"key": "policy/kl", "value": 2.0} | {
        name: incident["evidence"][0][name] for name in ("usual", "healthy")
    }
    assert values["advice"][0]["setting"] == "learning_rate" and values["advice"][0]["because"] == "incident 1"
    assert values["next"]["command"] == f"esper-telemetry compare {path} NEW_RUN --json"


def test_a_usual_setting_is_changed_by_the_rules_factor_in_the_words_of_the_trainer(tmp_path: Path, diagnose: Diagnose) -> None:
    """A third of 0.003; ratios that collapse ask for the learning rate, too, so the list has it once."""
    facts: dict[str, Any] = {"learning_rate": 0.003, "setting_names": {"learning_rate": "lr"}}
    path = journal(tmp_path / "run", run(60, KL_SPIKES), RunStatus.FINISHED, **facts)

    changes = diagnose(path)["advice"]

    assert [(one["setting"], one["value"], one["now"]) for one in changes] == [("lr", 0.001, 0.003)]


@pytest.mark.parametrize(("spikes", "because"), [(KL_SPIKES, "incident 1"), (set_to({}), "published settings")])
def test_a_rate_that_only_the_optimizer_has_is_named_like_there(spikes: Any, because: str, tmp_path: Path, diagnose: Diagnose) -> None:
    records = run(60, spikes)
    for place, record in enumerate(records):
        records[place] = replace(record, values={**record.values, "opt/lr": 0.3})

    (change,) = diagnose(journal(tmp_path / "run", records, learning_rate=None))["advice"]

    assert change.items() >= {"setting": "lr", "value": 5.4e-4, "now": 0.3, "because": because}.items()


def test_the_score_of_the_actions_has_the_bound_of_scores(tmp_path: Path, diagnose: Diagnose) -> None:
    wrong = {"integrity/equation/actions": 3.0, "integrity/equation/returns": 0.5}
    (incident,) = diagnose(journal(tmp_path / "run", run(60, set_to(wrong))), "--all")["incidents"]

    healthy = {one["key"]: one["healthy"] for one in incident["evidence"]}
    assert healthy["integrity/equation/actions"].startswith("<= 1: the largest standard score over 7")
    assert healthy["integrity/equation/returns"] == "<= 0.0001"


def test_actions_at_their_bounds_name_the_wrapper_of_the_environment(tmp_path: Path, diagnose: Diagnose) -> None:
    path = journal(tmp_path / "run", run(20, set_to({"policy/head/action/bound_frac": 0.99}), since=1))

    (change,) = [one for one in diagnose(path)["advice"] if one["setting"] == "env"]

    assert change["value"] == "gymnasium.wrappers.RescaleAction(env, -1, 1)" and change["now"] is None


def test_a_run_under_way_has_no_status_and_a_failed_one_its_exception(tmp_path: Path, diagnose: Diagnose) -> None:
    live = diagnose(journal(tmp_path / "live", run(40), None))
    failed = diagnose(journal(tmp_path / "failed", run(40), RunStatus.FAILED), "--fail-on", "flat", code=3)

    assert live["status"] is None
    assert (failed["status"], failed["outcome"]["outcome"]) == ("failed", "failed")
    assert failed["failure"]["exception"] == "ValueError" and len(failed["failure"]["message"]) < 1000
    assert failed["ending"]


def test_all_has_every_equation_and_leads_on_to_the_report(tmp_path: Path, diagnose: Diagnose) -> None:
    path = journal(tmp_path / "run", run(60, set_to({"repr/dead_frac": 0.9}), since=1))

    short, full = diagnose(path), diagnose(path, "--all")

    assert short["unexplained"]
    assert short["next"]["command"] == f"esper-telemetry diagnose {path} --json --all"
    assert full["next"]["command"] == f"esper-telemetry report {path}"
    assert {row["equation"] for row in full["equations"]} > {row["equation"] for row in short["equations"]}


def test_a_long_answer_keeps_what_is_most_urgent() -> None:
    """Thirty incidents of 600 characters, the last of which is the only one that is on, and 300 reasons of 100 characters."""
    ends: list[int | None] = [*range(29), None]
    incidents = [
        {
            "incident": number,
            "level": "warn",
            "standing": {"a/b": end},
            "text": "x" * 9999,
            "alarms": [],
            "evidence": [],
        }
        for number, end in enumerate(ends, 1)
    ]

    values = shortened({"incidents": incidents, "unanswered": {f"a/{i}": "y" * 100 for i in range(300)}, "left_out": {}})

    assert MAX_BYTES * 0.8 < len(to_text(values)) <= MAX_BYTES
    kept = [incident["incident"] for incident in values["incidents"]]
    assert kept == [*range(1, len(kept)), 30]
    assert values["left_out"] == {"incidents": 30 - len(kept), "unanswered": 300 - len(values["unanswered"])}


def test_logs_of_other_trainers_have_the_same_fields(tmp_path: Path, diagnose: Diagnose) -> None:
    log = tmp_path / "progress.csv"
    rows = "\n".join(f"{step * 2048},{200 - step},0.01" for step in range(1, 150))
    log.write_text(f"time/total_timesteps,rollout/ep_rew_mean,train/approx_kl\n{rows}\n")

    values = diagnose("--from", log, "--fail-on", "flat", code=3)

    assert values["outcome"]["outcome"] == "declining" and "status" not in values
    assert values["read"] and values["next"]["command"].startswith(f"esper-telemetry diagnose --from {log}")


@pytest.mark.system
def test_an_equation_that_differs_names_the_line_of_the_script(tmp_path: Path, diagnose: Diagnose) -> None:
    script = wrong_script(tmp_path)
    command = (sys.executable, "-m", "esper_telemetry", "check", "--updates", "2", "--run-dir", "run", script.name)
    subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)
    line = next(number for number, one in enumerate(script.read_text().splitlines(), 1) if "gae_lambda * lastgaelam" in one)

    values = diagnose(tmp_path / "run")

    (row,) = [row for row in values["equations"] if row["state"] == "differs"]
    assert (row["equation"], row["place"]) == ("advantages", f"wrong.py:{line}")
    assert values["advice"][0] | {"text": ""} == {
        "text": "",
        "setting": "advantages",
        "value": row["reference"],
        "now": None,
        "because": "equation advantages",
        "place": row["place"],
    }
    assert values["next"]["command"] == f"esper-telemetry check {tmp_path / 'run'}"
