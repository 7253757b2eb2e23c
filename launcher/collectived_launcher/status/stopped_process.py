"""Whether the process behind a Unix socket has been stopped (Ctrl-Z, SIGSTOP, a debugger): then it will not answer."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_CONNECT_SECONDS = 0.05


def find_stopped_pid(address: str) -> int:
    """Its pid; 0: it runs, or nobody can tell."""
    if not address.startswith("unix:"):
        return 0
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_CONNECT_SECONDS)
        sock.connect(address.removeprefix("unix:"))
        pid: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return pid if state in ("T", "t") else 0
    return 0
