"""Verdicts of several diagnosers on the same logs: `zen-rl`, `rlwatch`, this package from the logs alone, and with tensors.

The logs have the tags and scales of Stable-Baselines3, made from the journals. The other diagnosers are imported from a folder:
`pip install --no-deps --target DIR zen-rl rlwatch`, then `python -m benchmarks.mistakes score tasks --competitors DIR`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from esper_telemetry.alarms.diagnosis import NOT_EXPLAINING, Diagnosis, diagnose
from esper_telemetry.alarms.thresholds import Thresholds
from esper_telemetry.core.record import AlarmEvent, Record
from esper_telemetry.importers.records import LoggedPoint, LoggedRun, read_foreign
from esper_telemetry.journal.read import Run, read_run

from .corpus import Program
from .training_score import Score, is_right, share, shown_remarks, verdict_of

TAGS: Final[Mapping[str, tuple[str, float]]] = {
    "train/approx_kl": ("policy/kl_last", 1.0),
    "train/clip_fraction": ("policy/clip_frac", 1.0),
    "train/explained_variance": ("value/explained_variance", 1.0),
    "train/entropy_loss": ("policy/entropy", -1.0),
    "train/policy_gradient_loss": ("loss/policy", 1.0),
    "train/value_loss": ("loss/value", 2.0),
    "train/learning_rate": ("opt/lr", 1.0),
    "rollout/ep_rew_mean": ("episode/return_mean_100", 1.0),
    "rollout/ep_len_mean": ("episode/length_mean", 1.0),
}
"""Tags of Stable-Baselines3, with our key for the number and the factor between them."""

CAUSES: Final = {
    "LR_TOO_HIGH": frozenset({"remark/learning_rate"}),
    "POLICY_COLLAPSE": frozenset({"policy/entropy_collapse"}),
    "ADVANTAGE_NOT_NORMALIZED": frozenset({"integrity/adv_norm"}),
    "entropy_collapse": frozenset({"policy/entropy_collapse"}),
    "kl_explosion": frozenset({"policy/kl_spike"}),
    "gradient_norm_spike": frozenset({"grad/explode"}),
    "loss_nan": frozenset({"numerics/nonfinite"}),
}
"""Other diagnosers' names, and our alarms with the same meaning. The rest of their names say that the return is low or moves."""

Said = tuple[set[str], bool]
"""Names of a diagnoser's findings, and whether one of them is right."""


def logs_of(run: Run) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each tag, as (environment step, value)."""
    return {
        tag: points
        for tag, (key, factor) in TAGS.items()
        if (points := [(one.axes.env_step, factor * one.values[key]) for one in run.records if key in one.values])
    }


def by_names(program: Program, names: set[str]) -> Said:
    """Return the findings with the other diagnosers' names."""
    return names, any(CAUSES.get(name, frozenset()) & program.causes for name in names)


def zen(program: Program, run: Run) -> Said:
    """Return `zen-rl`'s findings for the tags."""
    return by_names(program, {issue["mode"] for issue in importlib.import_module("zen.detect.rules").detect(logs_of(run))})


def rlwatch(program: Program, run: Run) -> Said:
    """Return the findings of `rlwatch`'s detectors. They also get the gradient norm and the spreads of rewards and advantages."""
    suite = importlib.import_module("rlwatch.detectors").DetectorSuite(importlib.import_module("rlwatch.config").RLWatchConfig())
    names: set[str] = set()
    for record in run.records:
        names |= {alert.detector for alert in suite.check_step(record.axes.update, **_watched(record))}
    return by_names(program, names)


def _watched(record: Record) -> dict[str, Any]:
    keys = {
        "entropy": "policy/entropy",
        "kl_divergence": "policy/kl",
        "reward_mean": "episode/return_mean",
        "reward_std": "episode/return_std",
        "advantage_std": "adv/raw/std",
        "loss": "loss/total",
        "grad_norm": "grad/global/norm_preclip",
    }
    return {name: record.values.get(key) for name, key in keys.items()}


def from_logs(program: Program, run: Run) -> Said:
    """Return this package's findings from the tags alone."""
    points = {tag: [LoggedPoint(step, value) for step, value in values] for tag, values in logs_of(run).items()}
    foreign = read_foreign(LoggedRun(program.name, points))
    own = frozenset({"telemetry/missing_metric", "telemetry/overhead", "telemetry/delivery"})
    return by_verdict(program, diagnose(foreign.facts, foreign.records, thresholds=Thresholds().without(own)))


def by_verdict(program: Program, verdict: Diagnosis) -> Said:
    """Return the alarms and shown remarks of a verdict, or `unexplained` for a bad outcome without any."""
    raised = [one for incident in verdict.incidents for one in incident.alarms if one.event is AlarmEvent.RAISE]
    raised = [one for one in raised if not one.type.startswith(NOT_EXPLAINING)]
    remarks, right_remarks = shown_remarks(program, verdict)
    names = {one.type for one in raised} | {f"remark/{name}" for name in remarks}
    names |= {"unexplained"} if verdict.unexplained else set()
    return names, bool(right_remarks) or any(is_right(program, one) for one in raised)


def compare(results: Path, programs: Sequence[Program], scores: Sequence[Score], folder: Path) -> None:
    """Print a table of the diagnosers, over harmful and over correct programs."""
    sys.path.append(str(folder))
    named = {program.name: program for program in programs}
    diagnosers: dict[str, Callable[[Program, Run], Said]] = {"zen-rl 0.1.0": zen, "rlwatch 0.5.1": rlwatch}
    diagnosers["ours, from logs"] = from_logs
    rows: dict[str, list[tuple[Score, Said]]] = {}
    for score in scores:
        run_dir = results / score.program / str(score.seed) / "run"
        run, program = read_run(run_dir), named[score.program]
        for name, diagnoser in diagnosers.items():
            rows.setdefault(name, []).append((score, diagnoser(program, run)))
        rows.setdefault("ours, with tensors", []).append((score, by_verdict(program, verdict_of(run_dir))))
    print("\n| diagnoser | harmful: right cause | harmful: says something | correct: says something | what it says of correct runs |")
    print("|---|---|---|---|---|")
    for name, row in rows.items():
        bad = [said for score, said in row if score.harmful and not score.learns]
        good = [names for score, (names, _) in row if score.kind != "wrong" and score.learns]
        cells = [share(sum(right for _, right in bad), len(bad)), share(sum(bool(names) for names, _ in bad), len(bad))]
        cells += [share(sum(map(bool, good)), len(good)), ", ".join(sorted(set().union(*good))) or "nothing"]
        print(f"| {name} | {' | '.join(cells)} |")
