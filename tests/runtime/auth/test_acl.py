"""Which groups and devices a guest may have."""

from __future__ import annotations

import pytest

from collectived_proto.config.rules import Rule
from collectived_proto.devices import DeviceName
from collectived_runtime.auth.acl import filter_devices, is_permitted, resolve_rules
from collectived_runtime.auth.callers import Caller
from collectived_runtime.auth.credentials import AccessLevel
from collectived_runtime.auth.peers import UnixPeer
from collectived_runtime.startup_error import StartupError

ANN = Caller(AccessLevel.USE, unix_peer=UnixPeer(7, 1001, frozenset({1001, 50})))
BOB = Caller(AccessLevel.USE, unix_peer=UnixPeer(7, 1002, frozenset({1002})))
CI = Caller(AccessLevel.USE, token_name="ci")
OWNER = Caller(AccessLevel.ALL, unix_peer=UnixPeer(7, 1000))
RULES = resolve_rules(
    [Rule.parse("night/* = user:1001 token:ci"), Rule.parse("/serving = group:50"), Rule.parse("shut* =")], "g"
)
DEVICES = tuple(DeviceName(3, kind, index) for kind in ("CPU", "GPU") for index in range(3))


@pytest.mark.parametrize(
    ("name", "who"),
    [
        ("night/a", {"ann", "ci", "owner"}),
        ("/serving", {"ann", "owner"}),
        ("shut", {"owner"}),
        ("day/a", {"ann", "bob", "ci", "owner"}),
        ("/serving2", {"ann", "bob", "ci", "owner"}),
        ("Night/a", {"ann", "bob", "ci", "owner"}),
    ],
)
def test_the_first_rule_that_fits_decides_and_where_none_does_everybody_may(name: str, who: set[str]) -> None:
    callers = {"ann": ANN, "bob": BOB, "ci": CI, "owner": OWNER}
    assert {called for called, caller in callers.items() if is_permitted(RULES, name, caller)} == who


def test_a_later_rule_does_not_open_what_an_earlier_one_closes() -> None:
    rules = resolve_rules([Rule.parse("a* = user:1001"), Rule.parse("* = user:1002")], "g")
    assert not is_permitted(rules, "ab", BOB) and is_permitted(rules, "b", BOB) and not is_permitted(rules, "b", ANN)


def test_a_number_from_another_pid_namespace_is_nobodys() -> None:
    elsewhere = Caller(AccessLevel.USE, token_name="other", unix_peer=UnixPeer(0, 1001, frozenset({50})))
    assert not is_permitted(RULES, "night/a", elsewhere) and not is_permitted(RULES, "/serving", elsewhere)


@pytest.mark.parametrize(
    "text", ["", "night", "= user:a", "night = ann", "night = user:", "night = uid:7", "night = user:a,token:b = x"]
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no rule: expected PATTERN = user:NAME"):
        Rule.parse(text)


def test_a_rule_reads_as_it_is_written() -> None:
    for text in ("night/* = user:ann group:ml", "a=b = token:ci", "shut ="):
        assert str(Rule.parse(text)) == text and Rule.parse(str(Rule.parse(text))) == Rule.parse(text)


def test_a_rule_for_nobody_on_this_host_is_refused_at_the_start() -> None:
    with pytest.raises(StartupError, match="group_rules: there is no user 'no-such-user'"):
        resolve_rules([Rule.parse("x = user:no-such-user")], "group_rules")


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("2,0", [0, 2]),
        (" 1 , 2 ", [1, 2]),
        ("0,-1,2", [0]),
        ("0,7", [0]),
        ("GPU-bb", [1]),
        ("gpu-BB22,GPU-cc", [1, 2]),
        ("GPU-", []),
        ("MIG-xyz,1", []),
        ("nonsense", []),
        ("²", []),
        ("9" * 5000, []),  # of which int() would make an error of its own
        ("0,0000000001", [0]),
    ],
)
def test_gpus_are_those_that_the_clients_environment_shows(visible: str | None, gpus: list[int]) -> None:
    found = filter_devices(DEVICES, (), ANN, visible, {0: "GPU-aa11", 1: "GPU-bb22", 2: "GPU-cc33"})
    assert [device.short for device in found] == ["CPU:0", "CPU:1", "CPU:2", *(f"GPU:{index}" for index in gpus)]


def test_devices_are_for_whom_their_rules_name() -> None:
    rules = resolve_rules([Rule.parse("GPU:0 = user:1001"), Rule.parse("GPU:* = token:ci"), Rule.parse("CPU:2 =")], "d")
    seen = {
        who: [d.short for d in filter_devices(DEVICES, rules, caller)] for who, caller in (("ann", ANN), ("ci", CI))
    }
    assert seen == {"ann": ["CPU:0", "CPU:1", "GPU:0"], "ci": ["CPU:0", "CPU:1", "GPU:1", "GPU:2"]}
    assert filter_devices(DEVICES, rules, OWNER) == DEVICES
    assert [d.short for d in filter_devices(DEVICES, rules, ANN, "1,2")] == ["CPU:0", "CPU:1"]
