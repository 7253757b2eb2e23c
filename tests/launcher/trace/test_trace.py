"""`collectived trace`: what becomes of what workers tell, and of workers that tell nothing."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from tests.trace_event_format import check, first_and_last, parsed

from collectived_launcher.__main__ import run
from collectived_launcher.trace import perfetto
from collectived_launcher.trace.cli import _summary_lines
from collectived_launcher.trace.collect import CollectedTrace, add_reply
from collectived_launcher.trace.perfetto import PerfettoTrace
from collectived_launcher.trace.trace_events import Slice, TraceProcess
from collectived_proto.errors import Code
from collectived_proto.v1 import trace_pb2 as pb
from collectived_proto.v1 import worker_pb2_grpc

KEY, GENERATION = (1 << 62) + 1, (1 << 62) + 2


def group_loop(*ranks: int, submitted: dict[int, int]) -> pb.TraceLane:
    standings = [
        pb.TraceRank(
            rank=rank,
            submitted=submitted[rank],
            finished=submitted[rank] - 1,
            last_op="all_reduce(sum)",
            last_site="train.py:8",
            host="h",
            pid=70 + rank,
        )
        for rank in ranks
    ]
    places = [pb.TracePlace(task=0, ranks=[0, 1]), pb.TracePlace(task=1, ranks=[2, 3])]
    return pb.TraceLane(
        group="world",
        key=KEY,
        size=4,
        ranks=ranks,
        tasks=[0, 1],
        living=True,
        generation=GENERATION,
        standings=standings,
        places=places,
    )


def collective(number: int, arrived: dict[int, float], started: float, ended: float, **more: Any) -> pb.TraceCollective:
    arrivals = [pb.TraceArrival(rank=rank, at=at, site="train.py:8") for rank, at in arrived.items()]
    return pb.TraceCollective(
        lane=0,
        generation=GENERATION,
        instance=number,
        op="all_reduce(sum)",
        bytes=4096,
        algorithm="ring",
        packs=1,
        shards=1,
        arrivals=arrivals,
        started=started,
        ended=ended,
        **more,
    )


def move(kind: pb.TraceMark.Kind, task: int, begin: float, end: float) -> pb.TraceMark:
    return pb.TraceMark(kind=kind, task=task, begin=begin, end=end)


def replies(offset: float = 0.0, error: float = 0.0) -> list[pb.TraceReply]:
    """Two workers, of which the second has a clock of its own: one collective is done, the next waits for rank 2."""
    clock = pb.WorkerClock(offset_seconds=offset, error_seconds=error, how="heartbeat" if error else "same clock")
    back = -offset
    first = pb.WorkerTrace(
        task=0,
        host="a",
        pid=60,
        now=20.0,
        clock=pb.WorkerClock(how="same clock"),
        lanes=[group_loop(0, 1, submitted={0: 1, 1: 1})],
        collectives=[
            collective(1, {0: 12.0, 1: 12.5}, 12.5, 0.0, waits_for=[1]),
            collective(
                0,
                {0: 10.0, 1: 10.1},
                10.1,
                10.5,
                marks=[
                    pb.TraceMark(kind=pb.TraceMark.FOLD, begin=10.1, end=10.2),
                    move(pb.TraceMark.SEND, 1, 10.2, 10.3),
                    move(pb.TraceMark.RECEIVE, 1, 10.2, 10.4),
                    pb.TraceMark(kind=pb.TraceMark.STRAND, begin=10.1, end=10.5),
                ],
                traffic=[pb.TraceTraffic(task=1, sent=2048, received=2048)],
            ),
        ],
        last=True,
    )
    second = pb.WorkerTrace(
        task=1,
        host="b",
        pid=61,
        now=20.0 + back,
        clock=clock,
        lanes=[group_loop(2, 3, submitted={2: 0, 3: 1})],
        collectives=[collective(1, {3: 12.2 + back}, 0.0, 0.0, missing=[2])],
        last=False,
    )
    rest = pb.WorkerTrace(
        task=1,
        collectives=[
            collective(
                0,
                {3: 10.2 + back, 2: 10.15 + back},
                10.2 + back,
                10.5 + back,
                marks=[
                    move(pb.TraceMark.RECEIVE, 0, 10.2 + back, 10.35 + back),
                    move(pb.TraceMark.SEND, 0, 10.2 + back, 10.3 + back),
                ],
            )
        ],
        last=True,
    )
    time = pb.TraceTime(unix=1000.0, monotonic=20.0)
    return [
        pb.TraceReply(time=time),
        pb.TraceReply(worker=first),
        pb.TraceReply(worker=second),
        pb.TraceReply(worker=rest),
        pb.TraceReply(last=True),
    ]


def collected(parts: Iterable[pb.TraceReply]) -> CollectedTrace:
    account = CollectedTrace()
    for reply in parts:
        add_reply(account, reply)
    return account


def made(*parts: pb.TraceReply) -> dict[str, Any]:
    """The trace, as it is written and read again."""
    return parsed("".join(PerfettoTrace(collected(parts)).lines()))


def of(trace: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") == category and event["ph"] == "X"]


def test_three_have_arrived_and_one_is_absent() -> None:
    trace = made(*replies())
    waiting = [event for event in of(trace, "collective") if event["args"]["instance"] == 1]
    assert sorted(event["args"]["rank"] for event in waiting) == [0, 1, 3]
    assert {event["args"]["outcome"] for event in waiting} == {"in flight"}
    (absent,) = of(trace, "absence")
    assert absent["name"] == "rank 2 has not arrived" and absent["pid"] == 1
    args = absent["args"]
    assert (args["key"], args["generation"], args["instance"]) == (str(KEY), str(GENERATION), 1)
    assert (args["rank"], args["worker"], args["host"], args["pid"]) == (2, 1, "h", 72)
    assert (args["last_op"], args["last_site"], args["waiting_ranks"]) == ("all_reduce(sum)", "train.py:8", [0, 1, 3])
    assert args["waited_seconds"] == 8.0 and absent["dur"] == 8e6
    assert trace["otherData"]["absences"] == [args]


def test_each_rank_waits_from_its_arrival_and_runs_from_the_start() -> None:
    trace = made(*replies())
    (mine,) = [
        event for event in of(trace, "collective") if event["args"]["instance"] == 0 and event["args"]["rank"] == 0
    ]
    inside = [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and (event["pid"], event["tid"]) == (mine["pid"], mine["tid"]) and event["ts"] < 500_000
    ]
    assert [(event["name"], event["ts"], event["dur"]) for event in inside] == [
        ("all_reduce(sum)", 0.0, 500_000.0),
        ("wait", 0.0, 100_000.0),
        ("run", 100_000.0, 400_000.0),
    ]
    (group_loop_slice,) = [
        event for event in of(trace, "group") if event["pid"] == 0 and event["args"]["instance"] == 0
    ]
    assert group_loop_slice["args"]["arrivals"] == [0, 1]
    assert group_loop_slice["args"]["moved"] == [{"worker": 1, "sent": 2048, "received": 2048}]


def test_arrows_lead_from_what_is_sent_to_where_it_is_received() -> None:
    trace = made(*replies())
    arrows = [(event["ph"], event["pid"], event["name"]) for event in trace["traceEvents"] if event["ph"] in "sf"]
    assert sorted(arrows) == [("f", 0, "1 to 0"), ("f", 1, "0 to 1"), ("s", 0, "0 to 1"), ("s", 1, "1 to 0")]


def test_times_of_another_clock_are_shifted_and_the_error_is_told() -> None:
    plain, shifted = made(*replies()), made(*replies(offset=-5000.0, error=0.002))
    assert [event["ts"] for event in plain["traceEvents"]] == pytest.approx(
        [event["ts"] for event in shifted["traceEvents"]], abs=0.01
    )
    assert (plain["otherData"]["clock_error_seconds"], shifted["otherData"]["clock_error_seconds"]) == (0.0, 0.002)
    assert plain["otherData"]["unix_time_of_zero"] == 990.0
    assert [worker["clock_from"] for worker in shifted["otherData"]["workers"]] == ["same clock", "heartbeat"]


def test_of_a_worker_that_does_not_answer_nothing_is_claimed() -> None:
    silent = pb.TraceReply(silent=[pb.SilentWorker(task=1, host="b")], warnings=["worker 1 did not answer"], last=True)
    trace = made(*replies()[:2], silent)
    assert of(trace, "absence") == []
    assert trace["otherData"]["missing_workers"] == [{"task": 1, "host": "b"}]
    assert trace["otherData"]["warnings"] == ["worker 1 did not answer"]
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["worker 0, a, pid 60", "worker 1, b: did not answer"]


def test_whom_a_verdict_names_is_absent_until_the_failure() -> None:
    parts = replies()
    waiting = parts[1].worker.collectives[0]
    waiting.ended, waiting.code, waiting.message = 15.0, 4, "rank 2 was missing"
    waiting.missing.append(2)
    theirs = parts[2].worker.collectives[0]
    theirs.ended, theirs.code = 15.01, 4
    trace = made(*parts)
    (absent,) = of(trace, "absence")
    assert (absent["name"], absent["args"]["outcome"], absent["dur"]) == ("rank 2 had not arrived", "failed", 3.01e6)
    failed = [event for event in of(trace, "collective") if event["args"]["outcome"] == "DEADLINE_EXCEEDED"]
    assert len(failed) == 3 and failed[0]["args"]["message"] == "rank 2 was missing"


def lost(code: Code) -> list[pb.TraceReply]:
    """A failure that names ranks 2 and 3, by their worker gone: what worker 0 tells, whose group loop has ended too."""
    parts = [*replies()[:2], pb.TraceReply(last=True)]
    told = parts[1].worker
    ended = told.collectives[0]
    ended.ended, ended.code = 15.0, code
    ended.missing.extend([2, 3])
    told.lanes[0].living = False
    del told.lanes[0].standings[:]
    return parts


def test_whom_a_worker_took_along_is_lost_and_not_accused_of_having_been_late() -> None:
    trace = made(*lost(Code.UNAVAILABLE))
    assert [event["name"] for event in of(trace, "absence")] == ["rank 2 was lost", "rank 3 was lost"]
    assert {event["pid"] for event in of(trace, "absence")} == {1}
    told = trace["otherData"]["absences"]
    assert [(one["rank"], one["worker"], one["outcome"]) for one in told] == [(2, 1, "lost"), (3, 1, "lost")]
    assert of(made(*lost(Code.RESOURCE_EXHAUSTED)), "absence") == []


def test_a_rank_of_which_nobody_says_where_it_was_has_no_worker() -> None:
    parts = lost(Code.UNAVAILABLE)
    del parts[1].worker.lanes[0].places[:]
    trace = made(*parts)
    assert of(trace, "absence") == []
    assert [one["worker"] for one in trace["otherData"]["absences"]] == [None, None]
    assert not any(
        "-1" in line for line in _summary_lines({"file": "f", "collectives": 1, "seconds": 1}, trace["otherData"])
    )


def test_a_rank_that_is_through_with_it_is_not_absent() -> None:
    parts = replies()
    parts[2].worker.lanes[0].standings[0].submitted = 5  # a root that only sends
    assert of(made(*parts), "absence") == []


def test_what_is_under_way_at_once_lies_on_rows_of_its_own() -> None:
    process = TraceProcess(3, "worker")
    for begin, end in ((1.0, 4.0), (2.0, 5.0), (4.0, 6.0)):
        process.add_slice(Slice("rank 0", "x", "collective", begin, end))
    events = list(process.events(1.0))
    check({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {}})
    slices = [event for event in events if event["ph"] == "X"]
    assert [event["tid"] for event in slices] == [1, 2, 1]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["rank 0", "rank 0 (2)"]


@pytest.mark.parametrize(
    "break_it",
    [
        lambda events: events[-1].update(ph="Q"),
        lambda events: events[0].update(ts=-1),
        lambda events: next(event for event in events if event["ph"] == "X").pop("dur"),
        lambda events: next(event for event in events if event["ph"] == "X").update(dur=float("inf")),
        lambda events: next(event for event in events if event["name"] == "run").update(dur=10**9),
        lambda events: next(event for event in events if event["ph"] == "M").update(args={}),
        lambda events: events.remove(next(event for event in events if event["ph"] == "f")),
        lambda events: next(event for event in events if event["ph"] == "s").update(tid=77),
        lambda events: events.remove(next(event for event in events if event["name"] == "thread_name")),
    ],
)
def test_the_check_of_the_format_sees_what_is_wrong(break_it: Any) -> None:
    trace = deepcopy(made(*replies()))
    break_it(trace["traceEvents"])
    with pytest.raises((AssertionError, KeyError)):
        check(trace)


def test_times_are_whole_nanoseconds() -> None:
    for event in made(*replies())["traceEvents"]:
        if event["ph"] == "X":
            first, last = first_and_last(event)
            assert (event["ts"], event["dur"]) == (first / 1000, (last - first) / 1000)


class Worker(worker_pb2_grpc.WorkerServicer):
    """Tells what it was given, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[pb.TraceRequest] = []
        self.replies = replies()

    def Trace(self, request: pb.TraceRequest, context: grpc.ServicerContext) -> Iterator[pb.TraceReply]:
        self.asked.append(request)
        yield from self.replies if request.group in ("", "world") else self.replies[:1]


