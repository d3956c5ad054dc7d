"""HTML and SVG elements as values: whatever is not markup already is escaped, so no text becomes markup."""

from __future__ import annotations

import html
import re

__all__ = ["Markup", "join", "tag"]

_VOID = frozenset({"br", "img", "link", "meta"})
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
Child = str | int | float | None


class Markup(str):
    """Text that is markup, and goes into other markup as it is."""

    __slots__ = ()


def tag(name: str, /, *children: Child, **attributes: Child) -> Markup:
    """An element. Attributes that are None are left out; ``class_`` is class, ``stroke_width`` stroke-width.

    >>> tag("p", "1 < 2 ", tag("b", "yes"), class_="note")
    '<p class="note">1 &lt; 2 <b>yes</b></p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Children one behind the other."""
    return Markup("".join(c if isinstance(c, Markup) else _escaped(c) for c in children if c is not None))


def _escaped(value: Child) -> str:
    return html.escape(_NOT_IN_XML.sub("\ufffd", str(value)))
