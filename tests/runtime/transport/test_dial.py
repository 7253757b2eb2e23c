"""What is said where a link cannot be had, and whether anybody is to blame for it."""

from __future__ import annotations

import errno
import os

import pytest

from collectived_runtime.transport.dial import DialRequest
from collectived_runtime.transport.hello import HandshakeCut, HelloRefused, LinkHello
from collectived_runtime.transport.link import LinkBroken, LinkRefused


def failed(why: Exception | str) -> LinkBroken:
    told: list[LinkBroken] = []
    hello = LinkHello(0, 1, 7, 100, 3, bytes(16))
    DialRequest(("fe80::1", 7452), hello, lambda link: None, told.append).fail(why)
    return told[0]


def system(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@pytest.mark.parametrize(
    ("why", "text"),
    [
        (system(errno.ECONNREFUSED), "it cannot be reached: [fe80::1]:7452: Connection refused"),
        (system(errno.EHOSTUNREACH), "it cannot be reached: [fe80::1]:7452: No route to host"),
        (system(errno.ETIMEDOUT), "it cannot be reached: [fe80::1]:7452: Connection timed out"),
        (TimeoutError("it does not answer"), "it cannot be reached: [fe80::1]:7452: it does not answer"),
    ],
)
def test_who_does_not_listen_or_answer_may_be_lost(why: Exception, text: str) -> None:
    error = failed(why)
    assert (type(error), error.peer, str(error)) == (LinkBroken, 1, text)


@pytest.mark.parametrize(
    ("why", "text"),
    [
        (HandshakeCut("it hung up"), "no handshake with [fe80::1]:7452: it hung up"),
        (HelloRefused("no secret"), "no handshake with [fe80::1]:7452: no secret"),
        (system(errno.ECONNRESET), "no handshake with [fe80::1]:7452: Connection reset by peer"),
        (system(errno.EMFILE), "[fe80::1]:7452 cannot be dialled from there: Too many open files"),
        ("no such host", "[fe80::1]:7452 cannot be dialled from there: no such host"),
        (OverflowError("odd"), "[fe80::1]:7452 cannot be dialled from there: odd"),
    ],
)
def test_a_refusal_and_what_this_host_lacks_are_no_loss_of_the_peer(why: Exception | str, text: str) -> None:
    error = failed(why)
    assert (type(error), error.peer, str(error)) == (LinkRefused, 1, text)
