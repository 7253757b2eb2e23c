"""docs/reference/messages.md has a section for every error; each message there is what a real run raised here."""

from __future__ import annotations

import re
import resource
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from tests.docs.blocks import claimed
from tests.docs.contents import ROOT
from tests.e2e.conftest import Cluster
from tests.waiting import settle

import collectived as cd
from collectived import errors
from collectived_proto.types import Member, unscoped_name
from collectived_proto.v1 import worker_pb2, worker_pb2_grpc

PAGE = (ROOT / "docs/reference/messages.md").read_text()
TOKEN = "token-of-these-tests"
UNPROVOKED = {"CollectiveError"}
LOWEST_DESCRIPTORS = 3  # every process has more open
PLACEHOLDERS = (  # what varies from run to run, and what stands for it on the page
    (r"\bhost \S+,", "host <host>,"),
    (r"\bpid \d+", "pid <pid>"),
    (r"(test_errors_page\.py|<string>):\d+", "train.py:<line>"),
    (r"within [\d.]+ s\b", "within <seconds> s"),
    (r"RLIMIT_NOFILE is \d+", "RLIMIT_NOFILE is <limit>"),
    (r"127\.0\.0\.1:\d+", "<host>:<port>"),
    (r"its process ended( or closed its (connection|session))?", "its process ended"),  # whichever is noticed first
)

Provoke = Callable[[Cluster], errors.CollectiveError]
SNIPPETS: dict[str, Provoke] = {}


def provokes(kind: type[errors.CollectiveError]) -> Callable[[Provoke], Provoke]:
    def note(snippet: Provoke) -> Provoke:
        SNIPPETS[kind.__name__] = snippet
        return snippet

    return note


@pytest.fixture(scope="module")
def worker() -> Iterator[Cluster]:
    with tempfile.NamedTemporaryFile("w") as tokens:
        tokens.write(f"ci {TOKEN}\n")
        tokens.flush()
        kept = ("--client-tokens-file", tokens.name, "--group-rules", "*/nightly = user:root")
        made = Cluster(1, worker_options=("--listen", ":0", *kept))
        yield made
        made.close()


# Snippets


