from __future__ import annotations

from dataclasses import replace

import pytest

from hetrun.model import GIB, MIB, Quantity, Source
from hetrun.report import words
from tests.unit.report_factory import make_plan


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "n/a"),
        (0.0, "0 s"),
        (1e-17, "0 s"),
        (45e-9, "45 ns"),
        (1.5e-6, "1.50 µs"),
        (0.0123, "12.3 ms"),
        (0.99999, "1.00 s"),
        (59.96, "60.0 s"),
        (99.99, "1 min 40 s"),
        (3599.7, "1 h 00 min"),
        (7325, "2 h 02 min"),
        (-0.5, "-500 ms"),
    ],
)
def test_seconds_get_the_unit_that_a_person_would_choose(seconds: float | None, text: str) -> None:
    assert words.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (None, "n/a"),
        (80 * GIB, "80.0 GiB"),
        (512 * MIB, "512 MiB"),
        (GIB - 1, "1.0 GiB"),
        (2048, "2 KiB"),
        (12, "12 bytes"),
    ],
)
def test_bytes_are_counted_in_powers_of_two(num_bytes: int | None, text: str) -> None:
    assert words.format_bytes(num_bytes) == text


def test_shares_above_one_are_not_clamped() -> None:
    assert words.format_percent(1.0437, 2) == "104.37 %"


def test_no_change_has_no_sign() -> None:
    assert words.format_change(-0.00001) == "0.0 %"
    assert words.format_change(0.052) == "+5.2 %"


def test_a_quantity_tells_its_source_unless_it_was_measured() -> None:
    def show(value: float) -> str:
        return words.format_percent(value)

    measured = Quantity(value=0.5, source=Source.MEASURED)
    modelled = Quantity(value=0.5, source=Source.MODELLED)
    unknown = Quantity(value=None, source=Source.ASSUMED)
    assert words.format_quantity(measured, show) == "50.0 %"
    assert words.format_quantity(modelled, show) == "50.0 % (modelled)"
    assert words.format_quantity(unknown, show) == "n/a"


def test_text_from_a_host_cannot_drive_a_terminal_nor_fill_it() -> None:
    hostile = "\x1b]0;owned\x07\x9b31m\u202egnp.exe \ud800 fine\n\tline"
    shown = words.printable(hostile)
    assert not any(char in shown for char in "\x1b\x07\x9b\u202e\ud800")
    assert shown.endswith(" fine\n\tline")
    assert len(words.printable("x" * 10_000, max_chars=100)) < 120


def test_long_lists_are_cut_and_runs_of_numbers_are_ranges() -> None:
    assert words.some([0, 1, 2, 5]) == "0-2, 5"
    assert words.some(["a", "b", "c"], most=2) == "a, b and 1 more"


def test_a_stage_without_layers_says_what_it_holds() -> None:
    assert words.layers_of(0, 0, embedding=True, head=False) == "embedding"
    assert words.layers_of(7, 5, embedding=False, head=True) == "7-11, head"


@pytest.mark.parametrize(
    ("ranks", "lanes", "recompute", "text"),
    [
        (1, 1, False, ""),
        (2, 1, False, ", tp 2"),
        (3, 3, False, ", 3 lanes"),
        (4, 2, True, ", tp 2, 2 lanes, recomputing"),
    ],
)
def test_a_stage_says_how_it_uses_its_devices(
    ranks: int, lanes: int, recompute: bool, text: str
) -> None:
    stage = make_plan().split.replicas[0].stages[0]
    used = replace(stage, ranks=tuple(range(ranks)), lanes=lanes, recompute=recompute)
    assert words.way_of(used) == text
