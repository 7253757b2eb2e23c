"""As MCCS has it: who somebody is on a Unix socket is the kernel's word; another user gets nothing uninvited."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.raw_client import Raw
from tests.e2e.security.conftest import SECRET, Place, Start, asked, needs_root

from collectived_proto.ipc import messages
from collectived_proto.v1 import common_pb2, worker_pb2
from collectived_runtime.auth.peers import AllowedUsers, set_socket_mode

ANN, BOB, ML = 54320, 54321, 54330
EVERYTHING = ("status", "open_session", "collective", "drain")
Worker = Callable[..., dict[str, Any]]

pytestmark = [needs_root, pytest.mark.timeout(150)]


def codes(outcomes: dict[str, tuple[str, str]]) -> set[str]:
    return {code for code, _ in outcomes.values()}


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_another_user_does_not_even_get_a_connection_where_nobody_is_invited(worker: Worker, mode: int) -> None:
    found = asked(worker(mode=mode)["address"], ANN, *EVERYTHING)
    assert codes(found) == {"UNAVAILABLE"} and all("Permission denied" in said for _, said in found.values())


def test_of_a_shared_folder_its_group_may_use_the_worker_and_nobody_else_anything(worker: Worker) -> None:
    address = worker(mode=0o750, gid=ML)["address"]
    member = asked(address, ANN, *EVERYTHING, groups=f"{ANN},{ML}")
    assert member["collective"] == ("ok", "shared memory") and member["status"][0] == member["open_session"][0] == "ok"
    assert member["drain"][0] == "PERMISSION_DENIED" and "others may open sessions" in member["drain"][1]
    assert codes(asked(address, BOB, *EVERYTHING)) == {"UNAVAILABLE"}


@pytest.fixture
def with_tokens(folder: Path) -> tuple[str, ...]:
    """Options of a worker at which others than those named may knock, to show a client token."""
    return tokens_option(folder)


def tokens_option(folder: Path) -> tuple[str, ...]:
    tokens = folder / "tokens"
    tokens.write_text("ci ci-token-of-these-tests\n")
    tokens.chmod(0o600)
    return "--client-tokens-file", str(tokens)


@pytest.mark.parametrize("option", ["--allow-users", "--allow-groups"])
def test_whom_nobody_has_named_does_not_even_get_a_connection(worker: Worker, folder: Path, option: str) -> None:
    if not has_access_control_lists(folder):
        pytest.skip(f"the file system of {folder} has no access control lists")
    said = worker(option, str(ANN), mode=0o711)
    assert asked(said["address"], ANN, "collective")["collective"] == ("ok", "shared memory")
    found = asked(said["address"], BOB, *EVERYTHING, shows=SECRET)
    assert codes(found) == {"UNAVAILABLE"} and all("Permission denied" in said for _, said in found.values())
    door = Path(said["address"].removeprefix("unix:")).with_name("door-0.sock")
    knock = "import os, socket, sys; os.setgroups([]); os.setgid({0}); os.setuid({0}); s = socket.socket(1, 5)"
    command = [sys.executable, "-c", f"{knock.format(BOB)}; s.connect(sys.argv[1])", str(door)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode and "PermissionError" in done.stderr


def has_access_control_lists(folder: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(str(folder / "probe"))
        set_socket_mode(str(folder / "probe"), AllowedUsers(0, frozenset({ANN})))
    return (folder / "probe").stat().st_mode & 0o007 == 0


def test_of_those_whom_the_folder_lets_in_only_those_named_are_served(
    worker: Worker, with_tokens: tuple[str, ...]
) -> None:
    address = worker("--allow-users", str(ANN), *with_tokens, mode=0o750, gid=ML)["address"]
    named = asked(address, ANN, *EVERYTHING, groups=f"{ANN},{ML}")
    assert named["collective"] == ("ok", "shared memory") and named["drain"][0] == "PERMISSION_DENIED"
    other = asked(address, BOB, *EVERYTHING, groups=f"{BOB},{ML}")
    assert codes(other) == {"UNAUTHENTICATED"}
    for _, said in other.values():
        assert f"you are uid {BOB}" in said and "allow_users" in said
        assert str(ANN) not in said and SECRET not in said
    assert not any("/tmp" in other[call][1] for call in ("status", "open_session", "drain"))


def test_a_group_is_served_by_any_of_a_users_groups(worker: Worker, with_tokens: tuple[str, ...]) -> None:
    address = worker("--allow-groups", str(ML), *with_tokens, mode=0o711)["address"]
    assert asked(address, ANN, "collective", groups=f"{ANN},7,{ML}") == {"collective": ("ok", "shared memory")}
    assert codes(asked(address, BOB, *EVERYTHING)) == {"UNAUTHENTICATED"}


@pytest.fixture(scope="module")
def of_ann(lasting: Place) -> str:
    """The address of a worker at which she is invited, and others may knock."""
    return str(lasting.worker("--allow-users", str(ANN), *tokens_option(lasting.folder), mode=0o711)["address"])


@pytest.mark.parametrize("shows", [SECRET[:-1], f"{SECRET}0", SECRET.upper(), "x"])
def test_a_wrong_secret_opens_nothing_to_another_user(of_ann: str, shows: str) -> None:
    found = asked(of_ann, BOB, *EVERYTHING, shows=shows)
    assert codes(found) == {"UNAUTHENTICATED"} and not any(SECRET in said for _, said in found.values())


def test_the_secret_opens_everything_to_another_user(worker: Worker, with_tokens: tuple[str, ...]) -> None:
    address = worker("--allow-users", str(ANN), *with_tokens, mode=0o711)["address"]
    found = asked(address, BOB, *EVERYTHING, shows=SECRET)
    assert found["collective"] == ("ok", "shared memory")
    assert found["drain"][0] not in ("UNAUTHENTICATED", "PERMISSION_DENIED")


def test_a_user_who_stands_for_many_is_served_with_the_secret_alone(of_ann: str) -> None:
    found = asked(of_ann, 65534, *EVERYTHING)
    assert codes(found) == {"UNAUTHENTICATED"} and "stands for every user" in found["status"][1]
    assert asked(of_ann, 65534, "collective", shows=SECRET)["collective"] == ("ok", "shared memory")


def test_who_is_in_another_pid_namespace_is_served_with_the_secret_alone(worker: Worker) -> None:
    if not shutil.which("unshare"):
        pytest.skip("unshare (util-linux) is not installed")
    # The worker sees no number of a process outside of its namespace, be it root's.
    address = worker("--allow-users", str(ANN), mode=0o711, within=("unshare", "--pid", "--fork", "--kill-child"))
    for uid in (ANN, 0):
        found = asked(address["address"], uid, *EVERYTHING)
        assert codes(found) == {"UNAUTHENTICATED"} and "another PID namespace" in found["status"][1]
    assert asked(address["address"], ANN, "collective", shows=SECRET)["collective"][0] == "ok"


def test_who_has_no_number_in_the_workers_user_namespace_is_served_with_the_secret_alone(
    worker: Worker, folder: Path
) -> None:
    within = ("unshare", "--user", "--map-root-user")
    if not shutil.which("unshare") or subprocess.run([*within, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespace can be made here")
    address = worker("--allow-users", str(ANN), mode=0o711, within=within)["address"]
    found = asked(address, ANN, *EVERYTHING)
    assert codes(found) == {"UNAUTHENTICATED"} and "stands for every user" in found["status"][1]
    assert asked(address, ANN, "collective", shows=SECRET)["collective"] == ("ok", "shared memory")
    assert asked(address, 0, "collective")["collective"] == ("ok", "shared memory")


def test_a_coordinator_serves_its_own_user_root_and_whom_it_is_told_to(
    folder: Path, start: Start, with_tokens: tuple[str, ...]
) -> None:
    closed, told = folder / "closed", folder / "told"
    closed.mkdir(mode=0o755)
    told.mkdir(mode=0o711)
    first = start("coordinator", "--listen", f"unix:{closed}/c").wait_ready(30)["address"]
    daemon = start("coordinator", "--listen", f"unix:{told}/c", "--allow-users", str(ANN), *with_tokens)
    second = daemon.wait_ready(30)["address"]
    assert asked(first, ANN, "coordinator_status")["coordinator_status"][0] == "UNAVAILABLE"
    assert asked(second, ANN, "coordinator_status")["coordinator_status"] == ("ok", "coordinator")
    assert asked(second, BOB, "coordinator_status")["coordinator_status"][0] == "UNAUTHENTICATED"
    assert asked(second, BOB, "coordinator_status", shows=SECRET)["coordinator_status"] == ("ok", "coordinator")


def test_a_name_that_nobody_has_keeps_a_daemon_from_starting(folder: Path, start: Start) -> None:
    for option in ("--allow-users", "--allow-groups"):
        daemon = start("coordinator", "--listen", f"unix:{folder}/c", option, "no-such-name")
        assert daemon.process.wait(30) == 1
        daemon.close()
        assert "no-such-name" in daemon.log and "on this host: expected a name" in daemon.log


def test_the_tokens_of_one_user_are_nothing_in_the_hands_of_another(of_ann: str) -> None:
    """A session of ours gives its one-time token away, and our own user id with it: which is not theirs."""
    ours = Raw(of_ann)
    try:
        asking = worker_pb2.OpenSessionRequest(protocol=common_pb2.Protocol(lowest=1, highest=1), local=True)
        stream = ours.stub.OpenSession(asking, timeout=60)
        opened = next(stream).opened
        theirs = subprocess.run(
            [
                *(sys.executable, "-c"),
                "import os, socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); os.setgroups([]);"
                f"os.setgid({ANN}); os.setuid({ANN}); s.settimeout(20); s.connect(sys.argv[1]);"
                "s.send(bytes.fromhex(sys.argv[2])); print(s.recv(100))",
                *(opened.door, messages.encode_hello(opened.token).hex()),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert theirs.stdout.strip() == "b''"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:  # and it was used up by that
            late.settimeout(20)
            late.connect(opened.door)
            late.send(messages.encode_hello(opened.token))
            assert late.recv(100) == b""
        stream.cancel()
    finally:
        ours.close()
    assert os.getuid() == 0
