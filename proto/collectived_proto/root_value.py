"""Description of a value for ranks that take any value.

The root, or the worker that brings it, writes it to a segment.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

from collectived_proto.types import Collective, Layout

MAX_BYTES = 16 << 20  # unpacked


def encode_root_value(collective: Collective, layout: Layout) -> bytes:
    """Encode the root's description of its value, for ranks that take any value of a broadcast or scatter."""
    from collectived_proto import codec
    from collectived_proto.v1 import worker_pb2  # late, for it brings protobuf, and `import collectived` is to be quick

    described = codec.collective_to_proto(replace(collective, site=""))
    value = worker_pb2.RootValue(collective=described, layout=codec.layout_to_proto(layout))
    return zlib.compress(value.SerializeToString(), 1)


def decode_root_value(blob: bytes) -> tuple[Collective, Layout]:
    """
    Raises:
        ValueError: it is none, or its layout does not fit.
    """
    from google.protobuf.message import DecodeError

    from collectived_proto import codec
    from collectived_proto.v1 import worker_pb2

    if not blob:
        raise ValueError("its root has too many arrays to describe them; give a value like it as a template")
    try:
        unpacked = zlib.decompressobj().decompress(blob, MAX_BYTES)
        value = worker_pb2.RootValue.FromString(unpacked)
    except (DecodeError, zlib.error) as error:
        raise ValueError(f"a description that cannot be read: {error}") from None
    collective, layout = codec.collective_from_proto(value.collective), codec.layout_from_proto(value.layout)
    if len(layout.places) != len(collective.leaves) or any(
        not 0 <= place.pack < len(layout.packs) or layout.packs[place.pack].dtype != leaf.dtype
        for place, leaf in zip(layout.places, collective.leaves, strict=True)
    ):
        raise ValueError("a layout that does not fit its value")
    return collective, layout
