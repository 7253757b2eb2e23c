"""Comments, docstrings and messages of the product are plain English: their subjects are named.

Read are its Python and C files, the .proto files, the scripts that build it and its pages, the examples, the
benchmarks, and the files by which it is deployed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.house.prose import Text, c_prose, hash_prose, proto_prose, python_prose
from tests.house.test_rules import ROOT, WRITTEN

SCRIPTS = sorted((ROOT / "native").glob("*.py"))
C_FILES = sorted((ROOT / "native").rglob("*.[ch]"))
OTHERS = [
    path
    for name in ("examples", "docs/examples", "deploy", "website", "benchmarks")
    for path in (ROOT / name).rglob("*.py")
]
KINDS = (".yaml", ".toml", ".service", ".sbatch")
DEPLOYED = [path for path in sorted((ROOT / "deploy").rglob("*")) if path.suffix in KINDS or path.name == "Dockerfile"]
VERBS = [ROOT / "Makefile", ROOT / "pyproject.toml"]
PROTO_FILES = sorted((ROOT / "proto").glob("collectived_proto/**/*.proto"))
READ = (*WRITTEN, *SCRIPTS, *OTHERS, *DEPLOYED, *VERBS, *C_FILES, *PROTO_FILES)
READERS = {".py": python_prose, ".proto": proto_prose, ".c": c_prose, ".h": c_prose}  # others have comments behind #
# Words that stand for a subject which the reader must guess, and verbs of hearing and telling for steps of a protocol.
PEOPLE = ("those", "people", "People", "Users", "users", "user", "person", "reader", "caller", "callers")
NO_PERSON = "".join(f"(?<!{word} )" for word in PEOPLE)  # after these "who" is a relative pronoun
RIDDLES = re.compile(
    "|".join(
        [
            r"(?i:\b(?:whoever|whomever|nobody|somebody|everybody|anybody|everyone|anyone|no one|someone)\b)",
            r"(?i:\b(?:none the worse|the one who)\b)",
            r"(?:^|[.:!] )(?:Who|What) (?![^.]*\?)",
            r"; (?:who|what) ",
            r"^(?:who|what|whatever) (?!is wrong$)",
            NO_PERSON + r"(?:\bwho\b(?! may look)|\bwhom\b)",
            r"(?i:\b(?:hears?|heard|hearing)\b)(?!:|, answered:)",
            r"(?i:\b(?:tells?|told)\b)(?!:|\W: |.{0,40}apart)",
            r"\b(?:yours|mine|ours)\b(?!:)",
        ]
    )
)
# Texts with a riddle, by folder. A number may only fall: write the new one here once lines are mended.
PACKAGES = ("proto", "client", "runtime", "launcher", "native")
LEFT = dict.fromkeys(
    (*PACKAGES, "examples", "docs", "deploy", "website", "benchmarks", "Makefile", "pyproject.toml"), 0
)


def read_prose(path: Path) -> list[Text]:
    return list(READERS.get(path.suffix, hash_prose)(path.read_text()))


def riddles(package: str) -> list[str]:
    """The texts of a folder that have a riddle, each with its file and line."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {found!r} in {text[:200]!r}"
        for path in READ
        if path.is_relative_to(ROOT / package)
        for line, text in read_prose(path)
        for found in RIDDLES.findall(text)
        if (package, found.lower()) != ("benchmarks", "ours")  # beside peers
    ]


@pytest.mark.parametrize("package", LEFT)
def test_subjects_are_named(package: str) -> None:
    found = riddles(package)
    assert len(found) == LEFT[package], "\n".join(found)


def test_every_package_is_read() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in READ} == set(LEFT)
    assert set(READERS) < {path.suffix for path in READ}
    assert len(SCRIPTS) == 3 and len(PROTO_FILES) == 5


@pytest.mark.parametrize(
    "sentence",
    [
        "Whoever maps checks the seals.",
        "It waits; what is drained ends.",
        "What a worker is told.",
        "A client hears of it.",
        "It is held by who sends it.",
        "an authority of ours",
    ],
)
@pytest.mark.parametrize(
    "frame", ["# {}\n", '"""{}"""\n', 'def f():\n    """{}"""\n', 'raise E("{}")\n', 'f"{{x}}: {}"\n']
)
def test_a_riddle_in_python_is_noticed(sentence: str, frame: str) -> None:
    assert any(RIDDLES.search(text) for _, text in python_prose(frame.format(sentence)))


@pytest.mark.parametrize(
    "source",
    [
        "/* A rank that\n * nobody waits for. */\n",
        "int x; // whoever\n// drives\n",
        'f("it was told so");\n',
        "/* Two parts.\n *\n * What is read is copied. */\n",
    ],
)
def test_a_riddle_in_c_is_noticed(source: str) -> None:
    assert any(RIDDLES.search(text) for _, text in c_prose(source))


@pytest.mark.parametrize(
    "source",
    [
        "// What a worker says.\nmessage A {}\n",
        "message A {\n  int32 b = 1;  // 0: not\n                // told\n}\n",
        "  // A rank that\n  // nobody waits for.\n",
    ],
)
def test_a_riddle_in_the_protocol_is_noticed(source: str) -> None:
    assert any(RIDDLES.search(text) for _, text in proto_prose(source))


@pytest.mark.parametrize("source", ["a: b # whoever comes\n", "# It is\n# told so.\n", "verb: ## who may\n\tit\n"])
def test_a_riddle_in_a_file_of_deployment_is_noticed(source: str) -> None:
    assert any(RIDDLES.search(text) for _, text in hash_prose(source))


def test_what_stands_behind_each_field_is_a_text_of_its_own() -> None:
    source = "  a = 1;  // one two\n  b = 2;  // three four\n          // five\n"
    assert list(proto_prose(source)) == [(1, "one two"), (2, "three four five")]


@pytest.mark.parametrize(
    "text", ["`nobody`", "What is a rank?", "It does what it says.", "They are told apart.", "heard: a name"]
)
def test_code_questions_and_relative_clauses_are_no_riddles(text: str) -> None:
    assert not any(RIDDLES.search(found) for _, found in python_prose(f"# {text}\n"))


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("x = 1  # one\n# two three\n# four\n", [(2, "two three four")]),
        ('"""One line.\n\nAnother\nline.\n"""\n', [(1, "One line."), (3, "Another line.")]),
        ('"""Two kinds:\n- of one\n- of two\n"""\n', [(1, "Two kinds:"), (2, "- of one"), (3, "- of two")]),
        ('raise E(f"{n} of " f"{m} are there")\n', [(1, "… of … are there")]),
    ],
)
def test_lines_of_one_text_are_joined(source: str, texts: list[Text]) -> None:
    assert list(python_prose(source)) == texts


def test_the_line_of_a_comment_in_c_is_known() -> None:
    assert list(c_prose("int x;\n/* A rank\n * waits. */\n")) == [(2, "A rank waits.")]
