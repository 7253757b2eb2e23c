"""The pages of docs/reference: `python -m tests.docs.pages` (`make docs`) writes them again.

A page is made of the signature and the docstring of a public name, and of `docs/examples/<page>.py`, which the tests
run. What is to be changed is changed there.
"""

from __future__ import annotations

import enum
import inspect
import re
import textwrap
from types import ModuleType
from typing import Any

from tests.docs.contents import (
    COMMON,
    CONTENTS,
    EXAMPLES,
    OTHER_PAGES,
    RAY,
    REFERENCE,
    UNIMPORTED,
    UNSAID,
    WRITTEN_BY_HAND,
    is_alias,
    names,
    resolved,
)
from tests.docs.docstrings import Docstring, Function, bullets, joined
from tests.docs.unimported import read_class, read_function

import collectived as cd
from collectived import errors
from collectived.collectives import Collectives
from collectived.cross_device.multi_worker import MultiWorkerExtended
from collectived.cross_device.replica import ReplicaContext
from collectived.cross_device.strategy import StrategyExtended
from collectived.values.leaves import check_reducible
from collectived_proto import errors as tree
from collectived_proto.types import AllReduce, DType
from collectived_runtime.plan.packing import result_dtype

CALLED = {  # how instances are named in signatures
    "CommunicationOptions": "options",
    "ErrorFeedback": "feedback",
    "IndexedSlices": "slices",
    "MirroredStrategy": "strategy",
    "MultiWorkerMirroredStrategy": "strategy",
    "StrategyExtended": "strategy.extended",
    "MultiWorkerExtended": "strategy.extended",
    "ReplicaContext": "context",
    "ReduceOp": "ReduceOp",
    "LocalJob": "job",
}
EXTENDED = {cd.MirroredStrategy: StrategyExtended, cd.MultiWorkerMirroredStrategy: MultiWorkerExtended}
ON_ROOT = "On `root` what `{}` gives; None on other ranks. With `async_op`, a `Work`."


def pages() -> dict[str, str]:
    """File name to text."""
    made = {f"{name}.md": page(name) for name in names() if name not in WRITTEN_BY_HAND}
    return {**made, "README.md": index()}


def page(name: str) -> str:
    found: Any = None if name in UNIMPORTED else resolved(name)
    rest: list[str] = []
    if name == "errors":
        head, rest = errors_page()
    elif isinstance(found, ModuleType):
        head = module_page(found)
    elif name not in UNIMPORTED and is_alias(name):
        head = [f"The same as `{found.__name__}`."]
    elif isinstance(found, type):
        head, rest = class_page(found)
    else:
        head, rest = function_page(name)
    origin = f"<!-- Made by `make docs` of the docstring and of docs/examples/{name}.py: change those. -->"
    text = "\n\n".join([f"# {name}", origin, *head, "## Example", *example(name), *rest]) + "\n"
    return linked(text, name)


def index() -> str:
    where = "[cli.md](cli.md)"
    lines = ["# Reference", "", f"One page per public name; `cd` is `collectived`. The commands are in {where}.", ""]
    for title, part in CONTENTS.items():
        lines += [f"## {title}", "", "| name | |", "|---|---|"]
        lines += [f"| [`{name}`]({name}.md) | {linked(summary(name), 'README')} |" for name in part] + [""]
    return "\n".join(lines[:-1]) + "\n"


def summary(name: str) -> str:
    """What a page is about, in one sentence."""
    if name in WRITTEN_BY_HAND:
        return (REFERENCE / f"{name}.md").read_text().split("\n\n")[1].partition(".")[0] + "."
    if name not in UNIMPORTED and is_alias(name):
        return f"The same as `{resolved(name).__name__}`."
    doc = read_function(name).doc if name in UNIMPORTED else Docstring.of(resolved(name))
    first = re.split(r"(?<=\.) |; see", joined(doc.description[0]))[0]
    return first.removesuffix(".") + "."


# Functions and methods


