"""`collectived status`: which job is meant, what is shown, and what is said when nobody answers."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import grpc
import pytest
from rich.console import Console

from collectived_launcher.__main__ import run
from collectived_launcher.status.discovery import TIMEOUT, Target, Unreachable, find_target
from collectived_launcher.status.filters import filter_findings, filter_status
from collectived_launcher.status.tables import build_tables, devices_text
from collectived_proto.ipc import job_files
from collectived_proto.types import ANY_SOURCE
from collectived_proto.v1 import common_pb2 as common
from collectived_proto.v1 import status_pb2 as pb
from collectived_proto.v1 import worker_pb2_grpc


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of our own, and none of the variables that clients have."""
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.delenv("COLLECTIVED_WORKER", raising=False)
        monkeypatch.setattr(job_files, "SYSTEM_FOLDER", Path(folder) / "system")
        yield Path(folder)


def publish(name: str, *workers: str) -> None:
    job_files.write_job_file(job_files.JobFile(name, os.getpid(), "unix:/c.sock", workers, "python train.py"))


def reply() -> pb.StatusReply:
    """A job in which rank 1 is late."""
    members = [
        common.Member(
            rank=rank,
            worker=0,
            host="h",
            pid=70 + rank,
            device=f"/job:worker/replica:0/task:0/device:CPU:{rank}",
            last_instance=6 if rank else -1,
            last_op="all_reduce(mean)",
            last_site="train.py:88",
            idle_seconds=2.5,
            label="pod-1" if rank else "",
        )
        for rank in range(2)
    ]
    flight = pb.InFlight(
        instance=7,
        op="barrier()",
        site="train.py:90",
        seconds=2.5,
        arrived=[0],
        missing=[1],
        bytes=2048,
        algorithm="ring",
        why="the hint RING",
        state="arriving",
        packs=3,
        packs_done=1,
        shards=1,
    )
    group = pb.GroupStatus(
        name="j/world",
        key=4711,
        generation=5,
        state="ready",
        size=2,
        members=members,
        collectives_done=7,
        bytes_reduced=3 << 20,
    )
    group.rates.add(
        op="all_reduce",
        seconds=60,
        collectives=120,
        bytes=360 << 20,
        busy_seconds=30,
        waiting_seconds=6,
        algorithm_bandwidth=1.5e9,
        bus_bandwidth=2.25e9,
    )
    group.in_flight.append(flight)
    cpus = [f"/job:worker/replica:0/task:0/device:CPU:{n}" for n in range(8)]
    lost = common.Verdict(
        group="old", generation=3, code=14, message="rank 0 lost", from_instance=4, decided_by="coordinator"
    )
    return pb.StatusReply(
        unix_time=1000.0,
        answered_by="coordinator",
        coordinator=pb.CoordinatorStatus(address="unix:/c.sock", epoch=9, pid=60, uptime_seconds=75, job="j"),
        workers=[
            pb.WorkerStatus(
                task=0,
                host="h",
                pid=61,
                incarnation="a-1",
                devices=cpus,
                sessions=2,
                connected=True,
                threads=9,
                arena_bytes=1 << 20,
                arena_limit_bytes=4 << 30,
                resident_bytes=30 << 20,
                release="0.1.0",
                uptime_seconds=70,
            )
        ],
        groups=[group],
        failures=[pb.Failure(unix_time=940.0, verdict=lost)],
        warnings=["worker 1 did not answer"],
    )


def shown(answer: pb.StatusReply, wide: bool = True, **chosen: str) -> list[str]:
    console = Console(width=240, color_system=None)
    part = filter_status(answer, **chosen)
    with console.capture() as capture:
        for one in build_tables(part, filter_findings(answer, part), wide):
            console.print(one)
    return [line.rstrip() for line in capture.get().splitlines() if line.strip()]


ABSENT = "rank 1 (pod-1, host h, pid 71), which last called all_reduce(mean) #6"
WAITING = f"WAITING  group world: barrier() #7 at train.py:90 has waited 2.5 s for {ABSENT} at train.py:88"


