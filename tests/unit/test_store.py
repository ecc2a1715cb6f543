import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetrun import store
from hetrun.errors import ConfigError, StorageError
from hetrun.model import (
    Connection,
    Device,
    EmulatedChip,
    Facts,
    HostFacts,
    HostSpec,
    Link,
    LinkKind,
    Nic,
    Profile,
    Quantity,
    Source,
)

CHIP = EmulatedChip(vendor="v", model="m", num_devices=1, flops_per_s=1.5e9, memory_bytes=1 << 40)
FACTS = Facts(
    created="2026-11-30T12:00:00+00:00",
    inventory="lab",
    hosts=(
        HostFacts(
            spec=HostSpec(
                name="a1", connection=Connection.LOCAL, emulate=(CHIP,), env={"A": "ü\n"}
            ),
            clock_offset_s=-0.25,
            nics=(Nic(name="lo", addresses=("127.0.0.1", "::1")),),
            devices=(
                Device(
                    index=0,
                    vendor="v",
                    model=None,
                    memory=Quantity(value=None, source=Source.ASSUMED, why="unknown"),
                    emulated=CHIP,
                ),
            ),
        ),
        HostFacts(spec=HostSpec(name="a2"), error="silent"),
    ),
    links=(Link(kind=LinkKind.ACROSS, latency_s=1e-6, bytes_per_s=0.1, a="v"),),
)


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    store.save(FACTS, path)
    assert store.load(Facts, path) == FACTS
    assert path.read_text() == store.dumps(FACTS)
    assert path.stat().st_mode & 0o777 == 0o644


def test_enums_are_values_and_keys_keep_their_order() -> None:
    data = json.loads(store.dumps(FACTS))
    assert list(data) == ["schema_version", "created", "inventory", "hosts", "links"]
    assert data["hosts"][0]["spec"]["connection"] == "local"
    assert data["links"][0]["kind"] == "across"


def test_infinite_numbers_are_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.dumps(Quantity(value=float("inf"), source=Source.ASSUMED))
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.dumps(Quantity(value=float("nan"), source=Source.ASSUMED))


def test_words_that_look_like_no_number_are_text(tmp_path: Path) -> None:
    odd = Facts(created="NaN", inventory='a "b": -Infinity', hosts=(), links=())
    store.save(odd, tmp_path / "facts.json")
    assert store.load(Facts, tmp_path / "facts.json") == odd


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_schema_version_is_refused_with_the_command_that_rewrites(
    tmp_path: Path, version: object
) -> None:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({**json.loads(store.dumps(FACTS)), "schema_version": version}))
    with pytest.raises(ConfigError, match="schema_version") as caught:
        store.load(Facts, path)
    assert "hetrun probe" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "line 1, column 1: not JSON"),
        (b'{"a": 1,\n "b" 2}', "line 2, column 6: not JSON"),
        (b"[1]", "holds no JSON object"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"schema_version": 1, "created": "x", "inventory": "y"}', "hosts: is missing"),
    ],
)
def test_damaged_file_is_a_config_error(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "facts.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        store.load(Facts, path)
    assert says in caught.value.message


def test_file_of_another_kind_is_told_by_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    store.save(FACTS, path)
    with pytest.raises(ConfigError, match="inventory: unknown key"):
        store.load(Profile, path)


def test_missing_file_names_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file") as caught:
        store.load(Profile, tmp_path / "profile.json")
    assert "hetrun profile" in (caught.value.hint or "")


def test_full_disk_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "facts.json"
    store.save(FACTS, path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left") as caught:
        store.save(replace(FACTS, inventory="other"), path)
    assert "free some space" in (caught.value.hint or "")
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["facts.json"]


def test_interrupted_save_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "facts.json"
    store.save(FACTS, path)

    def interrupt(self: Path, target: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(replace(FACTS, inventory="other"), path)
    monkeypatch.undo()
    assert store.load(Facts, path) == FACTS
    assert [item.name for item in tmp_path.iterdir()] == ["facts.json"]


def test_missing_folder_and_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        store.save(FACTS, tmp_path / "no" / "facts.json")
    assert "mkdir -p" in (caught.value.hint or "")
    for target in (Path("/dev/null"), tmp_path):
        with pytest.raises(StorageError, match="no plain file"):
            store.save(FACTS, target)


def test_link_is_followed_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "facts.json"
    link = tmp_path / "facts.json"
    link.symlink_to(target)
    store.save(FACTS, link)
    assert link.is_symlink()
    assert store.load(Facts, target) == FACTS
