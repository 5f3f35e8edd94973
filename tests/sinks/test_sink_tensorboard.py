import resource
from pathlib import Path
from typing import Any

import pytest
from sink_runs import EVERY, HISTOGRAM, record, run_info
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from esper_telemetry.core.record import RunStatus
from esper_telemetry.sinks import TensorBoardSink
from esper_telemetry.testing.sinks import delivered


def read(directory: Path) -> Any:
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    return accumulator.Reload()


def scalars(directory: Path, tag: str) -> list[Any]:
    return [(event.step, event.value) for event in read(directory).Scalars(tag)]


@pytest.fixture
def sink(tmp_path: Path) -> TensorBoardSink:
    opened = TensorBoardSink()
    opened.open(run_info(tmp_path))
    return opened


def test_histograms_keep_our_bins(sink: TensorBoardSink, tmp_path: Path) -> None:
    """Midpoints 0.5, 1.5, 2.5 with counts 1, 2, 1: the sum is 6, the sum of squares 0.25 + 4.5 + 6.25."""
    sink.write([record(1, {}, {"policy/ratio": HISTOGRAM})])

    events = read(tmp_path / "tensorboard").Histograms("policy/ratio")[0].histogram_value
    assert list(events.bucket_limit) == [1.0, 2.0, 3.0]
    assert list(events.bucket) == [1.0, 2.0, 1.0]
    assert (events.min, events.max, events.num, events.sum, events.sum_squares) == (0.0, 3.0, 4.0, 6.0, 11.0)


def test_the_dashboard_grows_with_the_keys_that_appear(sink: TensorBoardSink, tmp_path: Path) -> None:
    sink.write([record(1, {"policy/kl": 0.1}), record(2, {"policy/kl": 0.1}), record(3)])

    layouts = read(tmp_path / "tensorboard").Tensors("custom_scalars__config__")
    last = layout_pb2.Layout.FromString(layouts[-1].tensor_proto.string_val[0])
    assert len(layouts) == 2
    assert [category.title for category in last.category] == ["Is it learning?", "Is the policy moving too far?"]
    assert [list(chart.multiline.tag) for chart in last.category[1].chart] == [["^policy/kl$"]]


def test_a_page_says_what_the_run_is(sink: TensorBoardSink, tmp_path: Path) -> None:
    page = read(tmp_path / "tensorboard").Tensors("run")[0].tensor_proto.string_val[0].decode()

    assert page.startswith("# cartpole")
    assert "| ppo.clip | 0.2 |" in page
    assert str(tmp_path) in page


@pytest.mark.parametrize(("status", "expected"), [(RunStatus.FINISHED, 1), (RunStatus.FAILED, 2)])
def test_settings_and_status_stand_in_the_table_of_runs(sink: TensorBoardSink, tmp_path: Path, status: RunStatus, expected: int) -> None:
    sink.write([record(1)])
    sink.close(status)

    events = read(tmp_path / "tensorboard")
    content = {
        tag: plugin_data_pb2.HParamsPluginData.FromString(events.SummaryMetadata(tag).plugin_data.content)
        for tag in (hparams.SESSION_START_INFO_TAG, hparams.SESSION_END_INFO_TAG, hparams.EXPERIMENT_TAG)
    }
    start = content[hparams.SESSION_START_INFO_TAG].session_start_info.hparams
    assert start["ppo.clip"].number_value == 0.2
    assert start["ppo.anneal"].bool_value is True
    assert start["ppo.sizes"].string_value == "[64, 64]"
    assert content[hparams.SESSION_END_INFO_TAG].session_end_info.status == expected
    outcomes = [metric.name.tag for metric in content[hparams.EXPERIMENT_TAG].experiment.metric_infos]
    assert outcomes == ["episode/return_mean", "policy/kl"]


def test_the_table_of_runs_begins_with_what_runs_differ_in_and_with_returns(tmp_path: Path) -> None:
    """TensorBoard shows five of the settings marked as differing, and the first outcome."""
    config = {"ppo": {"learning_rate": 1e-3, "clip": 0.2}, "env": "a"}
    delivered(TensorBoardSink(), run_info(tmp_path, metrics=EVERY, config=config), [])

    directory = tmp_path / "tensorboard"
    content = read(directory).SummaryMetadata(hparams.EXPERIMENT_TAG).plugin_data.content
    table = plugin_data_pb2.HParamsPluginData.FromString(content).experiment
    assert {info.name for info in table.hparam_infos if info.differs} == {"ppo.learning_rate", "env"}
    outcomes = [metric.name.tag for metric in table.metric_infos]
    assert outcomes[:3] == ["episode/return_mean_100", "episode/length_mean", "eval/return_mean"]
    assert {"policy/kl", "value/explained_variance"} <= set(outcomes)
    assert [path.is_file() for path in directory.iterdir()] == [True]


