"""`collectived status`: which job is meant, what is shown, and what is said when nobody answers."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import grpc
import pytest
from rich.console import Console

from collectived_launcher.__main__ import run
from collectived_launcher.status.find import PATIENCE, Unreachable, find
from collectived_launcher.status.tables import devices, size, span, tables
from collectived_proto.local import jobs
from collectived_proto.v1 import common_pb2 as common
from collectived_proto.v1 import status_pb2 as pb
from collectived_proto.v1 import worker_pb2_grpc


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of our own, and none of the variables that clients have."""
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.delenv("COLLECTIVED_WORKER", raising=False)
        monkeypatch.setattr(jobs, "SYSTEM_FOLDER", Path(folder) / "system")
        yield Path(folder)


def publish(name: str, *workers: str) -> None:
    jobs.publish(jobs.JobFile(name, os.getpid(), "unix:/c.sock", workers, "python train.py"))


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
    )
    group = pb.GroupStatus(
        name="j/world", generation=5, state="ready", size=2, members=members, collectives_done=7, bytes_reduced=3 << 20
    )
    group.in_flight.append(flight)
    cpus = [f"/job:worker/replica:0/task:0/device:CPU:{n}" for n in range(8)]
    lost = common.Verdict(group="old", generation=3, code=14, message="rank 0 lost")
    return pb.StatusReply(
        unix_time=1000.0,
        coordinator=pb.CoordinatorStatus(address="unix:/c.sock", epoch=9, pid=60, uptime_seconds=75, job="j"),
        workers=[pb.WorkerStatus(task=0, host="h", pid=61, devices=cpus, sessions=2, connected=True, threads=9)],
        groups=[group],
        failures=[pb.Failure(unix_time=940.0, verdict=lost)],
        warnings=["worker 1 did not answer"],
    )


def shown(answer: pb.StatusReply) -> list[str]:
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        for part in tables(answer):
            console.print(part)
    return [line.rstrip() for line in capture.get().splitlines() if line.strip()]


def test_what_hurts_comes_first() -> None:
    assert shown(reply())[:4] == [
        "WARNING  worker 1 did not answer",
        "WAITING  group world generation 5: barrier() #7 waits for rank 1 since 2.5 s (called at train.py:90)",
        "FAILED   old generation 3: UNAVAILABLE 1 min 0 s ago: rank 0 lost",
        "coordinator  unix:/c.sock  job j  pid 60  epoch 9  up 1 min 15 s  release",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("0", "h", "61", "CPU:0…7", "2", "connected"),
        ("world", "5", "ready", "2", "7", "3.0 MiB", "1"),
        ("world", "0", "0 (h)", "CPU:0", "70", "-", "nothing yet", "train.py:88"),
        ("world", "1", "0 (h)", "CPU:1", "71", "all_reduce(mean) #6", "2.5 s"),
        ("world", "barrier() #7", "2.0 KiB", "ring"),
    ],
)
def test_tables_have_a_row_for_everybody(words: tuple[str, ...]) -> None:
    assert any(all(word in line for word in words) for line in shown(reply())), shown(reply())


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
    return answer


def test_sends_and_receives_that_wait_are_in_flight_and_hurt_when_they_wait_long() -> None:
    lines = shown(with_posts())
    waiting = "WAITING  group world generation 5: recv(source=0, tag=3) of rank 1 waits for rank 0 since 75.0 s"
    assert lines[2] == f"{waiting} (called at train.py:95)"
    assert not any("send(to=1, tag=0) of rank" in line for line in lines)
    flights = lines[next(index for index, line in enumerate(lines) if line.startswith("in flight")) :]
    rows = [line.split("  ") for line in flights if "tag=" in line]
    assert [[word.strip() for word in row if word.strip()] for row in rows] == [
        ["world", "recv(source=0, tag=3)", "-", "1 min 15 s", "1", "0", "train.py:95", "-"],
        ["world", "send(to=1, tag=0)", "2.0 KiB", "0.5 s", "0", "1", "train.py:96", "-"],
    ]


def test_sends_and_receives_alone_are_shown_too() -> None:
    answer = with_posts()
    del answer.groups[0].in_flight[:]
    assert any("recv(source=0, tag=3)" in line and "1 min 15 s" in line for line in shown(answer))


def test_what_waits_in_a_group_in_which_that_is_normal_does_not_hurt() -> None:
    answer = with_posts()
    answer.groups[0].idle = True
    lines = shown(answer)
    assert not any("WAITING" in line for line in lines)
    assert any("barrier() #7" in line for line in lines) and any("recv(source=0, tag=3)" in line for line in lines)


def test_a_hint_that_is_not_followed_is_a_note() -> None:
    answer = reply()
    answer.groups[0].notes.append("on CPU devices: the hint NCCL falls back to RING")
    note = "NOTE     group world generation 5 is on CPU devices: the hint NCCL falls back to RING"
    assert note in shown(answer)


def test_an_answer_without_coordinator_says_so() -> None:
    assert shown(pb.StatusReply()) == ["coordinator  not reachable"]


