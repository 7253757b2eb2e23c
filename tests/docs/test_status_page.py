"""docs/reference/status.md describes every field that `collectived status --json` can have, and no other."""

from __future__ import annotations

import re
from typing import cast

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tests.docs.contents import ROOT

from collectived_proto.report.findings import FindingKind
from collectived_proto.v1 import status_pb2 as pb

PAGE = (ROOT / "docs/operate/status.md").read_text()
FIELDS = (ROOT / "docs/reference/status.md").read_text()
TYPES = {
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
    """A message and all that it holds, by name."""
    found: dict[str, Descriptor] = {}
    ahead = [top]
    while ahead:
        message = ahead.pop()
        if message.name not in found:
            found[message.name] = message
            ahead += [field.message_type for field in message.fields if field.message_type]
    return found


def type_of(field: FieldDescriptor) -> str:
    """As the page says it."""
    name = field.message_type.name if field.message_type else ""
    one = f"[{name}](#{name.lower()})" if name else TYPES[field.type]
    return f"list of {one}" if field.is_repeated else one


def sections() -> dict[str, str]:
    parts = re.split(r"^## (\w+)$", FIELDS, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


MESSAGES = reachable(cast(Descriptor, pb.StatusReply.DESCRIPTOR))


def test_every_message_of_a_status_has_a_section_and_no_other_has() -> None:
    assert sorted(sections()) == sorted(MESSAGES)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_every_field_is_documented_with_its_type_and_none_that_is_gone(name: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.*\S.*) \|$", sections()[name], re.M)
    assert [(field, kind) for field, kind, _ in rows] == [
        (field.name, type_of(field)) for field in MESSAGES[name].fields
    ], f"docs/reference/status.md, section {name}: one row for each field, in the order of the protocol"


def test_every_kind_of_trouble_is_explained_in_the_order_in_which_it_is_told() -> None:
    assert re.findall(r"^\| `([A-Z]+)` \|", PAGE, re.M) == [kind.value.upper() for kind in FindingKind]