def function_page(name: str) -> tuple[list[str], list[str]]:
    function = read_function(name) if name in UNIMPORTED else Function.of(resolved(name))
    owner, _, method = name.rpartition(".")
    if method in dir(Collectives):
        function = completed(function)
    called = f"{owner.lower()}.{method}" if owner in ("Group", "Session", "Work") else f"cd.{name}"
    first, *more = function.doc.description
    head = [first, function.signature(called), *more, *function.sections()]
    if method in dir(Collectives):
        head.append("[All collectives](Group.md#all-collectives) has the rules for values, results and errors.")
    if name == RAY:
        return head, ray_job()
    if name != "get_replica_context":
        return head, []
    doc = Docstring.of(ReplicaContext)
    return head, ["## `ReplicaContext`", *doc.description, *attributes(ReplicaContext, doc), *methods(ReplicaContext)]


def ray_job() -> list[str]:
    """What the block of `integrations.ray.start` gets."""
    doc, functions = read_class(RAY, "RayJob")
    parts = ["## `RayJob`", *doc.description, *attributes(object, doc)]
    for function in functions:
        first, *more = function.doc.description
        parts += [f"## `{function.name}`", first, function.signature(f"job.{function.name}"), *more]
        parts += function.sections("###")
    return parts


def completed(function: Function) -> Function:
    """A collective with what its docstring leaves to another one's: `As that one …`, options, errors."""
    all_reduce, own = Docstring.of(Collectives.all_reduce), function.doc.sections
    alike = re.match(r"As `(\w+)`", function.doc.description[0])
    other = (Docstring.of(getattr(Collectives, alike[1])) if alike else Docstring([])).sections
    general = {name: all_reduce.sections["Args"][name] for name in ("options", "async_op")}
    known = {**COMMON, **general, **other.get("Args", {}), **own.get("Args", {})}
    args = {name: known[name] for name in function.arguments if name in known}
    wrong = {**own.get("Raises", {}), **other.get("Raises", {}), **all_reduce.sections["Raises"]}
    sections = {"Returns": {"": ON_ROOT.format(alike[1])}} if alike else {}
    doc = Docstring(function.doc.description, {**sections, **own, "Args": args, "Raises": wrong})
    return Function(function.name, function.parameters, function.arguments, function.returns, doc)


# Classes and modules


def class_page(cls: type[Any]) -> tuple[list[str], list[str]]:
    doc = Docstring.of(cls)
    head, more = doc.description[:1], doc.description[1:]
    made = constructor(cls, doc)
    if made is not None:
        head += [made.signature(f"cd.{cls.__name__}"), *more, *made.sections()]
    else:
        head += more
    if issubclass(cls, enum.Enum):
        head.append("| member | value |\n|---|---|" + "".join(f"\n| `{one.name}` | `{one.value!r}` |" for one in cls))
    head += attributes(cls, doc)
    rest = [] if any(name.startswith(f"{cls.__name__}.") for name in names()) else methods(cls)
    if cls is cd.ReduceOp:
        rest = ["## What takes which elements", reductions(), *rest]
    if not rest:
        head += method_table(cls)
    if cls is cd.Group:
        rest += ["## All collectives", *Docstring.of(Collectives).description]
    if cls in EXTENDED:
        extended = EXTENDED[cls]
        rest += ["## `strategy.extended`", *Docstring.of(extended).description, *methods(extended)]
    return head, rest


def constructor(cls: type[Any], doc: Docstring) -> Function | None:
    """How instances are made, with the words of the base where they are made alike; None: not by users."""
    for base in cls.__mro__:
        found = doc if base is cls else Docstring.of(base)
        alike = inspect.getattr_static(base, "__init__") is inspect.getattr_static(cls, "__init__")
        if alike and "Args" in found.sections:
            return Function.of(cls, found)
    return None