def test_without_a_coordinator_groups_are_shown_as_one_worker_sees_them() -> None:
    whole = reply()
    (group,) = whole.groups
    lane = pb.LaneStatus(
        group="j/world",
        generation=5,
        ranks=[0],
        collectives_done=7,
        bytes_reduced=3 << 20,
        members=group.members[:1],
        in_flight=group.in_flight,
        posts=with_posts().groups[0].posts,
        notes=["on CPU devices: the hint NCCL falls back to RING"],
    )
    alone = pb.StatusReply(warnings=["the coordinator does not answer"], workers=whole.workers)
    alone.workers[0].connected = False
    alone.workers[0].lanes.append(lane)
    lines = shown(alone)
    assert lines[:4] == [
        "WARNING  the coordinator does not answer",
        "WAITING  group world generation 5: barrier() #7 waits for rank 1 since 2.5 s (called at train.py:90)",
        "WAITING  group world generation 5: recv(source=0, tag=3) of rank 1 waits for rank 0 since 75.0 s (called at "
        "train.py:95)",
        "coordinator  not reachable",
    ]
    for words in (
        ("0", "h", "61", "CPU:0…7", "lost"),
        ("world", "5", "seen from here", "1 here", "7", "3.0 MiB"),
        ("world", "0", "0 (h)", "CPU:0", "70"),
        ("world", "barrier() #7", "ring"),
        ("world", "send(to=1, tag=0)"),
        ("NOTE", "falls back to RING"),
    ):
        assert any(all(word in line for word in words) for line in lines), (words, lines)


def test_numbers_are_told_as_people_read_them() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]
    assert [span(s) for s in (0.44, 59.9, 200, 7500)] == ["0.4 s", "59.9 s", "3 min 20 s", "2 h 5 min"]
    assert devices(["x/device:CPU:0", "x/device:GPU:0", "x/device:CPU:2"]) == "CPU:0,2 GPU:0"


def test_the_argument_goes_before_the_environment_before_the_running_job(runtime: Path) -> None:
    publish("j", "unix:/file.sock")
    environment = {"COLLECTIVED_WORKER": "unix:/env.sock"}
    assert find("unix:/arg.sock", environment).workers == ("unix:/arg.sock",)
    assert find(None, environment).workers == ("unix:/env.sock",)
    assert find(None, {}).workers == ("unix:/file.sock",)


def test_the_systems_worker_is_asked_where_no_job_of_the_user_runs(runtime: Path) -> None:
    (runtime / "system").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{runtime}/system/worker.sock")
        target = find(None, {})
        assert (target.workers, target.origin) == ((f"unix:{runtime}/system/worker.sock",), "the system's worker")
        publish("j", "unix:/file.sock")
        assert find(None, {}).workers == ("unix:/file.sock",)


def test_several_jobs_are_listed(runtime: Path) -> None:
    publish("a", "unix:/a.sock")
    publish("b", "unix:/b.sock")
    with pytest.raises(click.UsageError) as caught:
        find(None, {})
    assert "--worker unix:/a.sock  (a: python train.py)" in str(caught.value)
    assert "--worker unix:/b.sock  (b: python train.py)" in str(caught.value)
    assert run(["status"]) == 2


def test_nothing_running_shows_the_line_to_type(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unreachable):
        find(None, {})
    assert run(["status"]) == 3
    assert "collectived launch --workers 2 --clients 2 -- python train.py" in capsys.readouterr().err


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


def test_a_worker_that_does_not_answer_is_unreachable_within_three_seconds(silent: str) -> None:
    begun = time.monotonic()
    assert run(["status", "--worker", silent]) == 3
    assert time.monotonic() - begun < 3


def test_where_all_workers_are_silent_it_takes_little_longer(silent: str, capsys: pytest.CaptureFixture[str]) -> None:
    publish("j", silent, silent, silent, silent)
    begun = time.monotonic()
    assert run(["status"]) == 3
    assert time.monotonic() - begun < 3 * PATIENCE
    assert capsys.readouterr().err.count("silent.sock") == 3


class Worker(worker_pb2_grpc.WorkerServicer):
    """Answers for its job."""

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        return reply()


@pytest.fixture
def worker(runtime: Path) -> Iterator[str]:
    """The address of a worker that serves."""
    server = grpc.server(ThreadPoolExecutor(1))
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
    assert "rank 1 since 2.5 s" in capsys.readouterr().out


def test_a_worker_that_is_silent_keeps_nobody_from_the_answer_of_another(
    worker: str, silent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    publish("j", silent, worker)
    assert run(["status"]) == 0
    assert "rank 1 since 2.5 s" in capsys.readouterr().out


def test_json_has_the_keys_of_the_proto_even_where_nothing_happened(
    worker: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", "--json", "--worker", worker]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {"unix_time", "coordinator", "workers", "groups", "failures", "warnings"}
    assert answer["workers"][0]["arena_bytes"] == "0"
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
