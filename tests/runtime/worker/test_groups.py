"""Groups of a worker: who finds no room there is told so, the others of its group hear of it, and nobody waits."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable

import pytest
from tests.waiting import settle

from collectived_proto.devices import DeviceName
from collectived_proto.errors import InternalError, ResourceExhaustedError
from collectived_proto.group_codec import formed_to_bytes
from collectived_proto.types import GroupInfo, Member, Peer, Tier
from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_proto.v1 import worker_pb2
from collectived_runtime.engine.base.memory_budget import MemoryBudget, SessionBudget
from collectived_runtime.engine.loop.context import WorkerResources
from collectived_runtime.engine.run.fold_pool import FoldPool
from collectived_runtime.limits.rejections import Limit, RejectionCounters
from collectived_runtime.transport.connections import ConnectionServer
from collectived_runtime.worker.groups import Groups
from collectived_runtime.worker.joins import WorkerPlace
from collectived_runtime.worker.sessions import Client, Session

DEVICE = DeviceName(0, "CPU", 0)


class Scene:
    """The groups of worker 0, what they say to the coordinator, and a session."""

    def __init__(self, folder: str) -> None:
        self.said: list[pb.WorkerMessage] = []
        self.refusals = RejectionCounters()
        self.reception = ConnectionServer(0, "of these tests", f"{folder}/door", ("127.0.0.1", 0))
        budget = MemoryBudget(1 << 30)
        share = SessionBudget(budget, 1 << 30)
        resources = WorkerResources(self.reception, budget, FoldPool(), rejections=self.refusals)
        place = WorkerPlace(0, "h", (DEVICE,))
        self.groups = Groups(place, self.reception, resources, self.said.append, lambda: True)
        self.session = Session(Client("h", os.getpid(), "", "job"), share, lambda _: None, devices=(DEVICE,))
        mine, self.client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.session.attach(mine)

    async def asked(self, name: str, *, segment: bool = False) -> tuple[asyncio.Task[worker_pb2.JoinEvent], str]:
        """A join under way, and how the coordinator knows it."""

        async def joined() -> worker_pb2.JoinEvent:
            request = worker_pb2.JoinRequest(name=name, min_size=1, max_size=2, segment=segment)
            return [event async for event in self.groups.join(self.session, request)][-1]

        before = len(self.said)
        joining = asyncio.create_task(joined())
        while len(self.said) == before:
            await asyncio.sleep(0)
        return joining, self.said[-1].join.request

    def done(self, request: str, rank: int, key: int = 7, task: int = 0, elsewhere: int | None = None) -> None:
        """The coordinator has formed the group of two ranks, both on this worker, or one of them `elsewhere`."""
        members = tuple(Member(rank, str(DEVICE), 0, "h", os.getpid()) for rank in (0, 1))
        group = GroupInfo("job/g", key, 100, members)
        places = {task: (0, 1)} if elsewhere is None else {task: (0,), elsewhere: (1,)}
        peers = [Peer(number, "i", "h", "127.0.0.1:1", ranks) for number, ranks in places.items()]
        formed = formed_to_bytes(group, peers, [Tier("ring")], False)
        self.groups.handle_message(
            pb.CoordinatorMessage(join_done=pb.JoinDone(request=request, rank=rank, formed=formed))
        )

    @property
    def lost(self) -> list[tuple[int, int]]:
        """Ranks of which the coordinator has been told that they are lost, and after which instance."""
        reports = [message.report for message in list(self.said) if message.HasField("report")]
        return [(report.rank, report.instance) for report in reports if report.kind == pb.Report.LOST]


def played(play: Callable[[Scene], Awaitable[None]]) -> None:
    async def run(folder: str) -> None:
        scene = Scene(folder)
        try:
            await asyncio.wait_for(play(scene), 30)
        finally:
            scene.session.end("the test is over")
            scene.client.close()
            await asyncio.to_thread(scene.groups.close)
            scene.reception.close()

    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as folder:
        asyncio.run(run(folder))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each group loop that is begun whether the system has a thread for it; behind the last it has."""
    have: list[bool] = []
    start = threading.Thread.start

    def begin(thread: threading.Thread) -> None:
        if thread.name.startswith("group loop ") and have and not have.pop(0):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    return have


