"""The frame of every page: one file that needs nothing else, and a policy that lets it ask for nothing. Content is left to the callers."""

from __future__ import annotations

import base64
import hashlib

from hetrun.report.markup import Html, el
from hetrun.report.style import style_sheet
from hetrun.report.svg import hatch


def page(title: str, *sections: Html | None) -> str:
    """Return a whole HTML document; the title is escaped, None among the sections is left out."""
    body = el("body", hatch(), el("main", *sections))
    return f"<!doctype html>\n{el('html', _head(title), body, lang='en')}\n"


def _head(title: str) -> Html:
    style = style_sheet()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="referrer", content="no-referrer"),
        el("title", title),
        el("style", Html(style)),
    )
