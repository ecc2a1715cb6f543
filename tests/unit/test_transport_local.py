"""The environment of shells on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hetrun.transport.local import local_environ


def test_an_outer_jobs_variables_do_not_reach_ours() -> None:
    outer = {"RANK": "3", "MASTER_ADDR": "x", "TORCHELASTIC_RUN_ID": "y", "HOME": "/h"}
    assert set(local_environ(outer)) - {"PATH"} == {"HOME"}


def test_a_bare_python3_is_the_one_of_the_virtual_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "prefix", "/venv")
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    assert local_environ({"PATH": "/usr/bin"})["PATH"] == "/venv/bin:/usr/bin"


def test_outside_a_virtual_environment_path_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert local_environ({"PATH": "/usr/bin"}) == {"PATH": "/usr/bin"}
    assert Path(sys.base_prefix).exists()
