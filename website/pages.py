"""Where files of the repository lie in the site, and the text of pages there: pure but for reading the files.

Pages lie where they are read in the repository too, and link to files beside them. The README becomes the first page,
`docs/README.md` the table of contents and the navigation. Files outside of docs/ to which pages link become pages or
downloads under `repository/`, the notebook a page.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLACES = {"README.md": "index.md", "docs/README.md": "contents.md", "examples/tutorial.ipynb": "tutorial.md"}
API = "reference/api.md"  # made by mkdocstrings
# Public names that mkdocstrings does not show with their module: modules that are imported at their first use, and a
# function with the name of its file.
INSIDE = {
    "distribute": ("distribute.experimental",),
    "integrations": ("integrations.ray", "integrations.torch"),
    "testing": ("testing.local.local",),
}
PROJECT = {
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "security promises": "SECURITY.md",
    "the native core": "native/README.md",
    "examples": "examples",
    "examples from TensorFlow": "examples/seeds",
}
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!`)(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")


def find_place(origin: str) -> str:
    """Where a file of the repository lies in the site's tree."""
    if origin in PLACES:
        return PLACES[origin]
    if origin.startswith("docs/"):
        return origin.removeprefix("docs/")
    return f"repository/{origin}/README.md" if (ROOT / origin).is_dir() else f"repository/{origin}"


def find_links(origin: str) -> Iterator[str]:
    """The files of the repository to which a page of it links."""
    for text in _FENCE.split((ROOT / origin).read_text())[::2]:
        for _, target in _LINK.findall(text):
            if not re.match(r"[a-z]+:|#", target):
                yield resolve(origin, target)


def resolve(origin: str, target: str) -> str:
    """The path in the repository to which a link of a page leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target.partition("#")[0]))


def rewrite(markdown: str, origin: str, place: str) -> str:
    """The text of a page for its place in the site."""

    def link(found: re.Match[str]) -> str:
        label, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        anchor = "#" + target.partition("#")[2] if "#" in target else ""
        there = find_place(resolve(origin, target))
        return f"{label}({posixpath.relpath(there, posixpath.dirname(place) or '.')}{anchor})"

    parts = _FENCE.split(markdown)
    # Python-Markdown nests lists by four spaces, and takes one word behind a fence.
    parts[::2] = [re.sub(r"^  (?=- )", "    ", _LINK.sub(link, part), flags=re.MULTILINE) for part in parts[::2]]
    parts[1::2] = [re.sub(r"^```(\w+) .*", r"```\1", part) for part in parts[1::2]]
    return "".join(parts)


def render_notebook(path: Path) -> str:
    """A notebook as Markdown: text, code, and what the code printed."""
    parts: list[str] = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join("".join(output.get("text", "")) for output in cell.get("outputs", [])).strip()
        if printed:
            parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts) + "\n"


def render_folder(origin: str) -> str:
    """A page that lists the files of a folder."""
    names = sorted(path.name for path in (ROOT / origin).iterdir() if path.is_file() and path.suffix != ".lock")
    return f"# {origin}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)


def read_navigation() -> list[dict[str, Any]]:
    """The tables of docs/README.md as navigation: a section for each heading."""
    sections: list[dict[str, Any]] = [{"Home": ["index.md", {"All pages": "contents.md"}]}]
    for heading, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", (ROOT / "docs/README.md").read_text(), re.M | re.S):
        rows = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\)", body, re.MULTILINE)
        pages: list[Any] = [{title: find_place(resolve("docs/README.md", target))} for title, target in rows]
        sections.append({heading.partition(":")[0]: pages})
    return sections


def list_reference_pages() -> list[dict[str, str]]:
    """The pages of public names, in the order of their table."""
    rows = re.findall(r"^\| \[`([^`]+)`\]\(([^)#]+)\)", (ROOT / "docs/reference/README.md").read_text(), re.MULTILINE)
    return [{name: f"reference/{target}"} for name, target in rows]


def render_api_page() -> str:
    """The page on which mkdocstrings inserts each public name of the client."""
    tree = ast.parse((ROOT / "client/collectived/__init__.py").read_text())
    (assigned,) = [
        one.value for one in tree.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "__all__"
    ]
    listed = ast.literal_eval(assigned)
    return "\n\n".join(
        [
            "# Python names on one page",
            "Signatures and docstrings of the package `collectived`. The [reference](README.md) has a page with an "
            "example for each name.",
            *(f"::: collectived.{name}" for one in listed for name in (one, *INSIDE.get(one, ()))),
            "",
        ]
    )
