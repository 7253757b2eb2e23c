"""Which groups and devices a caller may have: rules of the configuration, judged. Pure but for `resolve_rules`.

Rules restrict guests. The daemon's own user, root, and callers with the job's secret may have everything: they could
take it anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collectived_proto.config.rules import Rule
from collectived_proto.devices import DeviceName
from collectived_runtime.auth.callers import Caller
from collectived_runtime.auth.credentials import AccessLevel
from collectived_runtime.auth.peers import resolve_id

_NO_GPUS: Mapping[int, str] = {}


@dataclass(frozen=True, slots=True)
class AclRule:
    """A rule with the numbers of its users and groups."""

    rule: Rule
    uids: frozenset[int]
    gids: frozenset[int]
    token_names: frozenset[str]

    def matches(self, caller: Caller) -> bool:
        if caller.token_name in self.token_names:
            return True
        local = caller.unix_peer
        # A caller that needed a credential to come in is not known by the uid that the kernel reports.
        known = local is not None and local.pid > 0
        return known and local is not None and (local.uid in self.uids or bool(local.gids & self.gids))


def resolve_rules(rules: Sequence[Rule], key: str) -> tuple[AclRule, ...]:
    """The rules of a key, with names turned into numbers.

    Raises:
        StartupError: there is no such user or group.
    """
    return tuple(
        AclRule(
            rule,
            frozenset(resolve_id(name, key) for kind, name in rule.principals if kind == "user"),
            frozenset(resolve_id(name, key, group=True) for kind, name in rule.principals if kind == "group"),
            frozenset(name for kind, name in rule.principals if kind == "token"),
        )
        for rule in rules
    )


def is_permitted(rules: Sequence[AclRule], name: str, caller: Caller) -> bool:
    """Whether a caller may use that name.

    The first rule that matches the name decides; without one every caller may.
    """
    if caller.access is AccessLevel.ALL:
        return True
    first = next((rule for rule in rules if rule.rule.matches(name)), None)
    return first is None or first.matches(caller)


_DIGITS = 9  # of the number of a GPU, at most


def filter_devices(
    devices: Sequence[DeviceName],
    rules: Sequence[AclRule],
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
    shown = None if visible is None else set(_parse_visible_devices(visible, uuids))
    return tuple(
        device
        for device in devices
        if is_permitted(rules, device.short, caller)
        and (device.kind != "GPU" or shown is None or device.index in shown)
    )


def _parse_visible_devices(visible: str, uuids: Mapping[int, str]) -> list[int]:
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
