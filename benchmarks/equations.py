"""Programs with one mistake each, and healthy programs: what the equation checks of a run say about them.

    python benchmarks/equations.py bugs                    # every mistake; half an hour
    python benchmarks/equations.py bugs --only sb3-adv     # those whose name contains this
    python benchmarks/equations.py healthy --seeds 2
    python benchmarks/equations.py cost --only ppo         # processor time of the checks; of ppo, recurrent_ppo, bundled
    python benchmarks/equations.py sound                   # do the mistakes change what is trained? without telemetry

Each program runs in a process of its own with one torch thread, with the checks in every update (level debug). `bugs` shows for each
mistake the equations that failed, the hypotheses that were named, and whether they are right; `healthy` shows how often each equation was
checked and the largest error as a fraction of its tolerance.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import re
import resource
import runpy
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import adapters
import equation_bugs_loop as loop
import equation_bugs_rollout as rollout
import equation_bugs_sb3 as sb3
import equation_bugs_update as update
from equation_bugs import CONTINUOUS, PROGRAMS, Bug, edited
from equation_healthy import HEALTHY, Healthy
from results import Row, save

from esper_telemetry.alarms.rules.equation_alarms import RATE_KEY
from esper_telemetry.core.facts import Facts
from esper_telemetry.equations.equation import EQUATION_KEY, Equation, equations
from esper_telemetry.equations.schedules import RateHistory
from esper_telemetry.journal.read import read_run

BUGS: tuple[Bug, ...] = (
    *rollout.SCRIPT_TARGETS,
    *rollout.SCRIPT_COLLECTING,
    *update.SCRIPT_LOSSES,
    *update.SCRIPT_STEPS,
    *sb3.SB3_TARGETS,
    *sb3.SB3_COLLECTING,
    *sb3.SB3_LOSSES,
    *sb3.SB3_STEPS,
    *sb3.BUNDLED,
    *loop.LOOP,
)
TIME_LIMIT_SECONDS = 300
SEGMENTS: Mapping[str, str] = {
    "normalized": "^normali",
    "values": "^values$",
    "advantages": "^advantages$",
    "actions": "^(actions|executed_actions)$",
    "gradient": "^(gradient|clipping)$",
    "transitions": "^(transitions|stored_rewards)$",
    "policy_loss": "^(policy_loss|log_ratios|total_loss)$",
    "value_loss": "^(value_loss|total_loss)$",
    "entropy": "^(entropy_loss|total_loss)$",
}
"""Regular expressions for the names of the equations of a quantity, where its own name is none."""


@dataclass
class Reading:
    """Result of the equations in a journal.

    Attributes:
        status: how the process ended: "" is well.
        checked: number of records with an error of each equation.
        largest: largest error of each, over its tolerance.
        named: for each equation that failed, the names of the hypotheses in each such record.
        says: the sentences of these hypotheses.
        variants: equations of which every failing record names a published variant.
        alarms: types and instances of the raised alarms, of `integrity/`.
        updates: number of records.
        weights: digest of what was trained.
        seconds: wall time of the process.
    """

    status: str = ""
    checked: dict[str, int] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    named: dict[str, list[list[str]]] = field(default_factory=dict)
    says: dict[str, str] = field(default_factory=dict)
    variants: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    updates: int = 0
    weights: str = ""
    seconds: float = 0.0


@dataclass
class Verdict:
    """The judgement of what was said about a bug.

    Attributes:
        result: right, set (the right one beside others), unnamed, missed, wrong name, wrong equation, or crashed.
        detail: the equations and the names.
    """

    bug: str
    result: str
    detail: str
    seed: int
    reading: Reading


def run_program(text: str, base: str, args: Sequence[str], seed: int, *, telemetry: bool = True) -> Reading:
    """Run a program in a process of its own and return what its journal says."""
    with tempfile.TemporaryDirectory(prefix="equations-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        script, run_dir = directory / base, directory / "run"
        script.write_text(text)
        command = [str(script), *args, "--seed", str(seed)]
        if "Telemetry(" in text:
            command += ["--run-dir", str(run_dir)]
        elif telemetry:
            command = ["run", "--level", "debug", "--run-dir", str(run_dir), *command]
        started = time.perf_counter()
        code = forked(command, directory)
        seconds = time.perf_counter() - started
        output, errors = ((directory / stream).read_text() for stream in ("stdout", "stderr"))
        digest = re.search(r"^weights (\w+)", output, re.MULTILINE)
        lines = (errors.strip() or "no message").splitlines()
        reading = read_journal(run_dir) if (run_dir / "journal.jsonl").exists() else Reading()
        reading.status = f"exit {code}: {lines[-1]}" if code else "; ".join(one for one in lines if " failed (" in one)
        reading.seconds, reading.weights = seconds, digest[1] if digest else ""
        return reading


def forked(command: Sequence[str], directory: Path, limit_seconds: float = TIME_LIMIT_SECONDS) -> int:
    """Run a command of `esper-telemetry`, or a script, in a fork of this process, which has imported torch; return the exit code.

    The fork has one core, so that the records are made in it and not in a worker process: that saves the import of torch in each.
    """
    pid = os.fork()
    if pid:
        deadline = time.monotonic() + limit_seconds
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return -signal.SIGKILL
    code = 1
    atexit._clear()  # those of this process, the removal of the directory among them
    try:
        for number, stream in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(directory / stream, os.O_WRONLY | os.O_CREAT), number)
        os.chdir(directory)
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[os.getpid() % len(os.sched_getaffinity(0))]})
        sys.path[:0] = [str(directory), str(PROGRAMS)]
        if command[0] == "run":
            from esper_telemetry.cli.main import main as esper_telemetry

            esper_telemetry(list(command))
        else:
            sys.argv = list(command)
            runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else bool(end.code)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def preload() -> None:
    """Import what programs import, torch's compiler among it, which the first optimizer imports: it takes half the time of a program."""
    import sb3_contrib
    import stable_baselines3
    import torch
    import torch._dynamo

    import esper_telemetry.adapters.sb3
    import esper_telemetry.adapters.script.listener
    import esper_telemetry.cli.main
    import esper_telemetry.lab.faults.runs
    import esper_telemetry.pipeline.run_recorder

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    del sb3_contrib, stable_baselines3, esper_telemetry


