"""Hosts that are reached over ssh: OpenSSH's server on loopback addresses, with keys made for one test session."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
_PATIENCE = 20.0
_ATTEMPTS = 5

_CONFIG = """
ListenAddress {address}
Port {port}
HostKey {folder}/host-key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
ClientAliveInterval 5
SetEnv XDG_RUNTIME_DIR={runtime} {more}
"""
_CLIENT = """
Host {name}
    HostName {address}
    Port {port}
    IdentityFile {folder}/key
"""
_ALL = """
Host *
    IdentitiesOnly yes
    IdentityAgent none
    StrictHostKeyChecking yes
    UserKnownHostsFile {folder}/known-hosts
"""


class Missing(Exception):
    """Why there are no such hosts here."""


class Network:
    """Hosts that `ssh -F config` reaches by their names. Each has a runtime directory of its own.

    Raises:
        Missing: OpenSSH is not installed, or its server does not run here.
    """

    def __init__(self, hosts: dict[str, str], inside: dict[str, Sequence[str]] | None = None) -> None:
        if not SSHD or not shutil.which("ssh") or not shutil.which("ssh-keygen"):
            raise Missing(
                "OpenSSH's server, client and ssh-keygen are not all installed (apt-get install openssh-server)"
            )
        self.folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))
        self.config = self.folder / "config"
        self.runtime: dict[str, Path] = {}
        self._inside = inside or {}
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name in ("key", "host-key"):
                _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(self.folder / name))
            if os.getuid() == 0:
                Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # the server's own, which its package makes at boot
            for name, address in hosts.items():
                self._serve(name, address)
            with self.config.open("a") as file:
                file.write(_ALL.format(folder=self.folder))
        except BaseException:
            self.close()
            raise

    def ssh(self) -> str:
        """What `--ssh` is given."""
        return f"ssh -F {self.config}"

    def _serve(self, name: str, address: str) -> None:
        runtime = self.folder / f"run-{name}"
        runtime.mkdir(mode=0o700)
        self.runtime[name] = runtime
        for _ in range(_ATTEMPTS):  # nobody can reserve a port for sshd
            port = _free_port(address) if name not in self._inside else 22
            config = self.folder / f"sshd-{name}"
            config.write_text(
                _CONFIG.format(
                    address=address, port=port, folder=self.folder, runtime=runtime, more=f"HOST_NAME={name}"
                )
            )
            with (self.folder / f"log-{name}").open("wb") as log:
                command = [*self._inside.get(name, ()), str(SSHD), "-D", "-e", "-f", str(config)]
                self._servers[name] = server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
            if self._answers(server, address, port, name):
                break
        else:
            raise Missing(f"OpenSSH's server does not run here: {(self.folder / f'log-{name}').read_text().strip()}")
        key = (self.folder / "host-key.pub").read_text().split()
        with (self.folder / "known-hosts").open("a") as file:
            file.write(f"[{address}]:{port} {key[0]} {key[1]}\n{address} {key[0]} {key[1]}\n")
        with self.config.open("a") as file:
            file.write(_CLIENT.format(name=name, address=address, port=port, folder=self.folder))

    def _answers(self, server: subprocess.Popen[bytes], address: str, port: int, name: str) -> bool:
        deadline = time.monotonic() + _PATIENCE
        while server.poll() is None and time.monotonic() < deadline:
            if b"listening" in (self.folder / f"log-{name}").read_bytes():
                return True
            time.sleep(0.02)
        return False

    def connections(self, name: str) -> list[int]:
        """The server's processes, one or two for each connection that it has."""
        return children(self._servers[name].pid)

    def close(self) -> None:
        for server in self._servers.values():
            for pid in children(server.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            server.terminate()
            server.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def children(pid: int) -> list[int]:
    """Those of a process, and theirs."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *children(int(child))]
    return found


def _free_port(address: str) -> int:
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=_PATIENCE, stdin=subprocess.DEVNULL)


if __name__ == "__main__":  # hosts to play with: prints what to give to `collectived launch`
    network = Network({"alpha": "127.0.0.1", "beta": "127.0.0.2"})
    try:
        print(f"--ssh '{network.ssh()}' --hosts alpha:2,beta:2", flush=True)
        sys.stdin.read()
    finally:
        network.close()
