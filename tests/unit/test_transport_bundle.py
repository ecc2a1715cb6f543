"""The worker side as a zip."""

from __future__ import annotations

import ast
import io
import sys
import zipfile

import pytest

from hetrun.transport.bundle import build_bundle, guard_sources


def test_the_same_code_gives_the_same_bytes_and_the_name_carries_their_hash() -> None:
    first, second = build_bundle(), build_bundle()
    assert first == second
    assert first.name == f"hetrun-worker-{first.sha256[:16]}.zip"
    assert build_bundle({"more.py": b""}).sha256 != first.sha256


def test_only_the_worker_side_travels() -> None:
    names = zipfile.ZipFile(io.BytesIO(build_bundle().data)).namelist()
    assert {"hetrun/__init__.py", "hetrun/runtime/worker.py", "hetrun/model/plan.py"} <= set(names)
    assert not [name for name in names if "/cli/" in name or "/transport/" in name]
    assert not [name for name in names if not name.endswith(".py")]


def test_an_extra_file_cannot_replace_ours() -> None:
    with pytest.raises(ValueError, match="stands there twice"):
        build_bundle({"hetrun/runtime/worker.py": b""})


def test_the_guard_needs_nothing_but_the_standard_library_and_itself() -> None:
    names = {name for name, _ in guard_sources()}
    imported = set()
    for _, source in guard_sources():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module)
    own = {name for name in imported if name.startswith("hetrun")}
    assert own <= names
    assert {name.partition(".")[0] for name in imported - own} <= set(sys.stdlib_module_names)