def read_journal(run_dir: Path) -> Reading:
    """Return what a journal says of the equations."""
    run, declared, reading = read_run(run_dir), equations(), Reading()
    precision = run.info.facts.get("precision")
    reading.updates = len(run.records)
    explained: dict[str, list[bool]] = defaultdict(list)
    for record in run.records:
        for name, equation in declared.items():
            error = record.values.get(EQUATION_KEY + name)
            if error is None:
                continue
            reading.checked[name] = reading.checked.get(name, 0) + 1
            share = error / equation.tolerance_at(precision)
            reading.largest[name] = max(share, reading.largest.get(name, 0.0))
            if share > 1:
                explanations = equation.explanations(record.values)
                reading.named.setdefault(name, []).append([one.name for one in explanations])
                reading.says |= {f"{name}_{one.name}": one.says for one in explanations}
                explained[name].append(any(one.variant for one in explanations))
    rates = RateHistory(Facts.of(run.info.facts))
    for record in run.records:
        rates.add(record.axes.env_step, record.values.get(RATE_KEY))
    schedule = rates.result()
    if schedule is not None:
        name, share = schedule.equation.name, (schedule.error or 0.0) / schedule.tolerance
        reading.checked[name], reading.largest[name] = len(run.records), share
        if share > 1:
            reading.named[name] = [[one.name for one in schedule.hypotheses]]
            reading.says |= {f"{name}_{one.name}": one.says for one in schedule.hypotheses}
            explained[name].append(any(one.variant for one in schedule.hypotheses))
    reading.variants = [name for name, flags in explained.items() if all(flags)]
    reading.alarms = sorted(
        {f"{alarm.type}: {alarm.text}" for alarm in run.alarms if alarm.type.startswith("integrity/")}
    )
    return reading


def judge(bug: Bug, reading: Reading) -> tuple[str, str]:
    """Return the result and its detail."""
    if reading.status and not reading.updates:
        return "crashed", reading.status
    declared = equations()
    quantities = dict.fromkeys([*bug.quantities, *("gradient" for one in bug.quantities if one in LOSSES)])
    allowed = [name for quantity in quantities for name in named_by(quantity, declared)]
    follows = [name for quantity in bug.follows for name in named_by(quantity, declared)]
    failing = reading.named
    detail = "; ".join(f"{name}: {common_text(records)}" for name, records in failing.items())
    if reading.status:
        detail += f" [{reading.status}]"
    surplus = [name for name in failing if name not in {*allowed, *follows} and name not in reading.variants]
    targets = [name for name in allowed if name in failing]
    if surplus:
        return "wrong equation", detail
    if not targets:
        return "missed", detail or f"checked: {', '.join(reading.checked) or 'nothing'}"
    return max((judge_names(bug, name, failing[name], reading) for name in targets), key=RANKS.index), detail


LOSSES = ("normalized", "policy_loss", "value_loss", "entropy")
"""Quantities whose mistakes also show as a gradient of another loss."""

