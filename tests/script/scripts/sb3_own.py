"""A script that reports through its own callback, inside another callback."""

from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CallbackList

from esper_telemetry import Telemetry
from esper_telemetry.adapters.sb3 import TelemetryCallback

with Telemetry(run_dir="own", offload=False) as telemetry:
    callback = CallbackList([TelemetryCallback(telemetry)])
    PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=64, n_epochs=1, device="cpu").learn(128, callback=[callback])