def test_what_hurts_comes_first_and_then_counts() -> None:
    assert shown(reply(), wide=False)[:5] == [
        "WARNING  worker 1 did not answer",
        f"{WAITING}, 2.5 s ago",
        "FAILED   group old, 1 min 0 s ago: UNAVAILABLE: rank 0 lost",
        "coordinator  unix:/c.sock  job j  pid 60  up 1 min 15 s  release",
        "1 worker on 1 host, 1 group (1 ready), 2 ranks, 1 in flight, shared memory 1.0 MiB of 4.0 GiB",
    ]


def test_what_a_missing_rank_does_stands_beside_it_and_in_full_where_all_is_wanted() -> None:
    answer = reply()
    answer.groups[0].members[1].stack = "data.py:88 in load <- train.py:12 in main\nthread pin: wait.py:1 in \x1b[31m"
    doing = "data.py:88 in load <- train.py:12 in main"
    lines = shown(answer)
    assert lines[1] == f"{WAITING}, 2.5 s ago; now: {doing}" == shown(answer, wide=False)[1]
    table = [line.split(maxsplit=2) for line in lines[lines.index("now") :][3:5]]
    assert table == [["world", "1", doing], ["thread", "pin:", "wait.py:1 in \N{REPLACEMENT CHARACTER}[31m"]]


def test_numbers_of_the_inside_are_shown_where_all_is_wanted() -> None:
    answer = reply()
    answer.groups[0].key, answer.groups[0].generation = 7530258372214390785, 7530258372214390786
    answer.failures[0].verdict.generation, answer.failures[0].verdict.decided_by = (
        7530258372214390784,
        "/job:worker/task:1",
    )
    answer.groups[0].in_flight[0].seconds = 2.5
    brief, whole = ("\n".join(shown(answer, wide)) for wide in (False, True))
    assert not re.search(r"\d{19}|epoch|/job:worker|a-1", brief), brief
    assert all(str(7530258372214390784 + n) in whole for n in range(3)) and "epoch 9" in whole and "a-1" in whole
    assert "/job:worker" not in whole and "worker 1" in whole


def test_where_nothing_hurts_that_is_said() -> None:
    answer = reply()
    del answer.groups[0].in_flight[:], answer.failures[:], answer.warnings[:]
    assert shown(answer)[0] == "OK       nothing waits, and nothing has failed lately"


def test_of_many_failures_the_latest_are_among_what_hurts_and_the_others_counted() -> None:
    answer = reply()
    answer.failures.extend([answer.failures[0]] * 5)
    lines = shown(answer, wide=False)
    assert sum(line.startswith("FAILED") for line in lines) == 3
    assert "and 3 more failures: --wide shows them" in lines[5]
    assert sum(line.startswith("FAILED") for line in shown(answer)) == 6


def test_workers_ranks_and_flights_are_shown_where_all_is_wanted() -> None:
    titles = ["workers", "ranks", "in flight", "failures"]
    assert not [line for line in shown(reply(), wide=False) if line in titles]
    assert {line for line in shown(reply()) if line in titles} == set(titles)


@pytest.mark.parametrize(
    "words",
    [
        (
            "0",
            "h",
            "61",
            "a-1",
            "CPU:0…7",
            "2",
            "1.0 MiB of 4.0 GiB",
            "30.0 MiB",
            "9",
            "1 min 10 s",
            "0.1.0",
            "connected",
        ),
        ("world", "4711", "5", "ready", "2", "7", "3.0 MiB", "1"),
        ("world", "0", "0 (h)", "CPU:0", "70", "-", "nothing yet", "train.py:88"),
        ("world", "1", "0 (h)", "CPU:1", "71", "pod-1", "#6", "all_reduce(mean)", "2.5 s"),
        ("world", "barrier() #7", "arriving", "2.0 KiB", "2.5 s", "train.py:90", "ring", "the hint RING", "1 of 3"),
        ("world", "all_reduce", "120", "2.0", "3.0 MiB", "1.500", "2.250", "50.0 %", "10.0 %"),
        ("1 min 0 s", "old", "3", "#4", "UNAVAILABLE: rank 0 lost", "coordinator"),
    ],
)
def test_tables_have_a_row_for_everybody(words: tuple[str, ...]) -> None:
    assert any(all(word in line for word in words) for line in shown(reply())), shown(reply())


