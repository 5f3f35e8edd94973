"""Programs with one mistake each, as edits of the healthy programs in `equation_programs/`.

A `Bug` says which equation a reviewer would name, and which words the name of the mistake has. Those from public history have a link.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = Path(__file__).parent / "equation_programs"

Edit = tuple[str, str]
"""A piece of a program that occurs once, and what replaces it."""


@dataclass(frozen=True)
class Bug:
    """A program with one mistake.

    Attributes:
        name: unique.
        base: file of the healthy program.
        quantities: equations that may be named: the first is where the mistake is; the others see the same numbers.
        words: regular expression that the name or the sentence of the right hypothesis matches.
        edits: what turns the healthy program into this one.
        args: options of the program.
        source: link, where it is a mistake of public history.
        follows: equations that truly do not hold besides, because of the mistake.
        listed: the hypothesis is in the table of hypotheses; of others only a wrong name counts.
        same_weights: the mistake shows in a run, but does not change what is trained in it.
    """

    name: str
    base: str
    quantities: tuple[str, ...]
    words: str
    edits: tuple[Edit, ...] = ()
    args: tuple[str, ...] = ()
    source: str = ""
    follows: tuple[str, ...] = ()
    listed: bool = True
    same_weights: bool = field(default=False)

    def text(self) -> str:
        """Return the program.

        Raises:
            ValueError: a piece to replace does not occur exactly once.
        """
        return edited((PROGRAMS / self.base).read_text(), self.edits)


def edited(text: str, edits: tuple[Edit, ...]) -> str:
    """Return a text with every edit made; raise ValueError where a piece does not occur exactly once."""
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{text.count(old)} places with {old!r}")
        text = text.replace(old, new)
    return text


CONTINUOUS: tuple[Edit, ...] = (
    ("import Categorical", "import Normal"),
    ("num_outputs = int(envs.single_action_space.n)", "num_outputs = action_shape[0]"),
    (
        "        self.critic = mlp(obs_size, 1)\n",
        "        self.critic = mlp(obs_size, 1)\n        self.actor_logstd = nn.Parameter(torch.full((1, num_actions), -0.3))\n",
    ),
    ("        logits = 3 * self.actor(x)\n", "        mean = self.actor(x)\n"),
    ("probs = Categorical(logits=logits)", "probs = Normal(mean, self.actor_logstd.expand_as(mean).exp())"),
    ("probs.log_prob(action), probs.entropy(), self", "probs.log_prob(action).sum(1), probs.entropy().sum(1), self"),
)
"""`script.py` with a normal distribution."""

FORCE = ("--env-id", "tasks:Push-v0")
ISSUES = "https://github.com/{}/issues/{}"
SB3 = "https://github.com/DLR-RM/stable-baselines3/issues/{}"

ADV, RET, NORM, LOGP, VAL = "advantages", "returns", "normalized", "log_probs", "values"
ACT, TRANS, PG, VF, ENT = "actions", "transitions", "policy_loss", "value_loss", "entropy"
GRAD, OPT, MB, SCHED = "gradient", "optimizer", "minibatches", "schedule"


def script(name: str, quantities: tuple[str, ...], words: str, *edits: Edit, **more: object) -> Bug:
    """Return a bug of the script."""
    return Bug(f"script-{name}", "script.py", quantities, words, edits, **more)  # type: ignore[arg-type]


def force(name: str, quantities: tuple[str, ...], words: str, *edits: Edit, **more: object) -> Bug:
    """Return a bug of the script with a normal distribution."""
    return Bug(f"force-{name}", "script.py", quantities, words, (*CONTINUOUS, *edits), FORCE, **more)  # type: ignore[arg-type]


def sb3(name: str, quantities: tuple[str, ...], words: str, *edits: Edit, **more: object) -> Bug:
    """Return a bug of the subclass of Stable-Baselines3's PPO."""
    return Bug(f"sb3-{name}", "sb3_program.py", quantities, words, edits, **more)  # type: ignore[arg-type]


def bundled(name: str, env: str, quantities: tuple[str, ...], words: str, **more: object) -> Bug:
    """Return a fault of the bundled trainer."""
    return Bug(f"bundled-{name}", "bundled.py", quantities, words, (), (env, "--fault", name), **more)  # type: ignore[arg-type]


def contrib(kind: str, name: str, quantities: tuple[str, ...], words: str, *edits: Edit, **more: object) -> Bug:
    """Return a bug of RecurrentPPO or MaskablePPO."""
    return Bug(f"{kind}-{name}", "contrib_program.py", quantities, words, edits, ("--kind", kind), **more)  # type: ignore[arg-type]
