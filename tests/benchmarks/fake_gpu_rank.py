"""A rank of `benchmarks.gpus` whose GPU is fake: `python -m tests.benchmarks.fake_gpu_rank LIBRARY`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks import gpu_rank
from tests.fakes.client_cuda import FakeClientCuda
from tests.fakes.cuda import FakeCuda
from tests.fakes.nccl import FakeNccl

from collectived.gpu import driver

FAILS = "COLLECTIVED_FAKE_RANK_FAILS"  # the bytes at which a rank cannot make its buffers


def start(library: str) -> gpu_rank.Peer:
    driver.set_cuda(FakeClientCuda())
    peer = _start(library)
    fails = int(os.environ.get(FAILS, "-1"))
    make = peer.trial

    def trial(nbytes: int, variant: str) -> gpu_rank.Trial:
        if nbytes == fails and peer.rank == 1:
            raise MemoryError("no memory for it")
        return make(nbytes, variant)

    peer.trial = trial  # type: ignore[method-assign]
    return peer


def _start(library: str) -> gpu_rank.Peer:
    if library == "gpu_ours":
        from benchmarks.peers import gpu_ours

        return gpu_ours.start()
    if library == "gpu_torch":
        from benchmarks.peers import gpu_torch

        return gpu_torch.Torch("gloo", "cpu")
    assert library == "gpu_nccl", library
    from benchmarks.peers.gpu_nccl import RawNccl

    cuda = FakeCuda()
    event = cuda.create_event(0)

    def synchronize(stream: int) -> None:
        cuda.record(event, stream)
        while not cuda.is_event_done(event):
            time.sleep(0.0001)

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    id_file = Path(os.environ["TMPDIR"]) / "unique-id"
    return RawNccl(cuda, FakeNccl(blocking=True, cuda=cuda), synchronize, rank, size, id_file)


if __name__ == "__main__":
    gpu_rank.main(start)