def test_what_daemons_and_clients_speak_is_told_beside_their_releases() -> None:
    answer = reply()
    answer.coordinator.release = "0.2.0"
    answer.coordinator.protocol.CopyFrom(common.Protocol(lowest=1, highest=2, release="0.2.0"))
    answer.workers[0].clients.append(common.Protocol(lowest=2, highest=3, release="0.3.0"))
    lines = shown(answer)
    assert any("release 0.2.0  protocol 1 to 2" in line for line in lines), lines
    (row,) = [line for line in lines if "a-1" in line]
    assert re.search(r" 0\.1\.0 +1 +0\.3\.0 \(2 to 3\) ", row), row


def test_rates_are_among_the_counts() -> None:
    assert any("all_reduce" in line and "2.250" in line for line in shown(reply(), wide=False))


def test_groups_of_other_jobs_keep_their_whole_name() -> None:
    answer = reply()
    answer.groups[0].name = "other/world"
    assert any("other/world" in line for line in shown(answer))


def test_a_young_collective_is_in_flight_but_does_not_hurt() -> None:
    answer = reply()
    answer.groups[0].in_flight[0].seconds = 0.2
    lines = shown(answer)
    assert not any("WAITING" in line for line in lines)
    assert any("barrier() #7" in line for line in lines)


def with_posts() -> pb.StatusReply:
    """Rank 1 waits for a letter of rank 0; rank 0 has just sent one."""
    answer = reply()
    group = answer.groups[0]
    group.posts.add(rank=1, peer=0, tag=3, op="recv(source=0, tag=3)", site="train.py:95", seconds=75)
    group.posts.add(rank=0, peer=1, op="send(to=1, tag=0)", site="train.py:96", seconds=0.5, bytes=2048)
    group.posts.add(rank=0, peer=ANY_SOURCE, op="recv(source=None, tag=0)", site="train.py:97", seconds=0.5)
    return answer


def test_sends_and_receives_that_wait_are_in_flight() -> None:
    rows = [line.split("  ") for line in shown(with_posts()) if "tag=" in line and "WAITING" not in line]
    assert [[word.strip() for word in row if word.strip()] for row in rows] == [
        ["world", "recv(source=0, tag=3)", "waiting", "-", "1 min 15 s", "1", "0", "train.py:95", "-", "-", "-"],
        ["world", "send(to=1, tag=0)", "waiting", "2.0 KiB", "0.5 s", "0", "1", "train.py:96", "-", "-", "-"],
        ["world", "recv(source=None, tag=0)", "waiting", "-", "0.5 s", "0", "any", "train.py:97", "-", "-", "-"],
    ]


def test_sends_and_receives_alone_are_shown_too() -> None:
    answer = with_posts()
    del answer.groups[0].in_flight[:]
    assert any("recv(source=0, tag=3)" in line and "1 min 15 s" in line for line in shown(answer))


def test_an_answer_without_coordinator_says_so() -> None:
    alone = pb.StatusReply(answered_by="/job:worker/task:0")
    assert "coordinator  not reachable  answered by worker 0" in shown(alone)


def test_without_a_coordinator_groups_are_shown_as_workers_see_them() -> None:
    alone = reply()
    alone.ClearField("coordinator")
    alone.answered_by = "/job:worker/task:0"
    alone.workers[0].connected = False
    alone.groups[0].state = "partial"
    lines = shown(alone)
    assert lines[1] == f"{WAITING}, 2.5 s ago"
    for words in (("0", "h", "61", "CPU:0…7", "not connected"), ("world", "5", "seen from here", "2", "7", "3.0 MiB")):
        assert any(all(word in line for word in words) for line in lines), (words, lines)


