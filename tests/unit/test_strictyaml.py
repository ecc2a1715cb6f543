import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrun.errors import ConfigError
from hetrun.model import HostSpec, Link, Profile, Recipe
from hetrun.strictyaml import (
    MAX_BYTES,
    BadKeysError,
    config_error,
    read_yaml,
    shown,
    to_noun,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("yaml") / "x.yaml"


def read(file: Path, content: str | bytes) -> dict[str, object]:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_yaml(file)


def test_scalars_stay_text(file: Path) -> None:
    content = "port: 022\nversion: 1.10\nmac: 12:34:56\nno: on\nday: 2026-11-30\nhome: ~\n"
    assert read(file, content) == {
        "port": "022",
        "version": "1.10",
        "mac": "12:34:56",
        "no": "on",
        "day": "2026-11-30",
        "home": "~",
    }


def test_empty_and_null_are_none_but_not_when_quoted(file: Path) -> None:
    assert read(file, "a:\nb: null\nc: 'null'\nd: ''\n") == {
        "a": None,
        "b": None,
        "c": "null",
        "d": "",
    }


def test_crlf_and_byte_order_mark_are_fine(file: Path) -> None:
    assert read(file, b"\xef\xbb\xbfa: 1\r\nb: [2, 3]\r\n") == {"a": "1", "b": ["2", "3"]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: key 'a' stands there twice, first in line 1"),
        ("h:\n  x: {p: 1, p: 2}\n", "line 2, column 13: key 'p' stands there twice"),
        ("a: !!python/object/apply:os.system [true]\n", "line 1, column 4: tag"),
        ("a: !secret x\n", "tag '!secret'"),
        ("a: &x [1]\nb: *x\n", "line 1, column 4: anchors"),
        ("a: &x\n", "anchors"),
        ("a: [" + "[" * 5000, "nested deeper than 16 levels"),
        ("a:\n\t- b\n", "line 2, column 1: found character '\\t'"),
        ("a: b: c\n", "line 1, column 5"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1"),
        ("? [a]\n: b\n", "a key must be text"),
        ("'': 1\n", "a key must be text"),
        ('a: "\\UFFFFFFFF"\n', "not a YAML text"),
        ("a: \x00\n", "not a YAML text"),
        ("", "empty"),
        ("# nothing\n", "empty"),
        ("- a\n", "not a mapping"),
        ("text\n", "not a mapping"),
        (b"a: 1\nb: \xff\n", "line 2: not UTF-8"),
        (b"a: " + b"x" * MAX_BYTES, "larger than 4 MiB"),
    ],
)
def test_bad_yaml_is_one_error_that_names_file_and_line(
    file: Path, content: str | bytes, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(file, content)
    assert caught.value.message.startswith(f"{file}: ")
    assert says in caught.value.message


def test_missing_file_and_folder_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file") as caught:
        read_yaml(tmp_path / "lab.yaml", hint="see the example")
    assert caught.value.hint == "see the example"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(tmp_path)


@given(content=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(file: Path, content: bytes) -> None:
    with contextlib.suppress(ConfigError):
        read(file, content)


@given(content=st.text(alphabet="ab:-[]{},&*!|>'\"#%@`? \n\t\\U0x\ud7ff", max_size=60))
def test_any_yaml_like_text_is_read_or_refused(file: Path, content: str) -> None:
    with contextlib.suppress(ConfigError):
        read(file, content)


# --- typed ----------------------------------------------------------------------------------------------------


def problems(kind: type, data: object) -> dict[str, str]:
    with pytest.raises(BadKeysError) as caught:
        to_noun(kind, data)
    return {".".join(path): what for path, what in caught.value.problems}


def test_text_becomes_what_the_field_needs() -> None:
    spec = to_noun(
        HostSpec, {"name": "a1", "port": "0022", "connection": "local", "env": {"A": "022"}}
    )
    assert (spec.port, spec.connection.value, spec.env) == (22, "local", {"A": "022"})


def test_every_wrong_key_is_named_with_its_path() -> None:
    found = problems(
        Recipe,
        {
            "name": "r",
            "model": {"num_layers": "x", "hiden_size": "64"},
            "data": "y",
            "train": {"steps": "1", "global_batch_rows": "4", "microbatch_rows": ["1", "b"]},
        },
    )
    assert found["model.num_layers"] == "need a whole number, got 'x'"
    assert found["model.hiden_size"] == "unknown key; did you mean hidden_size?"
    assert found["model.num_heads"] == "is missing"
    assert found["train.microbatch_rows.1"] == "need a whole number, got 'b'"
    assert found["data"].startswith("need a mapping with keys seq_len, kind, path, ")
    assert found["data"].endswith(", got 'y'")


def test_nearest_key_is_found_inside_lists() -> None:
    found = problems(Profile, {"devices": [{"timings": [{"row": 1}]}]})
    assert found["devices.0.timings.0.row"] == "unknown key; did you mean rows?"


def test_what_a_noun_refuses_is_told_in_its_words() -> None:
    assert problems(HostSpec, {"name": "a1", "port": "0"}) == {
        "": "host a1: port 0, need 1 to 65535"
    }


def test_infinite_numbers_are_refused() -> None:
    link = {"kind": "across", "latency_s": "nan", "bytes_per_s": "inf"}
    assert set(problems(HostSpec, {"name": "x", "emulate": [{"flops_per_s": "inf"}]})) >= {
        "emulate.0.flops_per_s"
    }
    assert set(problems(Link, link)) == {"latency_s", "bytes_per_s"}


def test_values_of_variables_are_not_shown() -> None:
    found = problems(HostSpec, {"name": "a1", "env": {"TOKEN": ["s3cret"]}})
    assert found == {"env.TOKEN": "need text, got a value that is not shown"}


def test_long_values_are_cut() -> None:
    assert len(shown("x" * 1000)) == 60


def test_many_problems_are_counted_but_not_all_shown() -> None:
    error = config_error(Path("a.yaml"), [((f"k{n}",), "is missing") for n in range(40)])
    assert error.message.startswith("a.yaml: 40 things are wrong\n  k0: is missing\n")
    assert error.message.endswith("and 28 more")


def test_one_problem_is_one_line() -> None:
    assert config_error(Path("a.yaml"), [(("k",), "is missing")] * 2).message == (
        "a.yaml: k: is missing"
    )
