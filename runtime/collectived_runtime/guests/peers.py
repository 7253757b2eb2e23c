"""Who is at the other end of a Unix socket, by the word of the kernel, and whether a daemon serves them."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectived_runtime.cannot_start import CannotStart
from collectived_runtime.guests.folders import shared_with_group

UNMAPPED = 65534  # stands for every user and group that this user namespace has no number for
_SO_PEERGROUPS = 59  # Linux 4.13; not named by Python's socket module
_CREDENTIALS = struct.Struct("3i")
_MOST_GROUPS = 256  # what Python's getsockopt has room for; of who has more, the first is known


@dataclass(frozen=True, slots=True)
class Peer:
    """A process as the kernel saw it when it connected; `pid` is 0 where it lives in another PID namespace."""

    pid: int
    uid: int
    groups: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Guests:
    """Whom a daemon serves at its Unix sockets, beside its own user and root."""

    own: int
    users: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()

    def trusts(self, peer: Peer) -> bool:
        """Whether it could do everything here anyway: its own user, or root."""
        return self._known(peer) and peer.uid in (0, self.own)

    def serves(self, peer: Peer) -> bool:
        invited = peer.uid in self.users or bool((peer.groups - {UNMAPPED}) & self.groups)
        return self.trusts(peer) or (self._known(peer) and invited)

    def _known(self, peer: Peer) -> bool:
        """Whether the kernel's word says anything: a process of another PID namespace is another container's, and
        cannot be watched; a number that stands for many users is nobody's."""
        return peer.pid > 0 and peer.uid != UNMAPPED


def why_not(peer: Peer) -> str:
    """What somebody is told who is not served; names nobody but them."""
    if peer.uid == UNMAPPED:
        who = f"you are uid {UNMAPPED}, which stands for every user whom this host does not know by a number"
    elif peer.pid <= 0:
        who = "you are in another PID namespace, as in another container"
    else:
        who = f"you are uid {peer.uid}, whom nothing of that names"
    return (
        f"this socket serves its daemon's own user, root, and whom `allow_users` and `allow_groups` name, and {who}: "
        "show the job's secret or a client token, or have yourself named there"
    )


def peer_of(connected: Any) -> Peer:
    """The peer of a connected Unix socket.

    Raises:
        OSError: the kernel does not say.
    """
    pid, uid, gid = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    try:
        packed = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    except OSError:  # an older kernel, or too many
        packed = b""
    others = struct.unpack(f"={len(packed) // 4}I", packed)
    return Peer(pid, uid, frozenset((gid, *others)))


def guests(users: Iterable[str], groups: Iterable[str]) -> Guests:
    """Whom the keys `allow_users` and `allow_groups` name.

    Raises:
        CannotStart: one of them is not known, or stands for many.
    """
    return Guests(
        os.getuid(),
        frozenset(number_of(name, "allow_users") for name in users),
        frozenset(number_of(name, "allow_groups", group=True) for name in groups),
    )


def number_of(name: str, key: str, *, group: bool = False) -> int:
    """The number of a user, or of a group.

    Raises:
        CannotStart: it is not known, or stands for many.
    """
    find: Callable[[str], int] = (
        (lambda known: grp.getgrnam(known).gr_gid) if group else (lambda known: pwd.getpwnam(known).pw_uid)
    )
    what, database = ("group", "group") if group else ("user", "passwd")
    try:
        number = int(name) if name.isdecimal() else find(name)
    except KeyError:
        raise CannotStart(
            f"{key}: there is no {what} {name!r} on this host: expected a name that `getent {database}` knows, or a "
            "number"
        ) from None
    if number == UNMAPPED:
        raise CannotStart(
            f"{key}: {name!r} is {what} {UNMAPPED}, which stands for everybody whom this host does not know by a "
            f"number: give the {what} a number of its own"
        )
    return number


def with_folder(invited: Guests, folder: Path) -> Guests:
    """The guests at the sockets in a folder: where nobody is named, the group with which that is shared (0750).

    Raises:
        CannotStart: somebody is named whom the folder does not let in.
    """
    mode = folder.stat().st_mode
    if not (invited.users or invited.groups):
        shared = frozenset({folder.stat().st_gid}) - {UNMAPPED} if shared_with_group(folder) else frozenset()
        return Guests(invited.own, groups=shared)
    if not mode & 0o011:
        raise CannotStart(
            f"allow_users and allow_groups let nobody in at {folder}: it has mode {mode & 0o7777:04o}, by which others "
            f"do not get at the sockets in it: chmod 711 {folder} (or 0750 for one group)"
        )
    return invited
