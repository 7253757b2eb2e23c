"""Refusals: counted, and told with the value, the limit and the key that raises it."""

from __future__ import annotations

from collectived_runtime.limits.rejections import (
    COORDINATOR_LIMITS,
    MAX_USERS,
    WORKER_LIMITS,
    Limit,
    MessageSource,
    RejectionCounters,
    format_limit_error,
    format_uid_key,
)


def test_each_is_counted_and_the_latest_is_known() -> None:
    now = iter((1.0, 2.0, 3.0))
    refusals = RejectionCounters(lambda: next(now))
    for limit in (Limit.SESSIONS, Limit.GROUPS, Limit.SESSIONS):
        refusals.count_limit(limit)
    refusals.count_malformed(MessageSource.DOORBELL)
    assert refusals.limit_counts == {Limit.SESSIONS: 2, Limit.GROUPS: 1} and refusals.malformed_counts == {
        MessageSource.DOORBELL: 1
    }
    assert refusals.last_limited == {Limit.SESSIONS: 3.0, Limit.GROUPS: 2.0}


def test_a_refusal_says_what_how_many_and_what_to_do() -> None:
    assert format_limit_error("this worker has 7 sessions", 7, "max_sessions", "close some") == (
        "this worker has 7 sessions, and there may be 7: close some, or raise max_sessions of the daemon"
    )


def test_every_limit_is_shown_by_some_daemon() -> None:
    assert {*WORKER_LIMITS, *COORDINATOR_LIMITS} == set(Limit)


def test_what_a_user_has_sent_is_charged_to_that_user_once() -> None:
    refusals = RejectionCounters()
    for uid in (7, 7, 8, None):
        refusals.count_malformed(MessageSource.SOCKET, uid)
    assert refusals.malformed_counts == {MessageSource.SOCKET: 4}
    assert [refusals.take_malformed(format_uid_key(uid)) for uid in (7, 7, 9, 8)] == [2, 0, 0, 1]
    assert refusals.take_malformed("") == 0


def test_of_more_users_than_are_remembered_the_one_quiet_for_longest_is_forgotten() -> None:
    refusals = RejectionCounters()
    for uid in range(MAX_USERS + 1):
        refusals.count_malformed(MessageSource.SOCKET, uid)
    assert refusals.take_malformed(format_uid_key(0)) == 0 and refusals.take_malformed(format_uid_key(1)) == 1
