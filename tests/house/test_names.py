"""One vocabulary: where tests stand, what classes are called, and words that are gone."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "proto": ROOT / "proto/collectived_proto",
    "client": ROOT / "client/collectived",
    "runtime": ROOT / "runtime/collectived_runtime",
    "launcher": ROOT / "launcher/collectived_launcher",
}
WRITTEN = [path for source in SOURCES.values() for path in source.rglob("*.py") if "_pb2" not in path.name]
# Private to programs that never meet, or the same thing in client and runtime.
MAY_REPEAT = {"Client", "Cuda", "Daemon", "Frame", "Generation", "Row", "Screen", "Session", "Submission"}
# `lanes/...` are names of algorithms; DLPack has lanes of its own; on the wire and in metrics a group loop is a lane.
GONE = re.compile(r"\b(bells?|crew|hurts|ledger|porter|seats?|strands?|workshop|errands?|telling|lingering)\b")
HAVE_OTHER_MEANINGS = {"plan/double_tree.py"}


@pytest.mark.parametrize("part", SOURCES)
def test_every_unit_test_stands_where_the_source_does(part: str) -> None:
    lost = []
    for test in (ROOT / "tests" / part).rglob("test_*.py"):
        folder = SOURCES[part] / test.parent.relative_to(ROOT / "tests" / part)
        there = {path.stem for path in folder.glob("*.py")} | {path.name for path in (folder, *folder.glob("*/"))}
        subject = test.stem.removeprefix("test_")
        if not folder.is_dir() or not any(subject == name or subject.startswith(f"{name}_") for name in there):
            lost.append(str(test.relative_to(ROOT)))
    assert not lost, "tests/<part>/<folder>/test_<module>[_<topic>].py is about <module> of that folder"


def test_class_names_are_unique() -> None:
    names = Counter(
        node.name
        for path in WRITTEN
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name for name, count in names.items() if count > 1 and name not in MAY_REPEAT}


def test_nothing_is_decided_by_the_text_of_a_verdict_or_error() -> None:
    """A text that is reworded must change nothing but what people read."""
    decides = re.compile(
        r"re\.\w+\([^)]*\.message\b|\bin (verdict|error)\.message\b"
        r"|(message|str\(error\))\.(removesuffix|startswith|endswith)\("
    )
    by_text = [str(path.relative_to(ROOT)) for path in WRITTEN if decides.search(path.read_text())]
    assert not [path for path in by_text if not path.endswith("config/flags.py")]  # argparse gives nothing else


def test_the_words_of_the_first_version_are_gone() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    kept = [path for path in (*WRITTEN, *pages) if path.name != "CHANGELOG.md"]
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in kept
        if not any(str(path).endswith(other) for other in HAVE_OTHER_MEANINGS)
        for match in GONE.finditer(path.read_text())
    }
    assert not found
