"""Plan -> one HTML file that needs nothing else: stages over vendors, the simulated step, cost, memory. Drawing is left to `svg.py`."""

from __future__ import annotations

from hetrun import __version__
from hetrun.model import Efficiency, Order, Plan, RankPlan, RankTrace, ReplicaPlan, StagePlan
from hetrun.report.markup import Html, el, join
from hetrun.report.page import page
from hetrun.report.style import NUM_COLOURS
from hetrun.report.svg import percent_bar, swatch, timeline
from hetrun.report.words import (
    NOT_KNOWN,
    count,
    definitions,
    format_bytes,
    format_percent,
    format_rate,
    format_seconds,
    layers_of,
    numbers_of,
    shape_of,
    some,
    way_of,
    window_of,
)
from hetrun.schedule import simulate_step

MOST_RANKS = 48  # lanes of the timeline; the rest are like some of them
MOST_EVENTS = 20_000  # forwards and backwards that a page draws
MOST_REPLICAS = 24
_BAR_HEIGHT = 46


def to_page(plan: Plan) -> str:
    """Return the whole page; every text of the plan is escaped."""
    colours = _colours(plan)
    sections = (
        _header(plan),
        _key_figures(plan),
        _efficiency(plan),
        _stages(plan, colours),
        _timeline(plan, colours),
        _cost(plan),
        _memory(plan, colours),
        _baselines(plan),
        el("footer", f"Made by hetrun {__version__} for {plan.recipe.name}, {plan.created}."),
    )
    return page(f"hetrun plan: {plan.recipe.name}", *sections)


def _colours(plan: Plan) -> dict[str, int]:
    vendors = dict.fromkeys(
        [*(r.vendor for r in plan.split.ranks), *(b.vendor for b in plan.baselines)]
    )
    return {vendor: number % NUM_COLOURS for number, vendor in enumerate(vendors)}


def _header(plan: Plan) -> Html:
    split = plan.split
    vendors = len({rank.vendor for rank in split.ranks})
    title = (
        f"{plan.recipe.name}: {shape_of(split.replicas)} on {count(len(split.ranks), 'device')}"
        f" of {count(vendors, 'vendor')}"
    )
    top = el(
        "div",
        el("span", "hetrun plan", class_="brand"),
        el("span", "modelled: simulated from the profile", class_="pill warn"),
        class_="top",
    )
    return el("header", top, el("h1", title), el("p", plan.verdict, class_="verdict"))


def _key_figures(plan: Plan) -> Html:
    cost, recipe = plan.split.cost, plan.recipe
    tokens = recipe.train.global_batch_rows * recipe.data.seq_len
    idle = count(len(plan.idle_devices), "device")
    facts = (
        ("Step", format_seconds(cost.step_s), f"{recipe.train.global_batch_rows} rows"),
        ("Throughput", format_rate(tokens / cost.step_s, "tokens"), "predicted"),
        ("Bound", format_seconds(plan.bound_s), "no split is faster in this cost model"),
        ("Gap to the bound", format_percent(plan.gap), plan.gap_reason),
        ("Left idle", idle, some(plan.idle_devices, 4) or "all devices work"),
    )
    boxes = [
        el(
            "div",
            el("div", k, class_="k"),
            el("div", v, class_="v"),
            el("div", d, class_="d"),
            class_="fact",
        )
        for k, v, d in facts
    ]
    return el("div", *boxes, class_="facts")


def _efficiency(plan: Plan) -> Html:
    even = plan.even_split.efficiency if plan.even_split else None
    shares = [s.value or 0.0 for e in (plan.split.efficiency, even) if e for s in numbers_of(e)]
    longest = max([1.0, *shares])
    boxes = [
        _metric(number, plan.split.efficiency, even, longest)
        for number in range(len(definitions()))
    ]
    note = None
    if plan.even_split is None and plan.even_split_why:
        note = el("p", f"No even split: {plan.even_split_why}", class_="note")
    return el(
        "section", el("h2", "Efficiency"), el("div", *boxes, class_="three"), note, class_="card"
    )


