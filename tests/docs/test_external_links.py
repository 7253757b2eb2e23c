"""Links to other sites are well-formed, and `make links` says which leads nowhere. No test asks the network."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from tests.docs.external_links import ask, find_links, report

LINKS = find_links()


def test_each_is_https_to_a_host_with_a_name() -> None:
    assert LINKS
    for address, pages in LINKS.items():
        parts = urlsplit(address)
        assert parts.scheme == "https", f"{pages}: {address}"
        assert re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", parts.netloc), f"{pages}: {address}"


def test_none_stands_there_in_two_spellings() -> None:
    plain: dict[str, set[str]] = {}
    for address in LINKS:
        parts = urlsplit(address)
        plain.setdefault(f"{parts.netloc.removeprefix('www.')}{parts.path.rstrip('/')}", set()).add(
            address.partition("#")[0]
        )
    assert not {name: spellings for name, spellings in plain.items() if len(spellings) > 1}


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(int(self.path[1:]))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def site() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


@pytest.mark.parametrize(("code", "said"), [(200, ""), (403, ""), (404, "404 Not Found"), (500, "500 Internal Server")])
def test_a_page_that_is_not_there_is_told_from_one_that_programs_may_not_read(
    site: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found = ask(f"{site}/{code}")
    assert found.startswith(said) and bool(found) == bool(said)


def test_a_line_names_the_link_its_pages_and_the_reason() -> None:
    links = {"https://a.org/": ["README.md"], "https://b.org/x": ["docs/b.md", "docs/a.md"]}
    assert report(links, lambda address: "" if "a.org" in address else "404 Not Found") == [
        "https://b.org/x (docs/a.md, docs/b.md): 404 Not Found"
    ]
