from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hetrun.model import Baseline, Failure, RunReport, Share, Source
from hetrun.report import build_report, to_html
from hetrun.report.details import MOST_LANES
from hetrun.report.markup import el
from hetrun.report.style import style_sheet
from hetrun.report.svg import round_ticks, thin
from tests.unit.report_factory import Shape, make_outcome, make_plan, write_run

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Collects elements, attributes and text; fails where tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def words(self) -> str:
        return " ".join(self.texts).replace("\N{NO-BREAK SPACE}", " ")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    plan = make_plan()
    return build_report(write_run(tmp_path_factory.mktemp("run"), plan, outcome=make_outcome(plan)))


def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing(report: RunReport) -> None:
    text = to_html(report)
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert not re.search(r"@import|https?:|//[a-z]|url\((?!#)", text, re.IGNORECASE)
    keys = {key for key, _ in page.attributes}
    assert not {"src", "href", "style"} & keys
    assert not [key for key in keys if key.startswith("on")]


def test_the_policy_allows_the_one_style_sheet_and_nothing_else(report: RunReport) -> None:
    page = Page(to_html(report))
    policy = next(value for _, value in page.attributes if "default-src" in value)
    digest = base64.b64encode(hashlib.sha256(style_sheet().encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'")
    assert "unsafe" not in policy
    assert style_sheet() in page.texts


def test_text_of_hosts_cannot_become_markup(report: RunReport) -> None:
    plain = set(Page(to_html(report)).tags)
    failure = Failure(host=HOSTILE, rank=1, when_s=0.0, what=HOSTILE, last_lines=(HOSTILE,))
    uses = tuple(replace(use, host=HOSTILE, vendor=HOSTILE) for use in report.ranks)
    stages = tuple(replace(stage, vendor=HOSTILE, models=(HOSTILE,)) for stage in report.stages)
    bases = tuple(replace(base, vendor=HOSTILE, why=HOSTILE) for base in report.baselines)
    lost = Share(value=None, kind=Source.MODELLED, why=HOSTILE)
    hostile = replace(
        report,
        run_id=HOSTILE,
        recipe=HOSTILE,
        status=HOSTILE,
        verdict=HOSTILE,
        gap_reason=HOSTILE,
        runner_up=HOSTILE,
        idle_devices=(HOSTILE,),
        warnings=(HOSTILE,),
        failures=(failure, failure),
        ranks=uses,
        stages=stages,
        baselines=bases,
        efficiency=replace(report.efficiency, e1=lost),
    )
    page = Page(to_html(hostile))
    assert set(page.tags) - plain <= {"pre", "ul", "li"}
    assert HOSTILE in "".join(page.texts)


def test_control_characters_never_reach_the_page(report: RunReport) -> None:
    text = to_html(replace(report, warnings=("\x00\x1b[2J\ud800\u202etxt",)))
    assert not re.search("[\x00\x1b\ud800\u202e]", text)
    text.encode("utf-8")


def test_the_three_efficiencies_stand_beside_those_of_the_even_split(report: RunReport) -> None:
    words = Page(to_html(report)).words
    assert report.even_split is not None
    for quantities in (report.efficiency, report.even_split.efficiency):
        for quantity in (quantities.e1, quantities.e2, quantities.u):
            assert quantity.value is not None
            assert f"{100 * quantity.value:.2f} %" in words
    assert words.count("modelled") >= 6  # each of the six carries its label


def test_a_vendor_without_a_baseline_is_not_available_and_says_why(tmp_path: Path) -> None:
    alone = Baseline(
        vendor="aurora",
        num_devices=2,
        rows_per_s=None,
        scaled_batch_rows=8,
        scaled_rows_per_s=None,
        ideal_rows_per_s=10.0,
        shape="",
        why="lacks 12 GiB",
    )
    plan = make_plan(baselines=(alone,))
    words = Page(to_html(build_report(write_run(tmp_path, plan, outcome=make_outcome(plan))))).words
    assert "n/a: aurora has no baseline: lacks 12 GiB" in words


def test_a_page_without_an_even_split_says_why(report: RunReport) -> None:
    page = Page(to_html(replace(report, even_split=None, even_split_why="23 layers do not divide")))
    assert "There is no even split beside it: 23 layers do not divide." in page.words


def test_a_failed_run_is_loud(report: RunReport) -> None:
    failure = Failure(host="b1", rank=3, when_s=5.0, what="killed by signal 9")
    failed = replace(report, status="failed", steps=4, failures=(failure,))
    page = Page(to_html(failed))
    assert "This run is not complete: failed after 4 of 12 steps." in page.words
    assert "First failure: b1, rank 3: killed by signal 9" in page.words
    assert ("role", "alert") in page.attributes
    assert ("role", "alert") not in Page(to_html(report)).attributes


@pytest.mark.parametrize(
    "shape",
    [
        Shape((("aurora", 24),), num_microbatches=4),
        Shape((("aurora", 12), ("borealis", 12)), num_replicas=32, num_microbatches=8),
    ],
    ids=["1 rank", "64 ranks"],
)
def test_every_rank_has_a_lane_and_a_bar(tmp_path: Path, shape: Shape) -> None:
    plan = make_plan(shape, steps=3)
    report = build_report(write_run(tmp_path, plan, outcome=make_outcome(plan)))
    text = to_html(report)
    page = Page(text)
    lanes = [value for key, value in page.attributes if key == "class" and value == "lane"]
    bars = [value for key, value in page.attributes if key == "class" and value == "lane bars"]
    assert len(bars) == len(plan.split.ranks)
    assert len(lanes) == len(plan.split.ranks) + 1  # and the axis
    assert len(text) < 2_000_000


def test_more_ranks_than_lanes_show_every_kind_of_stage_and_say_so(tmp_path: Path) -> None:
    shape = Shape((("aurora", 12), ("borealis", 12)), num_replicas=40, num_microbatches=2)
    plan = make_plan(shape, steps=2)
    report = build_report(write_run(tmp_path, plan, outcome=make_outcome(plan)))
    page = Page(to_html(report))
    bars = [value for key, value in page.attributes if key == "class" and value == "lane bars"]
    assert len(bars) == MOST_LANES
    assert f"{MOST_LANES} of 80 ranks" in page.words


def test_many_spans_become_paths_that_cover_the_same_time(report: RunReport) -> None:
    trace = report.timeline[0]
    step_s = report.step_s
    many = tuple(
        replace(span, start_s=span.start_s + step_s * turn, end_s=span.end_s + step_s * turn)
        for turn in range(60)
        for span in trace.spans
    )
    timeline = tuple(replace(trace, rank=rank, spans=many) for rank in range(4))
    text = to_html(replace(report, timeline=timeline))
    assert text.count("<path ") == 4 * len({span.kind for span in many})
    assert len(text) < 200_000


def test_gradients_of_weights_are_explained_where_some_rank_put_them_off(report: RunReport) -> None:
    assert "gradients of weights" not in Page(to_html(report)).words
    trace = report.timeline[0]
    put_off = replace(trace.spans[-1], kind="W", microbatch=3)
    timeline = (replace(trace, spans=(*trace.spans, put_off)), *report.timeline[1:])
    words = Page(to_html(replace(report, timeline=timeline))).words
    assert "forward, backward, gradients of weights" in words


def test_ticks_are_round_and_enclose_the_values() -> None:
    assert round_ticks(0.13, 0.91, 4) == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    low, *_, high = round_ticks(3.0, 3.0, 4)
    assert low < high


def test_thinning_keeps_the_ends_and_the_peaks() -> None:
    values = [0.0] * 5000
    values[1234] = 9.0
    kept = thin(values, 100)
    assert len(kept) <= 100
    assert kept[0][0] == 0
    assert kept[-1][0] == 4999
    assert (1234, 9.0) in kept


def test_elements_escape_text_and_attributes_alike() -> None:
    assert el("i", "a<b", title='"x"') == '<i title="&quot;x&quot;">a&lt;b</i>'
