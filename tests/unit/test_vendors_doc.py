"""docs/vendors.md says what the vendors' files say, for the vendors that ship with the product."""

from pathlib import Path

import pytest

import hetrun.vendors
from hetrun.vendors import all_vendors, vendors_markdown

PAGE = Path(__file__).parents[2] / "docs" / "vendors.md"


def test_the_page_is_what_the_files_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """To write it anew: python -c 'from hetrun.vendors import *; print(vendors_markdown(), end="")' > docs/vendors.md"""
    monkeypatch.setattr(hetrun.vendors, "entry_points", lambda group: [])
    all_vendors.cache_clear()
    page = vendors_markdown()
    all_vendors.cache_clear()
    assert PAGE.read_text() == page


def test_every_mark_of_doubt_is_on_the_page_or_names_the_parser() -> None:
    page = vendors_markdown()
    for vendor in all_vendors().values():
        section = page.split(f"\n## {vendor.title}\n")[1].split("\n## ")[0]
        for mark in vendor.unverified:
            field, _, rest = mark.partition(" ")
            assert f"| {field} |" in section, (vendor.name, mark)
            assert "unverified" in section
            assert rest in section


def test_an_unpublished_figure_is_an_empty_cell() -> None:
    row = next(line for line in vendors_markdown().splitlines() if line.startswith("| L300 |"))
    assert row.split(" | ")[2:4] == ["", ""]
