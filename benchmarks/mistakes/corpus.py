"""The programs of the corpus, read from the TOML files of this directory; README.md describes their fields."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
PROGRAMS: Final = HERE / "programs"
FILES: Final[Mapping[str, str]] = {
    "script": "script.py",
    "force": "script.py",
    "variant": "script.py",
    "loop": "script.py",
    "subclass": "sb3_program.py",
    "recurrent": "contrib_program.py",
    "masked": "contrib_program.py",
    "bundled": "bundled.py",
    "sb3": "library_program.py",
    "published": "library_program.py",
    "trl": "trl_program.py",
    "reinforce": "policy_gradient.py",
    "a2c": "policy_gradient.py",
    "parts": "policy_gradient.py",
    "apart": "policy_gradient.py",
}
"""Correct programs, by the first part of a name."""

Edit = tuple[str, str]
"""A piece of a program that occurs once, and its replacement."""


@dataclass(frozen=True)
class Task:
    """An environment, with a budget and settings with which the correct programs learn.

    Attributes:
        env: Gymnasium id.
        steps: environment steps of a run.
        settings: with `script.py`'s names, with underscores.
    """

    env: str
    steps: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def continuous(self) -> bool:
        """True if actions are numbers."""
        return self.env in ("InvertedPendulum-v5", "Hopper-v5", "Pendulum-v1", "LunarLanderContinuous-v3")


@dataclass(frozen=True)
class Program:
    """A program with at most one mistake.

    Attributes:
        name: unique; its first part names the trainer.
        trainer: script, loop, subclass, recurrent, masked, bundled, sb3 or trl.
        kind: wrong, correct, variant (correct, with a harmless change), or published (settings).
        base: file of the correct program.
        edits: changes to that file.
        args: options of a short run.
        quantities: equations that may be named. The mistake is in the first; the others see the same numbers.
        words: regular expression that a correct description of the mistake matches.
        follows: further equations that do not hold because of the mistake.
        listed: the mistake is in the package's table of mistakes; otherwise only a wrong name counts.
        same_weights: the mistake shows in a run but does not change what is trained.
        task: of a long run, which shows whether the mistake does harm.
        causes: alarms and remarks that name the mistake in a long run.
        settings: of a long run, in addition to the task's.
        wrapper: mistake of the environment.
        family: of related mistakes, which share a half.
        source: link to the mistake in a public program, or to the published settings.
    """

    name: str
    trainer: str
    base: str
    kind: str = "wrong"
    edits: tuple[Edit, ...] = ()
    args: tuple[str, ...] = ()
    quantities: tuple[str, ...] = ()
    words: str = ""
    follows: tuple[str, ...] = ()
    listed: bool = True
    same_weights: bool = False
    task: Task | None = None
    causes: frozenset[str] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict)
    wrapper: str = ""
    family: str = ""
    source: str = ""

    @property
    def half(self) -> str:
        """`tuning` or `test`, by a hash of the family."""
        return "test" if hashlib.sha256(self.family.encode()).digest()[0] % 2 else "tuning"

    @property
    def twin(self) -> str:
        """Name of the correct program with the same trainer and task."""
        return f"correct-{self.trainer}-{self.env.split('/')[-1]}"

    @property
    def env(self) -> str:
        """Environment of a long run."""
        assert self.task is not None
        return self.task.env

    def text(self) -> str:
        """Return the program.

        Raises:
            ValueError: a piece to replace does not occur exactly once.
        """
        return edited((PROGRAMS / self.base).read_text(), self.edits)

    def correct(self) -> Program:
        """Return the correct twin of a short run."""
        args = self.args[: self.args.index("--fault")] if "--fault" in self.args else self.args
        kept = {edit for name in ("continuous", "own_loop", *STYLES) for edit in CHANGES[name]}
        edits = tuple(edit for edit in self.edits if edit in kept)
        return replace(self, name=f"{self.name} (correct)", kind="correct", edits=edits, args=args)

    def long_run(self, seed: int) -> tuple[str, list[str]]:
        """Return the text and the options of the program for a long run on its task."""
        assert self.task is not None
        words = ["--env-id", self.env, "--total-timesteps", str(self.task.steps), "--seed", str(seed)]
        if self.base == "library_program.py":
            return self.text(), [*words, "--trainer", self.trainer, "--settings", json.dumps(dict(self.settings))]
        text = edited(self.text(), CHANGES[f"{self.trainer}_on_task"])
        if self.trainer == "script":
            return text, [*words, *_options({**self.task.settings, **self.settings})]
        settings = {SB3_NAMES[name]: value for name, value in self.task.settings.items()} | dict(self.settings)
        return text, [*words, "--settings", json.dumps(settings)]


def edited(text: str, edits: tuple[Edit, ...]) -> str:
    """Return a text with every edit made; raise ValueError if a piece does not occur exactly once."""
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{text.count(old)} places with {old!r}")
        text = text.replace(old, new)
    return text


def _options(settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        option = name.replace("_", "-")
        yield from (f"--{'' if value else 'no-'}{option}",) if isinstance(value, bool) else (f"--{option}", str(value))


def _edits(entry: Mapping[str, Any]) -> tuple[Edit, ...]:
    """Return the edits of an entry: the hunks of its `diff`, and its pairs of `edits`."""
    hunks = [hunk.splitlines(keepends=True) for hunk in entry["diff"].split("@@\n")] if "diff" in entry else []
    sides = [tuple("".join(line[1:] or line for line in hunk if line[0] in f" \n{sign}") for sign in "-+") for hunk in hunks]
    return tuple((old, new) for old, new in (*sides, *entry.get("edits", ())))


def _read(file: str) -> dict[str, Any]:
    return tomllib.loads((HERE / file).read_text(encoding="utf-8"))


_CHANGES, _TASKS = _read("changes.toml"), _read("tasks.toml")
CHANGES: Final = {name: _edits(change) for name, change in _CHANGES["changes"].items()}
TASKS: Final = {name: Task(**task) for name, task in _TASKS["tasks"].items()}
FORCE: Final = ("--env-id", "tasks:Push-v0")
SECTION_ARGS: Final[Mapping[str, tuple[str, ...]]] = {
    "force": FORCE,
    "recurrent": ("--kind", "recurrent"),
    "masked": ("--kind", "masked"),
    "a2c": ("--critic",),
    "apart": ("--critic",),
}
STYLES: Final = ("parts", "apart")
"""Sections whose programs are written in another style: with the change of that name."""
LIBRARY_BASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "sb3": {"n_envs": 8, "n_steps": 64, "batch_size": 128, "n_epochs": 6, "learning_rate": 1e-3, "gamma": 0.98},
    "bundled": {"num_envs": 8, "num_steps": 64, "learning_rate": 1e-3, "gamma": 0.98, "gae_lambda": 0.9},
}
SB3_NAMES: Final = {
    "num_envs": "n_envs",
    "num_steps": "n_steps",
    "gamma": "gamma",
    "ent_coef": "ent_coef",
    "update_epochs": "n_epochs",
}


def _program(section: str, key: str, entry: Mapping[str, Any], *quantities: str) -> Program:
    """Return the program of an entry."""
    task = TASKS.get(entry.get("task", ""))
    trainer = {"force": "script", "variant": "script", "published": "sb3"}.get(section, section)
    library = section == "sb3" or (section == "bundled" and task is not None)
    continuous = section == "force" or (trainer == "script" and task is not None and task.continuous)
    causes = {cause for quantity in quantities for cause in _TASKS["causes"][quantity]}
    return Program(
        f"{section}-{key}",
        trainer,
        "library_program.py" if library else FILES[section],
        kind="variant" if section == "variant" else "wrong",
        edits=(
            *(CHANGES["continuous"] if continuous else ()),
            *(CHANGES[section] if section in STYLES else ()),
            *_edits(entry),
        ),
        args=(entry["env"], "--fault", key) if "env" in entry else (*SECTION_ARGS.get(section, ()), *entry.get("args", ())),
        quantities=quantities,
        words=entry.get("words", ""),
        follows=tuple(entry.get("follows", ())),
        listed=entry.get("listed", True),
        same_weights=entry.get("same_weights", False),
        task=task,
        causes=frozenset(causes | set(entry.get("causes", ()))),
        settings={**(LIBRARY_BASES[section] if library else {}), **entry.get("settings", {})},
        wrapper=entry.get("wrapper", ""),
        family=entry.get("family", f"{section}-{key}" if section == "variant" else key),
        source=entry.get("source", ""),
    )


def _all() -> Iterator[Program]:
    named = {}
    for section, quantities in (_read("script.toml") | _read("trainers.toml")).items():
        for quantity, entries in quantities.items():
            for key, entry in entries.items():
                program = _program(section, key, entry, quantity, *entry.get("also_in", ()))
                named[program.name] = program
                yield program
    for section in ("sb3", "bundled", "variant"):
        yield from (_program(section, key, entry) for key, entry in _TASKS[section].items())
    for key in _CHANGES["loop"]["of_script"]:
        program = named[f"script-{key}"]
        yield replace(program, name=f"loop-{key}", trainer="loop", task=None, edits=(*program.edits, *CHANGES["own_loop"]))
    for key, entry in _TASKS["published"].items():
        name, label = f"published-{key}", key.split("-")[0]
        source = _TASKS["sources"].get(key, _TASKS["sources"][label])
        task = Task(entry["env"], entry["steps"])
        settings = entry["settings"]
        yield Program(name, "sb3", "library_program.py", "published", task=task, settings=settings, family=name, source=source)


def _twins(programs: list[Program]) -> Iterator[Program]:
    """Yield the correct twins of the wrong programs that have a task."""
    twins: dict[str, Program] = {}
    for program in programs:
        if program.kind == "wrong" and program.task and program.twin not in twins:
            edits = CHANGES["continuous"] if program.trainer == "script" and program.task.continuous else ()
            twins[program.twin] = Program(
                program.twin,
                program.trainer,
                program.base,
                "correct",
                edits=edits,
                task=program.task,
                settings=LIBRARY_BASES.get(program.trainer, {}),
                family=program.family,
            )
    yield from twins.values()


_PROGRAMS: Final = list(_all())
EQUATION_PROGRAMS: Final = tuple(one for one in _PROGRAMS if one.quantities)
"""Programs with a wrong equation, for short runs."""
TASK_PROGRAMS: Final = tuple(one for one in (*_PROGRAMS, *_twins(_PROGRAMS)) if one.task)
"""Programs for long runs: wrong ones, harmless variants, published settings, and correct twins."""
BY_NAME: Final = {one.name: one for one in (*_PROGRAMS, *TASK_PROGRAMS)}


def language_programs() -> tuple[Program, ...]:
    """Return the faults of language models; they need TRL."""
    from esper_telemetry.lab.language_models import FAULTS

    return tuple(
        Program(
            f"trl-{fault.name}",
            "trl",
            FILES["trl"],
            args=("--fault", fault.name),
            words=_TASKS["language"][fault.name],
            causes=frozenset(fault.named_by),
            family=fault.name,
        )
        for fault in FAULTS
    )
