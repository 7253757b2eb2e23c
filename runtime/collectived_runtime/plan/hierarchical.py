"""Two levels: an inner stage on every host, and any flat algorithm across hosts.

A *host* is a sequence of participants that are near each other. The inner stage is one of

- LEADER: a binomial tree folds a host's contributions onto its *leader*, its first participant; the leaders alone take
  part across, and the result goes down the same tree. Hosts may have any sizes, also different ones.
- LANES: a ring leaves each participant of a host with one piece of the host's fold; the participants at the same place
  of all hosts, a *lane*, reduce that piece across, and a ring joins the pieces again. Every participant uses its own
  link, for 1/h of the span. Hosts must be equally large; where they are not, this is LEADER.
- SERVER: contributions are folded by a participant of its own on each host, such as the CPU beside its GPUs.
- NATIVE: LEADER, with an engine such as NCCL instead of the tree.

Source: X. Luo et al., "HAN: a hierarchical autotuned collective communication framework", CLUSTER 2020.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from collectived_runtime.plan import ring, shuffle, tree
from collectived_runtime.plan.moves import Buffer, FinishMove, FoldMove, RecvMove, SendMove, Span
from collectived_runtime.plan.spans import drop_empty_moves, idle_rounds, pieces
from collectived_runtime.plan.wide_moves import CollectMove, NativeKind, NativeMove, WideMove, WidePlan, WideRound

FlatAlgorithm = Callable[[Sequence[int], int, Span], Iterable[WideRound]]
Hosts = Sequence[Sequence[int]]


class InnerStage(enum.Enum):
    LEADER = "leader"
    LANES = "lanes"
    SERVER = "server"
    NATIVE = "native"


def all_reduce(
    hosts: Hosts,
    me: int,
    span: Span,
    across: FlatAlgorithm = ring.all_reduce,
    inside: InnerStage = InnerStage.LEADER,
    servers: Sequence[int] = (),
) -> WidePlan:
    """Every participant of every host ends with the fold of all contributions.

    Args:
        hosts: the contributing participants, host by host.
        me: one of them, or one of `servers`.
        span: what is reduced.
        across: the algorithm between hosts.
        inside: the inner stage.
        servers: for SERVER, one participant per host that may or may not contribute.
    """
    return tuple(all_reduce_rounds(hosts, me, span, across, inside, servers))


def all_reduce_rounds(
    hosts: Hosts,
    me: int,
    span: Span,
    across: FlatAlgorithm,
    inside: InnerStage = InnerStage.LEADER,
    servers: Sequence[int] = (),
) -> Iterator[WideRound]:
    place = next(n for n, host in enumerate(hosts) if me in host or (servers and servers[n] == me))
    stage = _stage(hosts, place, me, span, inside, servers)
    # The lowest contribution of a host decides the place of its partial sum, not the participant that holds it.
    lowest = tuple(min(host) for host in hosts)
    rounds: Iterable[WideRound]
    if me in stage.heads:
        rounds = across(lowest, lowest[place], stage.piece)
        rounds = _substitute_members(rounds, dict(zip(lowest, stage.heads, strict=True)), stage.holder)
    else:
        rounds = idle_rounds(_length(across, lowest, lowest[place], stage.piece))
    return drop_empty_moves(chain(stage.up, rounds, stage.down))


@lru_cache(maxsize=64)
def _length(across: FlatAlgorithm, members: Sequence[int], me: int, span: Span) -> int:
    """Rounds that the others of a host wait while one of them takes part across; the same for all of them."""
    return sum(1 for _ in across(members, me, span))


@dataclass(frozen=True, slots=True)
class _Stage:
    """The part of one participant on its own host; `heads`, one per host, hold `piece` in `holder` in between."""

    up: Iterable[WideRound]
    heads: Sequence[int]
    piece: Span
    holder: Buffer
    down: Iterable[WideRound]


def _stage(hosts: Hosts, place: int, me: int, span: Span, inside: InnerStage, servers: Sequence[int]) -> _Stage:
    even = len({len(host) for host in hosts}) == 1
    match inside:
        case InnerStage.SERVER:
            return _server_stage(hosts, place, me, span, servers)
        case InnerStage.LANES if even:
            return _lanes_stage(hosts, place, me, span)
        case InnerStage.NATIVE:
            return _native_stage(hosts, place, span)
        case _:
            return _leader_stage(hosts, place, me, span)


def _leader_stage(hosts: Hosts, place: int, me: int, span: Span) -> _Stage:
    host = hosts[place]
    up = _pad_rounds(tree.reduce_rounds(host, me, span, host[0]), tree.depth(max(map(len, hosts))))
    return _Stage(up, [host[0] for host in hosts], span, _holder(host), tree.broadcast_rounds(host, me, span, host[0]))


def _lanes_stage(hosts: Hosts, place: int, me: int, span: Span) -> _Stage:
    host = hosts[place]
    shares = pieces(span, len(host))
    column = host.index(me)
    heads = [host[column] for host in hosts]
    up, down = ring.reduce_scatter_rounds(host, me, shares), ring.all_gather_rounds(host, me, shares)
    return _Stage(up, heads, shares[column], _holder(host), down)


def _server_stage(hosts: Hosts, place: int, me: int, span: Span, servers: Sequence[int]) -> _Stage:
    host, server = hosts[place], servers[place]
    longest = max(len({*host, server}) - 1 for host, server in zip(hosts, servers, strict=True))
    up = _pad_rounds(shuffle.reduce_to_servers(host, me, span, (server,)), longest)
    down = shuffle.gather_from_servers(host, me, span, (server,))
    return _Stage(up, servers, span, shuffle.holder(host, server), down)


def _native_stage(hosts: Hosts, place: int, span: Span) -> _Stage:
    host = hosts[place]
    members, leader = tuple(sorted(host)), host[0]
    up: WideRound = (NativeMove(NativeKind.REDUCE, members, span, leader),) if len(host) > 1 else ()
    down: WideRound = (NativeMove(NativeKind.BROADCAST, members, span, leader),) if len(host) > 1 else ()
    return _Stage([up], [host[0] for host in hosts], span, _holder(host), [down])


def _holder(host: Sequence[int]) -> Buffer:
    return Buffer.SCRATCH if len(host) > 1 else Buffer.INPUT


def _pad_rounds(rounds: Iterable[WideRound], length: int) -> Iterator[WideRound]:
    count = 0
    for moves in rounds:
        count += 1
        yield moves
    yield from idle_rounds(length - count)


def _substitute_members(rounds: Iterable[WideRound], names: Mapping[int, int], holder: Buffer) -> Iterator[WideRound]:
    """The same rounds for those who stand in for others and hold their contribution in `holder`."""
    instead = {Buffer.INPUT: holder, Buffer.SCRATCH: Buffer.SCRATCH, Buffer.OUTPUT: Buffer.OUTPUT}

    def renamed(move: WideMove) -> WideMove:
        match move:
            case SendMove(peer, span, source):
                return SendMove(names[peer], span, instead[source])
            case RecvMove(peer, span, target, fold):
                return RecvMove(names[peer], span, target, fold and FoldMove(instead[fold.mine], fold.received_left))
            case FinishMove(span, source):
                return FinishMove(span, instead[source])
            case CollectMove(order, span, mine):
                return CollectMove(tuple(names[member] for member in order), span, instead[mine])
            case NativeMove():
                raise ValueError("an engine does not work on behalf of hosts")

    for moves in rounds:
        yield tuple(renamed(move) for move in moves)
