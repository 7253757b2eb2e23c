"""Lists of hosts, as users write them."""

from __future__ import annotations

import pytest

from collectived_launcher.hosts.hostlist import parse_hostfile, parse_hosts


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a", {"a": 3}),
        ("a:2,b:1", {"a": 2, "b": 1}),
        ("b, a:2", {"b": 3, "a": 2}),
        ("me@a.example:2,10.0.0.7", {"me@a.example": 2, "10.0.0.7": 3}),
        ("[fe80::1]:2,me@[::1]", {"[fe80::1]": 2, "me@[::1]": 3}),
    ],
)
def test_hosts(text: str, found: dict[str, int]) -> None:
    assert parse_hosts(text, 3) == found
    assert list(parse_hosts(text, 3)) == list(found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,,b", "--hosts 'a,,b': '' is no host, expected NAME or NAME:CLIENTS"),
        ("a:two", "'a:two' is no host"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is no host"),
        ("-oProxyCommand@b", "'-oProxyCommand@b' is no host"),
        ("me@-b", "'me@-b' is no host"),
        ("a b", "--hosts 'a b': hosts are separated by commas, without spaces: --hosts a,b"),
        ("a:2, b c", "hosts are separated by commas, without spaces: --hosts a:2,b,c"),
        ("a b;c", "'a b;c' is no host"),
        ("a;b", "'a;b' is no host"),
        ("a:0", "host 'a' would have no client: expected at least 1"),
        ("a:2222", "host 'a' would have 2222 clients: expected at most 1024; a port of ssh is set in ~/.ssh/config"),
        ("a:1,a:2", "host 'a' is named twice; a host has one worker: a:CLIENTS for more"),
    ],
)
def test_what_is_no_list_of_hosts(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_hosts(text, 1)
    assert said in str(caught.value)


def test_a_hostfile() -> None:
    text = "# two racks\na slots=2 max_slots=8\n\nb:4   # the large one\nme@c\n"
    assert parse_hostfile(text, "hosts", 1) == {"a": 2, "b": 4, "me@c": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\nb cpus=2\n", "hosts, line 2: 'b cpus=2': 'cpus=2' is not understood"),
        ("a\n\na\n", "hosts, line 3: 'a': host 'a' is named twice"),
        ("# nobody\n", "hosts names no host"),
    ],
)
def test_what_is_no_hostfile(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_hostfile(text, "hosts", 1)
    assert said in str(caught.value)
