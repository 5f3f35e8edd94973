"""Records and run descriptions as TensorBoard's protocol buffers; needs TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.histogram_pb2 import HistogramProto
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalars
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.scalar import metadata as scalars
from tensorboard.plugins.text import metadata as text

from esper_telemetry.core.record import Axes, Histogram, MetricInfo, RunInfo, RunStatus
from esper_telemetry.sinks.layout import Section, flattened, midpoints
from esper_telemetry.sinks.pages import metric_description

STATUSES = {RunStatus.FINISHED: api_pb2.STATUS_SUCCESS}

COMPARED = frozenset(["env", "env_id", "learning_rate", "lr", "policy", "seed", "total_steps", "total_timesteps"])
"""Settings in which runs usually differ: TensorBoard's table shows these first and the others on request."""


def event(axes: Axes, values: Iterable[Any]) -> Any:
    """Return one event with all the values, at the environment step of the axes."""
    return Event(wall_time=axes.wall_time, step=axes.env_step, summary=Summary(value=list(values)))


def note(wall_time: float, value: Any) -> Any:
    """Return one event without a step."""
    return Event(wall_time=wall_time, summary=Summary(value=[value]))


def restart(axes: Axes) -> Any:
    """Return the event that discards the contents of older files at or after this step."""
    return Event(wall_time=axes.wall_time, step=axes.env_step, session_log=SessionLog(status=SessionLog.START))


def scalar(tag: str, number: float, info: SummaryMetadata | None = None) -> Any:
    """Return a scalar, with its description if it is the first of its tag."""
    return Summary.Value(tag=tag, simple_value=number, metadata=info)


def scalar_info(tag: str, described: MetricInfo | None) -> Any:
    """Return the description of a scalar; without the data class, TensorBoard's default loader drops the scalar."""
    info = scalars.create_summary_metadata(tag, metric_description(described) if described else "")
    info.data_class = DATA_CLASS_SCALAR
    return info


def histogram(tag: str, counted: Histogram) -> Any:
    """Return a histogram with the record's bins; its moments are computed from the midpoints of the bins."""
    middles = midpoints(counted)
    weighted = list(zip(middles, counted.counts, strict=True))
    proto = HistogramProto(
        min=counted.edges[0],
        max=counted.edges[-1],
        num=sum(counted.counts),
        sum=sum(middle * count for middle, count in weighted),
        sum_squares=sum(middle * middle * count for middle, count in weighted),
        bucket_limit=counted.edges[1:],
        bucket=counted.counts,
    )
    return Summary.Value(tag=tag, histo=proto)


def markdown(tag: str, content: str) -> Any:
    """Return a page of text."""
    return Summary.Value(tag=tag, metadata=text.create_summary_metadata(tag, ""), tensor=_string(content.encode()))


def layout(sections: Iterable[Section]) -> Any:
    """Return the custom-scalars dashboard; only the first two sections start open."""
    categories = [
        layout_pb2.Category(
            title=section.question,
            closed=position > 1,
            chart=[
                layout_pb2.Chart(
                    title=title,
                    # The plugin reads tags as regular expressions; keys contain no special characters.
                    multiline=layout_pb2.MultilineChartContent(tag=[f"^{key}$" for key in keys]),
                )
                for title, keys in section.charts
            ],
        )
        for position, section in enumerate(sections)
    ]
    content = layout_pb2.Layout(category=categories).SerializeToString()
    info = custom_scalars.create_summary_metadata()
    return Summary.Value(tag=custom_scalars.CONFIG_SUMMARY_TAG, metadata=info, tensor=_string(content))


def session_start(run: RunInfo) -> Any:
    """Return the settings of the run, for the table that compares runs."""
    start = plugin_data_pb2.SessionStartInfo(group_name=run.run_id, start_time_secs=run.started)
    for name, value in flattened(run.config).items():
        slot = start.hparams[name]
        if isinstance(value, bool):
            slot.bool_value = value
        elif isinstance(value, int | float):
            slot.number_value = value
        else:
            slot.string_value = str(value)
    data = plugin_data_pb2.HParamsPluginData(session_start_info=start)
    return _hparams(hparams.SESSION_START_INFO_TAG, data)


def session_end(status: RunStatus, wall_time: float) -> Any:
    """Return the status of a run that has ended, for the table that compares runs."""
    end = plugin_data_pb2.SessionEndInfo(status=STATUSES.get(status, api_pb2.STATUS_FAILURE), end_time_secs=wall_time)
    return _hparams(hparams.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end))


def experiment(run: RunInfo, outcomes: Iterable[str]) -> Any:
    """Return the columns of the table that compares runs: settings and outcomes."""
    kinds: Mapping[type, Any] = {bool: api_pb2.DATA_TYPE_BOOL, int: api_pb2.DATA_TYPE_FLOAT64, float: api_pb2.DATA_TYPE_FLOAT64}
    columns = [
        api_pb2.HParamInfo(name=name, type=kinds.get(type(value), api_pb2.DATA_TYPE_STRING), differs=name.rpartition(".")[2] in COMPARED)
        for name, value in flattened(run.config).items()
    ]
    metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in outcomes]
    data = api_pb2.Experiment(hparam_infos=columns, metric_infos=metrics, time_created_secs=run.started)
    return _hparams(hparams.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=data))


def _string(content: bytes) -> Any:
    return TensorProto(dtype=DT_STRING, string_val=[content], tensor_shape=TensorShapeProto())


def _hparams(tag: str, data: Any) -> Any:
    return Summary.Value(tag=tag, metadata=hparams.create_summary_metadata(data), tensor=hparams.NULL_TENSOR)
