"""Memory that a minibatch frees is reused by the next one."""

import ctypes
import subprocess
import sys

import pytest

from esper_telemetry.ppo.trainer import MAX_HEAP_BLOCK_BYTES

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library gives memory back as it likes"),
]

FEW = 40_000
"""Pages of 4 KB: 160 MB, although twenty times 32 MB are needed."""
SCRIPT = """
import ctypes, resource
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: pages are small ones, wherever this runs
import torch
from esper_telemetry.ppo.trainer import retain_freed_memory
{first}
def minibatch():
    return [torch.ones({numbers}) for _ in range(4)]
minibatch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    minibatch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages_fetched(first: str) -> int:
    """Return the page faults of a new process that frees and allocates four blocks twenty times."""
    script = SCRIPT.format(first=first, numbers=MAX_HEAP_BLOCK_BYTES // 16)
    run = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    return int(run.stdout)


def test_what_is_freed_is_there_again() -> None:
    """Without the setting, whether memory returns to the system depends on what follows a block in memory, so on the process."""
    assert any(pages_fetched("") > FEW for _ in range(20))
    assert pages_fetched("retain_freed_memory()") < FEW


def test_training_keeps_it() -> None:
    train = """
from esper_telemetry import PPO, PPOConfig, make_env
PPO(make_env("CartPole-v1", num_envs=2), PPOConfig(num_steps=8, num_minibatches=2)).learn(16)
"""
    assert pages_fetched(train) < FEW
