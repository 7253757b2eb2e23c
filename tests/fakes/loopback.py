"""Streams within one process: the in-memory network of tests, bounded like a socket's buffers."""

from __future__ import annotations

from collections.abc import Sequence

from collectived_runtime.transport.link import BytesLike, Link, LinkBroken


class _Pipe:
    """Bytes on their way in one direction."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.data = bytearray()
        self.closed = False


class LoopbackStream:
    min_read_bytes = 1

    def __init__(self, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    def fileno(self) -> int:
        return -1

    def send(self, parts: Sequence[BytesLike]) -> int:
        if self._outgoing.closed or self._incoming.closed:
            raise LinkBroken("the peer closed the connection")
        room = self._outgoing.capacity - len(self._outgoing.data)
        taken = b"".join(bytes(part) for part in parts)[:room] if room > 0 else b""
        self._outgoing.data += taken
        return len(taken)

    def recv_into(self, view: memoryview) -> int:
        pipe = self._incoming
        if not pipe.data:
            if pipe.closed:
                raise LinkBroken("the peer closed the connection")
            return 0
        count = min(len(view), len(pipe.data))
        view[:count] = pipe.data[:count]
        del pipe.data[:count]
        return count

    def close(self) -> None:
        self._outgoing.closed = True
        self._incoming.closed = True


class LoopbackNetwork:
    """Hands out streams that are wired to each other. `capacity` bounds what is on its way in each direction."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        self.capacity = capacity

    def streams(self) -> tuple[LoopbackStream, LoopbackStream]:
        there, back = _Pipe(self.capacity), _Pipe(self.capacity)
        return LoopbackStream(there, back), LoopbackStream(back, there)

    def links(self, participants: Sequence[int], channel: int = 0) -> dict[int, dict[int, Link]]:
        """A link between each two participants: `links(range(3))[0][2]` is the one of 0 to 2."""
        table: dict[int, dict[int, Link]] = {one: {} for one in participants}
        for index, one in enumerate(participants):
            for other in participants[index + 1 :]:
                mine, theirs = self.streams()
                table[one][other] = Link(other, channel, mine)
                table[other][one] = Link(one, channel, theirs)
        return table
