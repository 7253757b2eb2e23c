"""Wrong credentials and nonsense of one user of a host shut out nobody who knows the secret, or has been invited.

The worker is started by root, BOB shows what is wrong, and ANN is honest.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.auth.test_login_throttling import ADDRESS
from tests.e2e.security.conftest import ROOT, SECRET, Start, asked, needs_root

import collectived as cd

ANN, BOB = 54320, 54321
MOST = 5
STEP_ASIDE_SECONDS = 5.0  # for which a door closed to everybody when one guest had talked nonsense
pytestmark = [needs_root, pytest.mark.timeout(150)]

# Shows wrong tokens to servers of gRPC, and wrong proofs to a port for links.
WRONG = """
import encodings.idna, os, socket, sys
import grpc, grpc.aio
from grpc import _channel
from collectived_runtime.transport.hello import ANSWER_BYTES, NONCE_BYTES, LinkHello, proof
uid, times, source, links, *servers = sys.argv[1:]
os.setgroups([]); os.setgid(int(uid)); os.setuid(int(uid))
told = []
for address in servers:
    with grpc.insecure_channel(address) as channel:
        for _ in range(int(times)):
            try:
                channel.unary_unary("/collectived.v1.Worker/Status")(b"", metadata=[("authorization", "Bearer wrong")])
            except grpc.RpcError as error:
                told.append(error.code().name)
for _ in range(int(times)):
    host, _, port = links.rpartition(":")
    with socket.create_connection((host, int(port)), 20, (source, 0)) as guest:
        said = LinkHello(0, 1, 7, 8, 0, os.urandom(NONCE_BYTES)).encode()
        guest.sendall(said)
        nonce = guest.recv(ANSWER_BYTES, socket.MSG_WAITALL)[:NONCE_BYTES]
        guest.sendall(proof("wrong", "dial", said, nonce))
        told.append("let in" if guest.recv(1) else "refused")
print(*sorted(set(told)))
"""


@pytest.fixture
def show_wrong_credentials() -> Callable[..., str]:
    def show(*servers: str, links: str) -> str:
        command = [sys.executable, "-c", WRONG, str(BOB), str(MOST + 1), ADDRESS, links, *servers]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    return show


# Says nonsense at a door again and again, and nothing at all on some connections, until its input ends.
NONSENSE = """
import os, select, socket, sys
uid, door = sys.argv[1:]
os.setgroups([]); os.setgid(int(uid)); os.setuid(int(uid))
silent = []
said = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    guest.settimeout(10)
    try:
        guest.connect(door)
        if len(silent) < 40:
            silent.append(guest)
            continue
        guest.send(os.urandom(1 + said % 64))
        guest.recv(64)
        guest.close()
    except OSError:
        select.select([sys.stdin], [], [], 0.01)
    said += 1
    if said == 200:
        print("ready", flush=True)
"""


@pytest.fixture
def talk_nonsense() -> Iterator[Callable[[int, str], None]]:
    running: list[subprocess.Popen[str]] = []

    def begin(uid: int, door: str) -> None:
        command = [sys.executable, "-c", NONSENSE, str(uid), door]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

    yield begin
    for process in running:
        process.communicate()
        assert process.returncode == 0


def test_nonsense_of_one_guest_at_the_door_keeps_no_other_waiting(
    worker: Callable[..., dict[str, Any]], talk_nonsense: Callable[[int, str], None]
) -> None:
    said = worker("--allow-users", str(ANN), "--allow-users", str(BOB), mode=0o711)
    talk_nonsense(BOB, said["address"].removeprefix("unix:").replace("worker-0", "door-0"))
    for _ in range(3):
        began = time.monotonic()
        with cd.connect(said["address"]) as session:
            assert session.transport == "shared memory"
        assert time.monotonic() - began < STEP_ASIDE_SECONDS
    assert asked(said["address"], ANN, "collective")["collective"] == ("ok", "shared memory")


@pytest.mark.skipif(not ADDRESS, reason="this machine has no address but the loopback, which is not counted")
def test_wrong_credentials_of_a_neighbour_shut_out_no_worker_no_client_and_no_link(
    folder: Path, start: Start, show_wrong_credentials: Callable[..., str]
) -> None:
    limit = ("--max-login-failures", str(MOST))
    coordinator = start("coordinator", "--listen", f"{ADDRESS}:0", *limit).wait_ready(30)["address"]

    def worker(task: int) -> dict[str, Any]:
        where = ("--folder", f"{folder}/w{task}", "--listen", f"{ADDRESS}:0", "--link-listen", f"{ADDRESS}:0")
        return start("worker", "--task", str(task), "--coordinator", coordinator, *where, *limit).wait_ready(30)

    second = worker(1)
    remote = second["addresses"][-1]
    told = show_wrong_credentials(coordinator, remote, links=second["link_address"])
    assert told == "RESOURCE_EXHAUSTED UNAUTHENTICATED refused"
    assert asked(remote, ANN, "collective", shows=SECRET)["collective"][0] == "ok"
    first = worker(0)  # it attaches at once, in spite of what came from its address

    # worker 0 dials worker 1, from the address that has shown wrong proofs
    def collective(rank: int) -> float:
        with cd.connect((first, second)[rank]["address"]) as session, session.join("both", 2, rank=rank) as group:
            return float(group.all_reduce("sum", 21.0))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(collective, range(2))) == [42.0, 42.0]
