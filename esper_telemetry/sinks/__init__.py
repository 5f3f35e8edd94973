"""Sinks: where records go. `open(run)`, `write(records)`, `close(status)`, and nothing else.

Importing this package imports no backend; a sink reports a missing package when it is made, and connects when it is
opened.

    TensorBoardSink()                     RUN_DIR/tensorboard
    WandbSink(project="walker")           online with a key, else offline in RUN_DIR/wandb
    WandbSink(run=wandb.run)              joins a run that is open
    MLflowSink()                          sqlite:///RUN_DIR/mlflow.db
    PrometheusSink()                      last values in RUN_DIR/metrics.prom, or on a port of this machine
    ConsoleSink()                         a line per update
    print                                 any callable is a sink
    "wandb:walker?mode=offline"           any of these as text
"""

from esper_telemetry.sinks.console import ConsoleSink
from esper_telemetry.sinks.function import FunctionSink
from esper_telemetry.sinks.mlflow import MLflowSink
from esper_telemetry.sinks.prometheus import PrometheusSink
from esper_telemetry.sinks.protocol import DeadClientError, PermanentSinkError, Place, PoisonRecordError, Sink
from esper_telemetry.sinks.tensorboard import TensorBoardSink
from esper_telemetry.sinks.uri import SinkLike, as_sink, as_sinks, known_sinks, register_sink, sink_from_uri
from esper_telemetry.sinks.wandb import WandbSink

__all__ = [
    "ConsoleSink",
    "DeadClientError",
    "FunctionSink",
    "MLflowSink",
    "PermanentSinkError",
    "Place",
    "PoisonRecordError",
    "PrometheusSink",
    "Sink",
    "SinkLike",
    "TensorBoardSink",
    "WandbSink",
    "as_sink",
    "as_sinks",
    "known_sinks",
    "register_sink",
    "sink_from_uri",
]
