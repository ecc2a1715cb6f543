from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun import store
from hetrun.cli import render
from hetrun.cli.hosts import facts_view
from hetrun.cli.results import plan_view
from hetrun.errors import HostError
from hetrun.launch.files import HostCommand
from hetrun.model import (
    GIB,
    Baseline,
    Device,
    DeviceProfile,
    Facts,
    Failure,
    HostFacts,
    HostSpec,
    Link,
    LinkKind,
    Profile,
    Quantity,
    Restart,
    RowTiming,
    Share,
    Source,
)
from hetrun.report import build_report
from tests.unit.report_factory import (
    MODEL,
    Shape,
    make_outcome,
    make_plan,
    rank_events,
    write_run,
)

HOSTILE = "[red]x[/red] \x1b[2J\x07 [link=a]y[/link]"
PLAN = make_plan()


@pytest.fixture(autouse=True)
def _fresh_console() -> Iterator[None]:
    render.talk.cache_clear()
    yield
    render.talk.cache_clear()


def words_of(text: str) -> str:
    return " ".join(text.split())


def make_facts() -> Facts:
    spec_memory = Quantity(value=float(64 * GIB), source=Source.SPEC)
    devices = tuple(
        Device(index=index, vendor="aurora", model="aurora-100", memory=spec_memory, driver="1.2")
        for index in range(4)
    )
    other = Device(
        index=4, vendor="borealis", model=None, memory=Quantity(value=None, source=Source.ASSUMED)
    )
    return Facts(
        created="2030-01-01T00:00:00Z",
        inventory="lab",
        hosts=(
            HostFacts(
                spec=HostSpec(name="a1"),
                devices=(*devices, other),
                python_version="3.11.2",
                torch_version="2.6.0",
                warnings=(f"bus lost: {HOSTILE}",),
            ),
            HostFacts(spec=HostSpec(name="b1"), error=f"refused {HOSTILE}"),
            HostFacts(spec=HostSpec(name="c1"), torch_error="no module named torch"),
        ),
    )


def make_profile(source: Source) -> Profile:
    timing = RowTiming(
        rows=1,
        layer_forward_s=0.001,
        layer_backward_s=0.002,
        embedding_forward_s=0.0,
        embedding_backward_s=0.0,
        head_forward_s=0.003,
        head_backward_s=0.004,
    )
    device = DeviceProfile(
        vendor="aurora",
        model="aurora-100",
        hosts=("a1",),
        source=source,
        timings=(timing,),
        optimizer_s_per_parameter=1e-9,
        matmul_flops_per_s=Quantity(value=3.12e14, source=source),
        copy_bytes_per_s=Quantity(value=None, source=Source.ASSUMED),
    )
    link = Link(kind=LinkKind.ACROSS, latency_s=5e-5, bytes_per_s=1.25e9, a="aurora", b="borealis")
    return Profile(
        created="", recipe="tiny", model=MODEL, seq_len=128, devices=(device,), links=(link,)
    )


# --- where things go --------------------------------------------------------------------------------------


def test_tables_are_talk_and_json_is_data(capfd: pytest.CaptureFixture[str]) -> None:
    facts = make_facts()
    render.show_facts(facts, Path("facts.json"), as_json=False)
    out, err = capfd.readouterr()
    assert out == ""
    assert "saved: facts.json" in err
    render.show_facts(facts, Path("facts.json"), as_json=True)
    out, err = capfd.readouterr()
    assert err == ""
    assert out == store.dumps(facts)


