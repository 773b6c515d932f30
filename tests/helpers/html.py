"""Strict parsing of the HTML that the package renders, and the contrast of colors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

PAYLOADS = (
    "<img src=x onerror=alert(1)>",
    '"><script>alert(1)</script>',
    "' onmouseover='alert(1)",
    "</style><script>alert(1)</script>",
    "&lt;b&gt; & $x$ _",
)
"""Texts that a page must show as they are."""

CLASS = re.compile(r"openmed-[a-z0-9-]+|tex2jax_ignore")
STYLE = re.compile(r"([-a-z]+: ?[-\w #%.,()]+;?)*")
PLAIN: dict[str, set[str]] = {
    **{tag: set() for tag in ("thead", "tbody", "strong", "code", "title", "br")},
    **{tag: {"style"} for tag in ("table", "td", "summary", "figcaption")},
    **{tag: {"class", "style"} for tag in ("p", "caption", "figure")},
    **{tag: {"style", "title"} for tag in ("tr", "mark", "small")},
    "img": {"alt", "src", "style"},
    "h2": {"class"},
    "details": {"open", "style"},
    "div": {"class", "dir", "hidden", "role", "style", "tabindex", "aria-hidden", "aria-label"},
    "span": {"class", "style", "title", "aria-hidden"},
    "th": {"scope", "style"},
    "svg": {"class", "role", "aria-label", "viewbox"},
    **{tag: {"points"} for tag in ("polygon", "polyline")},
}
"""The elements that the package renders, with their attributes."""


@dataclass
class Element:
    """An element: its name, its attributes, and what is in it, in order."""

    tag: str
    attributes: dict[str, str]
    content: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text in it."""
        return "".join(child if isinstance(child, str) else child.text for child in self.content)

    @property
    def elements(self) -> Iterator[Element]:
        """All elements in it, at any depth, in order."""
        for child in self.content:
            if isinstance(child, Element):
                yield child
                yield from child.elements

    def find(self, tag: str, **attributes: str) -> list[Element]:
        """Return the elements of a name with some attributes."""
        return [
            element
            for element in self.elements
            if element.tag == tag and attributes.items() <= element.attributes.items()
        ]


class Reader(HTMLParser):
    """Strict HTML parser, which rejects unclosed elements and elements or attributes that the package does not use."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Check an element and its attributes."""
        given = {name: value or "" for name, value in attributes}
        assert given.keys() <= PLAIN[tag], (tag, given)
        assert all(CLASS.fullmatch(name) for name in given.get("class", "").split()), given
        assert STYLE.fullmatch(given.get("style", "")), given
        element = Element(tag, given)
        self.open[-1].content.append(element)
        self.open += [] if tag in {"br", "img"} else [element]

    def handle_endtag(self, tag: str) -> None:
        """Check that elements close in order."""
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        """Keep the text."""
        self.open[-1].content.append(data)

    def handle_comment(self, data: str) -> None:
        """Refuse comments, declarations and instructions."""
        raise AssertionError(data)

    handle_decl = unknown_decl = handle_pi = handle_comment


def read(html: str) -> Element:
    """Parse HTML and return the root element."""
    reader = Reader()
    reader.feed(html)
    reader.close()
    (root,) = reader.open
    return root


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colors by WCAG 2.2, 1 to 21 (https://www.w3.org/TR/WCAG22/)."""

    def luminance(color: str) -> float:
        parts = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
