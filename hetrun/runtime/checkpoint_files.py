"""Files of one checkpoint's folder: safetensors shards and index.json. When they are written is left to `checkpoint.py`.

A safetensors file is the length of a header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, place)
and the raw values. Nothing here runs what a file says: no pickle, sizes are checked before they are believed.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from hetrun.errors import ConfigError, StorageError
from hetrun.model import CheckpointIndex
from hetrun.runtime.boxes import Box, box_of, covers, whole_box
from hetrun.runtime.job import decode, read_json

INDEX = "index.json"
FORMAT_VERSION = 1
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,  # this and what follows: in files of others only
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PARTS = "hetrun.parts"  # in the header's own metadata
_SHARD = re.compile(r"rank-\d{4,9}\.safetensors")
_FOLDER = re.compile(r"step-(\d{1,10})")
_MAX_HEADER = 1 << 28


class BadCheckpointError(ConfigError):
    """A file of a checkpoint is not what its format says, or does not fit the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Where the values of a tensor, or of a part of it, lie."""

    path: Path
    name: str
    dtype: torch.dtype
    offset: int  # in the file
    box: Box  # which part of the tensor lies there

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what lies there."""
        return self.box.shape

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """Values, in host memory.

        Raises:
            StorageError: the file is gone or shorter than it says.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype)
        view = memory_of(tensor)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                done = 0
                while done < len(view):
                    count = file.readinto(view[done:])
                    if not count:
                        raise StorageError(f"{self.path}: ends inside {self.name}")
                    done += count
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}") from error
        return tensor


def shard_name(rank: int) -> str:
    """File of one rank."""
    return f"rank-{rank:04d}.safetensors"


def folder_name(step: int) -> str:
    """Folder of the checkpoint after so many steps."""
    return f"step-{step}"


def step_folders(folder: Path) -> dict[int, Path]:
    """Steps of the folders that hold an index; empty where there is no such folder.

    Raises:
        StorageError: the folder cannot be read.
    """
    return {step: path for step, path in _numbered(folder) if (path / INDEX).is_file()}


def remove_folder(path: Path) -> None:
    """Take a checkpoint away, its index first: what is left of it at any moment does not count.

    Raises:
        OSError: it cannot be removed.
    """
    (path / INDEX).unlink(missing_ok=True)
    if path.is_dir():
        for item in path.iterdir():
            item.unlink(missing_ok=True)
        path.rmdir()


def remove_others(folder: Path, keep: Iterable[int]) -> None:
    """Take away all checkpoints but these.

    Raises:
        OSError: one cannot be removed.
    """
    kept = set(keep)
    for step, path in _numbered(folder):
        if step not in kept:
            remove_folder(path)


def remove_unfinished(folder: Path) -> None:
    """Take away what saves of an earlier run left that did not come to their end.

    Raises:
        OSError: it cannot be removed.
    """
    for path in folder.glob("step-*.tmp"):
        remove_folder(path)


def metadata_of(parts: Mapping[str, tuple[str, Box]]) -> dict[str, str]:
    """Say in a header which of its entries are parts, of which tensors."""
    said = {entry: [name, box.numbers()] for entry, (name, box) in sorted(parts.items())}
    return {_PARTS: json.dumps(said)} if said else {}


def write_shard(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = MappingProxyType({})
) -> int:
    """Write tensors of host memory to a safetensors file and to the disk; return its size.

    Raises:
        OSError: no space, no permission.
    """
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    start = 0
    for name, tensor in sorted(tensors.items()):
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        _write(file, memoryview(len(text).to_bytes(8, "little") + text))
        for _name, tensor in sorted(tensors.items()):
            _write(file, memory_of(tensor))
        os.fsync(file.fileno())
        return file.tell()


def read_shard(path: Path) -> list[Piece]:
    """Read what a safetensors file says it holds.

    Raises:
        BadCheckpointError: the header is wrong.
        StorageError: the file cannot be read.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(_MAX_HEADER, size - 8):
                raise BadCheckpointError(f"{path}: a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadCheckpointError(f"{path}: the header is not JSON: {error}") from error
    try:
        return _pieces(path, header, base=8 + length, size=size)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadCheckpointError(
            f"{path}: the header is wrong: {type(error).__name__} {error}"
        ) from error


def write_index(folder: Path, index: CheckpointIndex) -> None:
    """Write index.json; everything else must be on the disk already.

    Raises:
        OSError: no space, no permission.
    """
    with (folder / INDEX).open("w", encoding="utf-8") as file:
        json.dump(asdict(index), file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read_index(folder: Path) -> CheckpointIndex:
    """Read index.json and compare the files with it.

    Raises:
        BadCheckpointError: another format, a damaged index, a file that is missing or has another size.
        StorageError: it cannot be read.
    """
    path = folder / INDEX
    data = read_json(path)
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise BadCheckpointError(
            f"{path}: format_version {version!r}, this hetrun reads {FORMAT_VERSION}"
        )
    index = decode(CheckpointIndex, data, where=str(path))
    for name, size in index.files.items():
        if not _SHARD.fullmatch(name):
            raise BadCheckpointError(f"{path}: file {name!r}, need rank-NNNN.safetensors")
        shard = folder / name
        found = shard.stat().st_size if shard.is_file() else None
        if found != size:
            raise BadCheckpointError(f"{shard}: {found or 'no'} bytes, its index says {size}")
    return index


def read_pieces(folder: Path, index: CheckpointIndex) -> dict[str, list[Piece]]:
    """Pieces of every tensor in a checkpoint's folder, by name.

    Raises:
        BadCheckpointError: a header is wrong.
        StorageError: a file cannot be read.
    """
    pieces: dict[str, list[Piece]] = {}
    for name in index.files:
        for piece in read_shard(folder / name):
            pieces.setdefault(piece.name, []).append(piece)
    return pieces


def assemble(pieces: Iterable[Piece], wanted: Box | None = None) -> Tensor:
    """A tensor, or the part of it that is wanted, from pieces that make it up.

    Raises:
        BadCheckpointError: they do not, or are of tensors of another shape.
        StorageError: a file is gone or shorter than it says.
    """
    known = list(pieces)
    first = known[0]
    box = wanted or whole_box(first.box.whole)
    if not covers((piece.box for piece in known), box):
        raise BadCheckpointError(
            f"{first.path}: parts of {first.name} {list(box.ranges)} are missing"
        )
    for piece in known:
        if piece.box == box:
            return piece.read()
    result = torch.empty(box.shape, dtype=first.dtype)
    for piece in known:
        if piece.box.whole == box.whole and piece.box.overlaps(box):
            part = box.common(piece.box)
            part.inside(box).of(result).copy_(part.inside(piece.box).of(piece.read()))
    return result


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory; torch has no way for it without numpy."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("need a contiguous tensor in host memory")
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(file: BinaryIO, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += file.write(data[done : done + (64 << 20)])


def _pieces(path: Path, header: Any, *, base: int, size: int) -> list[Piece]:
    """Check each entry against the size of the file."""
    metadata = header.pop("__metadata__", {})
    parts = {
        entry: (str(name), box_of(map(_whole_numbers, numbers)))
        for entry, (name, numbers) in json.loads(metadata.get(_PARTS, "{}")).items()
    }
    found = []
    for entry, about in header.items():
        start, end = _whole_numbers(about["data_offsets"])
        shape = _whole_numbers(about["shape"])
        name, box = parts.get(entry, (entry, whole_box(shape)))
        piece = Piece(
            path=path, name=name, dtype=DTYPES[about["dtype"]], offset=base + start, box=box
        )
        if not start <= end <= size - base or math.prod(n or 1 for n in box.whole) > 1 << 60:
            raise ValueError(f"{entry}: {box.whole} at {start} to {end} of {size - base} bytes")
        if box.shape != shape or piece.num_bytes != end - start:
            raise ValueError(
                f"{entry}: {piece.shape} takes {piece.num_bytes} bytes, not {shape} and {end - start}"
            )
        found.append(piece)
    return found


def _whole_numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(n) is int and n >= 0 for n in values):
        raise ValueError(f"{str(values)[:80]}: need whole numbers of at least 0")
    return tuple(values)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    try:
        names = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    except OSError as error:
        raise StorageError(f"cannot read {folder}: {error.strerror}") from error
    return [(int(m.group(1)), path) for path in names if (m := _FOLDER.fullmatch(path.name))]
