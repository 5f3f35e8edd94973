"""Views of morphogenesis: the environments table, the detail of one environment, and parts of the anomaly strip; without torch.

Everything is read from the last event `growth`, whose columns are lists by environment; None is an unknown value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from esper_telemetry.lab.morphogenesis.kinds import SEVERE, Op, Stage
from esper_telemetry.views.panels import (
    ChartDeclaration,
    PanelDeclaration,
    StripDeclaration,
    StripItem,
    TableCell,
    TableDeclaration,
    TableView,
)
from esper_telemetry.views.run_parts import Judgement
from esper_telemetry.views.run_view import RunView
from esper_telemetry.views.watch.charts import bars
from esper_telemetry.views.watch.screens import STALENESS

EVENT: Final = "growth"
STAGES: Final = {
    Stage.GERMINATED: ("Germi", "bright_blue"),
    Stage.TRAINING: ("Train", "cyan"),
    Stage.BLENDING: ("Blend", "yellow"),
    Stage.HOLDING: ("Hold", "magenta"),
    Stage.FOSSILIZED: ("Foss", "green"),
    Stage.PRUNED: ("Prune", "red"),
    Stage.EMBARGOED: ("Embar", "bright_red"),
    Stage.RESETTING: ("Reset", "dim"),
}
OPS: Final = {
    Op.WAIT: "WAIT",
    Op.GERMINATE: "GERM",
    Op.SET_ALPHA: "ALPH",
    Op.PRUNE: "PRUN",
    Op.FOSSILIZE: "FOSS",
    Op.ADVANCE: "ADVA",
}
CURVES: Final = {"linear": "╱", "cosine": "∿", "sigmoid_soft": "⌒", "sigmoid": "⌢", "sigmoid_steep": "⊐"}
TEMPOS: Final = {2: "▸▸▸", 3: "▸▸", 5: "▸"}
"""Signs of the epochs of blending: fast, medium, slow."""
STATUS: Final = {
    "excellent": ("★EXCL", "bold green"),
    "ok": ("●OK", "green"),
    "init": ("◐INIT", "dim"),
    "stalled": ("◐STALL", "yellow"),
    "degraded": ("○DEGR", "red"),
}
MODES: Final = {"shaped": "bright_blue", "sparse": "bright_white"}
COLUMNS: Final = ("Env", "Acc", "Status")
"""Columns before the slots, which 80 columns of a terminal show for up to three slots."""
LAST_COLUMNS: Final = (
    *("Last", "Momentum", "∑Rwd", "Reward", "Loss", "CF", "Growth", "Acc▁▃▅", "Rwd▁▃▅", "ΔAcc", "Seed Δ", "Rent", "Stale"),
)
HEADINGS: Final = {
    "Env": "▶ acted in the last 5 s; ● bright blue: shaped rewards, white: sparse ones",
    "Acc": "validation accuracy, ↑ ↓ → compared with 5 epochs ago; green: the best so far",
    "Status": "★EXCL better than ever, among the best fifth; ◐INIT too early; ◐STALL no better for 10 epochs; ○DEGR fell by a point",
    "Slot": "stage:blueprint; ╱ ∿ ⌒ curve and ▸ tempo of blending, alpha; e7 epochs in the stage; ▲ gradient explodes, ▼ vanishes",
    "Last": "operation of the last step",
    "Momentum": "epochs since the best accuracy: +0 better now; stalled or degraded: !6 more than 5, x16 more than 15",
    "∑Rwd, Reward": "rewards of the episode; the last one (mean)",
    "Loss, Growth": "validation loss; parameters compared with the host without seeds",
    "CF": "+ seeds help each other by half a point of accuracy, - they disturb each other",
    "Acc▁▃▅, Rwd▁▃▅": "accuracy and reward of the last 8 epochs",
    "ΔAcc, Seed Δ": "points of accuracy: since the previous epoch; with all seeds compared with none",
    "Rent": "part of the last reward that parameters cost",
    "Stale": "age of the last record",
}
"""Meanings of the columns, for the help."""
MAX_PLAIN_LOSS: Final = 1e4
ACTION_SECONDS: Final = 5.0
SHORT_TREND, TOP_ENVIRONMENTS, CHANGE_EPOCHS, CHANGE_ACCURACY = 8, 5, 5, 0.005
DASH: Final = Text("─", "dim")

Data = Mapping[str, Any]


def growth(view: RunView) -> Data | None:
    """Return the last event of the environments; None for another run."""
    event = view.latest.get(EVENT)
    return None if event is None else event.data


def number_text(value: float | None, form: str, style: str = "") -> Text:
    """Return a number; a dim dash if it is not known."""
    return DASH.copy() if value is None else Text(format(value, form), style)


def loss_text(value: float | None, style: str = "") -> Text:
    """Return a loss in eight characters or fewer."""
    return number_text(value, ".3f" if (value or 0.0) < MAX_PLAIN_LOSS else ".1e", style)


def by_limits(value: float | None, limits: Sequence[tuple[float, str]]) -> str:
    """Return the style of the first limit that the value is below, else red."""
    return "" if value is None else next((style for limit, style in limits if value < limit), "red")


def signed(value: float | None, form: str, *, low: float = 0.0) -> Text:
    """Return a signed number: green above zero, red below `low`."""
    style = "" if value is None else "green" if value > 0 else "red" if value < low else ""
    return number_text(value, form, style)


def last_change(values: Sequence[float | None]) -> Text:
    """Return an arrow: the accuracy compared with `CHANGE_EPOCHS` ago."""
    known = [value for value in values[-CHANGE_EPOCHS:] if value is not None]
    change = known[-1] - known[0] if len(known) > 1 else 0.0
    return Text("↑" if change > CHANGE_ACCURACY else "↓" if change < -CHANGE_ACCURACY else "→")


def triangles(exploding: float | None, vanishing: float | None) -> Text:
    """Return ▲ if a gradient explodes, ▼ if it vanishes, and both signs for both."""
    text = Text("▲" if (exploding or 0.0) >= SEVERE else "", "bold red")
    return text.append("▼" if (vanishing or 0.0) >= SEVERE else "", "yellow")


def slot_text(data: Data, env: int, slot: int) -> Text:
    """Return a slot: `Blend:mlp ╱▸▸ 0.5`, its triangle last."""
    seed = {name: column[env][slot] for name, column in data["seeds"].items()}
    stage = _stage(seed["stage"])
    if stage is None:
        return DASH.copy()
    name, style = STAGES[stage]
    text = Text(f"{name}:{_name(data['blueprints'], seed['blueprint'])[:6]}", style)
    way = f" {CURVES.get(_name(data['curve'], seed['curve']), '')}{TEMPOS.get(seed['tempo'], '')}"
    if stage in (Stage.BLENDING, Stage.HOLDING):
        text.append(f"{way} {seed['alpha'] or 0.0:.1f}")
    elif stage is Stage.FOSSILIZED:
        text.append(way)
    else:
        text.append(f" e{seed['age']}")
    sign = triangles(seed["exploding"], seed["vanishing"])
    return text.append(" ").append_text(sign) if sign else text


def _stage(index: int | None) -> Stage | None:
    """Return a stage with a seed or its remains; None for a dormant slot, or one of a later version."""
    return Stage(index) if index in STAGES else None


def _name(names: Sequence[str], index: int | None) -> str:
    return names[index] if index is not None and 0 <= index < len(names) else "?"


def momentum(stale: int, status: str) -> Text:
    """Return the epochs since the best accuracy: `+0` while it improves."""
    if status in ("stalled", "degraded"):
        sign, style = ("", "white") if stale <= 5 else ("!", "yellow") if stale <= 15 else ("x", "red")
        return Text(f"{sign}{stale}", style)
    return Text(f"+{stale}", "green" if stale == 0 else "")


def environments_table(view: RunView) -> TableView | None:
    """Return one row per environment."""
    data = growth(view)
    if data is None:
        return None
    event = view.latest[EVENT]
    age = time.time() - event.axes.wall_time if event.axes else ACTION_SECONDS
    hosts, slots = data["hosts"], len(data["seeds"]["stage"][0])
    accuracies = [value if value is not None else -1.0 for value in hosts["accuracy"]]
    top = set(sorted(range(len(accuracies)), key=lambda env: -accuracies[env])[:TOP_ENVIRONMENTS])
    stale = STALENESS[view.progress().staleness]
    rows = [_row(data, env, slots, is_top=env in top, acted=age < ACTION_SECONDS, stale=stale) for env in range(len(accuracies))]
    total = data["environments"]
    title = "Environments" if len(rows) == total else f"Environments ({len(rows)} of {total:,})"
    title += f", epoch {data['epoch']} of {data['horizon']}"
    columns = (*COLUMNS, *(f"Slot {slot}" for slot in range(slots)), *LAST_COLUMNS)
    return TableView("growth", title, columns, tuple(rows), _footer(data, slots))


def _row(data: Data, env: int, slots: int, *, is_top: bool, acted: bool, stale: tuple[str, str]) -> tuple[TableCell, ...]:
    host = {name: column[env] for name, column in data["hosts"].items()}
    reason, pip = data["rollbacks"][env], MODES.get(data["mode"], "dim")
    number = Text(f"{env:>2}", "bold red" if reason else "")
    number.append("▶" if acted and host["op"] != Op.WAIT else " ", "cyan").append("●", pip)
    if reason:
        failure = Text().append(f"⚠ CATASTROPHIC FAILURE - ROLLED BACK ({reason})", "bold white on red")
        for slot in range(slots):
            failure.append("  ").append_text(slot_text(data, env, slot))
        return (TableCell(number, sort=env), TableCell(failure))
    status = _name(data["statuses"], data["course"]["status"][env])
    trend, rewards = data["trend"]["accuracy"][env], data["trend"]["reward"][env]
    parts = {name: column[env] for name, column in data["rewards"].items()}
    known = [value for value in rewards if value is not None]
    accuracy, best = host["accuracy"], host["best"]
    at_best = accuracy is not None and best is not None and accuracy >= best
    acc = last_change(trend).append(" ").append_text(number_text(accuracy, ".1%"))
    acc.stylize("green" if at_best else "yellow" if host["stale"] > 5 else "")
    reward = signed(known[-1] if known else None, "+.2f", low=-0.5)
    reward.append(f" ({sum(known) / len(known):+.2f})" if known else "", "dim")
    synergy = 100 * (host["synergy"] or 0.0)  # percentage points
    conflict = ("+", "green") if synergy > 0.5 else ("-", "bold red") if synergy < -0.5 else ("·", "dim")
    previous = next((value for value in reversed(trend[:-1]) if value is not None), None)
    change = None if accuracy is None or previous is None else accuracy - previous
    growth_style = by_limits(host["growth"], ((1.0000001, "dim"), (2, "green"), (5, "yellow")))
    cells = [
        number,
        acc,
        Text(*STATUS.get(status, (status, ""))),
        *(slot_text(data, env, slot) for slot in range(slots)),
        Text(OPS.get(host["op"], "?"), "dim" if host["op"] == Op.WAIT else ""),
        momentum(host["stale"], status),
        signed(data["course"]["paid"][env], "+.2f", low=-5),
        reward,
        loss_text(host["loss"], by_limits(host["loss"], ((0.1, "green"), (0.5, "white"), (1, "yellow")))),
        Text(*conflict),
        number_text(host["growth"], ".2f", growth_style).append("x", growth_style),
        Text(bars(trend[-SHORT_TREND:]), "cyan"),
        Text(bars(rewards[-SHORT_TREND:]), "cyan"),
        _points(change),
        _points(host["seeds_gain"]),
        number_text(parts.get("rent"), "+.3f", "red" if (parts.get("rent") or 0) < 0 else "dim"),
        Text(*stale),
    ]
    holds_fossil = Stage.FOSSILIZED in data["seeds"]["stage"][env]
    if status in ("ok", "stalled") and not is_top and not holds_fossil:
        for cell in cells[3:-1]:
            if "▲" not in cell.plain and "▼" not in cell.plain:
                cell.stylize("dim")
    return tuple(TableCell(cell, sort=env if place == 0 else cell.plain) for place, cell in enumerate(cells))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _footer(data: Data, slots: int) -> tuple[TableCell, ...]:
    """Return means over the environments, and the number of living seeds in each slot."""
    hosts, stages = data["hosts"], data["seeds"]["stage"]
    living = [sum(row[slot] in range(Stage.GERMINATED, Stage.PRUNED) for row in stages) for slot in range(slots)]
    texts = [
        Text(" Σ  ", "bold"),
        Text("  ").append_text(number_text(_mean(hosts["accuracy"]), ".1%")),
        DASH,
        *(Text(f"{count} seeds", "dim") for count in living),
        DASH,
        DASH,
        signed(_mean(data["course"]["paid"]), "+.2f", low=-5),
        signed(_mean(row[-1] for row in data["trend"]["reward"]), "+.2f"),
        loss_text(_mean(hosts["loss"])),
        DASH,
        number_text(_mean(hosts["growth"]), ".2f").append("x"),
        *(DASH for _ in range(6)),
    ]
    return tuple(TableCell(text) for text in texts)


def environment_detail(view: RunView, env: int) -> RenderableType:
    """Return everything about one environment: host, a card per slot, trends, actions, rewards, fates of seeds and their worth."""
    data = growth(view)
    if data is None or env >= len(data["rollbacks"]):
        return Text("This environment is no longer there.", "dim")
    host = {name: column[env] for name, column in data["hosts"].items()}
    status = _name(data["statuses"], data["course"]["status"][env])
    slots = range(len(data["seeds"]["stage"][env]))
    epochs = data["course"].get("epochs")  # not in journals of earlier versions, whose episodes all have the same age
    head = Text.assemble(
        *((f"Environment {env}", "bold"), "  ", STATUS.get(status, (status, ""))),
        *("  best ", number_text(host["best"], ".1%"), "  now ", number_text(host["accuracy"], ".1%")),
        *("  momentum ", momentum(host["stale"], status)),
        (f"  epoch {epochs[env] if epochs else data['epoch']} of {data['horizon']}", "dim"),
    )
    if data["rollbacks"][env]:
        head.append(f"  rolled back ({data['rollbacks'][env]})", "bold red")
    parameters = sum(count or 0 for count in data["seeds"]["parameters"][env])
    sizes = Text(f"host {host['host_parameters']:,} parameters, seeds {parameters:,}, growth ")
    sizes.append_text(number_text(host["growth"], ".2f")).append(f"x, rewards {data['mode']}")
    return Group(
        head,
        sizes,
        Columns([_card(data, env, slot) for slot in slots], padding=(0, 1)),
        Text.assemble("accuracy ", (bars(data["trend"]["accuracy"][env]).lstrip(), "cyan")),
        Text.assemble("reward   ", (bars(data["trend"]["reward"][env]).lstrip(), "cyan")),
        _counts(data, env),
        _rewards(data, env),
        _attribution(data, env),
        _graveyard(data, env),
    )


def _card(data: Data, env: int, slot: int) -> Panel:
    seed = {name: column[env][slot] for name, column in data["seeds"].items()}
    stage = _stage(seed["stage"])
    if stage is None:
        return Panel(Text("dormant", "dim"), title=f"slot {slot}", border_style="dim", width=36)
    name, style = STAGES[stage]
    alpha = seed["alpha"] or 0.0
    filled = round(10 * alpha)
    way = f"{CURVES.get(_name(data['curve'], seed['curve']), '')} {TEMPOS.get(seed['tempo'], '')}"
    lines = [
        Text(f"{_name(data['blueprints'], seed['blueprint'])}, {seed['parameters']:,} parameters"),
        Text.assemble("alpha ", ("█" * filled, style), ("░" * (10 - filled), "dim"), f" {alpha:.2f} {way}"),
        Text("accuracy since ").append_text(_points(seed["progress"])).append(" pp"),
        _gradient(data, seed),
        Text(f"epoch {seed['age']} of stage, {seed['life']} of seed", "dim"),
    ]
    return Panel(Group(*lines), title=f"slot {slot}: {name}", border_style=style, width=36)


def _points(value: float | None) -> Text:
    """Return a difference of accuracies in percentage points."""
    return signed(None if value is None else 100 * value, "+.1f")


def _gradient(data: Data, seed: Data) -> Text:
    """Return `Grad: ▲ EXPLODING`, `▼ VANISHING`, `ratio=0.32` or `OK`, with the cause of a weak one."""
    sign = triangles(seed["exploding"], seed["vanishing"])
    text = Text("Grad: ").append_text(sign)
    if "▲" in sign.plain:
        text.append(" EXPLODING", "bold red")
    if "▼" in sign.plain:
        text.append(" VANISHING", "yellow")
    cause = "" if seed["cause"] is None or seed["cause"] < 0 else _name(data["cause"], seed["cause"])
    if not sign and seed["exploding"] is None:
        text.append("not measured", "dim")
    elif not sign:
        text.append("OK" if seed["ratio"] is None else f"ratio={seed['ratio']:.2f}", "green")
    return text.append(f" ({cause})" if cause not in ("", "ok") else "", "dim")


def _counts(data: Data, env: int) -> Text:
    """Return numbers of seeds by stage, shares of the actions and the last ones."""
    stages = [stage for index in data["seeds"]["stage"][env] if (stage := _stage(index)) is not None]
    text = Text("seeds    " + (", ".join(f"{stages.count(stage)} {stage.name.lower()}" for stage in dict.fromkeys(stages)) or "none"))
    counts, total = data["course"]["op_counts"][env], max(1, sum(data["course"]["op_counts"][env]))
    shares = (f"{OPS[Op(op)]} {count / total:.0%}" for op, count in enumerate(counts) if count and op in OPS)
    text.append(f"\nactions  {'  '.join(shares)}")
    return text.append(f"\nlast     {' → '.join(OPS.get(op, '') for op in data['course']['ops'][env] if op in OPS)}")


def _rewards(data: Data, env: int) -> Text:
    text = Text("parts    ")
    for name, column in data["rewards"].items():
        if column[env]:
            text.append(f"{name} ", "dim").append_text(signed(column[env], "+.3f")).append("  ")
    return text


def _attribution(data: Data, env: int) -> Text:
    """Return what each seed adds alone, all together, and by Shapley values, in percentage points of accuracy."""
    seeds = data["seeds"]
    text = Text("worth    in percentage points: ")
    for slot, (alone, shapley) in enumerate(zip(seeds["contribution"][env], seeds["shapley"][env], strict=True)):
        if alone is not None:
            text.append(f"slot {slot} alone ", "dim").append_text(_points(alone))
            text.append(" Shapley ", "dim").append_text(_points(shapley)).append("  ")
    text.append("together ", "dim").append_text(_points(data["hosts"]["seeds_gain"][env]))
    return text.append("  synergy ", "dim").append_text(_points(data["hosts"]["synergy"][env]))


def _graveyard(data: Data, env: int) -> Table:
    """Return the fates of all seeds since the run began, by blueprint."""
    table = Table("graveyard", "spawned", "fossilised", "pruned", "rate", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, (spawned, fossilized, pruned) in zip(data["blueprints"], data["course"]["fates"][env], strict=True):
        if spawned or fossilized or pruned:
            rate = f"{fossilized / (fossilized + pruned):.0%}" if fossilized + pruned else "─"
            table.add_row(name, str(spawned), str(fossilized), str(pruned), rate)
    return table


def _status_part(status: str, level: Judgement) -> Callable[[RunView], StripItem | None]:
    """Return the part of the strip that counts the environments with a status."""

    def part(view: RunView) -> StripItem | None:
        data = growth(view)
        statuses = () if data is None else (_name(data["statuses"], own) for own in data["course"]["status"])
        count = sum(own == status for own in statuses)
        return StripItem(f"{count} {status}", level) if count else None

    return part


stalled = _status_part("stalled", "warn")
degraded = _status_part("degraded", "critical")


def seed_gradients(view: RunView) -> StripItem | None:
    """Return the number of seeds whose gradients explode or vanish."""
    data = growth(view)
    if data is None:
        return None
    columns = (data["seeds"][name] for name in ("stage", "exploding", "vanishing"))
    seeds = (seed for rows in zip(*columns, strict=True) for seed in zip(*rows, strict=True))
    count = sum(_stage(stage) is not None and bool(triangles(up, down)) for stage, up, down in seeds)
    return StripItem(f"{count} seed grad{'' if count == 1 else 's'}") if count else None


SINGLE_KEYS: Final = (
    *("host/accuracy", "host/accuracy_best", "host/epochs_since_best", "host/loss", "host/growth_ratio"),
    *("host/seeds_gain", "host/synergy", "env/op/{op}", "env/reward/{component}", "env/rollback/{reason}"),
    *("seed/stage/{stage}", "seed/alpha", "seed/life", "seed/exploding", "seed/vanishing", "seed/intensity_ratio"),
    *("seed/cause/{cause}", "seed/contribution", "seed/shapley/mean"),
)
"""Metrics whose single hosts and seeds the table and its details show."""

VIEWS: Final = (
    PanelDeclaration(
        "growth",
        "What are the grown networks worth?",
        (
            ChartDeclaration(("env/score", "env/final_accuracy")),
            ChartDeclaration(("host/accuracy",)),
            ChartDeclaration(("env/final_growth_ratio",)),
            ChartDeclaration(("seed/active",)),
            ChartDeclaration(("seed/exploding",)),
            ChartDeclaration(("seed/vanishing",)),
        ),
        15,
    ),
    TableDeclaration(
        "growth",
        "Environments",
        environments_table,
        5,
        events=(EVENT,),
        detail=environment_detail,
        headings=tuple(HEADINGS.items()),
        keys=SINGLE_KEYS,
    ),
    StripDeclaration("stalled", stalled, 10, ("host/epochs_since_best",)),
    StripDeclaration("degraded", degraded, 20, ("host/accuracy",)),
    StripDeclaration("seed_gradients", seed_gradients, 30, ("seed/exploding", "seed/vanishing")),
)