RANKS = ("wrong name", "unnamed", "set", "right")


def judge_names(bug: Bug, name: str, records: Sequence[Sequence[str]], reading: Reading) -> str:
    """Return the result for one equation that failed and was allowed to."""
    named = [set(one) for one in records if one]
    if not named:
        return "unnamed"
    common = set.intersection(*named) or set.union(*named)
    fitting = {one for one in common if re.search(bug.words, f"{one} {reading.says[f'{name}_{one}']}", re.IGNORECASE)}
    if not fitting:
        return "wrong name"
    return "right" if fitting == common else "set"


def named_by(quantity: str, declared: Mapping[str, Equation]) -> list[str]:
    """Return the equations of a quantity."""
    return [name for name in declared if re.search(SEGMENTS.get(quantity, quantity), name)]


def common_text(records: Sequence[Sequence[str]]) -> str:
    """Return the names of each record, the commonest set first."""
    counts = Counter(" or ".join(one) or "no name" for one in records)
    return ", ".join(f"{text} ({count})" for text, count in counts.most_common())


def run_bugs(bugs: Iterable[Bug], seeds: int) -> list[Verdict]:
    """Run programs one after the other and print a line for each."""
    verdicts = []
    for bug in bugs:
        for seed in range(1, seeds + 1):
            reading = run_program(bug.text(), bug.base, (*bug.args, *short(bug)), seed)
            result, detail = judge(bug, reading)
            verdicts.append(Verdict(bug.name, result, detail, seed, reading))
            mark = "" if bug.listed else " (not in the table)"
            print(f"{bug.name:32}{bug.quantities[0]:14}{result + mark:30}{detail}", flush=True)
    return verdicts


def short(bug: Bug) -> tuple[str, ...]:
    """Return the options of a run of three updates; those of actions need five, and those of schedules more."""
    if bug.quantities[0] == "schedule" and bug.base == "script.py":
        return ("--total-timesteps", "6144")
    long = bug.quantities[0] in ("actions", "schedule") or bug.base == "bundled.py"
    return () if long else ("--total-timesteps", "1200")


def summarise(verdicts: Sequence[Verdict]) -> None:
    """Print a table of results by equation."""
    by_name = {bug.name: bug for bug in BUGS}
    columns = ("right", "set", "unnamed", "missed", "wrong name", "wrong equation", "crashed")
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        bug = by_name[verdict.bug]
        for group in (bug.quantities[0], "all") if bug.listed else ("others",):
            rows[group][verdict.result] += 1
    print("\n| equation | programs | " + " | ".join(columns) + " |\n|" + "---|" * (2 + len(columns)))
    for group, counts in sorted(rows.items(), key=lambda row: (row[0] in ("all", "others"), row[0])):
        print(f"| {group} | {counts.total()} | " + " | ".join(str(counts[column]) for column in columns) + " |")


def run_healthy(programs: Iterable[Healthy], seeds: int) -> list[dict[str, Any]]:
    """Run healthy programs and print a line for each."""
    results: list[dict[str, Any]] = []
    for program in programs:
        for seed in range(1, seeds + 1):
            try:
                text = edited(program.path.read_text(), program.edits)
            except OSError as error:
                print(f"{program.name:40} left out: {error}")
                break
            reading = run_program(text, program.path.name, program.args, seed)
            wrong = sorted(set(reading.named) - set(reading.variants))
            results.append({"name": program.name, "seed": seed, **asdict(reading)})
            checked = ", ".join(f"{name} {count}" for name, count in reading.checked.items())
            worst = max(reading.largest.items(), key=lambda item: item[1], default=("nothing", 0.0))
            bad = f"  WRONG: {wrong} {[common_text(reading.named[one]) for one in wrong]} {reading.alarms}"
            print(
                f"{program.name:40}{reading.updates:4} updates; {checked or 'nothing checked'}; largest {worst[0]} {worst[1]:.2g}"
                + (f" variants {reading.variants}" if reading.variants else "")
                + (bad if wrong or reading.alarms else "")
                + (f" [{reading.status}]" if reading.status else ""),
                flush=True,
            )
    return results


