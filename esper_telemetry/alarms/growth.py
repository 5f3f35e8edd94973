"""What goes wrong where networks grow: seeds, and the controller that grows them."""

from __future__ import annotations

from esper_telemetry.alarms.kind import AlarmType

SEEDS = (
    AlarmType(
        "seed/explode",
        ("seed/exploding", "seed/exploding_frac", "seed/grad/norm"),
        "The gradient of a seed is many times its clip limit, or those of many seeds are ten times theirs.",
        "Lower the learning rate of seeds, or blend them more slowly; the watchdog gives back weights that are lost (env/rollbacks).",
    ),
    AlarmType(
        "seed/vanish",
        ("seed/vanishing", "seed/grad/norm"),
        "Seeds get next to no gradient at all.",
        "See why in seed/cause: nothing reaches them, or they lose it; a host that has learned everything leaves nothing either.",
    ),
    AlarmType(
        "seed/dormant",
        ("seed/cause/{cause}", "seed/intensity_ratio", "seed/alpha"),
        "Seeds learn next to nothing because the loss hardly reaches them; this is not a host that is merely faster.",
        "Raise the weight with which they count (seed/alpha), or prune them: a seed without effect costs its parameters.",
    ),
    AlarmType(
        "seed/stalled",
        ("seed/germinated", "seed/gate/{gate}/pass_frac", "seed/gate/{gate}/asked", "seed/stage/{stage}"),
        "Seeds are germinated and none of them gets as far as having an effect.",
        "See which gate refuses them; train them for longer before they are advanced, or use permissive gates.",
    ),
    AlarmType(
        "seed/reward_hacking",
        ("env/score", "episode/return_mean", "env/reward/{component}"),
        "The controller earns as much as ever while the hosts that it grows become worse.",
        "See which component of the reward pays (env/reward), and weigh it less; pay for the end of the episode (reward sparse).",
    ),
)
