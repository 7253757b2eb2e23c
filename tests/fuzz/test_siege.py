"""The short form of the siege: a worker serves a good job while others send it what nobody should."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from tests.fuzz.siege import Attacker, GoodJob, knock, status_of

import collectived as cd
from collectived.testing import LocalJob

COUNT = 350
MESSAGES = 150  # down doorbells: a worker opens the next session later for each client that has talked nonsense
PAUSE = 0.002  # seconds between two sums of the good job, so that it leaves some of the processor to other tests


@pytest.fixture(scope="module")
def job() -> Iterator[LocalJob]:
    with cd.testing.local(workers=2) as made:
        yield made


@pytest.fixture
def attacker(job: LocalJob) -> Iterator[Attacker]:
    made = Attacker(job)
    yield made
    made.close()


def test_every_rpc_is_answered_and_the_good_job_goes_on(job: LocalJob, attacker: Attacker) -> None:
    with GoodJob(job, PAUSE) as good:
        attacker.call_all(COUNT, seed=1)
    assert good.sums and attacker.answers["OK"] and sum(attacker.answers.values()) >= COUNT - 7
    assert "Traceback" not in job.log


def test_doorbells_are_read_or_hung_up_and_the_good_job_goes_on(job: LocalJob, attacker: Attacker) -> None:
    with GoodJob(job, PAUSE) as good:
        attacker.ring_all(MESSAGES, seed=1)
    assert good.sums and attacker.answers["hung up"]
    assert "Traceback" not in job.log


def test_strangers_are_not_let_in_and_leave_nothing(job: LocalJob) -> None:
    before = status_of(job)
    with GoodJob(job, PAUSE) as good:
        knock(job, COUNT, seed=1)
    assert good.sums and "Traceback" not in job.log
    end = time.monotonic() + 30  # those who said too little are shown out after ten seconds
    while status_of(job).descriptors > before.descriptors + 2:
        assert time.monotonic() < end, f"{status_of(job).descriptors} descriptors, {before.descriptors} before"
        time.sleep(0.5)
