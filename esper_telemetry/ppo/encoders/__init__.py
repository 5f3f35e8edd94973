"""Encoders: from observations that are more than a vector to one row of features."""

from esper_telemetry.ppo.encoders.image import ImageEncoder as ImageEncoder
from esper_telemetry.ppo.encoders.observation import Encoded as Encoded
from esper_telemetry.ppo.encoders.observation import ObservationEncoder as ObservationEncoder

__all__ = ["Encoded", "ImageEncoder", "ObservationEncoder"]