def test_an_elastic_group_that_forms_is_shown_with_both_sizes() -> None:
    answer = reply()
    answer.groups[0].MergeFrom(pb.GroupStatus(state="forming", size=8, min_size=4))
    assert any("2 of 4 to 8" in line for line in shown(answer))


def two_of_each() -> pb.StatusReply:
    """The job of `reply`, and beside it a worker on another host with a group of its own."""
    answer = reply()
    answer.workers.add(task=1, host="k", pid=81, connected=False, last_heartbeat_seconds=12)
    other = answer.groups.add(name="j/eval", generation=9, state="ready", size=1)
    other.members.add(rank=0, worker=1, host="k", pid=82)
    other.notes.append("on CPU devices: the hint NCCL falls back to RING")
    return answer


def test_of_one_group_all_is_shown_and_of_others_nothing() -> None:
    lines = shown(two_of_each(), wide=False, group="eval")
    assert lines[1] == "LOST     worker 1 (host k, pid 81) last reported 12.0 s ago"
    assert lines[2].startswith("NOTE     group eval is on CPU devices")
    assert not any("world" in line or "old" in line for line in lines)
    lines = shown(two_of_each(), wide=False, group="j/world")
    assert lines[1].startswith("WAITING") and not any("eval" in line or "LOST" in line for line in lines)
    assert shown(two_of_each(), group="old")[1].startswith("FAILED   group old")  # of which only its failure is left


def test_of_one_host_its_workers_and_their_ranks_are_shown() -> None:
    lines = shown(two_of_each(), wide=False, host="h")
    assert lines[1].startswith("WAITING") and not any("eval" in line or "81" in line for line in lines)
    lines = shown(two_of_each(), host="k")
    assert any("eval" in line and "1 (k)" in line for line in lines) and not any("(h)" in line for line in lines)


