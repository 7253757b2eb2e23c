"""Calls whose results bring an outline: of operations that cut or join values, and of ranks that take what comes."""

from __future__ import annotations

import contextlib
from typing import Any

from collectived.calls.call import Call
from collectived.calls.parcel import Parcel
from collectived.calls.places import Address, Slot
from collectived.calls.prepare import Prepared
from collectived.errors import InternalError
from collectived.gpu.array import DeviceArray
from collectived.values import nest, structure
from collectived.values.leaves import Array, Kind
from collectived.values.targets import Targets, check_fits, take_targets

# What comes to a rank that has no value of its own says no more of numbers than their type.
_COMES = Kind(lambda value: value, lambda value: value if value.ndim else value[()])


class OutlinedCall(Call):
    """A call of a collective that has a `form`.

    Who takes what comes gets NumPy arrays: the kinds of the sender's are not told.
    """

    __slots__ = ("_parcel",)

    def __init__(
        self, prepared: Prepared, arrays: list[Array], located: list[Address | None] | None, spec: nest.Spec
    ) -> None:
        super().__init__(prepared, arrays, located, spec)
        self._parcel: Parcel | None = None

    def fill(self, out: object) -> None:
        self.out = take_targets(out)  # whether it fits is seen when something comes

    def receive(self, slot: Slot) -> None:
        super().receive(slot)
        if self.prepared.form is not None:
            self._parcel = Parcel(self.prepared.form, slot)

    def value(self) -> Any:
        prepared = self.prepared
        if not prepared.receives:
            return None
        if not prepared.open:
            return nest.unflatten(self.spec, self.collect())
        parcel = self._came()
        if self.out is not None:
            self._check(self.out, parcel)
            self.collect()
            return self.out.whole
        try:
            spec = structure.parse(parcel.structure)
            if len(nest.paths(spec)) != len(parcel):
                raise ValueError(f"the structure {parcel.structure} came with {len(parcel)} leaves")
        except ValueError as error:
            raise ValueError(f"{prepared.op}: {error}; give a value like it as a template") from None
        return nest.unflatten(spec, self.collect())

    def fill_out(self) -> None:
        if self.out is None or self._parcel is None:
            return
        with contextlib.suppress(ValueError):  # raised when the result is asked for
            self._check(self.out, self._parcel)
            super().fill_out()

    def leaves_of(self, pack: int) -> list[tuple[str, Any]]:
        if not self.prepared.open:
            return super().leaves_of(pack)
        parcel = self._came()
        if self.out is not None:
            self._check(self.out, parcel)
        return [(path, self._taken(index)) for index, path in reversed(list(enumerate(parcel.paths)))]

    def collect(self) -> list[Any]:
        leaves = super().collect()
        self._parcel = None  # it holds the slot
        return leaves

    def _check(self, out: Targets, parcel: Parcel) -> None:
        check_fits(out, parcel.structure, [parcel.type_of(index) for index in range(len(parcel))])

    def _came(self) -> Parcel:
        if self._parcel is None:
            raise InternalError(f"{self.prepared.op} has no result")  # the route lets no such call end well
        return self._parcel

    def _all(self) -> list[Any]:
        if self._parcel is None:  # a value without leaves
            return []
        return [self._taken(index) for index in range(len(self._parcel))]

    def _take(self, index: int) -> Any:
        parcel = self._came()
        if self.out is not None:
            into: Any = self.out.views[index]
            if isinstance(into, DeviceArray):
                into.assign(parcel.array(index))
            else:
                parcel.copy(index, into)
            return self.out.leaves[index]
        kind = _COMES if self.prepared.open else self.prepared.kinds[index]
        if kind.shares and self._shared is not None and self._shared[index] is not None:
            backing = self._back(parcel.extent)
            shared = None if backing is None else parcel.shared(index, backing)
            if shared is not None:
                return shared
        return kind.restore(parcel.array(index))
