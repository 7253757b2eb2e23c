"""Calls that are carried from and to the memory of a GPU: the worker writes the result where the call says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from collectived.calls.buffers import ArenaAddress, DeviceStagingArea
from collectived.calls.call import ALL_PACKS, LAUNCHED, Call
from collectived.calls.prepare import PreparedCall
from collectived.errors import InternalError, UnavailableError
from collectived.gpu.array import LEGACY_STREAM, DeviceArray, fetch_foreign_to_host, fetch_to_host
from collectived.gpu.driver import CudaError
from collectived.values import nest
from collectived.values.leaves import Array, kind_of
from collectived_proto.types import Verdict

_NOT_COPIED = "its result is there, but cannot be copied to where it is wanted"


@contextlib.contextmanager
def _map_driver_errors(what: str, out_intact: bool = True) -> Iterator[None]:
    """Raise what could not be done where the driver refuses."""
    try:
        yield
    except CudaError as error:
        failure = UnavailableError(f"{what}: {error}")
        failure.out_intact = out_intact
        raise failure from error


class DeviceCall(Call):
    """Results on a GPU look into that memory, which is this rank's own; others are copied to the host.

    Arrays on another GPU than the rank's are copied through the host, in both directions: streams and events are of one
    GPU.
    """

    has_input_event = True
    __slots__ = (
        "_came_from_elsewhere",
        "_device_result",
        "_out_streams",
        "_waiting_streams",
        "_input_streams",
        "_kept_alive",
        "_output_slot",
        "is_stream_ordered",
        "output",
    )

    def __init__(
        self, prepared: PreparedCall, arrays: list[Array], located: list[ArenaAddress | None] | None, spec: nest.Spec
    ) -> None:
        given: list[Any] = arrays
        if prepared.device_area is not None:
            with _map_driver_errors("its value cannot be brought to the host"):
                given = fetch_foreign_to_host(arrays, prepared.device_area.device)
        self._came_from_elsewhere = [one is not array for one, array in zip(given, arrays, strict=True)]  # by leaf
        super().__init__(prepared, given, located, spec)
        self._kept_alive: list[object] = [
            array for array in given if isinstance(array, DeviceArray)
        ]  # read until the end
        self._input_streams = [array.stream if isinstance(array, DeviceArray) else 0 for array in given]  # by leaf
        self._waiting_streams: list[int] = []  # by leaf, the streams that wait for it
        self._out_streams: dict[int, int] = {}  # by leaf of `out`, the stream on which it is copied there
        self._output_slot: Any = None  # where the worker may be writing
        self._device_result: Any = None  # the same, until the result has been collected
        self.is_stream_ordered = False
        self.output = None

    def reserve_output(self, patience: float) -> None:
        prepared = self.prepared
        if prepared.device_area is not None and prepared.receives:
            self._output_slot = self._device_result = prepared.device_area.acquire_output(
                prepared.device_bytes, patience
            )
            self.output = self._output_slot.address

    def export_inputs(
        self, located: list[ArenaAddress | None] | None, patience: float
    ) -> list[ArenaAddress | None] | None:
        room, given = self.prepared.device_area, [array for array in self._kept_alive if isinstance(array, DeviceArray)]
        if room is None or not self.prepared.reads_in_place or len(given) < len(self.arrays):
            return located
        found: list[ArenaAddress | None] = []
        loans: list[object] = []
        for array, known in zip(given, located or [None] * len(given), strict=True):
            lent = room.export_array(array, patience) if known is None else None
            if lent is not None:
                known, loan = lent
                loans.append(loan)
            elif known is None:
                return located  # they are copied, all of them
            found.append(known)
        self._kept_alive += loans
        return found

    @property
    def _device_area(self) -> DeviceStagingArea:
        if self.prepared.device_area is None:
            raise InternalError(f"{self.prepared.op} is not carried on a GPU")
        return self.prepared.device_area

    def record_input_event(self, number: int, events: dict[int, int]) -> bytes:
        """Records the event of that number behind what is on the streams of the value.

        Args:
            events: those of the caller, by number; a new one is made where there is none, whose handle is returned.

        Raises:
            CudaError: the driver refuses; nothing has been sent to the worker.
        """
        room, event, handle = self._device_area, events.get(number), b""
        if event is None:
            event, handle = room.cuda.create_event(room.device)
        # Arrays on the host are copied on the legacy stream; see `DeviceStaging.fill`.
        first, *others = dict.fromkeys(stream or LEGACY_STREAM for stream in self._input_streams)
        for other in others:  # a value of several streams; an event stands on one
            room.wait_stream(first, other)
        room.cuda.record_event(room.device, event, first)
        events[number] = event  # not before, for the worker gets its handle once
        return handle

    def request_stream_order(self) -> None:
        """Asks the worker for a word when all is launched; not where part of the result is for the host, or for a
        library that reads it on streams of its own."""
        on_gpu = (
            bool(self._input_streams)
            and all(self._input_streams)
            and all(kind.is_stream_ordered for kind in self.prepared.kinds)
        )
        if self.out is not None:
            views: list[Any] = self.out.views
            on_gpu = on_gpu and all(self._is_on_rank_gpu(view) for view in views)
        self.is_stream_ordered = on_gpu and self.prepared.receives

    def _is_on_rank_gpu(self, array: object) -> bool:
        return isinstance(array, DeviceArray) and array.device == self._device_area.device

    def open_event(self, handle: bytes) -> int:
        room = self._device_area
        return room.cuda.open_event(room.device, handle)

    def wait_event(self, event: int) -> bool:
        """Makes the caller's current streams wait for the event; then its value may be had, for use on them.

        False: that cannot be done just now, and the value is to be waited for.
        """
        room = self._device_area
        self._waiting_streams = [
            given if kind.current_stream is None else kind.current_stream()
            for kind, given in zip(self.prepared.kinds, self._input_streams, strict=True)
        ]
        if all([room.wait_event(event, stream) for stream in dict.fromkeys(self._waiting_streams)]):
            return True
        self._waiting_streams = []
        return False

    def is_ready(self, packs: int = ALL_PACKS) -> bool:
        if packs == LAUNCHED:
            return self.complete or self.launched is not None
        return super().is_ready(packs)

    def end(self, verdict: Verdict | None = None, retire: bool = False) -> None:
        if retire:  # the worker may still be writing it
            self.retired += (self.prepared.memory.retire((self._output_slot, self._kept_alive), ()),)
        if verdict is not None and self.staging is not None:
            self._retire_staging(retire)
        self._output_slot = self.launched = None
        self._kept_alive = []
        super().end(verdict, retire)

    def abandon(self) -> None:
        if self.staging is not None:
            self._retire_staging(retire=False)

    def _retire_staging(self, retire: bool) -> None:
        """Whether the worker reads it or not, copies into it may still be under way: it serves again after them."""
        staging, self.staging = self.staging, None
        if retire:
            self.retired += (self.prepared.memory.retire(staging, ()),)
        try:
            for stream in dict.fromkeys(given or LEGACY_STREAM for given in self._input_streams):
                self._device_area.record_stream(staging.slot, stream)
        except CudaError:
            self.prepared.memory.retire(staging, ())

    def sync_out_streams(self) -> None:
        for index, stream in self._out_streams.items():
            current = self._current_stream(index)
            if current != stream:
                with _map_driver_errors("the stream that is current now cannot wait for its result", out_intact=False):
                    self._device_area.wait_stream(current, stream)

    def _let_go(self) -> None:
        super()._let_go()
        self._device_result = None

    def _current_stream(self, index: int) -> int:
        if self.out is None:
            raise InternalError(f"{self.prepared.op} has no `out`")  # nothing is copied there then
        view: Any = self.out.views[index]
        stream = kind_of(self.out.leaves[index]).current_stream
        return view.stream if stream is None else stream()

    def _build_leaves(self) -> list[Any]:
        kinds = self.prepared.kinds
        if self.out is None and not self._leaves and not any(kind.is_device for kind in kinds):
            with _map_driver_errors(_NOT_COPIED):
                arrays = fetch_to_host(
                    [self._result_array(index, self._device_area.copy_stream) for index in range(len(kinds))]
                )
            return [kind.restore(array) for kind, array in zip(kinds, arrays, strict=True)]
        return [self._get_leaf(index) for index in range(len(kinds))]

    def _get_leaf(self, index: int) -> Any:
        with _map_driver_errors(_NOT_COPIED, out_intact=self.out is None):
            return super()._get_leaf(index)

    def _result_array(self, index: int, stream: int) -> DeviceArray:
        """A leaf of the result, where the worker has written it, for use on a stream."""
        if self._device_result is None:
            raise InternalError(f"{self.prepared.op} has no result")  # it is made with a place for it
        offset, dtype, shape = self.prepared.result_locations[index]
        found = self._device_area.array(self._device_result, offset, shape, dtype)
        found.stream = stream
        return found

    def _build_leaf(self, index: int) -> Any:
        kind, current = self.prepared.kinds[index], self._waiting_streams[index] if self._waiting_streams else 0
        if self.out is None:
            if kind.is_device and not self._came_from_elsewhere[index]:
                return kind.restore(self._result_array(index, current or LEGACY_STREAM))
            return kind.restore(self._fetch_leaf_to_host(index))
        into: Any = self.out.views[index]
        if self._is_on_rank_gpu(into):
            found = self._result_array(index, current or into.stream)
            into.assign(found)
            self._device_area.record_stream(self._device_result, found.stream)
            self._out_streams[index] = found.stream
        elif isinstance(into, DeviceArray):
            into.assign(self._fetch_leaf_to_host(index))
        else:
            np.copyto(into, self._fetch_leaf_to_host(index))
        return self.out.leaves[index]

    def _fetch_leaf_to_host(self, index: int) -> Array:
        (found,) = fetch_to_host([self._result_array(index, self._device_area.copy_stream)])
        return found
