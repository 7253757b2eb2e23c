"""The words of errors that name ranks."""

from __future__ import annotations

from collectived_proto.report.phrases import MAX_NAMED, names_text, nccl_failure_text, not_arrived_text
from collectived_proto.types import Member, RankPosition

MEMBERS = tuple(Member(rank, f"GPU:{rank}", rank, f"host{rank}", 70 + rank) for rank in range(MAX_NAMED + 3))
WHAT = "all_reduce(sum) #17 of group 'train'"


def reports(count: int) -> list[tuple[str, list[Member], str]]:
    return [(f"worker {rank}", [MEMBERS[rank]], f"NCCL: no {rank}") for rank in range(count)]


def test_a_failure_of_nccl_is_quoted_with_its_place_and_nobody_is_called_lost() -> None:
    place = "on worker 0, of rank 0 (host host0, pid 70), NCCL: no 0"
    assert (
        nccl_failure_text(WHAT, reports(1), ()) == f"{WHAT} failed: {place}; no member of the group is known to be lost"
    )


def test_who_is_known_to_be_lost_is_named_beside_it() -> None:
    assert nccl_failure_text(WHAT, reports(1), MEMBERS[1:2]).endswith("; rank 1 (host host1, pid 71) is lost")
    assert nccl_failure_text(WHAT, reports(1), MEMBERS[1:3]).endswith("rank 2 (host host2, pid 72) are lost")


def test_of_many_workers_on_which_nccl_failed_the_first_few_are_quoted() -> None:
    text = nccl_failure_text(WHAT, reports(MAX_NAMED + 3), ())
    assert text.count("NCCL: no ") == MAX_NAMED and f"NCCL: no {MAX_NAMED - 1};" in text
    assert "; NCCL failed on 3 more workers; no member" in text


def test_of_a_rank_that_has_not_come_its_first_thread_is_quoted() -> None:
    position = RankPosition(
        2, 16, 16, "barrier()", "a.py:1", stack="data.py:8 in load <- a.py:2 in main\nthread pin: b.py:1"
    )
    assert not_arrived_text(MEMBERS[2], position, "worker 2 does not answer", 3.2) == (
        f"{MEMBERS[2]} has not come; it last did barrier() #16 at a.py:1, as of 3.2 s ago; "
        "now: data.py:8 in load <- a.py:2 in main (worker 2 does not answer)"
    )


def test_many_names_are_told_in_short() -> None:
    assert names_text(["a", "b"]) == "a, b"
    assert names_text([f"node{number}" for number in range(64)]) == "node0, node1, node2, node3 and 60 more"
