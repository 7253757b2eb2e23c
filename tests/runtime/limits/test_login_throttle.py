"""Wrong credentials are counted by address, and others notice nothing."""

from __future__ import annotations

import pytest

from collectived_runtime.limits.login_throttle import (
    MAX_ADDRESSES,
    WINDOW_SECONDS,
    LoginThrottle,
    parse_peer_address,
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def failing(clock: Clock, address: str, times: int, most: int = 3) -> LoginThrottle:
    made = LoginThrottle(most, clock)
    for _ in range(times):
        made.record_failure(address)
    return made


@pytest.mark.parametrize(("times", "too_often"), [(2, False), (3, True), (50, True)])
def test_an_address_has_failed_too_often_after_so_many_failures(clock: Clock, times: int, too_often: bool) -> None:
    logins = failing(clock, "10.0.0.7", times)
    assert logins.has_failed_too_often("10.0.0.7") == too_often
    assert not logins.has_failed_too_often("10.0.0.8")


def test_failures_are_forgotten_when_the_window_is_over(clock: Clock) -> None:
    logins = failing(clock, "10.0.0.7", 3)
    clock.now += WINDOW_SECONDS - 1
    assert logins.has_failed_too_often("10.0.0.7")
    clock.now += 1
    assert not logins.has_failed_too_often("10.0.0.7")
    logins.record_failure("10.0.0.7")
    assert not logins.has_failed_too_often("10.0.0.7")


@pytest.mark.parametrize("other", ["2001:db8:0:1::2", "2001:db8:0:1:ffff::1", "[2001:db8:0:1::9]"])
def test_a_network_of_ipv6_is_one(clock: Clock, other: str) -> None:
    logins = failing(clock, "2001:db8:0:1::1", 3)
    assert logins.has_failed_too_often(other)
    assert not logins.has_failed_too_often("2001:db8:0:2::1")


def test_a_mapped_address_is_the_address(clock: Clock) -> None:
    assert failing(clock, "::ffff:10.0.0.7", 3).has_failed_too_often("10.0.0.7")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "", "a name"])
def test_the_loopback_and_what_is_no_address_are_not_counted(clock: Clock, address: str) -> None:
    logins = failing(clock, address, 100)
    assert not logins.has_failed_too_often(address) and not len(logins)


def test_without_a_limit_nobody_is(clock: Clock) -> None:
    assert not failing(clock, "10.0.0.7", 1000, most=0).has_failed_too_often("10.0.0.7")


def test_the_table_is_bounded_and_forgets_who_was_quiet_longest(clock: Clock) -> None:
    logins = failing(clock, "10.0.0.7", 3)
    for number in range(MAX_ADDRESSES):
        logins.record_failure(f"11.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(logins) == MAX_ADDRESSES and not logins.has_failed_too_often("10.0.0.7")


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:5341", "10.0.0.7"),
        ("ipv6:[::1]:5341", "::1"),
        ("ipv6:%5B2001:db8::1%5D:5341", "2001:db8::1"),
        ("unix:", ""),
        ("unix:/run/a.sock", ""),
        ("", ""),
    ],
)
def test_the_address_of_a_caller_as_grpc_names_it(peer: str, address: str) -> None:
    assert parse_peer_address(peer) == address