def attributes(cls: type[Any], doc: Docstring) -> list[str]:
    found = {**doc.sections.get("Attributes", {}), **UNSAID.get(cls.__name__, {})}
    said = {name for names in found for name in names.split(", ")}
    for name, member in ((name, member) for base in cls.__mro__[-2::-1] for name, member in vars(base).items()):
        if isinstance(member, property) and not name.startswith("_") and name not in said:
            text = joined((Docstring.of(member).description or [""])[0])
            found[name] = text[:1].lower() + text[1:]
    return ["## Attributes", bullets(found)] if found else []


def method_table(cls: type[Any]) -> list[str]:
    mine = [name for name in names() if name.startswith(f"{cls.__name__}.")]
    rows = "".join(f"\n| [`{name.partition('.')[2]}`]({name}.md) | {summary(name)} |" for name in mine)
    return ["## Methods", "| method | |\n|---|---|" + rows] if mine else []


def methods(cls: type[Any]) -> list[str]:
    """Methods on the page of their class."""
    parts: list[str] = []
    for function in shown_methods(cls):
        first, *more = function.doc.description
        name = function.name.rpartition(".")[2]
        called = f"{CALLED.get(cls.__name__, 'ops')}.{name}"
        parts += [f"## `{name}`", first, function.signature(called), *more, *function.sections("###")]
    return parts


def shown_methods(cls: type[Any]) -> list[Function]:
    """Without those that say no more than their base; what may be overridden is shown in the base alone."""
    found = [getattr(cls, name, None) for base in cls.__mro__[::-1] for name in vars(base) if not name.startswith("_")]
    shown: dict[str, Function] = {}
    for one in found:
        if not inspect.isroutine(one) or not one.__module__.startswith("collectived"):
            continue
        to_override = one.__name__ == "terms" or one.__name__.endswith("_implementation")
        if not (one.__doc__ or "").startswith("See `") and not (to_override and one.__name__ not in vars(cls)):
            shown[one.__name__] = Function.of(one)
    return list(shown.values())


def module_page(module: ModuleType) -> list[str]:
    parts = Docstring.of(module).description
    if module is cd.integrations:
        rows = "".join(f"\n| `{name}` | {summary(name)} |" for name in UNIMPORTED)
        return [*parts, "| name | |\n|---|---|" + rows]
    if module is cd.mpi:
        return [*parts, *call_table(cd.mpi.Comm), *call_table(cd.mpi.Request), *call_table(cd.mpi.Status)]
    for inner in [module, *(vars(module)[one] for one in module.__all__ if isinstance(vars(module)[one], ModuleType))]:
        where = inner.__name__.partition(".")[2]
        own = [one for one in inner.__all__ if not isinstance(vars(inner)[one], ModuleType)]
        own = [one if hasattr(cd, one) else f"{where}.{one}" for one in own]
        if own:
            rows = "".join(f"\n| `{one}` | {summary(one)} |" for one in own)
            parts += [f"`cd.{where}`:", "| name | |\n|---|---|" + rows]
    return parts


def call_table(cls: type[Any]) -> list[str]:
    """The methods of a class that has no page, and what each does; those without words are said to be like another."""
    rows = ""
    for name, member in vars(cls).items():
        if not name.startswith("_") and member.__doc__:
            text = joined(Docstring.of(member).description[0])
            shown = name if isinstance(member, property) else f"{name}({', '.join(call_arguments(member))})"
            rows += f"\n| `{shown}` | {text} |"
    return [f"## `{cls.__name__}`", *Docstring.of(cls).description, "| call | |\n|---|---|" + rows]


def call_arguments(member: Any) -> list[str]:
    function = member.__func__ if isinstance(member, staticmethod) else member
    given = inspect.signature(function).parameters.values()
    return [
        one.name if one.default is one.empty else f"{one.name}={getattr(one.default, 'name', one.default)}"
        for one in given
        if one.name != "self"
    ]


