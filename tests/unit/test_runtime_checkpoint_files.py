"""Files of a checkpoint give back what was put in; damaged ones are named and never believed."""

from __future__ import annotations

import json
import pickle
import resource
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetrun.errors import ConfigError, StorageError
from hetrun.runtime import checkpoint_files as files
from hetrun.runtime.boxes import Box, covers, whole_box
from hetrun.runtime.checkpoint_files import BadCheckpointError
from tests.unit.checkpoint_lab import an_index, write_folder

VALUES = {
    "a": torch.arange(12, dtype=torch.float64).reshape(3, 4) / 7,
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3).to(torch.bfloat16),
    "count": torch.tensor(3.0),
    "empty": torch.empty(0, 5),
}


def test_tensors_come_back_bit_by_bit(tmp_path: Path) -> None:
    path = tmp_path / "rank-0000.safetensors"
    assert files.write_shard(path, VALUES) == path.stat().st_size
    back = {piece.name: piece.read() for piece in files.read_shard(path)}
    assert set(back) == set(VALUES)
    for name, value in VALUES.items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name], value)


def test_library_of_the_format_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    files.write_shard(tmp_path / "ours", VALUES)
    save_file(VALUES, tmp_path / "theirs")
    for path in ("ours", "theirs"):
        loaded = load_file(tmp_path / path)
        back = {piece.name: piece.read() for piece in files.read_shard(tmp_path / path)}
        for name, value in VALUES.items():
            assert torch.equal(loaded[name], value)
            assert torch.equal(back[name], value)


CUTS = [
    [((0, 1), (0, 4)), ((1, 3), (0, 4))],
    [((0, 3), (0, 2)), ((0, 3), (2, 3)), ((0, 3), (3, 4))],
    [((0, 3), (0, 2)), ((0, 2), (2, 4)), ((2, 3), (2, 4))],  # shares of a matrix, one cut by rows
]


@pytest.mark.parametrize("cuts", CUTS)
def test_parts_make_up_a_tensor_and_any_other_part_of_it(
    cuts: list[tuple[tuple[int, int], ...]], tmp_path: Path
) -> None:
    whole = VALUES["a"]
    boxes = [Box(ranges, (3, 4)) for ranges in cuts]
    pieces = []
    for rank, box in enumerate(boxes):
        path = tmp_path / files.shard_name(rank)
        values = {"a#0": box.of(whole).contiguous()}
        files.write_shard(path, values, files.metadata_of({"a#0": ("a", box)}))
        pieces += files.read_shard(path)
    assert [piece.name for piece in pieces] == ["a"] * len(boxes)
    assert torch.equal(files.assemble(pieces), whole)
    for ranges in product([(0, 1), (1, 3), (0, 3)], [(0, 1), (1, 4), (2, 3), (0, 4)]):
        wanted = Box(ranges, (3, 4))
        assert torch.equal(files.assemble(reversed(pieces), wanted), wanted.of(whole))
    for missing in range(len(pieces)):
        rest = [piece for place, piece in enumerate(pieces) if place != missing]
        assert not covers((piece.box for piece in rest), whole_box((3, 4)))
        assert torch.equal(files.assemble(rest, rest[0].box), rest[0].box.of(whole))
        with pytest.raises(BadCheckpointError, match=r"parts of a .* are missing"):
            files.assemble(rest)


def test_a_part_of_another_shape_makes_up_nothing() -> None:
    assert not covers([whole_box((3, 5)), whole_box(())], whole_box((3, 4)))


def _damaged(header: object, data: bytes = b"\0" * 16) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _entry(**changes: object) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        pickle.dumps({"a": 1}),
        _damaged(b"{" * 5000),
        _damaged([1]),
        _damaged({"a": 1}),
        _damaged({"a": {}}),
        _damaged(_entry(dtype="O")),
        _damaged(_entry(shape=[-4])),
        _damaged(_entry(shape=[1 << 60])),
        _damaged(_entry(shape=[8])),
        _damaged(_entry(shape=[1 << 62, 1 << 62, 0], data_offsets=[0, 0])),
        _damaged(_entry(shape=[1 << 32, 1 << 32], data_offsets=[0, 0])),
        _damaged(_entry(shape="abc")),
        _damaged(_entry(data_offsets=[0, 32])),
        _damaged(_entry(data_offsets=[-16, 0])),
        _damaged(_entry(data_offsets=[16, 0])),
        _damaged(_entry(data_offsets=[0.0, 16.0])),
        _damaged({**_entry(), "__metadata__": {"hetrun.parts": '{"a": ["a", [[0, 9, 9]]]}'}}),
        _damaged({**_entry(), "__metadata__": {"hetrun.parts": '{"a": ["a", [[5, 1, 9]]]}'}}),
        _damaged({**_entry(), "__metadata__": {"hetrun.parts": '{"a": [1]}'}}),
        _damaged({**_entry(), "__metadata__": 3}),
    ],
)
def test_damaged_shard_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rank-0000.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadCheckpointError, match=r"rank-0000\.safetensors"):
        files.read_shard(path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_damage_to_a_header_gets_through_as_another_error(
    data: st.DataObject, tmp_path: Path
) -> None:
    path = tmp_path / "rank-0000.safetensors"
    files.write_shard(path, VALUES, files.metadata_of({"b": ("b", Box(((0, 2), (0, 3)), (4, 3)))}))
    content = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(32, 126))
    path.write_bytes(bytes(content))
    try:
        for piece in files.read_shard(path):
            piece.read()
    except (BadCheckpointError, StorageError):
        pass


def test_index_says_what_is_whole(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "step-6", VALUES, an_index())
    assert files.step_folders(tmp_path) == {6: folder}
    index = files.read_index(folder)
    assert replace(index, files={}) == an_index()
    assert set(files.read_pieces(folder, index)) == set(VALUES)
    shard = folder / "rank-0000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(BadCheckpointError, match="bytes, its index says"):
        files.read_index(folder)
    shard.unlink()
    with pytest.raises(BadCheckpointError, match="no bytes, its index says"):
        files.read_index(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format_version": 2}, "format_version 2, this hetrun reads 1"),
        ({"files": {"../../etc/passwd": 3}}, "need rank-NNNN.safetensors"),
        ({"step": "six"}, 'step: got "six"'),
        ({"colour": "red"}, "unknown key 'colour'"),
    ],
)
def test_wrong_index_is_named(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "step-6", VALUES, an_index())
    path = folder / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError) as caught:
        files.read_index(folder)
    assert says in caught.value.message


def test_what_is_half_removed_or_half_written_does_not_count(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write_folder(tmp_path / f"step-{step}", VALUES, an_index(step=step))
    write_folder(tmp_path / "step-8.tmp", VALUES, an_index(step=8))
    (tmp_path / "step-2" / "index.json").unlink()
    (tmp_path / "step-x").mkdir()
    assert sorted(files.step_folders(tmp_path)) == [4, 6]
    files.remove_others(tmp_path, [6])
    files.remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-6", "step-x"]
    assert files.step_folders(tmp_path / "nowhere") == {}


def test_file_that_finds_no_room_is_an_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            files.write_shard(tmp_path / "shard", {"a": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_shard_that_ends_early_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0000.safetensors"
    files.write_shard(path, VALUES)
    pieces = files.read_shard(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(StorageError, match="ends inside"):
        [piece.read() for piece in pieces]
