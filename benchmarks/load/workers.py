"""A process that is many workers: `python -m benchmarks.load.workers ADDRESS FIRST COUNT TOTAL`.

Each has a connection of its own, says hello, and then does what the runner says: a line of JSON on standard input, and
a line with times, on the clock that all processes of a host share, on standard output. The environment has the job's
secret. Messages are made before the clock runs and are not parsed when they come, but for one: what is measured
is the coordinator, and this process shares its processors.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from typing import Any

import grpc.aio

from benchmarks.load import messages
from collectived_proto.v1 import coordinator_pb2 as pb

SECRET = "COLLECTIVED_SECRET"
ATTACH = "/collectived.v1.Coordinator/Attach"
AT_ONCE = 64  # workers of one process that connect at the same moment
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # else all of them would share one connection
    ("grpc.max_receive_message_length", 64 << 20),
)
_WAIT_SECONDS = 300.0


class Worker:
    """One of them."""

    def __init__(self, address: str, task: int, total: int) -> None:
        self.task = task
        self.came: dict[str, float] = {}
        self.broken = ""
        self.done = b""
        self.bytes = 0
        self.count: Counter[str] = Counter()
        self._hello, self._ask, self._beat = messages.hello(task), messages.ask(task, total), messages.heartbeat()
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._channel = grpc.aio.insecure_channel(address, _OPTIONS)
        self._call: Any = None
        self._reading: asyncio.Task[None] | None = None

    async def attach(self) -> None:
        metadata = (("authorization", f"Bearer {os.environ[SECRET]}"),)
        self._call = self._channel.stream_stream(ATTACH)(metadata=metadata)
        await self._say(self._hello)
        self._reading = asyncio.create_task(self._read())
        await self.until("welcome")

    async def _say(self, data: bytes) -> None:
        async with self._turn:  # a stream takes one message at a time
            await self._call.write(data)

    async def _read(self) -> None:
        try:
            await self._hear()
            self.broken = "the coordinator ended the stream"
        except grpc.aio.AioRpcError as error:
            self.broken = str(error.details())
        self._changed.set()

    async def _hear(self) -> None:
        while isinstance(data := await self._call.read(), bytes):
            kind = messages.kind(data)
            self.came[kind] = time.monotonic()
            self.bytes += len(data)
            self.count[kind] += 1
            if kind == "join_done":
                self.done = data
            elif kind == "query":
                query = pb.CoordinatorMessage.FromString(data).query
                await self._say(messages.position(query, self.joined().rank))
            self._changed.set()

    async def until(self, kind: str) -> None:
        async with asyncio.timeout(_WAIT_SECONDS):
            while kind not in self.came:
                if self.broken:
                    raise SystemExit(f"simulated worker {self.task}: {self.broken}")
                self._changed.clear()
                await self._changed.wait()

    def joined(self) -> pb.JoinDone:
        return pb.CoordinatorMessage.FromString(self.done).join_done

    async def join(self) -> None:
        await self._say(self._ask)

    async def beat(self) -> None:
        if "welcome" in self.came and not self.broken:
            await self._say(self._beat)

    async def lose(self) -> None:
        """Says that its own rank's process has ended."""
        await self._say(messages.lost(self.joined()))

    async def close(self) -> None:
        if self._reading:
            self._reading.cancel()
        await self._channel.close(None)


class Fleet:
    def __init__(self, address: str, first: int, count: int, total: int) -> None:
        self.workers = [Worker(address, task, total) for task in range(first, first + count)]
        self._beating: asyncio.Task[None] | None = None

    async def attach(self, heartbeat: float) -> dict[str, Any]:
        """All attach; from then on each beats every `heartbeat` seconds, one after another."""
        self._beating = asyncio.create_task(self._beats(heartbeat))
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(worker: Worker) -> None:
            async with limit:
                await worker.attach()

        begin = time.monotonic()
        await asyncio.gather(*map(one, self.workers))
        return {"begin": begin, "end": max(worker.came["welcome"] for worker in self.workers)}

    async def _beats(self, seconds: float) -> None:
        pause = seconds / len(self.workers)
        due = time.monotonic()
        while True:
            for worker in self.workers:
                due += pause
                if (rest := due - time.monotonic()) > 0:
                    await asyncio.sleep(rest)
                await worker.beat()

    async def join(self) -> dict[str, Any]:
        begin = time.monotonic()
        await asyncio.gather(*(worker.join() for worker in self.workers))
        asked = time.monotonic()
        await asyncio.gather(*(worker.until("join_done") for worker in self.workers))
        return {"begin": begin, "asked": asked, "end": max(worker.came["join_done"] for worker in self.workers)}

    async def lose(self, task: int) -> dict[str, Any]:
        begin = time.monotonic()
        for worker in self.workers:
            if worker.task == task:
                await worker.lose()
        await asyncio.gather(*(worker.until("verdict") for worker in self.workers))
        return {"begin": begin, "end": max(worker.came["verdict"] for worker in self.workers)}

    async def totals(self) -> dict[str, Any]:
        count: Counter[str] = Counter()
        for worker in self.workers:
            count += worker.count
        return {"bytes": sum(worker.bytes for worker in self.workers), "count": count}

    async def close(self) -> dict[str, Any]:
        if self._beating:
            self._beating.cancel()
        await asyncio.gather(*(worker.close() for worker in self.workers))
        return {}


async def serve(address: str, first: int, count: int, total: int) -> None:
    fleet = Fleet(address, first, count, total)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        name, *arguments = json.loads(line)
        print(json.dumps(await getattr(fleet, name)(*arguments)), flush=True)
        if name == "close":
            return


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], *map(int, sys.argv[2:])))
