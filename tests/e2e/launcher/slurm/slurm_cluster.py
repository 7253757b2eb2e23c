"""A Slurm of our own on this machine: munged, slurmctld and two slurmd that stand for two nodes. It takes root."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")
PATIENCE = 60.0
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

_CONFIG = """
ClusterName=throwaway
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
{nodes}
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


class Missing(Exception):
    """Why there is no Slurm here."""


class Cluster:
    """Nodes n1 and n2, both on this machine; `environment` is for commands such as sbatch.

    Raises:
        Missing: a program is not installed, we are not root, or it does not come up.
    """

    def __init__(self) -> None:
        if missing := [name for name in NEEDED if not shutil.which(name, path=_PATH)]:
            raise Missing(f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)")
        if os.getuid() != 0:
            raise Missing("Slurm's daemons start processes for users: it takes root")
        self.folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}
        for name in [name for name in self.environment if name.startswith("SLURM_") and name != "SLURM_CONF"]:
            del self.environment[name]
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        controller, *nodes = _free_ports(3)
        host = socket.gethostname()
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (self.folder / "munge.key").chmod(0o600)
        lines = [
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={os.cpu_count()} State=UNKNOWN"
            for number, port in enumerate(nodes, 1)
        ]
        text = _CONFIG.format(host=host, user="root", folder=self.folder, controller=controller, nodes="\n".join(lines))
        (self.folder / "slurm.conf").write_text(text)
        munge = (
            "--foreground",
            "--force",
            f"--key-file={self.folder}/munge.key",
            f"--socket={self.folder}/munge.socket",
        )
        files = (f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munged.seed")
        self._run("munged", *munge, *files, f"--log-file={self.folder}/munged.log")
        self._until(lambda: (self.folder / "munge.socket").exists(), "munged made no socket")
        self._run("slurmctld", "-D")
        for number in (1, 2):
            self._run("slurmd", "-D", "-N", f"n{number}")
        self._until(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", "the nodes did not become idle")

    def _run(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            program = shutil.which(name, path=_PATH)
            assert program
            self._daemons.append(
                subprocess.Popen(
                    [program, *words], env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
            )

    def _until(self, reached: object, otherwise: str) -> None:
        assert callable(reached)
        deadline = time.monotonic() + PATIENCE
        while not reached():
            if time.monotonic() > deadline:
                said = "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.out"))
                raise Missing(f"{otherwise}:\n{said}")
            time.sleep(0.1)

    def ask(self, *words: str) -> str:
        """What a command of Slurm's prints; '' while there is no answer."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=PATIENCE)
        return done.stdout.strip()

    def close(self) -> None:
        self.ask("scancel", "--full", "-u", "root")
        deadline = time.monotonic() + 20
        while self.ask("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


if __name__ == "__main__":  # a Slurm to play with: prints what to set, until its input ends
    import sys

    cluster = Cluster()
    try:
        print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}", flush=True)
        sys.stdin.read()
    finally:
        cluster.close()
