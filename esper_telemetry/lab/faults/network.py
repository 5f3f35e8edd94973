"""Faults of the network: units, gates, heads and what is trained."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from esper_telemetry.lab.faults import changes, needs
from esper_telemetry.lab.faults.fault import Fault, Undo
from esper_telemetry.ppo.trainer import PPO


def dead_units(trainer: PPO, dose: float) -> Undo:
    """Sets the biases of the layers that read the observations."""
    layers = [reader.layers[0] for reader in needs.first_layers(trainer)]
    return changes.together(*(changes.parameter(layer.get_parameter("bias"), dose) for layer in layers))


def forget_bias(trainer: PPO, dose: float) -> Undo:
    """Sets the biases of all forget gates; torch packs gates as [i, f, g, o] and adds two biases."""
    undos = []
    for core in trainer.policy.cores().values():
        gate = slice(core.size, 2 * core.size)
        for cell in core.cells if core.kind == "lstm" else ():
            undos.append(changes.parameter(cell.get_parameter("bias_ih_l0"), dose, gate))
            undos.append(changes.parameter(cell.get_parameter("bias_hh_l0"), 0.0, gate))
    return changes.together(*undos)


def frozen_trunk(trainer: PPO, dose: float) -> Undo:
    """Takes the hidden layers of the actor out of training; they are still declared to be in it."""
    return changes.frozen(trainer.policy.actor.parameters())


def detached_head(trainer: PPO, dose: float) -> Undo:
    """Detaches the scores of the last head."""
    last = list(trainer.policy.heads)[-1]

    def scores(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: score.detach() if name == last else score for name, score in found.items()}

    return changes.steps(trainer, scores=scores)


def saturated_head(trainer: PPO, dose: float) -> Undo:
    """Adds to the bias of the first choice of the last categorical head."""
    name = [name for name, spec in trainer.env.action_specs.items() if spec.kind == "categorical"][-1]
    bias = trainer.policy.head(name).linear.bias
    return changes.parameter(bias, float(bias[0].detach()) + dose, slice(0, 1))


NETWORK = (
    Fault(
        "dead_relu",
        "The biases of the first layer are -10: no unit of it responds any more.",
        dead_units,
        ("repr/dormant", "grad/vanish"),
        bound=0,
        dose=-10,
        doses=(-1000, -0.1),
        needs=(needs.relu,),
    ),
    Fault(
        "forget_m10",
        "The biases of the forget gates are -10: nothing is remembered.",
        forget_bias,
        ("lstm/forget_closed",),
        bound=0,
        family="forget",
        dose=-10,
        doses=(-100, -0.5),
        needs=(needs.lstm,),
    ),
    Fault(
        "forget_p10",
        "The biases of the forget gates are 10: nothing is forgotten within an episode.",
        forget_bias,
        ("lstm/forget_open",),
        bound=0,
        family="forget",
        dose=10,
        doses=(0.5, 100),
        needs=(needs.lstm,),
    ),
    Fault(
        "frozen_trunk",
        "The actor's hidden layers are out of training, and said to be in it.",
        frozen_trunk,
        ("grad/missing_group", "opt/stalled_weights"),
        bound=0,
    ),
    Fault(
        "detached_head",
        "The loss does not reach one head.",
        detached_head,
        ("grad/missing_group", "policy/dead_head"),
        bound=0,
        needs=(needs.several_heads,),
        core=False,
    ),
    Fault(
        "saturated_head",
        "One head of several always chooses the same, with probability 1.",
        saturated_head,
        ("policy/entropy_collapse", "policy/dead_head", "grad/vanish"),
        bound=5,
        dose=50,
        doses=(1, 1000),
        needs=(needs.several_heads, needs.choices),
        core=False,
    ),
)
