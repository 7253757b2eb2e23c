"""Descriptions of the values of sends, and what their receivers make of them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from collectived.shared.segment_call import LetterForm
from collectived.shared.segment_plan import Schedule
from collectived.values import nest
from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import Broadcast, Collective

_NEUTRAL = Broadcast(0)  # in place of the operation, so that equal values have equal descriptions


def make_form(collective: Collective, *, sends: bool) -> LetterForm:
    types = tuple((to_numpy(leaf.dtype), leaf.shape) for leaf in collective.leaves)
    leaves = tuple(range(len(types)))
    schedule = Schedule((), leaves, (), (), (leaves,)) if sends else Schedule((), (), leaves, types, (leaves,))
    return LetterForm(schedule, collective, collective.structure == nest.LEAF)


def describe_value(collective: Collective) -> bytes:
    """The description of the value of a send."""
    from collectived_proto import codec  # late, for it brings protobuf, and `import collectived` is to be quick

    return codec.collective_to_proto(replace(collective, operation=_NEUTRAL, site="")).SerializeToString()


def parse_description(described: bytes) -> LetterForm:
    """
    Raises:
        ValueError: these bytes describe no value.
    """
    from google.protobuf.message import DecodeError

    from collectived_proto import codec
    from collectived_proto.v1 import common_pb2

    try:
        collective = codec.collective_from_proto(common_pb2.Collective.FromString(described))
    except DecodeError as error:
        raise ValueError(f"a description that cannot be read: {error}") from None
    return make_form(collective, sends=False)


parse_short_description = lru_cache(maxsize=1024)(parse_description)
"""The same for short ones: the same come again and again."""
