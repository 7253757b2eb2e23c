"""Sends and recvs: numbered apart from the group's instances, and received as they were described."""

from __future__ import annotations

from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import collectived as cd
from collectived.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.types import Recv, Send

SUCCESSOR = 101
Point = namedtuple("Point", "x y")


def silent(ring: messages.Submit) -> list[bytes]:
    return []


def complete_all(far: Any) -> None:
    for ring in far.rings:
        for answer in far.complete(ring):
            far.doorbell.send(answer)


def test_they_have_numbers_of_their_own(make: Any) -> None:
    setting = make(size=2)
    setting.far.comes = 7
    group = setting.group
    group.barrier()
    assert group.send(np.ones(3), 1) is None
    assert group.all_reduce("sum", 1) == 2
    assert group.recv(1) == 7
    assert group.send([1, None], to=1, tag=(1 << 32) - 1) is None
    assert [ring.instance for ring in setting.far.rings] == [
        0,
        messages.P2P_BASE,
        1,
        messages.P2P_BASE + 1,
        messages.P2P_BASE + 2,
    ]
    operations = [collective.operation for collective, _ in setting.far.prepared.values()]
    assert operations[1:2] == [Send(1, 0)] and operations[3:] == [Recv(1, 0), Send(1, (1 << 32) - 1)]


def test_a_rank_may_send_to_itself(make: Any) -> None:
    setting = make(size=2)
    setting.group.send(1, to=0)
    setting.far.comes = 1
    assert setting.group.recv(0) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"to": 2}, ValueError, "to must be a rank of this group, 0 to 1, got 2"),
        ({"to": -1}, ValueError, "to must be a rank"),
        ({"to": None}, TypeError, "to must be a rank of this group, 0 to 1, got None"),
        ({"to": 1, "tag": -1}, ValueError, "tag must be a whole number from 0 to 4294967295, got -1"),
        ({"to": 1, "tag": 1 << 32}, ValueError, "tag must be"),
        ({"to": 1, "tag": 1.0}, TypeError, "tag must be"),
        ({"source": 2}, ValueError, "source must be a rank of this group, 0 to 1, got 2"),
        ({"source": 0, "tag": -1}, ValueError, "tag must be"),
        ({"source": 0, "out": 3.0}, TypeError, "out is a float: expected a NumPy array"),
        ({"source": 0, "out": [np.broadcast_to(1.0, 3)]}, ValueError, r"out\[0\] is read-only"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_before_anything_is_sent(
    make: Any, arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    setting = make(size=2)
    with pytest.raises(error, match=says):
        setting.group.recv(**arguments) if "source" in arguments else setting.group.send(1, **arguments)
    assert setting.far.rings == []


def test_every_kind_of_value_is_sent(make: Any) -> None:
    setting = make(size=2)
    setting.group.send({"a": True, "b": [np.ones(2, np.complex64), None]}, 1)
    collective, _ = setting.far.prepared[1]
    assert collective.structure == "{'a': *, 'b': [*, None]}"
    assert [leaf.dtype.label for leaf in collective.leaves] == ["bool", "complex64"]


def test_the_input_of_a_send_is_copied_at_submission(make: Any) -> None:
    setting = make(size=2)
    setting.far.answer = silent
    value = np.ones(3)
    work = setting.group.send(value, 1, async_op=True)
    value[:] = 7
    setting.far.until(lambda: len(setting.far.rings) == 1)
    assert setting.far.given(setting.far.rings[0], 0).tolist() == [1, 1, 1]
    assert not work.done()
    complete_all(setting.far)
    assert work.wait() is None and list(work.as_completed()) == []


def test_a_recv_fills_out(make: Any) -> None:
    setting = make(size=2)
    setting.far.comes = {"p": Point(np.arange(3.0), [np.ones((2, 2), np.int8)]), "n": 5}
    out: dict[str, Any] = {"p": Point(np.zeros(3), [np.zeros((2, 2), np.int8, order="F")]), "n": np.zeros((), np.int64)}
    result = setting.group.recv(1, out=out)
    assert result is out and type(out["p"]) is Point
    assert out["p"].x.tolist() == [0, 1, 2] and out["p"].y[0].tolist() == [[1, 1], [1, 1]] and out["n"] == 5


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ([np.zeros(3)], r"out has the structure \[\*\], expected \*"),
        (np.zeros(4), r"out is float64\[4\], the result is float64\[3\]"),
        (np.zeros(3, np.float32), r"out is float32\[3\], the result is float64\[3\]"),
    ],
    ids=["structure", "shape", "dtype"],
)
def test_what_does_not_fit_out_leaves_it_as_it_is(make: Any, out: Any, says: str) -> None:
    setting = make(size=2)
    setting.far.comes = np.ones(3)
    with pytest.raises(ValueError, match=says) as caught:
        setting.group.recv(1, out=out)
    assert type(caught.value) is ValueError, "no other rank is told"
    work = setting.group.recv(1, out=out, async_op=True)
    for ask in (work.result, work.result, lambda: list(work.as_completed())):
        with pytest.raises(ValueError, match=says):
            ask()
    assert work.done() and work.exception() is None, "the collective itself went well"
    assert not np.any(out)
    assert setting.group.recv(1).tolist() == [1, 1, 1], "the group goes on"


