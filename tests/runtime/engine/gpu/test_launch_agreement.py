"""What workers agree on before NCCL carries anything out, over the in-memory network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from tests.fakes.loopback import LoopbackNetwork
from tests.fakes.nccl import FakeNccl

from collectived_runtime.device.nccl.communicators import Communicator, Communicators, DeviceRank
from collectived_runtime.device.nccl.interface import NcclError
from collectived_runtime.engine.gpu.communicator import NcclContext
from collectived_runtime.engine.gpu.launch_agreement import (
    AgreementContext,
    agree_on_turn,
    compute_peers,
    create_communicators,
)
from collectived_runtime.engine.gpu.launch_queue import LaunchQueue, TicketKey
from collectived_runtime.engine.run.schedule import PlanTransport, Wait
from collectived_runtime.transport.frame import FrameTemplate, parse
from collectived_runtime.transport.link import Link

Talking = Generator[Wait, None, Any]
CHAIN = b"chainchn"


def never(link: Link, expected: bytes, got: bytes) -> bool:
    raise AssertionError(f"{parse(expected)} expected, {parse(got)} came")


def nothing() -> None:
    pass


def talks(
    places: int, group: int = 1, judge: Any = never, chains: tuple[bytes, ...] = (), wake: Any = nothing
) -> list[AgreementContext]:
    """Of one instance of a group over all of `places` workers."""
    links = LoopbackNetwork().links(range(places))
    found = []
    for place in range(places):
        stamp = FrameTemplate(group, 1, 0, 0, 0, b"replaced", chains[place] if chains else CHAIN)
        there = {peer: links[place][peer] for peer in compute_peers(places, place)}
        found.append(AgreementContext(places, place, PlanTransport(there, stamp, judge), wake))
    return found


def go_on(talking: dict[Any, Talking], steps: int = 50) -> dict[Any, Any]:
    """Steps all in turn, some more times than anything takes; what those that have ended returned."""
    results = {}
    for _ in range(steps):
        for name, one in list(talking.items()):
            try:
                next(one)
            except StopIteration as end:
                results[name] = end.value
                del talking[name]
    return results


@pytest.mark.parametrize("places", [1, 2, 3, 4, 7])
def test_every_worker_gets_its_turn_when_all_have_come(places: int) -> None:
    key, stiles = TicketKey(1, 1, 0), [LaunchQueue() for _ in range(places)]
    talking: dict[Any, Talking] = {talk.place: agree_on_turn(talk, key, stiles[talk.place]) for talk in talks(places)}
    last = talking.pop(places - 1)
    assert go_on(talking) == {}
    talking[places - 1] = last
    assert sorted(go_on(talking)) == list(range(places))


def test_two_groups_over_two_workers_in_opposite_orders_take_their_turns_in_one_order() -> None:
    keys = {"a": TicketKey(1, 1, 0), "b": TicketKey(2, 1, 0)}
    stiles = [LaunchQueue(), LaunchQueue()]
    groups = {name: talks(2, key.group) for name, key in keys.items()}
    talking = {
        (name, place): agree_on_turn(groups[name][place], keys[name], stiles[place])
        for name in "ab"
        for place in (0, 1)
    }
    waiting: dict[Any, Talking] = {}
    for name, place in (("a", 0), ("b", 1)):  # each worker hears of another group first
        waiting[name, place] = talking[name, place]
        assert go_on(waiting) == {}
    waiting |= talking
    first = go_on(waiting)
    names = {name for name, _ in first}
    assert len(names) == 1 and {place for _, place in first} == {0, 1}
    for place, stile in enumerate(stiles):
        stile.remove(keys[next(iter(names))])
        assert [one[1] for one in go_on({key: one for key, one in waiting.items() if key[1] == place})] == [place]


def test_a_group_that_waits_for_a_rank_holds_up_no_other() -> None:
    stiles = [LaunchQueue(), LaunchQueue()]
    late, prompt = talks(2, 1), talks(2, 2)
    talking: dict[Any, Talking] = {"late": agree_on_turn(late[0], TicketKey(1, 1, 0), stiles[0])}
    go_on(talking)
    talking |= {talk.place: agree_on_turn(talk, TicketKey(2, 1, 0), stiles[talk.place]) for talk in prompt}
    assert sorted(go_on(talking)) == [0, 1]


def test_a_worker_that_differs_is_found_out_before_anybody_proposes() -> None:
    seen: list[int] = []

    def judge(link: Link, expected: bytes, got: bytes) -> bool:
        seen.append(link.peer)
        return True

    stiles = [LaunchQueue(), LaunchQueue()]
    differing = talks(2, 1, judge, (CHAIN, b"another!"))
    talking: dict[Any, Talking] = {t.place: agree_on_turn(t, TicketKey(1, 1, 0), stiles[t.place]) for t in differing}
    assert go_on(talking) == {} and set(seen) == {0, 1}
    assert [stile.propose(TicketKey(9, 1, 0)) for stile in stiles] == [1, 1]  # nobody had proposed anything


Make = Callable[..., Communicators]


@pytest.fixture
def communicators() -> Iterator[Make]:
    made: list[Communicators] = []

    def make(nccl: FakeNccl | None = None) -> Communicators:
        made.append(Communicators(nccl or FakeNccl(), lambda device: None, pytest.fail))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert isinstance(one.nccl, FakeNccl)
        one.nccl.close()


def until_ended(talking: dict[Any, Talking], woken: threading.Event) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    while talking:
        results |= go_on(talking)
        if talking:
            woken.wait(0.01)
            woken.clear()
    return results


def test_workers_meet_with_one_rank_per_gpu(communicators: Make) -> None:
    woken = threading.Event()
    ranks = ([DeviceRank(0, 0), DeviceRank(1, 1)], [DeviceRank(0, 2)])
    talking: dict[Any, Talking] = {}
    for talk in talks(2, wake=woken.set):
        talking[talk.place] = create_communicators(
            talk, TicketKey(1, 1, 0), NcclContext(communicators(), {}), 3, ranks[talk.place]
        )
    made = until_ended(talking, woken)
    assert [[one.device for one in made[place]] for place in (0, 1)] == [[0, 1], [0]]
    assert all(isinstance(one, Communicator) for one in made[0] + made[1])
    for one in (*made[0], *made[1]):
        one.nccl.abort(one.handle)


def test_a_meeting_that_is_closed_leaves_no_communicator_and_holds_up_nobody(communicators: Make) -> None:
    woken, nccl, stile = threading.Event(), FakeNccl(), LaunchQueue()
    mine = communicators(nccl)
    both = talks(2, wake=woken.set)
    other = create_communicators(
        both[1], TicketKey(1, 1, 0), NcclContext(communicators(FakeNccl()), {}), 3, [DeviceRank(0, 1)]
    )
    meeting = create_communicators(
        both[0], TicketKey(1, 1, 0), NcclContext(mine, {}, stile), 3, [DeviceRank(0, 0)]
    )  # rank 2 never comes
    while not nccl.inits:
        go_on({0: meeting, 1: other})
        woken.wait(0.001)
    meeting.close()
    other.close()
    while nccl.freed != [("abort", 0)]:
        woken.wait(0.001)
    assert stile.settle(TicketKey(2, 1, 0), stile.propose(TicketKey(2, 1, 0)), nothing).done


def test_what_nccl_refuses_is_raised_where_it_was_refused(communicators: Make) -> None:
    class Refusing(FakeNccl):
        def create_unique_id(self) -> bytes:
            raise NcclError(2, "unique_id")

    woken = threading.Event()
    (talk,) = talks(1, wake=woken.set)
    with pytest.raises(NcclError, match="unique_id"):
        until_ended(
            {
                0: create_communicators(
                    talk, TicketKey(1, 1, 0), NcclContext(communicators(Refusing()), {}), 1, [DeviceRank(0, 0)]
                )
            },
            woken,
        )
