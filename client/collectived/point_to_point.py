"""Messages between two ranks of a group, as users send and receive them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, Literal, Unpack, overload

from collectived import operations
from collectived.arguments import Options, ResultTerms, Terms, with_timeout
from collectived.calls.prepare import ANY_VALUE, CrossDeviceTerms
from collectived.work import Work
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import Operation


class PointToPointCalls(ABC):
    """Sends and receives. They are numbered apart from the group's collectives, and follow the same rules."""

    rank: int
    size: int

    @overload
    def send(
        self,
        value: Any,
        to: int,
        tag: int = 0,
        options: Options = None,
        *,
        async_op: Literal[True],
        **terms: Unpack[Terms],
    ) -> Work[None]: ...
    @overload
    def send(
        self,
        value: Any,
        to: int,
        tag: int = 0,
        options: Options = None,
        *,
        async_op: bool = False,
        **terms: Unpack[Terms],
    ) -> Any: ...
    def send(
        self,
        value: Any,
        to: int,
        tag: int = 0,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Sends a value to one rank, which calls `recv`; any dtype. Other ranks take no part.

        Messages from one rank to another under one tag arrive in order. Sends and recvs are numbered separately from
        the group's other collectives; 65536 of them may be in flight, and the next one waits for room, within
        its timeout.

        Args:
            to: a rank of this group; this rank itself, too, if it also receives: with `async_op` in one of the two.
            tag: 0 to 2**32 - 1; a recv takes only messages with its tag.

        Returns:
            None, when the value is not read any more; with `async_op`, a `Work`.
        """
        operation = operations.send(to, tag, self.size)
        if timeout is not None:
            options = with_timeout(options, timeout)
        return self._start(operation, value, options, experimental_hints, async_op)

    @overload
    def recv(
        self,
        source: int | None = None,
        tag: int = 0,
        options: Options = None,
        *,
        async_op: Literal[True],
        **terms: Unpack[ResultTerms],
    ) -> Work[Any]: ...
    @overload
    def recv(
        self,
        source: int | None = None,
        tag: int = 0,
        options: Options = None,
        *,
        async_op: bool = False,
        **terms: Unpack[ResultTerms],
    ) -> Any: ...
    def recv(
        self,
        source: int | None = None,
        tag: int = 0,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        timeout: float | timedelta | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Receives a value that `source`, or without a source any rank, sends to this rank under `tag`; see `send`.

        Of the receives that could take a message the one that was posted first does, whether or not it names its
        source. A receive that times out, or is withdrawn by `Work.cancel`, ends alone: it has taken no message, the
        group goes on, and a message that comes later is for a later receive. Only where part of its message has come
        already, and the rest does not, a timeout ends the group.

        Args:
            source: a rank of this group; None: any rank, the first message counts. `Work.source` is its rank.
            out: a nest whose arrays take the value; its structure, shapes and dtypes must be those of the received
                value.

        Returns:
            `out`, or the value: its arrays as NumPy arrays, its numbers as NumPy scalars, its containers as lists,
            tuples, namedtuples of that name and dicts. With `async_op`, a `Work` for it.

        Raises:
            DeadlineExceededError: on this rank alone, nothing has come for it within its timeout; `missing` names the
                ranks that it waited for, and `rejoin` is False.
            ValueError: on this rank alone: the received value does not fit `out`; or, without `out`, a dict of the
                value has keys that are no literals of Python. The value is lost; the group goes on.
        """
        operation = operations.recv(source, tag, self.size)
        if timeout is not None:
            options = with_timeout(options, timeout)
        return self._start(operation, ANY_VALUE, options, experimental_hints, async_op, out)

    @abstractmethod
    def _start(
        self,
        operation: Operation,
        value: Any,
        options: CommunicationOptions | None,
        hints: CommunicationOptions | None,
        async_op: bool,
        out: Any = None,
        special: CrossDeviceTerms | None = None,
    ) -> Any:
        """Start a collective and, unless `async_op`, wait for its result; a value of `ANY_VALUE` takes what comes."""
