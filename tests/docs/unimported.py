"""Functions and classes of integrations, read without importing them: their libraries need not be here."""

from __future__ import annotations

import ast
import re

from tests.docs.contents import ROOT, UNIMPORTED
from tests.docs.docstrings import Docstring, Function


def public_names(name: str) -> set[str]:
    """What the module of this name has for users."""
    definitions = [one for one in _parse(name).body if isinstance(one, ast.FunctionDef | ast.ClassDef)]
    return {one.name for one in definitions if not one.name.startswith("_")}


def read_function(name: str) -> Function:
    """A function of a module, by its page's name."""
    wanted = name.rpartition(".")[2]
    (found,) = [one for one in _parse(name).body if isinstance(one, ast.FunctionDef) and one.name == wanted]
    return _function(found)


def read_class(name: str, cls: str) -> tuple[Docstring, list[Function]]:
    """What is said of a class in the module of `name`, and its public methods."""
    (found,) = [one for one in _parse(name).body if isinstance(one, ast.ClassDef) and one.name == cls]
    methods = [one for one in found.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
    return Docstring.parse(ast.get_docstring(found) or ""), [_function(one) for one in methods]


def _parse(name: str) -> ast.Module:
    return ast.parse((ROOT / UNIMPORTED[name]).read_text())


def _function(found: ast.FunctionDef) -> Function:
    assert found.returns is not None
    given = found.args
    given.args = [one for one in given.args if one.arg != "self"]
    named = [*given.args, *([given.vararg] if given.vararg else []), *given.kwonlyargs]
    parameters = [re.sub("(?<! )=", " = ", ast.unparse(given))]
    doc = Docstring.parse(ast.get_docstring(found) or "")
    return Function(found.name, parameters, [one.arg for one in named], f" -> {ast.unparse(found.returns)}", doc)
