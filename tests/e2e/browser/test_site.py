"""The site of the documentation in a real browser: `make test-site`, which builds it before."""

from __future__ import annotations

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.docs.contents import ROOT
from tests.e2e.browser.chromium import Browser
from tests.e2e.browser.test_web_page import browser as browser

SITE = ROOT / ".site"
SIZES = [(1280, 900), (390, 844)]

pytestmark = [
    pytest.mark.skipif(not os.environ.get("COLLECTIVED_TEST_SITE"), reason="builds the site: make test-site"),
    pytest.mark.timeout(180),
]


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The site, served to this host alone."""
    handler = functools.partial(QuietHandler, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def nothing_goes_wrong(browser: Browser, address: str) -> Iterator[None]:
    """No page of a test has an error in its console, or fetches from other hosts."""
    browser.console.clear()
    browser.fetched.clear()
    yield
    assert not browser.console
    assert all(url.startswith((address, "data:", "blob:")) for url in browser.fetched), browser.fetched


def search(browser: Browser, words: str) -> str:
    """Types words into the search field; the address of the first page that is found."""
    browser.until("document.querySelector('.md-search__input') !== null")
    browser.evaluate(
        "document.querySelector('#__search').checked = true; "
        f"var field = document.querySelector('.md-search__input'); field.focus(); field.value = {words!r}; "
        "field.dispatchEvent(new Event('keyup', {bubbles: true})); field.dispatchEvent(new Event('input'));"
    )
    found: str = browser.until("(document.querySelector('.md-search-result__link') || {}).href")
    return found


def click(browser: Browser, element: str) -> None:
    """Clicks an element with the mouse, as only a person's click may copy."""
    where = f"var box = {element}; box.scrollIntoView({{block: 'center'}}); box = box.getBoundingClientRect();"
    browser.evaluate(where)
    x, y = browser.evaluate("[box.x + box.width / 2, box.y + box.height / 2]")
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("rank has not arrived", "operate/trace"),
        ("COLLECTIVED_TIMEOUT", "reference/environment"),
        ("reduce_scatter", "reference/"),
        ("a job hangs", "operate/troubleshooting"),
    ],
)
def test_search_finds(browser: Browser, address: str, size: tuple[int, int], words: str, page: str) -> None:
    browser.look_like(*size, "light")
    browser.open(f"{address}latest/")
    search(browser, words)
    links = f"[...document.querySelectorAll('.md-search-result__link')].some(a => a.href.includes('{page}'))"
    browser.until(links)


def test_the_first_address_leads_to_the_latest_version_which_can_be_changed(browser: Browser, address: str) -> None:
    browser.look_like(1280, 900, "light")
    browser.open(address)
    browser.until("location.pathname === '/latest/' && document.querySelector('h1') !== null")
    assert browser.evaluate("document.querySelector('h1').innerText.trim()").startswith("collectived")
    browser.until("document.querySelector('.md-version__link') !== null")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_code_is_copied(browser: Browser, address: str, size: tuple[int, int]) -> None:
    browser.look_like(*size, "light")
    browser.call("Emulation.setFocusEmulationEnabled", enabled=True)
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.open(f"{address}latest/")
    browser.until("document.querySelector('.md-code__button') !== null")
    click(browser, "document.querySelector('.md-code__button')")
    browser.evaluate("window.copied = ''; setInterval(() => navigator.clipboard.readText().then(t => copied = t), 100)")
    copied = browser.until("window.copied")
    assert copied.strip() == browser.evaluate("document.querySelector('.highlight code').innerText").strip()
    assert "pip install" in copied


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "page",
    ["", "contents/", "tutorial/", "start/pytorch/", "internals/architecture/", "internals/segment/", "reference/cli/"]
    + ["reference/api/", "internals/performance/", "repository/CHANGELOG/"],
)
def test_a_page_fits_and_its_figures_are_shown(
    browser: Browser, address: str, page: str, scheme: str, size: tuple[int, int]
) -> None:
    browser.look_like(*size, scheme, phone=size[0] < 500)
    browser.open(f"{address}latest/{page}")
    browser.until("document.querySelector('article h1') !== null")
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
    assert browser.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    colour = "slate" if scheme == "dark" else "default"
    browser.until(f"document.body.getAttribute('data-md-color-scheme') === '{colour}'")


def test_every_public_name_is_on_the_page_of_docstrings(browser: Browser, address: str) -> None:
    browser.open(f"{address}latest/reference/api/")
    for name in ("connect", "Group.all_reduce", "Session.join", "CommunicationOptions", "errors.CollectiveError"):
        assert browser.evaluate(f"document.getElementById('collectived.{name}') !== null"), name
