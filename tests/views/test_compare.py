"""Comparison of runs: statistics worked by hand, and journals with known values."""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper_telemetry.cli.arguments import WrongUse
from esper_telemetry.cli.main import run as command_line
from esper_telemetry.core.rate_schedule import SCHEDULE_FACT, RateSchedule
from esper_telemetry.core.record import Axes, Histogram, MetricInfo, Record, RunInfo, RunStatus
from esper_telemetry.journal.file import Journal, compress
from esper_telemetry.journal.lines import encode_end, encode_record, encode_run
from esper_telemetry.views.compare import Comparison, comparison
from esper_telemetry.views.compare.compared_runs import find_runs, first_difference, read_compared
from esper_telemetry.views.compare.comparison_page import comparison_page
from esper_telemetry.views.compare.seed_statistics import bootstrap_interval, improvement, iqm, permutation_p, seeds_needed, smallest_p

METRICS = {
    "policy/kl": MetricInfo("nats", "?"),
    "opt/share": MetricInfo("fraction", "?", cost="sampled"),
    "grad/gns/g2": MetricInfo("gradient norm²", "?", cost="sampled"),
    "perf/update_ms": MetricInfo("ms", "?"),
    "my/frames": MetricInfo("1/s", "?"),
}
Values = Callable[[int], Mapping[str, float]]


