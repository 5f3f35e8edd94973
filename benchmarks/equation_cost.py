"""Processor time of the equation checks in each sampled update, and peak memory.

python benchmarks/equation_cost.py --only ppo         # of ppo, recurrent_ppo, bundled
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapters
from results import Row, save

from esper_telemetry.journal.read import read_run


def measure_cost(trainer: str, *, worker: bool, save_rows: bool, updates: int = 2) -> None:
    """Print and save the processor time of the checks in each sampled update of a trainer, and peak memory."""
    import torch

    from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env
    from esper_telemetry.adapters.sb3 import TelemetryCallback
    from esper_telemetry.pipeline import channel
    from esper_telemetry.recording import probes, step_probe
    from esper_telemetry.updates import groups

    torch.set_num_threads(1)
    gc.disable()  # a full collection takes a fifth of a second, and could occur in any of the functions
    seconds: defaultdict[str, float] = defaultdict(float)

    def timed(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            result = function(*args, **options)
            seconds[label] += time.thread_time() - began
            return result

        return call

    # functions that run once per sampled update, because timing one that runs in every minibatch costs more than the function
    for owner, names in (
        (step_probe, ("begun_step",)),
        (step_probe.StepProbe, ("_prepare_loss", "_backward", "_optimizer_step", "_end")),
        (probes.ReplayProbe, ("_first_minibatch", "_used_advantages", "after_minibatches")),
    ):
        for name in names:
            setattr(owner, name, timed("training thread", getattr(owner, name)))
    for name in ("_before_update", "_after_update"):
        function = getattr(probes.ReplayProbe, name)
        setattr(probes.ReplayProbe, name, timed("training thread, rollout replayed or copied", function))
    packer = channel.MessagePacker
    setattr(packer, "pack", timed("training thread, updates packed for the worker", packer.pack))  # noqa: B010  # mypy

    def timed_checks(checks: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (timed("what a worker takes over", lambda check=one: [*check()]) for one in checks(*args))

    for module, name in ((groups, "equation_checks"), (groups, "step_checks")):  # imports of that module
        setattr(module, name, timed_checks(getattr(module, name)))
    with tempfile.TemporaryDirectory() as directory:
        telemetry = Telemetry([], run_dir=Path(directory) / "run", level="debug", offload=worker)
        with telemetry:
            if trainer == "bundled":
                source = PPO(make_env("CartPole-v1", num_envs=8), PPOConfig())
                attach(telemetry, source)
                source.learn(total_steps=updates * 8 * source.config.num_steps)
            else:
                model = getattr(adapters, trainer)()
                model.learn(updates * model.n_steps * model.n_envs, callback=TelemetryCallback(telemetry))
        count = len(read_run(Path(directory) / "run").records)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    beside = "with a worker" if worker else "in process"
    milliseconds = {label: f"{1000 * spent / count:.1f} ms" for label, spent in sorted(seconds.items())}
    figures = milliseconds | {"peak memory of the process": f"{peak:.0f} MB"}
    rows = [Row(f"{trainer}, {beside}: {label}", figure) for label, figure in figures.items()]
    print("\n".join(f"{row.what} {row.ours}" for row in rows), flush=True)
    if save_rows:
        save("equations", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["ppo", "recurrent_ppo", "bundled"], help="trainers")
    parser.add_argument("--save", action="store_true", help="put the figures into docs/benchmarks.json")
    options = parser.parse_args()
    for trainer in options.only:
        for worker in (False, True):
            if os.fork() == 0:  # the timed functions are replaced permanently
                measure_cost(trainer, worker=worker, save_rows=options.save)
                sys.exit()
            os.wait()


if __name__ == "__main__":
    main()