def test_a_rank_on_another_host_is_still_named_where_this_one_waits_for_it() -> None:
    answer = two_of_each()
    answer.groups[0].members[1].worker, answer.groups[0].members[1].host = 1, "k"
    assert "for rank 1 (pod-1, host k, pid 71)," in shown(answer, host="h")[1]


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"group": "train"}, "no group 'train'; there is eval, old, world"),
        ({"host": "x"}, "no worker on host 'x'; there are workers on h, k"),
    ],
)
def test_a_name_that_is_not_there_is_refused_with_those_that_are(chosen: dict[str, str], said: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        filter_status(two_of_each(), **chosen)
    assert str(caught.value) == said


@pytest.mark.parametrize("name", ["a[/b]c", "[red]x", ":smile:"])
def test_names_are_no_markup(
    worker: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = reply()
    answer.groups[0].name, answer.groups[0].members[1].label = f"j/{name}", name
    monkeypatch.setattr(Worker, "answer", answer)
    monkeypatch.setenv("COLUMNS", "400")
    assert run(["status", "--wide", "--worker", worker]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if name in line]
    assert sum(row.count(name) for row in rows if "CPU:1" in row and "WAITING" not in row) == 2
    assert len(rows) > 4


def test_names_do_not_steer_the_terminal(worker: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    answer = reply()
    answer.groups[0].name = "j/\x1b[2J\x9b31m\u202ex"
    monkeypatch.setattr(Worker, "answer", answer)
    assert run(["status", "--wide", "--worker", worker]) == 0
    told = capsys.readouterr().out
    assert not set("\x1b\x9b\u202e") & set(told) and "\ufffd[2J\ufffd31m\ufffdx" in told


def test_what_the_encoding_of_the_output_has_not_is_shown_as_well_as_it_can(worker: str) -> None:
    command = [sys.executable, "-m", "collectived_launcher", "status", "--wide", "--worker", worker]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "400"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "CPU:0?7" in done.stdout, done


def test_devices_are_told_in_short() -> None:
    assert devices_text(["x/device:CPU:0", "x/device:GPU:0", "x/device:CPU:2"]) == "CPU:0,2 GPU:0"


def test_the_argument_goes_before_the_environment_before_the_running_job(runtime: Path) -> None:
    publish("j", "unix:/file.sock")
    environment = {"COLLECTIVED_WORKER": "unix:/env.sock"}
    assert find_target("unix:/arg.sock", None, environment).workers == ("unix:/arg.sock",)
    assert find_target(None, None, environment).workers == ("unix:/env.sock",)
    assert find_target(None, None, {}).workers == ("unix:/file.sock",)


def test_the_systems_worker_is_asked_where_no_job_of_the_user_runs(runtime: Path) -> None:
    (runtime / "system").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{runtime}/system/worker.sock")
        target = find_target(None, None, {})
        assert (target.workers, target.origin) == ((f"unix:{runtime}/system/worker.sock",), "the system's worker")
        publish("j", "unix:/file.sock")
        assert find_target(None, None, {}).workers == ("unix:/file.sock",)


def test_several_jobs_are_listed(runtime: Path) -> None:
    publish("a", "unix:/a.sock")
    publish("b", "unix:/b.sock")
    with pytest.raises(click.UsageError) as caught:
        find_target(None, None, {})
    assert "--job a  (python train.py)" in str(caught.value)
    assert "--job b  (python train.py)" in str(caught.value)
    assert run(["status"]) == 2


def test_one_of_several_jobs_is_named(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish("a", "unix:/a.sock")
    publish("b", "unix:/b.sock")
    environment = {"COLLECTIVED_WORKER": "unix:/env.sock"}
    assert find_target(None, "b", environment) == Target(("unix:/b.sock",), "job b", "unix:/c.sock")
    assert run(["status", "--job", "c"]) == 3
    assert "you have no job 'c' running on this host; running jobs: a, b" in capsys.readouterr().err
    for command in ("status", "trace", "drain"):
        assert run([command, "--job", "a", "--worker", "unix:/a.sock"]) == 2
        assert "exclude each other" in capsys.readouterr().err


def test_a_job_with_a_file_for_each_of_its_hosts_counts_as_one(runtime: Path) -> None:
    publish("a", "unix:/a.sock")
    for host in range(2):
        job = job_files.JobFile("b", os.getpid(), "unix:/c.sock", (f"unix:/b{host}.sock",), "python train.py")
        job_files.write_job_file(job, f"b.{host}")
    with pytest.raises(click.UsageError, match="^you have 2 jobs running on this host"):
        find_target(None, None, {})


def test_nothing_running_shows_the_line_to_type(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unreachable):
        find_target(None, None, {})
    assert run(["status"]) == 3
    assert "collectived launch --workers 2 --clients 2 -- python train.py" in capsys.readouterr().err


def test_a_job_that_is_starting_is_named(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = job_files.ensure_runtime_folder()
    (folder / f"me-{os.getpid()}-ab12cd").mkdir()
    (folder / "lab").mkdir()  # of a cluster
    assert run(["status"]) == 3
    said = capsys.readouterr().err
    assert f"you have no job on this host that serves yet; starting: me-{os.getpid()}-ab12cd" in said
    publish(f"me-{os.getpid()}-ab12cd", "unix:/none.sock")
    assert job_files.list_starting_jobs() == []


def test_a_socket_that_is_not_there_is_unreachable(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--worker", f"unix:{runtime}/no.sock"]) == 3
    error = capsys.readouterr().err
    assert "UNREACHABLE" in error and "known from --worker" in error and "no.sock" in error


@pytest.fixture
def silent(runtime: Path) -> Iterator[str]:
    """The address of somebody who listens and never answers, as a worker that was stopped."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"{runtime}/silent.sock")
        sock.listen()
        yield f"unix:{runtime}/silent.sock"


def test_a_worker_that_does_not_answer_is_unreachable(silent: str) -> None:
    begun = time.monotonic()
    assert run(["status", "--worker", silent]) == 3
    assert time.monotonic() - begun < 10 * TIMEOUT


def test_where_all_workers_are_silent_three_are_asked_beside_each_other(
    silent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    publish("j", silent, silent, silent, silent)
    begun = time.monotonic()
    assert run(["status"]) == 3
    assert time.monotonic() - begun < 10 * TIMEOUT
    assert capsys.readouterr().err.count("silent.sock") == 3


class Worker(worker_pb2_grpc.WorkerServicer):
    """Answers for its job."""

    answer = reply()
    hangs: threading.Event | None = None  # where it is asked for the whole

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        if self.hangs and not request.local_only:
            self.hangs.wait(60)
        return self.answer


@pytest.fixture
def worker(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a worker that serves; it is given all the time that a busy machine may take."""
    monkeypatch.setattr("collectived_launcher.status.discovery.TIMEOUT", 30.0)
    server = grpc.server(ThreadPoolExecutor(2))
    worker_pb2_grpc.add_WorkerServicer_to_server(Worker(), server)
    address = f"unix:{runtime}/w.sock"
    server.add_insecure_port(address)
    server.start()
    yield address
    server.stop(None).wait()


def test_the_running_job_is_asked_and_a_dead_worker_is_passed_over(
    worker: str, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish("j", f"unix:{runtime}/dead.sock", worker)
    assert run(["status"]) == 0
    assert "has waited 2.5 s for rank 1" in " ".join(capsys.readouterr().out.split())


def test_a_worker_that_is_silent_keeps_nobody_from_the_answer_of_another(
    worker: str, silent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    publish("j", silent, worker)
    assert run(["status"]) == 0
    assert "has waited 2.5 s for rank 1" in " ".join(capsys.readouterr().out.split())


def test_what_workers_know_is_taken_where_the_whole_takes_too_long(
    worker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    over = threading.Event()
    monkeypatch.setattr(Worker, "hangs", over)
    try:
        assert run(["status", "--worker", worker]) == 0  # while the question for the whole still waits
    finally:
        over.set()
    told = " ".join(capsys.readouterr().out.split())
    assert "no answer for the whole job within 0.4 s" in told and "has waited 2.5 s for rank 1" in told


def test_a_process_that_is_stopped_is_not_waited_for(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("collectived_launcher.status.discovery.TIMEOUT", 3600.0)
    program = (
        "import signal, socket, os; s = socket.socket(socket.AF_UNIX); s.bind('w.sock'); s.listen(); print(flush=True)"
    )
    program += "; os.kill(os.getpid(), signal.SIGSTOP)"
    with subprocess.Popen([sys.executable, "-c", program], cwd=runtime, stdout=subprocess.PIPE) as process:
        try:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert run(["status", "--worker", f"unix:{runtime}/w.sock"]) == 3
        finally:
            process.kill()
    assert f"process {process.pid} is stopped" in capsys.readouterr().err


def test_json_has_the_keys_of_the_proto_even_where_nothing_happened(
    worker: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", "--json", "--worker", worker]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {field.name for field in pb.StatusReply.DESCRIPTOR.fields}
    assert answer["workers"][0]["descriptors"] == 0
    assert answer["groups"][0]["in_flight"][0]["missing"] == [1]


def test_what_auto_chooses_is_shown_where_there_is_a_choice() -> None:
    answer = reply()
    table = [
        common.Tier(algorithm="one_shot", shards=1, limit=4096, bytes_per_pack=4 << 20),
        common.Tier(algorithm="ring", shards=2, limit=-1, bytes_per_pack=4 << 20),
    ]
    answer.groups[0].table.extend(table)
    assert not [line for line in shown(answer) if line.startswith("AUTO")]
    answer.groups[0].members[1].worker = 1
    assert "AUTO in world: up to 4096 bytes: one_shot; more: ring in 2 shards; packs of 4.0 MiB" in shown(answer)
