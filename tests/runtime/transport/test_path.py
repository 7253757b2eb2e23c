"""A dead path and a slow peer, told apart by the kernel of this host; real hosts are network namespaces."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.drills.hosts import DATA, Hosts, hosts_or_skip

from collectived_runtime.transport.path import measure_round_trip, measure_silence, read_round_trip, read_silence

_LOOKS = 70  # 50 ms apart: several probes of a second each

PEER = "import socket; s = socket.create_server(('', 7450)); print('ready', flush=True); c, _ = s.accept(); input()"
# Fills the connection, and says what it measures for each line that it reads.
SENDER = """
import socket, sys, time
from collectived_runtime.transport.path import measure_silence
connection = socket.create_connection((sys.argv[1], 7450))
connection.setblocking(False)
sent = 0
while sent < int(sys.argv[2]):
    try:
        sent += connection.send(bytes(1 << 16))
    except BlockingIOError:
        break
for line in sys.stdin:
    time.sleep(0.05)
    print(measure_silence(connection.fileno(), 1.0), flush=True)
"""


def info(retransmits: int, probes: int, milliseconds: int, since_data: int = 10**9) -> bytes:
    return struct.pack("=4B48xII", 1, 0, retransmits, probes, since_data, milliseconds)


@pytest.mark.parametrize(
    ("told", "silence"),
    [
        (info(0, 0, 3_600_000), 0.0),  # nothing was due
        (info(1, 0, 9000), 0.0),  # one packet may be lost
        (info(0, 1, 9000), 0.0),
        (info(2, 0, 9000), 9.0),
        (info(0, 3, 4500), 4.5),
        (info(1, 1, 2000), 2.0),
        (info(2, 0, 3_600_000, 500), 0.5),  # data has come, with old acknowledgements
    ],
)
def test_silence_is_what_several_packets_have_had_no_answer_for(told: bytes, silence: float) -> None:
    assert read_silence(told) == silence


def test_a_round_trip_is_the_kernels_and_waits_for_no_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as caller:
        assert 0 < measure_round_trip(caller.fileno()) < 0.1  # of the handshake: nobody accepts or reads
    one, other = socket.socketpair()
    with one, other:
        assert measure_round_trip(one.fileno()) == 0.0


def test_a_kernel_that_has_seen_no_round_trip_tells_none() -> None:
    assert read_round_trip(struct.pack("=148xI", 1500)) == 1.5e-3
    assert read_round_trip(struct.pack("=148xI", 0xFFFFFFFF)) == read_round_trip(bytes(104)) == 0.0


def test_other_sockets_are_never_silent() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert measure_silence(one.fileno(), 1.0) == 0.0
    with pytest.raises(OSError, match="Bad file descriptor"):
        measure_silence(-1, 1.0)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip(2) as made:
        yield made


@pytest.mark.parametrize("nbytes", [0, 1 << 28], ids=["nothing to send", "more than the connection takes"])
def test_a_peer_that_is_stopped_is_slow_and_a_path_that_is_cut_is_dead(hosts: Hosts, nbytes: int) -> None:
    def run(host: int, script: str, *words: str) -> subprocess.Popen[str]:
        command = [*hosts.inside(host), sys.executable, "-c", script, *words]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    with run(1, PEER) as peer:
        assert peer.stdout and peer.stdout.readline() == "ready\n"
        with run(0, SENDER, hosts.address(1, DATA), str(nbytes)) as sender:
            assert sender.stdin and sender.stdout

            def measure() -> float:
                assert sender.stdin and sender.stdout
                sender.stdin.write("\n")
                return float(sender.stdout.readline())

            try:
                os.kill(peer.pid, signal.SIGSTOP)
                assert [measure() for _ in range(_LOOKS)] == [0.0] * _LOOKS
                hosts.part(1, [DATA])
                while measure() < 2.0:
                    assert sender.poll() is None
                hosts.heal(1)
                while measure() > 0.0:
                    assert sender.poll() is None
            finally:
                os.kill(peer.pid, signal.SIGCONT)
                for process in (sender, peer):
                    process.kill()
