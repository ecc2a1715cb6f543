"""The console script, before the command line is there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from hetrun.cli.entry import main
from hetrun.errors import ExitCode


class Interrupted:
    """An importer that Ctrl-C meets while the command line is imported."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "hetrun.cli.app":
            raise KeyboardInterrupt
        return None


def test_an_interrupt_while_it_starts_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "hetrun.cli.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "error: interrupted; nothing was written\n"
