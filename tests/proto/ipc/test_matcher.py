"""Which receive takes which message."""

from __future__ import annotations

import random

import pytest
from tests.matching_rules import MatchingRules

from collectived_proto.ipc.matcher import Matcher
from collectived_proto.types import ANY_SOURCE

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
    assert not matcher.expects(0, 1, 0) and matcher.expects(0, 1, 1)


def test_a_withdrawn_receive_takes_nothing_and_the_next_one_does(matcher: Matcher[str, str]) -> None:
    for receive in ("first", "second"):
        matcher.post(receive, 0, ANY_SOURCE, 0)
    assert matcher.withdraw("first") and not matcher.withdraw("first")
    assert matcher.deliver("message", 0, 1, 0) == "second"
    assert not matcher.withdraw("second")


def test_messages_of_one_receiver_are_taken_out_as_they_came_and_those_of_others_kept(
    matcher: Matcher[str, str],
) -> None:
    came = [(2, 1), (0, 0), (2, 0), (1, 1), (2, 1)]  # sender and tag
    for number, (sender, tag) in enumerate(came):
        for receiver in (0, 1):
            matcher.deliver(f"{receiver}.{number}", receiver, sender, tag)
    assert matcher.take_messages(0) == [(sender, tag, f"0.{n}") for n, (sender, tag) in enumerate(came)]
    assert matcher.take_messages(0) == []
    assert sorted(matcher.list_messages()) == [f"1.{n}" for n in range(len(came))]


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
            assert matcher.expects(9, sender, tag) is expected
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


def test_a_message_is_found_and_taken_as_a_receive_would() -> None:
    matcher: Matcher[str, str] = Matcher()
    assert matcher.find(0, ANY_SOURCE, 0) is None and matcher.find(0, 1, 0) is None
    for sender, message in ((2, "first"), (1, "second"), (2, "third")):
        assert matcher.deliver(message, 0, sender, 0) is None
    assert matcher.find(0, 1, 0) == "second" and matcher.find(0, ANY_SOURCE, 0) == "first"
    assert matcher.find(0, 3, 0) is None and matcher.find(0, 1, 1) is None
    assert matcher.take(0, ANY_SOURCE, 0) == (2, "first")
    assert matcher.take(0, 2, 0) == (2, "third")
    assert matcher.take(0, 1, 0) == (1, "second")
    assert list(matcher.list_messages()) == []


def test_a_message_that_begins_to_come_is_for_the_receive_that_was_posted_first() -> None:
    matcher: Matcher[str, str] = Matcher()
    assert matcher.claim(0, 1, 0) is None
    for receive, source in (("any", ANY_SOURCE), ("named", 1)):
        assert matcher.post(receive, 0, source, 0) is None
    assert matcher.claim(0, 2, 1) is None
    assert matcher.claim(0, 1, 0) == "any" and matcher.claim(0, 2, 0) is None
    assert matcher.claim(0, 1, 0) == "named" and not matcher.withdraw("named")
