"""A process with memory of its own on a GPU: `python -m tests.fakes.ipc_exporter fake|real`, for tests that open it.

It prints the handle of `SIZE` bytes, each of them `BYTE`, and lives until its standard input ends.
"""

from __future__ import annotations

import ctypes
import sys

from tests.fakes.client_cuda import FakeClientCuda

from collectived.gpu.driver import Cuda

SIZE, BYTE = 4 << 20, 7


def fake() -> tuple[Cuda, int]:
    cuda = FakeClientCuda()
    address = cuda.malloc(SIZE)
    ctypes.memset(address, BYTE, SIZE)
    return cuda, address


def real() -> tuple[Cuda, int]:
    from collectived.gpu.driver_cuda import ClientDriverCuda
    from collectived_proto.ipc.cuda import call_driver, retain_primary_context

    cuda = ClientDriverCuda()
    call_driver("cuCtxSetCurrent", retain_primary_context(0))
    address = int(call_driver("cuMemAlloc", SIZE)[0])
    call_driver("cuMemsetD8", address, BYTE, SIZE)
    call_driver("cuCtxSynchronize")
    return cuda, address


if __name__ == "__main__":
    cuda, address = {"fake": fake, "real": real}[sys.argv[1]]()
    found = cuda.find_allocation(address + 100)
    assert found.address == address and found.size >= SIZE and found.device == 0 and found.exportable
    print(cuda.get_ipc_handle(0, address).hex(), flush=True)
    sys.stdin.read()
