"""A rank's doorbell, whose worker hangs up."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from collectived.shared.doorbell import Doorbell
from collectived.shared.segment_channel import SegmentChannel
from collectived_proto.ipc import messages
from collectived_proto.types import GroupInfo, Member

GROUP = GroupInfo("g", 1, 1, (Member(0, "/job:worker/replica:0/task:0/device:CPU:0", 0, "here", 10),))


@pytest.fixture
def ends() -> Iterator[tuple[Doorbell, socket.socket]]:
    """A doorbell of the only rank of a group, and its worker's end."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    near.setblocking(False)
    with near, far:
        yield Doorbell(near, GROUP, 0, "worker 0"), far


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_worker_that_hangs_up_before_its_first_message_may_have_waited_for_this_process(
    ends: tuple[Doorbell, socket.socket], has_answered: bool
) -> None:
    doorbell, far = ends
    if has_answered:
        far.send(messages.encode_bare(messages.MessageType.PONG))
    far.shutdown(socket.SHUT_RDWR)
    doorbell.poll()
    verdict = doorbell.rank_state.verdict
    assert verdict is not None and verdict.message.startswith("worker 0 is lost: it has closed the connection")
    assert ("this process took more than 10 s to connect" in verdict.message) != has_answered


def test_a_silent_worker_is_lost_for_a_rank_that_has_no_place_in_a_segment() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    near.setblocking(False)
    with near, far:
        channel = SegmentChannel(near, GROUP, 0, "worker 0")
        for _ in range(2):
            channel._ping()
        verdict = channel.rank_state.verdict
    assert verdict is not None and "it has not answered for 5 s when asked whether it lives" in verdict.message
