"""One vocabulary: where tests stand, what classes are called, and words that are gone."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.house.test_rules import ROOT, WRITTEN

SOURCES = {
    "proto": ROOT / "proto/collectived_proto",
    "client": ROOT / "client/collectived",
    "runtime": ROOT / "runtime/collectived_runtime",
    "launcher": ROOT / "launcher/collectived_launcher",
    "native": ROOT / "native/collectived_native",
}
# The native core has C files too, a build of its own, and a protocol, which README.md describes.
NATIVE = {path.stem for path in (ROOT / "native").rglob("*.*")} | {"protocol"}
# Private to programs that never meet, or the same thing in client and runtime.
MAY_REPEAT = {"Client", "Cuda", "Daemon", "Frame", "Generation", "Request", "Row", "Screen", "Session", "Submission"}
# A seat is a place in a segment now.
# `lanes/...` are names of algorithms; DLPack has lanes of its own; on the wire a group loop is a lane.
GONE = re.compile(r"\b(bells?|crew|hurts|ledger|porter|strands?|workshop|errands?|telling|lingering)\b")
MESSAGES = {"message", "why", "details", "verify_message", "stderr"}
# Names of other libraries, and of the environment, that comments and docstrings quote though no code of ours has them.
FOREIGN = {"_DistributedBackendOptions", "asyncOp", "backward", "destroy_process_group", "float32", "set_exception"}
FOREIGN |= {"COLLECTIVED_WORKER_MEMORY_LIMIT", "SO_PEERCRED", "srun"}
LIBRARIES = {"cupy", "grpc", "os", "torch"}
READS = {"startswith", "endswith", "removeprefix", "removesuffix", "find", "index", "partition", "rpartition", "split"}
# Where others give nothing but a text: each in a function of its own, which says why.
FOREIGN_TEXTS = {
    ("flags.py", "error"),  # of argparse
    ("error_status.py", "describe_failure"),  # of gRPC: what it says of a connection, for people
    ("remote_host.py", "_lacks_module"),  # Python has one exit status for it and for all else
}
HAVE_OTHER_MEANINGS = {"plan/double_tree.py"}


@pytest.mark.parametrize("part", SOURCES)
def test_every_unit_test_stands_where_the_source_does(part: str) -> None:
    lost = []
    for test in (ROOT / "tests" / part).rglob("test_*.py"):
        folder = SOURCES[part] / test.parent.relative_to(ROOT / "tests" / part)
        there = {path.stem for path in folder.glob("*.py")} | {path.name for path in (folder, *folder.glob("*/"))}
        there |= NATIVE if part == "native" else set()
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


def _is_message(node: ast.expr) -> bool:
    """Whether an expression is, by its name, what is said to people."""
    match node:
        case ast.BoolOp(values=values):
            return any(map(_is_message, values))
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id="error" | "exc" | "e")]):
            return True
        case ast.Call(func=ast.Attribute(attr="lower" | "strip" | "casefold", value=value)):
            return _is_message(value)
        case ast.Call(func=called):
            return _is_message(called)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_") in MESSAGES
    return False


def _reads_message(node: ast.AST) -> bool:
    match node:
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[ast.Name() as right]):
            return _is_message(right) or (right.id == "error" and isinstance(left, (ast.Name, ast.Constant)))
        case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[right]):
            return _is_message(right)
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Constant(value=str(value))]):
            return bool(value) and _is_message(left)
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=arguments):
            looks = name in ("search", "match", "fullmatch", "finditer", "findall", "sub", "split")
            return (name in READS and _is_message(value)) or (looks and any(map(_is_message, arguments)))
    return False


def test_nothing_is_decided_by_the_text_of_a_verdict_or_error() -> None:
    """A text that is reworded must change nothing but what people read."""
    found = {
        (path.name, function.name)
        for path in WRITTEN
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        and any(map(_reads_message, ast.walk(function)))
    }
    assert found == FOREIGN_TEXTS


@pytest.mark.parametrize(
    "decision",
    [
        '"expired" in message',
        'why.removesuffix("; connect again")',
        're.search("interrupted", verdict.message)',
        "_INTERRUPTED.search(self._why)",
        'str(error).startswith("rank")',
        '"gone" in (error.details() or "")',
        'verdict.message == "lost"',
        "other in error",
        '"x" in error.verify_message.lower()',
    ],
)
def test_a_decision_by_text_is_seen(decision: str) -> None:
    assert any(map(_reads_message, ast.walk(ast.parse(decision))))


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


def _documents() -> Iterator[tuple[Path, str]]:
    """Yield the docstrings of the product, and the pages for those who work on it."""
    for path in WRITTEN:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield path, ast.get_docstring(node) or ""
    pages = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs/internals").glob("*.md"), *ROOT.glob("*/README.md")]
    for path in (*pages, *(ROOT / "runtime").rglob("README.md")):
        yield path, path.read_text()


def test_files_that_docstrings_and_pages_name_exist() -> None:
    folders = (*SOURCES, "tests", "docs", "examples", "benchmarks", "deploy")
    files = {f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert not {
        f"{path.relative_to(ROOT)}: {file}"
        for path, text in _documents()
        for file in re.findall(r"`([\w./-]+\.py)`", text)
        if not any(one.endswith(f"/{file}") for one in files)
    }


def _split(path: Path) -> tuple[set[str], list[str]]:
    """The words of a module's code, and the names that its comments and docstrings quote."""
    words, quoted = set[str](), list[str]()
    with tokenize.open(path) as file:
        last = tokenize.NEWLINE
        for token in tokenize.generate_tokens(file.readline):
            begins = last in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and begins):
                quoted += re.findall(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)", token.string)
            else:
                words.update(re.findall(r"[A-Za-z_]\w*", token.string))
            last = last if token.type in (tokenize.COMMENT, tokenize.NL) else token.type
    return words, quoted


def _definitions(path: Path) -> Iterator[str]:
    """The names of a module, its folder, its classes and functions, and what is assigned in these classes and in it."""
    yield from (path.stem, path.parent.name)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        if isinstance(node, (ast.Module, ast.ClassDef)):
            parts = [
                name for one in node.body if isinstance(one, (ast.Assign, ast.AnnAssign)) for name in ast.walk(one)
            ]
            yield from (name.id for name in parts if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store))


def test_names_that_comments_and_docstrings_quote_exist() -> None:
    """Each is a word of that module's code, or defined in the product; one with dots may begin with a library."""
    others = [path.read_text() for kind in ("[ch]", "proto") for path in ROOT.glob(f"[!.]*/**/*.{kind}")]
    defined = {*FOREIGN, *dir(builtins), *keyword.kwlist, *(name for path in WRITTEN for name in _definitions(path))}
    defined.update(re.findall(r"\w+", re.sub(r"//.*|/\*[^*]*\*/", "", "\n".join(others))))
    unknown = set()
    for path in WRITTEN:
        words, quoted = _split(path)
        known = defined | words
        for one in quoted:
            first, *rest = one.split(".")
            if {first, *rest} - known and (not rest or first in defined - LIBRARIES):
                unknown.add(f"{path.relative_to(ROOT)}: {one}")
    assert not unknown
