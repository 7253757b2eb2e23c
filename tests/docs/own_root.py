"""A shell of root whose changes of the system nobody else sees, and which are gone when it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WRITTEN = ("/etc", "/opt", "/usr/lib", "/var/lib")  # where pages put files
_FENCE = """
mount -t tmpfs none "$OWN"
for folder in {written}; do
    mkdir -p "$OWN$folder/new" "$OWN$folder/work"
    mount -t overlay overlay -o "lowerdir=$folder,upperdir=$OWN$folder/new,workdir=$OWN$folder/work" "$folder"
done
mount -t tmpfs none /run
"""


def run_as_root(script: str, folder: Path, place: Path | None = None, hosts: str = "") -> str:
    """What `bash -e` prints for this script, in a mount namespace of its own; `folder` is for what it writes.

    With names of `hosts` it has a network of its own too, in which all of them are this host and every port is free.
    Skips the test where nobody may do so.
    """
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a system of its own to change needs root and unshare (util-linux)")
    path = f"{Path(sys.executable).parent}:/usr/sbin:/sbin:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(folder), "OWN": str(folder), "LANG": "C.UTF-8"}
    network = ["--net"] if hosts else []
    command = ["unshare", "--mount", *network, "--propagation", "private", "bash", "-euo", "pipefail", "-c"]

    def shell(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, text], cwd=place, env=environment, text=True, capture_output=True, timeout=100, check=False
        )

    fence = _FENCE.format(written=" ".join(WRITTEN))
    if hosts:
        fence += f'ip link set lo up; echo "127.0.0.1 {hosts}" >> /etc/hosts\n'
    done = shell(fence + script)
    if done.returncode and shell(fence).returncode:
        pytest.skip(f"no file system can be laid over that of this machine: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