def test_a_run_that_goes_on_does_so_in_a_new_file_without_gaps_or_doubles(tmp_path: Path) -> None:
    """The second part begins with update 2, which the first part wrote but did not acknowledge."""
    for part in ([record(1), record(2)], [record(2), record(3)]):
        sink = TensorBoardSink()
        sink.open(run_info(tmp_path))
        sink.write(part)

    assert [step for step, _ in scalars(tmp_path / "tensorboard", "policy/kl")] == [1000, 2000, 3000]


def test_in_a_directory_of_somebody_elses_nothing_of_theirs_is_touched(tmp_path: Path) -> None:
    """The existing file is at step 5000 when ours starts, and starts again, at step 1000."""
    theirs = EventFileWriter(str(tmp_path))
    theirs.add_event(Event(step=5000, summary=Summary(value=[Summary.Value(tag="theirs", simple_value=1.0)])))
    theirs.close()
    for _ in range(2):
        delivered(TensorBoardSink(tmp_path), run_info(), [record(1)])

    assert scalars(tmp_path, "theirs") == [(5000, 1.0)]
    assert scalars(tmp_path, "policy/kl")[0] == (1000, pytest.approx(0.01))
    assert read(tmp_path).Tags()["tensors"] == ["run"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_a_full_disk_the_same_records_go_into_a_new_file(sink: TensorBoardSink, tmp_path: Path) -> None:
    sink.write([record(1)])
    size = max(path.stat().st_size for path in (tmp_path / "tensorboard").iterdir())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(OSError):
            sink.write([record(2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    sink.write([record(2)])
    assert scalars(tmp_path / "tensorboard", "policy/kl")[-1] == (2000, pytest.approx(0.02))


def test_the_place_is_the_directory_the_command_and_the_pages(tmp_path: Path) -> None:
    directory = tmp_path / "tensorboard"

    place = TensorBoardSink().place(run_info(tmp_path))
    assert place[:2] == (str(directory), f"tensorboard --logdir {tmp_path}")
    assert [address.partition("#")[2].partition("&")[0] for _, address in place.pages] == [*("timeseries", "custom_scalars", "text")]


def test_the_first_family_of_tags_repeats_the_headlines_and_the_return_is_the_first(tmp_path: Path) -> None:
    """`doctor` ignores these tags, because they repeat numbers of other tags."""
    run = run_info(tmp_path, metrics=EVERY)
    sink = TensorBoardSink()
    sink.open(run)
    values = {"policy/kl": 0.5, "adv/grad_corr": 0.1, "episode/return_mean_100": 7.0, "alarm/active": 0.0}
    sink.write([record(1, values)])

    tags = sorted(read(tmp_path / "tensorboard").Tags()["scalars"])
    assert tags[:3] == [*("0_overview/01 return", "0_overview/02 alarms", "0_overview/04 KL")]
    assert scalars(tmp_path / "tensorboard", tags[0]) == [(1000, 7.0)]
    metadata = read(tmp_path / "tensorboard").SummaryMetadata(tags[2])
    assert "KL divergence" in metadata.summary_description
    assert sink.stored(run).rows[1].keys() == {*values, "axis/update", "axis/gradient_step"}
    layout = read(tmp_path / "tensorboard").Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    assert b"0_overview" not in layout


def test_each_alarm_has_a_chart_of_its_own_with_its_name(tmp_path: Path) -> None:
    """TensorBoard draws all lines of a run in one colour. The 3 keys of `max_keys` are used up when the alarms are raised."""
    sink = TensorBoardSink(max_keys=3)
    sink.open(run_info(tmp_path, metrics=EVERY))
    taken = {"policy/kl": 0.1, "policy/clip_frac": 0.1, "value/r2": 0.1}
    sink.write([record(1, taken), record(2, {**taken, "alarm/policy/kl_spike": 1.0, "alarm/grad/explode": 0.5})])

    layouts = read(tmp_path / "tensorboard").Tensors("custom_scalars__config__")
    first = layout_pb2.Layout.FromString(layouts[-1].tensor_proto.string_val[0]).category[0]
    assert first.title == "Is anything wrong?"
    assert sorted(chart.title for chart in first.chart) == ["grad/explode [severity]", "policy/kl_spike [severity]"]
