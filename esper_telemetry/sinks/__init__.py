"""Sinks: destinations of records, with the methods `open(run)`, `write(records)` and `close(status)`.

Importing this package imports no backend. A sink reports a missing package when it is constructed, and connects when it is
opened.

    TensorBoardSink()                     RUN_DIR/tensorboard
    WandbSink(project="walker")           online with a key, else offline in RUN_DIR/wandb
    WandbSink(run=wandb.run)              joins a run that is open
    MLflowSink()                          sqlite:///RUN_DIR/mlflow.db
    PrometheusSink()                      latest values in RUN_DIR/metrics.prom, or on a local port
    ConsoleSink()                         a line per update
    print                                 any callable is a sink
    "wandb:walker?mode=offline"           a URI of any of these
"""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.sinks.console import ConsoleSink as ConsoleSink
    from esper_telemetry.sinks.mlflow.mlflow_sink import MLflowSink as MLflowSink
    from esper_telemetry.sinks.prometheus import PrometheusSink as PrometheusSink
    from esper_telemetry.sinks.sink_protocol import DeadClientError as DeadClientError
    from esper_telemetry.sinks.sink_protocol import FunctionSink as FunctionSink
    from esper_telemetry.sinks.sink_protocol import PermanentSinkError as PermanentSinkError
    from esper_telemetry.sinks.sink_protocol import Place as Place
    from esper_telemetry.sinks.sink_protocol import PoisonRecordError as PoisonRecordError
    from esper_telemetry.sinks.sink_protocol import Sink as Sink
    from esper_telemetry.sinks.sink_registry import SinkLike as SinkLike
    from esper_telemetry.sinks.sink_registry import as_sink as as_sink
    from esper_telemetry.sinks.sink_registry import as_sinks as as_sinks
    from esper_telemetry.sinks.sink_registry import known_sinks as known_sinks
    from esper_telemetry.sinks.sink_registry import register_sink as register_sink
    from esper_telemetry.sinks.sink_registry import sink_from_uri as sink_from_uri
    from esper_telemetry.sinks.tensorboard.tensorboard_sink import TensorBoardSink as TensorBoardSink
    from esper_telemetry.sinks.wandb.wandb_sink import WandbSink as WandbSink

__all__, __getattr__, __dir__ = lazy_names(__name__)
