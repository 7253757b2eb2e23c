"""Work on a stream of this process that lasts until a test ends it: a kernel on a real GPU, a held queue on a fake one.

A kernel looks at a word in memory of the host. It ends by itself after `LONGEST_SECONDS`, so that a test which fails
leaves no GPU busy.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from tests.fakes.client_cuda import FakeClientCuda

from collectived.gpu import driver

LONGEST_SECONDS = 20
_SOURCE = """
extern "C" __global__ void wait_for_host(const volatile unsigned int* opened, unsigned long long nanoseconds) {
    unsigned long long began, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (!*opened && now - began < nanoseconds);
}
"""


class Gates:
    """Closes and opens streams of GPU 0 by what this process speaks to GPUs by. Make it before anything hangs: CUDA
    loads its kernel while it is made, and may wait for the device to do so."""

    def __init__(self) -> None:
        cuda = driver.get_cuda()
        self._fake = cuda if isinstance(cuda, FakeClientCuda) else None
        if self._fake is None:
            self._load()
            with self.closed(1, ready=True):  # the first launch of a kernel may wait for the device, too
                pass
            cuda.synchronize(0, 1)

    def _load(self) -> None:
        from cuda.bindings import driver as raw

        from collectived_proto.ipc.cuda import call_driver, retain_primary_context
        from collectived_runtime.device.cuda.compiler import compile_ptx

        self._call, self._raw = call_driver, raw
        self._context = retain_primary_context(0)
        call_driver("cuCtxSetCurrent", self._context)
        (device,) = call_driver("cuDeviceGet", 0)
        which = raw.CUdevice_attribute
        major, minor = (
            int(call_driver("cuDeviceGetAttribute", attribute, device)[0])
            for attribute in (
                which.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                which.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        (self._module,) = call_driver("cuModuleLoadData", compile_ptx(_SOURCE, (major, minor)))
        (self._kernel,) = call_driver("cuModuleGetFunction", self._module, b"wait_for_host")

    @contextlib.contextmanager
    def closed(self, stream: int, *, ready: bool = False) -> Iterator[Callable[[], None]]:
        """What is put on the stream from here on begins when `open()` is called, at the latest at the end of the block.

        `ready`: it is open from the beginning.
        """
        if self._fake is not None:
            fake = self._fake
            if not ready:
                fake.held.add(stream)

            def let_go() -> None:
                fake.held.discard(stream)
                fake.under_way(stream)

            try:
                yield let_go
            finally:
                let_go()
            return
        raw = self._raw
        self._call("cuCtxSetCurrent", self._context)
        flags = raw.CU_MEMHOSTALLOC_PORTABLE | raw.CU_MEMHOSTALLOC_DEVICEMAP
        (found,) = self._call("cuMemHostAlloc", 4, flags)  # some bytes for each test; freed with the process
        word = ctypes.c_uint32.from_address(int(found))
        word.value = int(ready)
        arguments: tuple[Any, ...] = (ctypes.c_uint64(int(found)), ctypes.c_uint64(LONGEST_SECONDS * 10**9))
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))
        one = (1, 1, 1)
        self._call("cuLaunchKernel", self._kernel, *one, *one, 0, raw.CUstream(stream), ctypes.addressof(pointers), 0)

        def open_it() -> None:
            word.value = 1

        try:
            yield open_it
        finally:
            open_it()