def test_hundreds_of_them_may_be_in_flight_beside_64_collectives(make: Any) -> None:
    setting = make(size=2)
    far, group = setting.far, setting.group
    far.answer = silent
    far.comes = np.ones(3)
    works = [group.recv(1, async_op=True) for _ in range(300)]
    works += [group.barrier(async_op=True) for _ in range(64)]
    works += [group.send(number, 1, async_op=True) for number in range(100)]
    far.until(lambda: len(far.rings) == 464)
    with ThreadPoolExecutor(1) as pool:  # nobody has room for so many completions at once
        completing = pool.submit(complete_all, far)
        cd.wait(works)
        completing.result(10)
    far.answer = lambda ring: None
    group.send(1, 1)
    group.barrier()
    assert [ring.instance for ring in far.rings[-2:]] == [messages.P2P_BASE + 400, 64]


def test_a_verdict_on_an_instance_does_not_end_them_before_their_own_word_comes(make: Any) -> None:
    setting = make(size=2)
    far, group = setting.far, setting.group
    far.answer = silent
    post, instance = group.send(np.ones(2), 1, async_op=True), group.barrier(async_op=True)
    far.until(lambda: len(far.rings) == 2)
    verdict = far.verdict(Code.UNAVAILABLE, "rank 1 is lost", 0)
    far.doorbell.send(far.failed(0, verdict))
    with pytest.raises(cd.errors.UnavailableError):
        instance.wait()
    assert not post.done(), "the worker may still be reading its input"
    far.doorbell.send(far.failed(messages.P2P_BASE, verdict))
    with pytest.raises(cd.errors.UnavailableError, match="rank 1 is lost"):
        post.wait()
    with pytest.raises(cd.errors.UnavailableError, match="rank 1 is lost"):
        group.recv(1)


def test_they_begin_anew_in_the_successor(make: Any) -> None:
    setting = make(size=2)
    far, group = setting.far, setting.group
    verdict = far.verdict(Code.INVALID_ARGUMENT, "rank 1 differs", 0, successor=SUCCESSOR)
    group.send(1, 1)
    far.answer = lambda ring: [far.failed(ring.instance, verdict)] if ring.generation == 100 else None
    with pytest.raises(cd.errors.InvalidArgumentError):
        group.barrier()
    group.send(1, 1)
    assert [(ring.generation, ring.instance) for ring in far.rings] == [
        (100, messages.P2P_BASE),
        (100, 0),
        (SUCCESSOR, messages.P2P_BASE),
    ]


def test_an_abort_ends_them(make: Any) -> None:
    setting = make(size=2)
    setting.far.answer = silent
    work = setting.group.recv(1, async_op=True)
    setting.group.abort("enough")
    with pytest.raises(cd.errors.AbortedError, match="enough"):
        work.wait()


def test_an_unanswered_recv_is_given_up_after_its_deadline_and_named_for_people(make: Any) -> None:
    setting = make(size=2)
    setting.far.answer = silent
    with pytest.raises(
        cd.errors.DeadlineExceededError, match=r"recv\(source=1, tag=0\) \(message 0 of group 'train'"
    ) as caught:
        setting.group.recv(1, options=cd.CommunicationOptions(timeout_seconds=0.05))
    assert caught.value.instance == -1 and caught.value.verdict is not None
    assert caught.value.verdict.from_instance == 0 and caught.value.op == "recv(source=1, tag=0)"


def test_a_work_says_which_message_it_is(make: Any) -> None:
    setting = make(size=2)
    setting.group.send(1, 1)
    work = setting.group.send(1, 1, tag=4, async_op=True)
    work.wait()
    assert repr(work).startswith("<Work send(to=1, tag=4) message 1 from test_collectives_send_recv.py:")
