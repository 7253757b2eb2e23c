"""Which groups and devices a caller may have: rules of the configuration, judged. Pure but for `resolved`.

Rules restrict guests. The daemon's own user, root, and whoever shows the job's secret may have everything: they could
take it anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collectived_proto.configuration.rules import Rule
from collectived_proto.devices import DeviceName
from collectived_runtime.credentials import Right
from collectived_runtime.guests.callers import Caller
from collectived_runtime.guests.peers import number_of

_NO_GPUS: Mapping[int, str] = {}


@dataclass(frozen=True, slots=True)
class Reserved:
    """A rule with the numbers of its users and groups."""

    rule: Rule
    users: frozenset[int]
    groups: frozenset[int]
    tokens: frozenset[str]

    def names(self, caller: Caller) -> bool:
        if caller.token in self.tokens:
            return True
        local = caller.local
        # Whoever needed a credential to come in is not known by the number that the kernel says.
        known = local is not None and local.pid > 0
        return known and local is not None and (local.uid in self.users or bool(local.groups & self.groups))


def resolved(rules: Sequence[Rule], key: str) -> tuple[Reserved, ...]:
    """The rules of a key, with names turned into numbers.

    Raises:
        CannotStart: there is no such user or group.
    """
    return tuple(
        Reserved(
            rule,
            frozenset(number_of(name, key) for kind, name in rule.who if kind == "user"),
            frozenset(number_of(name, key, group=True) for kind, name in rule.who if kind == "group"),
            frozenset(name for kind, name in rule.who if kind == "token"),
        )
        for rule in rules
    )


def may_have(rules: Sequence[Reserved], name: str, caller: Caller) -> bool:
    """Whether somebody may have what is called so: the first rule that fits decides, and where none does everybody."""
    if caller.right is Right.ALL:
        return True
    first = next((rule for rule in rules if rule.rule.fits(name)), None)
    return first is None or first.names(caller)


_DIGITS = 9  # of the number of a GPU, at most


def offered(
    devices: Sequence[DeviceName],
    rules: Sequence[Reserved],
    caller: Caller,
    visible: str | None = None,
    uuids: Mapping[int, str] = _NO_GPUS,
) -> tuple[DeviceName, ...]:
    """The devices of a worker that a session may join on, in the worker's order.

    Args:
        visible: CUDA_VISIBLE_DEVICES of the client, as it says itself: a convenience, so that a process which was given
            one GPU does not take another by mistake, and no protection. None: it says nothing; '': no GPU.
        uuids: of GPUs, by index.
    """
    shown = None if visible is None else set(_shown(visible, uuids))
    return tuple(
        device
        for device in devices
        if may_have(rules, device.short, caller) and (device.kind != "GPU" or shown is None or device.index in shown)
    )


def _shown(visible: str, uuids: Mapping[int, str]) -> list[int]:
    """The indices that CUDA_VISIBLE_DEVICES names; as in CUDA, nothing behind an entry that names none is seen."""
    found: list[int] = []
    for word in (part.strip() for part in visible.split(",")):
        if word.isascii() and word.isdecimal() and len(word) <= _DIGITS:
            found.append(int(word))
            continue
        named = [index for index, uuid in uuids.items() if word and uuid.lower().startswith(word.lower())]
        if len(named) != 1:
            break
        found.append(named[0])
    return found
