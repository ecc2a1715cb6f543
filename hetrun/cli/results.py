"""Plan and report as rich renderables. What they are built from is left to `tables.py`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hetrun.cli.tables import cell, new_table, stack
from hetrun.model import Baseline, Cost, Efficiency, Plan, ReplicaPlan, RunReport, Split
from hetrun.report.words import (
    DONE,
    NOT_KNOWN,
    compared,
    count,
    definitions,
    ending,
    format_bytes,
    format_change,
    format_loss,
    format_percent,
    format_rate,
    format_seconds,
    format_share,
    headline,
    layers_of,
    numbers_of,
    paced,
    shape_of,
    some,
    way_of,
    window_of,
)

MOST_RANKS = 32
_PARTS = ("compute", "optimizer", "bubble", "p2p", "sync")


def plan_view(plan: Plan) -> RenderableType:
    """Who does what, what it should cost, and how far from the optimum that is."""
    split, even = plan.split, plan.even_split
    title = f"{plan.recipe.name}: {shape_of(split.replicas)} on {count(len(split.ranks), 'device')}"
    parts: list[RenderableType] = [Text(title, style="bold"), _stage_table(split)]
    parts.append(
        cost_table(split.cost, [] if even is None else [("even split", even.cost)], "predicted")
    )
    efficiencies = [("hetrun's split", split.efficiency)]
    if even is not None:
        efficiencies.append(("even split", even.efficiency))
    parts.append(efficiency_table(efficiencies))
    if even is None and plan.even_split_why:
        parts.append(cell(f"no even split: {plan.even_split_why}"))
    parts.append(_bound_line(plan.bound_s, plan.gap, plan.gap_reason))
    parts.append(baseline_table(plan.baselines))
    if plan.idle_devices:
        devices = f"left idle, since they would not help: {some(plan.idle_devices)}"
        parts.append(cell(devices, "yellow"))
    if plan.runner_up:
        parts.append(cell(f"runner-up: {plan.runner_up}"))
    if plan.verdict:
        parts.append(cell(plan.verdict, "bold"))
    parts.append(Text("All times of a plan are modelled: simulated from the profile.", style="dim"))
    return stack(*parts)


def report_view(report: RunReport) -> RenderableType:
    """What the run was worth; loud where it did not end well."""
    done = report.status == DONE
    parts: list[RenderableType] = []
    if not done:
        parts.append(cell(ending(report), "bold red"))
    for failure in report.failures[:1]:
        rank = "" if failure.rank is None else f", rank {failure.rank}"
        parts.append(cell(f"first failure: {failure.host}{rank}: {failure.what}", "red"))
    parts += [cell(headline(report), "bold"), _figures(report)]
    efficiencies = [("this run", report.efficiency)]
    costs = []
    if report.even_split is not None:
        efficiencies.append(("even split", report.even_split.efficiency))
        costs.append(("even split", report.even_split.cost))
    parts.append(efficiency_table(efficiencies))
    if report.even_split is None and report.even_split_why:
        parts.append(cell(f"no even split: {report.even_split_why}"))
    parts += [cost_table(report.predicted, costs, "predicted"), _rank_table(report)]
    if len(report.ranks) > MOST_RANKS:
        parts.append(
            Text(f"{len(report.ranks) - MOST_RANKS} more ranks in report.json", style="dim")
        )
    parts.append(_bound_line(report.bound_s, report.gap, report.gap_reason))
    parts.append(baseline_table(report.baselines))
    if report.verdict:
        parts.append(cell(report.verdict))
    if report.num_comparisons:
        parts.append(cell(compared(report)))
    if report.pacing:
        parts.append(cell(paced(report.pacing)))
    parts += [cell(f"warning: {warning}", "yellow") for warning in report.warnings]
    return stack(*parts)


def efficiency_table(columns: Sequence[tuple[str, Efficiency]]) -> Table:
    """E1, E2 and U of each column beside each other, with what they mean."""
    table = new_table("Efficiency", *[f">{name}" for name, _ in columns], "What it is")
    rows = zip(definitions(), *[numbers_of(efficiency) for _, efficiency in columns], strict=True)
    for (key, line, _), *shares in rows:
        shown = [format_share(share) for share in shares]
        whys = dict.fromkeys(share.why for share in shares if share.value is None and share.why)
        meaning = Text("\n").join([Text(line), *[cell(f"n/a: {why}", "yellow") for why in whys]])
        table.add_row(
            Text(key, style="bold"), *[Text(text, no_wrap=True) for text in shown], meaning
        )
    return table


def cost_table(cost: Cost, others: Sequence[tuple[str, Cost]], name: str) -> Table:
    """Parts of a step in seconds and shares; parts are those of the slowest replica."""
    columns = [(name, cost), *others]
    table = new_table("Part of a step", *[f">{title}, modelled" for title, _ in columns])
    for part in _PARTS:
        table.add_row(part, *[_part(part, one) for _, one in columns])
    table.add_row("step", *[format_seconds(one.step_s) for _, one in columns], style="bold")
    return table


def baseline_table(baselines: Sequence[Baseline]) -> Table:
    """What each vendor reaches alone, or why it cannot."""
    table = new_table(
        "Vendor alone",
        ">Devices",
        ">Same batch",
        ">Scaled batch",
        ">Ideal",
        "Its best plan, modelled",
    )
    for base in baselines:
        plan = base.shape or NOT_KNOWN
        table.add_row(
            cell(base.vendor),
            str(base.num_devices),
            format_rate(base.rows_per_s, "rows"),
            format_rate(base.scaled_rows_per_s, "rows"),
            format_rate(base.ideal_rows_per_s, "rows"),
            cell(f"{plan}: {base.why}" if base.why else plan),
        )
    return table


def _stage_table(split: Split) -> Table:
    """Stages of each replica; replicas that are alike but for their hosts share their lines."""
    table = new_table(
        "Replica", "Stage", "Devices", ">Layers", "Which", ">Rows", ">Window", ">Memory", ">Limit"
    )
    alike: dict[object, list[int]] = {}
    for number, replica in enumerate(split.replicas):
        alike.setdefault(_likeness(replica, split), []).append(number)
    for numbers in alike.values():
        replica = split.replicas[numbers[0]]
        for index, stage in enumerate(replica.stages):
            ranks = [
                split.ranks[rank]
                for number in numbers
                for rank in split.replicas[number].stages[index].ranks
            ]
            hosts = list(dict.fromkeys(rank.host for rank in ranks))
            which = layers_of(
                stage.first_layer,
                stage.num_layers,
                embedding=stage.has_embedding,
                head=stage.has_head,
            )
            per_replica = (
                f"{replica.num_rows} ({replica.num_microbatches} x {replica.microbatch_rows})"
            )
            table.add_row(
                cell(some(numbers) if index == 0 else ""),
                cell(index),
                cell(
                    f"{len(ranks)} x {ranks[0].vendor} {ranks[0].model} on {some(hosts, 3)}"
                    + way_of(stage)
                ),
                cell(f"{replica.layer_shares[index]:.4g}"),
                cell(which),
                cell(per_replica if index == 0 else ""),
                cell(window_of(stage.window, stage.most_held)),
                cell(format_bytes(stage.memory_bytes)),
                cell(format_bytes(stage.memory_limit_bytes)),
            )
    return table


def _likeness(replica: ReplicaPlan, split: Split) -> object:
    stages = tuple(
        (
            len(stage.ranks),
            stage.lanes,
            stage.recompute,
            split.ranks[stage.ranks[0]].vendor,
            split.ranks[stage.ranks[0]].model,
            stage.num_layers,
            stage.window,
            stage.most_held,
            stage.memory_bytes,
            stage.memory_limit_bytes,
        )
        for stage in replica.stages
    )
    way = (replica.order, replica.cuts)
    return replica.microbatch_rows, replica.num_microbatches, stages, way


def _part(part: str, cost: Cost) -> str:
    seconds = getattr(cost, f"{part}_s")
    share = format_percent(seconds / cost.step_s) if cost.step_s > 0 else NOT_KNOWN
    return f"{format_seconds(seconds)}  {share:>7}"


def _bound_line(bound_s: float, gap: float, reason: str) -> Text:
    line = f"bound {format_seconds(bound_s)} (modelled), gap {format_percent(gap)}"
    return cell(f"{line}: {reason}" if reason else line)


def _figures(report: RunReport) -> Table:
    table = new_table("Throughput", "Step", "Predicted", "Loss", "Steps", "Wall time")
    table.add_row(
        f"{format_rate(report.tokens_per_s, 'tokens')} ({report.kind})",
        f"{format_seconds(report.step_s)} ({report.kind})",
        f"{format_seconds(report.predicted_step_s)} ({format_change(report.prediction_error)})",
        _losses(report),
        f"{report.steps} of {report.planned_steps}",
        format_seconds(report.wall_s),
    )
    return table


def _losses(report: RunReport) -> str:
    """Such as "5.528 to 2.599 (held out 2.71)"."""
    words = f"{format_loss(report.loss.first)} to {format_loss(report.loss.last)}"
    if report.held_out:
        words += f" (held out {format_loss(report.held_out[-1].loss)})"
    return words


def _rank_table(report: RunReport) -> Table:
    table = new_table(
        ">Rank", "Host", "Vendor", "Place", ">Layers", ">Busy", ">Communication", ">Idle"
    )
    for use in report.ranks[:MOST_RANKS]:
        table.add_row(
            str(use.rank),
            cell(use.host),
            cell(use.vendor),
            f"replica {use.replica}, stage {use.stage}",
            str(use.num_layers),
            format_percent(use.busy),
            format_percent(use.communication),
            format_percent(use.idle),
        )
    return table
