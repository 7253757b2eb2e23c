"""The site has all pages, and their links lead to the same files as in the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.docs.contents import ROOT, public
from website.pages import (
    PROJECT,
    find_links,
    find_place,
    read_navigation,
    render_api_page,
    render_folder,
    render_notebook,
    resolve,
    rewrite,
)

import collectived as cd

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in ("README.md", "CHANGELOG.md"))]


def places(navigation: Any) -> set[str]:
    """All pages of a navigation."""
    if isinstance(navigation, str):
        return {navigation}
    return set().union(*map(places, navigation.values() if isinstance(navigation, dict) else navigation))


@pytest.mark.parametrize(
    ("origin", "place"),
    [
        ("README.md", "index.md"),
        ("docs/README.md", "contents.md"),
        ("docs/guide/errors.md", "guide/errors.md"),
        ("examples/tutorial.ipynb", "tutorial.md"),
        ("examples/elastic.py", "repository/examples/elastic.py"),
        ("examples", "repository/examples/README.md"),
    ],
)
def test_every_file_has_one_place(origin: str, place: str) -> None:
    assert find_place(origin) == place


@pytest.mark.parametrize(
    ("link", "there"),
    [
        ("[a](recovery.md#rules)", "[a](recovery.md#rules)"),
        ("[a](../../README.md)", "[a](../index.md)"),
        ("[`a`](../../examples/elastic.py)", "[`a`](../repository/examples/elastic.py)"),
        ("[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
        ("[a](#rules)", "[a](#rules)"),
    ],
)
def test_links_lead_to_the_place_of_their_file(link: str, there: str) -> None:
    assert rewrite(link, "docs/guide/errors.md", "guide/errors.md") == there


def test_code_is_left_alone_but_for_words_behind_its_language() -> None:
    text = "```python run\nprint([a](b))\n```\n"
    assert rewrite(text, "README.md", "index.md") == "```python\nprint([a](b))\n```\n"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files(path: Path) -> None:
    origin = str(path.relative_to(ROOT))
    assert not [link for link in find_links(origin) if not (ROOT / link).exists()]


def test_every_page_is_in_the_navigation() -> None:
    shown = places(read_navigation())
    own = re.compile(r"docs/(reference/[A-Z]|reference/\w+\.\w+\.md|README)")
    names = {f"docs/reference/{name}.md" for name in public()}
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert not {page for page in pages - names if not own.match(page) and find_place(page) not in shown}
    assert all((ROOT / origin).exists() for origin in PROJECT.values())


def test_a_notebook_is_shown_with_what_it_prints(tmp_path: Path) -> None:
    code = {"cell_type": "code", "source": ["print(1)"], "outputs": [{"text": ["1\n"]}]}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["# A"]}, code]}))
    assert render_notebook(tmp_path / "a.ipynb") == "# A\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n"


def test_a_folder_is_a_list_of_its_files() -> None:
    assert "- [elastic.py](elastic.py)\n" in render_folder("examples")


def test_docstrings_of_all_public_names_are_asked_for() -> None:
    asked = set(re.findall(r"^::: collectived\.(\w+)$", render_api_page(), re.MULTILINE))
    assert asked == {name for name in public() if "." not in name and name != "environment"}


def test_the_page_of_all_names_has_the_modules_that_are_imported_at_their_first_use() -> None:
    asked = set(re.findall(r"^::: collectived\.integrations\.(\w+)$", render_api_page(), re.MULTILINE))
    assert asked == set(cd.integrations.__all__)
    functions = {f"testing.{name}" for name in cd.testing.__all__ if not isinstance(getattr(cd.testing, name), type)}
    assert functions == {"testing.local"} and "::: collectived.testing.local.local\n" in render_api_page()


def test_a_link_out_of_a_folder_is_resolved() -> None:
    assert resolve("docs/guide/errors.md", "../../SECURITY.md#promises") == "SECURITY.md"


@pytest.mark.timeout(180)
@pytest.mark.skipif(not os.environ.get("COLLECTIVED_TEST_SITE"), reason="builds a site: make test-site")
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    for part in ("docs", "examples", "client", "proto", "native", "website"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    page = tmp_path / "docs/guide/errors.md"
    page.write_text(page.read_text() + "\n[nowhere](recovery.md#no-such-heading)\n")
    built = subprocess.run(
        [ROOT / ".venv-site/bin/mkdocs", "build", "-f", "website/mkdocs.yml", "-d", str(tmp_path / "built")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert built.returncode != 0 and "no-such-heading" in built.stderr, built.stderr
