"""Whether .proto files still say what those of the last release said: fields are only added.

    python -m tests.proto.v1.compatibility RELEASED CURRENT

Both are FileDescriptorSets, as `protoc --descriptor_set_out` writes them. Names count beside numbers: JSON and
generated code go by them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

_Declared = TypeVar("_Declared")


def differences(released: FileDescriptorSet, current: FileDescriptorSet) -> list[str]:
    """What a peer of the release would misunderstand; nothing where all that it knows is as it was."""
    found: list[str] = []
    for name, message, now in _pairs(_messages(released), _messages(current), found):
        found += _fields(name, message, now)
    for name, enum, now_enum in _pairs(_enums(released), _enums(current), found):
        found += _values(name, enum, now_enum)
    for name, method, now_method in _pairs(_methods(released), _methods(current), found):
        found += _changes(name, _call(method), _call(now_method))
    return found


def _pairs(
    released: Mapping[str, _Declared], current: Mapping[str, _Declared], found: list[str]
) -> Iterator[tuple[str, _Declared, _Declared]]:
    """What both declare, by name; what is gone is noted."""
    for name, declared in released.items():
        if name in current:
            yield name, declared, current[name]
        else:
            found.append(f"{name} is gone")


# What files declare, by full name; one may move to another file


def _messages(files: FileDescriptorSet) -> dict[str, DescriptorProto]:
    return {name: one for file in files.file for name, one in _nested(file.package, file.message_type)}


def _nested(scope: str, messages: Iterable[DescriptorProto]) -> Iterator[tuple[str, DescriptorProto]]:
    for message in messages:
        name = f"{scope}.{message.name}"
        yield name, message
        yield from _nested(name, message.nested_type)


def _enums(files: FileDescriptorSet) -> dict[str, EnumDescriptorProto]:
    top = {f"{file.package}.{enum.name}": enum for file in files.file for enum in file.enum_type}
    return top | {f"{name}.{enum.name}": enum for name, one in _messages(files).items() for enum in one.enum_type}


def _methods(files: FileDescriptorSet) -> dict[str, MethodDescriptorProto]:
    return {
        f"{file.package}.{service.name}.{method.name}": method
        for file in files.file
        for service in file.service
        for method in service.method
    }


# What became of it


def _fields(name: str, released: DescriptorProto, current: DescriptorProto) -> Iterator[str]:
    now = {field.number: field for field in current.field}
    numbers = {field.name: field.number for field in current.field}
    # Of messages a range ends before its end, of enums with it.
    reserved = [range(one.start, one.end) for one in current.reserved_range]
    for field in released.field:
        same = now.get(field.number)
        yield from _entry(name, field.name, field.number, same.name if same else None, numbers, reserved)
        if same is not None and same.name == field.name:
            yield from _changes(f"{name}.{field.name}", _kind(field, released), _kind(same, current))
    before = [range(one.start, one.end) for one in released.reserved_range]
    yield from _reused(name, now, before)


def _values(name: str, released: EnumDescriptorProto, current: EnumDescriptorProto) -> Iterator[str]:
    now = {value.number: value for value in current.value}
    numbers = {value.name: value.number for value in current.value}
    reserved = [range(one.start, one.end + 1) for one in current.reserved_range]
    for value in released.value:
        same = now.get(value.number)
        yield from _entry(name, value.name, value.number, same.name if same else None, numbers, reserved)
    yield from _reused(name, now, [range(one.start, one.end + 1) for one in released.reserved_range])


def _entry(
    scope: str, name: str, number: int, now: str | None, numbers: Mapping[str, int], reserved: Iterable[range]
) -> Iterator[str]:
    """A field, or a value of an enum, as it is now called; None: nothing has its number."""
    if now == name:
        return
    if name in numbers:
        yield f"{scope}.{name} has number {numbers[name]}, was {number}"
    elif now is not None:
        yield f"{scope}.{name} = {number} is now called {now}"
    elif not any(number in one for one in reserved):
        yield f"{scope}.{name} = {number} is gone and its number is not reserved"


def _reused(scope: str, numbers: Iterable[int], reserved: Iterable[range]) -> Iterator[str]:
    for number in numbers:
        if any(number in one for one in reserved):
            yield f"{scope} uses number {number}, which was reserved"


def _kind(field: FieldDescriptorProto, message: DescriptorProto) -> dict[str, str]:
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else "none"
    presence = "" if field.proto3_optional else f"oneof {oneof}"  # `optional` is a oneof that nobody has named
    return {
        "type": field.type_name or FieldDescriptorProto.Type.Name(field.type),
        "label": FieldDescriptorProto.Label.Name(field.label) + (" with presence" if field.proto3_optional else ""),
        "membership": presence,
    }


def _call(method: MethodDescriptorProto) -> dict[str, str]:
    return {
        "request": method.input_type,
        "reply": method.output_type,
        "request stream": str(method.client_streaming),
        "reply stream": str(method.server_streaming),
    }


def _changes(name: str, released: Mapping[str, str], current: Mapping[str, str]) -> Iterator[str]:
    for what, was in released.items():
        if current[what] != was:
            yield f"{name}: {what} is {current[what]}, was {was}"


def main(released: str, current: str) -> int:
    """Prints what differs; 1 where something does."""
    found = differences(*(FileDescriptorSet.FromString(Path(path).read_bytes()) for path in (released, current)))
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