def summarise_healthy(results: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of what was checked."""
    names = list(dict.fromkeys(name for one in results for name in one["checked"]))
    print("\n| equation | runs | checks | largest error / tolerance | runs in which it failed |\n|---|---|---|---|---|")
    for name in names:
        having = [one for one in results if name in one["checked"]]
        failed = sum(name in one["named"] and name not in one["variants"] for one in having)
        largest = max([one["largest"][name] for one in having if name not in one["variants"]], default=0.0)
        print(f"| {name} | {len(having)} | {sum(one['checked'][name] for one in having)} | {largest:.2g} | {failed} |")
    alarms = [f"{one['name']} seed {one['seed']}: {', '.join(one['alarms'])}" for one in results if one["alarms"]]
    print(
        f"\n{len(results)} runs, {sum(one['updates'] for one in results)} updates, {len(alarms)} runs with alarms of integrity/"
    )
    print("\n".join(alarms))


def check_soundness(bugs: Sequence[Bug]) -> list[str]:
    """Run programs without telemetry, print and return the bugs that crash or train the weights of the healthy program."""
    healthy: dict[Any, str] = {}

    def base_of(bug: Bug) -> tuple[str, tuple[tuple[str, str], ...], tuple[str, ...]]:
        if bug.edits[-len(loop.OWN_LOOP) :] == loop.OWN_LOOP:
            return bug.base, loop.OWN_LOOP, ()
        if bug.base == "bundled.py":
            return "bundled.py", (), bug.args[:1]
        edits = CONTINUOUS if bug.edits[: len(CONTINUOUS)] == CONTINUOUS else ()
        return bug.base, edits, bug.args

    def weights(base: str, edits: tuple[tuple[str, str], ...], args: tuple[str, ...]) -> Reading:
        return run_program(edited((PROGRAMS / base).read_text(), edits), base, args, 1, telemetry=False)

    for key in dict.fromkeys(map(base_of, bugs)):
        reading = weights(*key)
        assert reading.weights, f"{key} crashed: {reading.status}"
        healthy[key] = reading.weights
    unsound = []
    for bug in bugs:
        reading = weights(bug.base, bug.edits, bug.args)
        same = reading.weights == healthy[base_of(bug)]
        if not reading.weights or (same and not bug.same_weights):
            unsound.append(bug.name)
            print(f"{bug.name}: {'trains what the healthy program trains' if same else reading.status}", flush=True)
    print(f"{len(bugs)} programs, {len(unsound)} unsound")
    return unsound


def measure_cost(trainer: str, *, worker: bool, save_rows: bool, updates: int = 2) -> None:
    """Print, and save for the page, the processor time of the checks in each sampled update of a trainer, and peak memory."""
    import torch

    from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env
    from esper_telemetry.adapters.sb3 import TelemetryCallback
    from esper_telemetry.pipeline import channel
    from esper_telemetry.recording import probes, step_probe
    from esper_telemetry.updates import groups

    torch.set_num_threads(1)
    gc.disable()  # a full collection takes a fifth of a second, and would fall on any of the functions
    seconds: defaultdict[str, float] = defaultdict(float)

    def timed(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            result = function(*args, **options)
            seconds[label] += time.thread_time() - began
            return result

        return call

    # functions that run once per sampled update: to time one that runs in every minibatch costs more than it does
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
    parser.add_argument("what", choices=["bugs", "healthy", "cost", "sound"])
    parser.add_argument("--only", nargs="*", default=[], help="pieces of names")
    parser.add_argument("--after", help="only programs after this one")
    parser.add_argument("--every", type=int, default=1, help="only every such program")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for all readings")
    parser.add_argument("--save", action="store_true", help="put the figures of cost into docs/benchmarks.json")
    parser.add_argument("--cleanrl", type=Path, help="directory with CleanRL's ppo.py and ppo_continuous_action.py")
    options = parser.parse_args()
    preload()
    if options.what == "cost":
        for trainer in options.only or ("ppo", "recurrent_ppo", "bundled"):
            for worker in (False, True):
                if os.fork() == 0:  # the functions that are timed are replaced for good
                    measure_cost(trainer, worker=worker, save_rows=options.save)
                    sys.exit()
                os.wait()
        return

    def chosen(name: str) -> bool:
        return not options.only or any(piece in name for piece in options.only)

    bugs = [bug for bug in BUGS if chosen(bug.name)]
    first = 1 + [bug.name for bug in bugs].index(options.after) if options.after else 0
    bugs = bugs[first :: options.every]
    if options.what == "sound":
        sys.exit(bool(check_soundness(bugs)))
    results: list[Any]
    if options.what == "bugs":
        verdicts = run_bugs(bugs, options.seeds)
        summarise(verdicts)
        results = [asdict(verdict) for verdict in verdicts]
    else:
        programs = [*HEALTHY, *(Healthy.of_cleanrl(options.cleanrl) if options.cleanrl else ())]
        results = run_healthy([one for one in programs if chosen(one.name)][:: options.every], options.seeds)
        summarise_healthy(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
