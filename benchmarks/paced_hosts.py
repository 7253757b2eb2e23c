"""Workers with links of a known speed between them. With a speed: root and iproute2 are needed."""

from __future__ import annotations

import secrets
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from collectived.testing.daemon import Daemon

_START_SECONDS = 60.0
_PIECE_BYTES = 16 << 10  # that go at once: what a token bucket lets pass beyond its rate is no link


@contextmanager
def paced_hosts(count: int, megabits: int | None, coordinator_options: Sequence[str] = ()) -> Iterator[list[str]]:
    """The addresses of workers, for clients of this host.

    Args:
        megabits: each worker is in a network namespace of its own, and sends so many Mbit/s, as a token bucket lets it;
            None: all are on the loopback.
    """
    with ExitStack() as stack:
        places = _make_namespaces(count, megabits, stack) if megabits else [("127.0.0.1", ())] * count
        folder, secret = stack.enter_context(tempfile.TemporaryDirectory(prefix="cd-")), secrets.token_hex(16)

        def start(*words: str, within: tuple[str, ...] = ()) -> str:
            daemon = Daemon([*words, "--job", "bench"], secret, within)
            stack.callback(daemon.close)
            return str(daemon.wait_ready(_START_SECONDS)["address"])

        at = f"unix:{Path(folder) / 'c.sock'}"
        coordinator = start("coordinator", "--listen", at, *coordinator_options)
        yield [
            start(
                *("worker", "--task", str(task), "--folder", folder, "--host-name", f"host{task}"),
                *("--coordinator", coordinator, "--link-listen", f"{address}:0"),
                within=inside,
            )
            for task, (address, inside) in enumerate(places)
        ]


def _make_namespaces(count: int, megabits: int, stack: ExitStack) -> list[tuple[str, tuple[str, ...]]]:
    """Hosts on one switch: the address of each, and what to put before a command that is to run there."""
    mark = f"cd{secrets.token_hex(3)}"
    switch, names = f"{mark}s", [f"{mark}h{number}" for number in range(count)]
    for name in (switch, *names):
        _run(f"ip netns add {name}")
        stack.callback(_run, f"ip netns del {name}")
    _run(f"ip -n {switch} link add bridge type bridge")
    _run(f"ip -n {switch} link set bridge up")
    for number, name in enumerate(names):
        _run(f"ip link add port{number} netns {switch} type veth peer name {mark}v netns {name}")
        _run(f"ip -n {switch} link set port{number} master bridge up")
        _run(f"ip -n {name} addr add 10.78.0.{number + 1}/24 dev {mark}v")
        _run(f"ip -n {name} link set {mark}v up")
        _run(f"ip -n {name} link set {mark}v gso_max_size {_PIECE_BYTES}")
        _run(f"tc -n {name} qdisc add dev {mark}v root tbf rate {megabits}mbit burst {2 * _PIECE_BYTES} latency 50ms")
    return [(f"10.78.0.{number + 1}", ("ip", "netns", "exec", name)) for number, name in enumerate(names)]


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, timeout=10)
