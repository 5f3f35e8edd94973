"""What the families of metrics are about, for readers who meet them for the first time."""

from __future__ import annotations

from typing import NamedTuple


class Chapter(NamedTuple):
    """One family: what people call it, what it is about, and where one looks first."""

    title: str
    about: str
    first: tuple[str, ...] = ()


CHAPTERS = {
    "alarm": Chapter(
        "Alarms",
        "What the detectors say of the run: one number per kind of alarm while it is raised. The alarm itself has the words: what has "
        "happened, since when, and what to try.",
        ("alarm/active",),
    ),
    "episode": Chapter(
        "Episodes",
        "What the policy earned in the episodes that it finished while training: the only numbers here that say whether the "
        "task is being "
        "solved. They come late: most faults show in the other families many updates before the return falls.",
        ("episode/return_mean_100", "episode/length_mean"),
    ),
    "policy": Chapter(
        "Policy",
        "PPO collects a rollout with one policy and then takes many small steps away from it. The probability ratio of an action is how "
        "likely it is now over how likely it was when it was taken; its logarithm is the log-ratio. As long as ratios stay "
        "near 1 the data "
        "still describe the policy; clipping stops samples whose ratio leaves 1 ± clip. KL divergence sums up how far the policy moved, "
        "entropy how undecided it still is.",
        ("policy/kl", "policy/clip_frac", "policy/ess_frac_min", "policy/entropy_norm", "policy/surrogate_gain"),
    ),
    "value": Chapter(
        "Critic",
        "The critic predicts the return from each state. Explained variance compares its errors with the variation of the returns: 1 is "
        "perfect, 0 no better than a constant, below 0 worse. A critic that is wrong by a constant still explains all "
        "variance: read R² and "
        "the bias beside it.",
        ("value/explained_variance", "value/r2", "value/bias_over_std", "value/loss_norm"),
    ),
    "grad": Chapter(
        "Gradients",
        "How strongly, where and in which direction the losses pull at the network. Norms are taken before and after "
        "clipping; groups are "
        "the parts that the trainer declares: actor, critic, what both share, single heads. Numbers that need whole gradients "
        "are measured in "
        "one update of several (`telemetry/sample_every`).",
        ("grad/interference/critic_share", "grad/{group}/norm_preclip", "grad/clip/coef", "grad/health"),
    ),
    "opt": Chapter(
        "Optimizer",
        "What Adam makes of the gradients: how large its steps are next to the weights, and whether its memory of past "
        "gradients still fits. "
        "Measured at one optimizer step of a sampled update.",
        ("opt/update_to_weight", "opt/stable_rms", "opt/lr"),
    ),
    "integrity": Chapter(
        "Integrity",
        "Identities that hold exactly in a correct trainer, whatever the task. They need no history and give no false alarms: "
        "anything but "
        "about 0 is a bug, even while the return still rises.",
        ("integrity/ratio_init", "integrity/gae_identity", "integrity/adv_norm"),
    ),
    "numerics": Chapter("Numerics", "Whether every number is finite.", ("numerics/nonfinite",)),
    "buffer": Chapter("Buffer", "Whether the update learns from data of the policy that it changes."),
    "adv": Chapter(
        "Advantages",
        "An advantage says how much better an action turned out than the critic expected: it is the learning signal of the "
        "policy. `adv/raw` "
        "is what was estimated, `adv/norm` what multiplies the ratio after normalisation.",
        ("adv/raw/std", "adv/participation"),
    ),
    "obs": Chapter("Observations", "Whether what the policy sees changes at all."),
    "ret": Chapter("Returns", "The targets of the critic: advantages plus values.", ("ret/mean", "ret/std")),
    "reward": Chapter(
        "Rewards", "What the environment pays per step, before any normaliser.", ("reward/mean", "reward/std")
    ),
    "norm": Chapter("Normalisers", "Whether the running statistics that scale observations and returns have settled."),
    "loss": Chapter(
        "Losses",
        "What the optimizer minimises. In PPO losses say little by themselves: the policy loss hovers around 0 by "
        "construction and the value "
        "loss scales with the returns. Read `policy/surrogate_gain` and `value/loss_norm` instead.",
    ),
    "repr": Chapter(
        "Representation",
        "Whether the features that the heads read can still tell states apart. Growing norms, then falling rank, then dormant "
        "units precede "
        "many collapses of the policy (Moalla 2024).",
        ("repr/dormant_frac", "repr/effective_rank"),
    ),
    "lstm": Chapter(
        "Memory",
        "What a recurrent policy remembers: sizes of its hidden state h and cell state c, how far its gates i (write), f "
        "(keep) and o (read) "
        "are open, how long it remembers, and whether memory begins anew where episodes do.",
        ("lstm/reset_rate", "lstm/timescale/median", "lstm/{part}/rms"),
    ),
    "seed": Chapter(
        "Seeds",
        "Modules that a controller grows into networks while these are trained (`docs/morphogenesis.md`): where they are in their lives, "
        "how strongly the loss pulls at them, what gates say of them, and what accuracy they are worth, told by switching them off.",
        ("seed/active", "seed/exploding", "seed/contribution"),
    ),
    "host": Chapter(
        "Hosts",
        "The networks that seeds grow into: how well they do, and how much larger they have become.",
        ("host/accuracy", "host/growth_ratio"),
    ),
    "env": Chapter(
        "Growing",
        "What the environments pay for, what the controller does in them, and what hosts are worth in the end.",
        ("env/score", "env/final_accuracy"),
    ),
    "eval": Chapter("Evaluation", "Whole episodes with the likeliest actions, between updates.", ("eval/return_mean",)),
    "train": Chapter("Progress", "Where training stands and how fast it is.", ("train/env_steps_per_second",)),
    "perf": Chapter(
        "Time", "Where the time of an update goes, and what telemetry takes of it.", ("perf/telemetry_frac",)
    ),
    "telemetry": Chapter("Telemetry", "Whether measuring itself works.", ("telemetry/errors", "telemetry/dropped")),
    "{key}": Chapter(
        "Histories",
        "The headline metrics, gradient norms and what alarms read also exist with these endings, which compare a value with "
        "those of earlier "
        "updates: `policy/kl/ema` is the running average of `policy/kl`. Positive quantities are compared as logarithms, so "
        "that a fall to a "
        "tenth counts as much as a rise to the tenfold.",
    ),
}
"""By the first segment of a key, in the order of the page."""


def chapter_of(key: str) -> Chapter:
    """The family of a key; of one that is not known its bare name."""
    family = key.partition("/")[0]
    return CHAPTERS.get(family) or Chapter(family.replace("_", " ").capitalize(), "")
