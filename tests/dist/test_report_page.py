"""A real browser shows the report page: words, pixels, and nothing to complain about in its console."""

from __future__ import annotations

import html
import os
import re
import subprocess
import zlib
from pathlib import Path
from shutil import which

import pytest

from hetrun import report
from tests.unit import report_factory

CHROMIUM = which("chromium") or which("chromium-browser") or which("google-chrome")
pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        CHROMIUM is None and not os.environ.get("CI"), reason="needs chromium, which CI has"
    ),
]
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
CONSOLE = re.compile(r":CONSOLE[(:\]]")


def _browse(page: Path, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None, "CI has no chromium"
    done = subprocess.run(
        [
            CHROMIUM,
            *FLAGS,
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            *flags,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def page(tmp_path: Path) -> Path:
    plan = report_factory.make_plan()
    outcome = report_factory.make_outcome(plan)
    run_dir = report_factory.write_run(tmp_path / "run", plan, outcome=outcome)
    path = tmp_path / "report.html"
    path.write_text(report.to_html(report.build_report(run_dir)), encoding="utf-8")
    return path


def test_a_browser_shows_the_headline_and_has_no_complaint(page: Path, tmp_path: Path) -> None:
    done = _browse(page, tmp_path, "--dump-dom")
    headline = re.search(r"<h1[^>]*>(.+?)</h1>", page.read_text(encoding="utf-8"), re.DOTALL)
    assert headline is not None
    assert html.unescape(headline.group(1)) in html.unescape(done.stdout)
    assert done.stdout.count("<svg") >= 2
    assert CONSOLE.findall(done.stderr) == []


def test_a_complaint_of_the_page_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<script>throw new Error('broken page')</script>")
    assert CONSOLE.search(_browse(page, tmp_path, "--dump-dom").stderr)


def test_the_picture_of_the_page_is_not_blank(page: Path, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    _browse(page, tmp_path, "--window-size=1000,1400", f"--screenshot={shot}")
    assert len(_rows(shot.read_bytes())) > 100


def test_a_blank_page_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "blank.html"
    page.write_text("<!doctype html>")
    shot = tmp_path / "shot.png"
    _browse(page, tmp_path, "--window-size=1000,1400", f"--screenshot={shot}")
    assert len(_rows(shot.read_bytes())) <= 5


def _rows(png: bytes) -> set[bytes]:
    """The different rows of a picture as PNG filters them: few where it is one colour."""
    width = int.from_bytes(png[16:20], "big")
    channels = {2: 3, 6: 4}[png[25]]
    data, at = b"", 8
    while at < len(png):
        size = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        at += size + 12
    pixels = zlib.decompress(data)
    length = width * channels + 1
    return {pixels[start : start + length] for start in range(0, len(pixels), length)}