def _metric(number: int, own: Efficiency, even: Efficiency | None, longest: float) -> Html:
    key, title, meaning = definitions()[number]
    rows = [("this plan", numbers_of(own)[number], "run")]
    if even is not None:
        rows.append(("even split", numbers_of(even)[number], "even"))
    pairs = [
        el(
            "div",
            el("span", who, class_="who"),
            el("span", format_percent(share.value, 2), class_="val"),
            percent_bar(share.value, longest, "run" if style == "run" else "evn"),
            class_=f"pair {style}",
        )
        for who, share, style in rows
    ]
    why = rows[0][1].why
    reason = el("p", f"n/a: {why}", class_="why") if rows[0][1].value is None and why else None
    kind = el("span", rows[0][1].kind.value, class_="pill warn")
    name = el("div", el("b", key), f" {title}", kind, class_="name")
    return el("div", name, *pairs, reason, el("p", meaning, class_="def"), class_="metric")


def _stages(plan: Plan, colours: dict[str, int]) -> Html:
    """One bar per different replica: stages as wide as their layers, coloured by vendor."""
    groups: dict[object, list[int]] = {}
    for number, replica in enumerate(plan.split.replicas):
        groups.setdefault(_likeness(plan, replica), []).append(number)
    bars = [
        _replica_bar(plan, plan.split.replicas[numbers[0]], numbers, colours)
        for numbers in list(groups.values())[:MOST_REPLICAS]
    ]
    legend = el(
        "div",
        *[
            el("span", swatch(f"f v{colour}"), vendor)
            for vendor, colour in colours.items()
            if any(rank.vendor == vendor for rank in plan.split.ranks)
        ],
        class_="legend",
    )
    text = "Replicas that are alike share a bar; a stage is as wide as its share of the layers."
    return el(
        "section",
        el("h2", "Who does what"),
        el("p", text, class_="note"),
        legend,
        *bars,
        class_="card",
    )


def _likeness(plan: Plan, replica: ReplicaPlan) -> object:
    stages = tuple(
        (
            plan.split.ranks[s.ranks[0]].vendor,
            plan.split.ranks[s.ranks[0]].model,
            s.num_layers,
            len(s.ranks),
            s.lanes,
            s.recompute,
        )
        for s in replica.stages
    )
    way = (replica.order, replica.cuts)
    return replica.microbatch_rows, replica.num_microbatches, stages, way


def _replica_bar(
    plan: Plan, replica: ReplicaPlan, numbers: list[int], colours: dict[str, int]
) -> Html:
    shares = replica.layer_shares
    total = sum(max(share, 0.4) for share in shares)
    pieces: list[Html] = []
    at = 0.0
    for stage, share in zip(replica.stages, shares, strict=True):
        width = max(share, 0.4) / total
        pieces.append(_stage_box(plan, stage, at, (width, share), colours))
        at += width
    bar = el("svg", *pieces, width="100%", height=_BAR_HEIGHT)
    rows = f"{replica.num_microbatches} x {replica.microbatch_rows} rows each, {replica.way}"
    which = f"replica{'s' if len(numbers) > 1 else ''} {some(numbers)}"
    return el("div", el("span", which, el("i", rows), class_="label"), bar, class_="lane")


