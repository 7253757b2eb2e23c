"""Work: what a started collective offers."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from typing import Any

import numpy as np
import pytest

import collectived as cd
from collectived.errors import Code
from collectived_proto.local import wire


def test_a_result_can_be_asked_for_again(make: Any) -> None:
    work = make().group.all_reduce("sum", [np.ones(2), None], async_op=True)
    first = work.result()
    assert first[0].tolist() == [2, 2] and first[1] is None
    assert work.wait() is first and work.done() and work.exception() is None


def test_ordinary_arrays_are_copied_at_submission(make: Any) -> None:
    setting = make()
    setting.far.answer = lambda ring: []
    value = np.ones(3)
    work = setting.group.all_reduce("sum", value, async_op=True)
    value[:] = 7
    setting.far.until(lambda: len(setting.far.rings) == 1)
    for answer in setting.far.complete(setting.far.rings[0]):
        setting.far.bell.send(answer)
    assert work.wait().tolist() == [2, 2, 2]


def test_when_only_their_timeout_passes_the_collective_goes_on(make: Any) -> None:
    setting = make()
    setting.far.answer = lambda ring: []
    work = setting.group.all_reduce("sum", 1, async_op=True)
    with pytest.raises(TimeoutError, match=r"all_reduce\(sum\) has not ended within 0.01 s") as caught:
        work.wait(0.01)
    assert not isinstance(caught.value, cd.errors.CollectiveError)
    with pytest.raises(TimeoutError):
        cd.wait([work], timeout=0)
    assert not work.done()
    for answer in setting.far.complete(setting.far.rings[0]):
        setting.far.bell.send(answer)
    assert work.wait(10) == 2


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_that_is_none_is_refused(make: Any, timeout: float) -> None:
    work = make().group.barrier(async_op=True)
    with pytest.raises(ValueError, match="timeout must not be negative or NaN"):
        work.wait(timeout)


def test_leaves_come_by_pack_last_leaves_first(make: Any) -> None:
    setting = make()
    far = setting.far
    far.answer = lambda ring: far.complete(ring)[:1]
    value = {"a": np.ones(1), "b": np.ones(2), "c": [np.ones(3), np.ones(4)]}
    work = setting.group.all_reduce("sum", value, async_op=True)
    arriving = work.as_completed()
    assert next(arriving)[0] == "['c'][1]"
    assert not work.done(), "the other pack has not ended"
    assert next(arriving)[0] == "['c'][0]"
    far.bell.send(wire.Done(0, 1, True, True, 1000, 0, 5000).encode())
    rest = dict(arriving)
    assert list(rest) == ["['b']", "['a']"]
    assert work.wait()["b"] is rest["['b']"]
    assert work.wait()["b"].tolist() == [2, 2]


def test_weights_of_a_complete_pack_are_updated_while_the_others_are_still_being_reduced(make: Any) -> None:
    setting = make()
    far = setting.far
    held: list[bytes] = []
    events: list[str] = []

    def hold(ring: wire.Ring) -> list[bytes]:
        held.extend(far.complete(ring))
        return []

    def complete_next_pack() -> None:
        events.append(f"pack {len(held)} is complete")
        far.bell.send(held.pop(0))

    far.answer = hold
    weights = {f"layer{number}": np.zeros(2) for number in range(6)}
    gradients = {name: np.full(2, float(number)) for number, name in enumerate(weights)}
    work = setting.group.all_reduce("sum", gradients, async_op=True)
    far.until(lambda: len(held) == 3)
    complete_next_pack()
    for number, (path, gradient) in enumerate(work.as_completed()):
        name = path[2:-2]
        weights[name] -= gradient
        events.append(name)
        if number in (1, 3):  # all of a pack has been used, and no other pack is complete
            assert not work.done()
            complete_next_pack()
    assert events == [
        *("pack 3 is complete", "layer5", "layer4"),
        *("pack 2 is complete", "layer3", "layer2"),
        *("pack 1 is complete", "layer1", "layer0"),
    ]
    assert [weights[name][0] for name in weights] == [-2.0 * number for number in range(6)]


def test_leaves_can_be_walked_again_after_the_result_was_collected(make: Any) -> None:
    work = make().group.all_reduce("sum", {"a": np.ones(1), "b": (2, None)}, async_op=True)
    result = work.wait()
    for _ in range(2):
        assert [
            (path, leaf is found)
            for (path, leaf), found in zip(work.as_completed(), (result["b"][0], result["a"]), strict=True)
        ] == [("['b'][0]", True), ("['a']", True)]


def test_as_completed_ends_in_the_collectives_error(make: Any) -> None:
    setting = make()
    far = setting.far
    verdict = far.verdict(Code.ABORTED, "rank 1 aborted", 0)
    far.answer = lambda ring: [*far.complete(ring)[:1], far.failed(0, verdict)]
    arriving = setting.group.all_reduce("sum", [1, 2, 3], async_op=True).as_completed()
    assert [next(arriving)[0], next(arriving)[0]] == ["[2]", "[1]"]
    with pytest.raises(cd.errors.AbortedError, match="rank 1 aborted"):
        next(arriving)


def test_callbacks_are_called_though_nobody_waits(make: Any) -> None:
    setting = make()
    called: list[tuple[str, int]] = []
    ended = threading.Event()
    work = setting.group.all_reduce("sum", 1, async_op=True)
    work.add_done_callback(lambda work: called.append(("first", work.result())))
    work.add_done_callback(lambda work: ended.set())
    assert ended.wait(10)
    work.add_done_callback(lambda work: called.append(("late", work.result())))
    assert called == [("first", 2), ("late", 2)]


def test_works_can_be_awaited(make: Any) -> None:
    group = make().group

    async def main() -> list[int]:
        works = [group.all_reduce("sum", number, async_op=True) for number in range(20)]
        return [await work for work in reversed(works)]

    assert asyncio.run(main()) == [2 * number for number in reversed(range(20))]


def test_waiting_for_several_raises_the_first_error_after_all_have_ended(make: Any) -> None:
    setting = make()
    far = setting.far
    verdict = far.verdict(Code.ABORTED, "rank 1 aborted", 1)
    answers: list[list[bytes] | None] = [None, [], [far.failed(1, verdict), far.failed(2, verdict)]]
    far.answer = lambda ring: answers[ring.instance]
    works = [setting.group.all_reduce("sum", 1, async_op=True) for _ in range(3)]
    with pytest.raises(cd.errors.AbortedError):
        cd.wait(works)
    assert [work.done() for work in works] == [True] * 3
    assert works[0].result() == 2


def test_an_error_nobody_collected_is_logged_once_and_raised_by_the_next_call(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    setting = make()
    far = setting.far
    verdict = far.verdict(Code.INVALID_ARGUMENT, "rank 1 differs", 0, successor=101)
    far.answer = lambda ring: [far.failed(ring.instance, verdict)] if ring.generation == 100 else None
    work = setting.group.barrier(async_op=True)
    far.until(lambda: len(far.rings) == 1)
    assert work.done()
    with caplog.at_level(logging.ERROR):
        del work
        gc.collect()
    assert [record.getMessage().startswith("nobody collected this error: rank 1 differs") for record in caplog.records]
    with pytest.raises(cd.errors.InvalidArgumentError, match="rank 1 differs"):
        setting.group.barrier()
    setting.group.barrier()


def test_a_work_that_is_dropped_releases_its_result(make: Any) -> None:
    setting = make()
    setting.group.all_reduce("sum", np.ones(3), async_op=True)
    setting.far.until(lambda: len(setting.far.rings) == 1)
    for _ in range(2):
        setting.group.barrier()
    assert setting.far.released == [5000]


def test_leaving_waits_for_what_is_in_flight(make: Any) -> None:
    setting = make()
    work = setting.group.all_reduce("sum", 21, async_op=True)
    setting.group.leave()
    assert work.done() and work.wait() == 42


def test_a_work_says_what_it_is(make: Any) -> None:
    work = make().group.all_reduce("sum", 1, async_op=True)
    work.wait()
    assert repr(work).startswith("<Work all_reduce(sum) instance 0 from test_work.py:")
