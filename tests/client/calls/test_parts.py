"""Results that are taken part by part: which bytes are copied, and that each is copied once."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import collectived as cd
from collectived.calls.parts import PartwiseCopy, TargetBytes, as_bytes
from collectived_proto.ipc import messages
from collectived_proto.ipc.parts import ResultPart

VALUE = np.arange(1000.0)


@given(
    gaps=st.lists(st.integers(0, 9), max_size=5),
    lengths=st.lists(st.integers(0, 30), min_size=5, max_size=5),
    ranges=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60)), max_size=12),
)
def test_each_byte_is_copied_once_in_whatever_order_parts_come(
    gaps: list[int], lengths: list[int], ranges: list[tuple[int, int]]
) -> None:
    memory = bytearray(np.arange(256, dtype=np.uint8).tobytes())
    segments, at = [], 3
    for gap, length in zip(gaps, lengths, strict=False):
        segments.append(TargetBytes(at + gap, np.zeros(length, np.uint8)))
        at += gap + length
    copying = PartwiseCopy(memory, 2, segments)
    counted = 0

    def count(target: Any, source: Any) -> None:
        nonlocal counted
        counted += len(source)
        target[...] = source

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_copy", count)
        for start, length in ranges:
            copying.copy(start, start + length)
            for offset in range(start + 2, min(start + length, 254 - 2) + 2):
                memory[offset] = 0  # what was copied is not read again
        copying.finish()
        copying.finish()
    for start, target in segments:
        assert target.tolist() == list(range(start + 2, start + 2 + len(target)))
    assert counted == sum(len(target) for _, target in segments)


def test_only_what_lies_side_by_side_has_bytes() -> None:
    assert as_bytes(np.zeros((2, 3))[:, 1:]) is None
    assert as_bytes(np.zeros((), np.float32)).shape == (4,)  # type: ignore[union-attr]


def tell(setting: Any, ring: messages.Submit, done: bytes, *ranges: tuple[int, int]) -> None:
    """Has the far end tell of parts of what `done` completes."""
    told = messages.parse_done(done)
    for start, stop in ranges:
        part = ResultPart(ring.instance, told.arena, told.offset, told.slot, start, stop)
        setting.far.doorbell.send(part.encode())


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("call", ["all_reduce", "all_gather"])
def test_parts_are_taken_before_the_end(make: Any, call: str, with_out: bool) -> None:
    setting = make(rank=1)
    far, out = setting.far, np.zeros(1000 if call == "all_reduce" else 2000)
    seen = threading.Event()

    def answer(ring: messages.Submit) -> list[bytes]:
        assert ring.takes_parts
        done: list[bytes] = far.complete(ring)
        head = 0 if call == "all_reduce" else 64
        tell(setting, ring, done[0], (head, head + 4000), (head + 4000, head + 4008))
        if with_out:
            while out[500] == 0:  # taken though the rest is not there
                seen.wait(0.001)
            assert out[501] == 0
        return done

    far.answer = answer
    start: Any = {
        "all_reduce": lambda **more: setting.group.all_reduce("sum", VALUE, **more),
        "all_gather": lambda **more: setting.group.all_gather(VALUE, **more),
    }[call]
    result = start(out=out) if with_out else start()
    expected = 2 * VALUE if call == "all_reduce" else np.concatenate([VALUE, VALUE])
    assert np.array_equal(result, expected) and result.flags.writeable
    assert (result is out) == with_out
    far.answer = lambda ring: None
    assert np.array_equal(start(), expected), "the slot has come back"


def test_an_out_that_does_not_lie_as_it_comes_is_written_at_the_end(make: Any) -> None:
    setting = make(rank=1)
    out = {"a": np.zeros((2, 1000))[:, ::2], "b": np.zeros(4, ">f8"), "c": np.zeros(3)}
    value = {"a": np.ones((2, 500)), "b": np.arange(4.0), "c": np.ones(3)}

    def answer(ring: messages.Submit) -> list[bytes]:
        done: list[bytes] = setting.far.complete(ring)
        tell(setting, ring, done[0], (0, 24), (24, 8000))
        return done

    setting.far.answer = answer
    setting.group.all_reduce("sum", value, out=out)
    assert np.array_equal(out["a"], np.full((2, 500), 2.0))
    assert out["b"].tolist() == [0, 2, 4, 6] and out["c"].tolist() == [2, 2, 2]


def test_an_error_after_parts_says_that_out_was_written(make: Any) -> None:
    setting = make(rank=1)
    out = np.zeros(1000)
    verdict = setting.far.verdict(cd.errors.Code.ABORTED, "over", 0)

    def answer(ring: messages.Submit) -> list[bytes]:
        tell(setting, ring, setting.far.complete(ring)[0], (0, 80))
        while out[9] == 0:
            threading.Event().wait(0.001)
        return [setting.far.failed(ring.instance, verdict)]

    setting.far.answer = answer
    with pytest.raises(cd.errors.AbortedError) as caught:
        setting.group.all_reduce("sum", VALUE, out=out)
    assert not caught.value.out_intact
    written = out.copy()
    assert written[10:].sum() == 0
    setting.far.doorbell.send(ResultPart(0, 1000, 0, 5000, 80, 160).encode())  # it comes late
    setting.doorbell.poll()
    assert np.array_equal(out, written)


@pytest.mark.parametrize("why", ["async", "three workers", "worker memory", "anything"])
def test_parts_are_not_asked_for_where_they_are_of_no_use_or_too_early(make: Any, why: str) -> None:
    setting = make(size=5 if why == "three workers" else 2, rank=1)
    value = VALUE.copy()
    if why == "worker memory":
        value = setting.memory.empty((1000,), np.dtype(float))
        value[:] = VALUE
    if why == "anything":
        setting.far.comes = VALUE
        assert np.array_equal(setting.group.broadcast(None, 0), VALUE)
    elif why == "async":
        setting.group.all_reduce("sum", value, async_op=True).result()
    else:
        setting.group.all_reduce("sum", value, out=np.zeros(1000) if why == "three workers" else None)
    assert not setting.far.rings[0].takes_parts
    if why == "three workers":
        setting.group.all_reduce("sum", value)
        assert setting.far.rings[1].takes_parts, "a new array nobody sees before the end"


def test_a_part_that_was_not_asked_for_is_a_worker_that_talks_nonsense(make: Any) -> None:
    setting = make(rank=1)

    def answer(ring: messages.Submit) -> list[bytes]:
        tell(setting, ring, setting.far.complete(ring)[0], (0, 80))
        return []  # the rank hangs up at once

    setting.far.answer = answer
    with pytest.raises(cd.errors.UnavailableError, match=r"a part of the result of all_reduce\(sum\), which was not"):
        setting.group.all_reduce("sum", VALUE, async_op=True).result()