def _stage_box(
    plan: Plan, stage: StagePlan, at: float, size: tuple[float, float], colours: dict[str, int]
) -> Html:
    width, share = size  # of the bar, and layers
    rank = plan.split.ranks[stage.ranks[0]]
    which = layers_of(
        stage.first_layer, stage.num_layers, embedding=stage.has_embedding, head=stage.has_head
    )
    title = (
        f"{rank.vendor} {rank.model}: {which}{way_of(stage)}; {format_seconds(stage.forward_s)} forward,"
        f" {format_seconds(stage.backward_s)} backward per microbatch; {format_bytes(stage.memory_bytes)}"
    )
    middle = f"{100 * (at + width / 2):.2f}%"
    words: list[Html] = []
    if width > 0.09:
        layers = "1 layer" if share == 1 else f"{share:.4g} layers"
        layers += way_of(stage)
        words = [
            el("text", rank.vendor, x=middle, y=20, text_anchor="middle", class_="n nf"),
            el("text", layers, x=middle, y=35, text_anchor="middle", class_="n nf"),
        ]
    elif width > 0.025:
        number = f"{share:.4g}"
        words = [el("text", number, x=middle, y=28, text_anchor="middle", class_="n nf")]
    box = el(
        "rect",
        el("title", title),
        x=f"{100 * at:.2f}%",
        width=f"{100 * width:.2f}%",
        height=_BAR_HEIGHT,
        class_="s f",
    )
    return el("g", box, *words, class_=f"v{colours[rank.vendor]}")


def _timeline(plan: Plan, colours: dict[str, int]) -> Html:
    """The simulated step of the first replicas of each kind, as many as the page holds."""
    title = el("h2", "One step, simulated")
    shown = _shown_replicas(plan)
    if not shown:
        text = "The step has too many events to draw; plan.json holds what a simulation needs."
        return el("section", title, el("p", text, class_="note"), class_="card")
    split, recipe = plan.split, plan.recipe
    run = simulate_step(split.ranks, split.replicas, plan.links, recipe.model, recipe.train.dtype)
    ranks = [
        split.ranks[rank]
        for number in shown
        for stage in split.replicas[number].stages
        for rank in stage.ranks
    ][:MOST_RANKS]
    traces = [RankTrace(rank=r.rank, step=0, spans=run.rank_spans[r.rank]) for r in ranks]
    lanes = timeline(traces, [_lane_label(r) for r in ranks], [colours[r.vendor] for r in ranks])
    legend = el(
        "div",
        el("span", swatch("f v0"), "forward"),
        el("span", swatch("b v0"), "backward"),
        el("span", swatch("w v0"), "gradients of weights") if _puts_off(plan) else None,
        el("span", swatch("sync"), "gradient sync"),
        el("span", swatch("opt"), "optimizer"),
        el("span", swatch("idlebox"), "idle"),
        class_="legend",
    )
    left = len(split.ranks) - len(ranks)
    note = f"{count(left, 'more rank')} of replicas like these are left out." if left else None
    after = el("p", note, class_="note") if note else None
    return el("section", title, legend, lanes, after, class_="card long")


def _puts_off(plan: Plan) -> bool:
    """Whether some replica runs the gradients of its weights on their own."""
    return any(replica.order is Order.ZERO_BUBBLE for replica in plan.split.replicas)


def _shown_replicas(plan: Plan) -> list[int]:
    """Return replicas to draw: one of each kind first, then more; none where the simulation is too long for a page."""
    events = sum(2 * len(r.stages) * r.num_microbatches for r in plan.split.replicas)
    if events > 50 * MOST_EVENTS:
        return []
    seen: set[object] = set()
    first: list[int] = []
    more: list[int] = []
    for number, replica in enumerate(plan.split.replicas):
        key = _likeness(plan, replica)
        (more if key in seen else first).append(number)
        seen.add(key)
    chosen: list[int] = []
    drawn = 0
    for number in [*first, *more]:
        replica = plan.split.replicas[number]
        drawn += 2 * len(replica.stages) * replica.num_microbatches
        if drawn <= MOST_EVENTS:
            chosen.append(number)
    return chosen


def _lane_label(rank: RankPlan) -> Html:
    where = f"{rank.vendor} {rank.model}, {rank.host}/{rank.device_index}"
    place = f"rank {rank.rank}: replica {rank.replica}, stage {rank.stage}"
    return el("span", place, el("i", where), class_="label")


