"""The documentation site: built without a warning and without a network, links, search, and a look with a browser."""

import functools
import http.server
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from helpers import page_measures

pytestmark = [pytest.mark.slow, pytest.mark.docs, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
BUILD = """
import sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise OSError(f"a network is needed: {arguments}")

sys.addaudithook(refuse)
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""
"""Sphinx in a process that can reach no network."""

CLIPPED = """() => {
  const article = document.querySelector('.bd-article-container');
  return article.scrollWidth - article.clientWidth;
}"""
"""How many pixels of the article are beyond its right edge, where the theme hides them."""

CUT_NAVIGATION = """() => {
  const boxes = [...document.querySelectorAll('.bd-sidebar-secondary, .prev-next-area a')];
  const isCut = box => box.scrollWidth > box.clientWidth
    || (box.matches('.prev-next-area a') && box.getBoundingClientRect().right > innerWidth);
  return boxes.filter(isCut).map(box => `${box.className}: ${box.innerText}`);
}"""
"""The lists of headings, and the links to other pages, that are wider than their boxes or than the window."""

PAGES = (
    "docs/index",
    "notebooks/01_a_note",
    "docs/tutorials",
    "docs/how_to/annotate_a_folder",
    "docs/how_to/choose_device",
    "docs/how_to/score_and_correct",
    "docs/explanation/mps",
    "docs/reference/api/openmed_nb.annotate",
    "docs/reference/api/openmed_nb.annotation.results.Annotations-class",
    "docs/reference/api/openmed_nb.runbook.parity",
    "docs/reference",
    "docs/reference/files/index",
    "docs/reference/magics/openmed_device",
    "docs/troubleshooting/index",
    "docs/front_ends",
    "docs/reference/errors/index",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", BUILD, "-q", "-W", "--keep-going", "-c", "docs", ".", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    return folder


class SilentHandler(http.server.SimpleHTTPRequestHandler):
    """A handler that prints no requests."""

    def log_message(self, *_arguments):
        """Print nothing."""


@pytest.fixture(scope="module")
def address(site):
    """The address of the site on a server of this computer."""
    handler = functools.partial(SilentHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class PageLinks(HTMLParser):
    """Collects the anchors of a page, its links, and the files that a browser loads for it."""

    def __init__(self, page):
        super().__init__()
        self.anchors = set()
        self.links = []
        self.loaded = []
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        """Collect the attributes of a tag that are links or anchors."""
        values = dict(attributes)
        self.anchors.update(filter(None, (values.get("id"), values.get("name"))))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("rel") in {"stylesheet", "icon", "preload"}:
            self.loaded.append(values["href"])


@pytest.fixture(scope="module")
def links(site):
    """The links of each page of the site by the path of the page."""
    pages = [page for page in sorted(site.rglob("*.html")) if "_static" not in page.parts]
    return {page: PageLinks(page) for page in pages}


def test_links_and_anchors_resolve(site, links):
    """Each relative link leads to a file of the site, and its anchor is in that file."""
    broken = []
    for page, page_links in links.items():
        for link in page_links.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            is_anchor_missing = (
                parts.fragment and target in links and unquote(parts.fragment) not in links[target].anchors
            )
            if not target.is_file() or is_anchor_missing:
                broken.append((page.relative_to(site).as_posix(), link))

    assert len(links) > 150
    assert broken == []


def test_pages_load_only_files_of_the_site(site, links):
    outside = [
        (page.name, url) for page, page_links in links.items() for url in page_links.loaded if urlsplit(url).netloc
    ]
    missing = [
        (page.name, url)
        for page, page_links in links.items()
        for url in page_links.loaded
        if not urlsplit(url).scheme and not (page.parent / unquote(urlsplit(url).path)).is_file()
    ]

    assert outside == []
    assert missing == []
    assert all(any("favicon" in url for url in page_links.loaded) for page_links in links.values())
    assert (site / "llms.txt").read_text("utf-8").startswith("# openmed_nb\n")


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_accessible(address, new_page, path, width, scheme):
    """A scan finds nothing, nothing is wider than the window, and nothing is requested from another host."""
    page = new_page(width=width, height=900)
    page.emulate_media(color_scheme=scheme)
    page.goto(f"{address}/{path}.html")

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CLIPPED) == 0
    assert page.evaluate(CUT_NAVIGATION) == []
    assert page_measures.findings(page, "html") == []


def test_first_address_leads_to_the_landing_page(address, new_page):
    page = new_page()
    page.goto(f"{address}/")
    page.wait_for_url("**/docs/index.html")

    assert page.get_by_role("heading", level=1).inner_text().startswith("openmed_nb")


def test_charts_have_visible_labels(address, new_page):
    page = new_page()
    page.goto(f"{address}/notebooks/08_worth_it.html")

    assert page.locator(".openmed-picture").get_by_text("knee:").first.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("choice", ["nothing", "system", "switch"])
def test_animation_stops_for_those_who_want_no_motion(address, new_page, scheme, choice):
    page = new_page(width=1280, height=900)
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce" if choice == "system" else "no-preference")
    page.goto(f"{address}/docs/index.html")
    if choice == "switch":
        page.get_by_label("Show a still picture").check()
    shown = page.locator("article img:visible[src*=demo_]")

    assert shown.count() == 1
    name = f"demo_{scheme}.gif" if choice == "nothing" else f"demo_{scheme}_still.png"
    assert shown.get_attribute("src").endswith(name)


def test_pages_of_the_site_have_titles_and_links_of_their_own(site):
    """The README is no second page with the title of the site; marked text and names in code are links."""

    def article(name):
        return (site / f"{name}.html").read_text("utf-8").partition("<article")[2]

    assert "<title>Install and try it" in (site / "README.html").read_text("utf-8")
    assert 'href="troubleshooting/index.html"' in article("docs/how_to").partition("prev-next-area")[0]
    assert 'href="../reference/files/index.html#resume-file"' in article("docs/how_to/resume")
    assert re.search(r'<a class="code-link[^>]*Annotations\.save">', article("docs/reference/files/index"))
    for name in ("openmed_nb.annotate.html", "openmed_nb.load_pipeline.html"):
        assert re.search(f'<a class="code-link[^>]*{name}"', article("docs/reference/api/openmed_nb.runbook.parity"))


@pytest.mark.parametrize(
    ("query", "expected", "within"),
    [
        ("watermark", "Environment variables", 8),
        ("watermark", "Troubleshooting by symptom", 1),
        ("out of memory", "MPS or CUDA out of memory", 1),
        ("resume", "Resume file", 8),
        ("resume file", "Resume file", 1),
        ("negation", "Find negated entities", 8),
        ("mask names", "Mask names", 1),
        ("de-identify", "Mask names", 1),
        ("parity", "nb.runbook.parity", 1),
        ("device environment variable", "Environment variables", 1),
        ("group by patient", "Annotate a table", 1),
        ("which variable wins", "Choose or force a device", 1),
    ],
)
def test_search_finds_at_once(address, new_page, query, expected, within):
    """One of the first results of a search is the page or section that answers it."""
    page = new_page()
    page.goto(f"{address}/docs/index.html")
    page.keyboard.press("ControlOrMeta+k")
    page.keyboard.type(query)
    page.keyboard.press("Enter")
    page.locator("#search-results ul.search li").first.wait_for()
    page.wait_for_function("document.querySelector('#search-results h2')?.innerText !== 'Searching'")
    found = page.locator("#search-results ul.search > li > a").all_inner_texts()[:within]

    assert any(expected in title for title in found), found
