"""`python -m benchmarks.coordinator_load`: one coordinator, thousands of simulated workers over gRPC.

They attach, each over a connection of its own, form one group of all, beat at the usual interval, and lose one of their
ranks. The coordinator is a real process. The simulated workers are a few processes on the same host, and take their
share of its processors.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import conditions
from benchmarks.environments import ROOT
from benchmarks.load.workers import SECRET
from benchmarks.page import write
from benchmarks.verdicts import Line, table

HEARTBEAT_SECONDS = 5.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Coordinator:
    """A real one, listening on the loopback."""

    def __init__(self, secret: str, options: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "collectived_runtime", "coordinator", "--listen", "127.0.0.1:0", "--attached"]
        self._process = subprocess.Popen([*command, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{secret}\n".encode())
        self._process.stdin.flush()
        line = self._process.stdout.readline().decode()
        self.address: str = json.loads(line.removeprefix("ready "))["address"]
        self.pid: int = self._process.pid

    def cpu(self) -> float:
        """Seconds of processor time until now."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory(self, field: str = "VmHWM") -> float:
        """Resident memory in MiB: the most there ever was, or `VmRSS`, what there is."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) / 1024
        raise ValueError(f"the kernel has no {field} of process {self.pid}")

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)


class Fleets:
    """The processes that are the workers."""

    def __init__(self, address: str, secret: str, total: int, processes: int) -> None:
        each = -(-total // processes)
        self._children = []
        for first in range(0, total, each):
            numbers = map(str, (first, min(each, total - first), total))
            self._children.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.load.workers", address, *numbers],
                    cwd=ROOT,
                    env={**os.environ, SECRET: secret},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )

    def ask(self, *order: object) -> list[dict[str, Any]]:
        """Order all of them to do something at the same time. Return their answers."""
        for child in self._children:
            assert child.stdin
            child.stdin.write(json.dumps(order).encode() + b"\n")
            child.stdin.flush()
        answers = []
        for child in self._children:
            assert child.stdout
            line = child.stdout.readline()
            if not line:
                raise SystemExit(f"a process of simulated workers ended at {order}")
            answers.append(json.loads(line))
        return answers

    def seconds(self, *order: object) -> float:
        """From the first one's start to the last one's end."""
        answers = self.ask(*order)
        ends = max(answer["end"] for answer in answers)
        return float(ends - min(answer["begin"] for answer in answers))

    def close(self) -> None:
        for child in self._children:
            assert child.stdin and child.stdout
            child.stdin.close()
            child.stdout.close()
            if child.poll() is None:
                child.terminate()
            child.wait(10)


def measure(workers: int, processes: int, steady: float) -> list[Line]:
    secret = secrets.token_hex(16)
    coordinator = Coordinator(secret)
    fleets = Fleets(coordinator.address, secret, workers, processes)
    try:
        attached = fleets.seconds("attach", HEARTBEAT_SECONDS)
        say(f"{workers} workers are attached after {attached:.2f} s; {coordinator.memory():.0f} MiB")
        time.sleep(HEARTBEAT_SECONDS)
        before = coordinator.cpu()
        joined = fleets.seconds("join")
        cpu = coordinator.cpu() - before
        say(f"one group of all after {joined:.2f} s, of which the coordinator worked {cpu:.2f} s")
        time.sleep(HEARTBEAT_SECONDS)
        before, begin = coordinator.cpu(), time.monotonic()
        time.sleep(steady)
        share = (coordinator.cpu() - before) / (time.monotonic() - begin)
        say(f"heartbeats every {HEARTBEAT_SECONDS:.0f} s take {share:.1%} of a core")
        told = fleets.seconds("lose", workers // 2)
        say(f"all members have the verdict after {told:.2f} s")
        totals = fleets.ask("totals")
        received = sum(answer["bytes"] for answer in totals) / (1 << 20)
        memory = coordinator.memory()
        say(f"{received:.0f} MiB were sent; at most {memory:.0f} MiB resident, now {coordinator.memory('VmRSS'):.0f}")
        fleets.ask("close")
    finally:
        fleets.close()
        coordinator.close()
    return [
        Line(f"{workers} workers attach", attached, "≤", 5.0, "s"),
        Line(f"{workers} ranks on as many workers join one group", joined, "≤", 5.0, "s"),
        Line("heartbeats at the default interval, share of one core", share * 100, "≤", 20.0, "%"),
        Line("most resident memory of the coordinator", memory, "<", 500.0, "MiB"),
        Line("a rank is lost: verdict to all", told, "≤", 1.0, "s"),
    ]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coordinator_load", description=__doc__)
    parser.add_argument("--workers", type=int, default=4096)
    parser.add_argument("--processes", type=int, default=4, help="that simulate them")
    parser.add_argument("--steady", type=float, default=20.0, metavar="SECONDS", help="how long heartbeats are watched")
    parser.add_argument("--write", action="store_true", help="put the table into docs/internals/performance.md")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    lines = measure(options.workers, options.processes, options.steady)
    print(table(lines))
    if options.write:
        write("coordinator", f"{conditions.shown()}\n\n{table(lines)}")


if __name__ == "__main__":
    main()