def errors_page() -> tuple[list[str], list[str]]:
    head = [verbatim(block) if block.startswith(" ") else joined(block) for block in Docstring.of(tree).description]
    head.append("Mistakes in arguments that need no worker to find raise Python's own `ValueError` or `TypeError`.")
    rest: list[str] = []
    for name in sorted(set(errors.__all__) - {"Code"}, key=(tree.__doc__ or "").index):
        cls = getattr(errors, name)
        doc = Docstring.of(cls)
        bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
        rest += [f"## {name}", doc.description[0], f"Bases: {bases}. Code: `{cls.code.name}`, {int(cls.code)}."]
        if cls is errors.CollectiveError:
            rest[-1:] = attributes(cls, doc)[1:]
    rows = "".join(f"\n| `{code.name}` | {int(code)} |" for code in errors.Code)
    return head, [*rest, "## Code", *Docstring.of(errors.Code).description, "| code | |\n|---|---|" + rows]


def reductions() -> str:
    """Which elements each reduce op takes, and what they become; as the code decides it."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for dtype in DType:
        rows.setdefault(tuple(outcome(op, dtype) for op in cd.ReduceOp), []).append(dtype.label)
    head = f"| elements | {' | '.join(f'`{op.value}`' for op in cd.ReduceOp)} |\n|---|{'---|' * len(cd.ReduceOp)}"
    body = [f"| {', '.join(labels)} | {' | '.join(row)} |" for row, labels in rows.items()]
    return "\n".join([head, *body]) + '\n\n"–" is a `TypeError`; *same*: results have the type of the elements.'


def outcome(op: cd.ReduceOp, dtype: DType) -> str:
    try:
        check_reducible(AllReduce(op), dtype, "value")
    except TypeError:
        return "–"
    result = result_dtype(dtype, op)
    return "*same*" if result is dtype else result.label


# Markdown


def example(name: str) -> list[str]:
    source = (EXAMPLES / f"{name}.py").read_text().strip("\n")
    if name == RAY:
        return ["Run on a Ray cluster; the comment shows what it prints.", f"```python\n{source}\n```"]
    ran = "two ranks, each with a `session` and a `group` of its own"
    if re.search(r"^(import|from) collectived", source, re.MULTILINE):
        ran = "`collectived launch --workers 2`"
    return [f"Run by {ran}; comments show what rank 0 prints.", f"```python\n{source}\n```"]


def verbatim(block: str) -> str:
    return f"```text\n{textwrap.dedent(block)}\n```"


def linked(text: str, at: str) -> str:
    """Code in prose that names a page is made a link to it; not in blocks of code, headings and comments."""
    owner = at.partition(".")[0]

    def link(found: re.Match[str]) -> str:
        name, (cls, _, method) = found[1], found[1].partition(".")
        if name == "Collectives":
            return "[all collectives](Group.md#all-collectives)"
        if name in errors.__all__:
            target = f"errors.md#{name.lower()}"
        elif f"{owner}.{name}" in names():
            target = f"{owner}.{name}.md"
        elif name in names() and name != "errors":
            target = f"{name}.md"
        elif cls in names() and method and isinstance(resolved(cls), type) and hasattr(resolved(cls), method):
            target = f"{cls}.md#{'attributes' if isinstance(vars(resolved(cls)).get(method), property) else method}"
        else:
            return found[0]
        return found[0] if target.partition("#")[0] == f"{at}.md" else f"[`{name}`]({target})"

    parts = re.split(r"(^```.*?^```$|^#[^\n]*$|^<!--[^\n]*$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(r"(?<!\[)`([\w.]+)`(?!\])", link, part) for part in parts[::2]]
    return "".join(parts)


def write() -> None:
    REFERENCE.mkdir(exist_ok=True)
    fresh = pages()
    for old in REFERENCE.glob("*.md"):
        if old.name not in fresh and old.stem not in (*WRITTEN_BY_HAND, *OTHER_PAGES):
            old.unlink()
    for name, text in fresh.items():
        (REFERENCE / name).write_text(text)


if __name__ == "__main__":
    write()
