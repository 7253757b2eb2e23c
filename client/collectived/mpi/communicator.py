"""Comm: a group as mpi4py's calls in capitals see it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from collectived.group import Group
from collectived.mpi.constants import ANY_SOURCE, COMM_TYPE_SHARED, PROC_NULL, SUM, UNDEFINED
from collectived.mpi.messages import Blocks, is_in_place, read_blocks, read_elements
from collectived.mpi.requests import Finish, Request, Status
from collectived.values.leaves import Array
from collectived_proto.types import ReduceOp

Op = ReduceOp | str
_PICKLING = {  # calls of mpi4py for objects of Python, and those of a group that take numbers and nests
    "allreduce": "all_reduce",
    "reduce": "reduce",
    "bcast": "broadcast",
    "gather": "gather",
    "allgather": "all_gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "barrier": "barrier",
    "send": "send",
    "isend": "send",
    "recv": "recv",
    "irecv": "recv",
    "sendrecv": "send",
}


class _Plan(NamedTuple):
    """A call of the group, bound to what it sends: where its result goes, and what is left to do with it."""

    call: Any
    out: Array | None = None
    finish: Finish | None = None

    def run(self, status: Status | None = None) -> None:
        if status is not None:  # only a work knows the sender
            self.start().Wait(status)
            return
        result = self.call() if self.out is None else self.call(out=self.out)
        if self.finish is not None:
            self.finish(result, Status())

    def start(self) -> Request:
        given = {} if self.out is None else {"out": self.out}
        return Request(self.call(async_op=True, **given), self.finish)


class _Delivery:
    """Puts a message into its receive buffer."""

    def __init__(self, elements: Array, tag: int) -> None:
        self._elements, self._tag = elements, tag

    def __call__(self, result: Any, status: Status) -> None:
        sent = result.reshape(-1) if isinstance(result, np.ndarray) else np.asarray(result).reshape(-1)
        if len(sent) > len(self._elements):
            raise ValueError(
                f"the message has {len(sent)} elements, recvbuf only {len(self._elements)}; the message is lost"
            )
        if len(sent) and sent.dtype != self._elements.dtype:
            raise ValueError(
                f"the message is {sent.dtype}[{len(sent)}], recvbuf takes {self._elements.dtype}: name that datatype; "
                "the message is lost"
            )
        self._elements[: len(sent)] = sent
        status.fill(status.source, self._tag, sent.nbytes)


class Comm:
    """A communicator: the calls of mpi4py that take buffers. A call with an I before its name returns a `Request`.

    Args:
        group: that it speaks for.
    """

    def __init__(self, group: Group | None = None) -> None:
        self._group = group

    @property
    def group(self) -> Group:
        """The group, with all that MPI has no name for."""
        if self._group is None:
            raise ValueError("this is COMM_NULL: the rank is in no communicator here")
        return self._group

    def __bool__(self) -> bool:
        return self._group is not None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Say what to type in place of a call that is not offered."""
            if name in _PICKLING:
                raise AttributeError(
                    f"{name} takes any object, which would have to be pickled, and nothing ever is: use "
                    f"comm.group.{_PICKLING[name]} for numbers and nests of arrays, or {name.capitalize()} for a buffer"
                )
            raise AttributeError(f"Comm has no {name}: docs/guide/from-mpi.md lists what is offered, and what instead")

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.group.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.group.size

    @property
    def name(self) -> str:
        """The group's name."""
        return self.group.name

    def Get_rank(self) -> int:
        """This rank's number."""
        return self.group.rank

    def Get_size(self) -> int:
        """How many ranks there are."""
        return self.group.size

    def Get_name(self) -> str:
        """The group's name."""
        return self.group.name

    def Split(self, color: int = 0, key: int = 0) -> Comm:
        """A communicator of all ranks that give this color, in order of key; `COMM_NULL` for `UNDEFINED`."""
        part = self.group.split(None if color == UNDEFINED else color, key)
        return Comm(part) if part is not None else COMM_NULL

    def Split_type(self, split_type: int, key: int = 0) -> Comm:
        """A communicator of the ranks of this rank's worker, and so of one host: `split_type` is `COMM_TYPE_SHARED`."""
        if split_type not in (COMM_TYPE_SHARED, UNDEFINED):
            raise ValueError(f"split_type must be COMM_TYPE_SHARED or UNDEFINED, got {split_type!r}")
        workers = [member.worker for member in self.group.members]
        return self.Split(workers.index(workers[self.rank]) if split_type == COMM_TYPE_SHARED else UNDEFINED, key)

    def Dup(self) -> Comm:
        """A communicator of the same ranks, whose messages do not meet those of this one."""
        return self.Split(0, self.rank)

    def Free(self) -> None:
        """Leaves the group."""
        self.group.leave()
        self._group = None

    Disconnect = Free

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """Ends this process; calls of the other ranks raise `AbortedError`."""
        self.group.abort(f"MPI_Abort({errorcode})")
        raise SystemExit(errorcode)

    # Collectives

    def Barrier(self) -> None:
        """Ends when all ranks have called it."""
        self.group.barrier()

    def Ibarrier(self) -> Request:
        return _Plan(self.group.barrier).start()

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Gives every rank the buffer of root."""
        self._bcast(buf, root).run()

    def Ibcast(self, buf: Any, root: int = 0) -> Request:
        return self._bcast(buf, root).start()

    def _bcast(self, buf: Any, root: int) -> _Plan:
        elements = read_elements(buf, "buf", writes=self.rank != root)
        return _Plan(partial(self.group.broadcast, elements, root), None if self.rank == root else elements)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Combines the buffers of all ranks; every rank gets the result."""
        self._allreduce(sendbuf, recvbuf, op).run()

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        return self._allreduce(sendbuf, recvbuf, op).start()

    def _allreduce(self, sendbuf: Any, recvbuf: Any, op: Op) -> _Plan:
        out = read_elements(recvbuf, "recvbuf", writes=True)
        value = out if is_in_place(sendbuf) else read_elements(sendbuf, "sendbuf")
        return _Plan(partial(self.group.all_reduce, op, value), out)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        """Combines the buffers of all ranks; root gets the result."""
        self._reduce(sendbuf, recvbuf, op, root).run()

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Request:
        return self._reduce(sendbuf, recvbuf, op, root).start()

    def _reduce(self, sendbuf: Any, recvbuf: Any, op: Op, root: int) -> _Plan:
        out = read_elements(recvbuf, "recvbuf", writes=True) if self.rank == root else None
        value = out if out is not None and is_in_place(sendbuf) else read_elements(sendbuf, "sendbuf")
        return _Plan(partial(self.group.reduce, op, value, root), out)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Combines the buffers of all ranks; each gets its block, all of one length."""
        self._reduce_scatter(sendbuf, recvbuf, None, op).run()

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        return self._reduce_scatter(sendbuf, recvbuf, None, op).start()

    def Reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Op = SUM) -> None:
        """Combines the buffers of all ranks; rank r gets `recvcounts[r]` elements, by default what its buffer takes."""
        self._reduce_scatter(sendbuf, recvbuf, self._find_counts(sendbuf, recvbuf, recvcounts), op).run()

    def Ireduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Op = SUM) -> Request:
        return self._reduce_scatter(sendbuf, recvbuf, self._find_counts(sendbuf, recvbuf, recvcounts), op).start()

    def _find_counts(self, sendbuf: Any, recvbuf: Any, recvcounts: Any) -> Any:
        if recvcounts is not None or is_in_place(sendbuf):
            return recvcounts
        own = len(read_elements(recvbuf, "recvbuf"))
        return self.group.all_gather(np.array([own])).tolist()

    def _reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any, op: Op) -> _Plan:
        out = read_elements(recvbuf, "recvbuf", writes=True)
        value = out if is_in_place(sendbuf) else read_elements(sendbuf, "sendbuf")
        blocks = read_blocks([value, recvcounts], self.size, "sendbuf")
        mine = blocks.counts[self.rank]
        return _Plan(partial(self.group.reduce_scatter, op, blocks.join(), sizes=blocks.counts), out[:mine])

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Joins the buffers of all ranks on root, which may say how many elements come from each and where to."""
        self._gather(sendbuf, recvbuf, root).run()

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        return self._gather(sendbuf, recvbuf, root).start()

    Gatherv, Igatherv = Gather, Igather

    def _gather(self, sendbuf: Any, recvbuf: Any, root: int) -> _Plan:
        if self.rank != root:
            return _Plan(partial(self.group.gather, read_elements(sendbuf, "sendbuf"), root))
        return self._join(partial(self.group.gather, root=root), sendbuf, recvbuf)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Joins the buffers of all ranks on every rank, as `Gather` does on root."""
        self._join(self.group.all_gather, sendbuf, recvbuf).run()

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        return self._join(self.group.all_gather, sendbuf, recvbuf).start()

    Allgatherv, Iallgatherv = Allgather, Iallgather

    def _join(self, call: Any, sendbuf: Any, recvbuf: Any) -> _Plan:
        blocks = read_blocks(recvbuf, self.size, "recvbuf", writes=True)
        value = blocks.get(self.rank) if is_in_place(sendbuf) else read_elements(sendbuf, "sendbuf")
        span = blocks.span
        return _Plan(partial(call, value), span, _put_into(blocks) if span is None else None)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Cuts the buffer of root, which may say how many elements go to each rank and where they are."""
        self._scatter(sendbuf, recvbuf, root).run()

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        return self._scatter(sendbuf, recvbuf, root).start()

    Scatterv, Iscatterv = Scatter, Iscatter

    def _scatter(self, sendbuf: Any, recvbuf: Any, root: int) -> _Plan:
        if self.rank != root:
            return _Plan(partial(self.group.scatter, None, root), read_elements(recvbuf, "recvbuf", writes=True))
        blocks = read_blocks(sendbuf, self.size, "sendbuf")
        out = None if is_in_place(recvbuf) else read_elements(recvbuf, "recvbuf", writes=True)
        return _Plan(partial(self.group.scatter, blocks.join(), root, sizes=blocks.counts), out)

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Sends block r of each buffer to rank r; all blocks are of one length."""
        self._alltoall(sendbuf, recvbuf, False).run()

    def Ialltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        return self._alltoall(sendbuf, recvbuf, False).start()

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Sends block r of each buffer to rank r; buffers may say how long each block is and where it lies."""
        self._alltoall(sendbuf, recvbuf, True).run()

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        return self._alltoall(sendbuf, recvbuf, True).start()

    def _alltoall(self, sendbuf: Any, recvbuf: Any, lengths_differ: bool) -> _Plan:
        taken = read_blocks(recvbuf, self.size, "recvbuf", writes=True)
        sent = taken if is_in_place(sendbuf) else read_blocks(sendbuf, self.size, "sendbuf")
        call = partial(self.group.all_to_all, sent.join(), sizes=sent.counts if lengths_differ else None)
        return _Plan(call, taken.span, _put_into(taken) if taken.span is None else None)

    # Messages

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Sends a buffer to one rank; it does not wait for the `Recv`."""
        if dest != PROC_NULL:
            self.group.send(read_elements(buf, "buf"), dest, tag)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        if dest == PROC_NULL:
            return Request()
        return Request(self.group.send(read_elements(buf, "buf"), dest, tag, async_op=True))

    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = 0, status: Status | None = None) -> None:
        """Receives a message of at most the buffer's length; `ANY_TAG` is not offered, so the tag is 0 by default."""
        if source != PROC_NULL:
            self._recv(buf, source, tag).run(status)
        elif status is not None:
            status.fill(PROC_NULL)

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = 0) -> Request:
        return Request() if source == PROC_NULL else self._recv(buf, source, tag).start()

    def _recv(self, buf: Any, source: int, tag: int) -> _Plan:
        if tag < 0:
            raise ValueError(f"tag must be that of the Send, got {tag}: a Recv names its tag, ANY_TAG is not offered")
        elements = read_elements(buf, "buf", writes=True)
        call = partial(self.group.recv, None if source == ANY_SOURCE else source, tag)
        return _Plan(call, None, _Delivery(elements, tag))

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = 0,
        status: Status | None = None,
    ) -> None:
        """Sends one buffer and receives another; the ranks may be the same."""
        sent = self.Isend(sendbuf, dest, sendtag)
        self.Recv(recvbuf, source, recvtag, status)
        sent.Wait()

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = ANY_SOURCE,
        recvtag: int = 0,
        status: Status | None = None,
    ) -> None:
        """Sends a buffer and receives into it."""
        sent = read_elements(buf, "buf").copy() if dest != PROC_NULL else None
        self.Sendrecv(sent, dest, sendtag, buf, source, recvtag, status)


COMM_NULL = Comm()


def _put_into(blocks: Blocks) -> Finish:
    """Return a function that writes a joined result into blocks that do not lie one behind the other."""

    def put(joined: Array, _: Status) -> None:
        if len(joined) != sum(blocks.counts):
            raise ValueError(f"recvbuf takes {sum(blocks.counts)} elements, {len(joined)} came; they are lost")
        blocks.put(joined)

    return put
