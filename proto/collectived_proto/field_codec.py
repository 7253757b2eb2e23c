"""Frozen values to protobuf and back, field by field as their types say.

A `Codec` pairs a dataclass with the message that mirrors it. Fields have one name on both sides, or are renamed; their
annotations say how each is converted, so that a field is added in the dataclass and in the .proto alone.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from types import UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from collectived_proto.errors import InvalidArgumentError

V = TypeVar("V")
M = TypeVar("M", bound=Message)
Convert = Callable[[Any], Any]

_CONVERTERS: dict[type, tuple[Convert, Convert]] = {}


def register(value: type, encode: Convert, decode: Convert) -> None:
    """Let codecs made from now on convert fields of that type so. A `Codec` of a whole type does it itself."""
    _CONVERTERS[value] = encode, decode


class Codec(Generic[V, M]):
    """Encoder and decoder of one dataclass. Codecs of the values inside it are made before it.

    Args:
        value, message: the dataclass, and the message that mirrors it.
        given: this many first fields are no part of the message. The caller of `decode` passes them.
        renamed: names in the message of fields that have another one there.
        make: makes the value of the fields that were read, instead of the dataclass.
        check: raises InvalidArgumentError for a decoded value that no process should send.
        only: the fields that the message has, where it has not all.
    """

    def __init__(
        self,
        value: type[V],
        message: type[M],
        *,
        given: int = 0,
        renamed: Mapping[str, str] | None = None,
        make: Callable[..., V] | None = None,
        check: Callable[[V], None] | None = None,
        only: tuple[str, ...] = (),
    ) -> None:
        hints, names = get_type_hints(value), renamed or {}
        fields = [field for field in dataclasses.fields(value)[given:] if not only or field.name in only]  # type: ignore[arg-type]
        self.value = value
        self._message: Callable[..., M] = message
        self._make: Callable[..., V] = make or value
        self._check = check
        self._names = [names.get(field.name, field.name) for field in fields]
        self._get_fields = _getter([field.name for field in fields])
        self._get_message_fields = _getter(self._names)
        self._encoders: list[tuple[int, Convert]] = []
        self._decoders: list[tuple[int, str, Convert, Any]] = []
        for index, field in enumerate(fields):
            described: Any = message.DESCRIPTOR.fields_by_name[self._names[index]]
            encode, decode = _convert(hints[field.name], described)
            if encode is not None:
                self._encoders.append((index, encode))
            optional = described.has_presence and field.default is not dataclasses.MISSING
            if optional or decode is not None:
                asked = described.name if optional else ""
                self._decoders.append((index, asked, decode or _same, field.default))
        if not only:
            register(value, self.encode, self.decode)

    def encode(self, value: V) -> M:
        """The message of a value. A field that is None is not set."""
        fields = list(self._get_fields(value))
        for index, convert in self._encoders:
            if fields[index] is not None:
                fields[index] = convert(fields[index])
        return self._message(**dict(zip(self._names, fields, strict=True)))

    def decode(self, message: M, *given: Any) -> V:
        """The value of a message. A field with presence that is not set has the dataclass's default.

        Raises:
            InvalidArgumentError: it has an enumerator that this release does not know, or `check` refuses it.
        """
        value = self._make(*given, *self.decode_fields(message))
        if self._check is not None:
            self._check(value)
        return value

    def decode_fields(self, message: M) -> list[Any]:
        """Return the fields in the order of the dataclass."""
        fields = list(self._get_message_fields(message))
        for index, asked, convert, default in self._decoders:
            fields[index] = default if asked and not message.HasField(asked) else convert(fields[index])
        return fields

    def encode_all(self, values: Iterable[V]) -> list[M]:
        return [self.encode(value) for value in values]

    def decode_all(self, messages: Iterable[M]) -> tuple[V, ...]:
        return tuple([self.decode(message) for message in messages])


def _getter(names: list[str]) -> Callable[[object], Iterable[Any]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: [getattr(value, name) for name in names]


def _same(value: Any) -> Any:
    return value


def _convert(hint: Any, described: FieldDescriptor) -> tuple[Convert | None, Convert | None]:
    """How a field of that type is encoded and decoded; None: it is the same on both sides."""
    if isinstance(hint, UnionType):  # X | None
        return _convert(next(part for part in get_args(hint) if part is not type(None)), described)
    if get_origin(hint) is tuple:
        encode, decode = _convert(get_args(hint)[0], described)
        return (
            None if encode is None else lambda values: [encode(value) for value in values],
            tuple if decode is None else lambda messages: tuple([decode(message) for message in messages]),
        )
    if described.enum_type is not None:
        return _convert_enum(hint, described.enum_type)
    return _CONVERTERS.get(hint, (None, None))


def _convert_enum(kind: type[enum.Enum], described: EnumDescriptor) -> tuple[Convert, Convert]:
    """Enumerators are found by their names, which both sides share. One that is not known is refused, or read as
    UNSPECIFIED where the type has that."""
    numbers = {member: described.values_by_name[member.name].number for member in kind}
    members = {number: member for member, number in numbers.items()}
    name = described.full_name.removeprefix(f"{described.file.package}.").replace(".", "")  # ReportKind
    unknown = getattr(kind, "UNSPECIFIED", None)
    words = re.sub(r"\B(?=[A-Z])", " ", name).lower()  # report kind

    def decode(number: int) -> enum.Enum:
        found = members.get(number, unknown)
        if found is None:
            raise InvalidArgumentError(f"{words} number {number} is not known to this release")
        return found

    return numbers.__getitem__, decode
