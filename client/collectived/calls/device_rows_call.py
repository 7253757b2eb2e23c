"""Calls on a GPU that cut values apart or join them. How many rows come is known when they have come.

Where that is what this rank has reckoned with, they lie in its memory on the GPU. Else (of an all_gather whose lengths
differ, of an all_to_all with other sizes) the worker brings them by the host, behind a header.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from collectived.arguments import escape_surrogates
from collectived.calls.buffers import ArenaAddress, ResultBuffer
from collectived.calls.described_result import DescribedResult
from collectived.calls.device_call import DeviceCall
from collectived.calls.prepare import PreparedCall
from collectived.gpu.array import DeviceArray
from collectived.values import nest
from collectived.values.leaves import Array
from collectived.values.targets import check_fits


class DeviceRowsCall(DeviceCall):
    """See the module."""

    __slots__ = ("_host_result",)

    def __init__(
        self, prepared: PreparedCall, arrays: list[Array], located: list[ArenaAddress | None] | None, spec: nest.Spec
    ) -> None:
        super().__init__(prepared, arrays, located, spec)
        self._host_result: DescribedResult | None = None

    def attach_result(self, slot: ResultBuffer) -> None:
        super().attach_result(slot)
        if self.prepared.result_spec is not None:
            self._host_result = DescribedResult(self.prepared.result_spec, slot)

    def copy_to_out(self) -> None:
        with contextlib.suppress(ValueError):  # raised when the result is asked for
            super().copy_to_out()

    def get_pack_leaves(self, pack: int) -> list[tuple[nest.KeyPath, Any]]:
        self._check_out()
        return super().get_pack_leaves(pack)

    def _build_leaves(self) -> list[Any]:
        self._check_out()
        return super()._build_leaves()

    def _check_out(self) -> None:
        """Raise ValueError where `out` does not take what has come."""
        if self.out is not None:
            own = escape_surrogates(nest.structure(self.prepared.spec))
            check_fits(self.out, own, [self._get_type(index) for index in range(len(self.prepared.kinds))])

    def _get_type(self, index: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
        if self._host_result is not None:
            return self._host_result.get_type(index)
        _, dtype, shape = self.prepared.result_locations[index]
        return dtype, shape

    def _build_leaf(self, index: int) -> Any:
        found = self._host_result
        if found is None:
            return super()._build_leaf(index)
        if self.out is None:
            return self.prepared.kinds[index].restore(found.array(index))
        into: Any = self.out.views[index]
        if isinstance(into, DeviceArray):
            into.assign(found.array(index))
        else:
            found.copy(index, into)
        return self.out.leaves[index]

    def _let_go(self) -> None:
        super()._let_go()
        self._host_result = None  # it holds the slot
