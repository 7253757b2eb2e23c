"""As Kubernetes would have it: daemons and clients run as nobody in particular, without capabilities, on a file system
that cannot be written but for the folder of their sockets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.security.conftest import ROOT, Start, needs_root

UID = 7450
CLOSED = """
set -e
mount --make-rprivate /
mount --bind "$PLACE" "$PLACE"
for point in $(awk '{print $5}' /proc/self/mountinfo); do
    case "$point" in "$PLACE"|/proc*|/dev*|/sys*) ;; *) mount -o remount,bind,ro "$point" 2>/dev/null || true ;; esac
done
! touch /tmp/written 2>/dev/null
exec setpriv --reuid 7450 --regid 7450 --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs "$@"
"""
CLIENT = """
import os, sys
import collectived as cd
with cd.connect(sys.argv[1]) as session, session.join("alone", 1) as group:
    print(os.getuid(), session.transport, group.all_reduce("sum", 21.0) * 2)
for path in ("/tmp/written", "/var/tmp/written"):
    try:
        open(path, "w")
        print("written")
    except OSError:
        pass
"""
pytestmark = [needs_root, pytest.mark.timeout(120)]


@pytest.fixture
def closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """What runs a command in there; its folder that can be written is `folder`."""
    for tool in ("unshare", "setpriv"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} (util-linux) is not installed")
    os.chown(folder, UID, UID)
    monkeypatch.setenv("PLACE", str(folder))
    words = ("unshare", "--mount", "sh", "-c", CLOSED, "sh")
    tried = subprocess.run([*words, sys.executable, "-c", "import collectived"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"nothing can be closed up here: {tried.stderr.strip().splitlines()[-1:]}")
    return words


def test_daemons_and_clients_need_no_privilege_and_no_place_to_write(
    folder: Path, start: Start, closed: tuple[str, ...]
) -> None:
    there = start("coordinator", "--listen", f"unix:{folder}/c.sock", within=closed).wait_ready(30)
    words = ("worker", "--task", "0", "--folder", str(folder / "w"), "--coordinator", there["address"])
    said = start(*words, within=closed).wait_ready(30)
    for one in (there, said):
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{one['pid']}/status").read_text().splitlines()
            if ":\t" in line
        )
        assert status["Uid"].split() == [str(UID)] * 4 and status["NoNewPrivs"] == "1"
        assert {status[name] for name in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")} == {"0" * 16}
    done = subprocess.run(
        [*closed, sys.executable, "-c", CLIENT, said["address"]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == f"{UID} shared memory 42.0\n", done.stderr
