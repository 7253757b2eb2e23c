"""As DeepSeek, vLLM and LightLLM had to learn, what arrives is data: nothing here unpickles it or gives it to a shell.

That random bytes at every door do no harm is tested in tests/fuzz.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.house.test_rules import MODULES, name

MODULES_THAT_RUN_DATA = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "code", "runpy"}
CALLS_THAT_RUN_DATA = {"eval", "exec", "compile", "__import__"}
SHELLS = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("subprocess", "getstatusoutput")}


def offences(source: str) -> Iterator[str]:
    """What runs data in a module, each with its line."""
    for node in ast.walk(ast.parse(source)):
        found = ""
        if isinstance(node, ast.Import):
            found = next((one.name for one in node.names if one.name.split(".")[0] in MODULES_THAT_RUN_DATA), "")
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[0]
            names = {(module, one.name) for one in node.names}
            found = module if module in MODULES_THAT_RUN_DATA or names & SHELLS else ""
        elif isinstance(node, ast.Call):
            found = _of_call(node)
        if found and isinstance(node, (ast.stmt, ast.expr)):
            yield f"{node.lineno}: {found}"


def _of_call(node: ast.Call) -> str:
    called = node.func
    if isinstance(called, ast.Name) and called.id in CALLS_THAT_RUN_DATA:
        return called.id
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        if (called.value.id, called.attr) in SHELLS:
            return f"{called.value.id}.{called.attr}"
        if called.value.id == "builtins" and called.attr in CALLS_THAT_RUN_DATA:
            return called.attr
    for word in node.keywords:
        harmless = isinstance(word.value, ast.Constant) and not word.value.value
        if word.arg in ("shell", "allow_pickle") and not harmless:
            return f"{word.arg}="
    return ""


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_no_module_runs_what_it_is_given(path: Path) -> None:
    assert not list(offences(path.read_text()))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, marshal as m",
        "from cloudpickle import loads",
        "from os import system",
        "def f(x):\n    return eval(x)",
        "exec('x')",
        "import os\nos.system('x')",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "import subprocess\nsubprocess.Popen('x', shell=wanted)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_what_would_be_found_is_found(source: str) -> None:
    assert list(offences(source))


@pytest.mark.parametrize("source", ["import json", "subprocess.run(['x'], shell=False)", "re.compile('x')", "x.eval()"])
def test_what_is_harmless_is_not(source: str) -> None:
    assert not list(offences(source))
