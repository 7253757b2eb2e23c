"""MPI's constants: reduce ops, datatypes, and the numbers that stand in place of a rank, a tag or a color."""

from __future__ import annotations

import enum
import socket
import time

import numpy as np

from collectived_proto.types import ReduceOp

SUM, PROD, MIN, MAX = ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX
BAND, BOR, BXOR = ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR

ANY_SOURCE, PROC_NULL, ANY_TAG, UNDEFINED = -1, -2, -1, -32766
COMM_TYPE_SHARED = 1


class _InPlace(enum.Enum):
    """In place of a buffer: the other buffer of the call is input and output."""

    IN_PLACE = "IN_PLACE"


IN_PLACE = _InPlace.IN_PLACE

# C types, as they are on this machine
BYTE = UNSIGNED_CHAR = np.dtype(np.ubyte)
CHAR = SIGNED_CHAR = np.dtype(np.byte)
SHORT, UNSIGNED_SHORT = np.dtype(np.short), np.dtype(np.ushort)
INT, UNSIGNED = np.dtype(np.intc), np.dtype(np.uintc)
UNSIGNED_INT = UNSIGNED
LONG, UNSIGNED_LONG = np.dtype(np.long), np.dtype(np.ulong)
LONG_LONG, UNSIGNED_LONG_LONG = np.dtype(np.longlong), np.dtype(np.ulonglong)
FLOAT, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
BOOL = C_BOOL = np.dtype(np.bool_)
COMPLEX = C_FLOAT_COMPLEX = np.dtype(np.complex64)
DOUBLE_COMPLEX = C_DOUBLE_COMPLEX = np.dtype(np.complex128)
INT8_T, INT16_T, INT32_T, INT64_T = (np.dtype(f"i{size}") for size in (1, 2, 4, 8))
UINT8_T, UINT16_T, UINT32_T, UINT64_T = (np.dtype(f"u{size}") for size in (1, 2, 4, 8))


def Wtime() -> float:
    """Seconds since some moment in the past."""
    return time.monotonic()


def Get_processor_name() -> str:
    """The name of this host."""
    return socket.gethostname()
