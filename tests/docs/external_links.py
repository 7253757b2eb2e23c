"""`python -m tests.docs.external_links` (`make links`): whether the links of the pages to other sites are answered.

It needs a network, so no test runs it. `test_external_links.py` looks at their form.
"""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.docs.contents import ROOT

_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\bhttps?://[^\s)\]>\"'`|]+")
_PATIENCE = 20.0  # seconds for an answer
_REFUSALS = (401, 403, 405, 429)  # by sites that do not speak with programs: the page is there


def find_links() -> dict[str, list[str]]:
    """Each address, with the pages that name it. What stands in code is an example, and no link."""
    found: dict[str, list[str]] = {}
    for path in _pages():
        for address in _LINK.findall(_CODE.sub("", path.read_text())):
            found.setdefault(address.rstrip(".,;:"), []).append(str(path.relative_to(ROOT)))
    return found


def _pages() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.md"))
    for folder in ("docs", "proto", "client", "runtime", "launcher", "native"):
        yield from sorted((ROOT / folder).rglob("*.md"))


def ask(address: str) -> str:
    """Why a link leads nowhere; '' where it is answered."""
    request = urllib.request.Request(address, headers={"User-Agent": "collectived-links"})
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE):
            return ""
    except urllib.error.HTTPError as error:
        return "" if error.code in _REFUSALS else f"{error.code} {error.reason}"
    except OSError as error:
        return str(getattr(error, "reason", error))


def report(links: dict[str, list[str]], asked: Callable[[str], str]) -> list[str]:
    """A line for each link that leads nowhere."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(asked, links))
    return [
        f"{address} ({', '.join(sorted(set(pages)))}): {answer}"
        for (address, pages), answer in zip(links.items(), answers, strict=True)
        if answer
    ]


def main() -> None:
    links = find_links()
    dead = report(links, ask)
    for line in dead:
        print(line)
    print(f"{len(links) - len(dead)} of {len(links)} links to other sites are answered")
    sys.exit(1 if dead else 0)


if __name__ == "__main__":
    main()
