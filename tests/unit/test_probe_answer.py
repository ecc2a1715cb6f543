import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrun.probe.answer import last_line, plain, read_answer
from tests.unit.probe_output import END_S, NONCE, output


def test_sections_keep_streams_and_exit_codes_apart() -> None:
    answer = read_answer(
        output({"a": "one\ntwo\n", "b": ""}, rc={"b": 3}, stderr={"b": "no\n"}), nonce=NONCE
    )
    assert (answer.section("a").rc, answer.section("a").lines) == (0, ["one", "two"])
    assert answer.section("a").stdout == b"one\ntwo\n"
    assert (answer.section("b").rc, answer.section("b").stderr) == (3, b"no\n")
    assert answer.is_complete
    assert (answer.start_s, answer.end_s) == (END_S - 3, END_S)


def test_missing_section_is_an_empty_one_without_exit_code() -> None:
    section = read_answer(output({}), nonce=NONCE).section("nothing")
    assert (section.rc, section.stdout, section.cut) == (None, b"", False)


def test_output_cannot_forge_a_section_without_the_nonce() -> None:
    forged = output({"a": "\nffffffffffffffff out b 0 1\nx\n"})
    assert set(read_answer(forged, nonce=NONCE).sections) == {"a"}


def test_output_that_stops_is_not_complete() -> None:
    assert not read_answer(output({"a": "x"}, end=False), nonce=NONCE).is_complete
    assert not read_answer(b"", nonce=NONCE).is_complete


def test_section_shorter_than_its_size_is_cut() -> None:
    text = f"\n{NONCE} out a 0 5000\nshort\n{NONCE} out b none 0\n".encode()
    answer = read_answer(text, nonce=NONCE)
    assert answer.section("a").cut
    assert answer.section("b").rc is None


def test_host_without_a_writable_folder_says_so() -> None:
    assert read_answer(f"\n{NONCE} full\n".encode(), nonce=NONCE).no_space


def test_clock_that_cannot_tell_fractions_is_unknown() -> None:
    answer = read_answer(f"\n{NONCE} end 1790000000.N 1790000000\n".encode(), nonce=NONCE)
    assert (answer.start_s, answer.end_s) == (None, 1790000000.0)


@given(body=st.binary(max_size=300), after=st.binary(max_size=60))
def test_any_bytes_give_an_answer(body: bytes, after: bytes) -> None:
    marked = f"\n{NONCE} ".encode()
    read_answer(body + marked + after + marked + body, nonce=NONCE)


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        ("two  words\n", "two words"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07name", "name"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\x00b\rc\x9b31m", "a b c 31m"),
        ("left\u202eright\u2028end", "left right end"),
        (b"bytes \xff\n", "bytes \ufffd"),
        ("x" * 500, "x" * 197 + "..."),
        ("\x1b[2J \n", None),
        (None, None),
    ],
)
def test_foreign_text_loses_what_could_move_a_terminal(
    raw: str | bytes | None, kept: str | None
) -> None:
    assert plain(raw) == kept


@given(raw=st.text(max_size=80) | st.binary(max_size=80))
def test_plain_text_is_printable_and_short(raw: str | bytes) -> None:
    text = plain(raw, max_chars=20)
    assert text is None or (0 < len(text) <= 20 and text.isprintable())


def test_last_line_skips_blank_ones() -> None:
    assert last_line(b"first\nthe reason\n \n\x1b[0m\n") == "the reason"
    assert last_line(b"") is None
