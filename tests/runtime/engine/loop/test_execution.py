"""An instance under way, task by task, without links and group loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from collectived_proto.types import GroupInfo, Member, Peer, Tier
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.compile.negotiation import compile_announcement, single_task_program
from collectived_runtime.engine.compile.program import PackTask
from collectived_runtime.engine.loop.execution import Execution
from collectived_runtime.engine.run.schedule import Wait
from collectived_runtime.engine.submit.tracker import Instance

MEMBERS = tuple(Member(rank, f"/job:worker/task:{rank}/device:CPU:0", rank, "h", 1) for rank in range(2))
PEERS = tuple(Peer(task, "i", "h", "127.0.0.1:1", (task,)) for task in range(2))
TOPOLOGY = GroupTopology.from_peers(GroupInfo("g", 1, 1, MEMBERS), PEERS, 0, (Tier("ring"),))


class EveryLink:
    """Links to whoever is asked for."""

    ready: frozenset[Any] = frozenset()

    def get(self, peers: frozenset[int], channel: int) -> dict[int, str]:
        return {peer: f"link to {peer} on channel {channel}" for peer in peers}


def test_each_task_of_a_channel_is_given_links_to_its_own_peers() -> None:
    first = replace(compile_announcement(TOPOLOGY, 0), peers=frozenset({1}))
    second = replace(first, pack_number=1, peers=frozenset())
    program = replace(single_task_program(first), tasks=(first, second))
    given: list[tuple[int, list[int]]] = []

    def start(task: PackTask, links: dict[int, Any]) -> Iterator[Wait]:
        given.append((task.pack_number, list(links)))
        yield from ()

    links: Any = EveryLink()
    execution = Execution(Instance(0), program, start)
    ended = [execution.step(links)[0] for _ in range(2)]
    assert [[task.pack_number for task in tasks] for tasks in ended] == [[0], [1]]
    assert given == [(0, [1]), (1, [])]
