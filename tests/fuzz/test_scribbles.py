"""The short form: a member that writes anything into its group's segment harms neither its worker nor another group."""

from __future__ import annotations

from tests.fuzz.scribbles import ROUND_SECONDS, besiege
from tests.fuzz.siege import GoodJob, status_of

import collectived as cd

ROUNDS = 5


def test_neither_the_worker_nor_another_group_suffers_and_honest_members_end() -> None:
    with cd.testing.local(workers=1) as job, GoodJob(job, pause=ROUND_SECONDS / 100) as good:
        with besiege(job.workers[0], "scribbled", ROUNDS, seed=1) as outcomes:
            assert status_of(job).resident_bytes
        assert sum(outcomes.values()) == 2 * ROUNDS and good.sums
        assert "Traceback" not in job.log
