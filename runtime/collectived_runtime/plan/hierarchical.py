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
from collectived_runtime.plan.collect import Collect, Kind, Native, WideMove, WidePlan, WideRound
from collectived_runtime.plan.moves import Buffer, Finish, Fold, Recv, Send, Span
from collectived_runtime.plan.spans import idle, pieces, without_idle_moves

Flat = Callable[[Sequence[int], int, Span], Iterable[WideRound]]
Hosts = Sequence[Sequence[int]]


class Inside(enum.Enum):
    LEADER = "leader"
    LANES = "lanes"
    SERVER = "server"
    NATIVE = "native"


def all_reduce(
    hosts: Hosts,
    me: int,
    span: Span,
    across: Flat = ring.all_reduce,
    inside: Inside = Inside.LEADER,
    servers: Sequence[int] = (),
) -> WidePlan:
    """Every participant of every host ends with the fold of all contributions.

    Args:
        hosts: who contributes, host by host.
        me: one of them, or one of `servers`.
        span: what is reduced.
        across: the algorithm between hosts.
        inside: the inner stage.
        servers: for SERVER, one participant per host that may or may not contribute.
    """
    return tuple(all_reduce_rounds(hosts, me, span, across, inside, servers))


def all_reduce_rounds(
    hosts: Hosts, me: int, span: Span, across: Flat, inside: Inside = Inside.LEADER, servers: Sequence[int] = ()
) -> Iterator[WideRound]:
    place = next(n for n, host in enumerate(hosts) if me in host or (servers and servers[n] == me))
    stage = _stage(hosts, place, me, span, inside, servers)
    # The partial sum of a host stands where its lowest contribution says, whoever holds it.
    lowest = tuple(min(host) for host in hosts)
    rounds: Iterable[WideRound]
    if me in stage.heads:
        rounds = across(lowest, lowest[place], stage.piece)
        rounds = _on_behalf(rounds, dict(zip(lowest, stage.heads, strict=True)), stage.holder)
    else:
        rounds = idle(_length(across, lowest, lowest[place], stage.piece))
    return without_idle_moves(chain(stage.up, rounds, stage.down))


@lru_cache(maxsize=64)
def _length(across: Flat, members: Sequence[int], me: int, span: Span) -> int:
    """Rounds that the others of a host wait while one of them takes part across; the same for all of them."""
    return sum(1 for _ in across(members, me, span))


@dataclass(frozen=True, slots=True)
class _Stage:
    """What one participant does on its own host; `heads`, one per host, hold `piece` in `holder` in between."""

    up: Iterable[WideRound]
    heads: Sequence[int]
    piece: Span
    holder: Buffer
    down: Iterable[WideRound]


def _stage(hosts: Hosts, place: int, me: int, span: Span, inside: Inside, servers: Sequence[int]) -> _Stage:
    even = len({len(host) for host in hosts}) == 1
    match inside:
        case Inside.SERVER:
            return _served(hosts, place, me, span, servers)
        case Inside.LANES if even:
            return _in_lanes(hosts, place, me, span)
        case Inside.NATIVE:
            return _by_engine(hosts, place, span)
        case _:
            return _led(hosts, place, me, span)


def _led(hosts: Hosts, place: int, me: int, span: Span) -> _Stage:
    host = hosts[place]
    up = _padded(tree.fold_up(host, me, span, host[0]), tree.depth(max(map(len, hosts))))
    return _Stage(up, [host[0] for host in hosts], span, _holder(host), tree.pass_down(host, me, span, host[0]))


def _in_lanes(hosts: Hosts, place: int, me: int, span: Span) -> _Stage:
    host = hosts[place]
    shares = pieces(span, len(host))
    lane = host.index(me)
    heads = [host[lane] for host in hosts]
    up, down = ring.fold_around(host, me, shares), ring.pass_around(host, me, shares)
    return _Stage(up, heads, shares[lane], _holder(host), down)


def _served(hosts: Hosts, place: int, me: int, span: Span, servers: Sequence[int]) -> _Stage:
    host, server = hosts[place], servers[place]
    longest = max(len({*host, server}) - 1 for host, server in zip(hosts, servers, strict=True))
    up = _padded(shuffle.fold_onto(host, me, span, (server,)), longest)
    down = shuffle.pass_back(host, me, span, (server,))
    return _Stage(up, servers, span, shuffle.holder(host, server), down)


def _by_engine(hosts: Hosts, place: int, span: Span) -> _Stage:
    host = hosts[place]
    members, leader = tuple(sorted(host)), host[0]
    up: WideRound = (Native(Kind.REDUCE, members, span, leader),) if len(host) > 1 else ()
    down: WideRound = (Native(Kind.BROADCAST, members, span, leader),) if len(host) > 1 else ()
    return _Stage([up], [host[0] for host in hosts], span, _holder(host), [down])


def _holder(host: Sequence[int]) -> Buffer:
    return Buffer.SCRATCH if len(host) > 1 else Buffer.INPUT


def _padded(rounds: Iterable[WideRound], length: int) -> Iterator[WideRound]:
    count = 0
    for moves in rounds:
        count += 1
        yield moves
    yield from idle(length - count)


def _on_behalf(rounds: Iterable[WideRound], names: Mapping[int, int], holder: Buffer) -> Iterator[WideRound]:
    """The same rounds for those who stand in for others and hold their contribution in `holder`."""
    instead = {Buffer.INPUT: holder, Buffer.SCRATCH: Buffer.SCRATCH, Buffer.OUTPUT: Buffer.OUTPUT}

    def renamed(move: WideMove) -> WideMove:
        match move:
            case Send(peer, span, source):
                return Send(names[peer], span, instead[source])
            case Recv(peer, span, target, fold):
                return Recv(names[peer], span, target, fold and Fold(instead[fold.mine], fold.received_left))
            case Finish(span, source):
                return Finish(span, instead[source])
            case Collect(order, span, mine):
                return Collect(tuple(names[member] for member in order), span, instead[mine])
            case Native():
                raise ValueError("an engine does not work on behalf of hosts")

    for moves in rounds:
        yield tuple(renamed(move) for move in moves)