def none_left(*_: object) -> int:
    """As the system answers who wants one more descriptor than there may be."""
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_rank_for_whose_group_loop_there_is_no_thread_is_refused_and_lost_to_the_others(threads: list[bool]) -> None:
    async def play(scene: Scene) -> None:
        open_before = len(os.listdir("/proc/self/fd"))
        joining, request = await scene.asked("g")
        threads.append(False)
        scene.done(request, 1)
        with pytest.raises(
            ResourceExhaustedError, match=r"rank 1 of group 'g' is refused: .* can't start new thread; "
        ):
            await joining
        assert scene.lost == [(1, -1)] and not scene.groups.group_loops
        assert len(os.listdir("/proc/self/fd")) == open_before, "it leaves nothing behind"
        assert not scene.reception._live_generations, "nor does anybody expect its links"
        joining, request = await scene.asked("another")
        scene.done(request, 0, key=8)
        assert (await joining).joined.rank == 0

    played(play)


def test_a_rank_whose_group_loop_could_be_made_does_not_wait_for_one_whose_could_not(threads: list[bool]) -> None:
    async def play(scene: Scene) -> None:
        first, second = [await scene.asked("g") for _ in range(2)]
        threads.append(False)
        scene.done(first[1], 0)
        scene.done(second[1], 1)
        with pytest.raises(ResourceExhaustedError):
            await first[0]
        assert (await second[0]).joined.rank == 1
        (group_loop,) = scene.groups.group_loops
        await asyncio.to_thread(settle, lambda: group_loop.tracker.progress[0].has_departed)
        assert not scene.groups._rejected_ranks

    played(play)


def test_no_group_loop_is_remembered_once_none_of_its_ranks_may_still_come(threads: list[bool]) -> None:
    async def play(scene: Scene) -> None:
        both = [await scene.asked("g") for _ in range(2)]
        threads.extend([False, False])
        for rank, (_, request) in enumerate(both):
            scene.done(request, rank)
        outcomes = await asyncio.gather(*(joining for joining, _ in both), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ResourceExhaustedError] * 2
        assert scene.lost == [(0, -1), (1, -1)] and not scene.groups._rejected_ranks

    played(play)


def test_a_rank_for_whose_local_rank_there_is_no_descriptor_is_refused_and_lost_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play(scene: Scene) -> None:
        joining, request = await scene.asked("g")
        with monkeypatch.context() as full:
            full.setattr(os, "dup", none_left)
            scene.done(request, 1)
        with pytest.raises(ResourceExhaustedError, match="rank 1 of group 'g' is refused: .* Too many open files; "):
            await joining
        await asyncio.to_thread(settle, lambda: scene.lost == [(1, -1)])
        assert scene.refusals.limit_counts == {Limit.DESCRIPTORS: 1}

    played(play)


def test_where_there_is_no_descriptor_at_all_a_join_is_refused_before_anybody_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play(scene: Scene) -> None:
        monkeypatch.setattr(os, "eventfd", none_left)
        request = worker_pb2.JoinRequest(name="g", min_size=1, max_size=1)
        with pytest.raises(ResourceExhaustedError, match="this worker has nearly no descriptors left"):
            await anext(scene.groups.join(scene.session, request))
        assert not scene.said

    played(play)


def test_a_group_that_is_none_of_this_worker_is_refused_as_a_defect() -> None:
    async def play(scene: Scene) -> None:
        joining, request = await scene.asked("g")
        scene.done(request, 0, task=3)
        with pytest.raises(InternalError, match="rank 0 of group 'g' is refused: a defect of collectived: "):
            await joining

    played(play)


def test_a_client_that_hangs_up_in_the_moment_in_which_it_is_given_its_place_loses_it(threads: list[bool]) -> None:
    async def play(scene: Scene) -> None:
        joining, request = await scene.asked("g")
        scene.done(request, 0)
        joining.cancel()  # it has not heard
        with pytest.raises(asyncio.CancelledError):
            await joining
        assert scene.groups.client_joins.outcomes == {"withdrawn": 1}
        held = scene.session.held_ranks[0]
        while not held.group_loop.local_ranks[0].closed:
            await asyncio.sleep(0.01)

    played(play)


@pytest.mark.parametrize(("elsewhere", "takes", "matching"), [(1, True, True), (1, False, False), (None, True, False)])
def test_ranks_match_by_themselves_that_meet_in_a_segment_of_a_group_of_several_workers(
    elsewhere: int | None, takes: bool, matching: bool
) -> None:
    async def play(scene: Scene) -> None:
        joining, request = await scene.asked("g", segment=takes)
        scene.done(request, 0, elsewhere=elsewhere)
        joined = (await joining).joined
        assert (joined.segment, joined.matching) == (takes, matching)

    played(play)
