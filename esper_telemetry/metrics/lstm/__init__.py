"""Memory of a recurrent policy: states, gates and sequences."""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names

if TYPE_CHECKING:
    from esper_telemetry.metrics.lstm.gates import CellStats as CellStats
    from esper_telemetry.metrics.lstm.gates import GateGroups as GateGroups
    from esper_telemetry.metrics.lstm.gates import Gates as Gates
    from esper_telemetry.metrics.lstm.gates import GateStats as GateStats
    from esper_telemetry.metrics.lstm.gates import GRUGates as GRUGates
    from esper_telemetry.metrics.lstm.gates import GRUWeights as GRUWeights
    from esper_telemetry.metrics.lstm.gates import LSTMWeights as LSTMWeights
    from esper_telemetry.metrics.lstm.gates import gate_stats as gate_stats
    from esper_telemetry.metrics.lstm.gates import gates_between as gates_between
    from esper_telemetry.metrics.lstm.gates import gru_gates as gru_gates
    from esper_telemetry.metrics.lstm.gates import gru_weights as gru_weights
    from esper_telemetry.metrics.lstm.gates import lstm_gates as lstm_gates
    from esper_telemetry.metrics.lstm.gates import lstm_weights as lstm_weights
    from esper_telemetry.metrics.lstm.gates import timescales as timescales
    from esper_telemetry.metrics.lstm.sequences import BpttStats as BpttStats
    from esper_telemetry.metrics.lstm.sequences import CellGrowth as CellGrowth
    from esper_telemetry.metrics.lstm.sequences import MemoryUse as MemoryUse
    from esper_telemetry.metrics.lstm.sequences import bptt_stats as bptt_stats
    from esper_telemetry.metrics.lstm.sequences import bucket_width as bucket_width
    from esper_telemetry.metrics.lstm.sequences import cell_growth as cell_growth
    from esper_telemetry.metrics.lstm.sequences import memory_use as memory_use
    from esper_telemetry.metrics.lstm.states import FirstStaleness as FirstStaleness
    from esper_telemetry.metrics.lstm.states import ResetStats as ResetStats
    from esper_telemetry.metrics.lstm.states import Staleness as Staleness
    from esper_telemetry.metrics.lstm.states import StateSize as StateSize
    from esper_telemetry.metrics.lstm.states import StateStats as StateStats
    from esper_telemetry.metrics.lstm.states import first_staleness as first_staleness
    from esper_telemetry.metrics.lstm.states import reset_stats as reset_stats
    from esper_telemetry.metrics.lstm.states import state_ages as state_ages
    from esper_telemetry.metrics.lstm.states import state_size as state_size
    from esper_telemetry.metrics.lstm.states import state_staleness as state_staleness
    from esper_telemetry.metrics.lstm.states import state_stats as state_stats

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "esper_telemetry.metrics.lstm.gates": (
            "CellStats",
            "GRUGates",
            "GRUWeights",
            "GateGroups",
            "GateStats",
            "Gates",
            "LSTMWeights",
            "gate_stats",
            "gates_between",
            "gru_gates",
            "gru_weights",
            "lstm_gates",
            "lstm_weights",
            "timescales",
        ),
        "esper_telemetry.metrics.lstm.sequences": (
            "BpttStats",
            "CellGrowth",
            "MemoryUse",
            "bptt_stats",
            "bucket_width",
            "cell_growth",
            "memory_use",
        ),
        "esper_telemetry.metrics.lstm.states": (
            "FirstStaleness",
            "ResetStats",
            "Staleness",
            "StateSize",
            "StateStats",
            "first_staleness",
            "reset_stats",
            "state_ages",
            "state_size",
            "state_staleness",
            "state_stats",
        ),
    },
)
