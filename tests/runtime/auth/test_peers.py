"""Whom a daemon serves at its Unix sockets, by what the kernel says of them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from collectived_runtime.auth.peers import (
    OVERFLOW_ID,
    AllowedUsers,
    UnixPeer,
    apply_folder_mode,
    explain_denial,
    get_unix_peer,
    resolve_allowed_users,
    resolve_id,
)
from collectived_runtime.startup_error import StartupError

OWN, ANN, BOB = 1000, 1001, 1002
ML = 50
SERVES_ANN = AllowedUsers(OWN, frozenset({ANN}))
SERVES_ML = AllowedUsers(OWN, gids=frozenset({ML}))


@pytest.mark.parametrize("uid", [OWN, 0])
def test_the_daemons_own_user_and_root_are_trusted(uid: int) -> None:
    for invited in (AllowedUsers(OWN), SERVES_ANN, SERVES_ML):
        assert invited.is_trusted(UnixPeer(7, uid)) and invited.is_allowed(UnixPeer(7, uid))


def test_another_user_is_served_where_it_or_a_group_of_it_is_named_and_never_trusted() -> None:
    assert SERVES_ANN.is_allowed(UnixPeer(7, ANN)) and not SERVES_ANN.is_allowed(UnixPeer(7, BOB, frozenset({ML})))
    assert SERVES_ML.is_allowed(UnixPeer(7, BOB, frozenset({3, ML}))) and not SERVES_ML.is_allowed(
        UnixPeer(7, ANN, frozenset({3}))
    )
    assert not AllowedUsers(OWN).is_allowed(UnixPeer(7, ANN))
    assert not SERVES_ANN.is_trusted(UnixPeer(7, ANN)) and not SERVES_ML.is_trusted(UnixPeer(7, BOB, frozenset({ML})))


@pytest.mark.parametrize(
    "peer", [UnixPeer(0, OWN), UnixPeer(0, 0), UnixPeer(0, ANN), UnixPeer(7, OVERFLOW_ID), UnixPeer(0, OVERFLOW_ID)]
)
def test_of_whom_the_kernels_word_says_little_nobody_is_served(peer: UnixPeer) -> None:
    invited = AllowedUsers(OVERFLOW_ID, frozenset({ANN, OVERFLOW_ID}), frozenset({OVERFLOW_ID}))
    assert not invited.is_allowed(peer) and not invited.is_trusted(peer)
    assert not AllowedUsers(OWN).is_trusted(peer)


def test_a_group_that_stands_for_many_is_no_group() -> None:
    assert not AllowedUsers(OWN, gids=frozenset({OVERFLOW_ID})).is_allowed(UnixPeer(7, ANN, frozenset({OVERFLOW_ID})))


@pytest.mark.parametrize(
    ("peer", "says"),
    [
        (UnixPeer(7, ANN), f"uid {ANN}"),
        (UnixPeer(0, ANN), "another PID namespace"),
        (UnixPeer(7, OVERFLOW_ID), f"uid {OVERFLOW_ID}, which"),
    ],
)
def test_a_refusal_says_why_and_what_to_do_and_names_nobody_else(peer: UnixPeer, says: str) -> None:
    told = explain_denial(peer)
    assert says in told and "show the job's secret or a client token" in told and "allow_users" in told
    assert str(OWN) not in told and str(BOB) not in told


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        found = get_unix_peer(one)
    assert (found.pid, found.uid) == (os.getpid(), os.getuid())
    assert found.gids == {os.getgid(), *os.getgroups()}


def test_names_and_numbers_are_understood() -> None:
    assert resolve_allowed_users(["root", "4711"], ["4712"]) == AllowedUsers(
        os.getuid(), frozenset({0, 4711}), frozenset({4712})
    )
    assert resolve_id("root", "x", group=True) == 0


def test_names_that_nobody_has_are_refused() -> None:
    with pytest.raises(
        StartupError, match="allow_users: there is no user 'no-such-user' on this host: expected a name"
    ):
        resolve_allowed_users(["no-such-user"], [])
    with pytest.raises(StartupError, match="allow_groups: there is no group 'no-such-group'.*getent group"):
        resolve_allowed_users([], ["no-such-group"])


def test_a_number_that_stands_for_many_cannot_be_named() -> None:
    with pytest.raises(StartupError, match="'65534' is user 65534, which stands for every user"):
        resolve_allowed_users(["65534"], [])


def test_where_nobody_is_named_the_group_of_a_shared_folder_is_served(tmp_path: Path) -> None:
    gid = tmp_path.stat().st_gid
    for mode, groups in ((0o700, set()), (0o750, {gid}), (0o755, set()), (0o711, set())):
        tmp_path.chmod(mode)
        assert apply_folder_mode(AllowedUsers(OWN), tmp_path).gids == groups


def test_where_somebody_is_named_the_folders_group_alone_is_not_enough(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    assert apply_folder_mode(SERVES_ANN, tmp_path) == SERVES_ANN


def test_to_name_somebody_whom_the_folder_keeps_out_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(
        StartupError, match=rf"admit no user at {tmp_path}: with mode 0700 other users cannot .*chmod 711"
    ):
        apply_folder_mode(SERVES_ANN, tmp_path)
