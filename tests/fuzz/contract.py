"""What may be said to the daemons: every method of the contract, and messages drawn by Hypothesis from descriptors.

Hypothesis draws 350 messages in a second for a worker and 100, of 17 kB on the average, for the coordinator. It only
draws: messages are sent when all of a stay are there, so that nothing is ever shrunk against living daemons.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import hypothesis
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

import collectived_proto.v1

T = TypeVar("T")

_MOST_DEPTH = 6
_MANY = 2000  # entries of a repeated field, rarely
_MOST_BYTES_OF_MANY = 300  # of the one that they are made of, so that no message grows to megabytes
_LONG = 20_000  # characters or bytes, sometimes
_TEXTS = ("", "a/b", "/a", "\0", "a\nb\x1b[31m", "%s{}\\", "\u202e\U0001f4a3", "é" * 200, "x" * _LONG)
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-1 << 31, (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-1 << 63, (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
_IS_SET = st.sampled_from((True, True, False))
_IS_TRUE = st.sampled_from((True,) * 9 + (False,))
_COUNT = st.sampled_from((1, 1, 1, 2, 3, 8))
_IS_MANY = st.sampled_from((False,) * 19 + (True,))


@cache
def list_methods() -> dict[str, MethodDescriptor]:
    """All methods of all services of the contract, as `Worker/Join`."""
    root = collectived_proto.v1
    names = [module.name for module in pkgutil.iter_modules(root.__path__) if module.name.endswith("_pb2")]
    files = [importlib.import_module(f"{root.__name__}.{name}") for name in names]
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    return {f"{service.name}/{method.name}": method for service in services for method in service.methods}


@st.composite
def messages(
    draw: Callable[[st.SearchStrategy[Any]], Any],
    kind: Any,
    known: Mapping[str, Any],
    fixed: Mapping[str, Any],
    opening: str = "",
    depth: int = 0,
) -> Any:
    """Messages of a kind with about two thirds of their fields set, mostly to extremes.

    Args:
        known: values that are true, by the name of the field: nine times out of ten such a field has it, so that the
            message gets beyond the first question.
        fixed: the same, always.
        opening: a field that is set in any case.
    """
    message = _class_of(kind)()
    for fields in _alternatives(kind):
        names = [field.name for field in fields]
        if not draw(_IS_SET) and opening not in names and not fixed.keys() & set(names):
            continue
        field = fields[names.index(opening)] if opening in names else draw(st.sampled_from(fields))
        if field.name in fixed or (field.name in known and draw(_IS_TRUE)):
            _set(message, field, fixed.get(field.name, known.get(field.name)))
        elif field.message_type is None:
            _set(message, field, draw(_lists(_scalars(field))) if field.is_repeated else draw(_scalars(field)))
        elif depth < _MOST_DEPTH:
            inner = messages(field.message_type, known, fixed, depth=depth + 1)
            _set(message, field, draw(_lists(inner)) if field.is_repeated else draw(inner))
    return message


@st.composite
def _lists(draw: Callable[[st.SearchStrategy[Any]], Any], entries: st.SearchStrategy[Any]) -> list[Any]:
    """A few entries, or rarely very many that differ in their numbers."""
    drawn = [draw(entries) for _ in range(draw(_COUNT))]
    smallest = min(drawn, key=_size)
    if draw(_IS_MANY) and _size(smallest) <= _MOST_BYTES_OF_MANY:
        return [_shift(smallest, number) for number in range(_MANY)]
    return drawn


def _size(entry: Any) -> int:
    if isinstance(entry, Message):
        return entry.ByteSize()
    return len(entry) if isinstance(entry, str | bytes) else 8


def _shift(entry: Any, by: int) -> Any:
    """The same with other numbers, so that many of them are not one to whoever keeps them by number."""
    if type(entry) is int:
        return entry - by if entry > _MANY else entry + by
    if isinstance(entry, Message):
        copied = type(entry)()
        copied.CopyFrom(entry)
        for field, value in entry.ListFields():
            if field.cpp_type in _RANGES and not field.is_repeated:
                setattr(copied, field.name, _shift(value, by))
        return copied
    return entry


def _set(message: Message, field: FieldDescriptor, value: Any) -> None:
    if field.is_repeated:
        getattr(message, field.name).extend(value)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(value)
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, value)


@cache
def _class_of(kind: Descriptor) -> type[Message]:
    return message_factory.GetMessageClass(kind)


@cache
def _alternatives(kind: Descriptor) -> tuple[tuple[FieldDescriptor, ...], ...]:
    """The fields of the message; those of which one alone can be set stand together."""
    alone = [(field,) for field in kind.fields if field.containing_oneof is None]
    return (*alone, *(tuple(one.fields) for one in kind.oneofs))


@cache
def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return st.sampled_from((b"", bytes(_LONG))) | st.binary(max_size=40)
        case FieldDescriptor.CPPTYPE_STRING:
            return st.sampled_from(_TEXTS) | st.text(st.characters(codec="utf-8"), max_size=20)
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return st.sampled_from((0.0, 1.0, float("inf"), float("nan"))) | st.floats()
        case FieldDescriptor.CPPTYPE_FLOAT:
            return st.floats(width=32)
        case FieldDescriptor.CPPTYPE_ENUM:
            assert field.enum_type is not None
            return st.sampled_from((*field.enum_type.values_by_number, (1 << 31) - 1))
    lowest, highest = _RANGES[field.cpp_type]
    return st.sampled_from((0, 1, 2, 3, 64, 1 << 30, highest - 1, highest, lowest)) | st.integers(lowest, highest)


@st.composite
def calls(
    draw: Callable[[st.SearchStrategy[Any]], Any],
    methods: Sequence[str],
    known: Mapping[str, Any],
    fixed: Mapping[str, Any],
    openings: Mapping[str, str],
) -> tuple[str, list[Any]]:
    """One of the methods, and what is sent to it: one message, or for a stream a few.

    Args:
        openings: by method, the field that the first message of a stream has.
    """
    name = draw(st.sampled_from(methods))
    method = list_methods()[name]
    following = draw(_COUNT) if method.client_streaming else 0
    first = draw(messages(method.input_type, known, fixed, openings.get(name, "")))
    return name, [first, *(draw(messages(method.input_type, known, fixed)) for _ in range(following))]


def draw_examples(strategy: st.SearchStrategy[T], count: int, seed: int) -> list[T]:
    """So many examples, or fewer where there are no more; the same ones for a seed."""
    found: list[T] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        phases=[hypothesis.Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def collect(example: T) -> None:
        found.append(example)

    collect()
    return found
