"""Which receive takes which message."""

from __future__ import annotations

import random

import pytest
from tests.matching_rules import MatchingRules

from collectived_proto.types import ANY_SOURCE
from collectived_runtime.engine.p2p.matcher import Matcher

SENDERS, TAGS = 3, 2


@pytest.fixture
def matcher() -> Matcher[str, str]:
    return Matcher()


def test_messages_of_one_address_are_taken_in_the_order_in_which_they_came(matcher: Matcher[str, str]) -> None:
    for message in ("first", "second"):
        assert matcher.deliver(message, 0, 1, 7) is None
    assert [matcher.post(receive, 0, 1, 7) for receive in "ab"] == [(1, "first"), (1, "second")]


def test_of_a_named_receive_and_one_from_any_sender_the_first_posted_takes_a_message(
    matcher: Matcher[str, str],
) -> None:
    for receive, source in (("any", ANY_SOURCE), ("named", 1), ("any again", ANY_SOURCE)):
        assert matcher.post(receive, 0, source, 0) is None
    assert [matcher.deliver(f"{n}", 0, 1, 0) for n in range(4)] == ["any", "named", "any again", None]


def test_a_message_of_another_sender_passes_a_named_receive(matcher: Matcher[str, str]) -> None:
    matcher.post("named", 0, 1, 0)
    matcher.post("any", 0, ANY_SOURCE, 0)
    assert matcher.deliver("of 2", 0, 2, 0) == "any"
    assert matcher.deliver("of 1", 0, 1, 0) == "named"


def test_a_receive_from_any_sender_takes_what_came_first_and_is_told_who_sent_it(matcher: Matcher[str, str]) -> None:
    for sender in (2, 1, 2):
        matcher.deliver(f"of {sender}", 0, sender, 0)
    assert matcher.post("named", 0, 1, 0) == (1, "of 1")
    assert [matcher.post(receive, 0, ANY_SOURCE, 0) for receive in "abc"] == [(2, "of 2"), (2, "of 2"), None]


def test_tags_and_receivers_do_not_mix(matcher: Matcher[str, str]) -> None:
    matcher.post("other tag", 0, ANY_SOURCE, 1)
    matcher.post("other receiver", 5, ANY_SOURCE, 0)
    assert matcher.deliver("message", 0, 1, 0) is None
    assert not matcher.is_expected(0, 1, 0) and matcher.is_expected(0, 1, 1)


def test_a_withdrawn_receive_takes_nothing_and_the_next_one_does(matcher: Matcher[str, str]) -> None:
    for receive in ("first", "second"):
        matcher.post(receive, 0, ANY_SOURCE, 0)
    assert matcher.withdraw("first") and not matcher.withdraw("first")
    assert matcher.deliver("message", 0, 1, 0) == "second"
    assert not matcher.withdraw("second")


def test_messages_for_a_receiver_that_has_gone_are_given_back_and_those_of_others_kept(
    matcher: Matcher[str, str],
) -> None:
    for receiver in (0, 1):
        for tag in range(TAGS):
            matcher.deliver(f"{receiver}.{tag}", receiver, 2, tag)
    assert sorted(matcher.drop_messages(0)) == ["0.0", "0.1"]
    assert sorted(matcher.list_messages()) == ["1.0", "1.1"]


@pytest.mark.parametrize("seed", range(20))
def test_it_does_what_the_rules_say_in_any_order_of_events(seed: int) -> None:
    chance, matcher, rules = random.Random(seed), Matcher[int, int](), MatchingRules()
    for number in range(400):
        tag, source = chance.randrange(TAGS), chance.choice([*range(SENDERS), ANY_SOURCE])
        what = chance.random()
        if what < 0.45:
            assert matcher.post(number, 9, source, tag) == rules.post(number, source, tag)
        elif what < 0.9:
            sender = chance.randrange(SENDERS)
            expected = any(other == tag and wanted in (sender, ANY_SOURCE) for _, wanted, other in rules.receives)
            assert matcher.is_expected(9, sender, tag) is expected
            assert matcher.deliver(number, 9, sender, tag) == rules.deliver(number, sender, tag)
        else:
            receive = chance.randrange(number + 1)
            assert matcher.withdraw(receive) is rules.withdraw(receive)
    assert sorted(matcher.list_messages()) == sorted(message for message, _, _ in rules.messages)


def test_it_keeps_nothing_of_what_is_over(matcher: Matcher[str, str]) -> None:
    for tag in range(100):
        matcher.post("receive", 0, ANY_SOURCE, tag)
        matcher.deliver("message", 0, 1, tag)
        matcher.post("withdrawn", 0, 1, tag)
        matcher.withdraw("withdrawn")
    assert not matcher._queues and not matcher._places
