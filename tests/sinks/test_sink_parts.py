import enum
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sink_runs import EVERY, HISTOGRAM, METRICS, record, run_info

from esper_telemetry.core.metric import family_name
from esper_telemetry.core.record import Histogram, MetricInfo
from esper_telemetry.delivery.status import replay_command
from esper_telemetry.sinks import MLflowSink, Sink, TensorBoardSink, WandbSink, as_sink
from esper_telemetry.sinks.layout import Chart, by_tag, flattened, midpoints, sections, trimmed, with_at_most
from esper_telemetry.sinks.mlflow.mlflow_run import LegalNames, legal
from esper_telemetry.sinks.pages import metric_description, run_readme


@pytest.mark.parametrize(("share", "value"), [(0.0, 0.0), (0.25, 1.0), (0.5, 1.5), (0.75, 2.0), (1.0, 3.0)])
def test_quantiles_are_linear_within_a_bin(share: float, value: float) -> None:
    """Counts 1, 2, 1 between 0, 1, 2, 3: half of four is in the middle of the second bin."""
    assert HISTOGRAM.quantile(share) == value


def test_an_empty_histogram_has_no_quantile() -> None:
    assert Histogram((0.0, 1.0), (0.0,)).quantile(0.5) is None


def test_bins_are_joined_until_they_fit() -> None:
    """Three bins in at most two: the first two are joined, the last stays alone."""
    assert with_at_most(2, HISTOGRAM) == Histogram((0.0, 2.0, 3.0), (3.0, 1.0))
    assert with_at_most(3, HISTOGRAM) is HISTOGRAM
    assert midpoints(HISTOGRAM) == [0.5, 1.5, 2.5]


def test_a_histogram_never_takes_the_name_of_a_scalar() -> None:
    assert set(by_tag(record(1, {"a/b": 1.0}, {"a/b": HISTOGRAM, "c": HISTOGRAM}))) == {"a/b_hist", "c"}


def test_charts_hold_what_belongs_together_in_one_unit() -> None:
    keys = ["policy/kl", "policy/kl_max", "policy/head/slot/kl", "policy/head/op/kl", "episode/return_mean", "my/key"]

    dashboard = {section.question: section.charts for section in sections(keys, run_info())}

    assert dashboard == {
        "Is it learning?": (Chart("episode/return_mean [return]", ("episode/return_mean",)),),
        "Is the policy moving too far?": (
            Chart("policy/kl [nats]", ("policy/kl", "policy/kl_max")),
            Chart("policy/head/*/kl [nats]", ("policy/head/op/kl", "policy/head/slot/kl")),
        ),
        "Your own: my": (Chart("my/key", ("my/key",)),),
    }


@pytest.mark.parametrize(
    ("family", "question", "first"),
    [
        ("policy", "Is the policy moving too far?", ["policy/kl", "policy/clip_frac", "policy/ess_frac_min"]),
        ("value", "Is the critic useful?", ["value/explained_variance", "value/r2", "value/bias_over_std"]),
        ("grad", "What dominates the gradient?", ["grad/interference/critic_share", "grad/actor/norm_preclip"]),
        ("lstm", "Does memory work?", ["lstm/reset_rate", "lstm/timescale/median", "lstm/c/rms"]),
    ],
)
def test_a_question_is_answered_by_headlines_first(family: str, question: str, first: list[str]) -> None:
    labels = {"{group}": "actor", "{part}": "c", "{gate}": "f", "{head}": "slot", "{pair}": "a"}
    keys = [key for key in EVERY if family_name(key) == family and "{layer}" not in key]
    for label, name in labels.items():
        keys = [key.replace(label, name) for key in keys]

    (section,) = sections(keys, run_info(metrics=EVERY))

    assert section.question == question
    assert [chart.keys for chart in section.charts[: len(first)]] == [(key,) for key in first]
    assert sorted(key for chart in section.charts for key in chart.keys) == sorted(keys)


def test_a_chart_is_called_what_its_numbers_are_called() -> None:
    keys = ["policy/kl", "policy/kl_max", "policy/kl_rev", "grad/actor/rms", "grad/critic/rms", "adv/participation", "adv/raw/pos_frac"]

    titles = {chart.keys: chart.title for section in sections(keys, run_info(metrics=EVERY)) for chart in section.charts}

    assert titles == {
        ("policy/kl",): "KL divergence of the update (policy/kl) [nats]",
        ("policy/kl_max", "policy/kl_rev"): "More of policy/kl [nats]",
        ("grad/actor/rms", "grad/critic/rms"): "Typical size of a group's gradient (grad/*/rms) [gradient norm/√parameters]",
        ("adv/participation",): "Effective share of the batch (adv/participation) [fraction]",
        ("adv/raw/pos_frac",): "Share above 0 of raw advantages (adv/raw/pos_frac) [fraction]",
    }


