"""Calls whose results bring a header: of operations that cut or join values, and of ranks that take what comes."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from collectived.arguments import escape_surrogates
from collectived.calls.buffers import ArenaAddress, ResultBuffer
from collectived.calls.call import Call
from collectived.calls.described_result import DescribedResult
from collectived.calls.prepare import PreparedCall
from collectived.errors import InternalError
from collectived.gpu.array import DeviceArray
from collectived.values import nest, structure
from collectived.values.leaves import Array, ArrayKind
from collectived.values.targets import Targets, check_fits

# A rank that has no value of its own knows of the numbers that it receives no more than their type.
UNKNOWN_KIND = ArrayKind(lambda value: value, lambda value: value if value.ndim else value[()])


def parse_structure(op: str, text: str, leaves: int) -> nest.Spec:
    """Return the spec of a value that was taken as it came.

    Raises:
        ValueError: it cannot be rebuilt.
    """
    try:
        spec = structure.parse(text)
        if len(nest.paths(spec)) != leaves:
            raise ValueError(f"the structure {text} came with {leaves} leaves")
    except ValueError as error:
        raise ValueError(f"{op}: {error}; give a value like it as a template") from None
    return spec


class DescribedCall(Call):
    """A call of a collective that has a `result_spec`.

    A rank that takes any value gets NumPy arrays: the sender's kinds are not known.
    """

    __slots__ = ("_described_result",)

    def __init__(
        self, prepared: PreparedCall, arrays: list[Array], located: list[ArenaAddress | None] | None, spec: nest.Spec
    ) -> None:
        super().__init__(prepared, arrays, located, spec)
        self._described_result: DescribedResult | None = None

    def attach_result(self, slot: ResultBuffer) -> None:
        super().attach_result(slot)
        if self.prepared.result_spec is not None:
            self._described_result = parcel = DescribedResult(self.prepared.result_spec, slot, self.own_value)
            if self.unread_rows is not None and parcel.own_rows != self.unread_rows:
                raise ValueError(
                    "a result with rows that were not staged, because earlier results left them to this rank"
                )
            if parcel.own_rows is not None:
                self.prepared.own_rows = self.generation, parcel.own_rows

    def take_value(self) -> Any:
        prepared = self.prepared
        if not prepared.receives:
            return None
        if self.out is not None:
            self._check_out(self.out)
            self.take_leaves()
            return self.out.whole
        if not prepared.accepts_any:
            return nest.unflatten(self.spec, self.take_leaves())
        return nest.unflatten(self._parse_structure(), self.take_leaves())

    def _parse_structure(self) -> nest.Spec:
        parcel = self._require_result()
        return parse_structure(self.prepared.op, parcel.structure, len(parcel))

    def copy_to_out(self) -> None:
        if self.out is None or self._described_result is None:
            return
        with contextlib.suppress(ValueError):  # raised when the result is asked for
            self._check_out(self.out)
            super().copy_to_out()

    def get_pack_leaves(self, pack: int) -> list[tuple[nest.KeyPath, Any]]:
        if self.out is not None:
            self._check_out(self.out)
        if not self.prepared.accepts_any:
            return super().get_pack_leaves(pack)
        paths = nest.key_paths(self._parse_structure() if self.out is None else self.out.spec)
        return [(path, self._get_leaf(index)) for index, path in reversed(list(enumerate(paths)))]

    def take_leaves(self) -> list[Any]:
        leaves = super().take_leaves()
        self._described_result = None  # it holds the slot
        return leaves

    def _check_out(self, out: Targets) -> None:
        parcel = self._described_result
        if parcel is not None:  # None: a value without leaves
            own = "" if self.prepared.accepts_any else escape_surrogates(nest.structure(self.prepared.spec))
            check_fits(out, own or parcel.structure, [parcel.get_type(index) for index in range(len(parcel))])

    def _require_result(self) -> DescribedResult:
        if self._described_result is None:
            raise InternalError(f"{self.prepared.op} has no result")  # the channel lets no such call end well
        return self._described_result

    def _list_pieces(self) -> list[tuple[np.dtype[Any], tuple[int, ...], list[tuple[int, int]]]]:
        parcel = self._require_result()
        try:
            if self.out is not None:
                self._check_out(self.out)
        except ValueError:  # raised when the result is asked for
            return []
        return parcel.list_pieces()

    def _copy_own_rows(self, index: int, target: Array) -> None:
        self._require_result().copy_own_rows(index, target)

    def _build_leaves(self) -> list[Any]:
        self._finish_arrival()
        if self._described_result is None:  # a value without leaves
            return []
        return [self._get_leaf(index) for index in range(len(self._described_result))]

    def _build_leaf(self, index: int) -> Any:
        parcel = self._require_result()
        if self.out is not None:
            into: Any = self.out.views[index]
            if isinstance(into, DeviceArray):
                into.assign(parcel.array(index))
            else:
                parcel.copy(index, into)
            return self.out.leaves[index]
        kind = UNKNOWN_KIND if self.prepared.accepts_any else self.prepared.kinds[index]
        if kind.can_share and self._input_addresses is not None and self._input_addresses[index] is not None:
            backing = self._get_backing(parcel.extent)
            shared = None if backing is None else parcel.try_view(index, backing)
            if shared is not None:
                return shared
        return kind.restore(parcel.array(index))
