"""Where two collectives differ: the first path or field, named as its user would name it.

A collective's *structure* is the text of its nest (`{'a': [*, None]}`); *spots* are all places in it, each with what
stands there: a leaf (`float32[3, 4]`), None, or a container.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from collectived_proto.syntax import parse_expression
from collectived_proto.types import Collective, Compression

# Strings are kept as they are, so that a * inside a key stays what it is.
_STRING_OR_LEAF = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\*""")
_LONGEST_STRUCTURE = 20_000
_LONGEST_DESCRIPTION = 400
ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Difference:
    """`where` is `theirs` with them and `ours` with us."""

    where: str
    theirs: str
    ours: str


def find_difference(theirs: Collective, ours: Collective) -> Difference | None:
    """The first difference in operation, value or options; None where the contracts are equal."""
    theirs, ours = theirs.normalize(), ours.normalize()
    if theirs.operation != ours.operation:
        return Difference("the operation", str(theirs.operation), str(ours.operation))
    if (theirs.structure, theirs.leaves) != (ours.structure, ours.leaves):
        return _value_difference(theirs, ours)
    if theirs.bytes_per_pack != ours.bytes_per_pack:
        return Difference("bytes_per_pack", str(theirs.bytes_per_pack), str(ours.bytes_per_pack))
    if theirs.implementation is not ours.implementation:
        return Difference("implementation", theirs.implementation.value, ours.implementation.value)
    if theirs.compression is not ours.compression:
        return Difference("compression", theirs.compression.value, ours.compression.value)
    return None


def describe_collective(collective: Collective) -> str:
    """A collective in full, on one line: operation, value, options; long values are cut."""
    leaves = [f"{leaf.path}: {leaf}" if leaf.path else str(leaf) for leaf in collective.leaves]
    value = "any value" if collective.open else ", ".join(leaves) or collective.structure
    if len(value) > _LONGEST_DESCRIPTION:
        shown = value[:_LONGEST_DESCRIPTION].rpartition(", ")[0] or value[:_LONGEST_DESCRIPTION]
        value = f"{shown}, … ({len(leaves)} leaves)"
    text = f"{collective.operation} of {value}" if value else str(collective.operation)
    if collective.bytes_per_pack:
        text += f", bytes_per_pack={collective.bytes_per_pack}"
    if collective.implementation.value != "AUTO":
        text += f", implementation={collective.implementation.value}"
    if collective.compression is not Compression.NONE:
        text += f", compression={collective.compression.value}"
    return text


def _value_difference(theirs: Collective, ours: Collective) -> Difference:
    there, here = describe_paths(theirs), describe_paths(ours)
    if there is None or here is None:  # a structure that is not understood: then the leaves alone
        there, here = _leaves(theirs), _leaves(ours)
    for path in [*here, *(path for path in there if path not in here)]:
        left, right = there.get(path, ABSENT), here.get(path, ABSENT)
        if left != right:
            return Difference(path or "the value", left, right)
    return Difference("the structure", theirs.structure, ours.structure)


def _leaves(collective: Collective) -> dict[str, str]:
    return {leaf.path: str(leaf) for leaf in collective.leaves}


def describe_paths(collective: Collective) -> dict[str, str] | None:
    """Path -> what stands there, outermost first; None where the structure is not understood."""
    tree = _parse(collective.structure)
    if tree is None:
        return None
    leaves = _leaves(collective)
    found: dict[str, str] = {}
    pending: list[tuple[str, ast.expr]] = [("", tree)]
    while pending:
        path, node = pending.pop()
        found[path] = _what(node, leaves.get(path, "an array"))
        pending.extend(reversed(_children(path, node)))
    return found if set(leaves) <= set(found) else None


def _parse(structure: str) -> ast.expr | None:
    if len(structure) > _LONGEST_STRUCTURE:
        return None
    text = _STRING_OR_LEAF.sub(lambda match: "..." if match[0] == "*" else match[0], structure)
    try:
        return parse_expression(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # comes from a client: whatever it is, the leaves can still be compared


def _what(node: ast.expr, leaf: str) -> str:
    match node:
        case ast.Constant(value=None):
            return "None"
        case ast.Constant(value=value) if value is ...:
            return leaf
        case ast.Dict():
            return "a dict"
        case ast.List():
            return "a list"
        case ast.Tuple():
            return "a tuple"
        case ast.Call(func=ast.Name(id=name)):
            return f"a {name}"
        case _:
            return ast.unparse(node)


def _children(path: str, node: ast.expr) -> list[tuple[str, ast.expr]]:
    match node:
        case ast.Dict(keys=keys, values=values):
            return [(f"{path}[{ast.unparse(key)}]", value) for key, value in zip(keys, values, strict=True) if key]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [(f"{path}[{index}]", part) for index, part in enumerate(parts)]
        case ast.Call(args=parts, keywords=fields):
            return [
                *((f"{path}[{index}]", part) for index, part in enumerate(parts)),
                *((f"{path}.{field.arg}", field.value) for field in fields),
            ]
        case _:
            return []