def test_leftovers_share_a_chart_only_from_one_bound_to_another() -> None:
    """`a` and `b` are between 0 and 1. `c` and `d` are unbounded above."""
    bounded, open_ended = MetricInfo("fraction", "?", low=0.0, high=1.0), MetricInfo("fraction", "?", low=0.0)
    metrics = {"my/a": bounded, "my/b": bounded, "my/c": open_ended, "my/d": open_ended}

    (section,) = sections(metrics, run_info(metrics=metrics))

    assert [chart.keys for chart in section.charts] == [("my/a", "my/b"), ("my/c",), ("my/d",)]
    assert section.charts[0].title == "my: a, b [fraction]"


def test_families_stand_at_the_places_that_their_declarations_say() -> None:
    """A plugin's families, such as `seed`, are placed between bundled ones; a user's own come last."""
    questions = [section.question for section in sections(["my/key", "perf/a", "seed/active", "obs/b"], run_info())]

    assert questions == ["Does the policy see anything change?", "Do seeds take root?", "Where does the time go?", "Your own: my"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("größe", "größe"),
        ("ar@100", "ar_100"),
        ("a//b", "a_b"),
        ("../x", "x"),
        ("/abs", "abs"),
        ("", "_"),
        ("k" * 300, "k" * 250),
    ],
)
def test_names_become_such_as_mlflow_takes(name: str, expected: str) -> None:
    assert legal(name) == expected


def test_two_names_never_become_one_and_the_way_back_is_kept() -> None:
    names = LegalNames()

    assert [names["a@b"], names["a%b"], names["a_b"], names["a@b"]] == ["a_b", "a_b_2", "a_b_3", "a_b"]
    assert names.changed == {"a_b": "a@b", "a_b_2": "a%b", "a_b_3": "a_b"}


class Kind(enum.Enum):
    FAST = 1


@dataclass
class Settings:
    clip: float
    path: Path


def test_settings_become_plain_values_by_dotted_path() -> None:
    config: dict[Any, Any] = {"ppo": Settings(0.2, Path("a/b")), "kind": Kind.FAST, "sizes": (64, 64), 3: None, "empty": {}}

    expected = {"ppo.clip": 0.2, "ppo.path": "a/b", "kind": "FAST", "sizes": "[64, 64]", "3": None, "empty": "{}"}
    assert flattened(config) == expected


def test_a_description_says_question_unit_and_bounds() -> None:
    assert (
        metric_description(METRICS["policy/kl"]) == "How far did the policy move? Unit: nats. Healthy: 0.002 to 0.02; Critical: &gt; 0.1."
    )


def test_the_page_of_a_run_cannot_be_broken_by_what_a_user_writes() -> None:
    page = run_readme(run_info(Path("/r"), name="<b>", notes="a|b\n# c", config={"a|b": "<script>"}))

    assert "<" not in page
    assert "| a\\|b | &lt;script> |" in page
    assert "\n# c" not in page


def test_empty_bins_at_both_ends_are_not_drawn() -> None:
    assert trimmed(Histogram((0.0, 1.0, 2.0, 3.0, 4.0), (0.0, 2.0, 0.0, 0.0))) == Histogram((1.0, 2.0), (2.0,))
    assert trimmed(Histogram((0.0, 1.0, 2.0, 3.0), (1.0, 0.0, 2.0))).counts == (1.0, 0.0, 2.0)
    assert trimmed(Histogram((0.0, 1.0), (0.0,))).counts == (0.0,)


@pytest.mark.parametrize("sink", [TensorBoardSink(), WandbSink(), MLflowSink()])
def test_the_command_that_shows_a_run_survives_a_shell(sink: Sink, tmp_path: Path) -> None:
    directory = tmp_path / "my runs (1)"
    place = getattr(sink, "place")(run_info(directory))  # noqa: B009  # an optional part of the protocol

    words = shlex.split(place.command)

    assert any(str(directory) in word for word in words)
    assert subprocess.run(["sh", "-nc", place.command], check=False).returncode == 0


@pytest.mark.parametrize(
    "uri",
    ["tensorboard:my logs", "wandb:walker?mode=offline", "mlflow?experiment=my+walk", "mlflow:http://host:5000", "prometheus:/a.prom"],
)
def test_the_command_that_sends_the_rest_means_the_same_sink(uri: str, tmp_path: Path) -> None:
    words = shlex.split(replay_command(tmp_path, as_sink(uri)))

    assert words[:4] == ["esper-telemetry", "replay", str(tmp_path), "--to"]
    assert as_sink(words[4]) == as_sink(uri)
