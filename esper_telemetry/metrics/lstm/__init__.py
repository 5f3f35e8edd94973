"""Recurrent policies: size, gates, resets, age and staleness of what they remember."""

from esper_telemetry.metrics.lstm.ablation import MemoryUse, memory_use
from esper_telemetry.metrics.lstm.bptt import BpttStats, bptt_stats
from esper_telemetry.metrics.lstm.gates import (
    CellStats,
    GateGroups,
    Gates,
    GateStats,
    LSTMWeights,
    gate_stats,
    gates_between,
    lstm_gates,
    lstm_weights,
    timescales,
)
from esper_telemetry.metrics.lstm.growth import CellGrowth, bucket_width, cell_growth
from esper_telemetry.metrics.lstm.resets import ResetStats, reset_stats, state_ages
from esper_telemetry.metrics.lstm.staleness import FirstStaleness, Staleness, first_staleness, state_staleness
from esper_telemetry.metrics.lstm.states import StateSize, StateStats, state_size, state_stats

__all__ = [
    "BpttStats",
    "CellGrowth",
    "CellStats",
    "FirstStaleness",
    "GateGroups",
    "GateStats",
    "Gates",
    "LSTMWeights",
    "MemoryUse",
    "ResetStats",
    "Staleness",
    "StateSize",
    "StateStats",
    "bptt_stats",
    "bucket_width",
    "cell_growth",
    "first_staleness",
    "gate_stats",
    "gates_between",
    "lstm_gates",
    "lstm_weights",
    "memory_use",
    "reset_stats",
    "state_ages",
    "state_size",
    "state_staleness",
    "state_stats",
    "timescales",
]
