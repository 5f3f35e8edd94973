"""A real training at a fixed pace, into the named sinks, which prints its number of updates and its cost.

python faulty_trainer.py RUN_DIR UPDATES [--fork] [--clock] [--hurry] SINK...
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from faulty_sinks import PickySink, SlowSink

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env
from esper_telemetry.events import UpdateEnd

PER_SECOND = 20.0
AT_UPDATE = 40
"""When the process forks, or its clock jumps."""


def main() -> None:
    run_dir, updates, *rest = sys.argv[1:]
    flags, uris = [word for word in rest if word.startswith("--")], [word for word in rest if not word.startswith("--")]
    torch.set_num_threads(1)
    trainer = PPO(make_env("CartPole-v1", num_envs=4), PPOConfig(num_steps=32, num_epochs=2, seed=1))
    started = [0.0, 0.0]
    patience = 60.0 if "picky" in uris else 10.0  # its records are compared without a repair
    patience = 0.1 if "--hurry" in flags else patience
    with Telemetry([made(uri) for uri in uris], run_dir=run_dir, close_timeout=patience) as telemetry:
        attach(telemetry, trainer)
        trainer.hooks.on(UpdateEnd, lambda _: paced(trainer, telemetry, flags, Path(os.environ["UPDATES_FILE"]), started))
        trainer.learn(int(updates) * 128)
        wall, cpu = time.perf_counter() - started[0], time.thread_time() - started[1]
        print(json.dumps({"updates": trainer.updates, "wall": wall, "cpu": cpu}), flush=True)


def made(uri: str) -> Any:
    return {"slow": SlowSink(), "picky": PickySink()}.get(uri, uri)


def paced(trainer: PPO, telemetry: Telemetry, flags: list[str], counter: Path, started: list[float]) -> None:
    """Wait until the update is due, and write the number of updates to the counter."""
    if not started[0]:
        started[:] = [time.perf_counter(), time.thread_time()]
    draft = counter.with_suffix(".new")
    draft.write_text(str(trainer.updates))
    draft.replace(counter)  # a process that is killed here leaves the previous number
    if trainer.updates == AT_UPDATE:
        if "--fork" in flags:
            forked(telemetry)
        if "--clock" in flags:
            real = time.time
            time.time = lambda: real() - 3600.0  # an hour back, as after a correction
    ahead = started[0] + (trainer.updates - 1) / PER_SECOND - time.perf_counter()
    time.sleep(max(0.0, ahead))


def forked(telemetry: Telemetry) -> None:
    """A forked copy of the process that uses telemetry as if it were its own, and exits."""
    if (pid := os.fork()) == 0:
        telemetry.log({"my/child": 1.0})
        telemetry.flush(env_step=10**9)
        telemetry.close()
        os._exit(0)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
