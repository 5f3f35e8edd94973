"""MLflow."""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.sinks.mlflow.mlflow_sink import MLflowSink as MLflowSink

__all__, __getattr__, __dir__ = lazy_names(__name__, {"esper_telemetry.sinks.mlflow.mlflow_sink": ("MLflowSink",)})
