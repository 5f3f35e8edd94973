"""RecurrentPPO of sb3-contrib in eight environments, the third of which observes NaN after 40 steps."""

import sys
from functools import partial
from pathlib import Path

from sb3_contrib import RecurrentPPO
from stable_baselines3.common.vec_env import DummyVecEnv

sys.path.insert(0, str(Path(__file__).parents[2] / "session"))
from broken_env import Broken

env = DummyVecEnv([partial(Broken, "observation", place) for place in range(8)])
settings = {"n_steps": 16, "batch_size": 64, "n_epochs": 1, "device": "cpu", "seed": 3}
RecurrentPPO("MlpLstmPolicy", env, policy_kwargs={"lstm_hidden_size": 8}, **settings).learn(1024)
