"""As Horovod has it, and further: the secret opens everything, so it is shown to nobody: not in logs, argument lists,
environments of others, status, trace or metrics."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.security.conftest import ROOT, SECRET, Start

from collectived_proto.viewing_token import viewing_token

pytestmark = pytest.mark.timeout(150)
VIEWING, CLIENT = "viewing-token-of-these-tests", "client-token-of-these-tests"
HIDDEN = (SECRET, VIEWING, CLIENT, viewing_token(SECRET))
RANK = """
import sys
import collectived as cd
with cd.connect(sys.argv[1]) as session, session.join("all", 2, timeout=30) as group:
    group.all_reduce("sum", 1.0)
    print("busy", flush=True)
    sys.stdin.readline()
    group.barrier()
"""


def private(path: Path, text: str) -> str:
    path.write_text(f"{text}\n")
    path.chmod(0o600)
    return str(path)


def environment(**ours: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("COLLECTIVED")} | ours


def command(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "collectived_launcher", *words]
    return subprocess.run(line, env=environment(**variables), capture_output=True, text=True, timeout=60, check=False)


def shown_by(pid: int) -> str:
    """What every user sees of a process, and what its own user does."""
    return "".join(Path(f"/proc/{pid}/{part}").read_text(errors="replace") for part in ("cmdline", "environ"))


def test_no_secret_or_token_is_in_a_log_an_argument_an_environment_status_trace_or_metrics(
    folder: Path, start: Start, tmp_path: Path
) -> None:
    files = (
        *("--viewing-token-file", private(tmp_path / "v", VIEWING)),
        *("--client-tokens-file", private(tmp_path / "c", f"ci {CLIENT}")),
        *("--log-level", "debug", "--metrics", "0"),
    )
    alone = ("env",)  # no forks: their arguments and environment are not those of their server
    place = ("--listen", f"unix:{folder}/c.sock", "--listen", "127.0.0.1:0")
    coordinator = start("coordinator", *place, *files, within=alone)
    there = coordinator.wait_ready(30)
    words = ("worker", "--task", "0", "--folder", str(folder / "w"), "--coordinator", there["addresses"][1])
    worker = start(*words, "--listen", ":0", *files, within=alone)
    said = worker.wait_ready(30)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, said["addresses"][at]],
            env=environment(COLLECTIVED_SECRET_FILE=private(tmp_path / f"s{at}", shown)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for at, shown in enumerate((SECRET, CLIENT))
    ]
    for rank in ranks:
        assert rank.stdout and rank.stdout.readline() == "busy\n", rank.communicate()[1]
    told = [shown_by(pid) for pid in (there["pid"], said["pid"], *(rank.pid for rank in ranks))]
    for variables in ({"COLLECTIVED_SECRET": "wrong"}, {"COLLECTIVED_SECRET": VIEWING}, {"COLLECTIVED_SECRET": SECRET}):
        for verb in (("status", "--json", "--wide"), ("trace", "--output", str(tmp_path / "t.json")), ("drain",)):
            if verb[0] != "drain" or variables["COLLECTIVED_SECRET"] != SECRET:
                done = command(*verb, "--worker", said["addresses"][1], **variables)
                told += [done.stdout, done.stderr]
    told.append((tmp_path / "t.json").read_text())
    for one in (there, said):
        asking = urllib.request.Request(
            f"http://{_place(one['metrics'])}/metrics", headers={"authorization": f"Bearer {VIEWING}"}
        )
        with urllib.request.urlopen(asking, timeout=20) as answer:
            told.append(answer.read().decode())
    for rank in ranks:
        assert rank.stdin
        rank.stdin.write("\n")
        rank.stdin.flush()
    for rank in ranks:
        told += list(rank.communicate(timeout=60))
        assert not rank.returncode, told[-1]
    worker.close()
    coordinator.close()
    told += [worker.log, coordinator.log]
    assert all(told[at] for at in range(4)) and "all_reduce" in "".join(told)  # something was looked at
    assert not [hidden for hidden in HIDDEN for text in told if hidden in text]


def _place(address: str) -> str:
    return address.removeprefix("http://").strip("/")


LOOK = """
import json, os, re
from pathlib import Path
import collectived as cd
with cd.connect() as session, session.join() as group:
    group.barrier()
    if group.rank == 0:
        shown = {}
        for one in Path("/proc").glob("[0-9]*"):
            try:
                shown[one.name] = (one / "cmdline").read_text() + (one / "environ").read_text()
            except (OSError, UnicodeDecodeError):
                continue
        ours = {pid: text for pid, text in shown.items() if "MARK_OF_THIS_TEST" in text}
        (token,) = Path(os.environ["XDG_RUNTIME_DIR"]).glob("collectived/*/viewing-token")
        hidden = [token.read_text().strip()]
        found = {pid: re.findall(r"[0-9a-f]{64}", text) for pid, text in ours.items()}
        named = [pid for pid, text in ours.items() for one in hidden if one in text]
        print("FOUND", json.dumps([len(ours), sorted(sum(found.values(), [])), named]))
    group.barrier()
"""


def test_the_secret_that_launch_makes_is_in_no_argument_and_no_environment_of_the_job(folder: Path) -> None:
    """It is 64 hexadecimal digits, and its viewing token 32."""
    program = folder / "look.py"
    program.write_text(textwrap.dedent(LOOK))
    clean = {name: value for name, value in environment().items() if not re.search("[0-9a-f]{64}", value)}
    done = subprocess.run(
        [sys.executable, "-m", "collectived_launcher", "launch", "--workers", "2", "--metrics", "--"]
        + [sys.executable, str(program)],
        env={**clean, "XDG_RUNTIME_DIR": str(folder), "MARK_OF_THIS_TEST": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert not done.returncode, done.stderr
    (line,) = re.findall(r"FOUND (\[.*\])", done.stdout)
    processes, digits, named = json.loads(line)
    assert processes >= 6  # the launcher, a coordinator, two workers and two clients
    assert not digits and not named
    assert not re.search(r"[0-9a-f]{64}", done.stdout + done.stderr)


def test_whoever_may_look_sees_no_secret_in_what_a_worker_tells_of_its_sessions(
    worker: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The names of sessions are secrets too: who knows one can submit in its place."""
    import grpc
    from tests.e2e.raw_client import Raw

    from collectived_proto.v1 import status_pb2, trace_pb2, worker_pb2_grpc

    address = worker()["address"]
    one = Raw(address)
    one.join("mine", 1, 0)
    try:
        with grpc.insecure_channel(address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            told = [stub.Status(status_pb2.StatusRequest(), timeout=10).SerializeToString()]
            told += [part.SerializeToString() for part in stub.Trace(trace_pb2.TraceRequest(), timeout=10)]
    finally:
        name = one.opened.session
        one.close()
    assert b"mine" in b"".join(told)
    assert not any(name in text or name.hex().encode() in text for text in told)
