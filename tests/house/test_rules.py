"""Rules of the house that nobody should have to remember."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import collectived

ROOT = Path(__file__).parents[2]
PACKAGES = [
    ROOT / "proto/collectived_proto",
    ROOT / "client/collectived",
    ROOT / "client/collectived_pytest",
    ROOT / "client/collectived_torch",
    ROOT / "runtime/collectived_runtime",
    ROOT / "launcher/collectived_launcher",
    ROOT / "native/collectived_native",
]
MODULES = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
WRITTEN = [path for path in MODULES if not re.search(r"_pb2(_grpc)?$", path.stem)]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_modules_are_named_after_what_they_do() -> None:
    vague = re.compile(r"(^|_)(utils?|helpers?|managers?|misc|common)$")
    assert not [name(path) for path in WRITTEN if any(vague.search(part) for part in path.with_suffix("").parts)]


def test_nothing_is_ever_unpickled() -> None:
    assert not [name(path) for path in WRITTEN if re.search(r"\b(pickle|marshal|shelve)\b", path.read_text())]


def test_files_are_short() -> None:
    lengths = {name(path): len(path.read_text().splitlines()) for path in WRITTEN}
    assert not {path: length for path, length in lengths.items() if length > 500}


def test_files_of_the_native_core_are_short() -> None:
    sources = sorted((ROOT / "native").rglob("*.[ch]")) + sorted((ROOT / "native").glob("*.py"))
    assert sources
    assert not {name(path) for path in sources if len(path.read_text().splitlines()) > 500}


def is_fixed_outside(path: Path, function: str) -> bool:
    """Whether users call it by its parameters: API.md names those of the client's public functions and methods."""
    public = [getattr(collectived, one) for one in collectived.__all__]
    inherited = {base.__name__ for one in public if isinstance(one, type) for base in one.__mro__}
    return path.is_relative_to(ROOT / "client") and function.split(".")[0] in {*collectived.__all__, *inherited}


def test_no_function_has_more_than_seven_parameters() -> None:
    """Beside `self`. Commands have one for each option."""
    long = {}
    for path in WRITTEN:
        tree = ast.parse(path.read_text())
        owners = {part: node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for part in node.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                count = len(set(names) - {"self", "cls"})
                function = f"{owners[node]}.{node.name}" if node in owners else node.name
                is_command = any("click.command" in ast.unparse(one) for one in node.decorator_list)
                if count > 7 and not is_command and not is_fixed_outside(path, function):
                    long[f"{name(path)}: {function}"] = count
    assert not long


def test_every_module_says_what_it_is() -> None:
    silent = [name(path) for path in WRITTEN if path.read_text().strip() and not path.read_text().startswith('"""')]
    assert not silent


def test_every_package_is_typed() -> None:
    assert all((package / "py.typed").exists() for package in PACKAGES)


def test_every_verb_of_the_makefile_is_listed() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    listed = re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)
    assert sorted(phony[1].split()) == sorted(listed)


def test_no_merge_was_left_half_done() -> None:
    marks = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    read = [
        *ROOT.glob("*.*"),
        *(path for part in ("docs", "tests", "deploy", "examples") for path in (ROOT / part).rglob("*.*")),
    ]
    texts = [
        path
        for path in (*read, *WRITTEN)
        if path.suffix in (".md", ".py", ".toml", ".proto", ".yaml", ".json", ".lock")
    ]
    assert not [name(path) for path in texts if marks.search(path.read_text())]


def test_no_file_names_a_registry() -> None:
    for file in (
        "Makefile",
        "requirements-dev.lock",
        "requirements-site.lock",
        "deploy/docker/requirements.lock",
        "pyproject.toml",
        ".ci/run",
    ):
        assert not re.search(r"https?://|--index-url|--find-links|file:", (ROOT / file).read_text()), file
