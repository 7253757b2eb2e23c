"""Plays a scenario file: commands to the coordinator's mind, dashes, and the effects that follow.

    # What this file shows.
    0.0 attach 0 a
    ----
    0 <- welcome

A command may begin with a time; until then the clock goes from one wake-up to the next, as the shell would, and what
happens on the way is shown under `@time`. Generations are called g1, g2, … and queries q1, q2, … as they appear.

    attach TASK HOST [inc=X] [epoch=N] [group=gN:RANKS[:vN+vM]]… [idle=yes] [speaks=N-M]
                                      a worker says hello; vN: verdicts as they appeared; idle: of all these groups
    gone TASK [inc=X] [orderly]       beat TASK [gN POSITION… [more]]       wait
    join TASK REQUEST NAME SIZE [rank=N] [pid=N] [device=CPU:0] [settle=S] [label=X]       SIZE: 4 or 2-4
         … [last=N] [idle=yes]
    cancel TASK REQUEST [reason]
    contract NAME = OPERATION | STRUCTURE | PATH=LEAF; … | SITE [| bytes_per_pack=N]       "what comes": an open one
    report TASK gN KIND [#INSTANCE] [rank=N] [worker=N] [peer=N] [timeout=S] [text=…] POSITION…
         … [last=N:CONTRACT,…]        of a rank that has gone        [cause=NAME]
    promise TASK pN #INSTANCE [next=N]  nothing starts from that one on; N: the first that nobody there has submitted
    drain WHO REQUEST TIMEOUT [stay]   WHO: a task, host=H or group=G
    drained TASK REQUEST [gN#INSTANCE[:OPERATION[:RANK,…]]]…         what was cut; RANK: had not come
    answer TASK qN POSITION…          POSITION: RANK:SUBMITTED/FINISHED[=CONTRACT][@SITE][~STACK], with _ for spaces
    tune [NAME = ROWS]                a new coordinator that measures links; stored ROWS are LIMIT:ALGORITHM …
    measured TASK gN PEER LATENCY BANDWIDTH [text=…]        in seconds and bytes per second
    restart EPOCH                     a new coordinator with an empty mind
    sleep TIME                        the coordinator itself is stopped until then
    logs LEVEL                        show log lines from this level on (at first: warning)
    status
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from collectived_proto.cause import Cause
from collectived_proto.errors import Code
from collectived_proto.types import (
    AllGather,
    AllReduce,
    Barrier,
    Broadcast,
    Collective,
    CommunicationImplementation,
    Compression,
    DType,
    GroupInfo,
    Leaf,
    Operation,
    RankPosition,
    ReduceOp,
    Report,
    ReportKind,
    Submission,
    Tier,
    Verdict,
)
from collectived_proto.version import VersionRange
from collectived_runtime.coordinator.core.coordinator import Coordinator
from collectived_runtime.coordinator.core.events import (
    AbandonedCollective,
    AttachedGroup,
    Disconnect,
    DrainDone,
    DrainOrder,
    DrainRequested,
    Effect,
    Event,
    FaultReported,
    Heartbeat,
    JoinAsk,
    JoinAsked,
    JoinCancelled,
    JoinDone,
    JoinRefused,
    JoinUpdate,
    LinkMeasured,
    Log,
    MeasureLink,
    Message,
    PositionQuery,
    Promised,
    Propose,
    QueryAnswered,
    SaveTable,
    SendToWorker,
    Shutdown,
    Tick,
    WaitingCount,
    Welcome,
    WorkerAttached,
    WorkerDetached,
    WorkerDrained,
    WorkerHello,
)
from collectived_runtime.coordinator.status import take_snapshot

_LEVELS = ("debug", "info", "warning", "error")
_POSITION = re.compile(r"(\d+):(-?\d+)/(-?\d+)(?:=(\w+))?(?:@([^\s~]+))?(?:~(\S+))?$")


@dataclass
class Player:
    mind: Coordinator = field(default_factory=lambda: Coordinator(1_000))
    now: float = 0.0
    level: str = "warning"
    names: dict[tuple[str, int], str] = field(default_factory=dict)
    groups: dict[str, GroupInfo] = field(default_factory=dict)
    queries: dict[str, PositionQuery] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    contracts: dict[str, Collective] = field(default_factory=dict)
    shows_tables: bool = False

    def play(self, command: str) -> list[str]:
        """One command; the lines that it leads to."""
        time, _, rest = command.partition(" ")
        if not re.fullmatch(r"\d+(\.\d+)?", time):
            return list(self._command(command))
        lines = list(self._advance(float(time)))
        return lines + list(self._command(rest))

    def _advance(self, until: float) -> Iterator[str]:
        while (due := self.mind.next_deadline()) is not None and due <= until:
            self.now = max(due, self.now)
            lines = list(self._show(self.mind.step(Tick(), self.now)))
            if lines:
                yield f"@{self.now:g}"
                yield from lines
        self.now = until

    def _command(self, command: str) -> Iterator[str]:
        verb, _, rest = command.partition(" ")
        match verb:
            case "wait":
                return
            case "contract":
                self._contract(rest)
            case "logs":
                self.level = rest
            case "sleep":
                self.now = float(rest)
                yield from self._show(self.mind.step(Tick(), self.now))
            case "restart":
                self.mind = Coordinator(int(rest))
            case "tune":
                name, _, rows = rest.partition(" = ")
                stored = {name: tuple(_tier(row) for row in rows.split())} if rows else {}
                self.mind = Coordinator(1_000, tune=True, stored=stored)
                self.shows_tables = True
            case "status":
                yield from self._status()
            case _:
                yield from self._show(self.mind.step(self._event(verb, shlex.split(rest)), self.now))

    # Commands

    def _event(self, verb: str, words: list[str]) -> Event:
        if verb == "drain":
            return _drain(words)
        task = int(words[0])
        given = dict(word.split("=", 1) for word in words if re.match(r"[a-z]+=", word))
        match verb:
            case "attach":
                brought = self._brought(words)
                listed = frozenset(one.group.generation for one in brought)
                return WorkerAttached(self._hello(task, words), groups=brought, generations=listed)
            case "gone":
                return WorkerDetached(task, given.get("inc", f"i{task}"), "its stream broke", "orderly" in words)
            case "beat":
                standings = ((self.groups[words[1]].generation, self._positions(words[2:], -1)),) if words[2:] else ()
                return Heartbeat(task, standings, "more" in words)
            case "join":
                return JoinAsked(task, _ask(task, words, given))
            case "cancel":
                return JoinCancelled(task, words[1], " ".join(words[2:]))
            case "report":
                return FaultReported(task, self._report(words, given))
            case "measured":
                generation = next(number for (_, number), name in self.names.items() if name == words[1])
                link = (int(words[2]), float(words[3]), float(words[4]))
                return LinkMeasured(task, generation, *link, given.get("text", ""))
            case "promise":
                proposal = next(number for (_, number), name in self.names.items() if name == words[1])
                return Promised(task, proposal, int(words[2].removeprefix("#")), int(given.get("next", 0)))
            case "drained":
                return WorkerDrained(task, int(words[1]), tuple(self._cut(task, word) for word in words[2:]))
            case "answer":
                query = self.queries[words[1]]
                return QueryAnswered(task, query.query, self._positions(words[2:], query.instance))
        raise ValueError(f"unknown command {verb!r}")

    def _cut(self, task: int, word: str) -> AbandonedCollective:
        place, op, ranks, *_ = [*word.split(":"), "", ""]
        name, _, instance = place.partition("#")
        missing = tuple(int(rank) for rank in ranks.split(",") if rank)
        return AbandonedCollective(self.groups[name].generation, int(instance), op, "", task, missing)

    def _hello(self, task: int, words: list[str]) -> WorkerHello:
        given = dict(word.split("=", 1) for word in words if "=" in word)
        epoch = int(given.get("epoch", 0))
        incarnation = given.get("inc", f"i{task}")
        hello = WorkerHello(task, incarnation, words[1], 100 + task, (), "", f"{words[1]}:7452", epoch)
        return replace(hello, versions=_versions(given.get("speaks", "1-1")))

    def _brought(self, words: list[str]) -> tuple[AttachedGroup, ...]:
        brought = [self._attached(word.removeprefix("group=")) for word in words if word.startswith("group=")]
        return tuple(replace(group, idle="idle=yes" in words) for group in brought)

    def _attached(self, text: str) -> AttachedGroup:
        name, ranks, *verdicts = text.split(":")
        chosen = [self.verdicts[int(v.removeprefix("v")) - 1] for v in verdicts[0].split("+")] if verdicts else []
        return AttachedGroup(self.groups[name], tuple(map(int, ranks.split(","))), tuple(chosen))

    def _report(self, words: list[str], given: dict[str, str]) -> Report:
        number = next((int(word[1:]) for word in words if re.fullmatch(r"#-?\d+", word)), -1)
        group = self.groups.get(words[1])
        return Report(
            group.key if group else 0,
            group.generation if group else 1,
            ReportKind[words[2]],
            number,
            int(given.get("rank", 0)),
            int(given.get("worker", 0)),
            given.get("text", ""),
            float(given.get("timeout", 0)),
            self._positions(words[3:], number),
            int(given.get("peer", 0)),
            tuple(self._submission(*one.split(":")) for one in given["last"].split(",")) if "last" in given else (),
            Cause[given.get("cause", "UNSPECIFIED")],
        )

    def _submission(self, instance: str, contract: str) -> Submission:
        collective = self.contracts[contract]
        digest = hashlib.sha256(collective.contract().encode()).digest()
        return Submission(int(instance), str(collective.operation), collective.site, digest, collective)

    def _positions(self, words: list[str], instance: int) -> tuple[RankPosition, ...]:
        matches = [match for match in map(_POSITION.match, words) if match]
        return tuple(self._position(match, instance) for match in matches)

    def _position(self, match: re.Match[str], instance: int) -> RankPosition:
        rank, submitted, finished = (int(match[number]) for number in (1, 2, 3))
        collective = self.contracts[match[4]] if match[4] else None
        op = "" if submitted < 0 else str(collective.operation) if collective else "all_reduce(sum)"
        site = "" if submitted < 0 else match[5] or (collective.site if collective else "train.py:88")
        position = RankPosition(rank, submitted, finished, op, site, stack=(match[6] or "").replace("_", " "))
        if submitted < instance:
            return position
        digest = hashlib.sha256(collective.contract().encode()).digest() if collective else b""
        return replace(position, arrived=True, op=op, site=site, contract=digest, collective=collective)

    def _contract(self, text: str) -> None:
        name, _, rest = text.partition(" = ")
        operation, structure, leaves, site, *options = (part.strip() for part in rest.split("|"))
        given = dict(option.split("=") for option in options)
        parsed = [leaf.strip().rpartition("=") for leaf in leaves.split(";") if leaf.strip()]
        self.contracts[name] = Collective(
            _operation(operation),
            structure,
            tuple(_leaf(path, what) for path, _, what in parsed),
            int(given.get("bytes_per_pack", 0)),
            CommunicationImplementation(given.get("implementation", "AUTO")),
            site,
            open=structure == "what comes",
            compression=Compression(given.get("compression", "none")),
        )

    # Effects

    def _show(self, effects: list[Effect]) -> Iterator[str]:
        """One line each; the same message to several workers is one line."""
        pending: list[tuple[list[str], Message]] = []
        for effect in effects:
            if isinstance(effect, SendToWorker):
                if pending and pending[-1][1] == effect.message:
                    pending[-1][0].append(str(effect.task))
                else:
                    pending.append(([str(effect.task)], effect.message))
                continue
            yield from self._sent(pending)
            pending.clear()
            yield from self._other(effect)
        yield from self._sent(pending)

    def _sent(self, pending: list[tuple[list[str], Message]]) -> Iterator[str]:
        for tasks, message in pending:
            yield f"{', '.join(tasks)} <- {self._message(message)}"

    def _other(self, effect: Effect) -> Iterator[str]:
        match effect:
            case Log(level, text) if _LEVELS.index(level) >= _LEVELS.index(self.level):
                yield f"{level}: {text}"
            case Disconnect(task, incarnation, code, why):
                yield f"drop {task}/{incarnation} {code.name}: {why}"
            case SaveTable(name, table):
                yield f"store {name}: {_table(table)}"
            case Shutdown(why):
                yield f"end: {why}"
            case DrainDone(request, workers, groups, cut, notes, error):
                what = [f"workers {' '.join(map(str, workers))}"] if workers else []
                what += [f"groups {' '.join(groups)}"] if groups else []
                what += [f"cut {one.group}#{one.instance} {one.op} missing {list(one.missing)}" for one in cut]
                yield f"drained {request}: {error or ', '.join([*what, *notes])}"

    def _message(self, message: Message) -> str:
        match message:
            case Welcome():
                return "welcome"
            case JoinUpdate(request, present, expected, text):
                return f"update {request} {present}/{expected}: {text}"
            case JoinDone(request, group, rank, peers, table, idle):
                self.groups[self._name("g", group.generation)] = group
                where = " ".join(f"{peer.task}/{peer.incarnation}={','.join(map(str, peer.ranks))}" for peer in peers)
                done = f"done {request} {self._name('g', group.generation)} rank {rank}/{group.size}, workers {where}"
                if any(member.last_instance >= 0 for member in group.members):
                    done += f", had finished {' '.join(str(member.last_instance) for member in group.members)}"
                if idle:
                    done += ", idle"
                return f"{done}, {_table(table)}" if self.shows_tables else done
            case JoinRefused(request, code, text):
                return f"refused {request} {code.name}: {text}"
            case PositionQuery(_, generation, instance, query):
                name = self._name("q", query) if query else "unheard"
                self.queries[name] = message
                return f"query {name} {self._name('g', generation)} #{instance}"
            case MeasureLink(generation, peer, address):
                return f"measure {self._name('g', generation)}: the link to {peer} at {address}"
            case Propose(_, generation, proposal):
                return f"propose {self._name('p', proposal)} {self._name('g', generation)}"
            case WaitingCount(_, generation, proposal, from_instance, waiting):
                agreed = f"{waiting} waiting from #{from_instance}" if from_instance >= 0 else "withdrawn"
                return f"newcomers {self._name('p', proposal)} {self._name('g', generation)}: {agreed}"
            case DrainOrder(request, timeout, generations, leave, stay):
                names = " ".join(self._name("g", generation) for generation in generations)
                end = " and stay" if stay else " and end" if leave else ""
                return f"drain {request} within {timeout:g} s: {names}{end}"
            case Verdict():
                return self._verdict(message)

    def _verdict(self, verdict: Verdict) -> str:
        if verdict not in self.verdicts:
            self.verdicts.append(verdict)
        parts = [f"from #{verdict.from_instance}"]
        if verdict.instance >= 0:
            parts.append(f"at #{verdict.instance} {verdict.op}".rstrip())
        if verdict.missing:
            parts.append(f"missing {','.join(str(member.rank) for member in verdict.missing)}")
        if verdict.differing:
            parts.append(f"differing {','.join(str(member.rank) for member in verdict.differing)}")
        if verdict.members:
            parts.append(f"finished {' '.join(str(member.last_instance) for member in verdict.members)}")
        generation = self._name("g", verdict.generation)
        if verdict.successor:
            successor = self._name("g", verdict.successor)
            parts.append(f"successor {successor}")
            self.groups[successor] = replace(self.groups[generation], generation=verdict.successor)
        if verdict.orderly:
            parts.append("orderly")
        text = verdict.message.replace("\n", "\n    ")
        cause = verdict.cause.name + (f" by {verdict.origin}" if verdict.origin is not None else "")
        return f"verdict {generation} {Code(verdict.code).name} ({cause}) {', '.join(parts)}\n  {text}"

    def _name(self, prefix: str, number: int) -> str:
        count = sum(1 for known, _ in self.names if known == prefix)
        return self.names.setdefault((prefix, number), f"{prefix}{count + 1}")

    def _status(self) -> Iterator[str]:
        view = take_snapshot(self.mind.registry, self.now)
        for worker in view.workers:
            state = "connected" if worker.connected else "disconnected"
            yield f"worker {worker.hello.task}/{worker.hello.incarnation} {state}, silent {worker.silent_seconds:g} s"
        for group in view.groups:
            name = self._name("g", group.generation) if group.generation else "-"
            ranks = " ".join(f"{member.rank}:{member.last_instance}" for member in group.members)
            left = f", left {' '.join(str(member.rank) for member in group.left)}" if group.left else ""
            waiting = f", {group.waiting_for}" if group.waiting_for else ""
            yield f"group {group.name} {name} {group.state}, size {group.size}, ranks {ranks}{left}{waiting}"
            for pending in group.pending:
                yield (
                    f"  pending #{pending.instance} {pending.op} at {pending.site} for {pending.seconds:g} s, "
                    f"arrived {list(pending.arrived)}, missing {list(pending.missing)}"
                )
        for failure in view.failures:
            yield f"failure {failure.seconds_ago:g} s ago: {Code(failure.verdict.code).name} {failure.verdict.message}"


def _drain(words: list[str]) -> DrainRequested:
    who, request, timeout = words[:3]
    kind, _, name = who.rpartition("=")
    return DrainRequested(
        int(request),
        float(timeout),
        task=-1 if kind else int(who),
        host=name if kind == "host" else "",
        group=name if kind == "group" else "",
        stay="stay" in words,
    )


def _ask(task: int, words: list[str], given: dict[str, str]) -> JoinAsk:
    request, name, size = words[1:4]
    low, _, high = size.partition("-")
    return JoinAsk(
        request,
        name,
        int(low),
        int(high or low),
        float(given.get("settle", 0)),
        int(given["rank"]) if "rank" in given else None,
        f"/job:worker/replica:0/task:{task}/device:{given.get('device', 'CPU:0')}",
        given.get("host", f"h{task}"),
        int(given.get("pid", 10 * (task + 1))),
        given.get("label", ""),
        int(given.get("last", -1)),
        given.get("idle") == "yes",
    )


def _tier(text: str) -> Tier:
    limit, _, algorithm = text.partition(":")
    return Tier(algorithm, limit=int(limit))


def _table(table: tuple[Tier, ...]) -> str:
    return f"{'; '.join(map(str, table))}; packs of {table[0].bytes_per_pack >> 20} MiB"


def _versions(text: str) -> VersionRange:
    lowest, highest = map(int, text.split("-"))
    return VersionRange(lowest, highest)


def _operation(text: str) -> Operation:
    if text == "barrier()":
        return Barrier()
    if text.startswith("all_gather"):
        return AllGather(int(text.removeprefix("all_gather(axis=").removesuffix(")")))
    if text.startswith("broadcast"):
        return Broadcast(int(text.removeprefix("broadcast(root=").removesuffix(")")))
    return AllReduce(ReduceOp(text.removeprefix("all_reduce(").removesuffix(")")))


def _leaf(path: str, what: str) -> Leaf:
    kind, _, shape = what.removesuffix("]").partition("[")
    return Leaf(path, DType[kind.upper()], tuple(int(length) for length in shape.split(",") if length))
