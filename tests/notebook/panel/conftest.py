"""Open panels that are closed at the end of a test, and a strict reader of the HTML in them."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from openmed_nb.models.config import OpenMedConfig

CLASS = re.compile(r"openmed-[a-z0-9-]+|tex2jax_ignore")
STYLE = re.compile(r"([-a-z]+: ?[-\w #%.,()]+;?)*")
PLAIN: dict[str, set[str]] = {
    **{tag: set() for tag in ("thead", "tbody", "strong", "code", "title")},
    **{tag: {"style"} for tag in ("table", "tr", "td", "small", "summary")},
    **{tag: {"class", "style"} for tag in ("p", "caption")},
    "h2": {"class"},
    "details": {"open", "style"},
    "div": {"class", "dir", "role", "style", "aria-hidden"},
    "span": {"class", "style", "aria-hidden"},
    "th": {"scope", "style"},
    "mark": {"style", "title"},
    "svg": {"class", "role", "aria-label", "viewbox"},
    **{tag: {"points"} for tag in ("polygon", "polyline")},
}
"""The elements of the panel, each with its attributes."""


@dataclasses.dataclass
class Element:
    """An element: its name, its attributes, and what is in it, in order."""

    tag: str
    attributes: dict[str, str]
    content: list[Element | str] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        """All text in it."""
        return "".join(one if isinstance(one, str) else one.text for one in self.content)

    @property
    def elements(self) -> Iterator[Element]:
        """All elements in it, at any depth, in order."""
        for one in self.content:
            if isinstance(one, Element):
                yield one
                yield from one.elements

    def find(self, tag: str, **attributes: str) -> list[Element]:
        """Return the elements of a name with some attributes."""
        return [one for one in self.elements if one.tag == tag and attributes.items() <= one.attributes.items()]


class Reader(HTMLParser):
    """Reads HTML, and refuses what is not closed, and every element and attribute that is not ours."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Check an element and its attributes."""
        given = {name: value or "" for name, value in attributes}
        assert given.keys() <= PLAIN[tag], (tag, given)
        assert all(CLASS.fullmatch(one) for one in given.get("class", "").split()), given
        assert _style_is_ours(given.get("style", "")), given
        element = Element(tag, given)
        self.open[-1].content.append(element)
        self.open.append(element)

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


def _style_is_ours(style: str) -> bool:
    return STYLE.fullmatch(style) is not None


def read(html: str) -> Element:
    """Return our HTML as an element that holds all of it."""
    reader = Reader()
    reader.feed(html)
    reader.close()
    (root,) = reader.open
    return root


@pytest.fixture(scope="session", name="read")
def _read() -> Callable[[str], Element]:
    """Give the function that reads HTML strictly."""
    return read


@pytest.fixture(scope="session")
def opened(helper: Callable[[Path], ModuleType]) -> ModuleType:
    """The module of open panels and front ends."""
    return helper(Path(__file__).parent / "opened.py")


@pytest.fixture
def open_panel(opened: ModuleType) -> Iterator[Callable[..., Any]]:
    """Give a function that opens a panel over a session, by a clock that stands still; all are closed at the end."""
    from openmed_nb.notebook.panel.model import PanelModel
    from openmed_nb.session import SESSION

    panels = []

    def open_panel(session: Any = SESSION, model: str | None = None, clock: Callable[[], float] = lambda: 0.0) -> Any:
        panels.append(opened.OpenPanel(PanelModel(session, model, clock=clock)))
        return panels[-1]

    yield open_panel
    for panel in panels:
        panel.close()
        assert panel.comm is None


@pytest.fixture
def here(computers: ModuleType) -> Any:
    """A computer without a GPU."""
    return computers.plain()


@pytest.fixture
def panel(here: Any, watch: Callable[..., Any]) -> Any:
    """A panel without widgets over its session, opened where there is no event loop."""
    return watch(here.session, "bundled_small")


@pytest.fixture
def front_end(opened: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Give a function that puts a front end at the other side of some widgets."""

    def front_end(*widgets: Any) -> Any:
        front = opened.FrontEnd()
        for one in widgets:
            monkeypatch.setattr(one.comm, "publish_msg", lambda *_, one=one, **message: front.hear(one, message))
        return front

    return front_end


@pytest.fixture
def clean() -> Iterator[None]:
    """Leave the session as it was found: without models and wishes."""
    from openmed_nb.session import SESSION

    yield
    SESSION.unload()
    SESSION.reset()
    SESSION.stop()


class Load:
    """Another thread that is inside a verb of a session: it loads a model, and stays there until it is let go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    @property
    def inside(self) -> bool:
        """Whether it is inside the verb."""
        return self.thread is not None and self.thread.is_alive()

    def begin(self, session: Any) -> None:
        """Begin, and wait until the model is being loaded."""
        self.remove = session.listen(self.stay)
        self.thread = threading.Thread(target=session.load_model, args=("bundled_small", OpenMedConfig(device="cpu")))
        self.thread.start()
        assert self.reached.wait(60)
        assert not session.is_free()

    def stay(self, activity: object) -> None:
        """Stay inside for as long as the model is being loaded."""
        if activity is not None and threading.current_thread() is self.thread:
            self.reached.set()
            self.go_on.wait(60)

    def end(self) -> None:
        """Let it go on, and wait for its end."""
        if self.thread is not None:
            self.go_on.set()
            self.thread.join(60)
            self.remove()
            assert not self.inside


@pytest.fixture
def loads() -> Iterator[Load]:
    """Give a thread that can be inside a verb of a session for as long as a test wants."""
    load = Load()
    yield load
    load.end()
