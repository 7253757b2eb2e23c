"""What a worker and its clients have in common where memory of GPUs is shared."""

from __future__ import annotations


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