def write_run(
    run_dir: Path,
    seed: int | None,
    values: Values,
    *,
    updates: int = 40,
    config: Mapping[str, Any] | None = None,
    status: RunStatus | None = RunStatus.FINISHED,
    versions: Mapping[str, str] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> str:
    """Write a journal with one record per 100 environment steps, and return its directory."""
    settings = {"learning_rate": 0.1, "log_dir": str(run_dir), **(config or {})}
    info = RunInfo(
        f"id-{run_dir.name}",
        run_dir.name,
        run_dir,
        1.0,
        config=settings if seed is None else {**settings, "seed": seed},
        metrics=dict(METRICS),
        versions=versions or {},
        facts=facts or {},
    )
    journal = Journal.create(run_dir)
    journal.write(encode_run(info))
    for update in range(1, updates + 1):
        axes = Axes(update, 100 * update, 4 * update, 1e9 + update)
        shape = {"adv/hist": Histogram((0.0, 1.0, 2.0), (float(update), 3.0))}
        journal.write(encode_record(Record(update, axes, dict(values(update)), shape)))
    if status is not None:
        journal.write(encode_end(status, seq=updates + 1))
    journal.close()
    return str(run_dir)


def learning(seed: int, *, gain: float = 1.0, kl: float = 1.0, begin: int = 0, end: int = 1000) -> Values:
    """Return the values of a noisy run. The return rises by `gain`; KL is multiplied by `kl` in updates from `begin` to `end`."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(1000, 4))

    def values(update: int) -> dict[str, float]:
        own = noise[update]
        factor = kl if begin <= update < end else 1.0
        sampled = {"opt/share": 0.01 * update} if update % (1 + seed % 2) == 0 else {}
        return {
            "episode/return_mean": 100 + gain * update + own[0],
            "episode/count": 10.0,
            "policy/kl": 0.01 * factor + 0.001 * own[1],
            "loss/value": 3 + own[2],
            "perf/update_ms": 1000.0 * seed,
            **sampled,
        }

    return values


def groups(folder: Path, count: int, second: Callable[[int], Values]) -> Comparison:
    """Compare runs of `learning` with as many runs of another learning rate, with other values and seeds."""
    places = [write_run(folder / f"a{seed}", seed, learning(seed)) for seed in range(count)]
    fast = {"learning_rate": 0.3}
    places += [write_run(folder / f"b{seed}", seed, second(seed), config=fast) for seed in range(100, 100 + count)]
    return compared(*places)


def compared(*places: str) -> Comparison:
    return comparison([read_compared(place) for place in find_runs(places)])


def test_the_interquartile_mean_leaves_out_a_quarter_at_either_end() -> None:
    """For 1, 2, 3, 4, 100 it is the mean of 2, 3 and 4. Two values are too few for an interval."""
    assert iqm(np.array([100.0, 1, 4, 2, 3])) == 3
    low, high = bootstrap_interval(iqm, np.array([100.0, 1, 4, 2, 3])) or (0, 0)
    assert 1 <= low < 3 < high <= 100
    assert bootstrap_interval(iqm, np.array([1.0, 2.0])) is None


def test_improvement_counts_pairs_and_half_of_the_ties() -> None:
    """In the six pairs of {1, 2, 2} and {2, 3}, four are above and two are ties: 5 / 6."""
    assert improvement(np.array([1.0, 2, 2]), np.array([2.0, 3])) == pytest.approx(5 / 6)


def test_p_values_are_shares_of_the_splits() -> None:
    """3 and 3 runs have 20 splits. The first feature separates the groups, as in the mirrored split: 2 / 20. The second is constant, so
    its statistic is the largest in all splits: 1.
    """
    values = np.array([[1.0, 5], [2, 5], [3, 5], [11, 5], [12, 5], [13, 5]])

    assert permutation_p(values, 3) == pytest.approx([0.1, 1.0])
    assert smallest_p(3, 3) == 0.1
    assert smallest_p(3, 5) == pytest.approx(1 / 56)
    assert smallest_p(1, 100) == 1.0
    assert (seeds_needed(0.05), seeds_needed(0.02)) == (4, 5)


def test_equal_groups_differ_in_some_metric_as_rarely_as_the_level_says() -> None:
    rng = np.random.default_rng(1)
    trials, mixing = 300, rng.normal(size=(6, 40))
    skewed = (np.exp(rng.normal(size=(10, 6)) @ mixing) for _ in range(trials))

    false = sum(permutation_p(values, 5).min() <= 0.05 for values in skewed)

    assert false <= 0.05 * trials + 2.5 * math.sqrt(trials * 0.05 * 0.95)


def test_a_missing_value_takes_part_in_no_mean() -> None:
    values = np.random.default_rng(2).normal(size=(12, 30))
    values[6:, 3] += 25
    values[0, 3] = values[8, 3] = math.nan
    values[:, 4] = math.nan

    p = permutation_p(values, 6)

    assert np.flatnonzero(p <= 0.01).tolist() == [3]


def test_a_metric_that_differs_is_named_from_where_to_where(tmp_path: Path) -> None:
    """KL is five times as large in updates 10 to 29 of 40, steps 1,000 to 2,900. Update times and the sampled metric vary by machine."""
    result = groups(tmp_path, 5, lambda seed: learning(seed, kl=5.0, begin=10, end=30))
    (pair,) = result.comparisons

    assert pair.verdict == "differs"
    assert [metric.key for metric in pair.metrics] == ["policy/kl"]
    (metric,) = pair.metrics
    assert metric.first == pytest.approx(0.01, rel=0.05)
    assert metric.second == pytest.approx(0.03, rel=0.05)
    assert metric.divergence is not None
    assert (metric.divergence.since, metric.divergence.until) == (800, 3000)
    assert result.settings == {"learning_rate": {"learning_rate=0.1": "0.1", "learning_rate=0.3": "0.3"}}
    assert "1 of 3 metrics differ, first policy/kl from step 800 to 3,000" in pair.text


def test_a_better_return_has_its_probability_and_its_begin(tmp_path: Path) -> None:
    (pair,) = groups(tmp_path, 5, lambda seed: learning(seed, gain=3.0)).comparisons

    assert pair.improvement == 1.0
    assert pair.return_p == pytest.approx(2 / 252)
    assert pair.return_divergence is not None
    assert pair.return_divergence.since <= 600
    assert pair.return_divergence.until is None
    assert "its final return is higher" in pair.text


def test_seeds_of_one_configuration_differ_in_nothing(tmp_path: Path) -> None:
    (pair,) = groups(tmp_path, 5, learning).comparisons

    assert pair.verdict == "same"
    assert pair.metrics == ()


@pytest.mark.parametrize(("seeds", "verdict"), [(1, "cannot tell"), (3, "cannot tell"), (4, "differs")])
def test_too_few_seeds_are_told_how_many_are_needed(tmp_path: Path, seeds: int, verdict: str) -> None:
    (pair,) = groups(tmp_path, seeds, lambda seed: learning(seed, kl=9.0)).comparisons

    assert pair.verdict == verdict
    assert pair.return_p is None
    assert ("from 4 seeds per group on" in pair.text) is (verdict == "cannot tell")
    assert re.search(r"final return.* 5 ", pair.text)


def test_repeats_of_a_seed_are_one_observation(tmp_path: Path) -> None:
    """Four equal runs of seed 1 do not replace four seeds."""
    places = [
        write_run(tmp_path / f"{kind}{n}", 1, learning(1, kl=kl), config={"rate": kl})
        for kind, kl in (("a", 1.0), ("b", 9.0))
        for n in range(4)
    ]

    result = compared(*places)

    assert [group.seeds for group in result.groups] == [1, 1]
    assert result.comparisons[0].verdict == "cannot tell"
    assert [(repeat.equal_updates, repeat.update) for repeat in result.repeats] == [(40, None)] * 6


EDITS: Mapping[str, tuple[Callable[[dict[str, Any]], None], tuple[Any, Any]]] = {
    "policy/kl": (lambda line: line["values"].update({"policy/kl": math.nextafter(0.5, 1)}), (0.5, math.nextafter(0.5, 1))),
    "loss/value": (lambda line: line["values"].update({"loss/value": -0.0}), (0.0, -0.0)),
    "opt/share": (lambda line: line["values"].pop("opt/share"), (0.25, None)),
    "axes/env_step": (lambda line: line["axes"].update(env_step=701), (700, 701)),
    "histogram/adv/hist": (
        lambda line: line["histograms"]["adv/hist"]["counts"].reverse(),
        ((0.0, 1.0, 2.0, 7.0, 3.0), (0.0, 1.0, 2.0, 3.0, 7.0)),
    ),
}


def test_names_and_paths_are_no_settings_unless_they_are_asked_for(tmp_path: Path) -> None:
    """Four runs that differ in a name, paths, and, two by two, in the number of epochs."""
    places = []
    for number in range(4):
        own: dict[str, Any] = {
            "exp_name": f"n{number % 2}",
            "weights": f"./w/{number}.pt",
            "eval_log_file": f"{number}.txt",
            "out": f"exp{number}",
            "tracking": f"mlflow:http://host:{number}",
        }
        own["train"] = {"num_epochs": 4 + number // 2}
        places.append(write_run(tmp_path / f"r{number}", number, learning(number), config=own))
    runs = [read_compared(place) for place in places]

    def sizes(**options: Any) -> list[int]:
        return [len(group.runs) for group in comparison(runs, **options).groups]

    assert sizes() == [2, 2]
    assert sizes(ignore=["num_epochs"]) == [4] == sizes(ignore=["train.num_epochs"])
    assert sizes(by=["exp_name"]) == [2, 2] and sizes(by=["exp_name", "num_epochs"]) == [1, 1, 1, 1]
    assert [group.label for group in comparison(runs, by=["exp_name"]).groups] == ["exp_name=n0", "exp_name=n1"]
    with pytest.raises(ValueError, match="no run has a setting 'num_epoch'; did you mean num_epochs"):
        sizes(ignore=["num_epoch"])
    assert command_line(["compare", str(tmp_path), "--by", "exp_name", "--ignore", "num_epochs"]) == 0


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ({"resume": None, "steps": 4_000}, {"resume": "ck/a-30.pt", "steps": 2_000}, 1),
        ({"total_timesteps": 50}, {"total_timesteps": 60}, 1),
        ({"load_checkpoint": None, "train": {"num_updates": 40}}, {"load_checkpoint": "x", "train": {"num_updates": 7}}, 1),
        ({"steps": 50}, {"steps": 100}, 2),
        ({"num_steps": 2_000}, {"num_steps": 3_000}, 2),
        ({"env_wrappers": "RescaleAction"}, {}, 2),
    ],
)
def test_lengths_and_resumed_checkpoints_are_no_settings(tmp_path: Path, first: dict[str, Any], second: dict[str, Any], count: int) -> None:
    """An update has 100 steps, so `steps` of at most 100 are of a rollout. The run that does not count is named."""
    places = [write_run(tmp_path / name, 1, learning(1), config=own) for name, own in (("a", first), ("b", second))]

    result = compared(*places)

    assert len(result.groups) == count
    assert any(f"without {places[1]}" in note for note in result.notes) is (count == 1)


def test_a_length_is_a_setting_of_a_learning_rate_that_follows_it(tmp_path: Path) -> None:
    def groups_of(final: float) -> int:
        places = []
        for steps in (4_000, 8_000):
            schedule = RateSchedule(initial=0.1, final=final, total_steps=steps, final_is_set=True)
            config, facts = {"total_steps": steps}, {SCHEDULE_FACT: schedule.fact()}
            places.append(write_run(tmp_path / f"{final}-{steps}", 1, learning(1), config=config, facts=facts))
        return len(compared(*places).groups)

    assert groups_of(final=0.0) == 2
    assert groups_of(final=0.1) == 1


def test_an_effect_that_cannot_be_told_has_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With two seeds each, every run of one group above every run of the other is still chance."""
    for seed in range(2):
        write_run(tmp_path / f"a{seed}", seed, learning(seed))
        write_run(tmp_path / f"b{seed}", seed, learning(seed, gain=5.0), config={"learning_rate": 0.3})

    assert command_line(["compare", str(tmp_path)]) == 0

    text = capsys.readouterr().out
    assert "Cannot tell with 2 and 2 seeds" in text
    assert "Probability" not in text and "1.00 to 1.00" not in text


@pytest.mark.parametrize("key", EDITS)
def test_the_first_difference_of_two_equal_runs_is_exact(tmp_path: Path, key: str) -> None:
    """Update 7 is edited, and update 9 has another KL as well. Times differ everywhere."""

    def values(time: float) -> Values:
        own = {"policy/kl": 0.5, "loss/value": 0.0, "opt/share": 0.25, "grad/gns/g2": 1.0}
        machine = {"my/frames": time, "sb3/time/fps": time, "charts/sps": time}
        return lambda update: {"perf/update_ms": time * update, **machine, **own}

    first, second = (write_run(tmp_path / name, 3, values(time), updates=12) for name, time in (("a", 1.0), ("b", 2.0)))
    path = Path(second) / "journal.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    EDITS[key][0](lines[7])
    lines[9]["values"]["policy/kl"] = 8.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    (found,) = compared(first, second).repeats

    assert (found.update, found.key, found.keys) == (7, key, (key,))
    assert repr(found.values) == repr(EDITS[key][1])
    assert (found.equal_updates, found.env_step) == (6, 700)


def test_equal_runs_that_sample_other_updates_are_equal(tmp_path: Path) -> None:
    """The choice of sampled updates depends on their time, and so do alarms on sampled values."""

    def values(every: int) -> Values:
        sampled = {"opt/share": 0.25, "opt/share/ema": every, "alarm/opt/dead": 1.0}
        return lambda update: {"policy/kl": 0.5} | (sampled if update % every == 0 else {})

    first, second = (write_run(tmp_path / str(every), 3, values(every)) for every in (2, 4))

    difference = first_difference(read_compared(first), read_compared(second))

    assert (difference.update, difference.equal_updates) == (None, 40)


def test_runs_that_are_not_alike_are_compared_as_far_as_they_go(tmp_path: Path) -> None:
    """Empty runs, runs without returns, with non-finite numbers, shorter, unfinished, packed, or without a seed."""
    whole = write_run(tmp_path / "whole", 1, learning(1))
    compress(whole)
    shorter = write_run(tmp_path / "shorter", 2, learning(2), updates=30, status=None)
    broken = write_run(
        tmp_path / "broken", 3, lambda update: {**learning(3)(update), "numerics/nonfinite": float(update > 20)}, status=RunStatus.FAILED
    )
    silent = write_run(tmp_path / "silent", None, lambda update: {"policy/kl": 0.01})
    short = write_run(tmp_path / "short", 5, learning(5), updates=5, config={"learning_rate": 0.3})
    empty = write_run(tmp_path / "empty", 4, learning(4), updates=0, config={"learning_rate": 0.3})

    result = compared(whole, shorter, broken, silent, short, empty)

    assert [(group.seeds, len(group.runs)) for group in result.groups] == [(4, 4), (1, 2)]
    assert result.groups[0].outcomes["failed"] == 1
    assert result.reach == 3000
    notes = " ".join(result.notes)
    for part in (
        "up to 3,000 environment",
        "empty) has no records",
        "silent) has no returns",
        "not finite since update 21",
        "no seed",
        "short) ends at 500",
    ):
        assert part in notes
    assert result.comparisons[0].verdict == "cannot tell"
    json.dumps(result.as_dict(), allow_nan=False)
    assert "<table>" in comparison_page(result)


def test_runs_without_any_return_or_record_are_compared_by_what_they_have(tmp_path: Path) -> None:
    empty = compared(*(write_run(tmp_path / f"empty{seed}", seed, learning(seed), updates=0) for seed in (1, 2)))
    silent = compared(*(write_run(tmp_path / f"silent{seed}", seed, lambda update: {"policy/kl": 0.01}) for seed in (1, 2)))

    assert empty.reach == 0
    assert silent.return_key == ""
    assert silent.groups[0].level is None
    assert "data-chart" not in comparison_page(silent).partition("</main>")[0]


def test_the_command_prints_writes_a_page_and_finds_runs_in_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(5):
        write_run(tmp_path / "runs" / "slow" / str(seed), seed, learning(seed), versions={"torch": "2.4"})
        fast = {"learning_rate": 0.3, "note": "<b>&"}
        write_run(tmp_path / "runs" / "fast" / str(seed), seed, learning(seed, gain=5.0), config=fast, versions={"torch": "2.5"})
    page = tmp_path / "page.html"

    assert command_line(["compare", str(tmp_path / "runs"), "-o", str(page)]) == 0
    text = capsys.readouterr().out
    assert command_line(["compare", str(tmp_path / "runs" / "slow"), str(tmp_path / "runs" / "fast"), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)

    assert "10 runs in 2 groups, compared up to 4,000 environment steps." in text
    assert "its final return is lower" in " ".join(text.split())
    assert values["comparisons"][0]["verdict"] == "differs"
    assert values["versions"]["torch"].popitem()[1] == "2.5"
    html = page.read_text(encoding="utf-8")
    section = html[html.index("<section") : html.index("</section>")]
    assert "&lt;b&gt;&amp;" in section
    assert "<b>" not in section
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", section)
    assert 'data-chart="0"' in section


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{tmp}/none", "{tmp}/a"], "there is no run directory .*none"),
        (["{tmp}/a"], "at least two runs, got 1"),
        (["{tmp}/a", "{tmp}/a/"], "at least two runs, got 1"),
        (["{tmp}/a", "{tmp}/folder"], "folder does not contain a run"),
        (["{tmp}/a", "{tmp}/headless"], "no line that describes the run"),
        (["{tmp}/a", "{tmp}/b", "-o", "{tmp}/none/page.html"], "page cannot be written"),
    ],
)
def test_wrong_use_of_compare_is_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    for seed, name in enumerate("ab"):
        write_run(tmp_path / name, seed, learning(seed), updates=2)
    (tmp_path / "folder").mkdir()
    (tmp_path / "headless").mkdir()
    (tmp_path / "headless" / "journal.jsonl").write_text("")

    with pytest.raises(WrongUse, match=sentence):
        command_line(["compare", *(argument.format(tmp=tmp_path) for argument in arguments)])

    assert not (tmp_path / "none").exists()
