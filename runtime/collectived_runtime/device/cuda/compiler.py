"""NVRTC: kernels compiled while the worker runs. Needs no GPU."""

from __future__ import annotations

from typing import Any

from cuda.bindings import nvrtc

# No fused multiply-add: a product is rounded before it is added to, as on the host.
_OPTIONS = ("--fmad=false", "--std=c++17", "--device-as-default-execution-space")


def version() -> tuple[int, int]:
    """Of the library.

    Raises:
        RuntimeError: there is none.
    """
    major, minor = _call("nvrtcVersion")
    return int(major), int(minor)


def compile_ptx(source: str, capability: tuple[int, int]) -> bytes:
    """The PTX of a kernel for GPUs of this compute capability, and later ones.

    Raises:
        RuntimeError: NVRTC is missing, or does not take the source; with its log.
    """
    (program,) = _call("nvrtcCreateProgram", source.encode(), b"fold.cu", 0, [], [])
    try:
        options = [
            option.encode() for option in (*_OPTIONS, f"--gpu-architecture=compute_{capability[0]}{capability[1]}")
        ]
        code, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(code):
            (size,) = _call("nvrtcGetProgramLogSize", program)
            log = b" " * size
            _call("nvrtcGetProgramLog", program, log)
            raise RuntimeError(f"NVRTC does not compile a kernel: {log.decode(errors='replace').strip()}")
        (size,) = _call("nvrtcGetPTXSize", program)
        ptx: bytes = b" " * int(size)
        _call("nvrtcGetPTX", program, ptx)
        return ptx
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _call(name: str, *arguments: Any) -> tuple[Any, ...]:
    code, *found = getattr(nvrtc, name)(*arguments)
    if int(code):
        raise RuntimeError(f"{name} failed: {nvrtc.nvrtcResult(int(code)).name}")
    return tuple(found)
