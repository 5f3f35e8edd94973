"""What trainer and process agree on."""

from __future__ import annotations

from typing import Final

from esper_telemetry.layout import Values
from esper_telemetry.logged import Keys, Numbers
from esper_telemetry.offload.vocabulary import Vocabulary
from esper_telemetry.record import Axes, Level, SinkLag
from esper_telemetry.summary import snapshot
from esper_telemetry.writer import Delivery, Measured

RING_BYTES: Final = 256 << 20
"""Of the memory that may be shared: several times what may wait. A small run uses the first megabytes alone."""

AWAITED: Final = ("sync", "end")
"""What the trainer waits for: the answer comes through the pipe though it says nothing."""

WORDS: Final = Vocabulary((Measured, Axes, Delivery, SinkLag, Values, Numbers, *snapshot.KINDS), (*Level, Keys))
"""What updates are told in."""
