"""Peers of Unix sockets, as the kernel reports them, and whether a daemon serves them.

Folders of sockets: users that a folder lets in, its sockets let in too.
"""

from __future__ import annotations

import contextlib
import enum
import grp
import os
import pwd
import socket
import stat
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectived_runtime.startup_error import StartupError

OVERFLOW_ID = 65534  # stands for every user and group that this user namespace has no number for
_SO_PEERGROUPS = 59  # Linux 4.13; not named by Python's socket module
_UCRED = struct.Struct("3i")
_ACL_NAME = "system.posix_acl_access"
_ACL_VERSION = struct.pack("<I", 2)
_ACL_ENTRY = struct.Struct("<HHI")  # tag, permissions, uid or gid
_NO_ID = 0xFFFFFFFF
_MAX_GROUPS = 256  # the room in Python's getsockopt; of a user with more, the first ones are known


class _AclTag(enum.IntEnum):
    """Of the entries of an access control list, as linux/posix_acl.h has them."""

    USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20


@dataclass(frozen=True, slots=True)
class UnixPeer:
    """A process as the kernel saw it when it connected; `pid` is 0 where it lives in another PID namespace."""

    pid: int
    uid: int
    gids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class AllowedUsers:
    """Whom a daemon serves at its Unix sockets, beside its own user and root."""

    own_uid: int
    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    with_tokens: bool = False  # others may come too, and show a client token

    @property
    def is_list(self) -> bool:
        """Whether users or groups are named one by one."""
        return bool(self.uids or self.gids)

    def is_trusted(self, peer: UnixPeer) -> bool:
        """Whether it could do everything here anyway: its own user, or root."""
        return self._is_identified(peer) and peer.uid in (0, self.own_uid)

    def is_allowed(self, peer: UnixPeer) -> bool:
        invited = peer.uid in self.uids or bool((peer.gids - {OVERFLOW_ID}) & self.gids)
        return self.is_trusted(peer) or (self._is_identified(peer) and invited)

    def _is_identified(self, peer: UnixPeer) -> bool:
        """Whether the kernel's report identifies the peer.

        A process of another PID namespace is in another container, and cannot be watched. The overflow uid stands for
        many users.
        """
        return peer.pid > 0 and peer.uid != OVERFLOW_ID


def explain_denial(peer: UnixPeer) -> str:
    """The error for a peer that is not served. It names no other user."""
    if peer.uid == OVERFLOW_ID:
        who = f"you are uid {OVERFLOW_ID}, which stands for every user that has no number on this host"
    elif peer.pid <= 0:
        who = "you are in another PID namespace, as in another container"
    else:
        who = f"you are uid {peer.uid}, which is none of them"
    return (
        f"this socket serves its daemon's own user, root, and the users that `allow_users` and `allow_groups` name; "
        f"{who}: show the job's secret or a client token, or ask the administrator to name you there"
    )


def get_unix_peer(connected: Any) -> UnixPeer:
    """The peer of a connected Unix socket.

    Raises:
        OSError: the kernel does not say.
    """
    pid, uid, gid = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    try:
        packed = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError:  # an older kernel, or too many
        packed = b""
    others = struct.unpack(f"={len(packed) // 4}I", packed)
    return UnixPeer(pid, uid, frozenset((gid, *others)))


def resolve_allowed_users(users: Iterable[str], groups: Iterable[str], with_tokens: bool = False) -> AllowedUsers:
    """Whom the keys `allow_users` and `allow_groups` name; `with_tokens`: client tokens have been given to others.

    Raises:
        StartupError: one of them is not known, or stands for many.
    """
    return AllowedUsers(
        os.getuid(),
        frozenset(resolve_id(name, "allow_users") for name in users),
        frozenset(resolve_id(name, "allow_groups", group=True) for name in groups),
        with_tokens,
    )


def resolve_id(name: str, key: str, *, group: bool = False) -> int:
    """The number of a user, or of a group.

    Raises:
        StartupError: it is not known, or stands for many.
    """
    find: Callable[[str], int] = (
        (lambda known: grp.getgrnam(known).gr_gid) if group else (lambda known: pwd.getpwnam(known).pw_uid)
    )
    what, database = ("group", "group") if group else ("user", "passwd")
    try:
        number = int(name) if name.isdecimal() else find(name)
    except KeyError:
        raise StartupError(
            f"{key}: there is no {what} {name!r} on this host: expected a name that `getent {database}` knows, or a "
            "number"
        ) from None
    if number == OVERFLOW_ID:
        raise StartupError(
            f"{key}: {name!r} is {what} {OVERFLOW_ID}, which stands for every user that has no number on this host: "
            f"give the {what} a number of its own"
        )
    return number


def apply_folder_mode(invited: AllowedUsers, folder: Path) -> AllowedUsers:
    """The guests at the sockets in a folder: where none is named, the group with which that is shared (0750).

    Raises:
        StartupError: the folder does not let in a user that is named.
    """
    mode = folder.stat().st_mode
    if not invited.is_list:
        shared = frozenset({folder.stat().st_gid}) - {OVERFLOW_ID} if is_shared_with_group(folder) else frozenset()
        return AllowedUsers(invited.own_uid, gids=shared)
    if not mode & 0o011:
        raise StartupError(
            f"allow_users and allow_groups admit no user at {folder}: with mode {mode & 0o7777:04o} other users cannot "
            f"reach the sockets in it: chmod 711 {folder} (or 0750 for one group)"
        )
    return invited


def is_shared_with_group(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder of sockets is open to a group and to no other user, as with mode 0750."""
    return stat.S_IMODE(os.stat(folder).st_mode) & 0o011 == 0o010


def set_socket_mode(path: str, allowed: AllowedUsers | None = None) -> None:
    """Set the mode of a socket: the group with which its folder is shared, else its owner alone.

    Where users and groups are named one by one, an access control list says so. Where the file system has none, or
    others may come and show a credential, every user whom the folder lets in may connect, and is identified then.
    The umask is not read: it is the container's, or systemd's, and was not chosen for this folder.
    """
    folder = os.path.dirname(path) or "."
    if allowed is not None and allowed.is_list:
        if allowed.with_tokens or not _set_acl(path, allowed):
            os.chmod(path, 0o666)
    elif is_shared_with_group(folder):
        with contextlib.suppress(PermissionError):  # the user is no member of the group, which another user gave it
            os.chown(path, -1, os.stat(folder).st_gid)
        os.chmod(path, 0o660)
    else:
        os.chmod(path, 0o600)


def _set_acl(path: str, allowed: AllowedUsers) -> bool:
    """Let the owner and those who are named read and write; False where that cannot be said there."""
    read_write = 6
    entries = [
        (_AclTag.USER_OBJ, read_write, _NO_ID),
        *((_AclTag.USER, read_write, uid) for uid in sorted(allowed.uids)),
        (_AclTag.GROUP_OBJ, 0, _NO_ID),
        *((_AclTag.GROUP, read_write, gid) for gid in sorted(allowed.gids)),
        (_AclTag.MASK, read_write, _NO_ID),
        (_AclTag.OTHER, 0, _NO_ID),
    ]
    try:
        os.setxattr(path, _ACL_NAME, _ACL_VERSION + b"".join(_ACL_ENTRY.pack(*entry) for entry in entries))
    except OSError:  # a file system without them, or one of the numbers is none of this user namespace
        return False
    return True


def is_unix_address(address: str) -> bool:
    """Whether an address to dial, or the peer of a call, is a Unix socket."""
    return address.startswith("unix:")
