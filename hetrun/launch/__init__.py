"""Starts a plan on its hosts and follows it to the end; `dry_run` only says what would be started."""

from __future__ import annotations

from hetrun.launch.check import check_plan
from hetrun.launch.files import HostCommand, Meeting, host_command
from hetrun.launch.run import Options, WorkerCode, launch
from hetrun.launch.runs import find_run
from hetrun.model import Plan
from hetrun.preflight.addresses import choose_addresses

__all__ = ["HostCommand", "Options", "WorkerCode", "dry_run", "find_run", "launch"]


def dry_run(plan: Plan) -> tuple[HostCommand, ...]:
    """Return each host's files and exact command; opens no connection, so what hosts would answer stays in <>."""
    check_plan(plan)
    chosen = choose_addresses(plan.hosts, lookup=lambda name: [name])
    first = chosen[plan.hosts[0].name]
    meeting = Meeting(
        addr=first.addr or f"<address of {first.nic}>", port="<free port>", rdzv_id="<random>"
    )
    return tuple(
        host_command(
            plan,
            node_rank,
            meeting=meeting,
            nic=chosen[spec.name].nic or f"<interface of {chosen[spec.name].addr}>",
        )
        for node_rank, spec in enumerate(plan.hosts)
    )
