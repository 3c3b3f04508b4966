"""HTML that cannot be got wrong: text is escaped when it becomes markup, and only markup is put together unescaped."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NewType

Markup = NewType("Markup", str)
"""HTML. Whatever is a plain str is text, and gets escaped."""

_VOID = ("img", "input", "br")


class _Safe(str):
    """Markup at run time: a str that needs no escaping."""

    __slots__ = ()


def raw(markup: str) -> Markup:
    """What is HTML already: written here, or by this module."""
    return Markup(_Safe(markup))


def text(value: str) -> Markup:
    """Text as HTML; control characters, which HTML forbids, become visible."""
    shown = "".join(one if one >= " " or one in "\n\t" else "\ufffd" for one in value)
    return raw(html.escape(shown, quote=True))


def join(*parts: str | Markup) -> Markup:
    """One after the other."""
    return raw("".join(part if isinstance(part, _Safe) else text(part) for part in parts))


def element(tag: str, *parts: str | Markup, **attributes: str | None) -> Markup:
    """An element. attributes: `class_` for "class", "_" for "-"; those that are None are left out."""
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return raw(f"<{tag}{named}>")
    return raw(f"<{tag}{named}>{join(*parts)}</{tag}>")


def table(
    caption: str,
    heads: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    *,
    words: tuple[int, ...] = (0,),
) -> Markup:
    """A table with a caption. words: columns that hold words; the others hold figures and stand right."""

    def row(tag: str, cells: tuple[str, ...]) -> Markup:
        return element(
            "tr",
            *(
                element(
                    "th" if tag == "th" or place == 0 else "td",
                    cell,
                    class_=None if place in words else "figure",
                    scope="col" if tag == "th" else ("row" if place == 0 else None),
                )
                for place, cell in enumerate(cells)
            ),
        )

    return element(
        "div",
        element(
            "table",
            element("caption", caption),
            element("thead", row("th", heads)),
            element("tbody", *(row("td", one) for one in rows)),
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def folded(summary: str, *parts: Markup) -> Markup:
    """What opens when it is asked for."""
    return element("details", element("summary", summary), *parts)


def section(title: str, name: str, *parts: Markup, lead: str = "") -> Markup:
    """A part of the page with a heading. name: its anchor; lead: a sentence under the heading."""
    return element(
        "section",
        element("h2", title, id=f"{name}-title"),
        element("p", lead, class_="lead") if lead else raw(""),
        *parts,
        id=name,
        aria_labelledby=f"{name}-title",
    )
