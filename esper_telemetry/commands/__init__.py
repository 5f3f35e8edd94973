"""What the commands of the command line do, one file each; each returns the exit code."""

from esper_telemetry.commands.compress import compress
from esper_telemetry.commands.diagnose import diagnose
from esper_telemetry.commands.doctor import doctor
from esper_telemetry.commands.metrics import metrics
from esper_telemetry.commands.replay import replay
from esper_telemetry.commands.train import train

__all__ = ["compress", "diagnose", "doctor", "metrics", "replay", "train"]
