"""Whom a daemon serves at its Unix sockets, by what the kernel says of them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from collectived_runtime.cannot_start import CannotStart
from collectived_runtime.guests.peers import UNMAPPED, Guests, Peer, guests, number_of, peer_of, why_not, with_folder

OWN, ANN, BOB = 1000, 1001, 1002
ML = 50
SERVES_ANN = Guests(OWN, frozenset({ANN}))
SERVES_ML = Guests(OWN, groups=frozenset({ML}))


@pytest.mark.parametrize("uid", [OWN, 0])
def test_the_daemons_own_user_and_root_are_trusted(uid: int) -> None:
    for invited in (Guests(OWN), SERVES_ANN, SERVES_ML):
        assert invited.trusts(Peer(7, uid)) and invited.serves(Peer(7, uid))


def test_another_user_is_served_where_it_or_a_group_of_it_is_named_and_never_trusted() -> None:
    assert SERVES_ANN.serves(Peer(7, ANN)) and not SERVES_ANN.serves(Peer(7, BOB, frozenset({ML})))
    assert SERVES_ML.serves(Peer(7, BOB, frozenset({3, ML}))) and not SERVES_ML.serves(Peer(7, ANN, frozenset({3})))
    assert not Guests(OWN).serves(Peer(7, ANN))
    assert not SERVES_ANN.trusts(Peer(7, ANN)) and not SERVES_ML.trusts(Peer(7, BOB, frozenset({ML})))


@pytest.mark.parametrize("peer", [Peer(0, OWN), Peer(0, 0), Peer(0, ANN), Peer(7, UNMAPPED), Peer(0, UNMAPPED)])
def test_of_whom_the_kernels_word_says_little_nobody_is_served(peer: Peer) -> None:
    invited = Guests(UNMAPPED, frozenset({ANN, UNMAPPED}), frozenset({UNMAPPED}))
    assert not invited.serves(peer) and not invited.trusts(peer)
    assert not Guests(OWN).trusts(peer)


def test_a_group_that_stands_for_many_is_no_group() -> None:
    assert not Guests(OWN, groups=frozenset({UNMAPPED})).serves(Peer(7, ANN, frozenset({UNMAPPED})))


@pytest.mark.parametrize(
    ("peer", "says"),
    [
        (Peer(7, ANN), f"uid {ANN}"),
        (Peer(0, ANN), "another PID namespace"),
        (Peer(7, UNMAPPED), f"uid {UNMAPPED}, which"),
    ],
)
def test_a_refusal_says_why_and_what_to_do_and_names_nobody_else(peer: Peer, says: str) -> None:
    told = why_not(peer)
    assert says in told and "show the job's secret or a client token" in told and "allow_users" in told
    assert str(OWN) not in told and str(BOB) not in told


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        found = peer_of(one)
    assert (found.pid, found.uid) == (os.getpid(), os.getuid())
    assert found.groups == {os.getgid(), *os.getgroups()}


def test_names_and_numbers_are_understood() -> None:
    assert guests(["root", "4711"], ["4712"]) == Guests(os.getuid(), frozenset({0, 4711}), frozenset({4712}))
    assert number_of("root", "x", group=True) == 0


def test_names_that_nobody_has_are_refused() -> None:
    with pytest.raises(CannotStart, match="allow_users: there is no user 'no-such-user' on this host: expected a name"):
        guests(["no-such-user"], [])
    with pytest.raises(CannotStart, match="allow_groups: there is no group 'no-such-group'.*getent group"):
        guests([], ["no-such-group"])


def test_a_number_that_stands_for_many_cannot_be_named() -> None:
    with pytest.raises(CannotStart, match="'65534' is user 65534, which stands for everybody"):
        guests(["65534"], [])


def test_where_nobody_is_named_the_group_of_a_shared_folder_is_served(tmp_path: Path) -> None:
    gid = tmp_path.stat().st_gid
    for mode, groups in ((0o700, set()), (0o750, {gid}), (0o755, set()), (0o711, set())):
        tmp_path.chmod(mode)
        assert with_folder(Guests(OWN), tmp_path).groups == groups


def test_where_somebody_is_named_the_folders_group_alone_is_not_enough(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    assert with_folder(SERVES_ANN, tmp_path) == SERVES_ANN


def test_to_name_somebody_whom_the_folder_keeps_out_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(CannotStart, match=rf"let nobody in at {tmp_path}: it has mode 0700, .*chmod 711"):
        with_folder(SERVES_ANN, tmp_path)
