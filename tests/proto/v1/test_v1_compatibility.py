"""What the check of .proto files against those of the last release finds, and what it lets pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from tests.proto.v1.compatibility import differences, main

RELEASED = """
file {
  name: "a.proto" package: "p"
  message_type {
    name: "Job"
    field { name: "name" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "sizes" number: 2 type: TYPE_INT64 label: LABEL_REPEATED }
    field { name: "rank" number: 3 type: TYPE_UINT32 label: LABEL_OPTIONAL oneof_index: 0 }
    field { name: "kind" number: 4 type: TYPE_ENUM type_name: ".p.Job.Kind" label: LABEL_OPTIONAL }
    oneof_decl { name: "who" }
    enum_type { name: "Kind" value { name: "NONE" number: 0 } value { name: "RING" number: 1 } }
    reserved_range { start: 9 end: 11 }
  }
  service { name: "S" method { name: "Do" input_type: ".p.Job" output_type: ".p.Job" server_streaming: true } }
}
"""


def found(*changes: tuple[str, str]) -> list[str]:
    """Of the release with these texts replaced."""
    text = RELEASED
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return differences(text_format.Parse(RELEASED, FileDescriptorSet()), text_format.Parse(text, FileDescriptorSet()))


def test_what_is_as_it_was_differs_in_nothing() -> None:
    assert found() == []


NAME = 'field { name: "name" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }'


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (NAME, "", "p.Job.name = 1 is gone and its number is not reserved"),
        ('"name" number: 1', '"name" number: 12', "p.Job.name has number 12, was 1"),
        ('name: "name"', 'name: "title"', "p.Job.name = 1 is now called title"),
        ("TYPE_STRING", "TYPE_BYTES", "p.Job.name: type is TYPE_BYTES, was TYPE_STRING"),
        ("LABEL_REPEATED", "LABEL_OPTIONAL", "p.Job.sizes: label is LABEL_OPTIONAL, was LABEL_REPEATED"),
        (" oneof_index: 0", "", "p.Job.rank: membership is oneof none, was oneof who"),
        ('name: "RING"', 'name: "TREE"', "p.Job.Kind.RING = 1 is now called TREE"),
        ('value { name: "RING" number: 1 }', "", "p.Job.Kind.RING = 1 is gone and its number is not reserved"),
        ('name: "Kind"', 'name: "Sort"', "p.Job.Kind is gone"),
        ("server_streaming: true", "", "p.S.Do: reply stream is False, was True"),
        ('output_type: ".p.Job"', 'output_type: ".p.Other"', "p.S.Do: reply is .p.Other, was .p.Job"),
        ('method { name: "Do"', 'method { name: "Did"', "p.S.Do is gone"),
        ('message_type {\n    name: "Job"', 'message_type {\n    name: "Task"', "p.Job is gone"),
        (
            NAME,
            f'{NAME} field {{ name: "new" number: 10 type: TYPE_BOOL }}',
            "p.Job uses number 10, which was reserved",
        ),
    ],
)
def test_what_an_older_peer_would_misunderstand_is_told(old: str, new: str, told: str) -> None:
    assert told in found((old, new))


def test_what_is_added_is_no_difference() -> None:
    field = 'field { name: "new" number: 90 type: TYPE_BOOL label: LABEL_OPTIONAL }'
    assert not found(
        (NAME, f"{NAME} {field}"),
        ('value { name: "RING" number: 1 }', 'value { name: "RING" number: 1 } value { name: "TREE" number: 2 }'),
        ("service {", 'message_type { name: "More" } enum_type { name: "E" } service { name: "T" } service {'),
    )


def test_a_field_that_goes_leaves_its_number_reserved() -> None:
    assert not found((NAME, "reserved_range { start: 1 end: 2 }"))


def test_a_message_may_move_to_another_file() -> None:
    assert not found(("service {", '} file { name: "b.proto" package: "p" service {'))


def test_the_command_fails_where_something_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    released, current = tmp_path / "released", tmp_path / "current"
    released.write_bytes(text_format.Parse(RELEASED, FileDescriptorSet()).SerializeToString())
    current.write_bytes(text_format.Parse(RELEASED.replace(NAME, ""), FileDescriptorSet()).SerializeToString())
    assert main(str(released), str(released)) == 0
    assert main(str(released), str(current)) == 1
    assert "p.Job.name = 1 is gone" in capsys.readouterr().err
