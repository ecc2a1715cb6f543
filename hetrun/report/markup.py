"""HTML and SVG elements whose text is escaped by construction. What they show is left to the other files here.

Text becomes `Html` only inside `el`, so a host name such as `<script>` cannot become markup.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from hetrun.report.words import printable

_VOID = frozenset({"meta", "br", "rect", "line", "polyline", "path", "circle"})


class Html(str):
    """Markup that is safe to put on the page; made by `el` and `join` only."""

    __slots__ = ()


Child = Html | str | float | None


def el(name: str, /, *children: Child, **attributes: str | float | None) -> Html:
    """Return one element; children and values are escaped unless they are Html, None is left out.

    A trailing underscore of an attribute is dropped (`class_`), others become `-` (`stroke_width`).
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        inside = "".join(_child(child) for child in children)
        return Html(f"<{name}{given}>{inside}</{name}>" if inside else f"<{name}{given}/>")
    return Html(f"<{name}{given}>{''.join(_child(child) for child in children)}</{name}>")


def join(children: Iterable[Child], between: str = "") -> Html:
    """Return children after each other."""
    return Html(_text(between).join(_child(child) for child in children))


def _child(child: Child) -> str:
    if child is None:
        return ""
    return child if isinstance(child, Html) else _text(child)


def _text(value: str | float) -> str:
    text = printable(_number(value) if isinstance(value, float) else str(value))
    return html.escape(text).replace(" %", "\N{NO-BREAK SPACE}%")


def _number(value: float) -> str:
    """At most three decimals, no trailing zeros: a page of spans stays small."""
    return f"{value:.3f}".rstrip("0").rstrip(".") or "0"