def _cost(plan: Plan) -> Html:
    """Where the step goes, beside the even split."""
    columns = [("this plan", plan.split.cost)]
    if plan.even_split is not None:
        columns.append(("even split", plan.even_split.cost))
    head = el(
        "tr", el("th", "Part of the step"), *[el("th", name, class_="r") for name, _ in columns]
    )
    parts = ("compute", "bubble", "p2p", "sync", "optimizer")
    rows = [
        el(
            "tr",
            el("td", part),
            *[
                el(
                    "td",
                    format_seconds(getattr(cost, f"{part}_s")),
                    el("i", f"  {format_percent(getattr(cost, f'{part}_s') / cost.step_s)}"),
                    class_="r",
                )
                for _, cost in columns
            ],
        )
        for part in parts
    ]
    steps = [el("td", format_seconds(cost.step_s), class_="r") for _, cost in columns]
    table = el("table", head, *rows, el("tr", el("td", "step"), *steps, class_="total"))
    runner = el("p", f"Runner-up: {plan.runner_up}", class_="note") if plan.runner_up else None
    return el(
        "section",
        el("h2", "Where the time goes"),
        el("div", table, class_="scroll"),
        runner,
        class_="card",
    )


def _memory(plan: Plan, colours: dict[str, int]) -> Html:
    """Memory of each different stage against its limit, modelled."""
    seen: set[tuple[object, ...]] = set()
    rows: list[Html] = []
    for number, replica in enumerate(plan.split.replicas):
        for index, stage in enumerate(replica.stages):
            rank = plan.split.ranks[stage.ranks[0]]
            parts = (stage.num_layers, way_of(stage), stage.memory_bytes)
            key = (rank.vendor, rank.model, index, *parts)
            if key in seen or len(rows) >= MOST_RANKS:
                continue
            seen.add(key)
            rows.append(_memory_row(rank, stage, f"{number}.{index}", colours))
    head = ("Stage", "Device", "Layers", "Window", "Memory", "Limit", "Used")
    cells = [el("th", word, class_="r" if number > 2 else None) for number, word in enumerate(head)]
    table = el("table", el("tr", *cells), *rows)
    return el("section", el("h2", "Memory"), el("div", table, class_="scroll"), class_="card")


def _memory_row(rank: RankPlan, stage: StagePlan, name: str, colours: dict[str, int]) -> Html:
    limit = stage.memory_limit_bytes
    used = NOT_KNOWN if limit is None else format_percent(stage.memory_bytes / limit)
    which = layers_of(
        stage.first_layer, stage.num_layers, embedding=stage.has_embedding, head=stage.has_head
    )
    device = join([swatch(f"f v{colours[rank.vendor]}"), f"{rank.vendor} {rank.model}"])
    window = window_of(stage.window, stage.most_held)
    numbers = (window, format_bytes(stage.memory_bytes), format_bytes(limit), used)
    return el(
        "tr",
        el("td", name),
        el("td", device),
        el("td", which + way_of(stage)),
        *[el("td", number, class_="r") for number in numbers],
    )


def _baselines(plan: Plan) -> Html:
    """What each vendor reaches alone."""
    head = el(
        "tr",
        el("th", "Vendor alone"),
        *[el("th", word, class_="r") for word in ("Devices", "Same batch", "Ideal")],
        el("th", "Its best plan"),
    )
    rows = [
        el(
            "tr",
            el("td", base.vendor),
            el("td", str(base.num_devices), class_="r"),
            el("td", format_rate(base.rows_per_s, "rows"), class_="r"),
            el("td", format_rate(base.ideal_rows_per_s, "rows"), class_="r"),
            el("td", f"{base.shape or NOT_KNOWN}{': ' + base.why if base.why else ''}"),
        )
        for base in plan.baselines
    ]
    table = el("table", head, *rows)
    return el("section", el("h2", "Baselines"), el("div", table, class_="scroll"), class_="card")
