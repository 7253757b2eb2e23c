"""The short form of the valid messages: extreme values are answered, and leave neither tracebacks nor memory."""

from __future__ import annotations

import random

from tests.fuzz.siege import GoodJob
from tests.fuzz.valid_messages import Guests, MemoryWatch, fill

import collectived as cd
from collectived_proto.v1 import coordinator_pb2, worker_pb2

COUNT = 120
PAUSE = 0.01  # seconds between two sums of the good job
MOST_GROWTH = 32 << 20  # bytes; so few messages do not tell more exactly what stays


def test_a_message_can_be_made_again_and_is_valid() -> None:
    for kind in (worker_pb2.PrepareRequest, coordinator_pb2.WorkerMessage):
        first, again = (fill(kind(), random.Random(3), {"rank": 7}) for _ in range(2))
        assert first.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True)
        assert kind.FromString(first.SerializeToString()).ByteSize() > 0


def test_daemons_answer_extreme_values_and_the_good_job_goes_on() -> None:
    with cd.testing.local(workers=2) as job:
        guests, memory = Guests(job), MemoryWatch(job)
        guests.call_all(COUNT // 2, seed=1)
        memory.begin()
        with GoodJob(job, PAUSE) as good:
            guests.call_all(COUNT, seed=2)
        assert good.sums and guests.answers["OK"] and guests.answers["INVALID_ARGUMENT"]
        assert max(memory.growth(MOST_GROWTH).values()) <= MOST_GROWTH
        assert "Traceback" not in job.log
