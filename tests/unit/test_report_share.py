"""A shared report says what the run was worth, and nothing of who ran it where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hetrun import store
from hetrun.model import Failure, HostSpec, Plan, SshHop
from hetrun.report import build_report, to_html
from tests.unit.report_factory import make_outcome, make_plan, write_run

HOP = SshHop(addr="gate.corp.example", user="gatekeeper")


def _private(spec: HostSpec, number: int) -> HostSpec:
    return replace(
        spec,
        addr=f"node{number}.corp.example",
        data_addr=f"192.0.2.{number}",
        user="zoe.smith",
        identity="/home/zoe.smith/.ssh/id",
        jump=(HOP,),
    )


def _renamed(plan: Plan, names: dict[str, str]) -> Plan:
    hosts = tuple(replace(spec, name=names[spec.name]) for spec in plan.hosts)
    ranks = tuple(replace(rank, host=names[rank.host]) for rank in plan.split.ranks)
    return replace(plan, hosts=hosts, split=replace(plan.split, ranks=ranks))


def test_a_shared_report_names_no_host_user_address_or_path(tmp_path: Path) -> None:
    plan = make_plan()
    plan = _renamed(plan, {s.name: f"zephyr-{n}" for n, s in enumerate(plan.hosts)})
    plan = replace(plan, hosts=tuple(_private(s, n) for n, s in enumerate(plan.hosts, 1)))
    first = plan.hosts[0].name
    failure = Failure(
        host=first,
        rank=0,
        when_s=5.0,
        what=f"raised OSError: {first}: cannot open /data/zoe.smith/secret.txt as zoe.smith@node1.corp.example"
        " (192.0.2.1, fd00:1:2::3, 10.1.2.3:29500)",
        last_lines=("password=hunter22",),
    )
    outcome = replace(
        make_outcome(plan, "failed", (failure,)), warnings=(f"{first}: busy: gate.corp.example",)
    )
    run = write_run(tmp_path, plan, outcome=outcome)
    report = build_report(run, share=True)
    for text in (store.dumps(report), to_html(report)):
        for word in (
            *("zephyr", "corp.example", "192.0.2.", "zoe", "smith", "gatekeeper", "/home", "/data"),
            *("fd00:", "10.1.2.3", "hunter22", "secret.txt"),
        ):
            assert word not in text, word
        assert "host-1" in text
    whole = build_report(run)
    assert (report.step_s, report.efficiency) == (whole.step_s, whole.efficiency)
    assert report.status == whole.status == "failed"
    assert report.failures[0].what.startswith("raised OSError: host-1: cannot open path")


def test_a_host_that_is_called_like_a_word_of_ours_harms_no_field(tmp_path: Path) -> None:
    plan = make_plan()
    plan = _renamed(plan, {s.name: "done" if n == 0 else s.name for n, s in enumerate(plan.hosts)})
    report = build_report(write_run(tmp_path, plan, outcome=make_outcome(plan)), share=True)
    assert report.status == "done"
    assert {use.host for use in report.ranks} == {f"host-{n + 1}" for n in range(len(plan.hosts))}
