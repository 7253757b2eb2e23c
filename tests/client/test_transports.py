"""The ways to a worker."""

from __future__ import annotations

import socket
import threading
import traceback
from pathlib import Path

import pytest

from collectived.connection.rpc import JoinedGroup
from collectived.errors import UnavailableError
from collectived.transports import open_doorbell
from collectived_proto.types import GroupInfo, Member

GROUP = GroupInfo("g", 1, 1, (Member(0, "/job:worker/replica:0/task:0/device:CPU:0", 0, "here", 10),))


def test_the_socket_of_a_rank_that_cannot_enter_is_closed_though_the_error_is_kept(tmp_path: Path) -> None:
    path = str(tmp_path / "door")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(path)
        door.listen()

        def hang_up() -> None:
            with door.accept()[0] as guest:
                guest.recv(1 << 10)  # its token

        hanging_up = threading.Thread(target=hang_up)
        hanging_up.start()
        with pytest.raises(UnavailableError, match="it has closed the connection|Broken pipe") as caught:
            open_doorbell(JoinedGroup(GROUP, 0, path, b"token", True), "worker 0")
        hanging_up.join()
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert [local["sock"].fileno() for local in frames if "sock" in local and "joined" in local] == [-1]
