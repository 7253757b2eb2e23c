"""The fields of docs/reference/status.md: `python -m tests.docs.configuration` (`make docs`) writes them.

What a message and a field mean is the comment before it in the .proto files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tests.docs.contents import ROOT

from collectived_proto.report.status_json import RENAMED
from collectived_proto.v1 import status_pb2

PAGE = ROOT / "docs" / "reference" / "status.md"
_PART = re.compile(r"(<!-- made: fields -->\n).*?(<!-- end -->)", re.DOTALL)
_MESSAGE = re.compile(r"^((?://.*\n)*)message (\w+) \{\n((?:.*\n)*?)\}$", re.MULTILINE)
_FIELD = re.compile(r"^((?:  //.*\n)*)  (?:optional |repeated )?[\w.]+ (\w+) = \d+;$", re.MULTILINE)
_TYPES = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_DOUBLE: "number",
    FieldDescriptor.TYPE_FLOAT: "number",
    FieldDescriptor.TYPE_UINT32: "number",
    FieldDescriptor.TYPE_INT32: "number",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_UINT64: "int64",
    FieldDescriptor.TYPE_SINT64: "int64",
    FieldDescriptor.TYPE_ENUM: "string",
}


def reachable(top: Descriptor) -> dict[str, Descriptor]:
    """A message and all that it holds, by name, in the order of the fields."""
    found: dict[str, Descriptor] = {}
    ahead = [top]
    while ahead:
        message = ahead.pop(0)
        if message.name not in found:
            found[message.name] = message
            ahead += [field.message_type for field in message.fields if field.message_type]
    return found


MESSAGES = reachable(cast(Descriptor, status_pb2.StatusReply.DESCRIPTOR))


def fresh(text: str) -> str:
    """The page with its fields as the protocol has them now."""
    parts = "\n".join(section(name) for name in MESSAGES)
    return _PART.sub(lambda found: f"{found[1]}{parts}{found[2]}", text)


def section(name: str) -> str:
    """The heading, the meaning and the table of a message."""
    intro, meanings = comments()[name]
    renamed = RENAMED if name == "WorkerStatus" else {}
    rows = [
        f"| `{renamed.get(field.name, field.name)}` | {_type_of(field)} | {meanings[field.name]} |"
        for field in MESSAGES[name].fields
    ]
    return "\n".join([f"## {name}", "", intro, "", "| field | type | meaning |", "|---|---|---|", *rows, ""])


def comments() -> dict[str, tuple[str, dict[str, str]]]:
    """What each message means, and each of its fields, as the .proto files say it."""
    return {name: (intro, fields) for file in ("status", "common") for name, intro, fields in _read(file)}


def _read(file: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    text = (ROOT / f"proto/collectived_proto/v1/{file}.proto").read_text()
    for intro, name, body in _MESSAGE.findall(text):
        if name in MESSAGES:
            yield name, _joined(intro), {field: _joined(said) for said, field in _FIELD.findall(body)}


def _joined(comment: str) -> str:
    """One line; names of messages lead to their sections."""
    words = " ".join(line.strip().removeprefix("//").strip() for line in comment.splitlines())
    return re.sub(rf"\b({'|'.join(MESSAGES)})\b", lambda found: f"[{found[1]}](#{found[1].lower()})", words)


def _type_of(field: FieldDescriptor) -> str:
    name = field.message_type.name if field.message_type else ""
    one = f"[{name}](#{name.lower()})" if name else _TYPES[field.type]
    return f"list of {one}" if field.is_repeated else one
