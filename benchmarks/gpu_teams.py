"""The contestants on one GPU: their daemons and ranks are started, ended, and begun anew where they fail."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant, Launch, Ports
from benchmarks.crew import Crew, Failed
from benchmarks.environments import ROOT
from benchmarks.gpu_figures import DEVICE, OURS, RAW, TORCH
from benchmarks.peers import OWNED
from collectived.testing.daemon import Daemon

FALLBACK = "the hint NCCL falls back"  # a worker logs it if NCCL carries nothing
_START_SECONDS = 40.0  # of a daemon, and of ranks
_ANSWER_SECONDS = 40.0  # of a rank
_MOST_STARTS = 3
_JOB = "bench"

StartDaemon = Callable[[Sequence[str], str, Sequence[str]], Daemon]
Start = Callable[[contextlib.ExitStack, list[Daemon]], Crew]  # puts what is to be ended, and daemons, into both


def as_host(number: int) -> dict[str, str]:
    """Variables by which NCCL takes a process for one of another host, as it demands of ranks on one GPU."""
    return {"NCCL_HOSTID": f"host{number}", "NCCL_SOCKET_IFNAME": "lo"}


@dataclass
class Field:
    """How contestants are started; tests have others.

    Attributes:
        module: that runs a rank.
        start_daemon: as `Daemon`.
    """

    module: str = "benchmarks.gpu_rank"
    start_daemon: StartDaemon = Daemon
    variables: dict[str, str] = field(default_factory=dict)

    def command(self, library: str) -> tuple[str, ...]:
        return (sys.executable, "-m", self.module, library)

    def environment(self, rank: int, ranks: int) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        return {**self.variables, "RANK": str(rank), "WORLD_SIZE": str(ranks), "PYTHONPATH": path}


class Team:
    """One contestant, as long as it has not failed too often.

    Attributes:
        variants: what it is measured with.
    """

    def __init__(self, name: str, variants: Sequence[str], start: Start) -> None:
        self.name = name
        self.variants = tuple(variants)
        self._start = start
        self._starts = 0
        self._stack = contextlib.ExitStack()
        self._crew: Crew | None = None
        self._daemons: list[Daemon] = []

    @property
    def versions(self) -> dict[str, str]:
        return {} if self._crew is None else self._crew.versions

    @property
    def falls_back(self) -> bool:
        """Whether a worker has said that NCCL does not carry what it was to carry."""
        return any(FALLBACK in daemon.log for daemon in self._daemons)

    def start(self) -> None:
        """Start it, unless it runs.

        Raises:
            Failed: it does not start, or has failed too often.
        """
        if self._crew is not None:
            return
        if self._starts >= _MOST_STARTS:
            raise Failed(f"it has failed {_MOST_STARTS} times")
        self._starts += 1
        try:
            self._crew = self._start(self._stack, self._daemons)
        except Failed:
            self.kill()
            raise
        except Exception as error:  # of a daemon
            self.kill()
            raise Failed(f"{type(error).__name__}: {error}") from error

    def ask(self, **order: Any) -> list[dict[str, Any]]:
        """The answers of all ranks.

        Raises:
            Failed: a rank could not do it. Where others may wait for it, all are ended, and `start` starts others.
        """
        self.start()
        assert self._crew is not None
        try:
            answers = self._crew.ask(**order)
        except Failed:
            self.kill()
            raise
        for rank, answer in enumerate(answers):
            if "error" in answer:
                if order["do"] == "turn":
                    self.kill()
                raise Failed(f"rank {rank}: {answer['error']}")
        return answers

    def kill(self) -> None:
        """End it at once: what a rank waits for may never come."""
        if self._crew is not None:
            self._crew.kill()
        self._end_daemons()

    def close(self) -> None:
        """End it in order."""
        if self._crew is not None:
            self._crew.close()
        self._end_daemons()

    def _end_daemons(self) -> None:
        self._crew, self._daemons = None, []
        stack, self._stack = self._stack, contextlib.ExitStack()
        with contextlib.suppress(Exception):  # a daemon that had to be killed
            stack.close()


def ours_on_one_worker(field: Field, ranks: int, variants: Sequence[str]) -> Team:
    """Ranks on the GPU of one worker, which folds them there."""
    return Team(OURS, variants, partial(_start_ours, field, [ranks], "AUTO"))


def ours_by_nccl(field: Field, variants: Sequence[str] = (OWNED,)) -> Team:
    """A rank on each of two workers, which NCCL takes for two hosts."""
    return Team(OURS, variants, partial(_start_ours, field, [1, 1], "NCCL"))


def raw_nccl(field: Field) -> Team:
    def launches(_: Path, ranks: int, ports: Ports) -> list[Launch]:
        return [
            Launch(field.command("gpu_nccl"), {**field.environment(rank, ranks), **as_host(rank)})
            for rank in range(ranks)
        ]

    return Team(RAW, ("",), lambda _, __: _crew(RAW, launches, 2))


def torch_nccl(field: Field) -> Team:
    def launches(_: Path, ranks: int, ports: Ports) -> list[Launch]:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports(1))}
        return [
            Launch(field.command("gpu_torch"), {**field.environment(rank, ranks), **as_host(rank), **meeting})
            for rank in range(ranks)
        ]

    return Team(TORCH, ("",), lambda _, __: _crew(TORCH, launches, 2))


def device_alone(field: Field, variants: Sequence[str]) -> Team:
    def launches(_: Path, ranks: int, ports: Ports) -> list[Launch]:
        return [Launch(field.command("gpu_device"), field.environment(0, 1))]

    return Team(DEVICE, variants, lambda _, __: _crew(DEVICE, launches, 1))


def _crew(name: str, launches: Callable[[Path, int, Ports], Sequence[Launch]], ranks: int) -> Crew:
    return Crew(Contestant(name, "gpus", "gpus", launches), ranks, _ANSWER_SECONDS, _START_SECONDS)


def _start_ours(
    field: Field, per_worker: Sequence[int], hint: str, stack: contextlib.ExitStack, daemons: list[Daemon]
) -> Crew:
    addresses, found = stack.enter_context(workers(field.start_daemon, len(per_worker)))
    daemons += found
    placed = [task for task, count in enumerate(per_worker) for _ in range(count)]
    group = f"gpus-{secrets.token_hex(3)}"

    def launches(_: Path, ranks: int, ports: Ports) -> list[Launch]:
        own = {"COLLECTIVED_JOB": _JOB, "COLLECTIVED_GROUP": group, "COLLECTIVED_BENCH_HINT": hint}
        return [
            Launch(
                field.command("gpu_ours"),
                {**field.environment(rank, ranks), **own, "COLLECTIVED_WORKER": addresses[task]},
            )
            for rank, task in enumerate(placed)
        ]

    try:
        return _crew(OURS, launches, len(placed))
    except Failed as failure:
        said = "".join(daemon.log for daemon in daemons).strip().splitlines()
        raise Failed(f"{failure}; the daemons said: {' / '.join(said[-3:]) or 'nothing'}") from failure


@contextlib.contextmanager
def workers(start: StartDaemon, count: int) -> Iterator[tuple[list[str], list[Daemon]]]:
    """A coordinator and workers that NCCL takes for so many hosts: addresses of the workers, and all daemons."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cd-"))
        secret, daemons = secrets.token_hex(16), []

        def daemon(words: Sequence[str], within: Sequence[str] = ()) -> str:
            made = start((*words, "--job", _JOB), secret, within)
            daemons.append(made)
            stack.callback(made.close)
            return str(made.wait_ready(_START_SECONDS)["address"])

        coordinator = daemon(("coordinator", "--listen", f"unix:{folder}/c.sock"))
        addresses = []
        for task in range(count):
            host = tuple(f"{name}={value}" for name, value in as_host(task).items())
            words = ("worker", "--task", str(task), "--host-name", f"host{task}", "--folder", folder)
            addresses.append(daemon((*words, "--coordinator", coordinator), ("env", *host)))
        yield addresses, daemons
