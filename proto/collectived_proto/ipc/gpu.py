"""Shared memory of GPUs: the types and numbers that a worker and its clients have in common."""

from __future__ import annotations

from typing import NamedTuple

HANDLE_BYTES = 64  # of CUDA's handles of memory and events for other processes


class Allocation(NamedTuple):
    """An allocation on a GPU, as the driver describes it.

    buffer_id: a number that this process never gives to another allocation. address, size: of all of it, in bytes.
    device: on which it lies, as this process numbers it. exportable: whether a handle of legacy IPC can be had.
    """

    buffer_id: int
    address: int
    size: int
    device: int
    exportable: bool


class CudaError(Exception):
    """The driver refused something. `code` is its number, `call` what was asked of it."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} failed: {text} (CUDA error {code})")
        self.call = call
        self.code = code


def uuid_text(data: bytes) -> str:
    """A GPU's UUID as nvidia-smi writes it: the same in every process, whatever CUDA_VISIBLE_DEVICES says."""
    digits = data[:16].hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:32]}"
