"""Every public name has a page, which says what the code says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from tests.docs import pages
from tests.docs.contents import (
    EXAMPLES,
    OTHER_PAGES,
    RAY,
    REFERENCE,
    ROOT,
    UNIMPORTED,
    UNSAID,
    WRITTEN_BY_HAND,
    names,
    public,
    resolved,
)
from tests.docs.docstrings import Docstring, Function, entries
from tests.docs.unimported import public_names, read_class, read_function

import collectived as cd
from collectived.collectives import Collectives
from collectived.cross_device.multi_worker import MultiWorkerExtended
from collectived.cross_device.replica import ReplicaContext
from collectived.cross_device.strategy import StrategyExtended

DOCS = ROOT / "docs"
PACKAGES = ("proto", "client", "runtime", "launcher")


def test_every_public_name_has_a_page() -> None:
    assert sorted(names()) == sorted(public()), "put it into tests/docs/contents.py"


def test_every_page_has_an_example() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(names()) - set(WRITTEN_BY_HAND)


def test_every_integration_has_a_page_with_all_that_it_has_for_users() -> None:
    assert {name.split(".")[1] for name in UNIMPORTED} == set(cd.integrations.__all__)
    for name in UNIMPORTED:
        page = (REFERENCE / f"{name}.md").read_text()
        assert not [one for one in public_names(name) if one not in page], name


def test_the_pages_are_what_the_code_says() -> None:
    fresh = pages.pages()
    others = {*WRITTEN_BY_HAND, *OTHER_PAGES}
    written = {path.name: path.read_text() for path in REFERENCE.glob("*.md") if path.stem not in others}
    drifted = [name for name in {*fresh, *written} if fresh.get(name) != written.get(name)]
    assert not drifted, "run `make docs` and commit the result"


def functions() -> list[Function]:
    """All whose signatures are shown."""
    found = [read_function(name) for name in UNIMPORTED] + read_class(RAY, "RayJob")[1]
    for name in set(names()) - {*UNIMPORTED, *WRITTEN_BY_HAND}:
        thing = resolved(name)
        if inspect.isfunction(thing):
            whole = Function.of(thing)
            found.append(pages.completed(whole) if name.partition(".")[2] in dir(Collectives) else whole)
        elif isinstance(thing, type):
            made = pages.constructor(thing, Docstring.of(thing))
            separate = thing in (cd.Group, cd.Session, cd.Work)
            found += [*([made] if made else []), *([] if separate else pages.shown_methods(thing))]
    inner = (ReplicaContext, StrategyExtended, MultiWorkerExtended)
    return found + [method for owner in inner for method in pages.shown_methods(owner)]


def test_every_argument_is_said_to_be_something() -> None:
    assert len(functions()) > 60
    silent = {function.name: function.unsaid for function in functions() if function.unsaid}
    assert not silent


def test_nothing_is_added_to_what_a_docstring_says_itself() -> None:
    known = {function.name: function for function in functions()}
    assert set(UNSAID) <= {*known, "Member"}
    for name, words in UNSAID.items():
        if name in known and not name.startswith("Reductions."):
            own = ", ".join(known[name].doc.sections.get("Args", {})).split(", ")
            assert not set(", ".join(words).split(", ")) & set(own), name


def test_one_line_of_a_docstring_may_describe_several_things() -> None:
    found = dict(
        entries("name: as joined. key: its number,\n    or None. None: no name.\nrank, size: both", "Attributes")
    )
    assert found == {"name": "as joined.", "key": "its number, or None. None: no name.", "rank, size": "both"}


def test_what_is_no_entry_of_a_docstring_is_noticed() -> None:
    with pytest.raises(AssertionError, match="not an entry of Args"):
        dict(entries("an argument without a name", "Args"))


LINKED = sorted(
    path
    for folder in ("", *PACKAGES, "docs", "native", "tests", "benchmarks", "deploy", "examples")
    for path in ((ROOT / folder).rglob("*.md") if folder else ROOT.glob("*.md"))
)


@pytest.mark.parametrize("path", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        if re.match(r"[a-z]+://", target):
            continue
        file, _, place = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), target
        assert not place or place in anchors(found), target


def anchors(path: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_in_the_index() -> None:
    """Pages of public names are in that of the reference."""
    index = (DOCS / "README.md").read_text()
    others = {f"reference/{name}.md" for name in ("README", *WRITTEN_BY_HAND, *OTHER_PAGES)}
    pages_here = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {"README.md"}
    listed = {name for name in pages_here if not name.startswith("reference/")} | others
    assert not [name for name in listed if index.count(f"]({name})") != 1]


WRITTEN_BY_COMMANDS = {"reference/cli.md", "internals/performance.md", "internals/reliability.md"}
ROW_BY_ROW_OF_THE_PROTOCOL = {"reference/status.md"}  # its test compares every row


def test_pages_are_short() -> None:
    lengths = {str(path.relative_to(DOCS)): len(path.read_text().splitlines()) for path in DOCS.rglob("*.md")}
    long = {name for name, length in lengths.items() if length > 250}
    assert not long - WRITTEN_BY_COMMANDS - ROW_BY_ROW_OF_THE_PROTOCOL


def test_pages_stand_on_the_five_floors() -> None:
    assert {path.name for path in DOCS.glob("*.md")} == {"README.md"}
    assert {path.parent.name for path in DOCS.glob("*/*.md")} == {"start", "guide", "operate", "reference", "internals"}
