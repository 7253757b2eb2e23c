"""A member of a group writes anything into the memory in which its ranks meet: its own group alone may suffer.

    python -m tests.fuzz.scribbles ADDRESS NAME RANK ROUNDS SEED

is one rank of three. Each round is a group of its own, in which all carry out the same random collectives and messages.
Rank 0 scribbles meanwhile. Ranks may get any `CollectiveError`, any numbers, and values that cannot be rebuilt; they
must not crash or hang.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

import collectived as cd
from collectived_native import segment

SIZE = 3
SCRIBBLER = 0
ROUND_SECONDS = 0.3
TIMEOUT = 1.0  # of each call
HANG_SECONDS = 60.0  # for a round; most of it is patience with a busy machine
MOST_MEMORY = (
    24 << 30
)  # of address space, most of it the segment's: lengths that are made up must not fill this machine
CANNOT_BE_REBUILT = "give a value like it as a template"  # of a value that was received, whose sender says what it is
_WORD = 8
_ONES = (1 << 64) - 1


class Scribbler:
    """Writes words into a segment, where anybody has written before."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._descriptor = -1
        self._memory: mmap.mmap | None = None
        attach = segment.attach

        def attach_and_keep(descriptor: int, *arguments: Any, **options: Any) -> Any:
            self._map(os.dup(descriptor))
            return attach(descriptor, *arguments, **options)

        segment.attach = attach_and_keep

    def _map(self, descriptor: int) -> None:
        self.close()
        self._descriptor, self._memory = descriptor, mmap.mmap(descriptor, 0)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            os.close(self._descriptor)
            self._memory = None

    def scribble(self, seconds: float) -> int:
        """How many words were written."""
        memory, end, written = self._memory, time.monotonic() + seconds, 0
        while memory is not None and time.monotonic() < end:
            pages = self._find_pages()
            for _ in range(self._random.choice((1, 1, 10, 200))):
                place = self._random.choice(pages) + self._random.randrange(mmap.PAGESIZE // _WORD) * _WORD
                memory[place : place + _WORD] = self._choose(memory, place).to_bytes(_WORD, "little")
                written += 1
            time.sleep(self._random.choice((0.0, 0.001, 0.01)))
        return written

    def _find_pages(self) -> list[int]:
        """The first few pages of each range that has been written, and some of the others."""
        found, end = [0], 0
        with contextlib.suppress(OSError):  # there is no more data
            while True:
                start = os.lseek(self._descriptor, end, os.SEEK_DATA)
                end = os.lseek(self._descriptor, start, os.SEEK_HOLE)
                pages = range(start, end, mmap.PAGESIZE)
                found += [*pages[:4], *self._random.sample(pages, min(4, len(pages)))]
        return found

    def _choose(self, memory: mmap.mmap, place: int) -> int:
        known = int.from_bytes(memory[place : place + _WORD], "little")
        kind = self._random.randrange(6)
        if kind == 0:
            return self._random.choice((0, 1, _ONES, _ONES >> 1))
        if kind == 1:
            return self._random.getrandbits(64)
        if kind == 2:
            return known ^ 1 << self._random.randrange(64)
        if kind == 3:
            return (known + self._random.choice((-1, 1, 2, 4096, 1 << 20, 1 << 32))) & _ONES
        if kind == 4:
            return known & ~0xFFFFFFFF | self._random.getrandbits(32)
        other = self._random.randrange(0, mmap.PAGESIZE, _WORD)
        return int.from_bytes(memory[other : other + _WORD], "little")


def play(group: cd.Group, seed: int, seconds: float) -> None:
    """The same collectives and messages on all ranks, until one fails or the time is over."""
    choices, end = random.Random(seed), time.monotonic() + seconds
    after, before = (group.rank + 1) % SIZE, (group.rank - 1) % SIZE
    while group.broadcast(time.monotonic() < end, timeout=TIMEOUT):
        count = choices.choice((1, 100, 30_000, 400_000))
        value = np.full(count, group.rank, np.float32)
        match choices.randrange(7):
            case 0:
                group.all_reduce("sum", value, timeout=TIMEOUT)
            case 1:
                group.all_gather(value[: choices.randrange(1, count + 1)], timeout=TIMEOUT)
            case 2:
                group.all_to_all(value[: count // SIZE * SIZE], timeout=TIMEOUT)
            case 3:
                group.broadcast({"a": value, "b": [value[:3]]} if group.rank == 1 else None, 1, timeout=TIMEOUT)
            case 4:
                group.gather(value, 2, timeout=TIMEOUT)
            case 5:
                work = group.all_reduce("sum", [value, value], async_op=True, timeout=TIMEOUT)
                group.barrier(timeout=TIMEOUT)
                work.result()
            case _:
                sent = group.send(value, after, async_op=True, timeout=TIMEOUT)
                group.recv(before, timeout=TIMEOUT)
                sent.result()


def main(address: str, name: str, rank: int, rounds: int, seed: int) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    faulthandler.enable()
    scribbler = Scribbler(seed) if rank == SCRIBBLER else None
    outcomes: Counter[str] = Counter()
    with cd.connect(address) as session:
        for turn in range(rounds):
            faulthandler.dump_traceback_later(HANG_SECONDS / 2)
            group = session.join(f"{name}-{turn}", SIZE, rank=rank, timeout=HANG_SECONDS)
            writing = None
            if scribbler is not None:
                writing = threading.Thread(target=scribbler.scribble, args=(ROUND_SECONDS,))
                writing.start()
            try:
                play(group, seed + turn, ROUND_SECONDS)
                outcomes["went on"] += 1
            except (cd.errors.CollectiveError, MemoryError) as error:
                outcomes[type(error).__name__] += 1
            except ValueError as error:
                if CANNOT_BE_REBUILT not in str(error):
                    raise
                outcomes["cannot be rebuilt"] += 1
            finally:
                if writing is not None:
                    writing.join()
            with contextlib.suppress(cd.errors.CollectiveError):
                group.leave()
            faulthandler.cancel_dump_traceback_later()
    print(json.dumps(outcomes))
    return 0


@contextlib.contextmanager
def besiege(address: str, name: str, rounds: int, seed: int) -> Iterator[Counter[str]]:
    """Three ranks beside what is done in the block, at whose end they have ended: how often what came of honest ones.

    Raises:
        AssertionError: one has crashed, or did not end.
    """
    command = [sys.executable, "-m", "tests.fuzz.scribbles", address, name]
    ranks = [
        subprocess.Popen([*command, str(rank), str(rounds), str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(SIZE)
    ]
    outcomes: Counter[str] = Counter()
    try:
        yield outcomes
        end = time.monotonic() + HANG_SECONDS + rounds * 4 * TIMEOUT
        problems = []
        for rank, process in enumerate(ranks):
            try:
                told, said = process.communicate(timeout=max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                told, said = process.communicate()
            if process.returncode:
                problems.append(f"rank {rank} ended with {process.returncode}: {said.decode()[-3000:]}")
            elif rank != SCRIBBLER:
                outcomes.update(json.loads(told))
        assert not problems, f"seed {seed}:\n" + "\n".join(problems)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])))
