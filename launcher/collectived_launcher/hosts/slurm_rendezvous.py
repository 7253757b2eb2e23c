"""How tasks that srun started find each other: each offers itself as an agent, and the first one takes them all.

An offer is a file in a folder that all nodes share and only its user may read (0700, 0600): where the task listens, and
a key that was made for it. The dialler proves that it has read the file, and so does the task, before any message:

    task   → dialler   a fresh nonce
    dialler → task     HMAC-SHA256(key, "dial" + nonce), a fresh nonce
    task   → dialler   HMAC-SHA256(key, "task" + nonce)

Run as a program, with the path of an offer, it is a carrier: it dials and hands on what comes and goes.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import sys
import time
from pathlib import Path

from collectived_launcher.hosts.host_tasks import list_interfaces
from collectived_launcher.hosts.remote_host import RemoteCommand
from collectived_proto.private_files import write_atomically

_NONCE = 16
_PROOF = 32
_DIAL_SECONDS = 5.0  # for each address of a task
_HANDSHAKE_TIMEOUT = 10.0  # for the other side's proof
_CHUNK = 1 << 16
_POLL_INTERVAL = 0.1  # seconds


class RendezvousTimeout(Exception):
    """The tasks did not meet; the text says where they looked."""


def make_remote_command(offer: Path) -> RemoteCommand:
    return RemoteCommand(
        "srun", (sys.executable, "-P", "-m", "collectived_launcher.hosts.slurm_rendezvous", str(offer))
    )


def offer_agent(path: Path, within: float) -> socket.socket:
    """Offer this process as an agent, and return the connection of the dialler that took it.

    Raises:
        RendezvousTimeout: no dialler came within so many seconds.
        OSError: the offer cannot be written.
    """
    key = secrets.token_bytes(32)
    deadline = time.monotonic() + within
    with socket.create_server(("", 0)) as listener:
        names = [os.uname().nodename, *(one.address for one in list_interfaces())]
        _write(path, {"names": names, "port": listener.getsockname()[1], "key": key.hex()})
        try:
            while (left := deadline - time.monotonic()) > 0:
                listener.settimeout(left)
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    break
                if _authenticate_dialler(connection, key):
                    return connection
                connection.close()
            raise RendezvousTimeout(
                f"the first task of this step did not come for the offer {path} within {within:g} s"
            )
        finally:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the last one removes it: they are taken only when all are there
                path.parent.rmdir()


def await_offers(folder: Path, numbers: list[int], within: float) -> list[Path]:
    """The offers of these tasks, in this order.

    Raises:
        RendezvousTimeout: some did not make theirs.
    """
    paths = [folder / str(number) for number in numbers]
    deadline = time.monotonic() + within
    while missing := [path.name for path in paths if not path.exists()]:
        if time.monotonic() > deadline:
            raise RendezvousTimeout(
                f"tasks {', '.join(missing)} of this step made no offer in {folder} within {within:g} s: is it a "
                "folder that all nodes share? Otherwise call collectived launch without srun"
            )
        time.sleep(_POLL_INTERVAL)
    return paths


def _write(path: Path, said: dict[str, object]) -> None:
    """Write a file whole or not at all, and readable by this user alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_uid != os.getuid() or path.parent.stat().st_mode & 0o077:
        raise PermissionError(f"{path.parent} must be your directory with mode 0700")
    write_atomically(path, json.dumps(said))


def _compute_proof(key: bytes, side: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, side + nonce, "sha256")


def _authenticate_dialler(connection: socket.socket, key: bytes) -> bool:
    """The task's side: whether the dialler has the key."""
    connection.settimeout(_HANDSHAKE_TIMEOUT)
    nonce = secrets.token_bytes(_NONCE)
    with contextlib.suppress(OSError):
        connection.sendall(nonce)
        shown = _receive_exactly(connection, _PROOF + _NONCE)
        if hmac.compare_digest(shown[:_PROOF], _compute_proof(key, b"dial", nonce)):
            connection.sendall(_compute_proof(key, b"task", shown[_PROOF:]))
            connection.settimeout(None)
            return True
    return False


def _dial(said: dict[str, object]) -> socket.socket:
    """The first one's side.

    Raises:
        OSError: no task answers, or another process does.
    """
    names, port, key = said["names"], said["port"], bytes.fromhex(str(said["key"]))
    assert isinstance(names, list) and isinstance(port, int)
    failures = []
    for name in names:
        try:
            connection = socket.create_connection((name, port), _DIAL_SECONDS)
        except OSError as error:
            failures.append(f"{name}: {error.strerror or error}")
            continue
        with contextlib.suppress(OSError):
            connection.settimeout(_HANDSHAKE_TIMEOUT)
            nonce, mine = _receive_exactly(connection, _NONCE), secrets.token_bytes(_NONCE)
            connection.sendall(_compute_proof(key, b"dial", nonce) + mine)
            if hmac.compare_digest(_receive_exactly(connection, _PROOF), _compute_proof(key, b"task", mine)):
                connection.settimeout(None)
                return connection
        connection.close()
        failures.append(f"{name}: another process answers there")
    raise OSError(f"the task on {names[0]} cannot be reached: {'; '.join(failures)}")


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        data = connection.recv(size - len(found))
        if not data:
            raise ConnectionResetError("hung up")
        found += data
    return found


def _forward(connection: socket.socket) -> None:
    """Until the task hangs up; the end of our input is handed on, too."""
    inputs = [0, connection.fileno()]
    while True:
        readable, _, _ = select.select(inputs, [], [])
        if connection.fileno() in readable:
            data = connection.recv(_CHUNK)
            if not data:
                return
            while data:
                data = data[os.write(1, data) :]
        if 0 in readable:
            data = os.read(0, _CHUNK)
            if data:
                connection.sendall(data)
            else:
                connection.shutdown(socket.SHUT_WR)
                inputs.remove(0)


def main() -> int:
    try:
        with _dial(json.loads(Path(sys.argv[1]).read_text())) as connection:
            _forward(connection)
    except (OSError, ValueError, KeyError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
