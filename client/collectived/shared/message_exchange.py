"""The messages and receives of a rank that matches by itself, in one generation."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from collectived.shared.message_call import SHORT_BYTES, KeptMessage, MessageCall, view_bytes
from collectived.shared.rank_links import RankLinks
from collectived.values.leaves import Array
from collectived.values.new_arrays import make_array
from collectived_proto.ipc.matcher import Matcher
from collectived_proto.ipc.rank_messages import Header
from collectived_proto.types import ANY_SOURCE, Recv

_MAX_HEADS = 1024  # of messages that are kept
_BROKEN_SECONDS = 2.0  # in which the verdict comes if a link has ended because a rank or a worker is lost


class BrokenLink(NamedTuple):
    """A link with the rank `peer` that has broken, at a time of the monotonic clock; `is_outgoing`: it went there."""

    peer: int
    why: str
    at: float
    is_outgoing: bool


class ExpectedMessage:
    """A short message over a link, like one that came earlier, for which a thread waits without a call.

    Args:
        address: its sender and its tag.
        head: its header and its description.
        array: takes its bytes.

    Attributes:
        is_there: whether it has come.
    """

    __slots__ = ("address", "array", "head", "is_there")

    def __init__(self, address: tuple[int, int], head: bytes, array: Array) -> None:
        self.address = address
        self.head = head
        self.array = array
        self.is_there = False


class MessageExchange:
    """Under its channel's mutex, but for its links.

    Args:
        rank: this one.

    Attributes:
        given: by receiver, how many messages this rank gave to its worker.
        most_kept: bytes of messages over links that may be kept for receives that are not posted yet.
        short_receives: how many threads wait for a short message without a call.
        wants_call: whether what comes for one of them is not short.
        kept_bytes: those of messages over links that no receive has asked for yet.
        broken: links that have ended by an error, or amid a message.
        due: receives that have a message, which is to be copied; see `pop_due`.
        failed: calls that have ended by a verdict, and whose memory may be in use yet; see `peek_failed`.
    """

    def __init__(self, generation: int, rank: int, links: RankLinks) -> None:
        self.generation = generation
        self.links = links
        self.matcher: Matcher[MessageCall, KeptMessage] = Matcher()
        self.given: Counter[int] = Counter()
        self.most_kept = self.short_receives = 0
        self._heads: dict[Any, tuple[bytes, np.dtype[Any], tuple[int, ...]]] = {}
        self._expected: ExpectedMessage | None = None
        self.wants_call = False
        self.broken: list[BrokenLink] = []
        self.due: deque[tuple[MessageCall, KeptMessage]] = deque()
        self.failed: deque[MessageCall] = deque()
        self._rank = rank
        self.kept_bytes = 0
        self._delivered: Counter[int] = Counter()  # by sender, messages that have come by the worker
        self._held: list[int] = []  # senders whose links are held for a call

    def post(self, call: MessageCall) -> KeptMessage | None:
        """Post a receive; the message that is there for it."""
        operation = call.prepared.collective.operation
        assert isinstance(operation, Recv)
        found = self.matcher.post(call, self._rank, operation.source, operation.tag)
        self.resume_held()
        if found is None:
            return None
        self._match(call, found[0], found[1])
        return found[1]

    def pair(self, source: int, message: KeptMessage) -> MessageCall | None:
        """A message is there; the receive that takes it."""
        if self._expected is not None and self._expected.address == (source, message.tag):
            self._expected = None  # which this one goes before
        call = self.matcher.deliver(message, self._rank, source, message.tag)
        if call is not None:
            self._match(call, source, message)
        return call

    def claim(self, source: int, tag: int) -> MessageCall | None:
        """A message begins to come over a link; the receive that takes it."""
        call = self.matcher.claim(self._rank, source, tag)
        if call is not None:
            self._match(call, source, None)
        return call

    def _match(self, call: MessageCall, source: int, message: KeptMessage | None) -> None:
        call.is_matched = True
        if call.peer == ANY_SOURCE:
            call.source = source
        if message is not None:
            self.kept_bytes -= message.cost

    def find(self, operation: Recv) -> KeptMessage | None:
        """The message that a receive would get if it were posted now."""
        return self.matcher.find(self._rank, operation.source, operation.tag)

    def take(self, operation: Recv) -> None:
        """Take that out."""
        _, message = self.matcher.take(self._rank, operation.source, operation.tag)
        self.kept_bytes -= message.cost

    def remember(self, operation: Recv, key: Any, head: bytes, value: Array) -> None:
        """A message of one array has been taken; `key`: whatever else is likely to take one like it."""
        if operation.source != ANY_SOURCE:
            if len(self._heads) >= _MAX_HEADS:
                self._heads.clear()
            self._heads[key] = head, value.dtype, value.shape

    def expect(self, operation: Recv, key: Any, out: Array | None) -> ExpectedMessage | None:
        """Have a message like the last one go straight to the thread that waits, if it comes next.

        None if a message is there, a receive was posted earlier, or another thread waits so. A message that its sender
        gave to its worker is not overtaken: those before the last one have come, and after one more the head differs.
        """
        known = self._heads.get(key)
        if known is None or self._expected is not None or self.find(operation) is not None:
            return None
        if self.matcher.expects(self._rank, operation.source, operation.tag):
            return None
        head, dtype, shape = known
        address = operation.source, operation.tag
        self._expected = ExpectedMessage(address, head, make_array(shape, dtype) if out is None else out)
        return self._expected

    def forget_expected(self) -> None:
        """The thread that waited does not wait any more."""
        self._expected = None

    def take_expected(self, source: int, memory: bytearray, begin: int, end: int) -> int:
        """Give the message at `begin`, if all is there, to the thread that waits for it; its length, 0: none does."""
        expected = self._expected
        if expected is None or source != expected.address[0] or not memory.startswith(expected.head, begin):
            return 0
        start = begin + len(expected.head)
        stop = start + expected.array.nbytes
        if stop <= end:
            if stop > start:
                view_bytes(expected.array)[:] = memoryview(memory)[start:stop]
            expected.is_there, self._expected = True, None
        return stop - begin

    def try_keep(self, cost: int) -> bool:
        """Whether there is room for a message that no receive waits for; then it is counted."""
        if self.kept_bytes + cost > self.most_kept:
            return False
        self.kept_bytes += cost
        return True

    def pop_broken(self, *, is_over: bool) -> BrokenLink | None:
        """Take out a link that broke so long ago that no verdict will say why.

        Args:
            is_over: whether there is a verdict on the generation.
        """
        if is_over:
            self.broken.clear()
        if not self.broken or monotonic() < self.broken[0].at + _BROKEN_SECONDS:
            return None
        return self.broken.pop(0)

    def pop_due(self) -> tuple[MessageCall, KeptMessage] | None:
        """Take out a receive and its message. Several threads may; without the mutex."""
        try:
            return self.due.popleft()
        except IndexError:
            return None

    def peek_failed(self) -> MessageCall | None:
        """A call that has failed, until `forget_failed`; the same."""
        try:
            return self.failed[0]
        except IndexError:
            return None

    def forget_failed(self, call: MessageCall) -> None:
        with contextlib.suppress(ValueError):  # another thread was quicker
            self.failed.remove(call)

    def count_delivered(self, source: int) -> None:
        """A message has come by the worker."""
        self._delivered[source] += 1
        self.links.resume(source)

    def may_read(self, source: int, header: Header) -> bool:
        """Whether a message may be read now.

        Not before those that its sender gave to its worker; nor one that is for a call which is about to begin, most
        likely, and goes straight into its memory.
        """
        if self._delivered[source] < header.before:
            return False
        is_waited_for = self.short_receives and header.nbytes > SHORT_BYTES
        if not is_waited_for or self.matcher.expects(self._rank, source, header.tag):
            return True
        self.wants_call = True
        self._held.append(source)
        return False

    def resume_held(self) -> None:
        """Read what was left for a call."""
        while self._held:
            self.links.resume(self._held.pop())
