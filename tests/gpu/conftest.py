"""Every implementation of the seam to CUDA, each skipped aloud where it cannot be had."""

from __future__ import annotations

import pytest
from tests.gpu.fake_cuda import FakeCuda

from collectived_runtime.device.cuda.driver import Cuda, CudaError


def real_cuda() -> Cuda:
    """The driver, or a skip that says what is missing."""
    pytest.importorskip("cuda.bindings", reason="no GPU is asked: cuda-bindings are not installed")
    from collectived_runtime.device.cuda.real import RealCuda

    try:
        return RealCuda()
    except CudaError as error:
        pytest.skip(f"no GPU can be asked: {error}")


@pytest.fixture(params=["fake", "real"])
def cuda(request: pytest.FixtureRequest) -> Cuda:
    return FakeCuda() if request.param == "fake" else real_cuda()
