"""A call whose arrays a carrier reads and writes where they lie (`ipc/carrier_orders.py`).

The worker has room for the value all the same: where it carries the call itself, the carrier copies the value there.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np

from collectived.calls import own_value
from collectived.calls.call import Call
from collectived.calls.prepare import PreparedCall
from collectived.shared.message_call import view_bytes
from collectived.values import nest
from collectived.values.leaves import Array
from collectived.values.new_arrays import make_array
from collectived_native import core
from collectived_proto.ipc import messages
from collectived_proto.types import AllReduce, Broadcast, Reduce, Verdict

log = logging.getLogger("collectived")

LENT_BYTES = 1 << 20  # of a value, from which it is worth an order
_OPERATIONS = (AllReduce, Reduce, Broadcast)


def may_lend(prepared: PreparedCall) -> bool:
    """Whether a carrier can carry calls of a collective: one array of the host's, of one pack."""
    collective, packs = prepared.collective, prepared.layout.packs
    is_plain = isinstance(collective.operation, _OPERATIONS) and prepared.result_spec is None and not collective.open
    if not is_plain or len(packs) != 1 or len(collective.leaves) != 1 or prepared.device_area is not None:
        return False
    return prepared.is_native_order and collective.leaves[0].nbytes >= LENT_BYTES


class GenerationCarrier(NamedTuple):
    """The carrier of a rank in one generation."""

    generation: int
    core: core.Carrier


class LentCall(Call):
    """
    Args:
        carrier: None: there is none yet.
    """

    __slots__ = ("_carrier", "_is_offered", "_is_written", "_lending", "_result")

    def __init__(
        self,
        prepared: PreparedCall,
        arrays: list[Array],
        spec: nest.Spec,
        carrier: GenerationCarrier | None,
    ) -> None:
        super().__init__(prepared, arrays, None, spec)
        self._carrier = carrier
        self._lending = 0  # a flag of `messages.Submit`
        self._result: Array | None = None  # where the carrier writes it
        self._is_offered = self._is_written = False

    def stage(self, patience: float) -> None:
        self._lending = self._find_lending()
        if self._lending == messages.SUBMIT_LENT:
            self.staging = self.prepared.memory.acquire_staging(self.prepared, patience)
        else:
            super().stage(patience)

    def _find_lending(self) -> int:
        """Whether the caller leaves its arrays alone until the call has ended, and they lie as on the wire."""
        receives = self.prepared.receives
        if self.is_async and not (self.is_lent and (self.out is not None or not receives)):
            return 0
        arrays = self.arrays
        if not all(type(array) is np.ndarray and array.flags.c_contiguous for array in arrays):
            return 0
        if self.out is not None:
            target, (_, dtype, _) = self.out.views[0], self.prepared.result_locations[0]
            if type(target) is not np.ndarray or not target.flags.c_contiguous or target.dtype != dtype:
                return 0
            if any(not own_value.is_same(array, target) and np.may_share_memory(array, target) for array in arrays):
                return 0
        return messages.SUBMIT_MAY_LEND if self._carrier is None else messages.SUBMIT_LENT

    def begin_lending(self) -> int:
        if not self.prepared.contributes:
            self._lending = self._find_lending()
        carrier, staging = self._carrier, self.staging
        if self._lending != messages.SUBMIT_LENT or carrier is None:
            return self._lending
        if self.prepared.receives and not self.is_own_value:
            _, dtype, shape = self.prepared.result_locations[0]
            self._result = make_array(shape, dtype) if self.out is None else self.out.views[0]
        value = view_bytes(self.arrays[0]) if self.arrays else None
        result = None if self._result is None else view_bytes(self._result)
        try:
            if carrier.generation != self.generation:
                raise ValueError("another generation has begun meanwhile")
            carrier.core.offer(self.instance, value, result, None if staging is None else view_bytes(staging.views[0]))
            self._is_offered = True
        except ValueError as error:  # or it is being closed
            log.debug("%s is not lent: %s", self.prepared.op, error)
            self._lending, self._result = 0, None
            if staging is not None:
                staging.fill(self.arrays)
        return self._lending

    def end(self, verdict: Verdict | None = None, retire: bool = False) -> None:
        if self._is_offered and self._carrier is not None:
            self._is_written = self._carrier.core.withdraw(self.instance)  # it touches them no more
        super().end(verdict, retire)

    @property
    def has_result_elsewhere(self) -> bool:
        return super().has_result_elsewhere or self._result is not None

    @property
    def is_out_intact(self) -> bool:
        return super().is_out_intact and not (self.out is not None and self._is_written)

    def _build_leaves(self) -> list[Any]:
        return super()._build_leaves() if self._is_by_worker else [self._get_leaf(0)]

    def _build_leaf(self, index: int) -> Any:
        result = self._result
        if self._is_by_worker or result is None:
            return super()._build_leaf(index)
        return self.prepared.kinds[index].restore(result) if self.out is None else self.out.leaves[index]

    @property
    def _is_by_worker(self) -> bool:
        """Whether the worker has carried it, or the result is the own value."""
        return self._result is None or self.result_buffer is not None
