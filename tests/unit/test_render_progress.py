from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from hetrun.cli import render
from hetrun.cli.progress import HostProgress, LaunchView
from hetrun.model import ErrorEvent, HostFacts, HostSpec, Plan, StartEvent, StepEvent
from tests.unit.report_factory import make_plan, rank_events

HOSTILE = "[red]x[/red] \x1b[2J\x07 [link=a]y[/link]"
PLAN = make_plan()


@pytest.fixture(autouse=True)
def _fresh_console() -> Iterator[None]:
    render.talk.cache_clear()
    yield
    render.talk.cache_clear()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def plain_view(plan: Plan) -> tuple[LaunchView, io.StringIO, Clock]:
    clock, file = Clock(), io.StringIO()
    console = Console(file=file, markup=False, highlight=False, width=200)
    return LaunchView(console, plan, clock=clock), file, clock


def step_events(rank: int = 0) -> list[StepEvent]:
    return [event for event in rank_events(PLAN, rank) if isinstance(event, StepEvent)]


def test_without_a_terminal_a_line_comes_every_few_seconds() -> None:
    view, file, clock = plain_view(PLAN)
    with view:
        for event in step_events():
            view.on_event(event)
            view.on_event(replace(event, rank=1))
            clock.now_s += 2.0
    steps = re.findall(r"step (\d+)/12", file.getvalue())
    assert steps == ["1", "4", "7", "10", "12"]  # the first, then one in six seconds, the last


def test_the_line_says_step_loss_throughput_and_time_to_go() -> None:
    view, _, clock = plain_view(PLAN)
    events = step_events()
    view.on_event(events[0])
    assert view.seconds_left(clock()) is None
    clock.now_s += 3.0
    view.on_event(events[1])
    line = view.line().plain
    assert line.startswith("step 2/12 (17 %)  loss 6.198")
    assert "2,164 tokens/s (modelled)" in line
    assert line.endswith("elapsed 3.00 s  ETA 30.0 s")
    clock.now_s += 1.0
    assert view.seconds_left(clock()) == pytest.approx(29.0)


def test_measured_runs_carry_no_label() -> None:
    view, _, _ = plain_view(make_plan(emulated=False))
    view.on_event(step_events()[1])
    assert "modelled" not in view.line().plain


def test_before_the_first_step_the_line_counts_ranks() -> None:
    view, file, _ = plain_view(PLAN)
    view.on_status("a1", "torchrun started")
    view.on_status("a1", "torchrun started")
    start = rank_events(PLAN, 0)[0]
    assert isinstance(start, StartEvent)
    view.on_event(start)
    assert view.line().plain.startswith("starting: 1 of 4 ranks up")
    assert file.getvalue() == "a1: torchrun started\n"


def test_errors_and_lines_of_rank_0_are_shown_as_they_stand() -> None:
    view, file, _ = plain_view(PLAN)
    error = ErrorEvent(
        rank=2, host="b1", wall_s=0, step=3, kind="ValueError", message=HOSTILE, traceback=""
    )
    view.on_event(error)
    view.on_line("a1", 0, f"{HOSTILE}\n")
    view.on_line("b1", 2, "of another rank")
    shown = file.getvalue().splitlines()
    assert shown[0].startswith("rank 2 on b1 raised ValueError: [red]x[/red]")
    assert shown[1].startswith("a1/0 [red]x[/red]")
    assert len(shown) == 2
    assert "\x1b" not in file.getvalue()


def test_on_a_terminal_there_is_one_live_line_that_goes_away() -> None:
    file = Terminal()
    console = Console(file=file, markup=False, width=100, force_terminal=True, no_color=True)
    clock = Clock()
    with LaunchView(console, PLAN, clock=clock) as view:
        assert isinstance(view, LaunchView)
        for event in step_events()[:3]:
            view.on_event(event)
            clock.now_s += 10
    text = file.getvalue()
    assert "step 3/12" in text
    assert text.count("\n") <= 2  # no line per step
    assert text.rstrip().endswith("\x1b[2K")  # wiped


def test_host_progress_counts_hosts_and_keeps_failures() -> None:
    file = io.StringIO()
    progress = HostProgress(Console(file=file, markup=False, width=100), "probe", 3)
    with progress:
        progress("a1", HostFacts(spec=HostSpec(name="a1")))
        progress("b1", HostFacts(spec=HostSpec(name="b1"), error=f"refused {HOSTILE}"))
        progress("c1", "failed: no module named torch")
    lines = file.getvalue().splitlines()
    assert lines[0] == "probe 1/3  a1: 0 devices"
    assert lines[1].startswith("probe 2/3  b1: refused [red]x[/red]")
    assert lines[2] == "probe 3/3  c1: failed: no module named torch"


def test_the_blocks_that_the_commands_use_yield_what_is_called(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with render.host_progress("profile", 1) as progress:
        progress("a1", "measured aurora-100")
    with render.live_view(PLAN) as observer:
        observer.on_event(step_events()[0])
    out, err = capfd.readouterr()
    assert out == ""
    assert "profile 1/1  a1: measured aurora-100" in err
    assert "step 1/12" in err