@pytest.fixture
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, str]]:
    served = Worker()
    with serving(served) as address:
        yield served, address


def test_the_file_is_written_and_the_absent_are_named(
    worker: tuple[Worker, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served, address = worker
    file = tmp_path / "t.json.gz"
    arguments = ["--worker", address, "-o", str(file), "--last", "30s", "--group", "world", "--local", "--most", "2MiB"]
    assert run(["trace", *arguments]) == 0
    assert served.asked == [pb.TraceRequest(last_seconds=30.0, group="world", local_only=True, most_bytes=2 << 20)]
    parsed(gzip.decompress(file.read_bytes()).decode())
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: 2 collectives of 2 workers in 10.000 s, one clock; open it in https://ui.perfetto.dev",
        "ABSENT   world #1 all_reduce(sum) at train.py:8: rank 2 has not arrived for 8.0 s (host h, pid 72; last did "
        "all_reduce(sum) at train.py:8)",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json.gz"]


def test_the_trace_on_standard_output_and_what_was_written_as_json(
    worker: tuple[Worker, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["trace", "--worker", worker[1], "-o", "-", "--json"]) == 0
    assert worker[0].asked == [pb.TraceRequest(most_bytes=8 << 20)]
    said = capsys.readouterr()
    trace, told = parsed(said.out), json.loads(said.err)
    assert (told["file"], told["collectives"], told["seconds"]) == ("-", 2, 10.0)
    assert told["absences"] == trace["otherData"]["absences"] and len(told["workers"]) == 2


def test_a_file_that_cannot_be_written_is_said(
    worker: tuple[Worker, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["trace", "--worker", worker[1], "-o", str(tmp_path / "no" / "t.json")]) == 1
    assert "cannot be written: No such file or directory; give another file with -o" in capsys.readouterr().err


def test_a_link_stays_and_what_it_leads_to_is_written(worker: tuple[Worker, str], tmp_path: Path) -> None:
    (tmp_path / "link.gz").symlink_to("real.json")
    assert run(["trace", "--worker", worker[1], "-o", str(tmp_path / "link.gz")]) == 0
    assert (tmp_path / "link.gz").is_symlink()
    parsed(gzip.decompress((tmp_path / "real.json").read_bytes()).decode())


def test_a_pipe_stays_a_pipe_and_carries_the_trace(worker: tuple[Worker, str], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        held = os.open(pipe, os.O_RDWR)  # so that nobody waits for the other side forever
        try:
            read = reader.submit(_until_its_end, held)
            assert run(["trace", "--worker", worker[1], "-o", str(pipe)]) == 0
            assert stat.S_ISFIFO(pipe.stat().st_mode)
        finally:
            os.write(held, b"END")
            written = read.result(20)
            os.close(held)
    parsed(written.decode())


def _until_its_end(pipe: int) -> bytes:
    found = b""
    while not found.endswith(b"END"):
        found += os.read(pipe, 1 << 16)
    return found.removesuffix(b"END")


def test_names_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = Worker()
    for reply in (told := replies()):
        for one in reply.worker.lanes:
            one.group = "evil\x1b[2J"
    served.replies = told
    with serving(served) as address:
        assert run(["trace", "--worker", address, "-o", str(tmp_path / "t.json")]) == 0
        assert run(["trace", "--worker", address, "-o", str(tmp_path / "t.json"), "--group", "none"]) == 2
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err and said.out.count("evil\N{REPLACEMENT CHARACTER}[2J") == 1


def test_a_group_that_nobody_knows_leaves_the_file_alone(
    worker: tuple[Worker, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    file.write_text("yesterday's")
    assert run(["trace", "--worker", worker[1], "-o", str(file), "--group", "nosuch"]) == 2
    assert "nothing is recorded of a group 'nosuch'; expected one of: world" in capsys.readouterr().err
    assert file.read_text() == "yesterday's"


@contextlib.contextmanager
def serving(servicer: worker_pb2_grpc.WorkerServicer) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_what_is_told_of_a_slice_is_made_when_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    of_ranks = Mock(wraps=perfetto._rank_args)
    monkeypatch.setattr(perfetto, "_rank_args", of_ranks)
    lines = PerfettoTrace(collected(replies())).lines()
    next(line for line in lines if '"cat":"collective"' in line)
    assert of_ranks.call_count == 1
    assert sum('"cat":"collective"' in line for line in lines) + 1 == of_ranks.call_count == 7


@pytest.mark.parametrize("text", ["0", "much", "-1"])
def test_what_is_no_size_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "--most", text]) == 2
    assert "expected" in capsys.readouterr().err


def test_nobody_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "--worker", f"unix:{tmp_path}/no.sock"]) == 3
    assert "UNREACHABLE: no worker answered (known from --worker)" in capsys.readouterr().err