def test_json_is_utf8_whatever_the_locale_says(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    render.print_text("芯片")
    assert raw.getvalue() == "芯片\n".encode()


def test_an_error_is_two_lines_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    render.show_error(HostError(f"no {HOSTILE}", host="b1", hint="try: ssh b1"))
    out, err = capfd.readouterr()
    assert out == ""
    error, hint = err.splitlines()
    assert error.startswith("error: b1: no [red]x[/red]")
    assert hint == "hint: try: ssh b1"
    assert "\x1b" not in err


def test_our_own_bug_asks_for_a_report(capfd: pytest.CaptureFixture[str]) -> None:
    render.show_internal_error(KeyError("x"))
    err = capfd.readouterr().err
    assert "error: this is a bug in hetrun: KeyError: 'x'" in err
    assert "HETRUN_DEBUG=1" in err


def test_warnings_of_our_log_reach_stderr_once(capfd: pytest.CaptureFixture[str]) -> None:
    render.set_up_logging(logging.WARNING)
    render.set_up_logging(logging.WARNING)
    logging.getLogger("hetrun.probe").warning("%s: no RDMA %s", "a1", HOSTILE)
    logging.getLogger("hetrun.probe").info("not shown")
    logging.getLogger("hetrun").handlers.clear()
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[0].startswith("warning: a1: no RDMA [red]x[/red]")
    assert len(err.splitlines()) == 1


# --- colour and width -------------------------------------------------------------------------------------


@pytest.mark.parametrize("no_colour", [True, False])
def test_colour_is_for_terminals_that_want_it(
    monkeypatch: pytest.MonkeyPatch, no_colour: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_colour:
        monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    render.show_error(HostError("no"))
    text = terminal.getvalue()
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]m", text)) is not no_colour


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_no_table_is_wider_than_the_terminal_and_nothing_is_cut(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    render.talk().print(plan_view(PLAN))
    render.talk().print(facts_view(make_facts()))
    err = capfd.readouterr().err
    assert max(len(line) for line in err.splitlines()) <= columns
    assert "…" not in err


# --- what stands in tables --------------------------------------------------------------------------------


def test_facts_count_like_devices_and_name_silent_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    render.show_facts(make_facts(), Path("facts.json"), as_json=False)
    err = capfd.readouterr().err
    lines = [words_of(line) for line in err.splitlines()]
    assert "a1 aurora aurora-100 4 64.0 GiB (spec) 1.2 Python 3.11.2, torch 2.6.0 1" in lines
    assert "borealis unknown model 1 n/a n/a" in lines
    assert "b1 no answer" in lines
    assert "3 hosts, 5 devices of 2 vendors; 1 host did not answer" in lines
    assert "c1: torch: no module named torch" in lines


def test_remote_text_is_neither_markup_nor_control(capfd: pytest.CaptureFixture[str]) -> None:
    render.show_facts(make_facts(), Path("facts.json"), as_json=False)
    err = capfd.readouterr().err
    assert err.count("[red]x[/red]") == 2
    assert "[link=a]y[/link]" in err
    assert "\x1b" not in err
    assert "\x07" not in err


def test_a_profile_labels_what_was_not_measured(capfd: pytest.CaptureFixture[str]) -> None:
    render.show_profile(make_profile(Source.MODELLED), Path("profile.json"), as_json=False)
    err = words_of(capfd.readouterr().err)
    assert "aurora aurora-100 a1 1 1.00 ms 2.00 ms 7.00 ms 0.0 % 312 TFLOP/s n/a modelled" in err
    assert "across aurora - borealis 50.0 µs 1.2 GiB/s assumed" in err


def test_a_plan_shows_both_splits_labelled_as_modelled(capfd: pytest.CaptureFixture[str]) -> None:
    render.show_plan(PLAN, Path("plan.json"), as_json=False)
    err = words_of(capfd.readouterr().err)
    assert PLAN.even_split is not None
    for efficiency in (PLAN.split.efficiency, PLAN.even_split.efficiency):
        for quantity in (efficiency.e1, efficiency.e2, efficiency.u):
            assert quantity.value is not None
            assert f"{100 * quantity.value:.2f} % (modelled)" in err
    assert "0 0 1 x aurora aurora-100 on a1 7 embedding, 0-6 16 (16 x 1) 4 7.3 GiB 14.7 GiB" in err
    assert PLAN.verdict in err
    assert f"runner-up: {PLAN.runner_up}" in err
    assert "pipeline bubble and whole layers" in err


def test_equal_replicas_share_their_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    plan = make_plan(Shape((("aurora", 24),), num_replicas=16, num_microbatches=2))
    render.show_plan(plan, Path("plan.json"), as_json=False)
    err = words_of(capfd.readouterr().err)
    assert "0-15 0 16 x aurora aurora-100 on a1, a2, a3 and 13 more 24" in err


def test_a_vendor_that_cannot_train_alone_is_not_available_and_says_why(
    capfd: pytest.CaptureFixture[str],
) -> None:
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
    lost = Share(value=None, kind=Source.MODELLED, why="aurora cannot train alone")
    efficiency = replace(PLAN.split.efficiency, e1=lost)
    plan = replace(PLAN, baselines=(alone,), split=replace(PLAN.split, efficiency=efficiency))
    render.show_plan(plan, Path("plan.json"), as_json=False)
    err = words_of(capfd.readouterr().err)
    assert "aurora 2 n/a n/a 10.0 rows/s n/a: lacks 12 GiB" in err
    assert "n/a: aurora cannot train alone" in err


def test_a_report_of_a_failed_run_begins_with_that(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failure = Failure(host="b1", rank=3, when_s=5.0, what="killed by signal 9")
    outcome = make_outcome(PLAN, "failed", (failure,))
    stopped = lambda rank, events: rank_events(PLAN, rank, steps=4)  # noqa: E731
    report = build_report(write_run(tmp_path, PLAN, outcome=outcome, change=stopped))
    render.show_report(report, tmp_path, as_json=False)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "This run is not complete: failed after 4 of 12 steps."
    assert lines[1] == "first failure: b1, rank 3: killed by signal 9"
    assert "warning: the run ended early: 4 steps of 12 finished" in lines


def test_an_outcome_puts_the_root_cause_first_and_the_folder_on_stdout(
    capfd: pytest.CaptureFixture[str],
) -> None:
    failures = (
        Failure(host="b1", rank=3, when_s=1.0, what="raised ValueError: no", last_lines=("a", "b")),
        Failure(host="a1", rank=0, when_s=2.0, what="killed by signal 15"),
    )
    restart = Restart(number=1, when_s=0, exit_code=6, failure=failures[1], checkpoint_step=4)
    outcome = replace(
        make_outcome(PLAN, "failed", failures), not_clean=("a1",), restarts=(restart,)
    )
    render.show_outcome(outcome, Path("runs/x"), as_json=False)
    out, err = capfd.readouterr()
    assert out == "runs/x\n"
    assert err.splitlines() == [
        "failed after 83.2 s: runs/x",
        "first failure: b1, rank 3: raised ValueError: no",
        "  | a",
        "  | b",
        "then: a1, rank 0: killed by signal 15",
        "restart 1 from the checkpoint of step 4, after exit code 6: a1, rank 0: killed by signal 15",
        "not clean: could not confirm that nothing is left running on a1",
        "hint: hetrun logs runs/x --rank 3 shows all of runs/x/logs/rank-0003.log",
        "hint: hetrun clean runs/x looks there again, and ends what is left",
    ]
    render.show_outcome(outcome, Path("runs/x"), as_json=True)
    assert json.loads(capfd.readouterr().out)["status"] == "failed"


def test_a_dry_run_shows_the_commands_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    command = HostCommand(
        host="a1",
        ranks=(0, 1),
        argv=("python3", "-m", "a b"),
        env={"A": HOSTILE},
        rank_env={},
        files={"plan.json": "0" * 64},
        opened_by="exec python3",
    )
    render.show_dry_run([command, replace(command, host="b1", ranks=(2,))], as_json=False)
    out, err = capfd.readouterr()
    assert err == ""
    assert "a1 (ranks 0-1)" in out
    assert "b1 (rank 2)" in out
    assert out.count("  run   python3 -m 'a b'\n") == 2
    assert "\x1b" not in out
    render.show_dry_run([command], as_json=True)
    assert json.loads(capfd.readouterr().out)[0]["argv"] == ["python3", "-m", "a b"]
