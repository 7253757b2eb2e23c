"""An array in memory that this process has allocated on GPU 0 itself, without a library: real memory or fake memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.fakes.client_cuda import FakeClientCuda

from collectived.gpu import driver
from collectived.gpu.array import LEGACY_STREAM


class OwnArray:
    """It has `__cuda_array_interface__`, so its results are `DeviceArray`s.

    Attributes:
        stream: on which it is written; the default one at first.
    """

    def __init__(self, host: NDArray[Any]) -> None:
        self._cuda = cuda = driver.get_cuda()
        self.shape, self.dtype, self.nbytes = host.shape, host.dtype, host.nbytes
        self.stream = LEGACY_STREAM
        if isinstance(cuda, FakeClientCuda):
            self.address = cuda.malloc(host.nbytes)
        else:
            from collectived_proto.ipc.cuda import call_driver, retain_primary_context

            call_driver("cuCtxSetCurrent", retain_primary_context(0))
            self.address = int(call_driver("cuMemAlloc", host.nbytes)[0])
        self.assign(host)

    def assign(self, host: NDArray[Any]) -> None:
        self._cuda.copy(0, self.address, np.ascontiguousarray(host).ctypes.data, self.nbytes, self.stream)
        self._cuda.synchronize(0, self.stream)

    def free(self) -> None:
        if isinstance(self._cuda, FakeClientCuda):
            self._cuda.free(self.address)
        else:
            from collectived_proto.ipc.cuda import call_driver

            call_driver("cuMemFree", self.address)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        told = {"shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False), "strides": None}
        return {**told, "version": 3, "stream": self.stream}
