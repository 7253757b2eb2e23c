"""The short form of the valid messages: extreme values are answered, and leave neither tracebacks nor memory."""

from __future__ import annotations

import re
from pathlib import Path

from tests.fuzz.contract import draw_examples, list_methods, messages
from tests.fuzz.siege import GoodJob
from tests.fuzz.valid_messages import Guests, MemoryWatch, is_open_ended

import collectived as cd
import collectived_proto.v1
from collectived_proto.v1 import common_pb2, coordinator_pb2, worker_pb2

COUNT = 120
PAUSE = 0.01  # seconds between two sums of the good job
MOST_GROWTH = 5 << 20  # bytes; 1.0 was seen of a worker, and less than nothing of a coordinator


def test_every_method_of_every_service_is_called() -> None:
    declared = set[str]()
    for file in Path(collectived_proto.v1.__file__).parent.glob("*.proto"):
        for service, body in re.findall(r"^service (\w+) \{(.*?)^\}", file.read_text(), re.MULTILINE | re.DOTALL):
            declared |= {f"{service}/{method}" for method in re.findall(r"^ *rpc (\w+)", body, re.MULTILINE)}
    assert "Worker/Cancel" in declared and set(list_methods()) == declared


def test_a_message_can_be_made_again_and_is_valid() -> None:
    for kind in (worker_pb2.PrepareRequest, coordinator_pb2.WorkerMessage):
        strategy = messages(kind.DESCRIPTOR, {"rank": 7}, {"key": 9})
        first, again = (draw_examples(strategy, 100, seed=3) for _ in range(2))
        sent = [message.SerializeToString(deterministic=True) for message in first]  # a NaN is not equal to itself
        assert sent == [message.SerializeToString(deterministic=True) for message in again] and len(sent) == 100
        for message, data in zip(first, sent, strict=True):
            assert kind.FromString(data).SerializeToString(deterministic=True) == data
            if kind is worker_pb2.PrepareRequest:
                assert message.key == 9
    # Which come depends on the modules that are loaded too, out of whose constants Hypothesis draws.
    kinds = coordinator_pb2.WorkerMessage.DESCRIPTOR.oneofs[0]
    assert len({message.WhichOneof(kinds.name) for message in first}) > len(kinds.fields) // 2


def test_a_message_may_have_very_many_entries_of_different_numbers() -> None:
    drawn = draw_examples(messages(worker_pb2.SubmitResult.DESCRIPTOR, {}, {}), 300, seed=5)
    assert any(len(set(message.indices)) == 2000 for message in drawn)
    assert any(len(message.leaves) == 2000 for message in drawn)


def test_a_submission_that_may_wait_for_ever_is_told_apart() -> None:
    collective = common_pb2.Collective(all_gather=common_pb2.AllGather(axis=1))
    ahead = worker_pb2.SubmitRequest(header=worker_pb2.SubmitHeader(instance=2, collective=collective))
    assert is_open_ended("Worker/Submit", ahead), "nobody submits what is numbered before it"
    ahead.header.timeout_seconds = 1.0
    assert not is_open_ended("Worker/Submit", ahead)
    received = common_pb2.Collective(recv=common_pb2.RecvFrom())
    assert is_open_ended("Worker/Submit", worker_pb2.SubmitRequest(header={"collective": received}))
    assert not is_open_ended("Worker/Submit", worker_pb2.SubmitRequest(header={"collective": collective}))
    assert not is_open_ended("Worker/Prepare", worker_pb2.PrepareRequest())


def test_daemons_answer_extreme_values_and_the_good_job_goes_on() -> None:
    with cd.testing.local(workers=2) as job:
        guests, memory = Guests(job), MemoryWatch(job)
        guests.call_all(COUNT // 2, seed=1)
        memory.begin()
        with GoodJob(job, PAUSE) as good:
            guests.call_all(COUNT, seed=2)
        answers = {code for _, code in guests.answers}
        assert good.sums and answers >= {"OK", "INVALID_ARGUMENT"}
        assert {name for name, _ in guests.answers} == set(list_methods())
        assert max(memory.growth(MOST_GROWTH).values()) <= MOST_GROWTH
        guests.drain_all(20, seed=3)
        assert "Traceback" not in job.log