@provokes(errors.InvalidArgumentError)
def ranks_differ(worker: Cluster) -> errors.CollectiveError:
    def body(group: cd.Group) -> errors.CollectiveError:
        group.barrier()
        if group.rank == 2:
            await_flight(worker, 2)
        with pytest.raises(errors.InvalidArgumentError) as caught:
            group.all_reduce("sum", {"weights": np.ones((3, 4 + group.rank // 2), np.float32)})
        if caught.value.rejoin:
            group.rejoin(timeout=20)
        assert group.all_reduce("sum", 1.0) == 3.0  # where the coordinator decided, the group goes on
        return caught.value

    return as_ranks(worker, 3, body)


@provokes(errors.DeadlineExceededError)
def a_rank_does_not_come(worker: Cluster) -> errors.CollectiveError:
    program = """
import collectived as cd
def load_batch():
    input()
with cd.connect() as session, session.join(timeout=20) as group:
    group.barrier()
    load_batch()
    try:
        group.all_reduce("sum", 1.0)
    except cd.errors.DeadlineExceededError:
        group.rejoin(timeout=20)
    group.all_reduce("sum", 1.0)
"""
    with worker.fresh_client(1, 2, "train", program) as late:
        with cd.connect(worker.addresses[0]) as session, session.join("train", 2, rank=0, timeout=20) as group:
            group.barrier()
            with pytest.raises(errors.DeadlineExceededError) as caught:
                group.all_reduce("sum", 1.0, options=cd.CommunicationOptions(timeout_seconds=2.0))
            assert late.stdin is not None
            late.stdin.write("\n")
            late.stdin.flush()
            group.rejoin(timeout=20)
            assert group.all_reduce("sum", 1.0) == 2.0
        late.communicate(timeout=20)
    return caught.value


@provokes(errors.UnavailableError)
def a_process_is_killed(worker: Cluster) -> errors.CollectiveError:
    program = """
import signal
import collectived as cd
with cd.connect() as session, session.join(timeout=20) as group:
    for step in range(3):
        group.all_reduce("sum", 1.0)
    signal.pause()
"""
    with worker.client(1, 2, "train", program) as victim:
        try:
            with cd.connect(worker.addresses[0]) as session, session.join("train", 2, rank=0, timeout=20) as group:
                for _ in range(3):
                    group.all_reduce("sum", 1.0)
                work = group.all_reduce("sum", 1.0, async_op=True)
                await_flight(worker)
                victim.kill()
                error = work.exception(20)
        finally:
            victim.kill()
    assert error is not None
    return error


@provokes(errors.AbortedError)
def a_rank_raises(worker: Cluster) -> errors.CollectiveError:
    def body(group: cd.Group) -> errors.CollectiveError | None:
        group.barrier()
        if group.rank:
            await_flight(worker)
            with pytest.raises(ValueError), group:
                raise ValueError("loss is NaN")
            return None
        with pytest.raises(errors.AbortedError) as caught:
            group.all_reduce("sum", 1.0)
        return caught.value

    return as_ranks(worker, 2, body)


@provokes(errors.FailedPreconditionError)
def a_group_is_used_after_it_was_left(worker: Cluster) -> errors.CollectiveError:
    with cd.connect(worker.addresses[0]) as session:
        group = session.join("train", 1, rank=0)
        group.leave()
        with pytest.raises(errors.FailedPreconditionError) as caught:
            group.barrier()
        group.rejoin(timeout=20)
    return caught.value


@provokes(errors.ResourceExhaustedError)
def a_process_has_no_descriptor_left(worker: Cluster) -> errors.CollectiveError:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        cd.connect(worker.addresses[0]) as session,
        pytest.MonkeyPatch.context() as patch,
        ThreadPoolExecutor(1) as pool,
    ):
        patch.setenv("COLLECTIVED_TRANSPORT", "grpc")  # so the ranks do not meet in a segment, which takes no more
        other = cd.connect(worker.addresses[0])
        joining = pool.submit(other.join, "train", 2, rank=1, timeout=20)
        group = session.join("train", 2, rank=0, timeout=20)
        joining.result(20)
        resource.setrlimit(resource.RLIMIT_NOFILE, (LOWEST_DESCRIPTORS, limits[1]))
        try:
            with pytest.raises(errors.ResourceExhaustedError) as caught:
                group.send(np.ones(1 << 20), 0)  # has no memory of the worker yet
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            other.close()
    return caught.value


@provokes(errors.UnimplementedError)
def an_algorithm_for_gpus_is_asked_for_on_cpus(worker: Cluster) -> errors.CollectiveError:
    with cd.connect(worker.addresses[0]) as session:
        ops = cd.MultiWorkerAllReduce(["/job:worker/task:0"], 0, "nccl", session=session)
        value = cd.PerReplica([np.ones(3), np.ones(3)])
        with pytest.raises(errors.UnimplementedError) as caught:
            ops.reduce("sum", value, value)
    return caught.value


@provokes(errors.NotFoundError)
def a_device_does_not_exist(worker: Cluster) -> errors.CollectiveError:
    with cd.connect(worker.addresses[0]) as session, pytest.raises(errors.NotFoundError) as caught:
        session.join("train", 1, device="CPU:9")
    return caught.value


@provokes(errors.UnauthenticatedError)
def the_secret_is_missing(worker: Cluster) -> errors.CollectiveError:
    with pytest.raises(errors.UnauthenticatedError) as caught:
        cd.connect(worker.tcp_addresses[0])
    return caught.value


@provokes(errors.CancelledError)
def a_session_is_closed_while_another_thread_joins(worker: Cluster) -> errors.CollectiveError:
    session = cd.connect(worker.addresses[0])
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(session.join, "lonely", 2)
        while "lonely" not in [unscoped_name(group.name) for group in worker.status().groups]:
            pass
        session.close()
        error = joining.exception(20)
    assert isinstance(error, errors.CancelledError)
    return error


class Stranger(worker_pb2_grpc.WorkerServicer):
    """Something else than a worker of ours: one that is broken, or a proxy before one."""

    def __init__(self, says: Callable[[grpc.ServicerContext], worker_pb2.SessionEvent]) -> None:
        self.says = says

    def OpenSession(
        self, request: worker_pb2.OpenSessionRequest, context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.SessionEvent]:
        yield self.says(context)


def told_by_a_stranger(says: Callable[[grpc.ServicerContext], worker_pb2.SessionEvent]) -> errors.CollectiveError:
    """What `connect` raises where somebody else answers."""
    server = grpc.server(ThreadPoolExecutor(1))
    worker_pb2_grpc.add_WorkerServicer_to_server(Stranger(says), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(errors.CollectiveError) as caught:
            cd.connect(f"127.0.0.1:{port}", timeout=20)
    finally:
        server.stop(None).wait()
    return caught.value


@provokes(errors.InternalError)
def a_worker_begins_a_session_in_no_way_that_is_known(worker: Cluster) -> errors.CollectiveError:
    return told_by_a_stranger(lambda context: worker_pb2.SessionEvent())


@provokes(errors.PermissionDeniedError)
def a_group_is_kept_for_others(worker: Cluster) -> errors.CollectiveError:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLECTIVED_SECRET", TOKEN)
        with cd.connect(worker.tcp_addresses[0]) as session, pytest.raises(errors.PermissionDeniedError) as caught:
            session.join("nightly", 1)
    return caught.value


def as_ranks(
    worker: Cluster, size: int, body: Callable[[cd.Group], errors.CollectiveError | None]
) -> errors.CollectiveError:
    """What `body` returns on rank 0 of that many; whatever it returns on others names the same ranks."""
    error, *others = worker.run_sessions(size, lambda _, group: body(group), "train")
    assert isinstance(error, errors.CollectiveError)
    for other in filter(None, others):
        assert (type(other), ranks(other.missing), ranks(other.differing)) == (
            type(error), ranks(error.missing), ranks(error.differing)
        )  # fmt: skip
    return error


def await_flight(worker: Cluster, arrived: int = 1) -> None:
    """Returns when a collective waits in the worker to which so many ranks have come."""
    settle(
        lambda: any(
            len(flight.arrived) == arrived
            for row in worker.status().workers
            for group_loop in row.lanes
            for flight in group_loop.in_flight
        )
    )


# The page


def shown(error: errors.CollectiveError) -> str:
    """As the page shows an error."""
    lines = [f"{type(error).__name__}: {error}"]
    if error.verdict is None:
        lines.append(".verdict None, .rejoin False")
    else:
        lines.append(f".missing {ranks(error.missing)}, .differing {ranks(error.differing)}, .rejoin {error.rejoin}")
        lines.append(f".instance {error.instance}, .op {error.op!r}, .site {error.site!r}")
        lines.append(f"last_instance of .members {[member.last_instance for member in error.members]}")
    text = "\n".join(lines)
    for pattern, placeholder in PLACEHOLDERS:
        text = re.sub(pattern, placeholder, text)
    return text


def ranks(members: tuple[Member, ...]) -> list[int]:
    return [member.rank for member in members]


def section(name: str) -> str:
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/reference/messages.md has no section {name}"
    return found[1]


def messages(name: str) -> list[str]:
    """The messages in a section. Lines that go on in the next one there do so with eight spaces."""
    blocks = [block.text.removesuffix("\n") for block in claimed(__file__) if block.section == name]
    return [re.sub(r"\n {8}", " ", block) for block in blocks]


def test_every_error_has_a_section_in_the_order_of_the_tree() -> None:
    names = [name for name in re.findall(r"^## (\w+)$", PAGE, re.MULTILINE) if name.endswith("Error")]
    assert sorted(names) == sorted(name for name in errors.__all__ if name != "Code")
    assert names[0] == "CollectiveError" and UNPROVOKED | set(SNIPPETS) == set(names)


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_message_on_the_page_is_what_a_real_run_raised(name: str, worker: Cluster) -> None:
    # Where the machine is so busy that the coordinator does not answer in time, the worker decides alone: once more.
    error = next(one for one in (SNIPPETS[name](worker) for _ in range(5)) if "worker" not in one.decided_by)
    assert type(error).__name__ == name
    assert messages(name) == [shown(error)]


@pytest.mark.parametrize("name", sorted(UNPROVOKED))
def test_an_error_that_no_run_can_provoke_has_no_message_and_says_why(name: str) -> None:
    assert not messages(name)
    assert "**No message here**" in section(name)
