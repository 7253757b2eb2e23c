"""Session: this process's connection to a worker."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from collectived.arguments import check_integer
from collectived.calls.local_failure import typed_failures
from collectived.calls.prepare import PreparedCallCache
from collectived.calls.timeout import Timeout
from collectived.connection import address, environment, failure_file, lifetime
from collectived.connection.join_request import JoinRequest, make_join_request
from collectived.errors import (
    CancelledError,
    CollectiveError,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)
from collectived.gpu.driver import CudaError, get_cuda
from collectived.group import Group
from collectived.session_hooks import JoinedRank
from collectived.transports import Transport, is_grpc_forced, open_transport
from collectived.values.leaves import element_type, find_gpu, make_template, numpy_dtype
from collectived.values.libraries import device_name
from collectived_proto.devices import DeviceName
from collectived_proto.numpy_types import to_numpy
from collectived_proto.options import CommunicationOptions
from collectived_proto.report.phrases import short_worker_names

if TYPE_CHECKING:
    import grpc

    from collectived.connection.rpc import JoinedGroup, OpenedSession, WorkerClient
    from collectived.shared.device_memory import DeviceMemory

log = logging.getLogger("collectived")


def connect(
    worker: str | None = None,
    *,
    timeout: float | timedelta | None = 10.0,
    credentials: grpc.ChannelCredentials | None = None,
) -> Session:
    """Connects to a worker: `worker`, else COLLECTIVED_WORKER, else your one running job, else the host's own.

    Through its Unix socket, tensors lie in memory that both share. Over TCP, and where COLLECTIVED_TRANSPORT is `grpc`,
    they travel inside gRPC messages; everything else is the same.

    Args:
        worker: `unix:/path` or `host:port`. TCP needs the job's secret, from the file that COLLECTIVED_SECRET_FILE
            names, or from COLLECTIVED_SECRET.
        timeout: seconds for it to answer; None and 0: no limit.
        credentials: of gRPC, for TCP with TLS; None: of the PEM files that COLLECTIVED_TLS_CA, COLLECTIVED_TLS_CERT and
            COLLECTIVED_TLS_KEY name; if none is set, plain text.

    Raises:
        TypeError, ValueError: `worker` is not an address, `timeout` is negative, or a variable of the environment has
            an impossible value.
        InvalidArgumentError: several jobs are running; the error lists them.
        UnavailableError: no worker answers, or none is known; the error shows the command to type.
        UnauthenticatedError: the worker asks for the job's secret.
        ResourceExhaustedError: this process has no descriptor or memory left for it, or the worker has none.
    """
    failure_file.install()
    limit = Timeout.of(timeout)
    found = address.find_worker(worker)
    alone = is_grpc_forced() or not found.path
    secret = address.read_secret(found)
    tls = address.load_tls(found) if credentials is None else None
    with typed_failures(f"{found.text} could not be asked for a session"):
        found.probe(limit)

        from collectived.connection.rpc import WorkerClient  # late, for it imports grpc

        rpc = WorkerClient(found, credentials, secret, tls)
        try:
            opened, transport = open_transport(rpc, limit, alone)
        except BaseException:
            rpc.close()
            raise
    return Session(rpc, opened, transport)


class SessionResource(Protocol):
    """An object that ends with its session: a group, or cross-device operations over several."""

    name: str

    def leave(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def _cancel(self, why: str) -> None:
        """Ends what other threads wait for."""

    def _after_fork(self) -> None:
        """In a forked child, where nothing of it can be used."""


class Session:
    """A connection to one worker; made by `connect`. Thread-safe. As a context manager it closes at the end.

    Attributes:
        worker: the worker's name, `/job:worker/task:0`.
        devices: its devices, in full.
        transport: how tensors get there: "shared memory" or "grpc".
    """

    def __init__(self, rpc: WorkerClient, opened: OpenedSession, transport: Transport) -> None:
        self.worker = opened.worker
        self._worker_text = short_worker_names(opened.worker)
        self.devices = opened.devices
        self.transport = transport.name
        self._rpc = rpc
        self._token = opened.session
        self._transport = transport
        self._gpus = opened.gpus
        self._memory = transport.memory
        self._is_short = False  # its last join was refused for want of room
        self._resources: list[SessionResource] = []
        self._unusable_reason = ""
        self._cancel_reason = ""  # the message for calls during which it was closed
        self._lock = threading.Lock()  # over all three where the session is closed
        lifetime.register(self)

    def join(
        self,
        name: str | None = None,
        size: int | tuple[int, int] | None = None,
        *,
        rank: int | None = None,
        device: Any = None,
        options: CommunicationOptions | None = None,
        timeout: float | timedelta | None = None,
        settle: float = 5.0,
        idle: bool = False,
    ) -> Group:
        """Joins a group and waits until it is complete.

        Args:
            name: of the group, within the job; one that begins with "/" belongs to the cluster. Else COLLECTIVED_GROUP.
            size: number of ranks, or (least, most): complete with most, or `settle` seconds after least. Else
                WORLD_SIZE.
            rank: of this process; else RANK, else assigned by the coordinator.
            device: of this worker, such as "CPU:1", or a `torch.device`; None: chosen by the worker.
            options: defaults for the group's collectives.
            timeout: seconds to wait for the others; None and 0: no limit. Every 10 s the ranks that are here are
                printed.
            settle: seconds; an elastic group never starts beside ranks of it that still run: these see `Group.waiting`.
            idle: waiting for a rank is normal in this group, and no reason for a warning.

        Raises:
            ValueError: an argument is wrong, or missing from the environment too.
            DeadlineExceededError: not complete in time; the error names the ranks that were there.
            CollectiveError: the worker or the coordinator refuses.
        """
        self._check_usable()
        if options is not None and not isinstance(options, CommunicationOptions):
            raise TypeError(f"options must be CommunicationOptions or None, got {type(options).__name__}")
        default_timeout = environment.timeout()
        full = "" if device is None else str(self._device(device))
        self._find_device_memory(full)  # if its memory cannot be used, this rank fails before the others see it
        wished = make_join_request(name, size, rank, full, settle, timeout, idle)

        def enter(place: JoinedRank) -> Group:
            group = Group(self, wished, place, options or CommunicationOptions(), default_timeout)
            self._register_group(group)
            return group

        return self._join_group(wished, enter)

    # For its groups

    def _join_group(self, wish: JoinRequest, enter: Callable[[JoinedRank], Group]) -> Group:
        """Waits until a group is complete, and enters it; leaves it again where that fails."""
        self._check_usable()
        if self._is_short:
            self._memory.release_unused()
        entered: list[Group] = []

        def take(joined: JoinedGroup) -> Group:
            room = self._find_device_memory(joined.group.members[joined.rank].device)
            route, describe = self._transport.open_channel(joined)
            prepared = PreparedCallCache(describe, self._memory, joined.rank, room, joined.group.size)
            entered.append(enter(JoinedRank(joined.group, joined.rank, route, prepared)))
            return entered[0]

        try:
            with self._map_close_errors(), typed_failures(f"group {wish.name!r} could not be entered"):
                return self._rpc.join(self._token, wish, log.warning, take)
        except BaseException as error:
            self._is_short = isinstance(error, ResourceExhaustedError)
            for group in entered:  # an interruption after that: no caller has it
                with contextlib.suppress(CollectiveError):
                    group.leave()
            raise

    def _find_device_memory(self, device: str) -> DeviceMemory | None:
        """Memory on a device, given in full; None for a CPU, and where memory of GPUs cannot be shared."""
        name = DeviceName.parse(device) if device else None
        return self._transport.get_device_memory(name.index) if name is not None and name.kind == "GPU" else None

    def _register_group(self, group: Group) -> None:
        """A group takes part, and is to be left when the session is closed.

        Raises:
            CancelledError: that has come about meanwhile.
        """
        with self._lock:
            closed = self._cancel_reason
            if not closed:
                self._resources.append(group)
        if closed:
            with contextlib.suppress(CollectiveError):
                group.leave()
            raise CancelledError(closed)

    def _unregister_group(self, group: Group) -> None:
        if group in self._resources:
            self._resources.remove(group)

    @contextlib.contextmanager
    def _map_close_errors(self) -> Iterator[None]:
        """Raise CancelledError from calls in this block where another thread closes the session."""
        try:
            yield
        except CollectiveError as error:
            if not self._cancel_reason or isinstance(error, CancelledError):
                raise
            raise CancelledError(self._cancel_reason) from None

    def empty(
        self,
        shape: int | Sequence[int] | None = None,
        dtype: Any = None,
        device: Any = None,
        *,
        like: Any = None,
    ) -> Any:
        """An uninitialised array in memory that the worker owns; collectives on it copy nothing in.

        On a GPU it is a `DeviceArray` unless `like` says otherwise; `cupy.asarray` and `torch.as_tensor` look into it.
        Slices, reshapes and views count too. The memory is given back when the last of them is collected. Where the
        transport is "grpc" it is an ordinary array.

        Args:
            shape: lengths; left out: those of `like`.
            dtype: any that collectives carry, `torch.dtype` too; left out: that of `like`, else float32.
            device: of the worker, by name or as a `torch.device`; None: where `like` lies.
            like: an array or PyTorch tensor, or a library such as `torch` or `cupy`, whose kind of array to return.

        Raises:
            ValueError: a length is negative.
            TypeError: collectives do not carry that dtype, no shape is given, or arrays of the kind of `like` cannot
                look into memory that is written, as those of JAX.
            NotFoundError: the worker has no such device; the error lists those it has.
            ResourceExhaustedError: the worker refuses more memory.
        """
        self._check_usable()
        there = find_gpu(like) if device is None else None
        if there is not None:
            device = f"cuda:{there}"
        place = None if device is None else self._device(device)
        room = None if place is None else self._find_device_memory(str(place))
        if room is None and place is not None and place.kind == "GPU":
            raise UnimplementedError(f"arrays on {place.short} need shared memory, and this session has none")
        kind, like_shape, like_dtype = make_template(like, room)
        if shape is None:
            if like_shape is None:
                raise TypeError("shape is missing: give lengths, or an array as like")
            shape = like_shape
        lengths = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        expected = f"a length that is not negative, or several (the shape is {shape!r})"
        lengths = tuple(check_integer(length, "shape", 0, sys.maxsize, expected) for length in lengths)
        if dtype is None:
            dtype = np.float32 if like_dtype is None else like_dtype
        element = element_type(numpy_dtype(dtype), "the array")
        with self._map_close_errors(), typed_failures("no memory of the worker could be taken"):
            return kind.restore((room or self._memory).empty(lengths, to_numpy(element)))

    def close(self) -> None:
        """Leaves all groups in the order in which they were joined and ends the session; idempotent.

        A thread that waits in this session gets `CancelledError` at once; other calls in flight are waited for. A
        handler of a signal should rather raise, such as `SystemExit`, so that a `with` block closes the session: where
        it interrupts a few lines of this library that hold a lock, `close` would wait for that forever.
        """
        if self._unusable_reason:
            return
        with self._lock:
            if self._unusable_reason:
                return
            self._unusable_reason = f"the session with {self._worker_text} is closed; connect again"
            self._cancel_reason = f"the session with {self._worker_text} was closed during this call; connect again"
        try:
            self._cancel(self._cancel_reason)
            for group in list(self._resources):
                try:
                    group.leave()
                except CollectiveError as error:
                    log.error("on leaving group %r: %s", group.name, error)
        finally:  # Ctrl-C, too: with the session the worker lets go of its groups
            try:
                self._transport.close()
            finally:
                self._rpc.close()
                lifetime.unregister(self)

    def _cancel(self, why: str) -> None:
        """End the waits of other threads. Calls without a waiting thread are waited for when their group is left."""
        self._rpc.cancel(why)
        self._transport.cancel(why)
        for group in list(self._resources):
            group._cancel(why)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._unusable_reason:
            for group in list(self._resources):
                group.__exit__(kind, error, traceback)
        self.close()

    def __repr__(self) -> str:
        return f"<Session with {self._worker_text} at {self._rpc.address.text}: {self.transport}>"

    def _device(self, device: Any) -> DeviceName:
        name = device_name(device)
        if name is None:
            raise TypeError(f"device must be a name such as 'CPU:1', a torch.device or None, got {device!r}")
        found = self._translate_cuda_index(DeviceName.parse(name, _task(self.worker)), name)
        if str(found) not in self.devices:
            shown = ", ".join(DeviceName.parse(known).short for known in self.devices)
            raise NotFoundError(f"{self._worker_text} has no device {name!r}: it has {shown}")
        return found

    def _translate_cuda_index(self, device: DeviceName, name: str) -> DeviceName:
        """`cuda:1` is what this process calls so: the same GPU, as the worker calls it."""
        if not name.lower().startswith("cuda") or not self._gpus:
            return device
        try:
            own = get_cuda().device_uuids()
        except CudaError as error:
            raise UnavailableError(f"{name!r} cannot be looked up by this process: {error}") from None
        if device.index >= len(own) or own[device.index] not in self._gpus:
            there = own[device.index] if device.index < len(own) else "not there"
            raise NotFoundError(f"{name!r} is {there}, and {self._worker_text} has {', '.join(self._gpus)}")
        return DeviceName(device.task, "GPU", self._gpus.index(own[device.index]))

    def _check_usable(self) -> None:
        if self._unusable_reason:
            raise FailedPreconditionError(self._unusable_reason)

    def _after_fork(self) -> None:
        self._unusable_reason = (
            f"the session with {self._worker_text} is the parent's; connect again in the child itself"
        )
        for group in self._resources:
            group._after_fork()
        self._transport.invalidate_after_fork()


def _task(worker: str) -> int:
    number = worker.rpartition(":")[2]
    return int(number) if number.isdigit() else 0
