"""The plan's page: whole, escaped, offline, and bounded for large plans."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from hetrun.model import Plan
from hetrun.report import plan_page
from hetrun.report.plan_page import MOST_RANKS, to_page
from tests.unit.planner_lab import Chips, Lab, small_model

LAB = Lab(
    chips=(
        Chips(vendor="emu-a", num_devices=2, layer_s=1.0),
        Chips(vendor="emu-b", num_devices=2, layer_s=3.0),
    ),
    model=small_model(8),
    batch=12,
)
PLAN = LAB.plan()


class Tree(HTMLParser):
    """Counts elements and refuses what is not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(page: str) -> Tree:
    tree = Tree()
    tree.feed(page)
    assert tree.open == []
    return tree


def test_page_is_whole_and_needs_nothing_else() -> None:
    page = to_page(PLAN)
    tree = parse(page)
    assert "script" not in tree.seen
    assert not re.search(r'(?:src|href)="|url\((?!#)|@import', page)
    assert "default-src &#x27;none&#x27;" in page


def test_page_says_what_the_plan_says() -> None:
    page = to_page(PLAN).replace("\N{NO-BREAK SPACE}", " ")
    for text in (PLAN.verdict, PLAN.gap_reason, "modelled: simulated from the profile"):
        assert text in page
    for replica in PLAN.split.replicas:
        for stage in replica.stages:
            assert f"rank {stage.ranks[0]}: replica" in page
    assert f"{100 * PLAN.gap:.1f} %" in page


def test_text_of_others_is_escaped() -> None:
    ranks = tuple(replace(rank, model="<script>x</script>") for rank in PLAN.split.ranks)
    evil = replace(PLAN, verdict="<b>", split=replace(PLAN.split, ranks=ranks))
    page = to_page(evil)
    assert "<script" not in page
    assert "&lt;b&gt;" in page


def large(num_devices: int, batch: int) -> Plan:
    chips = (Chips(vendor="emu-a", num_devices=num_devices, layer_s=1.0, per_host=8),)
    return Lab(chips=chips, model=small_model(8), batch=batch, rows=(1,)).plan()


def test_lanes_of_a_large_plan_are_bounded_and_the_rest_is_counted() -> None:
    page = to_page(large(60, 60))
    assert len(re.findall(r"rank \d+: replica", page)) == MOST_RANKS
    assert f"{60 - MOST_RANKS} more ranks of replicas like these are left out" in page


def test_step_that_is_too_long_to_draw_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    events = sum(2 * len(r.stages) * r.num_microbatches for r in PLAN.split.replicas)
    assert "too many events" not in to_page(PLAN)
    monkeypatch.setattr(plan_page, "MOST_EVENTS", events // 51)
    assert "too many events to draw" in to_page(PLAN)


def test_plan_without_even_split_says_why() -> None:
    page = to_page(replace(PLAN, even_split=None, even_split_why="8 layers on 3 stages"))
    assert "No even split: 8 layers on 3 stages" in page
    assert parse(page).seen["table"] == 3
